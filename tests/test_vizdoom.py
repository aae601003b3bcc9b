"""Real ViZDoom in ppo_multidiscrete.py: its buttons, its rewards, its videos and its processes.

And its environments in appo_async.py.
"""

import math
import os
import signal

import cv2
import gymnasium as gym
import numpy as np
import pytest
import test_faults
import torch
from conftest import TINY, load_script
from test_faults import PATIENCE, checkpoint, patience, saved, session, wait_for

start = test_faults.start  # the fixture
NAME = "ppo_multidiscrete"
BUTTONS = {
    "VizdoomBasic-v1": 3,
    "VizdoomDeadlyCorridor-v1": 7,
    "VizdoomHealthGathering-v1": 3,
}


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # ViZDoom leaves files where it runs


@pytest.fixture
def script():
    return load_script(NAME)


def tiny(script, env_id: str, **changes):
    return script.Args(
        env_id=env_id, **(TINY[NAME] | {"run_dir": "run", "eval_episodes": 0} | changes)
    )


@pytest.mark.parametrize(("env_id", "buttons"), BUTTONS.items())
def test_every_button_is_a_part(env_id, buttons, script):
    env = gym.make(env_id)
    assert env.action_space == gym.spaces.MultiDiscrete([2] * buttons)
    env.reset(seed=0)
    times = []
    for _ in range(3):
        env.step(env.action_space.sample())
        times.append(env.unwrapped.game.get_episode_time())
    assert np.array_equal(np.diff(times), [4, 4])  # frames to an action
    env.close()

    result = script.train(tiny(script, env_id))
    assert result["steps"] == 32
    weights = script.load("resume", "run")["agent"]
    assert weights["actor.weight"].shape == (2 * buttons, 512)
    assert all(weight.isfinite().all() for weight in weights.values())


def test_in_processes_of_their_own(start, tmp_path):
    """--vector-mode async; both scenarios at once, for most of the time goes into starting."""
    sizes = [f"--{key.replace('_', '-')}={value}" for key, value in TINY[NAME].items()]
    options = [*sizes, "--eval-episodes", 0, "--vector-mode", "async"]
    # ViZDoom makes this folder, and fails if another run has made it in the same moment
    (tmp_path / "_vizdoom").mkdir()
    processes = {
        env_id: start(NAME, "--env-id", env_id, "--run-dir", env_id, *options)
        for env_id in ("VizdoomDeadlyCorridor-v1", "VizdoomHealthGathering-v1")
    }
    for env_id, process in processes.items():
        _, stderr = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, stderr
        assert checkpoint(NAME, tmp_path / env_id)["global_step"] == 32
        wait_for(
            lambda process=process: not session(process), "end of all workers", timeout=patience(10)
        )


def test_rewards_are_scaled_and_scores_are_not(script, monkeypatch):
    """An episode of Basic is over after 75 actions, or earlier."""
    plain_gae, plain_finished = script.compute_gae, script.finished_episodes
    rollouts, episodes = [], []

    def compute_gae(rewards, values, dones, next_value, next_done, *args):
        rollouts.append((rewards.clone(), torch.cat((dones[1:], next_done[None].float()))))
        return plain_gae(rewards, values, dones, next_value, next_done, *args)

    def finished_episodes(infos):
        ended = list(plain_finished(infos))
        episodes.extend(ended)
        return ended

    monkeypatch.setattr(script, "compute_gae", compute_gae)
    monkeypatch.setattr(script, "finished_episodes", finished_episodes)
    scores = {}
    for scale in (0.01, 1.0):
        episodes.clear()
        sizes = {"num_steps": 80, "total_timesteps": 160, "update_epochs": 1}
        sizes |= {"run_dir": f"scale-{scale}", "reward_scale": scale}
        script.train(tiny(script, "VizdoomBasic-v1", **sizes))
        scores[scale], sums = list(episodes), np.zeros(2)
        rewards, ends = rollouts.pop()
        assert len(episodes) >= 2
        for t in range(80):
            sums += rewards[t].numpy()
            for i in np.flatnonzero(ends[t]):
                _, score, length = episodes.pop(0)
                assert sums[i] == pytest.approx(score * scale, abs=1e-3) and length <= 75
                sums[i] = 0
    # before its first update the agent has played the same games
    assert scores[0.01] == scores[1.0]


def test_evaluation_records_its_first_game(script, tmp_path):
    script.train(tiny(script, "VizdoomBasic-v1"))
    args = script.parse(["--evaluate", "run", "--capture-video", "--eval-episodes", "2"])
    scores = script.evaluate(args, script.load("evaluate", "run"))
    assert len(scores) == 2
    (path,) = tmp_path.glob("run/videos/*.mp4")
    video = cv2.VideoCapture(str(path))
    assert video.get(cv2.CAP_PROP_FPS) == 9  # actions a second, as Doom is played
    assert 2 <= video.get(cv2.CAP_PROP_FRAME_COUNT) <= 76
    shown, frame = video.read()
    assert shown and frame.shape == (240, 320, 3) and frame.std() > 10


@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.slow)])
def test_ctrl_c(mode, start, tmp_path):
    """A terminal sends it to ViZDoom's processes too."""
    sizes = ["--num-envs", 2, "--num-steps", 16, "--num-minibatches", 2]
    process = start(NAME, "--run-dir", "run", "--vector-mode", mode, *sizes)
    wait_for(lambda: saved(tmp_path / "run"), "checkpoint")
    assert len(session(process)) >= 3  # the script, and a process for each game
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert (process.returncode, stderr) == (0, "")
    assert "--resume run" in stdout
    assert checkpoint(NAME, tmp_path / "run")["global_step"] > 0
    wait_for(lambda: not session(process), "end of all processes", timeout=patience(10))


@pytest.mark.parametrize(("env_id", "buttons"), BUTTONS.items())
def test_asynchronous(env_id, buttons):
    """Up to two buttons at a time; in color, four frames to an action; scores are not scaled."""
    script = load_script("appo_async")
    args = script.Args(env_id=env_id, reward_scale=0.01)
    envs, obs = script.make_envs(args, 1, seed=3)
    choices = sum(math.comb(buttons, pressed) for pressed in (0, 1, 2))
    assert envs.single_action_space == gym.spaces.Discrete(choices)
    assert obs.shape == (1, 3, 72, 128) and obs.dtype == np.uint8 and obs.std() > 10
    game = envs.envs[0].unwrapped.game
    assert (game.get_screen_width(), game.get_screen_height()) == (160, 120)
    rng, times, total, ended = np.random.default_rng(0), [], 0.0, []
    while not ended:
        actions = rng.integers(choices, size=1)
        obs, reward, *_, infos = envs.step(actions)
        total += reward[0]
        times.append(game.get_episode_time())
        ended = list(script.finished_episodes(infos))
    envs.close()
    assert set(np.diff(times[:-1])) == {4}
    ((_, score, length),) = ended
    assert length == len(times) and total == pytest.approx(0.01 * score, abs=1e-3)
