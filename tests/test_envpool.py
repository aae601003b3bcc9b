"""EnvPool's environments as envpool_ppo.py learns from them, against pools stepped by hand.

The policy is a function of the picture, so that all that follows can be played again elsewhere.
"""

import csv
import importlib.metadata
import platform
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import cv2
import fake_envpool
import gymnasium as gym
import numpy as np
import pytest
import test_faults
import torch
from conftest import ROOT, load_script, run_forked
from test_details_envpool import make_envs, watch_pools
from test_faults import saved, wait_for
from test_runs import same_state
from toy_envs import ImageClock

start = test_faults.start  # the fixture

SIZES = {"num_envs": 4, "num_steps": 128, "num_minibatches": 4, "update_epochs": 1}
SIZES |= {"total_timesteps": 1024, "eval_episodes": 0, "device": "cpu", "num_threads": 1}


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def script():
    return load_script("envpool_ppo")


def policy(obs, num_actions: int):
    """An action for each picture, which nobody can guess."""
    pixels = torch.as_tensor(obs).flatten(1).double()
    return (pixels @ torch.arange(1.0, 1 + pixels.shape[1]).double() % 101 % num_actions).long()


def use_policy(script):
    """Let the agent of a script act by the policy above."""
    plain = script.Agent.get_action_and_value

    def get_action_and_value(agent, x, action=None):
        if action is None:
            action = policy(x, agent.actor.out_features)
        return plain(agent, x, action)

    script.Agent.get_action_and_value = get_action_and_value


def by_hand(script, args, seed: int, num_steps: int = 10**6, games: int = 10**6):
    """Play in a pool of one environment, whose resets are steps, as EnvPool has them.

    Returns what the agent should see and get: obs, rewards, dones of each step, one more obs and
    done behind them, and for each game its return and length.
    """
    pool = script.make_pool(args, 1, seed, False)
    next_obs, info = pool.reset()
    played = SimpleNamespace(obs=[], rewards=[], dones=[], games=[], lives=0)
    done, score, length = False, 0.0, 0
    while len(played.rewards) < num_steps and len(played.games) < games:
        played.obs.append(next_obs[0].copy())
        played.dones.append(float(done))
        action = policy(next_obs, pool.action_space.n).numpy()
        next_obs, reward, terminated, truncated, info = pool.step(action.astype(np.int32))
        played.rewards.append(float(reward[0]))
        score, length = score + info["reward"][0], length + 1
        if info["terminated"][0] or truncated[0]:
            played.games.append((score, length))
            score, length = 0.0, 0
        if done := terminated[0] or truncated[0]:
            played.lives += 1
            next_obs, junk, *ends, _ = pool.step(np.zeros(1, np.int32))
            assert junk[0] == 0 and not any(ends)
    played.obs.append(next_obs[0].copy())
    played.dones.append(float(done))
    return played


def watch_train(script, **changes) -> SimpleNamespace:
    """Train, and keep all that the rollouts hold: (steps, environments, ...) of everything."""
    seen = SimpleNamespace(obs=[], rewards=[], dones=[], next_done=[], in_flight=[])
    use_policy(script)
    compute_gae, act = script.compute_gae, script.Agent.get_action_and_value
    seen.pools = watch_pools(script)

    def watch_agent(agent, x, action=None):
        if action is None:
            seen.obs.append(x.clone())
        return act(agent, x, action)

    def watch_gae(rewards, values, dones, next_value, next_done, gamma, gae_lambda):
        seen.rewards.append(rewards.clone())
        seen.dones.append(dones.clone())
        seen.next_done.append(next_done.clone())
        seen.in_flight.append([pool.in_flight for pool in seen.pools])
        return compute_gae(rewards, values, dones, next_value, next_done, gamma, gae_lambda)

    args = script.Args(**SIZES | changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script.Agent, "get_action_and_value", watch_agent)
        patch.setattr(script, "compute_gae", watch_gae)
        script.train(args)
    seen.obs = torch.cat(seen.obs).view(-1, args.num_envs, 4, 84, 84)
    seen.rewards, seen.dones = torch.cat(seen.rewards), torch.cat(seen.dones)
    seen.run = script.load("resume", args.run_dir)
    return seen


@pytest.fixture(scope="module")
def one_pool(tmp_path_factory):
    run_dir = str(tmp_path_factory.mktemp("one") / "run")
    return watch_train(load_script("envpool_ppo"), run_dir=run_dir)


@pytest.fixture(scope="module")
def two_pools(tmp_path_factory):
    run_dir = str(tmp_path_factory.mktemp("two") / "run")
    return watch_train(load_script("envpool_ppo"), run_dir=run_dir, async_envs=True, num_threads=2)


@pytest.fixture(scope="module")
def alone():
    """Each of those environments by itself."""
    script = load_script("envpool_ppo")
    return [by_hand(script, script.Args(**SIZES), seed=1 + i, num_steps=256) for i in range(4)]


