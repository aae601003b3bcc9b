"""Write the README's tables from the scripts, details.toml and results/.

python scripts/readme.py            # rewrite README.md
python scripts/readme.py --check    # exit code 1 if it is out of date
"""

import statistics
import sys
import tomllib

from diff import FAMILY, diff_size
from record import ROOT, code_hash, read_csv

SETTINGS = {
    "ppo": ("classic control, two networks", "CartPole-v1"),
    "ppo_shared": ("classic control, one shared trunk", "CartPole-v1"),
    "ppo_atari": ("Atari, from pixels", "BreakoutNoFrameskip-v4"),
    "ppo_continuous": ("MuJoCo, continuous actions", "HalfCheetah-v4"),
    "ppo_lstm": ("Atari with a memory", "BreakoutNoFrameskip-v4"),
    "ppo_multidiscrete": ("ViZDoom, actions of several parts, action masks", "VizdoomBasic-v1"),
    "envpool_ppo": ("Atari and other images, in EnvPool's C++ threads", "Breakout-v5"),
}


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def source(script: str) -> str:
    return (ROOT / f"{script}.py").read_text()


def stale(row: dict) -> str:
    """A mark for rows that an older version of the code produced."""
    return "" if code_hash(source(row["script"])) in row["blocks"].split() else " (older code)"


def result(script: str) -> str:
    """The script's main result: mean over its seeds of the last 100 training episodes."""
    env_id = SETTINGS[script][1]
    rows = [row for row in RUNS if (row["script"], row["env_id"]) == (script, env_id)]
    if not rows:
        return "not measured yet"
    mean = statistics.mean(float(row["return_last100"]) for row in rows)
    steps = {int(row["steps"]) for row in rows}
    seeds = f"{len(rows)} seed" + "s" * (len(rows) > 1)
    return f"{env_id} {mean:.0f} at {max(steps):,} steps, {seeds}{stale(rows[0])}"


def files_table() -> str:
    details = tomllib.loads((ROOT / "details.toml").read_text())["details"]
    rows = []
    for script, (setting, _) in SETTINGS.items():
        parent = FAMILY.get(script)
        lines = str(len(source(script).splitlines()))
        change = "the trunk"
        if parent:
            removed, added = diff_size(source(parent), source(script))[:2]
            change = f"`{parent}.py` −{removed} +{added}"
        shown = [
            d["id"] for d in details if script in d["files"] and not d["id"].startswith("beyond")
        ]
        names = dict.fromkeys(d["id"].split()[0] for d in details)
        groups = [f"{g} {sum(i.startswith(g) for i in shown)}" for g in names]
        groups = ", ".join(g for g in groups if not g.endswith(" 0"))
        rows.append(
            [f"[`{script}.py`]({script}.py)", setting, lines, change, groups, result(script)]
        )
    return table(["file", "setting", "lines", "differs from", "details", "measured"], rows)


def details_table() -> str:
    details = tomllib.loads((ROOT / "details.toml").read_text())["details"]
    head = [
        "detail",
        "what the code does",
        "files",
        "openai/baselines",
        "mutations killed by its test",
    ]
    rows = []
    for detail in details:
        files = ", ".join(f"`{name}`" for name in detail["files"])
        missing = [f"`{name}`" for name in SETTINGS if name not in detail["files"]]
        if len(missing) < 2:
            files = " but ".join(["all", *missing])
        place = detail.get("baselines") or "—"
        mutations = str(len(detail["mutations"]))
        what = " ".join(detail["what"].split())
        rows.append([f"{detail['id']} {detail['name']}", what, files, place, mutations])
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


def speed_table() -> str:
    head = ["what", "steps/s (median)", "Stable-Baselines3", "ratio (median of rounds)", "rounds"]
    rows = []
    for row in read_csv(ROOT / "results" / "speed.csv"):
        keys = ("what", "ours", "peer", "ratio", "rounds")
        rows.append([row[key] for key in keys])
    return table(head, rows)


RUNS = read_csv(ROOT / "results" / "runs.csv")
TABLES = {"files": files_table, "details": details_table, "runs": runs_table, "speed": speed_table}


def filled(text: str) -> str:
    """The README with today's tables between its markers."""
    for name, make in TABLES.items():
        start, end = f"<!-- table: {name} -->\n", "<!-- end -->"
        if text.count(start) != 1:
            sys.exit(f"error: README.md needs one table named {name}")
        before, rest = text.split(start)
        text = before + start + make() + "\n" + end + rest.split(end, 1)[1]
    return text


if __name__ == "__main__":
    readme = ROOT / "README.md"
    new = filled(readme.read_text())
    if "--check" in sys.argv[1:]:
        sys.exit(0 if new == readme.read_text() else "error: run python scripts/readme.py")
    readme.write_text(new)
