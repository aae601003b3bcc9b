"""Keep results/ in step with the runs and with the code.

    python scripts/record.py runs/RUN [...]    # add runs, where they were trained
    python scripts/record.py --same            # compare today's code with that of older rows

A run becomes one row of results/runs.csv and one curve in results/curves/. The script that ran is
looked up in the history, so that a row names the commit whose code it comes from; versions and
machine are those of the process that records. A row takes the place of one of the same command,
with --replace also of one of the same name. Runs whose names differ in the seed alone are averaged
in the tables, so their other arguments must be the same: --as NAME sets an experiment apart.
When the code has changed since, --same compares. A speed gets the new hash too if nothing differs
but comments, line breaks, the clock that is read, and what only --native-envs reaches. For a run,
it trains 4,096 steps (2 to 16 updates) with both versions and the row's arguments, in fp32 on a
processor without bfloat16. If weights and optimizer are equal bit for bit, the change moved no
number, and the row gets the hash.
An asynchronous run can only be compared in serial mode, which does not show the order of its data:
its Training block must also be the same, as for a speed.
"""

import argparse
import ast
import contextlib
import csv
import fcntl
import hashlib
import importlib.metadata
import io
import json
import math
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import tokenize
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = ("Environment", "Agent", "Advantages", "Training")
# what refuses an environment, cleans up after a fault, chooses a device (all rows are from CPUs),
# or draws films: no number depends on it
ASIDE = ("wrong_space", "end_orphan", "end_group", "Team.look_after", "Team.close", "AUTO_DEVICES")
ASIDE += ("os.environ.setdefault('MUJOCO_GL', 'egl')",)
# what runs with appo_async.py --native-envs only
NATIVE = ("EnvPoolVectorEnv", "native_id", "args.native_envs and frozen is None")
PACKAGES = ("torch", "gymnasium", "numpy", "ale-py", "mujoco", "vizdoom")
COLUMNS = [
    *("run", "script", "env_id", "seed", "steps", "total_timesteps", "return_last100"),
    *("eval_mean", "eval_std", "episodes", "seconds", "sps", "finished", "resumes"),
    *("command", "commit", "blocks", "python", *PACKAGES, "machine", "date"),
]


def blocks_of(source: str) -> dict[str, str]:
    """The blocks of a script, by name, without comments and docstrings."""
    lines = [list(line) for line in source.splitlines()]
    at_start = True  # of a statement: a string there is a docstring
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        comment = token.type == tokenize.COMMENT and not token.string.startswith("# ===")
        if comment or (token.type == tokenize.STRING and at_start):
            (first, left), (last, right) = token.start, token.end
            for row in range(first, last + 1):
                line = lines[row - 1]
                start, end = left if row == first else 0, right if row == last else len(line)
                line[start:end] = " " * (end - start)
        if token.type not in (tokenize.NL, tokenize.COMMENT):
            at_start = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    text = "\n".join(line for line in ("".join(line).rstrip() for line in lines) if line)
    sections = re.split(r"^# === (\w+)\n", text, flags=re.MULTILINE)
    return dict(zip(sections[1::2], sections[2::2], strict=True))


def deciding(source: str, aside: tuple[str, ...] = ASIDE) -> dict[str, str]:
    """What decides a result: four blocks of a script, by name, without what is in aside."""
    lines, body = source.splitlines(), ast.parse(source).body
    parts = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    parts |= {ast.unparse(node.targets[0]): node for node in body if isinstance(node, ast.Assign)}
    parts |= {ast.unparse(node.body): node for node in body if isinstance(node, ast.If)}
    for thing in (node for node in body if isinstance(node, ast.ClassDef)):
        methods = (node for node in thing.body if isinstance(node, ast.FunctionDef))
        parts |= {f"{thing.name}.{node.name}": node for node in methods} | {thing.name: thing}
    inner = (node for thing in body for node in ast.walk(thing) if isinstance(node, ast.If))
    parts |= {ast.unparse(node.test): node for node in inner}
    for name in aside:
        if node := parts.get(name):
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    blocks = blocks_of("\n".join(lines) + "\n")
    return {name: blocks[name] for name in BLOCKS}


def code_hash(source: str) -> str:
    return hashlib.sha256("".join(deciding(source).values()).encode()).hexdigest()[:12]