@pytest.mark.parametrize("halves", ["one_pool", "two_pools"])
def test_every_transition_is_a_real_one(halves, alone, request):
    """What is learned from has no step of a reset in it, neither of a game nor of a life."""
    seen, lost, games = request.getfixturevalue(halves), 0, []
    assert seen.obs.shape == (256, 4, 4, 84, 84)
    for i, played in enumerate(alone):
        assert np.array_equal(seen.obs[:, i], played.obs[:256])
        assert seen.rewards[:, i].tolist() == played.rewards
        assert seen.dones[:, i].tolist() == played.dones[:256]
        assert seen.next_done[-1][i] == played.dones[256]
        lost, games = lost + played.lives, games + played.games
    assert lost > len(games) > 0  # both kinds of ends were there
    assert sorted(seen.run["returns"]) == sorted(score for score, _ in games)


def test_two_pools_learn_what_one_learns(one_pool, two_pools):
    """Each half plays while the other thinks, and nothing else changes."""
    assert (len(one_pool.pools), len(two_pools.pools)) == (1, 2)
    for key in ("obs", "rewards", "dones"):
        assert torch.equal(getattr(one_pool, key), getattr(two_pools, key))
    assert one_pool.run["returns"] == two_pools.run["returns"]


@pytest.mark.parametrize("halves", ["one_pool", "two_pools"])
def test_nothing_is_in_flight_behind_a_rollout(halves, request):
    """No environment runs ahead of the policy, or of the update."""
    seen = request.getfixturevalue(halves)
    assert seen.in_flight == [[0] * len(seen.pools)] * 2


def test_two_runs_of_two_pools_are_the_same(script):
    args = SIZES | {"num_steps": 32, "total_timesteps": 256, "num_threads": 2, "async_envs": True}
    for folder in ("one", "two"):
        script.train(script.Args(**args, run_dir=folder))
    one, two = (script.load("resume", folder) for folder in ("one", "two"))
    assert same_state(one, two)
    assert one["returns"] == two["returns"]


def test_a_part_of_a_pool_comes_in_the_order_asked_for(script):
    pool = script.make_pool(script.Args(num_threads=2), 4, 1, False)
    pool.reset()
    for env_id in ([3, 1], [2], [0, 1, 2, 3], [3, 0]):
        for _ in range(10):
            pool.send(np.zeros(len(env_id), np.int32), np.array(env_id, np.int32))
            *_, info = pool.recv()
            assert info["env_id"].tolist() == env_id


def test_breakout_is_the_game_of_older_versions():
    """CleanRL's results with EnvPool 0.6 are held against ours: the game has to be the same one."""
    command = [sys.executable, ROOT / "benchmarks/peers/envpool_versions.py"]
    played = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    with open(ROOT / "results/envpool_versions.csv", newline="") as file:
        rows = {row["version"]: list(row.values()) for row in csv.DictReader(file)}
    assert rows.keys() >= {"0.6.6", importlib.metadata.version("envpool")}
    for version, row in rows.items():
        if platform.machine() != "x86_64":  # pixels may be averaged in another order
            row[4] = played.split(",")[4]
        assert played.split(",")[1:] == row[1:], version


def test_a_game_that_ends_behind_a_lost_life(script):
    """In RoadRunner the last lives can go in the no-ops behind another: two games, two scores."""
    envs, _, (pool,) = make_envs(script, "RoadRunner-v5", 1, 2)
    rng, scores, full = np.random.default_rng(0), [], pool.infos[0]["lives"][0]
    expected, hidden, score = [], 0, 0.0
    for _ in range(250):
        pool.infos.clear()
        *_, infos = envs.step(rng.integers(envs.single_action_space.n, size=1))
        scores += [score for _, score, _ in script.finished_episodes(infos)]
        played, *reset = pool.infos
        score += played["reward"][0]
        if reset and reset[0]["lives"][0] == full:  # as many as at the start: another game
            expected, score = [*expected, score], 0.0
            hidden += not played["terminated"][0]
    assert scores == expected and hidden > 0


