"""What a run does from its first step to its last: repeatable, resumable, complete on the disk."""

import copy
import hashlib
import inspect
import itertools
import json
import math
import os
import platform
import pty
import shutil
import signal
import subprocess
import sys
import termios
import time
from ctypes.util import find_library
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import cv2
import fake_envpool
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT, SCRIPTS, TINY, load_script, run_forked, run_script, sized, source_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from toy_envs import Clock, ContinuousClock, Panel, ToyAtari

METRICS = {
    "charts/episodic_return",
    "charts/episodic_length",
    "charts/SPS",
    "charts/learning_rate",
    "losses/value_loss",
    "losses/policy_loss",
    "losses/entropy",
    "losses/approx_kl",
    "losses/old_approx_kl",
    "losses/clipfrac",
    "losses/explained_variance",
}
ASYNC_METRICS = {f"charts/policy_lag_{name}" for name in ("min", "mean", "max")}
WAITING = {f"charts/waiting_{name}" for name in ("rollout", "policy", "learner")}
RESULT = {"steps", "seconds", "sps", "episodes", "return_last100"}
RESULT |= {"eval_mean", "eval_std", "finished"}


class EvenAtari(ToyAtari):
    """Games of one life and 8 agent steps: all start with the same number of no-ops."""

    NOOPS = int(np.random.default_rng(0).integers(1, 31))

    def __init__(self, render_mode: str | None = None):
        # FIRE and the action after it are held for four frames each
        super().__init__(self.NOOPS + 4 + 4 + 8 * 4, start_lives=1, render_mode=render_mode)

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        self.np_random = np.random.default_rng(0)
        return obs, info


class UnevenAtari(EvenAtari):
    """Games of 8 agent steps where the seed is even, of 24 where it is odd."""

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.frames_per_life = self.NOOPS + 4 + 4 + (24 if seed % 2 else 8) * 4
        return super().reset(seed=seed)


class Diary(ContinuousClock):
    """A Clock that shows random numbers, and keeps all that did not end an episode."""

    pages: tuple = ()  # a list while a test reads along

    def __init__(self, render_mode: str | None = None):
        super().__init__(length=5)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)

    def _obs(self):
        obs = self.np_random.normal((3.0, -2.0), (4.0, 0.5))
        if self.time < self.length:
            Diary.pages.append(obs)
        return obs


class TypedClock(Clock):
    """Shows what a Clock shows, in numbers of another type."""

    def __init__(self, dtype: str, render_mode: str | None = None):
        super().__init__()
        self.observation_space = gym.spaces.Box(0, 1, (2,), dtype)

    def _obs(self):
        return super()._obs().astype(self.observation_space.dtype)


class Uneven(Clock):
    """Games of 2 steps where the seed is even, of 20 where it is odd; every step pays 1."""

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.length = 20 if seed % 2 else 2
        return super().reset(seed=seed)

    def step(self, action):
        return super().step(0)


gym.register("EvenAtari-v0", EvenAtari)
gym.register("UnevenAtari-v0", UnevenAtari)
gym.register("Uneven-v0", Uneven)
gym.register("Diary-v0", Diary)
for dtype in ("float64", "int64", "uint8"):
    gym.register(f"{dtype.title()}Clock-v0", TypedClock, kwargs={"dtype": dtype})
gym.register("Generous-v0", ContinuousClock, kwargs={"pay": 500.0})
gym.register("TwoRows-v0", ContinuousClock, kwargs={"shape": (2, 3)})
gym.register("TwoRowsDouble-v0", ContinuousClock, kwargs={"shape": (2, 3), "dtype": "float64"})
gym.register("PanelBinary-v0", Panel, kwargs={"binary": True})
gym.register("PanelInDict-v0", Panel, kwargs={"in_dict": True, "choices": (3, 1, 4)})
# environments whose episodes end exactly with a rollout of 8 or 16 steps
EVEN = {
    "ppo": "toy_envs:Clock-v0",
    "ppo_shared": "toy_envs:Clock-v0",
    "ppo_atari": "EvenAtari-v0",
    "ppo_continuous": "toy_envs:ContinuousClock-v0",
    "ppo_distributed": "EvenAtari-v0",
    "ppo_lstm": "EvenAtari-v0",
    "ppo_multidiscrete": "toy_envs:Panel-v0",
    "envpool_ppo": "ImageClock-v0",  # EnvPool imports no module
    "appo_async": "EvenAtari-v0",
}


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def train(script, run_dir: str | None, **changes) -> dict:
    """Train for a few steps, evaluate only if asked to; returns the last checkpoint."""
    quick = {"env_id": EVEN[script.SCRIPT], "eval_episodes": 0, "run_dir": run_dir}
    args = sized(script.SCRIPT, TINY[script.SCRIPT] | quick | changes)
    if script.SCRIPT == "envpool_ppo":
        script.envpool = fake_envpool  # plays EnvPool's environments and those of the tests
    args = script.Args(**args)
    script.train(args)
    return script.load("resume", args.run_dir)


def resume(script, run_dir: str, *argv: object) -> dict:
    """Go on with a run as the command line would; returns the last checkpoint."""
    script.train(script.parse(["--resume", run_dir, *map(str, argv)]))
    return script.load("resume", run_dir)


