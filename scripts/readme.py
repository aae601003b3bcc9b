"""Write the tables of README.md, results/README.md and docs/ from code and results/.

python scripts/readme.py            # rewrite them
python scripts/readme.py --check    # exit code 1 if it is out of date
"""

import argparse
import ast
import math
import re
import statistics
import sys
import tomllib

import numpy as np
from diff import COMPARED, FAMILY, diff_size
from record import ROOT, code_hash, points, read_csv
from scipy import stats

SETTINGS = {
    "ppo": ("classic control, two networks", "CartPole-v1"),
    "ppo_shared": (
        "classic control, one trunk: scores less, leads to the image files",
        "CartPole-v1",
    ),
    "ppo_atari": ("Atari, from pixels", "BreakoutNoFrameskip-v4"),
    "ppo_continuous": ("MuJoCo, continuous actions", "HalfCheetah-v4"),
    "ppo_distributed": ("Atari, on several processes or machines", "BreakoutNoFrameskip-v4"),
    "ppo_lstm": ("Atari with a memory", "BreakoutNoFrameskip-v4"),
    "ppo_multidiscrete": ("ViZDoom, actions of several parts, action masks", "VizdoomBasic-v1"),
    "envpool_ppo": ("Atari and other images, in EnvPool's C++ threads", "Breakout-v5"),
    "appo_async": (
        "Atari and ViZDoom, asynchronous, as Sample Factory does it",
        "BreakoutNoFrameskip-v4",
    ),
}

# the commit that details.toml's places are of
BASELINES = (
    "https://github.com/openai/baselines/blob/ea25b9e8b234e6ee1bca43083f8f3cf974143998/baselines"
)


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def source(script: str) -> str:
    return (ROOT / f"{script}.py").read_text()


def stale(row: dict) -> str:
    """A mark for rows that an older version of the code produced."""
    return "" if code_hash(source(row["script"])) in row["blocks"].split() else " (older code)"


def stale_all(runs: list[dict]) -> str:
    """The same mark for several runs; of how many, if today's code produced the others."""
    older = sum(bool(stale(run)) for run in runs)
    return f" ({older} of older code)" if 0 < older < len(runs) else stale(runs[0])


def known_hashes(script: str) -> set[str]:
    """Of a script's code today, and of older code that a run shows to train exactly as today's."""
    alike = [run["blocks"].split() for run in RUNS if run["script"] == script and not stale(run)]
    return {code_hash(source(script)), *(block for blocks in alike for block in blocks)}


def stale_speed(row: dict) -> str:
    """The same mark for a speed, which code that trains the same need not have."""
    return stale({"script": re.search(r"(\w+)\.py", row["what"])[1], "blocks": row["blocks"]})


def length(runs: list[dict]) -> str:
    """Agent steps, and of how many in the schedule where the runs were stopped before its end."""
    steps = sorted({int(run["steps"]) for run in runs})
    text = " to ".join(f"{number:,}" for number in dict.fromkeys((steps[0], steps[-1])))
    schedule = max(int(run["total_timesteps"]) for run in runs)
    if schedule > 1.01 * steps[-1]:  # less is missing where a batch no longer fits
        text += f" of {schedule // 1_000_000}M"
    return text


