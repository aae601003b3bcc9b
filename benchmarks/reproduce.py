"""Run a sweep on this machine, without an account or network: the runs that an agent would start.

    python benchmarks/reproduce.py sweeps/classic_control.yaml
    python benchmarks/reproduce.py sweeps/atari.yaml --jobs 1 -- --stop-at 500000 --precision bf16
    python benchmarks/reproduce.py sweeps/mujoco.yaml --list    # commands, and how far they are

As many runs at a time as --jobs says, by default one for each core; PyTorch's threads are shared
out among them. What follows -- is added to every command. Runs are kept in runs/SWEEP/CELL, so the
same command again goes on: finished cells are left alone, begun ones resumed, failed ones tried
again. (Of the flags, only --stop-at, --eval-episodes and
--checkpoint-every may change on the way; for others --out names another place.) Ctrl-C lets every
run save and end. A cell belongs to the process that trains it for as long as that lives, so nothing
runs twice, not even beside a second reproduce.py or after one that was killed. Exit code 1 if a
cell failed; its last lines are shown.
"""

import argparse
import fcntl
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
# appo_async.py counts in frames, 4 for a step
PROGRESS = re.compile(r"([\d,]+) of ([\d,]+) steps \| return \S+ \| ([\d,]+) (SPS|frames/s)")


def fail(problem: str):
    print(f"error: {' '.join(problem.split())}", file=sys.stderr)
    sys.exit(2)


def cells(sweep: dict) -> list[dict]:
    """Every combination of the parameters, as W&B's grid search makes them; the last is fastest."""
    names, columns = list(sweep["parameters"]), []
    for name in names:
        parameter = sweep["parameters"][name]
        columns.append(parameter["values"] if "values" in parameter else [parameter["value"]])
    return [dict(zip(names, row, strict=True)) for row in itertools.product(*columns)]


def agent_command(sweep: dict, cell: dict) -> list[str]:
    """The command that `wandb agent` starts for a cell."""
    words = []
    for word in sweep["command"]:
        macros = {
            "${env}": ["/usr/bin/env"],
            "${interpreter}": ["python"],
            "${program}": [sweep["program"]],
            "${args}": [f"--{name}={value}" for name, value in cell.items()],
        }
        words += macros.get(word, [word])
    return words


def local_command(sweep: dict, cell: dict, extra: list[str]) -> list[str]:
    """The same without W&B, by this interpreter."""
    words = [word for word in agent_command(sweep, cell)[2:] if word != "--track"]
    return [sys.executable, str(ROOT / words[0]), *words[1:], *extra]


def cell_name(sweep: dict, cell: dict) -> str:
    """ENV__FILE__SEED and what else the sweep varies."""
    parts = [str(cell["env-id"]), Path(sweep["program"]).stem, str(cell["seed"])]
    varied = [n for n in cell if len(sweep["parameters"][n].get("values", [])) > 1]
    parts += [f"{n}={cell[n]}" for n in varied if n not in ("env-id", "seed")]
    return re.sub("[/:]", "-", "__".join(parts))


