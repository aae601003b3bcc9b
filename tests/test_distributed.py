"""ppo_distributed.py as several processes: real ones, with gloo, most of them under torchrun.

`play` forks the processes of a group from this one, which has imported torch already, and gives
them the environment variables that torchrun would. What torchrun itself does is seen with torchrun.
"""

import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch._dynamo  # Adam asks for it: loaded once here, not in every process
from conftest import ROOT, environment, load_script
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_faults import PATIENCE, checkpoint, kill_all, saved, wait_for
from test_runs import EVEN
from torch.optim import optimizer as optim
from toy_envs import ToyAtari

SCRIPT = "ppo_distributed"
ENV = ["--env-id", "test_distributed:SeededAtari-v0", "--device", "cpu"]
# two iterations of 32 steps, with an evaluation
TINY = [*ENV, "--num-envs", 4, "--num-steps", 8, "--total-timesteps", 64, "--eval-episodes", 2]
ENDLESS = [*ENV, "--num-envs", 2, "--total-timesteps", 10**7, "--checkpoint-every", 0]
LONG_ROLLOUTS = [*ENDLESS, "--num-steps", 256, "--update-epochs", 1]
LONG_UPDATES = [*ENDLESS, "--num-steps", 16, "--update-epochs", 20]


class SeededAtari(ToyAtari):
    """Noise from the seed, which is written down; 2 games in 15 steps; action 1 pays."""

    def __init__(self, render_mode=None):
        super().__init__(frames_per_life=15, start_lives=2, render_mode=render_mode)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            with open("seeds", "a") as file:
                print(seed, file=file)
        return super().reset(seed=seed)

    def _obs(self):
        return self.np_random.integers(0, 256, (21, 16, 3), np.uint8).repeat(10, 0).repeat(10, 1)

    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, float(action == 1), *rest


gym.register("SeededAtari-v0", SeededAtari)


# === Processes without torchrun


def run_main(name: str, argv: list, environ: dict, folder: Path, prepare) -> None:
    """Be a process of its own that runs `python NAME.py ARGV` in a folder."""
    rank = environ.get("RANK", "0")
    os.environ |= environ
    os.chdir(folder)
    torch.set_num_threads(1)
    for stream, number in (("out", 1), ("err", 2)):
        file = os.open(f"{stream}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    sys.argv = [f"{name}.py", *map(str, argv)]
    if prepare:
        prepare(int(rank))
    code = 0
    try:
        runpy.run_path(str(ROOT / f"{name}.py"), run_name="__main__")
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def play(folder: Path, size: int | None, *argv: object, prepare=None, name=SCRIPT):
    """Run a group of `size` processes to its end; None: one process, as without torchrun."""
    folder.mkdir(exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    ranks = [group | {"RANK": str(k), "LOCAL_RANK": str(k)} for k in range(size or 0)] or [{}]
    fork = multiprocessing.get_context("fork")
    parts = [(name, argv, environ, folder, prepare) for environ in ranks]
    processes = [fork.Process(target=run_main, args=part) for part in parts]
    for process in processes:
        process.start()
    processes[0].join(PATIENCE)
    processes[0].kill()  # if it hangs
    processes[0].join()
    for process in processes[1:]:
        process.join(2 if processes[0].exitcode else PATIENCE)
        process.terminate()  # as torchrun does once one has failed
        process.join()
    outs, errs = (
        [(folder / f"{stream}-{k}").read_text() for k in range(len(ranks))]
        for stream in ("out", "err")
    )
    codes = [process.exitcode for process in processes]
    return SimpleNamespace(codes=codes, outs=outs, errs=errs, run=folder / "run")


def weights(run_dir: Path) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in checkpoint(SCRIPT, run_dir)["agent"].values()])


def be_greedy(rank: int) -> None:
    """No noise: the action of the largest probability."""
    torch.Tensor.exponential_ = lambda self: self.fill_(1.0)


