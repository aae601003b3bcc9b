"""appo_async.py as what it is: processes, which are killed, stopped and counted."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT, load_script, run_script, source_of, with_mounts
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_faults import (
    PATIENCE,
    checkpoint,
    patience,
    printed_command,
    saved,
    session,
    wait_for,
)

SCRIPT = ROOT / "appo_async.py"
DRIVER = ROOT / "tests" / "appo_driver.py"
FUSE = ["--env-id", "faulty_envs:FuseAtari-v0", "--device", "cpu", "--eval-episodes", 0]
# four environments in two splits of one worker; batches of 32
SMALL = ["--num-workers", 1, "--envs-per-worker", 4, "--num-steps", 8, "--minibatch-size", 32]
ENDLESS = [*FUSE, *SMALL, "--total-timesteps", 10**7]
# a learning rate of 0: see appo_driver.py
LEDGER = ["--env-id", "VizdoomLedger-v0", "--device", "cpu", "--eval-episodes", 0]
LEDGER += ["--learning-rate", 0, "--num-steps", 8, "--total-timesteps", 10**8]
LEARNED = np.dtype([("id", "<u8"), ("time", "<u8")])  # as in appo_driver.py
PAGE = np.dtype([("pid", "<u8"), ("time", "<u8"), ("seed", "<u8")])


def shared_files(pids: list[int]) -> set[str]:
    """The names in /dev/shm that these processes map or have made; other programs have theirs."""
    names = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            names |= set(re.findall(r"/dev/shm/(\S+)$", maps, re.MULTILINE))
    made = tuple(f"torch_{pid}_" for pid in pids)
    return names | {name for name in os.listdir("/dev/shm") if name.startswith(made)}


class Run:
    """A script that runs as the leader of a session, its output in files beside the run."""

    def __init__(self, folder: Path, script: Path, *argv: object, prefix: tuple = ()):
        self.folder, self.files = folder, set()
        path = os.pathsep.join((str(ROOT / "tests"), str(ROOT)))
        with open(folder / "out", "w") as out, open(folder / "err", "w") as err:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, str(script), *map(str, argv)],
                cwd=folder,
                env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": ""},
                start_new_session=True,
                stdout=out,
                stderr=err,
            )

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    def roles(self) -> dict[str, int]:
        """The process of each role, by what `top` shows."""
        found = {}
        for pid in session(self.process):
            with contextlib.suppress(OSError):
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                if name.startswith("appo "):
                    found[name] = pid
        return found

    def working(self, step: int = 1) -> dict[str, int]:
        """Wait for a checkpoint of this step or a later one; returns the roles."""

        def written():
            assert self.process.poll() is None, self.err
            with contextlib.suppress(Exception):  # there is none yet
                path = self.folder / "run" / "checkpoint.pt"
                return torch.load(path, weights_only=True)["global_step"] >= step

        wait_for(written, "checkpoint")
        self.files = shared_files(session(self.process))
        return self.roles()

    def says(self, words: str, seconds: float = PATIENCE) -> None:
        wait_for(lambda: words in self.err, f"{words!r} on stderr", patience(seconds))

    def ends(self, seconds: float = PATIENCE) -> int:
        """Wait until all processes are gone, and what they shared as well. The exit code."""
        code = self.process.wait(patience(seconds))
        wait_for(lambda: not session(self.process), "end of all processes", patience(seconds))
        left = (self.files | shared_files([self.process.pid])) & set(os.listdir("/dev/shm"))
        assert not left
        return code


@pytest.fixture
def start(tmp_path):
    """Start a script in tmp_path; what is left is killed at the end."""
    runs = []

    def start(*argv: object, script: Path = SCRIPT, prefix: tuple = ()) -> Run:
        runs.append(Run(tmp_path, script, *argv, "--run-dir", "run", prefix=prefix))
        return runs[-1]

    yield start
    for run in runs:
        for pid in session(run.process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.process.wait()


def goes_on(folder: Path, monkeypatch) -> None:
    """--resume learns a batch more than the last checkpoint had: in one process, which is fast."""
    monkeypatch.chdir(folder)
    step = checkpoint("appo_async", folder / "run")["global_step"]
    (folder / "fuse").unlink(missing_ok=True)
    script = load_script("appo_async")
    args = ["--resume", "run", "--serial", "--stop-at", str(step + 1)]
    assert script.train(script.parse(args))["steps"] == step + 32


# === While it runs


def smaps(pid: int, key: str) -> float:
    """A line of the process's memory, in MB."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.search(rf"^{key}:\s+(\d+) kB", text, re.MULTILINE)[1]) / 1e3 * 1.024


def written(pid: int) -> tuple[int, int]:
    """Bytes written so far, and calls that wrote them."""
    text = Path(f"/proc/{pid}/io").read_text()
    return tuple(int(re.search(rf"^{key}: (\d+)", text, re.MULTILINE)[1]) for key in IO)