def same(a, b) -> bool:
    """Equality of nested dicts and lists of tensors and numbers, to the last bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a.equal(b) if isinstance(a, torch.Tensor) else a == b


def same_state(a: dict, b: dict) -> bool:
    """Are the weights, optimizer, random state and statistics of two checkpoints the same?"""
    keys = {"agent", "optimizer", "rng", "normalizer"} & (a.keys() | b.keys())
    return all(same(a[key], b[key]) for key in keys)


def scalars(run_dir: str) -> dict[str, list[tuple[int, float]]]:
    """All curves of a run but those of the time that it took."""
    events = EventAccumulator(run_dir, size_guidance={"scalars": 0}).Reload()
    tags = set(events.Tags()["scalars"]) - {"charts/SPS"} - WAITING
    # In the order of writing: files of one second are read by name, number 10 before number 9.
    # repr: NaN is not equal to itself
    curves = {tag: sorted(events.Scalars(tag), key=lambda event: event.wall_time) for tag in tags}
    return {tag: [(e.step, repr(e.value)) for e in curve] for tag, curve in curves.items()}


def hashes(folder: str) -> dict[str, str]:
    files = (path for path in Path(folder).rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("dtype", ["float64", "int64", "uint8"])
@pytest.mark.parametrize("name", ["ppo", "ppo_shared"])
def test_flat_observations_of_any_type(name, dtype):
    """The networks compute in float32; ppo_continuous.py normalizes them first."""
    script = load_script(name)
    run = train(script, "run", env_id=f"{dtype.title()}Clock-v0")
    if dtype == "float64":
        assert same_state(run, train(script, "plain"))
    args = script.parse(["--evaluate", "run", "--eval-episodes", "2"])
    assert len(script.evaluate(args, run)) == 2


# === Repeatable


def test_same_seed_same_run(script):
    real = {"env_id": script.Args.env_id, "total_timesteps": 64}
    one, two = (train(script, folder, **real) for folder in ("one", "two"))
    assert same_state(one, two)
    assert one["returns"] == two["returns"]
    assert scalars("one") == scalars("two")


@pytest.mark.parametrize("name", ["ppo_atari", "ppo_lstm", "ppo_multidiscrete", "appo_async"])
def test_same_seed_same_run_with_two_threads(name, monkeypatch):
    """As the files run where there are two cores; all other tests have one thread."""
    script = load_script(name)
    monkeypatch.setattr(script, "TORCH_THREADS", 2)
    sizes = {"num_envs": 4, "num_steps": 32, "total_timesteps": 256}
    sizes |= {"learner_threads": 2} if name == "appo_async" else {}
    one, two = (train(script, folder, **sizes) for folder in ("one", "two"))
    assert torch.get_num_threads() == 2
    assert same_state(one, two)


def test_sizes_of_a_large_machine(monkeypatch):
    """Every worker adds to the lag; the learner has the cores that nobody else needs."""
    for name in ("sched_getaffinity", "cpu_count"):
        monkeypatch.setattr(os, name, lambda *_: range(32) if _ else 32, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 32)
    args = load_script("appo_async").Args()
    assert (args.num_workers, args.num_policy_workers, args.learner_threads) == (8, 1, 23)


def test_no_more_threads_than_cores():
    """A thousand on two cores take minutes for what one does in milliseconds."""
    script = load_script("appo_async")
    script.pick_device(script.Args(device="cpu", learner_threads=1000))
    assert torch.get_num_threads() == script.CORES


def test_another_seed_another_run(script):
    one, two = (train(script, f"seed{seed}", seed=seed) for seed in (1, 2))
    assert not any(same(one[key], two[key]) for key in ("agent", "optimizer", "rng"))


def test_a_process_repeats_the_run_of_another():
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in TINY["ppo"].items()]
    process = run_script(
        ROOT / "ppo.py", *flags, "--run-dir=process", "--eval-episodes=0", cwd=Path.cwd()
    )
    assert process.returncode == 0, process.stderr
    script = load_script("ppo")
    here = train(script, "here", env_id="CartPole-v1")
    assert same_state(here, script.load("resume", "process"))
    assert scalars("here") == scalars("process")


# === Resumed


@pytest.mark.parametrize("name", SCRIPTS)
def test_resume_is_exact_where_episodes_end_with_the_rollout(name):
    """Elsewhere a resumed run starts new episodes, as it says."""
    script = load_script(name)
    even = {"num_steps": 16, "total_timesteps": 96}
    if name == "ppo_continuous":  # what is seen anew changes the statistics, unless it is 0
        even["env_id"] = "toy_envs:BlindClock-v0"
    whole = train(script, "whole", **even)
    half = train(script, "halves", **even, stop_at=32)
    assert half["global_step"] == 32
    assert not same_state(whole, half)
    halves = resume(script, "halves")
    if name == "ppo_continuous":  # their rest: test_statistics_of_a_resumed_run
        assert not same(whole["normalizer"].pop("obs"), halves["normalizer"].pop("obs"))
    assert same_state(whole, halves)
    for key in ("global_step", "episodes", "returns"):
        assert whole[key] == halves[key]
    assert scalars("whole") == scalars("halves")
    assert len(scalars("whole")["charts/episodic_return"]) == 2 * 6


def test_resume_keeps_arguments_and_takes_new_ones(script):
    train(script, "run", gamma=0.9, ent_coef=0.02, stop_at=16)
    args = script.parse(["--resume", "run", "--ent-coef", "0.03"])
    assert (args.gamma, args.ent_coef, args.stop_at) == (0.9, 0.03, None)
    assert args.env_id == EVEN[script.SCRIPT]


def test_a_resumed_run_shows_its_own_speed(script):
    """The first half took a thousand seconds: the second does not, and its time left is its own."""
    train(script, "run", stop_at=16)
    run = torch.load("run/checkpoint.pt", weights_only=True)
    torch.save(run | {"seconds": 1000.0}, "run/checkpoint.pt")
    resume(script, "run")
    events = EventAccumulator("run", size_guidance={"scalars": 0}).Reload()
    step, sps = max((event.step, event.value) for event in events.Scalars("charts/SPS"))
    assert step > 16 and sps > 1  # in all it is below 32 / 1000
    result = json.loads(Path("run", "result.json").read_text())
    assert result["seconds"] > 1000 and result["sps"] < 1


def test_a_device_whose_state_is_not_saved(script, monkeypatch):
    """It draws anew when the run goes on, and not once more what it drew at the start."""
    train(script, "run", stop_at=16)
    run = script.load("resume", "run")
    torch.manual_seed(run["args"].seed)
    first = torch.rand(3)
    torch.manual_seed(run["args"].seed)
    monkeypatch.setattr(torch, "set_rng_state", lambda state: None)  # the CPU's is saved
    network = SimpleNamespace(load_state_dict=lambda state: None)
    script.restore(run, network, network)
    assert not torch.equal(torch.rand(3), first)


def test_a_resumed_run_plays_other_games(script, monkeypatch):
    """The environments' seed is --seed plus the step: else it would play its first games again."""
    train(script, "run", seed=5, stop_at=16)
    seeds, plain = [], script.make_envs

    def make_envs(args, num_envs, seed, *rest, **kwargs):
        seeds.append(seed)
        return plain(args, num_envs, seed, *rest, **kwargs)

    monkeypatch.setattr(script, "make_envs", make_envs)
    resume(script, "run")
    assert 5 + 16 in seeds


def test_seconds_and_episodes_add_up(script):
    first = train(script, "run", num_steps=16, total_timesteps=64)
    second = resume(script, "run", "--total-timesteps", 128)
    assert second["seconds"] > first["seconds"] > 0
    assert second["episodes"] == 2 * first["episodes"] == 16


def learning_rates(script) -> list[float]:
    """The learning rate of each iteration, as shares of that at the start."""
    curve = scalars("run")["charts/learning_rate"]
    return pytest.approx([float(rate) / script.Args.learning_rate for _, rate in curve])


def test_longer_run_anneals_anew(script):
    assert train(script, "run")["global_step"] == 32
    assert learning_rates(script) == [1, 0.5]
    resume(script, "run", "--total-timesteps", 64)
    assert learning_rates(script) == [1, 0.5, 0.5, 0.25]


def merged(rows: list[np.ndarray]) -> dict:
    """Mean and variance of rows and of what was there before: 1e-4 rows of mean 0, variance 1."""
    count = 1e-4 + len(rows)
    mean = np.sum(rows, axis=0) / count
    var = (1e-4 * (1 + mean**2) + np.sum((rows - mean) ** 2, axis=0)) / count
    return {"mean": mean, "var": var, "count": count}