def test_two_processes_take_the_step_of_one(tmp_path):
    """Three epochs, each with everything in one minibatch; no noise, so the rollout is the same."""
    sizes = [*TINY, "--total-timesteps", 32, "--eval-episodes", 0, "--run-dir", "run"]
    sizes += ["--num-minibatches", 1, "--update-epochs", 3]
    one, two, none = (
        play(tmp_path / str(size), size, *sizes, *more, prepare=be_greedy)
        for size, more in ((1, []), (2, []), (4, ["--learning-rate", 0]))
    )
    assert one.codes == [0] and two.codes == [0, 0], two.errs
    moved = (weights(one.run) - weights(none.run)).abs()
    assert moved.max() > 1e-4
    assert (weights(one.run) - weights(two.run)).abs().max() < 0.01 * moved.max()
    logs = [EventAccumulator(str(x.run)).Reload() for x in (one, two)]
    names = [name for name in logs[0].Tags()["scalars"] if name.startswith("losses/")]
    assert len(names) == 7  # also those of all processes together
    for name in names:
        ours, theirs = (log.Scalars(name)[0].value for log in logs)
        assert np.isclose(ours, theirs, rtol=0.01, atol=1e-4), name
    # the same environments, of other processes, each of which has tried one out before
    for size in (1, 2, 4):
        seeds = (tmp_path / str(size) / "seeds").read_text().split()
        assert sorted(seeds) == sorted([*"1234", *"1" * size])


def write_weights(rank: int) -> None:
    """Append a hash of all weights to a file of this process, after each step of Adam."""

    def hook(optimizer, args, kwargs):
        parts = [p.detach().numpy().tobytes() for p in optimizer.param_groups[0]["params"]]
        with open(f"weights-{rank}", "a") as file:
            print(hashlib.sha256(b"".join(parts)).hexdigest(), file=file)

    optim.register_optimizer_step_post_hook(hook)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A finished run of two processes."""
    folder = tmp_path_factory.mktemp("pair")
    return play(folder, 2, *TINY, "--run-dir", "run", prepare=write_weights)


def test_weights_stay_equal(pair):
    assert pair.codes == [0, 0], pair.errs
    hashes = [(pair.run.parent / f"weights-{rank}").read_text().split() for rank in (0, 1)]
    assert hashes[0] == hashes[1]
    assert len(set(hashes[0])) == 2 * 4 * 4  # iterations, epochs, minibatches


def test_all_processes_stop_an_update_together(tmp_path):
    """--target-kl around the mean of two KLs, where each process on its own would decide alone."""
    sizes = [*TINY, "--total-timesteps", 32, "--eval-episodes", 0, "--run-dir", "run"]
    sizes += ["--num-minibatches", 1]
    two = play(tmp_path / "two", 2, *sizes, "--update-epochs", 2)
    assert two.codes == [0, 0], two.errs
    events = EventAccumulator(str(two.run), size_guidance={"scalars": 0}).Reload()
    kl = 2 * events.Scalars("losses/approx_kl")[0].value  # logged is the mean with the first's 0
    for factor, steps in ((0.99, 2), (1.01, 3)):
        limit = ["--update-epochs", 3, "--target-kl", factor * kl]
        run = play(tmp_path / str(steps), 2, *sizes, *limit, prepare=write_weights)
        assert run.codes == [0, 0], run.errs
        for rank in (0, 1):
            assert len((run.run.parent / f"weights-{rank}").read_text().split()) == steps


def test_one_process_writes(pair, tmp_path):
    assert sorted(path.name.split(".")[0] for path in pair.run.iterdir()) == [
        *("args", "checkpoint", "events", "result", "source")
    ]
    assert sorted(path.name for path in pair.run.parent.iterdir() if path.is_dir()) == ["run"]
    assert pair.outs[1] == "" and pair.errs == ["", ""]
    lines = pair.outs[0].splitlines()
    assert "processes 2" in lines[1]
    assert sum(line.startswith("64 of 64 steps") for line in lines) == 1
    assert sum(line.startswith("playing 2 games") for line in lines) == 1
    assert sum(line.startswith("score ") for line in lines) == 1


def test_episodes_of_all_processes_count(pair, tmp_path):
    alone = play(tmp_path / "alone", None, *TINY, "--run-dir", "run")
    assert alone.codes == [0], alone.errs
    ours, theirs = (json.loads((x.run / "result.json").read_text()) for x in (pair, alone))
    assert ours["episodes"] == theirs["episodes"] > 4  # their length does not depend on actions
    assert ours["steps"] == 64 and ours["finished"]
    assert np.isclose(ours["sps"], 64 / ours["seconds"])
    events = EventAccumulator(str(pair.run), size_guidance={"scalars": 0}).Reload()
    returns = events.Scalars("charts/episodic_return")
    steps = [event.step for event in returns]
    assert len(returns) == ours["episodes"] and steps == sorted(steps)
    assert np.isclose(np.mean([event.value for event in returns]), ours["return_last100"])
    assert [event.step for event in events.Scalars("losses/value_loss")] == [32, 64]


def fast_clock(rank: int) -> None:
    """In the second process half an hour passes each time it looks."""
    clock, plain = itertools.count(0, 1800), time.perf_counter
    time.perf_counter = lambda: plain() + rank * next(clock)


def test_all_processes_save_together(tmp_path):
    """Only the second process's clock says that it is time, after the first update."""
    sizes = [*TINY, "--total-timesteps", 128, "--eval-episodes", 0, "--run-dir", "run"]
    group = play(tmp_path, 2, *sizes, "--checkpoint-every", 600, prepare=fast_clock)
    assert group.codes == [0, 0], group.errs


