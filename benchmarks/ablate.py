"""What does a detail buy? Train without it, and compare: python benchmarks/ablate.py [--task ...].

Every detail in details.toml has a mutation that switches it off, marked `ablate`. Here the mutated
scripts are trained like the whole one: the same arguments, the same seeds, one detail less. Runs
stay in runs/ablations and go on where they were if this is called again. Rows go to
results/ablations.csv, the picture to results/ablations.png (needs the `bench` extra).

    python benchmarks/ablate.py --task CartPole-v1               # about 15 minutes on 2 cores
    python benchmarks/ablate.py --task HalfCheetah-v4            # about 2 hours
    python benchmarks/ablate.py --only "core 7" --seeds 10
    python benchmarks/ablate.py --task Breakout-v5 --mutation "the reset takes a step"

Three seeds show a detail without which nothing is learned, not one that buys a few percent.
"""

import argparse
import json
import statistics
import sys
import tomllib
from pathlib import Path

import reproduce

ROOT = reproduce.ROOT
sys.path.insert(0, str(ROOT / "scripts"))
# script, steps, and their flag: Breakout's schedule is the usual one of 10M steps
TASKS = {
    "CartPole-v1": ("ppo", 100_000, "--total-timesteps"),
    "HalfCheetah-v4": ("ppo_continuous", 200_000, "--total-timesteps"),
    "Breakout-v5": ("envpool_ppo", 250_000, "--stop-at"),
}
WHOLE = "all details"


def mutants(script: str, only: str = "", why: str = "") -> dict[str, str]:
    """The script's source by what it lacks: nothing, or one of the details.

    why: how a mutation begins that is taken in the place of those marked `ablate`.
    """
    source = (ROOT / f"{script}.py").read_text()
    found = {WHOLE: source}
    for detail in tomllib.loads((ROOT / "details.toml").read_text())["details"]:
        for mutation in detail["mutations"]:
            files = mutation.get("files", detail["files"])
            wanted = mutation["why"].startswith(why) if why else mutation.get("ablate")
            if not wanted or script not in files or only not in (detail["id"], ""):
                continue
            if detail["id"].startswith(("aux", "beyond")):
                continue  # off by default: there is nothing to take away
            assert source.count(mutation["old"]) == 1
            lacking = mutation["why"] if why else f"{detail['id']} {detail['name']}"
            found[lacking] = source.replace(mutation["old"], mutation["new"])
    return found


def make_cells(task: str, only: str, why: str, seeds: int, out: Path) -> dict[str, list]:
    """The cells by what they lack, one for each seed."""
    script, steps, flag = TASKS[task]
    found: dict[str, list[reproduce.Cell]] = {}
    for lacking, source in mutants(script, only, why).items():
        folder = out / task / "-".join(lacking.split()[:2])
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{script}.py"  # under its own name, which checkpoints carry
        if not path.exists() or path.read_text() != source:
            if any(folder.glob("*/checkpoint.pt")):
                sys.exit(f"error: {folder} holds runs of older code: move it away")
            path.write_text(source)
        command = [sys.executable, str(path), "--env-id", task, flag, str(steps)]
        found[lacking] = [
            reproduce.Cell(
                f"seed-{seed}", [*command, "--seed", str(seed), "--eval-episodes", "0"], folder
            )
            for seed in range(1, seeds + 1)
        ]
    return found


def returns(cells: list[reproduce.Cell]) -> list[float | None] | None:
    """The return of each run; None in the place of all if one has not come to its end.

    A run that a detail's absence ends by a gradient that is not finite has no return.
    """
    if not all(cell.done() or cell.failed for cell in cells):
        return None
    if any(not cell.done() and "gradient is not finite" not in last_line(cell) for cell in cells):
        return None  # killed, or broken in another way: that says nothing about the detail
    return [
        json.loads((cell.run_dir / "result.json").read_text())["return_last100"]
        if cell.done()
        else None
        for cell in cells
    ]


def last_line(cell: reproduce.Cell) -> str:
    return (cell.log.read_text(errors="replace").splitlines() or [""])[-1]