def check_statistics(saved: dict, rows: list[np.ndarray]) -> None:
    expected = merged(rows)
    assert saved.keys() == expected.keys()
    assert all(np.allclose(saved[key], expected[key], rtol=1e-9, atol=0) for key in expected)


def test_statistics_of_a_resumed_run(monkeypatch):
    """The statistics in a checkpoint are those of all that the run has seen, before it and after.

    What ends an episode is not seen: the first observation of the next one takes its place.
    """
    script = load_script("ppo_continuous")
    monkeypatch.setattr(Diary, "pages", pages := [])
    first = train(script, "run", env_id="Diary-v0", stop_at=16)
    assert len(pages) == 2 + 16
    check_statistics(first["normalizer"]["obs"], pages)
    second = resume(script, "run")
    del pages[2 + 16 : 2 + 16 + 2]  # of two environments that parse() only tries
    assert len(pages) == 2 * (2 + 16)
    check_statistics(second["normalizer"]["obs"], pages)
    assert second["normalizer"]["returns"]["count"] == pytest.approx(1e-4 + 32)


# === Ends


def test_stop_at(script):
    """The run ends with the iteration that reaches the step, and is not evaluated."""
    train(script, "run", total_timesteps=64, stop_at=20, eval_episodes=1)
    result = json.loads(Path("run", "result.json").read_text())
    assert (result["steps"], result["finished"], result["eval_mean"]) == (32, False, None)
    assert learning_rates(script) == [1, 0.75]


def test_total_that_is_no_multiple_of_the_batch(script):
    """The last iteration is a whole one: a run never takes more steps than asked for."""
    assert train(script, "run", total_timesteps=47)["global_step"] == 32


# === Files


def test_files(script):
    args = TINY[script.SCRIPT] | {
        "run_dir": "run",
        "eval_episodes": 0,
        "env_id": EVEN[script.SCRIPT],
    }
    args |= {"num_steps": 16, "total_timesteps": 64}
    args = script.Args(**sized(script.SCRIPT, args))
    if script.SCRIPT == "envpool_ppo":
        script.envpool = fake_envpool
    returned = script.train(args)
    files = {path.name for path in Path("run").iterdir()}
    (events,) = (name for name in files if name.startswith("events.out.tfevents."))
    assert files == {"args.json", "checkpoint.pt", "result.json", "source.py", events}

    result = json.loads(Path("run", "result.json").read_text())
    assert result == returned
    assert result.keys() == RESULT
    assert (result["steps"], result["episodes"], result["finished"]) == (64, 8, True)
    assert result["sps"] == pytest.approx(64 / result["seconds"])
    returns = [float(value) for _, value in scalars("run")["charts/episodic_return"]]
    assert result["return_last100"] == pytest.approx(np.mean(returns))

    assert json.loads(Path("run", "args.json").read_text()) == asdict(args)
    assert Path("run", "source.py").read_text() == source_of(script.SCRIPT)
    loaded = script.load("resume", "run")
    assert loaded["args"] == args
    assert loaded["script"] == script.SCRIPT


def test_metrics(script):
    train(script, "run", num_steps=16, total_timesteps=64)
    curves = scalars("run")
    more = ASYNC_METRICS if script.SCRIPT == "appo_async" else set()
    assert curves.keys() | {"charts/SPS"} == METRICS | more
    for tag, curve in curves.items():
        if not tag.startswith("charts/episodic"):
            assert [step for step, _ in curve] == [32, 64]
            assert all(math.isfinite(float(value)) for _, value in curve)
    # the learner of appo_async.py sees the end of an episode with the batch that it is in
    ends = {32, 64} if script.SCRIPT == "appo_async" else {16, 32, 48, 64}
    assert {step for step, _ in curves["charts/episodic_return"]} == ends
    # agent steps, or what an EvenAtari counts: frames, with those of its no-ops and of FIRE
    length = EvenAtari.NOOPS + 8 + 32 if EVEN[script.SCRIPT] == "EvenAtari-v0" else 8
    assert {float(value) for _, value in curves["charts/episodic_length"]} == {float(length)}