def result(script: str) -> str:
    """The script's main result: mean over its seeds of the last 100 training episodes."""
    found: dict[str, list[dict]] = {}
    for (name, env_id, flags), runs in groups().items():
        if (name, env_id) == (script, SETTINGS[script][1]):
            # a run that differs only in where, beside what and how far it ran counts as one more
            same = ("alone", "xeon", "long")
            flags = ", ".join(flag for flag in flags.split(", ") if flag not in same)
            found.setdefault(flags, []).extend(runs)
    if not found:
        return "not measured yet"

    def furthest(flags: str) -> tuple[int, bool]:
        """Without flags, unless others went far beyond it."""
        return max(int(run["steps"]) for run in found[flags]) // 10**6, flags == ""

    flags = max(found, key=furthest)
    runs = [run for run in found[flags] if int(run["steps"]) // 10**6 == furthest(flags)[0]]
    mean = statistics.mean(float(run["return_last100"]) for run in runs)
    name = SETTINGS[script][1] + (f" ({flags})" if flags else "")
    different = len({run["seed"] for run in runs}) == len(runs)
    seeds = f"{len(runs)} {'seed' if different else 'run'}" + "s" * (len(runs) > 1)
    return f"{name}: {mean:.0f} at {length(runs)} steps, {seeds}{stale_all(runs)}"


def files_table() -> str:
    details = tomllib.loads((ROOT / "details.toml").read_text())["details"]
    rows = []
    for script, (setting, _) in SETTINGS.items():
        parent = FAMILY.get(script)
        lines = str(len(source(script).splitlines()))
        change = "the trunk"
        if parent:
            compared = COMPARED.get(script)
            removed, added = diff_size(source(parent), source(script), compared)[:2]
            change = f"`{parent}.py` −{removed} +{added}"
            change += f" in {', '.join(compared)}" if compared else ""
        shown = [
            d["id"] for d in details if script in d["files"] and not d["id"].startswith("beyond")
        ]
        names = dict.fromkeys(d["id"].split()[0] for d in details)
        counts = {name: sum(i.startswith(name) for i in shown) for name in names}
        groups = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        rows.append(
            [f"[`{script}.py`]({script}.py)", setting, lines, change, groups, result(script)]
        )
    head = ["file", "setting", "lines", "parent, and lines that differ", "details shown"]
    return table([*head, "mean score of the last 100 games"], rows)


def arguments(script: str) -> dict[str, tuple[str, str]]:
    """The default of each argument and its comment, which is the text of --help."""
    lines = source(script).splitlines()
    (args,) = (n for n in ast.parse(source(script)).body if getattr(n, "name", "") == "Args")
    found = {}
    for field in args.body:
        if isinstance(field, ast.AnnAssign):
            comment = lines[field.end_lineno - 1].split("  # ")[1]
            found[field.target.id] = ast.get_source_segment(source(script), field.value), comment
    return found


def hyperparameters_table() -> str:
    """The algorithm's arguments in each file; files that agree share a column."""
    files = {script: arguments(script) for script in SETTINGS}
    names = list(files["ppo"])
    names = names[names.index("env_id") + 1 : names.index("seed")]
    columns: dict[tuple, list[str]] = {}
    for script, found in files.items():
        values = tuple(found.get(name, ("—",))[0].replace("_", ",") for name in names)
        columns.setdefault(values, []).append(f"`{script}`")
    head = ["argument", "what it is", *map(", ".join, columns.values())]
    rows = [
        [f"`--{name.replace('_', '-')}`", files["ppo"][name][1], *values]
        for name, *values in zip(names, *columns, strict=True)
    ]
    return table(head, rows)


def tag_link(text: str, script: str, tag: str) -> str:
    """A link to the line of a script on which a detail's tag stands first."""
    lines = source(script).splitlines()
    number = next(i for i, line in enumerate(lines, 1) if f"# [{tag}]" in line)
    return f"[{text}]({script}.py#L{number})"


def place_links(detail: dict) -> str:
    """Where the detail comes from: lines of openai/baselines, or papers."""

    def lines(found: re.Match) -> str:
        path, first, last = found.groups()
        anchor = f"#L{first}" + (f"-L{last}" if last else "")
        return f"[{found[0]}]({BASELINES}/{path}{anchor})"

    if detail.get("baselines"):
        return re.sub(r"([\w/]+\.py):(\d+)(?:-(\d+))?", lines, detail["baselines"])
    papers = detail.get("source") or "—"
    return re.sub(r"arXiv (\d+\.\d+)", r"[arXiv \1](https://arxiv.org/abs/\1)", papers)


def details_table() -> str:
    details = tomllib.loads((ROOT / "details.toml").read_text())["details"]
    head = [
        "detail",
        "what the code does",
        "files",
        "openai/baselines, or the paper",
        "mutations killed by its test",
    ]
    rows = []
    for detail in details:
        tag, names = detail["id"], detail["files"]
        files = ", ".join(tag_link(f"`{name}`", name, tag) for name in names)
        missing = [f"`{name}`" for name in SETTINGS if name not in names]
        if len(missing) < 2:
            files = " but ".join(["all", *missing])
        name = tag_link(f"{tag} {detail['name']}", names[0], tag)
        what = " ".join(detail["what"].split())
        rows.append([name, what, files, place_links(detail), str(len(detail["mutations"]))])
    return table(head, rows)


def runs_table() -> str:
    head = ["run", "steps", "last 100 episodes", "evaluation", "minutes", "command", "commit"]
    rows = []
    for row in RUNS:
        evaluation = "—"
        if row["eval_mean"]:
            evaluation = f"{float(row['eval_mean']):.1f} ± {float(row['eval_std']):.1f}"
        minutes = f"{float(row['seconds']) / 60:.1f}"
        score = f"{float(row['return_last100']):.1f}{stale(row)}"
        command = f"`{row['command']}`"
        rows.append(
            [
                row["run"],
                f"{int(row['steps']):,}",
                score,
                evaluation,
                minutes,
                command,
                row["commit"],
            ]
        )
    return table(head, rows)


PEERS = {
    "sb3": "Stable-Baselines3",
    "sample_factory": "Sample Factory",
}
SIMULATION = "pure simulation"  # no peer, but what appo_async.py's sampler is held against
EIGHT = "8 a worker"  # its own row with the fewest environments


# whose number of environments was varied, and what it is in the table of all scripts
SIZES = {
    ("ppo.py", "CartPole"): "4",
    ("ppo_continuous.py", "HalfCheetah"): "1",
    ("ppo_atari.py", "Breakout"): "8",
    ("ppo_atari.py --precision bf16", "Breakout"): "8",
}


def sizes_table() -> str:
    numbers = ("1", "4", "8", "16", "64")
    rows = {key: [""] * (1 + len(numbers)) for key in SIZES}
    for row in read_csv(ROOT / "results" / "speed.csv"):
        key = (row["what"], row["task"])
        if key in SIZES and row["peer"] == "sb3":
            ratio = row["ratio"].split(" (")[0]
            cell = f"{int(row['ours']):,} ({ratio}), {int(row['memory_mb']):,} MB{stale_speed(row)}"
            rows[key][0] = f"`{row['what']}`, {row['task']}"
            rows[key][1 + numbers.index(row["num_envs"])] = cell
    return table(["environments", *numbers], list(rows.values()))


def speed_table() -> str:
    head = ["what", "steps/s", "beside", "ratio (rounds)", "of the bound", "memory", "first update"]
    head.append("on a Xeon: steps/s (ratio), of the bound")
    rows = []

    def ratio(row: dict) -> str:
        text = row["ratio"].split(" (")[0] if row["rounds"] == "1" else row["ratio"]
        return text + stale_speed(row)

    measured = read_csv(ROOT / "results" / "speed.csv")
    key = ("what", "task", "num_envs", "ours")
    own = {tuple(map(row.get, key)): row for row in measured if row["peer"].endswith("_own")}
    xeon: dict[tuple, list] = {}
    for row in read_csv(ROOT / "results" / "speed_xeon.csv"):
        xeon.setdefault((row["what"], row["task"]), []).append(row)

    def other(rows: list[dict]) -> str:
        """The same on the Xeon; beside two peers, with both ratios."""
        if not rows:
            return ""
        ratios = "; ".join(row["ratio"].split(" (")[0] for row in rows)
        share, ours = float(rows[0]["share"]), int(rows[0]["ours"])
        return f"{ours:,} ({ratios}), {share:.0%}{stale_speed(rows[0])}"

    for row in measured:
        sizes = SIZES.get((row["what"], row["task"]), row["num_envs"]) != row["num_envs"]
        alone = row["peer"] in (SIMULATION, EIGHT)
        if sizes or alone or row["peer"].endswith("_own"):
            continue  # they have tables of their own, or stand beside the other
        also = own.get(tuple(map(row.get, key)))
        what = f"`{row['what']}`, {row['task']}, {row['num_envs']} environments"
        rows.append(
            [
                what.replace(", 1 environments", ", 1 environment"),
                f"{int(row['ours']):,}",
                f"{PEERS.get(row['peer'], row['peer'])} {int(row['theirs']):,}"
                + (f"; with its own settings {int(also['theirs']):,}" if also else ""),
                ratio(row) + (f"; {ratio(also)}" if also else ""),
                f"{float(row['share']):.0%}",
                f"{int(row['memory_mb']):,} MB" if row["memory_mb"] else "",
                f"{row['startup_s']} s" if row["startup_s"] else "",
                other(xeon.pop((row["what"], row["task"]), [])),
            ]
        )
    for (what, task), only in xeon.items():  # measured there and nowhere else
        what = f"`{what}`, {task}, {only[0]['num_envs']} environments"
        peers = "; with its own settings ".join(f"{int(row['theirs']):,}" for row in only)
        peers = f"on the Xeon: {PEERS[only[0]['peer']]} {peers}"
        rows.append([what, "", peers, *[""] * 4, other(only)])
    return table(head, rows)


def alone_table(what: str, name: str) -> str:
    head = ["environments", "pure simulation, steps/s", name, "ratio (rounds)"]
    rows = []
    for row in read_csv(ROOT / "results" / "speed.csv"):
        if row["peer"] == SIMULATION and row["what"].startswith(what):
            rates = [f"{int(row[column]):,}" for column in ("theirs", "ours")]
            rows.append([row["num_envs"], *rates, row["ratio"] + stale_speed(row)])
    return table(head, rows)


def sampler_table() -> str:
    return alone_table("appo_async.py, the sampler", "the sampler alone")


def native_table() -> str:
    return alone_table("EnvPool", "EnvPool in the workers")


def many_table() -> str:
    """appo_async.py with more environments in each worker."""
    head = ["environments", "steps/s", "ratio to the first", "of the bound", "memory"]
    head += ["shared memory, as predicted", "as measured"]
    rows = [
        [row["num_envs"], f"{int(row['ours']):,}", row["ratio"].split(" (")[0] + stale_speed(row)]
        + [f"{float(row['share']):.0%}", f"{int(row['memory_mb']):,} MB"]
        + [f"{row[column]} MB" for column in ("predicted_mb", "shared_mb")]
        for row in read_csv(ROOT / "results" / "speed.csv")
        if row["peer"] == EIGHT
    ]
    return table(head, rows)


def groups() -> dict[tuple, list[dict]]:
    """The runs that differ in nothing but their seed, by file, environment and flags."""
    found: dict[tuple, list[dict]] = {}
    for row in RUNS:
        flags = ", ".join(row["run"].split("__")[3:])
        found.setdefault((row["script"], row["env_id"], flags), []).append(row)
    order = list(SETTINGS)
    return dict(sorted(found.items(), key=lambda item: (order.index(item[0][0]), *item[0][1:])))


def spread(values: list[float]) -> str:
    """Mean and standard deviation over seeds, as the published tables have them."""
    digits = 2 if max(map(abs, values)) < 10 else 1 if max(map(abs, values)) < 100 else 0
    text = f"{statistics.mean(values):.{digits}f}"
    return f"{text} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else text


# what a run's name may have behind its seed without being an experiment, and the sweep's own
PLAIN, SWEPT = {"", "bf16", "gru", "bootstrap", "long"}, "bf16, gru, batch1024, lambda1"


def is_plain(flags: str) -> bool:
    """Whether a group of runs has a published setting or a sweep's."""
    return flags == SWEPT or PLAIN.issuperset(flags.split(", "))


def results_table(experiments: bool = False) -> str:
    """The published settings and those of the sweeps; or what was tried beside them."""
    head = ["environment", "file", "steps", "seeds", "random", "ours"]
    head += ["CleanRL", "baselines", "SB3"]
    at_random = {
        (row["env_id"], row["script"]): f"{float(row['mean']):.1f}"
        for row in read_csv(ROOT / "results" / "random.csv")
    }
    published = read_csv(ROOT / "results" / "published.csv")
    rows = []
    for (script, env_id, flags), runs in groups().items():
        if is_plain(flags) == experiments:
            continue
        theirs = []
        for source in ("CleanRL", "baselines", "SB3"):
            found = [
                f"{float(row['mean']):g}" + (f" ± {float(row['std']):g}" if row["std"] else "")
                for row in published
                if (row["env_id"], row["script"], row["source"]) == (env_id, script, source)
            ]
            early = re.search(r"of (\d+M)", length(runs))  # stopped: theirs is of the end
            theirs.append(f"at {early[1]}: {found[0]}" if early and found else "".join(found))
        ours = spread([float(run["return_last100"]) for run in runs])
        name = f"`{script}.py`" + (f", {flags}" if flags else "")
        drawn = at_random.get((env_id, script), "")
        measured = [length(runs), str(len(runs)), drawn, f"**{ours}**{stale_all(runs)}"]
        rows.append([env_id, name, *measured, *theirs])
    return table(head, rows)


def experiments_table() -> str:
    return results_table(experiments=True)


def interval(scores: list[np.ndarray], statistic) -> str:
    """A statistic of all scores, and its 95 % interval by a stratified bootstrap.

    scores holds an array of one score a seed for each environment; seeds are drawn with replacement
    within each. Agarwal et al. 2021, "Deep reinforcement learning at the edge of the statistical
    precipice", arXiv 2108.13264. An environment with more seeds counts no more than another.
    """
    # a multiple of 4, so that there is a middle half
    rng, most = np.random.default_rng(0), 4 * math.lcm(*map(len, scores))

    def joined(draws: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([x.repeat(most // x.shape[1], axis=1) for x in draws], axis=1)

    draws = [x[rng.integers(0, len(x), (5000, len(x)))] for x in scores]
    low, high = np.percentile(statistic(joined(draws)), [2.5, 97.5])
    (middle,) = statistic(joined([x[None] for x in scores]))
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def interquartile_mean(scores: np.ndarray) -> np.ndarray:
    """The mean of the middle half of each row."""
    return stats.trim_mean(scores, 0.25, axis=1)


def aggregate_table() -> str:
    """All environments of a file in one number: 0 is random actions, 1 what CleanRL publishes."""
    at_random = {
        (row["env_id"], row["script"]): float(row["mean"])
        for row in read_csv(ROOT / "results" / "random.csv")
    }
    theirs = {}
    for row in read_csv(ROOT / "results" / "published.csv"):
        number = re.search(r"(\d+)(k|M) steps", row["note"])
        if row["source"] == "CleanRL" and number:
            steps = int(number[1]) * {"k": 10**3, "M": 10**6}[number[2]]
            theirs[row["env_id"], row["script"]] = float(row["mean"]), steps
    found: dict[str, dict[str, np.ndarray]] = {}
    for (script, env_id, flags), runs in groups().items():
        if flags or len(runs) < 2 or not {(env_id, script)} <= theirs.keys() & at_random.keys():
            continue
        zero, (one, steps) = at_random[env_id, script], theirs[env_id, script]
        if zero == one or not all(0.95 * steps < int(run["steps"]) <= steps for run in runs):
            continue
        returns = np.array([float(run["return_last100"]) for run in runs])
        found.setdefault(script, {})[env_id] = (returns - zero) / (one - zero)
    rows = []
    for script, scores in found.items():
        names = ", ".join(f"{env_id} ({len(x)})" for env_id, x in scores.items())
        values = [*scores.values()]
        mean = interval(values, lambda x: x.mean(1))
        rows.append([f"`{script}.py`", names, mean, interval(values, interquartile_mean)])
    return table(["file", "environments (seeds)", "mean", "interquartile mean"], rows)


def minutes_table() -> str:
    """What training games paid after 1, 10 and 60 minutes, of published settings and sweeps."""
    times = ["after 1 minute", "10 minutes", "60 minutes"]
    head = ["environment", *times, "command (seed 1 by default)"]
    rows = []
    for (_, env_id, flags), runs in groups().items():
        if env_id.startswith("memory_envs") or not is_plain(flags):
            continue
        run = min(runs, key=lambda run: stale(run) != "")  # the first, if it can be of today's code
        curve = read_csv(ROOT / "results" / "curves" / f"{run['run']}.csv")
        cells = []
        for minutes in (1, 10, 60):
            before = [row for row in curve if float(row["seconds"]) <= 60 * minutes]
            if 60 * minutes > 1.1 * float(run["seconds"]):
                end = f"{float(run['return_last100']):.0f}, "
                over = any(", " in cell for cell in cells) or "" in cells
                stopped = f"stopped after {float(run['seconds']) / 60:.0f}"
                end += "done" if run["finished"] == "True" else stopped
                cells.append("" if over else end)
                continue
            last, games = 0.0, 0
            for row in reversed(before):  # about the last 100 games
                if games >= 100:
                    break
                last += float(row["return"]) * int(row["games"])
                games += int(row["games"])
            cells.append(f"{last / games:.0f}" if games else "")
        if any(cells):
            rows.append([env_id, *cells, f"`{run['command']}`"])
    return table(head, rows)


def millions_table() -> str:
    """Breakout, million by million: the mean of the games in the 100k steps before each."""
    millions = range(10**6, 11 * 10**6, 10**6)
    head = ["file", "seed", *(f"{end // 10**6}M" for end in millions), "last 100 games"]
    rows = []
    for (script, env_id, flags), runs in groups().items():
        plain = is_plain(re.sub("(, )?older$", "", flags))  # older: run again since, with new code
        for run in runs if env_id.startswith("Breakout") and plain else ():
            if int(run["steps"]) < 2 * 10**6:
                continue
            curve = read_csv(ROOT / "results" / "curves" / f"{run['run']}.csv")
            means = dict(zip(*points(curve, 100_000, 10**7), strict=True))
            # the schedule ends with the last whole batch, a little before
            reached = [end for end in millions if end < int(run["steps"]) + 2_000]
            cells = [f"{means[end - 50_000]:.0f}" if end in reached else "" for end in millions]
            played = run["eval_mean"] and f"{float(run['eval_mean']):.0f}"
            played = played and f"{played} ± {float(run['eval_std']):.0f}"
            last = f"**{float(run['return_last100']):.0f}**{stale(run)}"
            rows.append([f"`{script}.py`, {flags}", run["seed"], *cells, last, played])
    return table([*head, "evaluation"], rows)


RUNS = read_csv(ROOT / "results" / "runs.csv")
TABLES = {
    "README.md": {
        "files": files_table,
        "hyperparameters": hyperparameters_table,
        "details": details_table,
        "results": results_table,
        "aggregate": aggregate_table,
        "speed": speed_table,
    },
    "docs/results.md": {"millions": millions_table, "minutes": minutes_table},
    "docs/speed.md": {"sizes": sizes_table},
    "results/README.md": {"experiments": experiments_table, "runs": runs_table},
    "docs/async.md": {"sampler": sampler_table, "native": native_table, "many": many_table},
}


def line_of(script: str, name: str) -> int:
    """The line on which a function or class of a script begins, or a method as Class.method."""
    body = ast.parse(source(script)).body
    for part in name.split("."):
        node = next(node for node in body if getattr(node, "name", "") == part)
        body = getattr(node, "body", [])
    return node.lineno


def filled(name: str) -> str:
    """A page with today's tables between its markers, and links that lead to today's lines."""
    text = (ROOT / name).read_text()
    text = re.sub(
        r"\[`([\w.]+)`\]\(\.\./(\w+)\.py#L\d+\)",
        lambda link: f"[`{link[1]}`](../{link[2]}.py#L{line_of(link[2], link[1])})",
        text,
    )
    for title, make in TABLES[name].items():
        start, end = f"<!-- table: {title} -->\n", "<!-- end -->"
        if text.count(start) != 1:
            sys.exit(f"error: {name} needs one table named {title}")
        before, rest = text.split(start)
        text = before + start + make() + "\n" + end + rest.split(end, 1)[1]
    return text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if a table is not today's")
    args = parser.parse_args()
    pages = {ROOT / name: filled(name) for name in TABLES}
    if args.check:
        same = all(path.read_text() == text for path, text in pages.items())
        sys.exit(0 if same else "error: run python scripts/readme.py")
    for path, text in pages.items():
        path.write_text(text)