class Cell:
    """A run: its directory, its command, and its process while there is one."""

    def __init__(self, name: str, command: list[str], folder: Path):
        self.name, self.command = name, command
        self.run_dir, self.log = folder / name, folder / f"{name}.log"
        # not with_suffix: "...learning-rate=0.001" has a dot in it
        self.lock = folder / f"{name}.lock"  # holds the command that the run was begun with
        self.process, self.failed = None, False
        self.told = 0  # how often it was told to stop

    def settings(self) -> str:
        """The command without what may change from one call to the next."""
        script, *flags = self.command[1:]
        command = shlex.join(["python", Path(script).name, *flags])
        return re.sub(r" --(stop-at|eval-episodes|checkpoint-every)[ =]\S+", "", command)

    def begun_with(self) -> str | None:
        """The settings of the run that is there, None if there is none."""
        begun = self.run_dir.exists() and self.lock.exists()
        return (self.lock.read_text() if begun else None) or None

    def done(self) -> bool:
        """Whether the run has reached its end, or the --stop-at that is asked for now."""
        path = self.run_dir / "result.json"
        if not path.exists():
            return False
        try:
            result = json.loads(path.read_text())
        except ValueError:  # it is being written, or was when the machine went down
            return False
        stop_at = self.command.index("--stop-at") + 1 if "--stop-at" in self.command else None
        return result["finished"] or bool(stop_at and result["steps"] >= int(self.command[stop_at]))

    def start(self, threads: int = 1) -> str:
        """Start or resume the run, with so many torch threads. Returns why not, "" if it runs.

        Not if another process trains it, or has begun it with other flags, which is a failure.
        """
        self.run_dir.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.lock, os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return "is being trained by another process"
        # asked again: who has begun it since may have been started with other flags
        if (begun := self.begun_with()) and begun != self.settings():
            os.close(lock)
            self.failed = True  # nobody trains it with the flags that were asked for
            return f"was begun as `{begun}` by another process"
        self.lock.write_text(self.settings())
        words = ["--run-dir", str(self.run_dir)]
        if (self.run_dir / "checkpoint.pt").exists():
            words = ["--resume", str(self.run_dir)]
        with open(self.log, "ab") as log:
            # the child inherits the lock, and the lock is gone when the last that has it is
            self.process = subprocess.Popen(
                [*self.command, *words],
                env=os.environ | {"OMP_NUM_THREADS": str(threads)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[lock],
                start_new_session=True,  # run() hands Ctrl-C on
            )
        os.close(lock)
        return ""

    def progress(self) -> tuple[int, int, float]:
        """Steps done, steps in all, steps per second, by the last line of the log that says so."""
        if not self.log.exists():
            return 0, 0, 0.0
        with open(self.log, "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 4096))
            found = PROGRESS.findall(log.read().decode(errors="replace"))
        if not found:
            return 0, 0, 0.0
        done, total, sps = (text.replace(",", "") for text in found[-1][:3])
        return int(done), int(total), float(sps) / (1 if found[-1][3] == "SPS" else 4)


def status(pool: list[Cell], running: list[Cell], jobs: int) -> str:
    """One line: how many cells are done, how fast it goes, how long it takes."""
    finished = sum(cell.done() for cell in pool)
    failed = sum(cell.failed for cell in pool)
    line = f"{finished} of {len(pool)} done, {len(running)} running"
    line += f", {failed} failed" if failed else ""
    seen = [cell.progress() for cell in running]
    seen = [(done, total, sps) for done, total, sps in seen if sps]
    if seen:
        left = [(total - done) / sps for done, total, sps in seen]
        waiting = len(pool) - finished - failed - len(running)
        work = sum(left) + waiting * sum(total / sps for _, total, sps in seen) / len(seen)
        # no less than the longest run takes, which cannot be shared out
        seconds = max(*left, work / min(jobs, len(running) + waiting))
        line += f" | {sum(sps for *_, sps in seen):,.0f} SPS in all"
        line += f" | {timedelta(seconds=int(seconds))} left"
    return line


def run(pool: list[Cell], jobs: int) -> int:
    """Keep `jobs` cells running until none is left; returns the exit code."""
    waiting = [cell for cell in pool if not cell.done()]
    running: list[Cell] = []
    stops: list[int] = []

    def note(signum, frame):
        stops.append(signum)
        print("\nevery run saves and ends; a second signal kills them", flush=True)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, note)
    live, shown = sys.stdout.isatty(), 0.0
    while running or (waiting and not stops):
        while waiting and len(running) < jobs and not stops:
            cell = waiting.pop(0)
            if cell.done():  # by another reproduce.py, meanwhile
                continue
            if why_not := cell.start(threads=max(1, CORES // jobs)):
                print(f"{cell.name} {why_not}", flush=True)
            else:
                running.append(cell)
        for cell in running:  # also one that was being started when the signal came
            if cell.told < len(stops) and cell.process.poll() is None:
                cell.process.send_signal(signal.SIGKILL if len(stops) > 1 else signal.SIGINT)
                cell.told = len(stops)
        for cell in [cell for cell in running if cell.process.poll() is not None]:
            running.remove(cell)
            if cell.process.returncode:
                cell.failed = not stops
                tail = cell.log.read_text(errors="replace").splitlines()[-3:]
                print(f"\n{cell.name} failed ({cell.log}):", *tail, sep="\n  ", flush=True)
        if time.time() - shown > (1 if live else 60):
            shown = time.time()
            start, end = ("\r\033[K", "") if live else ("", "\n")
            print(start + status(pool, running, jobs), end=end, flush=True)
        time.sleep(0.2)
    print(("\r\033[K" if live else "") + status(pool, running, jobs), flush=True)
    return 1 if any(cell.failed for cell in pool) else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], usage="%(prog)s SWEEP [options] [-- SCRIPT FLAGS]"
    )
    parser.add_argument("sweep", type=Path, help="a file in sweeps/")
    parser.add_argument("--jobs", type=int, default=CORES, help="runs at a time; default: cores")
    parser.add_argument("--out", type=Path, help="where runs are kept; default: runs/SWEEP")
    parser.add_argument("--list", action="store_true", help="show the commands, start nothing")
    argv = sys.argv[1:]
    split = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:split])
    # --stop-at=1000 as --stop-at 1000
    extra = [part for word in argv[split + 1 :] for part in re.split("(?<=^--stop-at)=", word)]
    for flag, value in zip(extra, [*extra[1:], ""], strict=False):
        if flag == "--stop-at" and not value.isdigit():
            fail(f"--stop-at: {value!r} is no number of steps")
    if not args.sweep.is_file():
        fail(f"there is no {args.sweep}")
    if args.jobs < 1:
        fail(f"--jobs: {args.jobs} is less than 1")
    try:
        sweep = yaml.safe_load(args.sweep.read_text())
        folder = args.out or Path("runs") / args.sweep.stem
        pool = [
            Cell(cell_name(sweep, values), local_command(sweep, values, extra), folder)
            for values in cells(sweep)
        ]
    except (yaml.YAMLError, LookupError, TypeError, ValueError, AttributeError) as error:
        fail(f"{args.sweep} is no sweep with a grid: {type(error).__name__}: {error}")
    for cell in pool:
        if (begun := cell.begun_with()) and begun != cell.settings():
            fail(f"{cell.run_dir} was begun as `{begun}`: use --out for other flags")
    if args.list:
        for cell in pool:
            done, total, _ = cell.progress()
            state = "done" if cell.done() else f"{done:,} of {total:,}" if done else "to do"
            print(f"{state:>22}  {shlex.join(['python', *cell.command[1:]])}")
        return 0
    return run(pool, args.jobs)


if __name__ == "__main__":
    sys.exit(main())