def test_a_checkpoint_is_on_the_disk_before_it_takes_the_place_of_the_last(script, monkeypatch):
    """A power cut shows what a kill does not: a renamed file whose content was never written."""
    calls, fsync, replace = [], os.fsync, os.replace

    def synced(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        calls.append(("fsync", Path(path).name, os.fstat(descriptor).st_size))
        fsync(descriptor)

    def renamed(old, new):
        calls.append(("replace", Path(old).name, os.stat(old).st_size))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    train(script, "run", checkpoint_every=0.0)
    saves = [call for call in calls if call[1] == "checkpoint.tmp"]
    assert [how for how, *_ in saves] == ["fsync", "replace"] * 2
    assert all(a[2] == b[2] > 0 for a, b in zip(saves[::2], saves[1::2], strict=True))


def test_seconds_are_those_of_training(script, monkeypatch):
    """Without what it takes to make the environments."""
    late, clock, make_envs = [0.0], time.perf_counter, script.make_envs

    def slow(*args, **kwargs):
        late[0] += 1000.0
        return make_envs(*args, **kwargs)

    monkeypatch.setattr(script.time, "perf_counter", lambda: clock() + late[0])
    monkeypatch.setattr(script, "make_envs", slow)
    run = train(script, "run")
    assert late[0] >= 1000 and 0 < run["seconds"] < 1000


def test_a_clock_that_is_set_changes_nothing(script, monkeypatch):
    """A laptop that wakes up, or asks for the time: no checkpoint is late, no speed is wrong."""
    today = iter(range(10**9, 0, -(10**6)))
    monkeypatch.setattr(script.time, "time", lambda: next(today))
    run = train(script, "run", checkpoint_every=0.0)
    assert 0 < run["seconds"] < 1000 and Path("run/checkpoint.pt").exists()


def test_default_run_dir(script, monkeypatch):
    """One for each run, even of those that were started together."""
    train(script, None, seed=7)
    (folder,) = Path("runs").iterdir()
    env, name, seed, now = folder.name.split("__")
    assert env == EVEN[script.SCRIPT].replace(":", "-")
    assert (name, seed) == (script.SCRIPT, "7")
    now = int(now)
    monkeypatch.setattr(script.time, "time", lambda: now / 1000 + 0.0004)
    with pytest.raises(FileExistsError):
        train(script, None, seed=7)
    assert len(list(folder.glob("events.*"))) == 1
    clock = itertools.count(now + 1)
    monkeypatch.setattr(script.time, "time", lambda: next(clock) / 1000 + 0.0004)
    train(script, None, seed=7)
    assert len(list(Path("runs").iterdir())) == 2


def test_losses_are_means_over_all_minibatches(script, monkeypatch):
    """Watched through the entropies that the update asks for, 3 epochs of 4 minibatches."""
    entropies, original = [], script.Agent.get_action_and_value

    def watched(*inputs):
        result = original(*inputs)
        if len(inputs) == len(inspect.signature(original).parameters):  # the last is the action
            entropies.append(result[2].mean().item())
        return result

    monkeypatch.setattr(script.Agent, "get_action_and_value", watched)
    sizes = {"num_envs": 4, "num_steps": 4, "num_minibatches": 4, "update_epochs": 3}
    train(script, "run", **sizes, total_timesteps=16, learning_rate=0.01)
    if script.SCRIPT == "appo_async":  # judges the batch as a whole before that
        entropies.pop(0)
    assert len(entropies) == 12
    assert entropies[-1] != pytest.approx(np.mean(entropies), rel=1e-6)  # the last would differ
    ((_, logged),) = scalars("run")["losses/entropy"]
    assert float(logged) == pytest.approx(np.mean(entropies), rel=1e-6)


def test_value_loss_of_parts_is_that_of_the_whole(script):
    """A learning rate of 0: the losses of 4 minibatches average to the loss of the batch."""
    frozen = {"learning_rate": 0.0, "num_envs": 4, "num_steps": 12, "total_timesteps": 48}
    train(script, "parts", **frozen, num_minibatches=4)
    train(script, "whole", **frozen, num_minibatches=1)
    ((_, parts),), ((_, whole),) = (scalars(d)["losses/value_loss"] for d in ("parts", "whole"))
    assert float(parts) == pytest.approx(float(whole), rel=1e-5)


def test_the_network_is_not_sent_to_the_processes(script, monkeypatch):
    """An evaluation's processes need to know that they are to film, no more."""
    if not hasattr(script, "ProcessVectorEnv"):
        pytest.skip("no processes")
    sent = {}

    def processes(make, seed, **kwargs):
        sent[len(sent)] = len(cloudpickle.dumps(make))
        return gym.vector.SyncVectorEnv([Clock], **kwargs)

    monkeypatch.setattr(script, "ProcessVectorEnv", processes)
    monkeypatch.setattr(script.multiprocessing, "set_forkserver_preload", lambda modules: None)
    args = script.Args(vector_mode="async", capture_video=True)
    for frozen in (None, {}, {"agent": {"weight": torch.zeros(10**6)}}):
        script.make_envs(args, 4, 5, frozen=frozen)
    assert sent[0] == sent[1] == sent[2] < 10**5


def test_processes_end_together(script):
    """Each may take seconds to close its games: all are asked before the first is waited for."""
    if not hasattr(script, "ProcessVectorEnv"):
        pytest.skip("no processes")
    calls = []
    names = {"pipes": ["close"], "processes": ["join", "kill"]}
    parts = {
        what: [
            SimpleNamespace(**{name: lambda *_, name=name: calls.append(name) for name in methods})
            for _ in range(2)
        ]
        for what, methods in names.items()
    }
    script.ProcessVectorEnv.close_extras(SimpleNamespace(**parts))
    assert calls == ["close", "close", "join", "kill", "join", "kill"]


# === Evaluated


def test_the_published_measure(script, monkeypatch, capsys):
    """Of all games the last hundred are kept, and shown is the mean of the last twenty."""
    monkeypatch.setattr(script, "RANK", 0, raising=False)
    run = {"global_step": 2000, "seconds": 10.0, "returns": [float(i) for i in range(150)]}
    run["start"], run["shown"] = (1000, 8.0), 0.0
    metrics = {"charts/policy_lag_min": 1, "charts/policy_lag_mean": 2, "charts/policy_lag_max": 3}
    waiting = {"rollout": 0.1, "policy": 0.2, "learner": 0.3}
    metrics |= {f"charts/waiting_{role}": share for role, share in waiting.items()}
    logged = {}
    writer = SimpleNamespace(add_scalar=lambda name, value, _: logged.update({name: value}))
    args = script.Args(stop_at=5000)
    script.log(args, run, writer, metrics, False)
    assert run["returns"] == [float(i) for i in range(50, 150)]
    (line,) = capsys.readouterr().out.splitlines()
    assert logged == metrics | {"charts/SPS": 500}  # 1,000 steps in 2 seconds, of 4 frames each
    frames = " | 2,000 frames/s | lag 1/2/3 | waiting 10%/20%/30% | "
    assert (frames if script.SCRIPT == "appo_async" else " | 500 SPS | ") in line
    assert line.startswith("2,000 of 5,000 steps | return 139.5 | ")
    assert line.endswith(" | 0:00:06 left")  # 3,000 steps at 500 a second
    script.log(script.Args(total_timesteps=10**18), run, writer, metrics, True)  # "until I stop it"
    assert " days, " in capsys.readouterr().out


def test_an_evaluation_is_of_the_trained_agent(script, monkeypatch):
    """It plays games of its own, and of each environment counts the first to end."""
    run = train(script, "run", learning_rate=0.01)
    seeds, played, make_envs = [], [], script.make_envs
    plain, ends = (
        script.Agent.get_action_and_value,
        iter([[(0, 1.0, 5)], [(0, 2.0, 5), (1, 3.0, 9)]]),
    )

    def make(args, num_envs, seed, *rest, **kwargs):
        seeds.append(seed)
        return make_envs(args, num_envs, seed, *rest, **kwargs)

    def act(agent, *inputs):
        played.append(copy.deepcopy(agent.state_dict()))
        return plain(agent, *inputs)

    args = script.parse(["--evaluate", "run", "--eval-episodes", "2"])
    monkeypatch.setattr(script, "make_envs", make)
    monkeypatch.setattr(script, "finished_episodes", lambda infos: next(ends))
    monkeypatch.setattr(script.Agent, "get_action_and_value", act)
    assert script.evaluate(args, run) == [1.0, 3.0]
    assert seeds == [args.seed + 10**9]
    assert len(played) == 2 and all(same(weights, dict(run["agent"])) for weights in played)


def test_evaluation_leaves_the_run_alone(script):
    train(script, "run")
    before, state = hashes("run"), torch.get_rng_state()
    args = script.parse(["--evaluate", "run", "--eval-episodes", "3"])
    assert len(script.evaluate(args, script.load("evaluate", "run"))) == 3
    assert hashes("run") == before
    assert torch.get_rng_state().equal(state)


@pytest.mark.parametrize(
    ("name", "env_id"),
    [("ppo", "CartPole-v1"), ("ppo_shared", "CartPole-v1"), ("ppo_continuous", "Pendulum-v1")]
    + [
        (name, EVEN[name])
        for name in ("ppo_atari", "ppo_lstm", "ppo_multidiscrete", "envpool_ppo", "appo_async")
    ],
)
def test_evaluation_is_repeatable(name, env_id):
    script = load_script(name)
    run = train(script, "run", env_id=env_id)
    args = script.parse(["--evaluate", "run", "--eval-episodes", "3"])
    assert script.evaluate(args, run) == script.evaluate(args, run)


def test_one_game_in_each_environment(capsys):
    """Short games end several times before the long ones do, and count once."""
    script = load_script("ppo")
    run = train(script, "run", env_id="Uneven-v0")
    args = script.parse(["--evaluate", "run", "--eval-episodes", "4"])
    assert sorted(script.evaluate(args, run)) == [2.0, 2.0, 20.0, 20.0]
    assert "score 11.0 ± 9.0 over 4 games" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["ppo", "ppo_shared", "ppo_continuous"])