IO = ("wchar", "syscw")


def test_roles_memory_messages_and_ctrl_c(start, tmp_path):
    """One run, looked at from outside; then Ctrl-C, which a terminal sends to the whole group."""
    sizes = ["--num-workers", 2, "--envs-per-worker", 8, "--checkpoint-every", 1000]
    run = start(*ENDLESS, *sizes)
    roles = run.working()
    assert set(roles) == {"appo rollout 0", "appo rollout 1", "appo policy 0", "appo learner"}
    assert roles["appo learner"] == run.process.pid
    choose = "import os; os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))"
    may_be_batch = subprocess.run([sys.executable, "-c", choose], check=False).returncode == 0
    for name, pid in roles.items():
        command = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode()
        assert command == name
        # where the system lets a process choose; appo_async.py says what it gains
        assert os.sched_getscheduler(pid) == (os.SCHED_BATCH if may_be_batch else os.SCHED_OTHER)

    script = load_script("appo_async")
    args = script.parse([*map(str, [*ENDLESS, *sizes])])
    predicted = script.shared_megabytes(args)
    said = re.search(r"2 x 8 environments, (\d+) MB of shared memory", run.out)
    allocated = sum(smaps(pid, "Pss_Shmem") for pid in roles.values())
    assert allocated == pytest.approx(predicted, rel=0.02)
    assert allocated == pytest.approx(float(said[1]), rel=0.05)

    workers = [pid for name, pid in roles.items() if name != "appo learner"]
    before = {pid: written(pid) for pid in workers}
    time.sleep(2)
    for pid in workers:
        sizes, calls = np.subtract(written(pid), before[pid])
        assert sizes == calls > 0  # every message is one byte long

    os.killpg(run.process.pid, signal.SIGINT)
    assert run.ends() == 0
    assert run.err == ""
    assert run.out.count("stopping soon") == 1
    step = checkpoint("appo_async", tmp_path / "run")["global_step"]
    assert step > 32
    again = run_script(*printed_command(run.out), "--stop-at", step + 1, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert f"going on after step {step:,};" in again.stdout
    assert checkpoint("appo_async", tmp_path / "run")["global_step"] == step + 32


def test_sigterm_to_every_process(start, tmp_path):
    """As a service manager sends it. Workers leave the end to the learner."""
    run = start(*ENDLESS, "--checkpoint-every", 1000)
    run.working()
    for pid in session(run.process):
        os.kill(pid, signal.SIGTERM)
    assert run.ends() == 0
    assert run.err == ""
    assert checkpoint("appo_async", tmp_path / "run")["global_step"] > 32


def test_second_ctrl_c_ends_at_once(start, tmp_path):
    """Within an iteration that would take minutes."""
    run = start(*ENDLESS, "--minibatch-size", 8192, "--num-steps", 128)
    wait_for(lambda: "of shared memory" in run.out, "start")
    wait_for(lambda: "appo rollout 0" in run.roles(), "rollout worker")
    time.sleep(1)
    os.killpg(run.process.pid, signal.SIGINT)
    time.sleep(1)
    assert run.process.poll() is None  # the first only asks
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.ends(10) == -signal.SIGINT
    assert "Traceback" not in run.err
    assert not saved(tmp_path / "run")


# === Faults


def kill(role: str):
    return lambda run: os.kill(run.roles()[role], signal.SIGKILL)


def burn(run: Run):
    (run.folder / "fuse").touch()
    wait_for((run.folder / "burnt").exists, "fault")


FAULTS = {
    "policy-killed": (kill("appo policy 0"), SCRIPT, ENDLESS, "policy worker 0 ended with exit"),
    "learner-killed": (kill("appo learner"), SCRIPT, ENDLESS, ""),
    "rollout-fails": (burn, SCRIPT, ENDLESS, "RuntimeError: the fuse of a rollout worker"),
    "policy-fails": (burn, DRIVER, [*LEDGER, *SMALL], "RuntimeError: the fuse of a policy worker"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_ends_all_processes(fault, start, tmp_path, monkeypatch):
    happen, script, argv, words = FAULTS[fault]
    run = start(*argv, "--checkpoint-every", 0, script=script)
    run.working()
    happen(run)
    run.says(words, seconds=2)
    code = run.ends(10)
    assert code == (-signal.SIGKILL if fault == "learner-killed" else 1)
    assert words in run.err.partition("; what was saved")[0]  # the first cause comes first
    if script == SCRIPT:
        goes_on(tmp_path, monkeypatch)


def test_learner_that_fails_ends_all_processes(start):
    """By itself, while its workers are well."""
    run = start("--env-id", "faulty_envs:NanAtari-v0", *SMALL, "--total-timesteps", 10**7)
    assert run.ends() == 1
    line = run.err.splitlines()[-1]  # behind Gymnasium's warnings
    assert line.startswith("error: the gradient is not finite after step 32; what was saved in ")
    assert "Traceback" not in run.err


@pytest.mark.parametrize(
    "role", ["appo learner", pytest.param("appo policy 0", marks=pytest.mark.slow)]
)
def test_environment_that_hangs_ends_too(role, start):
    """It hears no bell, and never looks for its parent."""
    run = start(*ENDLESS, "--num-workers", 4, "--checkpoint-every", 0)
    run.working()
    (run.folder / "hang").touch()
    time.sleep(1)
    kill(role)(run)
    assert run.ends(10) != 0


class Ledger:
    """What appo_driver.py writes: how far each environment came, and what was learned from it."""

    def __init__(self, folder: Path):
        self.folder = folder

    def stepped(self) -> dict[int, tuple[int, int]]:
        """The process and the steps of each environment, living or dead."""
        pages = {}
        for path in self.folder.glob("ledger/*"):
            if len(content := path.read_bytes()) == PAGE.itemsize:
                (page,) = np.frombuffer(content, PAGE)
                pages[int(path.name)] = int(page["pid"]), int(page["time"])
        return pages

    def seeds(self) -> dict[int, int]:
        pages = {int(path.name): path.read_bytes() for path in self.folder.glob("ledger/*")}
        pages = {number: page for number, page in pages.items() if len(page) == PAGE.itemsize}
        return {number: int(np.frombuffer(page, PAGE)["seed"][0]) for number, page in pages.items()}

    def learned(self) -> dict[int, list[int]]:
        """When the trajectories began that were learned from, in that order."""
        path, times = self.folder / "learned", {}
        content = path.read_bytes() if path.exists() else b""
        for number, begin in np.frombuffer(content[: len(content) // 16 * 16], LEARNED).tolist():
            times.setdefault(number, []).append(begin)
        return times

    def works(self, pid: int, trajectories: int, num_envs: int) -> bool:
        """Has so much been learned from every environment of this process?"""
        learned = self.learned()
        mine = [number for number, (owner, _) in self.stepped().items() if owner == pid]
        enough = [len(learned.get(number, ())) >= trajectories for number in mine]
        return len(mine) == num_envs and all(enough)

    def check(self, num_steps: int, living: set[int]) -> None:
        """Nothing that was finished is missing, or learned from twice, or out of order."""
        learned, stepped = self.learned(), self.stepped()
        assert learned.keys() <= stepped.keys()
        # a successor's environments are new ones
        assert len(set(self.seeds().values())) == len(stepped)
        for number, (pid, steps) in stepped.items():
            times = learned.get(number, [])
            assert times == list(range(0, num_steps * len(times), num_steps))
            if pid in living:
                continue
            finished, begun = divmod(steps, num_steps)
            # a kill between a trajectory's last step and the next line leaves it unfinished
            assert len(times) in {finished, finished - (begun == 0)}, (steps, len(times))


def kill_workers(run: Run, kills: int, num_envs: int, watch=lambda: None) -> Ledger:
    """Kill rollout workers in turn, at random moments; see that all goes on; then Ctrl-C."""
    chance, ledger, killed = random.Random(kills), Ledger(run.folder), set()
    run.working()

    def successor(role):
        assert run.process.poll() is None, run.err
        pid = run.roles().get(role)
        return pid not in killed and pid

    for count in range(kills):
        role = f"appo rollout {count % 2}"
        pid = wait_for(lambda role=role: successor(role), role)
        if count % 4:  # every other one of worker 0 may die before it has begun
            wait_for(lambda pid=pid: ledger.works(pid, 1, num_envs), "trajectory", 2 * PATIENCE)
        time.sleep(chance.uniform(0, 0.5))
        os.kill(pid, signal.SIGKILL)
        killed.add(pid)
        watch()
    for role in ("appo rollout 0", "appo rollout 1"):
        pid = wait_for(lambda role=role: successor(role), role)
        # more than it has slots: none is lost
        wait_for(lambda pid=pid: ledger.works(pid, 12, num_envs), "trajectories", 2 * PATIENCE)
    watch()
    living = set(run.roles().values())
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.ends() == 0, run.err
    assert run.err == ""
    assert run.out.count("was killed by signal 9: another takes its place") == kills
    ledger.check(8, living)
    assert len(ledger.stepped()) >= num_envs * (2 + kills // 2)
    return ledger


STORM = [*LEDGER, "--num-workers", 2, "--envs-per-worker", 4, "--minibatch-size", 64]
STORM += ["--rnn", "gru", "--checkpoint-every", 1000]


@pytest.mark.parametrize("kills", [8, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_rollout_workers_are_replaced(kills, start):
    kill_workers(start(*STORM, script=DRIVER), kills, num_envs=4)


@pytest.mark.slow
@pytest.mark.timeout(6000)
def test_soak(start):
    """SOAK_MINUTES (5), half of them left alone and then 200 kills: no process's memory grows.

    One hour: SOAK_MINUTES=60 pytest -m slow -k soak
    """
    run, memory = start(*STORM, script=DRIVER), []
    begin, minutes = time.monotonic(), float(os.environ.get("SOAK_MINUTES", "5"))
    kills = int(os.environ.get("SOAK_KILLS", "200"))
    run.working()

    def watch():
        memory.append({role: smaps(pid, "Pss_Anon") for role, pid in run.roles().items()})

    def grown(samples, role):
        # medians, for a checkpoint that is being written takes 20 MB for a moment
        before, now = np.array_split([sample[role] for sample in samples], 4)[2:]
        return np.median(now) > 1.02 * np.median(before)

    while time.monotonic() - begin < 30 * minutes:
        time.sleep(5)
        watch()
    undisturbed = {f"appo rollout {i}" for i in range(2)} | {"appo policy 0", "appo learner"}
    assert all(sample.keys() == undisturbed for sample in memory)
    assert not [role for role in undisturbed if grown(memory, role)], memory
    pause = 30 * minutes / max(kills, 1)

    def watch_living():
        living = run.roles()
        memory.append({x: smaps(living[x], "Pss_Anon") for x in ("appo learner", "appo policy 0")})
        time.sleep(max(0, begin + 30 * minutes + pause * len(memory[quiet:]) - time.monotonic()))

    quiet = len(memory)
    kill_workers(run, kills, num_envs=4, watch=watch_living)
    assert not [role for role in ("appo learner", "appo policy 0") if grown(memory, role)], memory


def engines(run: Run) -> dict[int, str]:
    """The ViZDoom programs of a run, and the names by which they share memory."""
    found = {}
    for pid in session(run.process):
        with contextlib.suppress(OSError, ValueError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            found[pid] = words[words.index(b"+viz_instance_id") + 1].decode()
    return found


@pytest.mark.parametrize("end", ["ctrl-c", pytest.param("kill", marks=pytest.mark.slow)])
def test_vizdoom_leaves_nothing(end, start, tmp_path):
    """A worker is killed: its engines go. Ctrl-C, or a killed learner: the others, too."""
    tiny = ["--num-workers", 1, "--envs-per-worker", 2, "--num-steps", 8, "--minibatch-size", 16]
    doom = ["--env-id", "VizdoomBasic-v1", "--device", "cpu", "--eval-episodes", 0]
    run = start(*doom, *tiny, "--checkpoint-every", 0)
    roles, first = run.working(), engines(run)
    assert len(first) == 2

    def files(names):
        return [x for x in os.listdir("/dev/shm") if x.startswith("ViZDoom") and x[-10:] in names]

    names = {name[-10:] for name in first.values()}
    assert files(names)
    os.kill(roles["appo rollout 0"], signal.SIGKILL)
    wait_for(lambda: not first.keys() & engines(run).keys(), "end of engines", patience(10))
    assert not files(names)
    second = wait_for(lambda: len(found := engines(run)) == 2 and found, "new engines")
    run.working(checkpoint("appo_async", tmp_path / "run")["global_step"] + 64)
    signum = signal.SIGINT if end == "ctrl-c" else signal.SIGKILL
    os.killpg(run.process.pid, signum)
    assert run.ends(10) == (0 if end == "ctrl-c" else -signum)
    assert run.err == ""
    assert not files({name[-10:] for name in second.values()})


ORPHAN = """
import os, signal, subprocess, sys, threading, time
import appo_async
parent = os.getpid()
if os.fork():
    while not os.path.exists("ready"):
        time.sleep(0.05)
    os._exit(0)
os.setpgrp()
threading.Thread(target=appo_async.end_orphan, args=(parent,), daemon=True).start()
program = [sys.executable, "-c", "import time; time.sleep(300)", "+viz_instance_id", sys.argv[1]]
engine = subprocess.Popen(program)
print(engine.pid, flush=True)
open("ready", "w").close()
while os.getppid() == parent:
    time.sleep(0.05)
signal.alarm(5)  # as run_part, and what follows is an environment that does not close
while True:
    time.sleep(1)
"""


def test_an_orphan_that_hangs_takes_its_programs_along(tmp_path):
    """The learner is gone, and a worker cannot close its ViZDooms."""
    name = f"hangs{os.getpid()}"
    memory = Path(f"/dev/shm/ViZDoomControl{name}")
    memory.touch()
    try:
        found = subprocess.run(
            [sys.executable, "-c", ORPHAN, name],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
            timeout=PATIENCE,  # standard output is open as long as the orphan lives
        )
        engine = Path(f"/proc/{int(found.stdout)}/cmdline")
        wait_for(lambda: not engine.exists() or not engine.read_bytes(), "end", patience(10))
        assert not memory.exists()
    finally:
        memory.unlink(missing_ok=True)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_where_the_learner_plays(signum, start, tmp_path):
    """ViZDoom's programs that it starts itself do not hear it; their id may name a module."""
    tiny = ["--num-workers", 1, "--envs-per-worker", 2, "--num-steps", 8, "--minibatch-size", 16]
    doom = ["--env-id", "vizdoom.gymnasium_wrapper:VizdoomBasic-v1", "--device", "cpu"]
    run = start("--serial", *doom, *tiny, "--checkpoint-every", 1000)
    run.working()
    assert len(engines(run)) == 2
    os.killpg(run.process.pid, signum)
    assert run.ends() == 0, run.err
    assert run.err == ""
    assert checkpoint("appo_async", tmp_path / "run")["global_step"] > 16


def test_a_worker_that_cannot_be_started_ends_the_run(start, tmp_path):
    """For want of memory, or of open files: those that have started must not wait for ever."""
    source, line = source_of("appo_async"), "            process.start()\n"
    assert source.count(line) == 1
    script = tmp_path / "appo_async.py"
    failing = "            process.start() if member < 1 else os.open(os.devnull, -1)\n"
    script.write_text(source.replace(line, failing))
    run = start(*ENDLESS, script=script)
    assert run.ends() == 1
    assert "os.open" in run.err


# === Too little shared memory


def in_small_memory(size: str) -> tuple[str, ...]:
    """What comes before a command with a /dev/shm of its own."""
    return tuple(with_mounts(f"mount -t tmpfs -o size={size} none /dev/shm"))


def test_too_little_shared_memory(start, tmp_path):
    """Docker gives 64 MB."""
    sizes = ["--envs-per-worker", 64, "--num-steps", 16]
    run = start(*ENDLESS, *sizes, prefix=in_small_memory("64m"))
    assert run.ends() == 2
    (line,) = run.err.splitlines()
    words = r"error: --envs-per-worker: (\d+) MB of shared memory are needed, 67 MB are free: "
    needed = re.match(words + r"use fewer, or docker run --shm-size=\d+m$", line)
    assert int(needed[1]) > 67
    assert sorted(path.name for path in tmp_path.iterdir()) == ["err", "out"]


def test_just_enough_shared_memory(start):
    """A prediction that is too small would end as a bus error."""
    script = load_script("appo_async")
    argv = [*ENDLESS, "--stop-at", 64]
    needed = script.shared_megabytes(script.parse([*map(str, argv)]))
    run = start(*argv, prefix=in_small_memory(f"{int(needed * 1e3 / 1.024) + 8}k"))
    assert run.ends() == 0, run.err


def test_memory_is_linear():
    script = load_script("appo_async")
    env = {"env_id": "faulty_envs:FuseAtari-v0", "num_workers": 2, "num_steps": 8}
    sizes = [
        script.shared_megabytes(script.Args(**env, envs_per_worker=n, minibatch_size=64))
        for n in (8, 16, 32, 64)
    ]
    steps = np.diff(sizes) / (8, 16, 32)
    assert np.allclose(steps, steps[0])


# === Shapes of the sampler

SPLITS = ["--num-workers", 2, "--num-splits", 3, "--envs-per-worker", 6, "--minibatch-size", 64]
SHAPES = {  # with the trajectories in a batch, and in a slot
    "three-splits": ([*SPLITS, "--num-policy-workers", 2, "--rnn", "gru"], 8, 2),
    # most slots are part of four batches
    "one-split": (
        [*SMALL, "--num-splits", 1, "--envs-per-worker", 8, "--minibatch-size", 24],
        *(3, 8),
    ),
}


def assert_oldest_first(ledger: Ledger, in_batch: int, in_slot: int) -> None:
    """What was finished two looks before another is never learned from after it.

    The learner looks once before each batch, and the driver right after. What the driver sees for
    the first time after batch k was found by the look before batch k, or by the next one.
    """
    order = np.fromfile(ledger.folder / "learned", LEARNED)
    batch = {(int(row["id"]), int(row["time"]) // 8): i // in_batch for i, row in enumerate(order)}
    filled = np.fromfile(ledger.folder / "filled", np.int64).reshape(len(order) // in_batch, -1)
    found = []  # (the first look that may have found it, the batch that learned from it)
    for number, seed in ledger.seeds().items():
        of_split = filled[:, (seed - 1) // in_slot]
        for i in range(of_split[-1]):
            found.append((np.argmax(of_split > i), batch.get((number, i), len(filled))))
    looks, batches = np.array(found).T
    assert (batches >= looks).all()
    for look in np.unique(looks):
        older, younger = batches[looks < look - 1], batches[looks == look]
        assert older.max(initial=0) <= younger.min()


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_and_messages(shape, start, tmp_path, monkeypatch):
    """Every sample is whole and learned from once; nothing is pickled once the processes run.

    And every bell is rung when it is time: see RUNG in appo_driver.py.
    """
    monkeypatch.setenv("RUNG", "1")
    argv, *sizes = SHAPES[shape]
    stop = 1536
    run = start(*LEDGER, *argv, "--learner-threads", 2, "--stop-at", stop, script=DRIVER)
    assert run.ends() == 0, run.err
    learned = Ledger(tmp_path).learned()
    assert sum(map(len, learned.values())) == stop / 8
    for times in learned.values():
        assert times == list(range(0, 8 * len(times), 8))
    assert_oldest_first(Ledger(tmp_path), *sizes)
    noise = (tmp_path / "noise").read_text().split()
    assert len(noise) == len(set(noise)) == (2 if shape == "three-splits" else 1)
    workers = load_script("appo_async").parse(list(map(str, argv))).num_workers
    seeds = [1 + 10**6 * (1 + workers + index) for index in range(len(noise))]
    assert sorted(map(int, noise)) == seeds
    assert set((tmp_path / "threads").read_text().splitlines()) == {"policy 1", "learner 2"}
    assert not (tmp_path / "sent").exists(), (tmp_path / "sent").read_text()


@pytest.mark.parametrize("slow", ["rollout", "learner"])
def test_who_is_the_bottleneck_is_shown(slow, start, tmp_path, monkeypatch):
    """One kind of process takes its time, and the others wait for it."""
    monkeypatch.setenv("SLOW", slow)
    run = start(*LEDGER, *SMALL, "--num-workers", 2, "--stop-at", 960, script=DRIVER)
    assert run.ends() == 0, run.err
    log = EventAccumulator(str(tmp_path / "run")).Reload()
    waiting = {
        role: log.Scalars(f"charts/waiting_{role}")[-1].value
        for role in ("rollout", "policy", "learner")
    }
    assert waiting.pop(slow) + 0.1 < min(waiting.values()), waiting
    assert max(waiting.values()) < 1.1, waiting


def test_worker_that_stalls_is_no_error(start):
    """Its samples are old when they come, but were chosen with the newest weights of their time."""
    sizes = ["--num-workers", 2, "--num-steps", 1, "--minibatch-size", 2]
    run = start(*LEDGER, *SMALL, *sizes, script=DRIVER)
    worker = run.working()["appo rollout 0"]
    for _ in range(8):
        os.kill(worker, signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(worker, signal.SIGCONT)
        time.sleep(0.2)
        assert run.process.poll() is None, run.err
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.ends() == 0, run.err


def test_half_written_weights_are_never_used(start, monkeypatch):
    """Reading takes longer than an update; see FILL in appo_driver.py."""
    monkeypatch.setenv("FILL", "1")
    shape = ["--num-workers", 2, "--num-policy-workers", 2, "--envs-per-worker", 4]
    run = start(*LEDGER, *shape, "--minibatch-size", 8, "--stop-at", 800, script=DRIVER)
    assert run.ends() == 0, run.err
    assert run.err == ""


# === In one process


def serial(script, folder: Path, **more) -> dict:
    sizes = {"num_workers": 2, "envs_per_worker": 4, "num_steps": 8, "minibatch_size": 32}
    sizes |= {"total_timesteps": 160, "eval_episodes": 0, "device": "cpu", "serial": True}
    sizes |= {"env_id": "toy_envs:ToyAtari-v0", "run_dir": str(folder)}
    script.train(script.Args(**sizes | more))
    return checkpoint("appo_async", folder)


def test_bf16_in_worker_and_learner(tmp_path):
    """The worker casts the network once, the learner in each pass: they say nearly the same."""
    kl = {}
    for precision in ("fp32", "bf16"):
        serial(load_script("appo_async"), tmp_path / precision, precision=precision, num_splits=1)
        log = EventAccumulator(str(tmp_path / precision)).Reload()
        kl[precision] = abs(log.Scalars("losses/old_approx_kl")[0].value)
    assert kl["fp32"] < 1e-6 and kl["bf16"] < 1e-3
    fp32, bf16 = (checkpoint("appo_async", tmp_path / name)["agent"] for name in kl)
    assert any(not torch.equal(fp32[name], bf16[name]) for name in fp32)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"rnn": "gru", "num_policy_workers": 2, "num_splits": 1},
        {"native_envs": True, "env_id": "PongNoFrameskip-v4"},
    ],
)
def test_serial_is_repeatable(more, tmp_path):
    first, second, other = (
        serial(load_script("appo_async"), tmp_path / name, seed=seed, **more)
        for name, seed in (("first", 1), ("second", 1), ("other", 2))
    )
    assert first["agent"].keys() == second["agent"].keys()
    for name, tensor in first["agent"].items():
        assert torch.equal(tensor, second["agent"][name])
    for key, state in first["optimizer"]["state"].items():
        for name, tensor in state.items():
            assert torch.equal(tensor, second["optimizer"]["state"][key][name])
    assert torch.equal(first["rng"][0], second["rng"][0])
    assert first["returns"] == second["returns"]
    assert not torch.equal(first["agent"]["actor.weight"], other["agent"]["actor.weight"])


def test_growing_lag_is_an_error(tmp_path):
    """A policy worker that never takes new weights."""
    source, line = source_of("appo_async"), "while version != x.version[0]:"
    assert source.count(line) == 1
    script = load_script("appo_async", source.replace(line, "while version < 0:"))
    with pytest.raises(TimeoutError, match="policy workers do not get new weights"):
        serial(script, tmp_path / "run", total_timesteps=3200)
    assert checkpoint("appo_async", tmp_path / "run")["global_step"] < 640


# === EnvPool in the workers


@pytest.mark.parametrize("game", ["Breakout", "RoadRunner", "Freeway"])
def test_native_envs_are_those_of_envpool_ppo(game):
    """Pixels, rewards, ends and scores; lengths are in frames here and in steps there."""
    here, there = load_script("appo_async"), load_script("envpool_ppo")
    envs, obs = here.make_envs(here.Args(f"{game}NoFrameskip-v4", native_envs=True), 4, 7)
    others, other_obs = there.make_envs(there.Args(f"{game}-v5", num_threads=1), 4, 7)
    assert envs.pool.config == others.pools[0].config  # among it the length of a game, at most
    assert np.array_equal(obs, other_obs)
    assert envs.single_observation_space == others.single_observation_space
    assert envs.single_action_space == others.single_action_space
    random_actions, lives, games = np.random.default_rng(1), 0, 0
    for _ in range(2100):
        actions = random_actions.integers(0, envs.single_action_space.n, 4)
        *found, infos = envs.step(actions)
        *expected, other_infos = others.step(actions)
        for mine, other in zip(found, expected, strict=True):
            assert np.array_equal(mine, other)
        ended = list(here.finished_episodes(infos))
        ended_there = list(there.finished_episodes(other_infos))
        assert ended == [(i, score, 4 * length) for i, score, length in ended_there]
        lives, games = lives + found[2].sum() + found[3].sum(), games + len(ended)
    assert games > 3 and (lives > games) == (game != "Freeway")
    envs.close()


def test_native_envs_learn_and_are_judged_by_the_wrappers(start, tmp_path, monkeypatch):
    """A run with processes, one worker killed; then a game of an evaluation, without EnvPool."""
    game = ["--env-id", "BreakoutNoFrameskip-v4", "--device", "cpu", "--eval-episodes", 0]
    run = start(*game, *SMALL, "--native-envs", "--total-timesteps", 10**7, "--checkpoint-every", 1)
    os.kill(run.working()["appo rollout 0"], signal.SIGKILL)
    wait_for(lambda: "another takes its place" in run.out, "another worker")
    step = checkpoint("appo_async", tmp_path / "run")["global_step"]
    roles = run.working(step + 2000)
    maps = Path(f"/proc/{roles['appo rollout 0']}/maps").read_text()
    assert "envpool" in maps
    run.process.send_signal(signal.SIGINT)
    assert run.ends() == 0, run.err
    run_dir = str(tmp_path / "run")
    assert checkpoint("appo_async", run_dir)["returns"]
    script = load_script("appo_async")
    args = script.parse(["--evaluate", run_dir, "--eval-episodes", "1"])
    assert args.native_envs
    monkeypatch.setitem(sys.modules, "envpool", None)  # to import it is an error
    assert len(script.evaluate(args, script.load("evaluate", run_dir))) == 1


# === Bad input

BAD = [
    (["--num-splits", "3"], "num-splits", "3 does not divide 8"),
    (["--num-steps", "48"], "minibatch-size", "256 samples are not a multiple of --num-steps 48"),
    (
        ["--rnn", "gru", "--minibatch-size", "48", "--num-minibatches", "2"],
        "minibatch-size",
        "48 samples are not a multiple of --num-steps 32",
    ),
    (["--num-workers", "2", "--num-policy-workers", "3"], "num-policy-workers", "only 2 rollout"),
    (["--num-workers", "0"], "num-workers", "0 is not between 1 and"),
    (["--minibatch-size", "1"], "minibatch-size", "not a multiple of --num-steps 32"),
    (["--rho-bar", "-1"], "rho-bar", "not between 0"),
    (["--max-policy-lag", "-1"], "max-policy-lag", "not between 0"),
    (["--reward-scale", "-1"], "reward-scale", "not between 0"),
    (["--env-id", "CartPole-v1"], "env-id", "observations must be RGB images"),
    (["--env-id", "toy_envs:Panel-v0"], "env-id", "use ppo_multidiscrete.py"),
    (["--env-id", "ALE/Breakout-v5"], "env-id", "frames are skipped already"),
    (["--env-id", "test_appo:Painting-v0"], "env-id", "neither an Atari game nor ViZDoom"),
    (["--env-id", "VizdoomNothing-v1"], "env-id", "VizdoomNothing"),
    (
        ["--native-envs", "--env-id", "toy_envs:ToyAtari-v0"],
        "native-envs",
        "EnvPool has no toy_envs",
    ),
]


class Painting(gym.Env):
    observation_space = gym.spaces.Box(0, 255, (210, 160, 3), np.uint8)
    action_space = gym.spaces.Discrete(2)


gym.register("Painting-v0", Painting)


@pytest.mark.parametrize(("argv", "flag", "piece"), BAD)
def test_bad_input_is_one_line(argv, flag, piece, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        load_script("appo_async").parse(argv)
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --{flag}: ") and piece in line
    assert not list(tmp_path.iterdir())


def test_a_worker_that_always_dies_ends_the_run(monkeypatch):
    """An emulator that crashes at its start would be started for ever; six times are enough."""
    script = load_script("appo_async")
    dead = SimpleNamespace(exitcode=-signal.SIGSEGV, pid=0)
    monkeypatch.setattr(script, "end_group", lambda group: None)
    monkeypatch.setattr(script.Team, "start", lambda team, member: dead)
    team, counters = script.Team.__new__(script.Team), torch.zeros(3, 2, dtype=torch.int64)
    team.args, team.members = script.Args(num_workers=1), [("rollout", 0)]
    team.deaths, team.processes = [(-1, 0)], [dead]
    asked, answered, filled = counters
    team.shared = SimpleNamespace(asked=asked, answered=answered, filled=filled)
    for _ in range(20):  # one that finishes a trajectory between two deaths may go on
        filled += 1
        team.look_after()
    for _ in range(4):
        team.look_after()
    with pytest.raises(ChildProcessError, match="rollout worker 0 dies before it has finished"):
        team.look_after()


def test_a_bell_that_nobody_hears_does_no_harm():
    """Whoever never waits is rung for every step, and a pipe holds 65,536 bytes."""
    bell, rung = load_script("appo_async").Bell(), []

    def ring():
        for _ in range(100_000):
            bell.ring()
        rung.append(True)

    ringing = threading.Thread(target=ring, daemon=True)
    ringing.start()
    ringing.join(20)
    assert rung  # or it hangs, or has failed
    start = time.monotonic()
    bell.wait(20)
    assert time.monotonic() - start < 10


def test_shared_memory_of_others_is_not_free(monkeypatch, tmp_path, capsys):
    """And what shares nothing needs none."""
    script = load_script("appo_async")
    usage = SimpleNamespace(total=10**12, free=10**6)
    monkeypatch.setattr(script.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(SystemExit):
        script.parse([])
    assert "1 MB are free" in capsys.readouterr().err
    assert script.parse(["--serial"]).serial
    monkeypatch.chdir(tmp_path)
    sizes = {"num_workers": 1, "envs_per_worker": 2, "minibatch_size": 64, "total_timesteps": 64}
    script.train(script.Args(**sizes, serial=True, eval_episodes=0, run_dir="run"))
    saved = torch.load("run/checkpoint.pt", weights_only=True)
    saved["args"]["serial"] = False
    torch.save(saved, "run/checkpoint.pt")
    assert not script.parse(["--evaluate", "run"]).serial


def test_noise_of_a_resumed_run_is_new(monkeypatch):
    """Else its policy workers would draw what they drew at the start."""
    script, seeds = load_script("appo_async"), []
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    monkeypatch.setattr(script, "setproctitle", lambda title: None)
    for module, name in ((os, "setpgrp"), (signal, "alarm"), (script.threading, "Thread")):
        monkeypatch.setattr(module, name, lambda *_, **__: SimpleNamespace(start=lambda: None))
    monkeypatch.setattr(script, "policy_worker", lambda *_: (None for _ in ()))
    for version in (0, 7):
        shared = SimpleNamespace(version=torch.tensor([version]), arrays=lambda: None)
        script.run_part(script.Args(seed=3), shared, 2, "policy", 0, 1)
    assert seeds == [3 + 3 * 10**6, 3 + 3 * 10**6 + 7]