def laid_out(blocks: dict[str, str]) -> dict[str, str]:
    """The same blocks, however their lines were broken and whatever clock they read."""
    texts = {name: ast.unparse(ast.parse(text)) for name, text in blocks.items()}
    return {
        name: text.replace("time.perf_counter()", "time.time()") for name, text in texts.items()
    }


def git(*words: str) -> str:
    """Run git in this repository; returns what it prints."""
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def commit_of(script: str, source: str) -> str:
    """The oldest commit that holds this very script."""
    for commit in git("log", "--reverse", "--format=%h", "--", f"{script}.py").split():
        if git("show", f"{commit}:{script}.py") == source:
            return commit
    sys.exit(f"error: no commit holds the {script}.py of this run: commit it, then train")


def machine() -> str:
    """Processor, number of cores, and what else counts: how wide it computes, and in which type."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    names = re.findall(r"model name\s*: (.*)", text)
    known = {"avx512_bf16": "AVX512-BF16", "avx512f": "AVX512", "avx2": "AVX2"}
    widest = [name for flag, name in known.items() if re.search(rf"\b{flag}\b", text)][:1]
    return ", ".join([names[0], f"{len(names)} cores", *widest]) if names else platform.processor()


def changed_arguments(source: str, args: dict) -> list[str]:
    """Spell the arguments that differ from the defaults of the script that ran."""
    script = types.ModuleType("recorded")
    script.__file__ = "recorded.py"
    sys.modules["recorded"] = script
    exec(compile(source, "recorded.py", "exec"), script.__dict__)
    words = []
    for name, value in args.items():
        if value != getattr(script.Args(), name) and name not in ("resume", "run_dir", "track"):
            flag = name.replace("_", "-")
            words += [f"--{flag}" if value is not False else f"--no-{flag}"]
            words += [] if isinstance(value, bool) else [str(value)]
    return words


def read_events(run_dir: Path):
    """All scalars of a run, without those that a resume took back."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()


def metrics(events) -> list[dict]:
    """Percentiles of losses, policy lag and shares of waiting over the updates of a run."""
    rows, kept = [], ("losses/", "charts/policy_lag", "charts/waiting")
    for tag in sorted(tag for tag in events.Tags()["scalars"] if tag.startswith(kept)):
        values = [event.value for event in events.Scalars(tag) if event.value == event.value]
        if len(values) < 2:
            continue
        cuts = statistics.quantiles(values, n=20, method="inclusive")
        percentiles = {"p5": cuts[0], "p50": cuts[9], "p95": cuts[18]}
        rows.append({"metric": tag} | {name: f"{x:.5g}" for name, x in percentiles.items()})
    return rows