def test_evaluation_samples_its_actions(name):
    """All games of a Clock look the same: with the most probable actions, they would be one."""
    script = load_script(name)
    run = train(script, "run")
    args = script.parse(["--evaluate", "run", "--eval-episodes", "8"])
    assert len(set(script.evaluate(args, run))) > 1


def test_an_evaluation_that_is_stopped_has_no_score(script, monkeypatch, capsys):
    """The games that have ended by then are the short ones."""
    run, ended = train(script, "run"), script.finished_episodes

    def first_only(infos):
        for episode in ended(infos):
            script.STOP.append(signal.SIGINT)
            yield episode
            return

    args = script.parse(["--evaluate", "run", "--eval-episodes", "3"])
    monkeypatch.setattr(script, "finished_episodes", first_only)
    assert script.evaluate(args, run) == []
    assert "no score: not all games have ended" in capsys.readouterr().out


def test_only_the_steps_of_an_evaluation_are_shielded(script, monkeypatch):
    """There ffmpeg starts. Whoever calls evaluate can be interrupted after it, if it fails too."""
    run, make_envs, ended = train(script, "run"), script.make_envs, script.finished_episodes
    steps, between = [], []

    def blocked():
        return {signal.SIGINT, signal.SIGTERM} & signal.pthread_sigmask(signal.SIG_BLOCK, ())

    def make(*args, **kwargs):
        envs, *first = make_envs(*args, **kwargs)
        plain = envs.step

        def step(actions):
            steps.append(blocked())
            if len(steps) == 3:
                raise ZeroDivisionError
            return plain(actions)

        envs.step = step
        return envs, *first

    def finished_episodes(infos):
        between.append(blocked())
        return ended(infos)

    args = script.parse(["--evaluate", "run", "--eval-episodes", "3"])
    monkeypatch.setattr(script, "make_envs", make)
    monkeypatch.setattr(script, "finished_episodes", finished_episodes)
    with pytest.raises(ZeroDivisionError):
        script.evaluate(args, run)
    assert steps == 3 * [{signal.SIGINT, signal.SIGTERM}]
    assert between == 2 * [set()] and not blocked()


def test_finished_run_is_evaluated(script, capsys):
    """With the result that --evaluate finds afterwards."""
    train(script, "run", num_steps=16, eval_episodes=3)
    result = json.loads(Path("run", "result.json").read_text())
    assert result["finished"]
    assert "over 3 games" in capsys.readouterr().out
    scores = script.evaluate(script.parse(["--evaluate", "run"]), script.load("evaluate", "run"))
    assert len(scores) == 3
    assert (result["eval_mean"], result["eval_std"]) == (np.mean(scores), np.std(scores))


@pytest.mark.parametrize("name", ["ppo_atari", "ppo_lstm", "appo_async"])
def test_atari_score_is_raw(name):
    """Not clipped: 8 steps and the 8 frames of the start, the no-ops too, pay 2 a frame."""
    script = load_script(name)
    run = train(script, "run", env_id="EvenAtari-v0")
    args = script.parse(["--evaluate", "run", "--eval-episodes", "1"])
    assert script.evaluate(args, run) == [2.0 * (EvenAtari.NOOPS + 8 + 32)]


def test_continuous_score_is_raw():
    """Neither scaled nor clipped to 10: it is a multiple of 500, in training too."""
    script = load_script("ppo_continuous")
    run = train(script, "run", env_id="Generous-v0")
    scores = script.evaluate(script.parse(["--evaluate", "run", "--eval-episodes", "8"]), run)
    for score in (*scores, *run["returns"]):
        assert score % 500 == 0
    assert max(scores) > 500


def test_multidiscrete_score_is_raw():
    """Whatever --reward-scale is: a whole number."""
    script = load_script("ppo_multidiscrete")
    run = train(script, "run", reward_scale=0.01)
    scores = script.evaluate(script.parse(["--evaluate", "run", "--eval-episodes", "8"]), run)
    for score in (*scores, *run["returns"]):
        assert score == int(score)
    assert max(scores) > 1


def test_evaluation_freezes_the_statistics(monkeypatch):
    """Those of the checkpoint normalize what is seen, and stay what they are."""
    script = load_script("ppo_continuous")
    monkeypatch.setattr(Diary, "pages", pages := [])
    run = train(script, "run", env_id="Diary-v0")
    saved, entered = copy.deepcopy(run["normalizer"]), len(pages)
    args = script.parse(["--evaluate", "run"])
    envs, obs = script.make_envs(args, 3, seed=5, frozen=run)
    for _ in range(12):
        rms = saved["obs"]
        expected = (pages[-3:] - rms["mean"].numpy()) / np.sqrt(rms["var"].numpy() + 1e-8)
        assert np.allclose(obs, np.clip(expected, -10, 10), rtol=1e-6)
        obs = envs.step(np.zeros((3, 2), np.float32))[0]
    assert len(script.evaluate(args, run)) == 10
    assert len(pages) > entered + 3 * 12
    assert same(envs.statistics(), saved)
    assert same(run["normalizer"], saved)


def test_evaluation_hands_the_memory_on(monkeypatch):
    """Each step of the LSTM starts from where the last ended; a new game is marked as one."""
    script = load_script("ppo_lstm")
    run = train(script, "run", env_id="UnevenAtari-v0")
    calls, original = [], script.Agent.get_action_and_value

    def watched(self, x, lstm_state, done):
        result = original(self, x, lstm_state, done)
        calls.append((lstm_state, done.tolist(), result[-1]))
        return result

    monkeypatch.setattr(script.Agent, "get_action_and_value", watched)
    args = script.parse(["--evaluate", "run", "--eval-episodes", "2"])
    assert len(set(script.evaluate(args, run))) == 2  # a short game, a long game
    assert len(calls) == 24
    assert not calls[0][0].any()
    for (_, _, after), (before, _, _) in pairwise(calls):
        assert before.equal(after)
        assert before.any()
    long, short = zip(*(done for _, done, _ in calls), strict=True)
    assert [step for step, done in enumerate(short) if done] == [8, 16]
    assert not any(long)


no_egl = pytest.mark.skipif(not find_library("EGL"), reason="MuJoCo cannot draw here")