def interrupt_the_second(rank: int) -> None:
    """Only one process gets a signal, in its first update: Ctrl-C on one of two machines."""

    def hook(optimizer, args, kwargs):
        if rank == 1 and not sent:
            sent.append(os.kill(os.getpid(), signal.SIGINT))

    sent: list = []
    optim.register_optimizer_step_post_hook(hook)


def test_a_signal_to_one_stops_all(tmp_path):
    sizes = [*TINY, "--total-timesteps", 3200, "--run-dir", "run"]
    group = play(tmp_path, 2, *sizes, prepare=interrupt_the_second)
    assert group.codes == [0, 0], group.errs
    result = json.loads((group.run / "result.json").read_text())
    assert (result["steps"], result["finished"]) == (32, False)
    assert checkpoint(SCRIPT, group.run)["global_step"] == 32


def drift(rank: int) -> None:
    """One weight of the second process is another one after its last step of the iteration."""
    steps = []

    def hook(optimizer, args, kwargs):
        steps.append(1)
        if rank == 1 and len(steps) == 32:
            optimizer.param_groups[0]["params"][0].data[0, 0, 0, 0] += 1e-6

    optim.register_optimizer_step_post_hook(hook)


def test_drift_is_noticed(tmp_path):
    sizes = [*TINY, "--run-dir", "run", "--checkpoint-every", 0]
    group = play(tmp_path / "group", 2, *sizes, prepare=drift)
    assert group.codes == [1, -signal.SIGTERM]  # the second leaves the word to the first
    (line,) = group.errs[0].splitlines()
    assert line.startswith("error: the weights") and "processes [1] are not" in line
    assert group.errs[1] == ""
    assert checkpoint(SCRIPT, group.run)["global_step"] == 32


def in_double_precision(rank: int) -> None:
    """Where a rounded unit near 0 would send a filter elsewhere, it does not with 52 bits."""
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double


