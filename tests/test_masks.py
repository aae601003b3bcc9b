"""Action masks in ppo_multidiscrete.py, on tasks of EnvPool's Jumanji that come with them."""

import contextlib
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import robot_warehouse
from conftest import TINY, load_script

NAME = "ppo_multidiscrete"


@pytest.fixture
def script():
    return load_script(NAME)


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@contextlib.contextmanager
def counting():
    """How many allowed and forbidden choices are played meanwhile."""
    robot_warehouse.PLAYED.update(allowed=0, forbidden=0)
    played = {}
    yield played
    played.update(robot_warehouse.PLAYED)


def unmasked(env_id: str) -> str:
    return env_id.replace("-", "Unmasked-")


def random_action(env: gym.Env, rng: np.random.Generator) -> list[int]:
    return [rng.choice(np.flatnonzero(allowed)) for allowed in env.unwrapped.allowed]


# --- the environments


@pytest.mark.parametrize(
    ("env_id", "choices"), [("RobotWarehouse-v0", [5] * 4), ("Cleaner-v0", [4] * 3)]
)
def test_one_environment_at_a_time(env_id, choices):
    env, rng = gym.make(f"robot_warehouse:{env_id}"), np.random.default_rng(0)
    assert env.action_space == gym.spaces.MultiDiscrete(choices)
    obs, info = env.reset(seed=3)
    for _ in range(250):
        assert obs.shape == (84, 84, 3) and obs.dtype == np.uint8 and obs.any()
        mask = info["action_mask"]
        assert mask.shape == (sum(choices),) and mask.dtype == bool
        assert np.array_equal(mask, env.unwrapped.allowed.flatten())
        last = obs
        obs, _, terminated, truncated, info = env.step(random_action(env, rng))
        if terminated or truncated:
            obs, info = env.reset()
        else:
            assert not np.array_equal(obs, last) or env_id != "Cleaner-v0"
    obs, _ = env.reset(seed=3)
    assert np.array_equal(env.reset(seed=3)[0], obs)

    # the first step behind a reset is a step, and a forbidden choice ends the episode
    for _ in range(2):
        env.reset()
        action = random_action(env, rng)
        part = int(np.flatnonzero(~env.unwrapped.allowed.all(axis=1))[0])
        action[part] = int(np.flatnonzero(~env.unwrapped.allowed[part])[0])
        with counting() as played:
            assert env.step(action)[2]
        assert played == {"allowed": len(choices) - 1, "forbidden": 1}
    assert "action_mask" not in gym.make(f"robot_warehouse:{unmasked(env_id)}").reset()[1]


def test_masks_of_another_size_or_type_are_refused(script):
    obs_space, action_space = gym.spaces.Box(0, 255, (8, 8, 3), np.uint8), gym.spaces.MultiBinary(3)
    env = SimpleNamespace(observation_space=obs_space, action_space=action_space)
    for mask, fits in (
        (np.ones(6, dtype=bool), True),
        (np.ones(5, dtype=bool), False),
        (np.ones((3, 2), dtype=bool), False),
        (np.ones(6, dtype=np.int8), False),
    ):
        env.reset = lambda seed, mask=mask: (None, {"action_mask": mask})
        problem = script.wrong_space(env)
        assert problem is None if fits else "must be an array of 6 bools" in problem


# --- training


@pytest.mark.parametrize("env_id", ["RobotWarehouse-v0", "Cleaner-v0"])
def test_no_forbidden_choice_is_ever_played(env_id, script):
    for name, masked in ((env_id, True), (unmasked(env_id), False)):
        sizes = TINY[NAME] | {"eval_episodes": 0, "run_dir": name}
        with counting() as played:
            script.train(script.Args(env_id=f"robot_warehouse:{name}", **sizes))
        assert sum(played.values()) == sizes["total_timesteps"] * (4 if "Robot" in name else 3)
        assert (played["forbidden"] == 0) == masked
        with counting() as played:
            args = script.parse(["--evaluate", name, "--eval-episodes", "2"])
            assert len(script.evaluate(args, script.load("evaluate", name))) == 2
        assert played["allowed"] > 0
        assert (played["forbidden"] == 0) == masked


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_masks_help_to_learn(script):
    """Cleaner pays 1 for a tile and takes 0.5 for a step; a forbidden choice ends the episode.

    The random player gets about 5 with masks and 0.5 without.
    """
    returns = {}
    for name in ("Cleaner-v0", "CleanerUnmasked-v0"):
        for seed in (1, 2):
            steps = {"total_timesteps": 10_240, "reward_scale": 0.1, "eval_episodes": 0}
            run = {"env_id": f"robot_warehouse:{name}", "seed": seed, "run_dir": f"{name}-{seed}"}
            returns[name, seed] = script.train(script.Args(**run, **steps))["return_last100"]
    print(returns)
    for seed in (1, 2):
        assert returns["Cleaner-v0", seed] > returns["CleanerUnmasked-v0", seed] + 3, returns