def curve(events, rows: int = 500) -> list[dict]:
    """Mean score of the games that ended in each of at most `rows` windows of steps."""
    games, speeds = events.Scalars("charts/episodic_return"), events.Scalars("charts/SPS")
    # of training: what lies between a stop and a resume is not counted
    seconds = [event.step / event.value for event in speeds]
    width = -(-games[-1].step // rows)
    windows: dict[int, list] = {}
    for game in games:
        windows.setdefault(-(-game.step // width), []).append(game)
    return [
        {
            "step": index * width,
            "seconds": round(np.interp(window[-1].step, [e.step for e in speeds], seconds), 1),
            "return": round(sum(game.value for game in window) / len(window), 3),
            "games": len(window),
        }
        for index, window in sorted(windows.items())
    ]


def points(rows: list[dict], window: int, last_step: int) -> tuple[list[float], list[float]]:
    """Mean score of the games in each window of steps, against the middle of the window."""
    windows: dict[int, list] = {}
    for row in rows:
        if int(row["step"]) > last_step:
            continue
        games = int(row.get("games", 1))
        windows.setdefault((int(row["step"]) - 1) // window, []).append(
            (float(row["return"]), games)
        )
    steps = [(index + 0.5) * window for index in sorted(windows)]
    means = [
        sum(score * games for score, games in windows[index])
        / sum(games for _, games in windows[index])
        for index in sorted(windows)
    ]
    return steps, means


def write_csv(path: Path, rows: list[dict], columns: list[str]) -> None:
    """Write a table beside the old one, then rename: a kill leaves one of the two, whole."""
    beside = path.with_suffix(".tmp")
    with open(beside, "w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(beside, path)


def read_csv(path: Path) -> list[dict]:
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@contextlib.contextmanager
def only_writer():
    """Wait until no other process is between reading and writing results/."""
    folder = os.open(ROOT / "results", os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def group_of(name: str) -> str:
    """A run's name without its seed: what has the same is averaged in the tables."""
    parts = name.split("__")
    return "__".join(parts[:2] + parts[3:])


def settings_of(command: str) -> str:
    """A command without its seed, its end and its evaluation."""
    no_setting = r" --(seed|stop-at|eval-episodes|checkpoint-every) \S+| --capture-video"
    return re.sub(no_setting, "", command)


def record(run_dir: Path, replace: bool = False, label: str = "") -> dict:
    """Add one run to results/, with label at the end of its name. Returns the row."""
    import torch

    for file in ("checkpoint.pt", "result.json"):
        if not (run_dir / file).exists():
            sys.exit(f"error: {run_dir} has no {file}: a run has it when it has ended")
    checkpoint = torch.load(run_dir / "checkpoint.pt", map_location="cpu", weights_only=True)
    script, args = checkpoint["script"], checkpoint["args"]
    source = (run_dir / "source.py").read_text()
    commit = commit_of(script, source)  # before it is executed: nobody else's code is
    row = json.loads((run_dir / "result.json").read_text())
    if row["finished"]:
        args["stop_at"] = None  # it stopped nothing
    elif row["steps"] < (args["stop_at"] or math.inf):
        args["stop_at"] = row["steps"]  # Ctrl-C; the command is to make a run of this length
    flags = changed_arguments(source, args)
    name = f"{args['env_id']}__{script}__{args['seed']}".replace("/", "-").replace(":", "-")
    if args.get("precision", "fp32") != "fp32":
        name += "__" + args["precision"]
    if args.get("bootstrap_truncated"):
        name += "__bootstrap"
    if args.get("rnn", "none") != "none":
        name += "__" + args["rnn"]
    if script == "appo_async" and "--num-steps" in flags:
        name += f"__T={args['num_steps']}"
    name += f"__{label}" * bool(label)
    row |= {key: args[key] for key in ("env_id", "seed", "total_timesteps")}
    row |= {package: importlib.metadata.version(package) for package in PACKAGES}
    row |= {"run": name, "script": script, "blocks": code_hash(source), "machine": machine()}
    row |= {"commit": commit, "python": platform.python_version()}
    processes = len(checkpoint["rng"]) if script == "ppo_distributed" else 1  # one state of each
    start = ["torchrun", "--nproc-per-node", str(processes)] if processes > 1 else ["python"]
    row["command"] = shlex.join([*start, f"{script}.py", *flags])
    row["date"] = time.strftime("%Y-%m-%d", time.gmtime((run_dir / "result.json").stat().st_mtime))
    row = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}

    events = read_events(run_dir)
    if "charts/episodic_return" not in events.Tags()["scalars"]:
        sys.exit(f"error: {run_dir}: no game has ended, so there is nothing to record")
    points, percentiles = curve(events), metrics(events)
    row["resumes"] = len([*run_dir.glob("events.out.tfevents.*")]) - 1

    results = ROOT / "results"
    with only_writer():
        rows = read_csv(results / "runs.csv")
        for old in rows:
            if old["run"] == name:
                if old["command"] != row["command"] and not replace:
                    sys.exit(f"error: {name} is the row of `{old['command']}`: --replace, or --as")
                continue
            other = settings_of(old["command"]) != settings_of(row["command"])
            if other and group_of(old["run"]) == group_of(name):
                sys.exit(f"error: {old['run']} was `{old['command']}`: give this one --as NAME")
        rows = [old for old in rows if old["run"] != name] + [row]
        # the curve first: a row without one would be half a result
        columns = ["step", "seconds", "return", "games"]
        write_csv(results / "curves" / f"{name}.csv", points, columns)
        write_csv(results / "runs.csv", sorted(rows, key=lambda row: row["run"]), COLUMNS)
        rows = [old for old in read_csv(results / "metrics.csv") if old["run"] != name]
        rows += [{"run": name} | metric for metric in percentiles]
        columns = ["run", "metric", "p5", "p50", "p95"]
        write_csv(results / "metrics.csv", sorted(rows, key=lambda row: row["run"]), columns)
    return row


def few_updates(script: Path, row: dict, run_dir: Path) -> dict:
    """The state of a script after 4,096 steps with a row's arguments."""
    import torch

    recorded = re.sub(r"--stop-at \S+", "", row["command"])
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():  # emulated: a tenth of the speed of fp32
        recorded = recorded.replace("--precision bf16", "")
    # "python" or "torchrun --nproc-per-node 2", and the flags
    (_, *start), flags = map(str.split, recorded.split(script.name))
    flags += ["--stop-at", "4096", "--run-dir", str(run_dir), "--eval-episodes", "0"]
    flags += ["--serial"] * (row["script"] == "appo_async")  # else no two runs are equal
    start = ["-m", "torch.distributed.run", *start] if start else []
    command = [sys.executable, *start, str(script), *flags]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests")}  # memory_envs
    subprocess.run(command, check=True, capture_output=True, env=env)
    return torch.load(run_dir / "checkpoint.pt", weights_only=True)


def same(row: dict) -> bool:
    """Whether today's script takes the very steps that the row's version took."""
    import torch

    def tensors(tree: object) -> list:
        if isinstance(tree, dict | list):
            values = tree.values() if isinstance(tree, dict) else tree
            return [leaf for value in values for leaf in tensors(value)]
        return [tree] if isinstance(tree, torch.Tensor) else []

    with tempfile.TemporaryDirectory() as folder:
        name = f"{row['script']}.py"
        old = Path(folder, name)  # under its own name, which checkpoints carry
        old.write_text(git("show", f"{row['commit']}:{name}"))
        before = few_updates(old, row, Path(folder, "before"))
        after = few_updates(ROOT / name, row, Path(folder, "after"))
    kept = [[state[key] for key in ("agent", "optimizer", "returns")] for state in (before, after)]
    pairs = zip(tensors(kept[0]), tensors(kept[1]), strict=True)
    return all(torch.equal(a, b) for a, b in pairs) and kept[0][2] == kept[1][2]


def check_row(row: dict) -> None:
    """Add today's hash to a row whose numbers today's code would give as well."""
    script = f"{row['script']}.py"
    source = (ROOT / script).read_text()
    today = code_hash(source)
    if today in row["blocks"].split():
        return
    try:
        equal = same(row)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.decode().splitlines() or ["no message"])[-1]
        print(f"{row['run']} cannot be compared: {last}", flush=True)
        return
    old = git("show", f"{row['commit']}:{script}")
    training = [laid_out(deciding(text))["Training"] for text in (old, source)]
    unordered = row["script"] == "appo_async" and training[0] != training[1]
    verdict = "trains the same" + " in serial mode: run it again" * unordered
    print(row["run"], verdict if equal else "trains otherwise: run it again", flush=True)
    if equal and not unordered:
        path = ROOT / "results" / "runs.csv"
        with only_writer():
            rows = read_csv(path)
            for now in rows:
                if (now["run"], now["blocks"]) == (row["run"], row["blocks"]):
                    now["blocks"] += f" {today}"
            write_csv(path, rows, COLUMNS)


def check_speeds(path: Path) -> None:
    """Add today's hash to the speeds of code that differs only in what laid_out() makes alike."""
    with only_writer():
        rows = read_csv(path)
        for row in rows:
            script = re.search(r"\w+\.py", row["what"])[0]
            source = (ROOT / script).read_text()
            old, today = git("show", f"{row['commit']}:{script}"), code_hash(source)
            wrappers = script == "appo_async.py" and "--native-envs" not in row["what"]
            aside = ASIDE + NATIVE * wrappers
            alike = laid_out(deciding(old, aside)) == laid_out(deciding(source, aside))
            if alike and today not in row["blocks"].split():
                row["blocks"] += f" {today}"
        write_csv(path, rows, list(rows[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", type=Path, help="run directories")
    parser.add_argument("--replace", action="store_true", help="a row with other arguments, too")
    parser.add_argument("--as", dest="label", default="", help="the end of the row's name")
    parser.add_argument("--same", action="store_true", help="compare today's code with older rows")
    args = parser.parse_args()
    if "/" in args.label:
        parser.error("--as: becomes part of a file's name, so it has no /")
    if args.same == bool(args.runs):
        parser.error("name run directories, or --same")
    for run_dir in args.runs:
        row = record(run_dir, args.replace, args.label)
        print(row["run"], row["return_last100"], row["eval_mean"])
    if args.same:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(check_row, read_csv(ROOT / "results" / "runs.csv")))
        for name in ("speed.csv", "speed_xeon.csv"):
            check_speeds(ROOT / "results" / name)


if __name__ == "__main__":
    main()
