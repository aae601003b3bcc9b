"""Kills, signals, full disks, doctored files and bad numbers: real ones, on real processes."""

import contextlib
import json
import os
import pickle
import random
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import cv2
import pytest
import torch
from conftest import ROOT, SCRIPTS, environment, load_script, run_forked, sized
from processes import Forked
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

SMALL = ["--num-envs", 2, "--num-steps", 16, "--num-minibatches", 2, "--update-epochs", 1]
ENDLESS = [*SMALL, "--total-timesteps", 1_000_000]
ASYNC = [*ENDLESS, "--vector-mode", "async"]
PATIENCE = 120  # seconds: machines may be busy


def wait_for(condition, what: str, timeout: float = PATIENCE):
    """Poll until a condition holds, and return it."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.02)
    raise TimeoutError(f"no {what} after {timeout} s")


def patience(seconds: float) -> float:
    """So long on an idle machine; longer where other programs want the cores too."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def session(process: Forked) -> list[int]:
    """The living processes of the session that this process leads, read from /proc."""
    alive = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, _, _, leader = stat.read_text().rsplit(")", 1)[1].split()[:4]
            if int(leader) == process.pid and state != "Z":
                alive.append(int(stat.parent.name))
    return alive


def workers(process: Forked) -> list[int]:
    """Those that step environments: the forks of the process that multiprocessing forks from."""
    pids = session(process)
    names = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in pids}
    return [pid for pid in pids if "forkserver" in names[pid]][1:]


def kill_all(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def start(tmp_path):
    """Start a script in tmp_path as the leader of a session; what is left is killed at the end."""
    processes = []

    def start(name: str, *argv: object) -> Forked:
        processes.append(Forked([ROOT / f"{name}.py", *argv], tmp_path, environment()))
        return processes[-1]

    yield start
    for process in processes:
        kill_all(session(process))
        process.communicate()


def saved(run_dir: Path) -> bool:
    return (run_dir / "checkpoint.pt").exists()


def checkpoint(name: str, run_dir: Path) -> dict:
    """A checkpoint as its script loads it, all weights finite."""
    run = load_script(name).load("resume", str(run_dir))
    assert all(tensor.isfinite().all() for tensor in run["agent"].values())
    return run


# === Kills


def storm(name: str, run_dir: Path, kills: int) -> list[int]:
    """Kill a process that only saves, many times; returns the step of the checkpoint each left."""
    script, chance, steps = load_script(name), random.Random(kills), []
    command = [sys.executable, ROOT / "tests" / "save_loop.py", name, run_dir]
    env = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True) as server:
        for _ in range(kills):
            (run_dir / "checkpoint.pt").unlink(missing_ok=True)
            print(file=server.stdin, flush=True)
            pid = int(server.stdout.readline())
            wait_for(lambda: saved(run_dir), "checkpoint")
            time.sleep(chance.uniform(0, 0.1))
            os.kill(pid, signal.SIGKILL)
            assert server.stdout.readline() == "ended\n"
            run = script.load("resume", str(run_dir))
            assert (run["agent"]["weight"] == run["global_step"]).all()
            steps.append(run["global_step"])
        server.stdin.close()
    return steps


def test_ten_kills_leave_ten_checkpoints(tmp_path):
    assert max(storm("ppo", tmp_path, 10)) > 1  # the kill came later than the first checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_hundred_kills_leave_a_hundred_checkpoints(name, tmp_path):
    assert max(storm(name, tmp_path, 100)) > 1


def steps_of(run_dir: Path, tag: str) -> list[int]:
    """The steps of a curve, as TensorBoard shows it."""
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    return [event.step for event in events.Scalars(tag)]


def last_step_written(run_dir: Path) -> int:
    """The last step in any file of events, purged or not."""
    files = run_dir.glob("events.*")
    return max(event.step for file in files for event in EventFileLoader(str(file)).Load())