@pytest.mark.parametrize(
    ("name", "env_id"),
    [
        ("ppo", "CartPole-v1"),
        ("ppo_atari", "BreakoutNoFrameskip-v4"),
        pytest.param("ppo_continuous", "Hopper-v4", marks=no_egl),
        ("ppo_multidiscrete", "VizdoomTakeCover-v1"),
        ("appo_async", "VizdoomTakeCover-v1"),
    ],
)
def test_video(name, env_id, monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "egl")  # as `python ppo_continuous.py` does
    script = load_script(name)
    run = train(script, "run", env_id=env_id)
    args = script.parse(["--evaluate", "run", "--capture-video", "--eval-episodes", "2"])
    assert len(script.evaluate(args, run)) == 2
    # of one game: RecordVideo keeps all frames in memory, 7 GB of ten HalfCheetahs
    (film,) = Path("run", "videos").rglob("*.mp4")
    video, frames = cv2.VideoCapture(str(film)), []
    while (grabbed := video.read())[0]:
        frames.append(grabbed[1])
    assert len(frames) > 5
    middle = frames[len(frames) // 2]
    assert middle.max() > 100  # not black
    assert middle.std() > 1  # and not one colour
    assert any((frame != frames[0]).any() for frame in frames)  # something moves


def test_video_is_asked_for_each_time():
    """A run that records its last evaluation does not do so for every later one."""
    script = load_script("ppo")
    train(script, "run", env_id="CartPole-v1", capture_video=True)
    assert not script.parse(["--evaluate", "run"]).capture_video
    assert script.parse(["--evaluate", "run", "--capture-video"]).capture_video


def test_an_evaluation_neither_logs_nor_compiles(script):
    """Where it runs there may be no key for W&B, and no compiler."""
    train(script, "run")
    path = Path("run", "checkpoint.pt")
    run = torch.load(path, weights_only=True)
    torch.save(run | {"args": run["args"] | {"track": True, "compile": True}}, path)
    args = script.parse(["--evaluate", "run"])
    assert not args.track and not args.compile


# === On the screen


def trained(*argv: object, **environ: str):
    """Run ppo.py in the current folder to its end."""
    process = run_forked(ROOT / "ppo.py", *argv, cwd=Path.cwd(), **environ)
    assert process.returncode == 0, process.stderr
    return process


def test_plain_lines_when_piped():
    out = trained("--total-timesteps", 2048, "--run-dir", "run", "--eval-episodes", 2).stdout
    assert "\r" not in out
    assert "\033" not in out
    lines = out.splitlines()
    assert lines[0].startswith("python ")
    assert lines[0].endswith("ppo.py --total-timesteps 2048 --run-dir run --eval-episodes 2")
    assert lines[1].startswith("device cpu, torch threads 1, precision fp32")
    assert any(line.startswith("2,048 of 2,048 steps | return ") for line in lines)
    for command in ("--evaluate run --capture-video", "--resume run --total-timesteps 4096"):
        assert any(line.endswith(command) for line in lines)
    assert any("tensorboard --logdir" in line for line in lines)


# takes and frees what the layers of a minibatch do, and counts the pages that Linux clears for it
PAGES = """
import resource, torch, {name}
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        layers = [torch.ones(2**22) for _ in range(4)]
        del layers
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
IMAGES = [name for name in SCRIPTS if name not in ("ppo", "ppo_shared", "ppo_continuous")]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
@pytest.mark.parametrize("name", IMAGES)
def test_freed_memory_is_used_again(name):
    """The pages of one minibatch serve the next.

    Without mallopt about half of all processes fail: it depends on what lies at the heap's end.
    """
    process = run_script("-c", PAGES.format(name=name), cwd=Path.cwd(), PYTHONPATH=str(ROOT))
    assert process.returncode == 0, process.stderr
    assert int(process.stdout) < 1000  # or 65,000


@pytest.mark.skipif(platform.machine() != "x86_64", reason="its flags have other names here")
def test_bfloat16_by_emulation_is_said():
    """Which processors these are; test_devices.py has both kinds. (AVX2 took 7 times as long.)"""
    tiny = ["--total-timesteps", 8, "--num-envs", 1, "--num-steps", 8, "--eval-episodes", 0]
    tiny += ["--device", "cpu", "--precision", "bf16"]
    flags = Path("/proc/cpuinfo").read_text().split()
    process = run_forked(ROOT / "ppo_atari.py", *tiny, cwd=Path.cwd())
    line = process.stdout.splitlines()[1]
    assert line.startswith("device cpu, torch threads 1, precision bf16")
    assert ("bf16, which this device lacks" in line) == ("avx512bw" not in flags)


@pytest.mark.parametrize("columns", [40, 200])
def test_one_live_line_in_a_terminal(columns, monkeypatch):
    """A pseudo-terminal: the progress line is rewritten in place, and ends only at the end.

    It never wraps, which would leave a line behind with each view.
    """
    monkeypatch.delenv("COLUMNS", raising=False)
    terminal, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, columns))
    command = [sys.executable, ROOT / "ppo.py", "--total-timesteps", "10240", "--run-dir", "run"]
    with subprocess.Popen([*command, "--eval-episodes", "0"], stdout=slave) as process:
        os.close(slave)
        out = b""
        with open(terminal, "rb", buffering=0) as screen:
            try:
                while piece := screen.read(4096):
                    out += piece
            except OSError:  # how Linux says that the other side has gone
                pass
    assert process.returncode == 0
    lines = out.decode().replace("\r\n", "\n").split("\n")
    (live,) = [line for line in lines if "\r" in line]
    views = live.split("\r\033[K")
    assert len(views) > 3
    assert views[0] == ""
    assert all(" of 10,240 steps | return " in view for view in views[1:])
    assert views[-1].startswith("10,240 of 10,240 steps")
    assert max(map(len, views)) < columns
    assert columns == 40 or all(view.endswith(" left") for view in views[1:])


def test_wandb_offline_keeps_its_id():
    short = ["--num-steps", 16, "--eval-episodes", 0]
    trained("--track", "--run-dir", "run", "--total-timesteps", 64, *short, WANDB_MODE="offline")
    script = load_script("ppo")
    first = script.load("resume", "run")["wandb_id"]
    assert first
    (sent,) = Path("wandb").glob("offline-run-*/*.wandb")
    assert b"losses/value_loss" in sent.read_bytes() and b"episodic_return" in sent.read_bytes()
    assert len(list(Path("wandb").glob(f"offline-run-*-{first}"))) == 1
    trained("--resume", "run", "--total-timesteps", 128, WANDB_MODE="offline")
    run = script.load("resume", "run")
    assert (run["wandb_id"], run["global_step"]) == (first, 128)
    assert len(list(Path("wandb").glob(f"offline-run-*-{first}"))) == 2
    assert len(list(Path("wandb").glob("offline-run-*"))) == 2


def test_what_wandb_is_told(script, monkeypatch):
    import wandb

    calls = []
    monkeypatch.setattr(wandb, "init", lambda **kw: calls.append(kw) or SimpleNamespace(id="abc"))
    script.open_run(script.Args(track=True, wandb_entity="team", run_dir="new"))[1].close()
    train(script, "old", stop_at=16)
    run = torch.load("old/checkpoint.pt", weights_only=True)
    torch.save(run | {"wandb_id": "before"}, "old/checkpoint.pt")
    script.open_run(script.Args(track=True, wandb_project_name="mine", resume="old"))[1].close()
    for call, project, entity, name, id in zip(
        calls, ("ppo", "mine"), ("team", None), ("new", "old"), (None, "before"), strict=True
    ):
        assert (call["project"], call["entity"], call["name"]) == (project, entity, name)
        assert (call["id"], call["resume"]) == (id, "allow")
        assert call["config"]["wandb_entity"] == entity and call["config"]["run_dir"] == name
        assert call["sync_tensorboard"] and call["save_code"]


def test_checkpoints_are_so_many_seconds_apart(script, monkeypatch):
    """Each iteration takes ten seconds; the first and the last are saved as well."""
    clock, saved, save = [0.0], [], script.save
    monkeypatch.setattr(script.time, "perf_counter", lambda: clock[0])
    once = "compute_vtrace" if script.SCRIPT == "appo_async" else "compute_gae"
    advantages = getattr(script, once)

    def tick(*args):
        clock[0] += 10
        return advantages(*args)

    def keep(args, run, **state):
        saved.append(run["global_step"] // 16)
        return save(args, run, **state)

    monkeypatch.setattr(script, once, tick)
    monkeypatch.setattr(script, "save", keep)
    for seconds, expected in ((25.0, [1, 4, 7, 8]), (40.0, [1, 5, 8])):
        saved.clear()
        train(script, f"run{seconds}", total_timesteps=8 * 16, checkpoint_every=seconds)
        assert saved == expected


def test_training_is_not_filmed(script):
    """Every frame would be kept in memory until its game has ended."""
    train(script, "run", capture_video=True)
    assert not Path("run", "videos").exists()


def test_a_run_that_goes_on_has_no_result_yet():
    """Else a killed one would say that it is finished, at the step where it was resumed."""
    script = load_script("ppo")
    train(script, "run", env_id="CartPole-v1")
    assert Path("run", "result.json").exists()
    args = script.parse(["--resume", "run", "--total-timesteps", "10000"])
    script.open_run(args)[1].close()
    assert not Path("run", "result.json").exists()


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
@pytest.mark.parametrize("name", ["ppo", "ppo_atari", "ppo_lstm"])
def test_compiled_for_real(name):
    """The compiled network judges as the plain one does; a run with it ends well."""
    script = load_script(name)
    args = script.Args(**TINY[name], compile=True, eval_episodes=0, run_dir="run")
    assert script.train(args)["steps"] == args.total_timesteps
    envs, obs = script.make_envs(args, 2, 1)
    agent, x, action = script.Agent(envs, args), torch.as_tensor(obs), torch.tensor([0, 1])
    state = (agent.initial_state(2), torch.zeros(2)) if name == "ppo_lstm" else ()
    envs.close()
    plain = agent.get_action_and_value(x, *state, action)
    compiled = torch.compile(agent.get_action_and_value, dynamic=False)(x, *state, action)
    for a, b in zip(plain, compiled, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# === Anywhere, and on anything


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_alone_in_an_empty_folder(name):
    shutil.copy(ROOT / f"{name}.py", ".")
    alone = {"cwd": Path.cwd(), "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    flags = "--num-envs 2 --num-steps 64 --num-minibatches 2 --total-timesteps 256"
    if name == "appo_async":
        flags = flags.replace("--num-envs 2", "--num-workers 2 --envs-per-worker 2")
        flags += " --minibatch-size 64"
    flags += " --eval-episodes 0 --run-dir run"
    process = run_script(f"{name}.py", *flags.split(), **alone)
    assert (process.returncode, process.stderr) == (0, "")
    assert json.loads(Path("run", "result.json").read_text())["steps"] == 256


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_import_leaves_the_environment_alone(name, monkeypatch):
    """With MUJOCO_GL set, what is started next could not import mujoco where there is no libEGL."""
    load_script(name)  # so that what it imports has set what it sets
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    before = dict(os.environ)
    load_script(name)
    assert dict(os.environ) == before


def test_help_shows_every_argument(script, capsys):
    with pytest.raises(SystemExit) as exit_info:
        script.parse(["--help"])
    assert exit_info.value.code == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    for name in asdict(script.Args()):
        assert f"--{name.replace('_', '-')}" in captured.out


MY_ENV = """
import gymnasium as gym
import numpy as np

class MyEnv(gym.Env):
    observation_space = gym.spaces.Box(-1.0, 1.0, (3,))  # float32
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action):
        return np.ones(3, np.float32), 1.0, bool(self.np_random.random() < 0.1), False, {}

