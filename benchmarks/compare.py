"""Say whether returns or speed have moved beyond noise: compare.py OLD.csv NEW.csv [--level 0.95].

    git show HEAD~5:results/runs.csv > /tmp/old.csv
    python benchmarks/compare.py /tmp/old.csv results/runs.csv      # returns, by environment
    python benchmarks/compare.py old_speed.csv results/speed.csv    # speed, by case
    python benchmarks/compare.py results/published.csv results/runs.csv --margin 20    # CleanRL's

Returns: Welch's interval of the difference of the means over seeds (return_last100), so each side
needs two seeds or more; 3 a side show a collapse and little else (to see a difference of one
standard deviation with a power of 80 % takes 17). --margin M asks the other question: are both
the same within M (two one-sided tests at 5 %)? Speed: the ratios to the peer, whose smallest and
largest over the rounds are in the file; they have moved where these ranges are apart. Published
returns: those with a number of seeds and of steps in their note, held against runs without other
flags and with as many steps. What only one file has is named. Exit code 1 if anything got worse
(with --margin: if anything is not shown to be the same), 2 if there was nothing to compare. Speed
needs three rounds a side; even then one unchanged case in twenty looks slower: measure it again.
"""

import argparse
import csv
import re
import statistics
import sys
from pathlib import Path

from scipy import stats


def read(path: Path) -> list[dict]:
    try:
        with open(path, newline="") as file:
            return list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        print(f"error: {path}: {error}", file=sys.stderr)
        sys.exit(2)


def scores(rows: list[dict]) -> dict[str, list[float]]:
    """Returns of the last 100 episodes of all seeds, by the run's name less the seed."""
    found: dict[str, list[float]] = {}
    for row in rows:
        name = row["run"].split("__")
        name[2] = f"{int(row['steps']):,} steps"
        if row["return_last100"]:
            found.setdefault(" ".join(name), []).append(float(row["return_last100"]))
    return found


def difference(old: list[float], new: list[float], level: float) -> tuple[float, float, float]:
    """Difference of the means, new less old, and Welch's confidence interval of it."""
    result = stats.ttest_ind(new, old, equal_var=False)
    interval = result.confidence_interval(level)
    return statistics.mean(new) - statistics.mean(old), interval.low, interval.high


def judge(low: float, high: float, margin: float | None) -> tuple[str, bool]:
    """What the interval of a difference says, and whether all is well."""
    if margin is None:
        return "worse" if high < 0 else "better" if low > 0 else "no difference shown", high >= 0
    same = -margin < low and high < margin
    return f"{'the same' if same else 'not shown to be the same'} within {margin:g}", same


def in_both(before: dict, after: dict) -> list[str]:
    """The names that both files have; those of one alone are printed. Ends if both have none."""
    for name in sorted(before.keys() ^ after.keys()):
        print(f"{name}: only in the {'old' if name in before else 'new'} file")
    return sorted(before.keys() & after.keys()) or nothing()


def nothing():
    print("error: the files have nothing in common that could be compared", file=sys.stderr)
    sys.exit(2)


def compare_returns(old: list[dict], new: list[dict], level: float, margin: float | None) -> bool:
    """Print a line for each environment in both; returns whether all is well."""
    before, after = scores(old), scores(new)
    # a run that is in both files says nothing of a difference between them
    known = {(row["run"], row["return_last100"], row.get("seconds")) for row in old}
    fresh = scores(
        [row for row in new if (row["run"], row["return_last100"], row.get("seconds")) not in known]
    )
    well = True
    for name in in_both(before, after):
        a, b = before[name], after[name]
        line = f"{name}: {statistics.mean(a):.1f} ({len(a)} seeds) -> {statistics.mean(b):.1f}"
        line += f" ({len(b)} seeds)"
        if sorted(a) == sorted(b):
            print(f"{line}: the same runs")
            continue
        b = fresh.get(name, [])
        if kept := len(after[name]) - len(b):
            line += f", less {kept} that are in both files"
        if min(len(a), len(b)) < 2:
            print(f"{line}: two seeds a side are needed to tell")
            well = well and margin is None
            continue
        # 90 % for two one-sided tests at 5 %
        change, low, high = difference(a, b, level if margin is None else 0.9)
        line += f", difference {change:+.1f} ({low:+.1f} to {high:+.1f})"
        verdict, fine = judge(low, high, margin)
        print(f"{line}: {verdict}")
        well = well and fine
    return well