def test_one_process_is_ppo_atari(tmp_path):
    """Two iterations with actions of chance; and the same again, bit for bit."""
    sizes = [*TINY, "--eval-episodes", 0, "--run-dir", "run"]
    double = {"prepare": in_double_precision}
    first, second = (play(tmp_path / str(k), None, *sizes, **double) for k in (1, 2))
    parent = play(tmp_path / "parent", None, *sizes, name="ppo_atari", **double)
    assert first.codes == second.codes == parent.codes == [0], first.errs
    assert torch.equal(weights(first.run), weights(second.run))
    theirs = checkpoint("ppo_atari", parent.run)
    theirs = torch.cat([tensor.flatten() for tensor in theirs["agent"].values()])
    assert theirs.dtype == torch.float64
    assert (weights(first.run) - theirs).abs().max() < 1e-10  # a step is 2.5e-4
    assert torch.equal(
        checkpoint(SCRIPT, first.run)["rng"][0][0], checkpoint("ppo_atari", parent.run)["rng"][0]
    )


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 4)])
def test_resume_with_another_number_of_processes(before, after, tmp_path):
    group = play(tmp_path / "group", before, *TINY, "--run-dir", "run", "--stop-at", 32)
    assert group.codes == [0] * before, group.errs
    assert len(checkpoint(SCRIPT, group.run)["rng"]) == before
    group = play(tmp_path / "group", after, "--resume", "run")
    assert group.codes == [0] * after, group.errs
    assert "going on after step 32" in group.outs[0]
    run = checkpoint(SCRIPT, group.run)
    assert run["global_step"] == 64
    streams = {state[0].numpy().tobytes() for state in run["rng"]}
    assert len(streams) == after  # no two draw the same noise


def test_resume_is_exact_with_two_processes(tmp_path):
    """The streams of both go on; episodes end with the rollouts, so nothing else is lost."""
    sizes = [*TINY, "--env-id", EVEN[SCRIPT], "--run-dir", "run"]
    whole = play(tmp_path / "whole", 2, *sizes)
    parts = play(tmp_path / "parts", 2, *sizes, "--stop-at", 32)
    parts = play(tmp_path / "parts", 2, "--resume", "run")
    assert whole.codes == parts.codes == [0, 0], parts.errs
    assert torch.equal(weights(whole.run), weights(parts.run))


# === Bad input


@pytest.mark.parametrize(
    ("argv", "flag", "piece"),
    [
        (["--num-envs", "7"], "num-envs", "2 processes cannot share 7 evenly"),
        (["--num-envs", "2", "--num-steps", "3", "--num-minibatches", "2"], "num-minibatches", "2"),
        (["--evaluate", "run"], "evaluate", "no torchrun"),
    ],
)
def test_what_two_processes_cannot_share(argv, flag, piece, pair, monkeypatch, capsys):
    group = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in group.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(pair.run.parent)
    with pytest.raises(SystemExit) as end:
        load_script(SCRIPT).parse(argv)
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --{flag}: ") and piece in line


def test_other_arguments_on_the_other_machine(tmp_path):
    """Each machine says so: here both processes are the first of theirs."""

    def differ(rank):
        os.environ["LOCAL_RANK"] = "0"
        sys.argv += ["--seed", str(rank)]

    group = play(tmp_path / "group", 2, *TINY, "--run-dir", "run", prepare=differ)
    assert group.codes == [2, 2]
    for err in group.errs:
        (line,) = err.splitlines()
        assert line.startswith("error: --seed: differs between the processes")
    assert not group.run.exists()