gym.register("MyEnv-v0", MyEnv)
"""


def test_environment_of_the_user():
    """The smallest environment one can write, in a module beside the script."""
    shutil.copy(ROOT / "ppo.py", ".")
    Path("my_module.py").write_text(MY_ENV)
    flags = "--env-id my_module:MyEnv-v0 --total-timesteps 1024 --run-dir run"
    process = run_forked("ppo.py", *flags.split(), cwd=Path.cwd(), PYTHONPATH="")
    assert process.returncode == 0, process.stderr
    assert "over 10 games" in process.stdout


@pytest.mark.parametrize("env_id", ["TwoRows-v0", "TwoRowsDouble-v0"])
def test_actions_in_two_rows(env_id):
    """Of shape (2, 3); observations in float32 and in float64."""
    script = load_script("ppo_continuous")
    run = train(script, "run", env_id=env_id)
    assert run["agent"]["actor_logstd"].shape == (1, 2, 3)
    assert {tensor.dtype for tensor in run["agent"].values()} == {torch.float32}
    args = script.parse(["--evaluate", "run", "--eval-episodes", "2"])
    assert len(script.evaluate(args, run)) == 2


@pytest.mark.parametrize("low", [-np.inf, 0.0])
def test_actions_without_bounds(low):
    """What has no bound is not clipped."""
    played = []

    class Free(Clock):
        action_space = gym.spaces.Box(low, np.inf, (2,), np.float32)

        def step(self, action):
            played.append(action)
            return super().step(0)

    gym.register("Free-v0", Free)
    script, sizes = load_script("ppo_continuous"), TINY["ppo_continuous"]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    script.train(script.parse(["--env-id", "Free-v0", "--eval-episodes", "0", *flags]))
    del gym.registry["Free-v0"]
    assert (np.min(played) < -1) == (low < -1) and np.max(played) > 1


DISCRETE = [name for name in SCRIPTS if name not in ("ppo_continuous", "ppo_multidiscrete")]


@pytest.mark.parametrize("name", DISCRETE)
def test_actions_that_are_bytes(name):
    """Discrete takes any integer type; PyTorch's gather takes int32 and int64."""
    script = load_script(name)
    envs, obs = script.make_envs(script.Args(**TINY[name]), 2, 1)[:2]
    agent = script.Agent(envs, script.Args(**TINY[name]))
    x, action = torch.as_tensor(obs), torch.tensor([0, 1], dtype=torch.uint8)
    state = ()
    if hasattr(agent, "initial_state"):
        state = agent.initial_state(2), torch.zeros(2)
    envs.close()
    taken, logprob, *_ = agent.get_action_and_value(x, *state, action=action)
    assert torch.equal(taken, action)
    expected = agent.get_action_and_value(x, *state, action=action.long())[1]
    assert torch.equal(logprob, expected) and logprob.shape == (2,)


