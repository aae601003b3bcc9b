"""Draw results/timeline.png: which process of appo_async.py did what when.

    python benchmarks/timeline.py                      # two short runs, then the picture: 2 minutes
    python benchmarks/timeline.py --draw               # from results/timeline.csv, without running
    python benchmarks/timeline.py --seconds 0.5 -- --envs-per-worker 16 --rnn gru

Two real runs, with --num-splits 2 and 1; what follows -- is added to both command lines. Their
processes write down when they waited, stepped environments, ran the network or learned, all by the
same clock. appo_async.py itself stays as it is: its functions are wrapped here, in each process.
A piece of each run, around an update in its second half, goes to results/timeline.csv.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from record import ROOT, git, machine, read_csv, write_csv

import appo_async as appo

FLAGS = ["--num-workers", "2", "--envs-per-worker", "8", "--precision", "bf16"]
FOLDER = "APPO_TIMELINE"  # the environment variable that tells processes where to write


def timed(events: list, what: str, function):
    """The same function, which writes down when it ran."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        start = time.perf_counter()  # on Linux and macOS one clock for all processes
        try:
            return function(*args, **kwargs)
        finally:
            events.append((what, start, time.perf_counter()))

    return wrapper


def write(name: str, events: list) -> None:
    Path(os.environ[FOLDER], f"{name}.json").write_text(json.dumps(events))


def traced_part(args, shared, member: int, role: str, index: int, parent: int):
    """appo_async.run_part in a process that keeps a record."""
    events, make_envs = [], appo.make_envs

    def make_timed_envs(*words, **named):
        envs, obs = make_envs(*words, **named)
        envs.step = timed(events, f"split {made.pop(0)}", envs.step)
        return envs, obs

    made = list(range(args.num_splits))
    appo.make_envs = make_timed_envs
    appo.Bell.wait = timed(events, "wait", appo.Bell.wait)
    appo.Agent.get_action_and_value = timed(events, "network", appo.Agent.get_action_and_value)
    try:
        appo.run_part(args, shared, member, role, index, parent)
    finally:
        write(f"{role} {index}", events)


def run(flags: list[str]) -> None:
    """Train in this process, which is the learner; its processes are traced as well."""
    events = []
    appo.run_part = traced_part
    appo.Bell.wait = timed(events, "wait", appo.Bell.wait)
    appo.Shared.publish = timed(events, "publish", appo.Shared.publish)
    appo.train(appo.parse(flags))
    write("learner", events)


def updates(events: list) -> list[tuple[float, float]]:
    """The learner's updates: from the end of its last wait to the new weights."""
    found, awake = [], None
    for what, _, end in events:
        if what == "wait":
            awake = end
        elif awake is not None:  # the first weights are published before any wait
            found.append((awake, end))
            awake = end  # the next batch may be there already
    return found


def window(records: dict[str, list], seconds: float) -> list[dict]:
    """Rows of results/timeline.csv: what each process did around an update of the second half."""
    records["learner"] += [("update", *pair) for pair in updates(records["learner"])]
    starts = sorted(start for what, start, _ in records["learner"] if what == "update")
    begin = starts[len(starts) * 3 // 4] - seconds / 6
    rows = []
    order = ["rollout", "policy", "learner"]
    for process in sorted(records, key=lambda name: (order.index(name.split()[0]), name)):
        for what, start, end in sorted(records[process], key=lambda event: event[1]):
            start, end = max(start - begin, 0.0), min(end - begin, seconds)
            if start < end and what != "publish":
                times = {"start_ms": f"{1000 * start:.2f}", "end_ms": f"{1000 * end:.2f}"}
                rows.append({"process": process, "what": what} | times)
    return rows


def draw(rows: list[dict]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    colors = {
        "waiting": "0.93",
        "other work": "0.6",
        "environments, first split": "C0",
        "second split": "C9",
        "network": "C1",
        "update": "C3",
    }
    kinds = {"split 0": "environments, first split", "split 1": "second split"}
    titles = {"2": "--num-splits 2: double-buffered", "1": "--num-splits 1"}
    last = max(float(row["end_ms"]) for row in rows)
    figure, panels = plt.subplots(len(titles), 1, figsize=(9, 4.4), dpi=110, sharex=True)
    for axes, (splits, title) in zip(panels, titles.items(), strict=True):
        here = [row for row in rows if row["splits"] == splits]
        processes = list(dict.fromkeys(row["process"] for row in here))
        for y, process in enumerate(processes):
            bars: dict[str, list] = {"other work": [(0, last)]}
            for row in here:
                if row["process"] == process:
                    start, end = float(row["start_ms"]), float(row["end_ms"])
                    kind = "waiting" if row["what"] == "wait" else row["what"]
                    bars.setdefault(kinds.get(kind, kind), []).append((start, end - start))
            for kind in sorted(bars, key=list(colors).index):
                if kind == "waiting":
                    continue
                axes.broken_barh(bars[kind], (y - 0.4, 0.8), color=colors[kind], linewidth=0)
                if kind == "other work":  # all that is not waiting
                    waits = bars.get("waiting", [])
                    axes.broken_barh(waits, (y - 0.4, 0.8), color=colors["waiting"], linewidth=0)
            waited = sum(length for _, length in bars.get("waiting", []))
            axes.text(last * 1.01, y, f"waits {waited / last:.0%}", va="center", fontsize=8)
        axes.set_yticks(range(len(processes)), processes, fontsize=8)
        axes.set(xlim=(0, last), ylim=(len(processes) - 0.4, -0.6))
        axes.set_title(title, fontsize=9, loc="left")
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right", "left"]].set_visible(False)
    panels[-1].set_xlabel(f"milliseconds ({rows[0]['machine']})", fontsize=8)
    legend = [Patch(color=color, label=kind) for kind, color in colors.items()]
    figure.legend(handles=legend, ncols=len(colors), loc="upper center", frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0, 0.99, 0.94))
    figure.savefig(ROOT / "results" / "timeline.png")


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        run(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draw", action="store_true", help="draw results/timeline.csv again")
    parser.add_argument("--seconds", type=float, default=0.3, help="length of the piece shown")
    parser.add_argument("--steps", type=int, default=8192, help="length of the runs")
    parser.add_argument("flags", nargs="*", help="behind --: arguments of appo_async.py")
    words = parser.parse_args()
    path = ROOT / "results" / "timeline.csv"
    if words.draw:
        draw(read_csv(path))
        return
    rows, origin = [], {"commit": git("rev-parse", "--short", "HEAD").strip(), "machine": machine()}
    for splits in ("2", "1"):
        with tempfile.TemporaryDirectory() as folder:
            flags = [*FLAGS, "--num-splits", splits, *words.flags, "--stop-at", str(words.steps)]
            flags += ["--eval-episodes", "0", "--run-dir", f"{folder}/run"]
            command = [sys.executable, __file__, "--run", *flags]
            subprocess.run(command, env=os.environ | {FOLDER: folder}, check=True)
            found = {p.stem: json.loads(p.read_text()) for p in Path(folder).glob("*.json")}
        rows += [{"splits": splits} | row | origin for row in window(found, words.seconds)]
    write_csv(path, rows, list(rows[0]))
    draw(rows)


if __name__ == "__main__":
    main()