@pytest.mark.parametrize("missing", ["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_rank_without_a_group(missing, monkeypatch, capsys):
    """RANK is there, from something that is not torchrun: one line, and no traceback of PyTorch."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv(missing)
    with pytest.raises(SystemExit) as end:
        load_script(SCRIPT).parse([])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: RANK is set, {missing} is not: start with torchrun"


def test_a_world_without_a_rank(tmp_path, monkeypatch):
    """A job script has set WORLD_SIZE for something else: alone is alone, and waits for nobody."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    group = play(tmp_path, None, *TINY, "--run-dir", "run")
    assert group.codes == [0], group.errs
    assert (group.run / "checkpoint.pt").exists()


# === torchrun


def torchrun_command(*argv: object) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run"]
    return [*command, *map(str, argv)]


def processes_in(folder: Path) -> list[int]:
    """The living processes whose working directory this is; workers have sessions of their own."""
    found = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            state = (link.parent / "stat").read_text().rsplit(")", 1)[1].split()[0]
            if link.readlink() == folder and state != "Z":
                found.append(int(link.parent.name))
    return found


def pid_of(rank: int, folder: Path) -> int:
    (pid,) = [
        pid
        for pid in processes_in(folder)
        if f"\0RANK={rank}\0" in "\0" + Path(f"/proc/{pid}/environ").read_text()
    ]
    return pid


@pytest.fixture
def torchrun(tmp_path):
    """Start torchrun with two processes in tmp_path; what is left is killed at the end."""
    processes = []

    def start(*argv: object, options: tuple = ()) -> subprocess.Popen:
        options = ("--standalone", "--nproc-per-node", 2, *options)
        command = torchrun_command(*options, ROOT / f"{SCRIPT}.py", *argv)
        env = environment(OMP_NUM_THREADS="1")
        pipes = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        processes.append(
            subprocess.Popen(command, cwd=tmp_path, env=env, start_new_session=True, **pipes)
        )
        return processes[-1]

    yield start
    for process in processes:
        kill_all(processes_in(tmp_path))
        process.communicate()


WITNESS = """
import os, pathlib, runpy, sys
import torch.distributed as dist

destroy = dist.destroy_process_group

def witness():
    destroy()
    tasks = pathlib.Path("/proc/self/task").glob("*/comm")
    pathlib.Path("threads-" + os.environ["RANK"]).write_text("".join(x.read_text() for x in tasks))

dist.destroy_process_group = witness
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are read from /proc")
def test_no_thread_of_the_group_outlives_it(tmp_path):
    """One that is still there while Python ends can abort the process behind a whole run.

    What keeps the group is whatever holds it: a default argument of torch.distributed.nn, if that
    is imported while there is a group, or work that has long been done.
    """
    (tmp_path / "witness.py").write_text(WITNESS)
    # a real game: what this file imports, torch.distributed.nn as well, would come too early
    sizes = ["--num-envs", 4, "--num-steps", 8, "--total-timesteps", 64, "--eval-episodes", 0]
    argv = [ROOT / f"{SCRIPT}.py", *sizes, "--run-dir", "run"]
    command = torchrun_command("--standalone", "--nproc-per-node", 2, "witness.py", *argv)
    env = environment(OMP_NUM_THREADS="1")
    subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True)
    threads = [(tmp_path / f"threads-{rank}").read_text() for rank in range(2)]
    assert all("python" in names and "gloo" not in names for names in threads), threads


def test_bad_input_is_one_line(torchrun, tmp_path):
    process = torchrun("--num-minibatches", 3)
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1  # torchrun's own
    (line,) = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: --num-minibatches: 3 does not divide")
    assert stderr.count("Traceback") == 1  # torchrun's own, too
    assert "exitcode  : 2" in stderr
    assert stdout == ""
    assert not list(tmp_path.iterdir())


# the victim, and where it is hit
KILLS = [
    pytest.param(0, LONG_UPDATES, id="first-in-update"),
    pytest.param(1, LONG_ROLLOUTS, marks=pytest.mark.slow, id="second-in-rollout"),
    pytest.param(0, LONG_ROLLOUTS, marks=pytest.mark.slow, id="first-in-rollout"),
    pytest.param(1, LONG_UPDATES, marks=pytest.mark.slow, id="second-in-update"),
]


@pytest.mark.parametrize(("rank", "argv"), KILLS)
def test_killed_process_ends_the_group(rank, argv, torchrun, tmp_path):
    process = torchrun(*argv, "--run-dir", "run")
    wait_for(lambda: saved(tmp_path / "run"), "checkpoint")
    time.sleep(0.5)  # by far the most of an iteration is that one part
    os.kill(pid_of(rank, tmp_path), signal.SIGKILL)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode != 0
    assert "Signal 9 (SIGKILL)" in stderr
    assert not processes_in(tmp_path)
    step = checkpoint(SCRIPT, tmp_path / "run")["global_step"]
    batch = 2 * argv[argv.index("--num-steps") + 1]
    more = ["--stop-at", step + batch, "--update-epochs", 1]
    group = play(tmp_path, 2, "--resume", "run", *more)
    assert group.codes == [0, 0], group.errs
    assert checkpoint(SCRIPT, tmp_path / "run")["global_step"] == step + batch


def test_restarted_group_goes_on(torchrun, tmp_path):
    argv = [*LONG_ROLLOUTS, "--run-dir", "run"]
    process = torchrun(*argv, "--stop-at", 3 * 512, options=("--max-restarts", 1))
    wait_for(lambda: saved(tmp_path / "run"), "checkpoint")
    os.kill(pid_of(1, tmp_path), signal.SIGKILL)
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, stderr
    (line,) = [line for line in stdout.splitlines() if line.startswith("going on after step ")]
    assert int(line.split()[4].strip(";").replace(",", "")) in (512, 1024)
    assert checkpoint(SCRIPT, tmp_path / "run")["global_step"] == 3 * 512


def test_restart_leaves_other_runs_alone(torchrun, tmp_path):
    """A refusal is restarted too, and what is in the directory is not this command's."""
    argv = [*LONG_ROLLOUTS, "--stop-at", 512, "--run-dir", "run"]
    assert torchrun(*argv).wait(PATIENCE) == 0
    before = (tmp_path / "run" / "checkpoint.pt").read_bytes()
    process = torchrun(*argv, "--seed", 7, options=("--max-restarts", 1))
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode and "going on" not in stdout
    assert "error: --run-dir: " in stderr and "holds a run: --resume it" in stderr
    assert (tmp_path / "run" / "checkpoint.pt").read_bytes() == before


@pytest.mark.parametrize(
    "signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_signal_to_torchrun_saves_and_ends(signum, torchrun, tmp_path):
    """A terminal sends Ctrl-C to torchrun's process group, and torchrun hands it on."""
    process = torchrun(*LONG_ROLLOUTS, "--checkpoint-every", 1000, "--run-dir", "run")
    wait_for(lambda: saved(tmp_path / "run"), "checkpoint")
    os.killpg(process.pid, signum)
    stdout, stderr = process.communicate(timeout=30)
    assert "--resume run" in stdout, stderr
    assert stdout.count("stopping soon") == 1
    assert not processes_in(tmp_path)
    assert checkpoint(SCRIPT, tmp_path / "run")["global_step"] > 512
    assert '"finished": false' in (tmp_path / "run" / "result.json").read_text()
    (line,) = [line for line in stdout.splitlines() if "--resume run" in line]
    start = f"torchrun --nproc-per-node 2 {ROOT / SCRIPT}.py "
    assert f"{start}--resume run" in line
    assert stdout.startswith(start)


# === Two machines


@pytest.fixture
def hosts():
    """Two hosts with a cable between them, as network namespaces: (name, address) of each."""
    pid = os.getpid()
    names, cables = ([f"{kind}{pid}{end}" for end in "ab"] for kind in ("ppo", "v"))
    hosts = list(zip(names, ("10.213.0.1", "10.213.0.2"), cables, strict=True))
    commands = [f"netns add {name}" for name in names]
    commands += [f"link add {cables[0]} type veth peer name {cables[1]}"]
    for name, address, cable in hosts:
        commands += [f"link set {cable} netns {name}", f"-n {name} link set lo up"]
        commands += [f"-n {name} addr add {address}/24 dev {cable}"]
        commands += [f"-n {name} link set {cable} up"]
    try:
        for command in commands:
            made = shutil.which("ip") and subprocess.run(
                ["ip", *command.split()], capture_output=True, check=False
            )
            if not made or made.returncode:
                pytest.skip("network namespaces are not permitted here")
        yield hosts
    finally:
        for name in names if shutil.which("ip") else ():
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def start_on(host: tuple, folder: Path, *argv: object) -> subprocess.Popen:
    """Start torchrun with one process on one of two hosts, which see the same folder."""
    name, address, cable = host
    options = ["--nnodes", 2, "--nproc-per-node", 1, "--rdzv-backend", "c10d", "--rdzv-id", "two"]
    options += ["--rdzv-endpoint", "10.213.0.1:29400", "--local-addr", address]
    # by their names, which are the same here, they could not tell which of them that is
    options += ["--rdzv-conf", f"is_host={int(address == '10.213.0.1')}"]
    return subprocess.Popen(
        ["ip", "netns", "exec", name, *torchrun_command(*options, ROOT / f"{SCRIPT}.py", *argv)],
        cwd=folder,
        env=environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME=cable),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.slow
def test_two_machines_learn_what_one_does(hosts, pair, tmp_path):
    nodes = [start_on(host, tmp_path, *TINY, "--run-dir", "run") for host in hosts]
    outs = [node.communicate(timeout=PATIENCE) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outs
    assert sorted("64 of 64 steps" in stdout for stdout, _ in outs) == [False, True]
    assert torch.equal(weights(tmp_path / "run"), weights(pair.run))


@pytest.mark.slow
def test_process_killed_on_one_machine_ends_both(hosts, tmp_path):
    nodes = [start_on(host, tmp_path, *LONG_ROLLOUTS, "--run-dir", "run") for host in hosts]
    try:
        wait_for(lambda: saved(tmp_path / "run"), "checkpoint")
        os.kill(pid_of(1, tmp_path), signal.SIGKILL)
        for node in nodes:
            node.communicate(timeout=30)
            assert node.returncode != 0
        assert checkpoint(SCRIPT, tmp_path / "run")["global_step"] >= 512
    finally:
        kill_all(processes_in(tmp_path))


def test_a_group_may_restart_twice(tmp_path, monkeypatch):
    """The checkpoint of its second life says that it was resumed; that is no other argument."""
    monkeypatch.chdir(tmp_path)
    script = load_script("ppo_distributed")
    argv = ["--run-dir", "run", "--num-envs", "2", "--num-steps", "8", "--total-timesteps", "64"]
    args = script.parse([*argv, "--stop-at", "16", "--eval-episodes", "0"])
    script.train(args)
    run = torch.load("run/checkpoint.pt", weights_only=True)
    run["args"] |= {"stop_at": None, "eval_episodes": 10, "resume": "run"}
    torch.save(run, "run/checkpoint.pt")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert script.parse(argv).resume == "run"


def test_gpus_without_nccl_use_gloo(monkeypatch):
    """On Windows PyTorch has none, for a single process neither."""
    script, backends = load_script("ppo_distributed"), []
    monkeypatch.setattr(script.dist, "is_initialized", lambda: False)
    monkeypatch.setattr(script, "gather", lambda thing: [thing])
    start = lambda backend, **_: backends.append(backend)  # noqa: E731
    monkeypatch.setattr(script.dist, "init_process_group", start)
    for device, there in (("cuda", True), ("cuda", False), ("cpu", True)):
        monkeypatch.setattr(script.dist, "is_nccl_available", lambda there=there: there)
        script.connect(script.Args(), torch.device(device))
    assert backends == ["nccl", "gloo", "gloo"]


def test_processes_share_the_cores(monkeypatch):
    """With --vector-mode async each has environments in as many processes as its part of them."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8), raising=False)
    for processes, cores in (("4", 2), ("16", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        assert cores == load_script("ppo_distributed").CORES