def test_evaluation_plays_whole_games(script):
    """All lives of them, for raw scores, and a film of the first that lasts as long as the game."""
    script.train(script.Args(**SIZES | {"num_steps": 8, "total_timesteps": 32}, run_dir="run"))
    args = script.parse(["--evaluate", "run", "--capture-video", "--eval-episodes", "2"])
    use_policy(script)
    scores = script.evaluate(args, script.load("evaluate", "run"))
    games = [by_hand(script, args, 10**9 + 1 + i, games=1).games[0] for i in range(2)]
    assert sorted(scores) == sorted(score for score, _ in games)
    (path,) = Path("run", "videos").iterdir()
    film, frames, length = cv2.VideoCapture(str(path)), [], games[0][1]
    while (grabbed := film.read())[0]:
        frames.append(grabbed[1])
    assert len(frames) == length
    assert frames[0].shape == (210, 160, 3) and frames[length // 2].max() > 100
    assert any((frame != frames[0]).any() for frame in frames)  # something moves


def test_vizdoom(script):
    """Other games than Atari's: larger pictures, and an action that is a set of buttons."""
    sizes = {"num_envs": 2, "num_steps": 8, "num_minibatches": 2, "total_timesteps": 32}
    script.train(script.Args(env_id="D1Basic-v1", **sizes, run_dir="run", eval_episodes=1))
    run = script.load("resume", "run")
    assert run["global_step"] == 32
    assert len(run["agent"]["actor.weight"]) > 3
    assert len(script.evaluate(script.parse(["--evaluate", "run"]), run)) == 1


def test_kill_resume_and_evaluate(start):
    """As processes: a kill, then the rest of the run, then its games as films."""
    sizes = "--num-envs 2 --num-steps 16 --num-minibatches 2 --update-epochs 1 --async-envs"
    sizes += " --total-timesteps 1000000 --run-dir run --checkpoint-every 0"
    path, here = ROOT / "envpool_ppo.py", {"cwd": Path.cwd()}
    run = start("envpool_ppo", *sizes.split())
    wait_for(lambda: saved(Path("run")) or run.poll() is not None, "checkpoint")
    run.kill()
    assert run.wait() == -signal.SIGKILL
    step = load_script("envpool_ppo").load("resume", "run")["global_step"]
    flags = f"--resume run --stop-at {step + 64}"
    process = run_forked(path, *flags.split(), **here)
    assert (process.returncode, process.stderr) == (0, "")
    assert f"going on after step {step:,}" in process.stdout
    assert load_script("envpool_ppo").load("resume", "run")["global_step"] == step + 64
    flags = "--evaluate run --capture-video --eval-episodes 2"
    process = run_forked(path, *flags.split(), **here)
    assert (process.returncode, process.stderr) == (0, "")
    assert "over 2 games" in process.stdout
    assert len(list(Path("run", "videos").glob("*.mp4"))) == 1


class Cut(ImageClock):
    """A time limit after 6 + i steps, in environment i; pictures tell the time."""

    def __init__(self, render_mode: str | None = None):
        super().__init__(end="truncated")

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.length = 5 + seed
        return super().reset(seed=seed)

    def _obs(self):
        return np.full((4, 84, 84), 20 * self.time, np.uint8)


gym.register("ImageClockCut-v0", Cut)


@pytest.mark.parametrize("halves", [False, True])
def test_a_time_limit_is_valued_by_its_own_last_observation(halves, script, monkeypatch):
    """By that of its own environment, whichever pool it is in, and not by the next first one."""
    rewards, plain = [], script.compute_gae

    def compute_gae(*args):
        rewards.append(args[0].clone())
        return plain(*args)

    monkeypatch.setattr(script, "envpool", fake_envpool)
    monkeypatch.setattr(script, "compute_gae", compute_gae)
    monkeypatch.setattr(script.Agent, "get_value", lambda self, x: x[:, 0, 0, 0].float())
    flags = {"env_id": "ImageClockCut-v0", "num_steps": 16, "num_minibatches": 2, "run_dir": "run"}
    flags |= {"total_timesteps": 64, "bootstrap_truncated": True, "gamma": 0.5}
    script.train(script.Args(**SIZES | flags, async_envs=halves))
    for i, length in enumerate((6, 7, 8, 9)):
        for t in range(16):
            bonus = 0.5 * 20 * length * ((t + 1) % length == 0)
            assert bonus <= rewards[0][t, i] <= bonus + 1, (t, i)


def test_a_game_lasts_108_000_frames(monkeypatch):
    """As published; EnvPool counts agent steps, of four frames."""
    script, options = load_script("envpool_ppo"), {}
    monkeypatch.setattr(script.envpool, "make_gymnasium", lambda *_, **kw: options.update(kw))
    script.make_pool(script.Args(), 1, 1, False)
    assert options["max_episode_steps"] == 108_000 // 4
    assert options["num_threads"] == script.TORCH_THREADS
    script.make_pool(script.Args(num_threads=3), 1, 1, False)
    assert options["num_threads"] == 3


def test_a_game_that_is_cut_off_counts_as_one(script, monkeypatch):
    monkeypatch.setattr(script, "envpool", fake_envpool)
    envs, _ = script.make_envs(script.Args(env_id="ImageClockCut-v0"), 1, 1)
    lengths = []
    for _ in range(13):
        infos = envs.step(np.zeros(1, int))[-1]
        lengths += [length for _, _, length in script.finished_episodes(infos)]
    assert lengths == [6, 6]