def compare_published(
    published: list[dict], runs: list[dict], level: float, margin: float | None
) -> bool:
    """Print a line for each published mean and deviation that ours can be held against."""
    well, lines = True, 0
    for row in published:
        steps = re.search(r"(\d+)([kM]) steps", row["note"])
        seeds = re.search(r"(\d+) seeds", row["note"])
        if not (steps and seeds and row["std"]):
            continue
        goal = int(steps[1]) * {"k": 10**3, "M": 10**6}[steps[2]]
        new = [
            float(run["return_last100"])
            for run in runs
            if run["run"].startswith(f"{row['env_id']}__{row['script']}__")
            and run["return_last100"]
            and run["run"].count("__") == 2
            and 0.95 * goal < int(run["steps"]) <= goal
        ]
        if len(new) < 2:
            continue
        theirs, ours, n, m = float(row["mean"]), statistics.mean(new), int(seeds[1]), len(new)
        # Welch's interval, from the variances of both means; MountainCar's are 0
        a, b = max(float(row["std"]), 1e-6) ** 2 / n, statistics.variance(new) / m
        freedom = (a + b) ** 2 / (a**2 / (n - 1) + b**2 / (m - 1))
        share = level if margin is None else 0.9
        low, high = stats.t.interval(share, freedom, ours - theirs, (a + b) ** 0.5)
        line = f"{row['env_id']} {row['script']}: {row['source']} {theirs:.1f} ({n} seeds), "
        line += f"ours {ours:.1f} ({m} seeds), "
        line += f"difference {ours - theirs:+.1f} ({low:+.1f} to {high:+.1f})"
        verdict, fine = judge(low, high, margin)
        print(f"{line}: {verdict}")
        well, lines = well and fine, lines + 1
    return well if lines else nothing()


def compare_speed(old: list[dict], new: list[dict]) -> bool:
    """Print a line for each case in both; returns whether none is slower.

    With three rounds a side all three of one side are below the other's by chance in one of 20
    cases; with two in one of 6.
    """

    def ratios(rows):
        key = ("what", "task", "num_envs", "peer")
        return {
            " ".join(row[k] for k in key): (
                *map(float, re.findall(r"[\d.]+", row["ratio"])),
                int(row["rounds"]),
            )
            for row in rows
        }

    before, after, well = ratios(old), ratios(new), True
    for name in in_both(before, after):
        (a, a_low, a_high, a_rounds), (b, b_low, b_high, b_rounds) = before[name], after[name]
        verdict = "slower" if b_high < a_low else "faster" if b_low > a_high else "within noise"
        if min(a_rounds, b_rounds) < 3:
            verdict = "three rounds a side are needed to tell"
        print(f"{name}: {a:.2f} ({a_low} to {a_high}) -> {b:.2f} ({b_low} to {b_high}): {verdict}")
        well = well and verdict != "slower"
    return well


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--level", type=float, default=0.95, help="of the confidence interval")
    parser.add_argument("--margin", type=float, help="ask whether both are the same within this")
    args = parser.parse_args()
    if not 0 < args.level < 1:
        parser.error(f"--level: {args.level} is not between 0 and 1")
    if args.margin is not None and not args.margin > 0:
        parser.error(f"--margin: {args.margin} is not above 0")
    old, new = read(args.old), read(args.new)
    kinds = [
        "returns"
        if {"run", "steps", "return_last100"} <= rows[0].keys()
        else "published"
        if {"env_id", "script", "source", "mean", "std", "note"} <= rows[0].keys()
        # as benchmarks/throughput.py writes it
        else "speed"
        if {"what", "task", "num_envs", "peer", "ratio"} <= rows[0].keys()
        else None
        for rows in (old, new)
        if rows
    ]
    if kinds == ["published", "returns"]:
        return 0 if compare_published(old, new, args.level, args.margin) else 1
    if len(kinds) < 2 or kinds[0] != kinds[1] or kinds[0] not in ("returns", "speed"):
        print(
            "error: both files must be runs.csv, both speed.csv, or published.csv and runs.csv",
            file=sys.stderr,
        )
        return 2
    if kinds[0] == "speed":
        return 0 if compare_speed(old, new) else 1
    return 0 if compare_returns(old, new, args.level, args.margin) else 1


if __name__ == "__main__":
    sys.exit(main())