def test_killed_run_goes_on(start, tmp_path):
    """The only checkpoint is the first one; the events go far beyond it when the kill comes."""
    run_dir = tmp_path / "run"
    never = ["--checkpoint-every", 1000, "--eval-episodes", 1]
    process = start("ppo", "--run-dir", "run", "--total-timesteps", 10_000_000, *never)
    wait_for(lambda: saved(run_dir), "checkpoint")
    wait_for(lambda: last_step_written(run_dir) > 1024, "events past the checkpoint")
    process.kill()
    process.wait()
    assert checkpoint("ppo", run_dir)["global_step"] == 512
    assert last_step_written(run_dir) > 1024

    process = start("ppo", "--resume", "run", "--total-timesteps", 4096)
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, stderr
    assert "going on after step 512" in stdout
    assert checkpoint("ppo", run_dir)["global_step"] == 4096
    assert steps_of(run_dir, "charts/learning_rate") == list(range(512, 4097, 512))
    episodes = steps_of(run_dir, "charts/episodic_return")
    assert episodes == sorted(episodes)
    assert len(episodes) == checkpoint("ppo", run_dir)["episodes"]


# script, its arguments, how many processes it then consists of at least
WORKERS = pytest.param("ppo_atari", ASYNC, 3, id="workers")
DOOMS = pytest.param("ppo_multidiscrete", ENDLESS, 3, id="dooms")  # every ViZDoom is a process
BOTH = pytest.param("ppo_multidiscrete", ASYNC, 5, marks=pytest.mark.slow, id="both")
# EnvPool plays in threads of the one process
POOLS = pytest.param("envpool_ppo", [*ENDLESS, "--async-envs"], 1, id="pools")


@pytest.mark.parametrize(("name", "argv", "size"), [WORKERS, BOTH])  # ViZDooms alone stay behind
def test_killed_parent_leaves_no_process(name, argv, size, start, tmp_path):
    process = start(name, "--run-dir", "run", *argv)
    wait_for(lambda: saved(tmp_path / "run"), "checkpoint")
    assert len(session(process)) >= size
    process.kill()
    process.wait()
    wait_for(lambda: not session(process), "end of all processes", timeout=patience(10))


# === Signals


def printed_command(stdout: str) -> list[str]:
    """The command that a stopped run prints, as it stands there, for this Python."""
    (line,) = [line for line in stdout.splitlines() if "--resume" in line]
    python, *words = shlex.split(line.partition(":")[2])
    assert python == "python"
    return words