def draw(rows: list[dict]) -> None:
    """Each detail's runs as dots, its mean as a line, the whole algorithm's range behind them.

    Dotted: what random actions score.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from record import read_csv

    at_random = {
        row["env_id"]: float(row["mean"])
        for row in read_csv(ROOT / "results" / "random.csv")
        if (row["env_id"], row["script"]) in {(task, TASKS[task][0]) for task in TASKS}
    }
    tasks = [task for task in TASKS if any(row["task"] == task for row in rows)]
    heights = [len({row["lacking"] for row in rows if row["task"] == task}) for task in tasks]
    figure, panels = plt.subplots(
        len(tasks), figsize=(8, 0.28 * sum(heights) + 1.2 * len(tasks)), dpi=150, squeeze=False,
        gridspec_kw={"height_ratios": heights},
    )  # fmt: skip
    for task, axes in zip(tasks, panels[:, 0], strict=True):
        by_detail: dict[str, list[float]] = {}
        for row in rows:
            if row["task"] == task:
                by_detail.setdefault(row["lacking"], []).append(float(row["return_last100"]))
        order = [*mutants(TASKS[task][0]), *by_detail]  # that of details.toml, then other mutations
        names = sorted(by_detail, key=order.index, reverse=True)
        whole = by_detail[WHOLE]
        axes.axvspan(min(whole), max(whole), color="0.92", zorder=0)
        for y, name in enumerate(names):
            color = "0.3" if name == WHOLE else "C0"
            axes.plot(by_detail[name], [y] * len(by_detail[name]), ".", color=color, alpha=0.6)
            axes.plot(statistics.mean(by_detail[name]), y, "|", color=color, markersize=12, mew=2)
        # a detail's id is two words, of which the second is a number
        details = [name for name in names if name.split()[1].isdigit()]
        labels = [f"without {name}" if name in details else name for name in names]
        for k, name in enumerate(names):  # a run that a detail's absence ended has no return
            if len(by_detail[name]) != len(whole):
                labels[k] += f" ({len(by_detail[name])} seeds)"
        axes.set_yticks(range(len(names)), labels, fontsize=7)
        axes.set_ylim(-0.6, len(names) - 0.4)
        if task in at_random:
            axes.axvline(at_random[task], color="0.5", linewidth=0.8, linestyle=":")
        axes.tick_params(axis="x", labelsize=7)
        axes.set_title(f"{task}, {TASKS[task][1]:,} steps, {len(whole)} seeds", fontsize=9)
        axes.set_xlabel("return of the last 100 training episodes", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(ROOT / "results" / "ablations.png")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=TASKS, default="CartPole-v1")
    parser.add_argument("--only", default="", help="one detail, by its id")
    parser.add_argument("--mutation", default="", help="the one whose `why` begins so, instead")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=reproduce.CORES, help="runs at a time")
    parser.add_argument("--out", type=Path, default=Path("runs/ablations"))
    args = parser.parse_args()
    import matplotlib  # noqa: F401  (for draw: better to fail before the training)
    from record import code_hash, git, read_csv, write_csv

    script, steps, *_ = TASKS[args.task]
    if args.mutation and (count := len(mutants(script, args.only, args.mutation)) - 1) != 1:
        parser.error(f"--mutation: {count} of {script}.py begin so, and it takes one")
    if args.only and len(mutants(script, args.only, args.mutation)) == 1:
        parser.error(f"--only: {script}.py has no detail {args.only!r} that can be ablated")
    # before the training, too: it needs a clone of the repository
    origin = {"blocks": code_hash((ROOT / f"{script}.py").read_text())}
    origin |= {"commit": git("rev-parse", "--short", "HEAD").strip()}
    cells = make_cells(args.task, args.only, args.mutation, args.seeds, args.out)
    pool = [cell for group in cells.values() for cell in group]
    code = reproduce.run(pool, args.jobs)
    path = ROOT / "results" / "ablations.csv"
    rows = []
    for lacking, group in cells.items():
        scores = returns(group)
        if scores is None:
            return code  # stopped: the rows come when all have been trained
        for seed, score in enumerate(scores, 1):
            row = {"task": args.task, "script": script, "steps": steps, "lacking": lacking}
            rows.append(row | {"seed": seed, "return_last100": score} | origin)
    table = {(row["task"], row["lacking"], str(row["seed"])): row for row in read_csv(path) + rows}
    rows = list(table.values())  # each where it was, new ones at the end
    write_csv(path, rows, list(rows[0]))
    draw([row for row in rows if row["return_last100"] not in (None, "")])
    return code


if __name__ == "__main__":
    sys.exit(main())