@pytest.mark.filterwarnings("ignore:.*observation|.*dtype")  # Gymnasium says so as well
@pytest.mark.parametrize("name", ["ppo", "ppo_shared", "ppo_continuous"])
def test_observations_of_another_type_than_was_said(name):
    """NumPy makes float64 of everything; Gymnasium casts observations, but not the last ones."""

    class Careless(Clock if name != "ppo_continuous" else ContinuousClock):
        def __init__(self, render_mode=None):
            super().__init__(end="truncated")

        def _obs(self):
            return super()._obs().astype(np.float64)

    gym.register("Careless-v0", Careless)
    run = train(load_script(name), "run", env_id="Careless-v0", bootstrap_truncated=True)
    del gym.registry["Careless-v0"]
    assert {tensor.dtype for tensor in run["agent"].values()} == {torch.float32}


@pytest.mark.parametrize(
    ("env_id", "choices"), [("PanelBinary-v0", [2, 2, 2]), ("PanelInDict-v0", [3, 1, 4])]
)
def test_actions_of_several_parts(env_id, choices):
    """A MultiBinary action; parts of one choice and of many, with a screen in a dictionary."""
    script = load_script("ppo_multidiscrete")
    run = train(script, "run", env_id=env_id)
    assert len(run["agent"]["actor.weight"]) == sum(choices)
    args = script.parse(["--evaluate", "run", "--eval-episodes", "2"])
    assert len(script.evaluate(args, run)) == 2


def test_what_is_forbidden_is_never_done():
    """PanelMasked ends the run where it is: in training, in evaluation, and between processes."""
    masked = TINY["ppo_multidiscrete"] | {"env_id": "toy_envs:PanelMasked-v0", "eval_episodes": 2}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in masked.items()]
    flags += ["--vector-mode=async", "--run-dir=async"]
    process = run_forked(ROOT / "ppo_multidiscrete.py", *flags, cwd=Path.cwd())
    assert (process.returncode, process.stderr) == (0, "")
    script = load_script("ppo_multidiscrete")
    sync = train(script, "sync", **masked)
    assert same_state(sync, script.load("resume", "async"))
    assert min(sync["returns"]) >= 8  # both switches, in every other step


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere PyTorch has another OpenMP")
@pytest.mark.parametrize("name", [name for name in SCRIPTS if "[beyond 4] Env" in source_of(name)])
def test_threads_spin_shortly_beside_processes(name):
    """PyTorch's OpenMP says what it has read, which it does once, when PyTorch is imported."""

    def spins(*flags: str, **environment: str) -> str:
        env = os.environ | {"OMP_DISPLAY_ENV": "verbose", "GOMP_SPINCOUNT": "", **environment}
        env = {key: value for key, value in env.items() if value}  # whatever is set around here
        command = [sys.executable, str(ROOT / f"{name}.py"), *flags, "--help"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        (line,) = (line for line in done.stderr.splitlines() if "GOMP_SPINCOUNT" in line)
        return line.split("'")[1]

    assert spins("--vector-mode", "async") == spins("--vector_mode=async") == "20000"
    assert spins() == spins("--vector-mode", "sync", "--run-dir", "async") != "20000"
    assert spins("--vector-mode", "async", GOMP_SPINCOUNT="7") == "7"  # the user's own


# === Learning


def test_cartpole_is_learned():
    script = load_script("ppo")
    result = script.train(script.Args(run_dir="run", total_timesteps=60_000, eval_episodes=0))
    assert result["return_last100"] >= 120


@pytest.mark.slow
def test_cartpole_is_solved():
    script = load_script("ppo")
    result = script.train(script.Args(run_dir="run", eval_episodes=0))
    assert result["return_last100"] >= 450  # seeds 1 to 3 reach 466 to 488


@pytest.mark.parametrize("bootstrap", [True, False])
def test_bootstrap_truncated(bootstrap):
    """Reward 1 for ever, but cut into tens: worth 1 / (1 - gamma) = 10, or what is left of ten."""
    script = load_script("ppo")
    args = script.Args(
        env_id="toy_envs:OneState-v0",
        bootstrap_truncated=bootstrap,
        gamma=0.9,
        learning_rate=1e-3,
        anneal_lr=False,
        clip_vloss=False,
        num_steps=32,
        num_minibatches=2,
        total_timesteps=8192,
        eval_episodes=0,
        run_dir="run",
    )
    script.train(args)
    envs, obs = script.make_envs(args, 1, 1)
    agent = script.Agent(envs, args)
    agent.load_state_dict(script.load("resume", "run")["agent"])
    value = agent.get_value(torch.as_tensor(obs)).item()
    # cut: (1 - gamma^k) / (1 - gamma), averaged over the k = 1 to 10 steps that are left
    left = np.mean([(1 - 0.9**k) / (1 - 0.9) for k in range(1, 11)])
    assert value == pytest.approx(10.0 if bootstrap else left, abs=0.5)


# === Asynchronous, in one process


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_minibatches": 2, "update_epochs": 2},
        {"num_minibatches": 1, "update_epochs": 2},  # learns from its first look at the batch
    ],
    ids=["minibatches", "whole"],
)
def test_serial_is_ppo_atari(sizes):
    """One iteration with the same random draws: the same parameters up to rounding.

    On a policy that has not moved V-trace is GAE, and one worker's environments are those of
    ppo_atari.py. In the next iteration rounding has its say in which actions are taken.
    """
    sizes = sizes | {"env_id": "BreakoutNoFrameskip-v4", "num_envs": 2, "num_steps": 16}
    sizes |= {"total_timesteps": 320, "stop_at": 32, "learning_rate": 2.5e-4}
    atari = train(load_script("ppo_atari"), "atari", **sizes)
    serial = train(load_script("appo_async"), "serial", **sizes)
    start = train(load_script("ppo_atari"), "start", **sizes | {"learning_rate": 0.0})
    assert serial["rng"][0].equal(atari["rng"][0])
    assert serial["agent"].keys() == atari["agent"].keys()
    for name, parameter in atari["agent"].items():
        assert (parameter - start["agent"][name]).abs().max() > 2e-5
        assert (parameter - serial["agent"][name]).abs().max() < 2e-6