@pytest.mark.parametrize(
    ("name", "signum"), [("ppo", signal.SIGINT), ("ppo_shared", signal.SIGTERM)]
)
def test_signal_saves_and_ends(name, signum, start, tmp_path):
    sizes = ["--total-timesteps", 10_000_000, "--eval-episodes", 1, "--checkpoint-every", 1000]
    process = start(name, "--run-dir", "run", *sizes)
    wait_for(lambda: saved(tmp_path / "run"), "checkpoint")
    process.send_signal(signum)
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert (process.returncode, stderr) == (0, "")
    step = checkpoint(name, tmp_path / "run")["global_step"]
    assert step > 512  # an iteration after the one that saved before
    assert '"finished": false' in (tmp_path / "run" / "result.json").read_text()

    end = step + 1024
    again = run_forked(*printed_command(stdout), "--total-timesteps", end, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert f"going on after step {step:,}" in again.stdout and "score" in again.stdout
    assert checkpoint(name, tmp_path / "run")["global_step"] == end


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_stop_at_survives_a_signal(signum, start, tmp_path, monkeypatch):
    """A run that goes on still ends where --stop-at said."""
    sizes = ["--total-timesteps", 10_000_000, "--stop-at", 5_000_000, "--checkpoint-every", 0]
    process = start("ppo", "--run-dir", "run", *sizes)
    wait_for(lambda: saved(tmp_path / "run"), "checkpoint")
    os.kill(process.pid, signum)
    process.communicate(timeout=PATIENCE)
    monkeypatch.chdir(tmp_path)
    args = load_script("ppo").parse(["--resume", "run"])
    assert (args.stop_at, args.total_timesteps) == (5_000_000, 10_000_000)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (signal.SIGINT, signal.SIGINT),
        (signal.SIGINT, signal.SIGTERM),
        pytest.param(signal.SIGTERM, signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_second_signal_ends_at_once(first, second, start, tmp_path):
    """Within an iteration that would take minutes."""
    long = ["--num-steps", 200_000, "--total-timesteps", 800_000]
    process = start("ppo", "--run-dir", "run", *long)
    wait_for((tmp_path / "run" / "args.json").exists, "run directory")
    time.sleep(1)
    process.send_signal(first)
    time.sleep(1)
    assert process.poll() is None  # the first only asks
    process.send_signal(second)
    _, stderr = process.communicate(timeout=patience(5))
    assert process.returncode != 0
    assert "Traceback" not in stderr
    assert not saved(tmp_path / "run")


@pytest.mark.parametrize("name", ["ppo", "envpool_ppo"])
def test_ctrl_c_while_a_film_is_written(name, start, tmp_path):
    """The terminal's signal would stop ffmpeg too, or make it hang: it ends with its input."""
    sizes = [*SMALL, "--total-timesteps", 64, "--eval-episodes", 1, "--capture-video"]
    process = start(name, "--run-dir", "run", *sizes, *["--env-id", "Acrobot-v1"] * (name == "ppo"))

    def signals_blocked():
        """What ffmpeg does not hear, once there is one."""
        for pid in session(process):
            with contextlib.suppress(OSError):
                if "ffmpeg" in Path(f"/proc/{pid}/cmdline").read_text():
                    status = Path(f"/proc/{pid}/status").read_text()
                    return [int(status.split("SigBlk:")[1].split()[0], 16)]
        assert process.poll() is None

    (blocked,) = wait_for(signals_blocked, "ffmpeg")
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0 and "error" not in stderr
    assert all(blocked >> signum - 1 & 1 for signum in (signal.SIGINT, signal.SIGTERM))
    assert "--resume run" in stdout
    assert json.loads((tmp_path / "run" / "result.json").read_text())["finished"]
    (film,) = (tmp_path / "run" / "videos").glob("*.mp4")
    assert cv2.VideoCapture(str(film)).read()[0]  # cut off it would have no table of contents


def test_killed_while_it_is_evaluated(start, tmp_path):
    """What was trained has its result, which only lacks the score."""
    sizes = [*SMALL, "--total-timesteps", 64, "--eval-episodes", 300]
    process = start("ppo", "--run-dir", "run", *sizes)
    result = tmp_path / "run" / "result.json"
    wait_for(lambda: result.exists() and result.read_text().endswith("}"), "result")
    process.kill()
    process.wait()
    result = json.loads(result.read_text())
    assert result["finished"] and result["eval_mean"] is None and result["steps"] == 64


def survives_signal_to_all(signum, name, argv, size, start, tmp_path):
    process = start(name, "--run-dir", "run", *argv, "--checkpoint-every", 1000)
    wait_for(lambda: saved(tmp_path / "run"), "checkpoint")
    assert len(session(process)) >= size
    os.killpg(process.pid, signum)
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert (process.returncode, stderr) == (0, "")
    assert "--resume run" in stdout
    assert checkpoint(name, tmp_path / "run")["global_step"] > 32
    wait_for(lambda: not session(process), "end of all processes", timeout=patience(10))


@pytest.mark.parametrize(("name", "argv", "size"), [WORKERS, DOOMS, BOTH, POOLS])
def test_ctrl_c_reaches_every_process(name, argv, size, start, tmp_path):
    """A terminal sends Ctrl-C to all processes of the group."""
    survives_signal_to_all(signal.SIGINT, name, argv, size, start, tmp_path)


@pytest.mark.parametrize(("name", "argv", "size"), [WORKERS, DOOMS, BOTH])
def test_sigterm_reaches_every_process(name, argv, size, start, tmp_path):
    """As from systemd, Slurm and timeout: games and their processes go on until all is saved."""
    survives_signal_to_all(signal.SIGTERM, name, argv, size, start, tmp_path)


@pytest.mark.parametrize("reader", ["tee log", "head -n 2", "true"])
def test_reader_that_ends(reader, tmp_path):
    """Ctrl-C ends tee before the run has saved; head and true end by themselves, before or
    after the first line: the run saves and ends."""
    sizes = "--total-timesteps 10000000 --checkpoint-every 1000 --run-dir run"
    command = (
        f"{sys.executable} {ROOT}/ppo.py {sizes} 2> errors | {reader}; exit ${{PIPESTATUS[0]}}"
    )
    with subprocess.Popen(
        ["bash", "-c", command],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    ) as shell:
        wait_for(lambda: saved(tmp_path / "run"), "checkpoint")
        if reader == "tee log":
            os.killpg(shell.pid, signal.SIGINT)
        wait_for(lambda: not session(shell), "end of all processes")
    assert (tmp_path / "errors").read_text() == ""
    assert checkpoint("ppo", tmp_path / "run")["global_step"] >= 512
    assert '"finished": false' in (tmp_path / "run" / "result.json").read_text()
    assert shell.returncode == 0


EARLY = [
    pytest.param(delay, marks=[pytest.mark.slow] * (delay != 0.4))
    for delay in (0.0, 0.4, 0.8, 1.2, 1.6, 2.0, 3.0)
]


@pytest.mark.parametrize("delay", EARLY)
@pytest.mark.parametrize(("name", "argv", "size"), [WORKERS, DOOMS, BOTH, POOLS])
def test_ctrl_c_while_processes_start(name, argv, size, delay, start, tmp_path):
    """So many seconds after the run directory was made, when the handler stands."""
    process = start(name, "--run-dir", "run", *argv)
    wait_for((tmp_path / "run" / "args.json").exists, "run directory")
    time.sleep(delay)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=PATIENCE)
    assert (process.returncode, stderr) == (0, "")
    wait_for(lambda: not session(process), "end of all workers", timeout=patience(10))


def test_error_with_workers(start, tmp_path):
    """A run that ends itself takes its workers with it: rewards that are not numbers."""
    game = ("--env-id", "faulty_envs:NanAtari-v0")
    process = start("ppo_atari", "--run-dir", "run", *ASYNC, *game)
    _, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert stderr.splitlines()[-1].startswith("error: the gradient is not finite")  # after warnings
    assert "Traceback" not in stderr
    wait_for(lambda: not session(process), "end of all workers", timeout=patience(10))


def test_error_in_a_worker(start, tmp_path):
    """Where it happened, and what is left, are on the screen."""
    game = ("--env-id", "faulty_envs:FuseAtari-v0", "--checkpoint-every", 0)
    process = start("ppo_atari", "--run-dir", "run", *ASYNC, *game)
    wait_for(lambda: saved(tmp_path / "run"), "checkpoint")
    (tmp_path / "fuse").touch()
    _, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "faulty_envs.py" in stderr and "RuntimeError: the fuse" in stderr
    wanted = (
        "error: a process with environments has ended, exit code 1; what was saved in run is kept"
    )
    assert stderr.splitlines()[-1] == wanted
    wait_for(lambda: not session(process), "end of all workers", timeout=patience(10))


@pytest.mark.parametrize(("name", "argv", "size"), [WORKERS, BOTH])
def test_killed_worker(name, argv, size, start, tmp_path):
    """As the kernel does it when memory is short. The ViZDoom that it played stays behind."""
    process = start(name, "--run-dir", "run", *argv, "--checkpoint-every", 0)
    wait_for(lambda: saved(tmp_path / "run"), "checkpoint")
    assert len(session(process)) >= size
    os.kill(workers(process)[-1], signal.SIGKILL)
    assert process.wait(patience(10)) == 1
    wait_for(lambda: not workers(process), "end of all workers", timeout=patience(10))
    kill_all(session(process))
    _, stderr = process.communicate(timeout=patience(10))
    problem = "a process with environments has ended, exit code -9"
    assert stderr == f"error: {problem}; what was saved in run is kept\n"


# === Full disks


@contextlib.contextmanager
def tiny_disk(folder: Path):
    """A real file system of one megabyte."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    with contextlib.suppress(OSError), open(folder / "filler", "wb", buffering=0) as file:
        while True:
            file.write(b"0" * 512)


def check_full(process: Forked, run_dir: Path, name: str = "ppo", step=512) -> None:
    _, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1, stderr
    assert re.search(r"OSError: \[Errno (28|27)\]", stderr), stderr
    assert checkpoint(name, run_dir)["global_step"] >= step


def test_full_disk(start, tmp_path):
    with tiny_disk(tmp_path / "disk"):
        run_dir = tmp_path / "disk" / "run"
        process = start("ppo", "--run-dir", run_dir, "--checkpoint-every", 0)
        wait_for(lambda: saved(run_dir), "checkpoint")
        fill(run_dir)
        check_full(process, run_dir)


def test_full_disk_met_by_the_log(start, tmp_path):
    """No checkpoint is due, so the events are the first that do not fit."""
    with tiny_disk(tmp_path / "disk"):
        run_dir = tmp_path / "disk" / "run"
        process = start("ppo", "--run-dir", run_dir, "--checkpoint-every", 1000)
        wait_for(lambda: saved(run_dir), "checkpoint")
        fill(run_dir)
        check_full(process, run_dir)


@pytest.mark.parametrize(
    ("name", "sizes", "step"), [("ppo", [], 512), ("envpool_ppo", ENDLESS, 32)]
)
def test_file_size_limit(name, sizes, step, start, tmp_path):
    """The same without a mount: the kernel refuses to let a file grow beyond 1000 bytes."""
    process = start(name, "--run-dir", "run", "--checkpoint-every", 0, *sizes)
    wait_for(lambda: saved(tmp_path / "run"), "checkpoint")
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1000, 1000))
    check_full(process, tmp_path / "run", name, step)


def test_an_error_of_the_environment_keeps_its_traceback(start, tmp_path):
    """A level that cannot be read is the environment's fault, and the traceback says where."""
    process = start("ppo", "--env-id", "faulty_envs:NoLevel-v0")
    _, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "faulty_envs.py" in stderr and "no-such-level" in stderr


# === Doctored checkpoints


class Bomb:
    """Whoever unpickles this creates a file."""

    def __init__(self, marker: Path):
        self.marker = str(marker)

    def __reduce__(self):
        return Path.touch, (Path(self.marker),)


def bare_pickle(bomb: Bomb, path: Path) -> None:
    path.write_bytes(pickle.dumps(bomb))


def torch_zip(bomb: Bomb, path: Path) -> None:
    torch.save(bomb, path)


def hidden_in_a_checkpoint(bomb: Bomb, path: Path) -> None:
    torch.save({"script": "ppo", "args": {}, "global_step": 512, "agent": bomb}, path)


def old_torch_format(bomb: Bomb, path: Path) -> None:
    torch.save(bomb, path, _use_new_zipfile_serialization=False)


def pickle_in_a_zip(bomb: Bomb, path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(bomb))
        archive.writestr("archive/version", "3\n")


DOCTORS = [bare_pickle, torch_zip, hidden_in_a_checkpoint, old_torch_format, pickle_in_a_zip]


@pytest.mark.parametrize("doctor", DOCTORS, ids=lambda doctor: doctor.__name__)
def test_doctored_checkpoint_does_not_execute(doctor, script, tmp_path, capsys):
    marker, path = tmp_path / "executed", tmp_path / "checkpoint.pt"
    doctor(Bomb(marker), path)
    for flag in ("resume", "evaluate"):
        with pytest.raises(SystemExit) as exit_info:
            script.parse([f"--{flag}", str(tmp_path)])
        assert exit_info.value.code == 2
        assert f"error: --{flag}: {path} is damaged" in capsys.readouterr().err
    assert not marker.exists()


def test_the_bomb_is_live(tmp_path):
    """Read without care, the same file does execute."""
    torch_zip(Bomb(tmp_path / "executed"), tmp_path / "checkpoint.pt")
    torch.load(tmp_path / "checkpoint.pt", weights_only=False)
    assert (tmp_path / "executed").exists()


def test_doctored_checkpoint_in_a_process(tmp_path):
    torch_zip(Bomb(tmp_path / "executed"), tmp_path / "checkpoint.pt")
    process = run_forked(ROOT / "ppo.py", "--resume", tmp_path, cwd=tmp_path)
    assert process.returncode == 2
    assert len(process.stderr.splitlines()) == 1
    assert not (tmp_path / "executed").exists()


# === Numbers that are not finite


BAD_NUMBERS = [
    ("ppo", "NanObs-v0"),
    ("ppo", "NanReward-v0"),
    ("ppo", "InfReward-v0"),
    ("ppo_continuous", "ContinuousInfReward-v0"),
]


@pytest.mark.parametrize(("name", "env_id"), BAD_NUMBERS)
def test_gradient_that_is_not_finite(name, env_id, tmp_path):
    """The bad number comes with step 40 of each environment, in the third iteration."""
    sizes = [*SMALL, "--total-timesteps", 3200, "--checkpoint-every", 0]
    command = [ROOT / f"{name}.py", "--env-id", f"faulty_envs:{env_id}", "--run-dir", "run"]
    process = run_forked(*command, *sizes, cwd=tmp_path)
    assert process.returncode == 1, process.stderr
    (line,) = process.stderr.splitlines()
    assert line.startswith("error: ")
    assert "not finite" in line
    assert "96" in line  # three iterations of 32 steps
    assert checkpoint(name, tmp_path / "run")["global_step"] == 64


@pytest.mark.parametrize("env_id", ["NanObs-v0", "InfObs-v0", "NanReward-v0", "InfReward-v0"])
@pytest.mark.parametrize("num_envs", [1, 2])
def test_statistics_that_are_not_finite(num_envs, env_id, tmp_path, monkeypatch):
    """A bad number spoils the running statistics for good, but never those in the checkpoint."""
    monkeypatch.chdir(tmp_path)
    script = load_script("ppo_continuous")
    sizes = {"num_envs": num_envs, "num_steps": 16, "num_minibatches": 2, "checkpoint_every": 0.0}
    env_id = f"faulty_envs:Continuous{env_id}"
    with pytest.raises(FloatingPointError, match=f"not finite after step {48 * num_envs}"):
        script.train(script.Args(env_id=env_id, run_dir="run", total_timesteps=1600, **sizes))
    run = checkpoint("ppo_continuous", Path("run"))
    assert run["global_step"] == 32 * num_envs
    for part in run["normalizer"].values():
        assert part["mean"].isfinite().all() and part["var"].isfinite().all()
        assert part["count"] < 34 * num_envs
    # environments start anew, and so can the run
    script.train(script.parse(["--resume", "run", "--stop-at", str(48 * num_envs)]))
    assert checkpoint("ppo_continuous", Path("run"))["global_step"] == 48 * num_envs


@pytest.mark.parametrize(
    ("name", "env_id"),
    [
        ("ppo_lstm", "NanAtari-v0"),
        ("ppo_multidiscrete", "NanPanel-v0"),
        ("appo_async", "NanAtari-v0"),
    ],
)
def test_reward_that_is_not_a_number(name, env_id, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = load_script(name)
    sizes = {"num_envs": 2, "num_steps": 16, "num_minibatches": 2, "total_timesteps": 1600}
    sizes = sized(name, sizes)
    with pytest.raises(FloatingPointError, match="not finite after step 32"):
        script.train(script.Args(env_id=f"faulty_envs:{env_id}", run_dir="run", **sizes))
    assert not saved(Path("run"))
