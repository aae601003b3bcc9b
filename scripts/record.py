"""Keep results/ in step with the runs and with the code.

    python scripts/record.py runs/RUN [...]    # add finished runs; --replace: also in the place of
                                               # a row with other arguments or another length
    python scripts/record.py --same            # compare today's code with that of older rows

A run becomes one row of results/runs.csv and one curve in results/curves/. The script that ran is
looked up in the history, so that a row names the commit whose code it comes from. When the code
has changed since, --same trains 4,096 steps (2 to 16 updates) with both versions and the row's
arguments, in fp32 on a processor without bfloat16. If weights and optimizer are equal bit for bit,
the change moved no number, and the row gets the new hash too. An asynchronous run can only be
compared in serial mode, which does not show the order of its data: its row does not get the hash.
"""

import csv
import hashlib
import importlib.metadata
import io
import json
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
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = ("Environment", "Agent", "Advantages", "Training")
PACKAGES = ("torch", "gymnasium", "numpy", "ale-py", "mujoco", "vizdoom")
COLUMNS = [
    *("run", "script", "env_id", "seed", "steps", "total_timesteps", "return_last100"),
    *("eval_mean", "eval_std", "episodes", "seconds", "sps", "finished"),
    *("command", "commit", "blocks", "python", *PACKAGES, "machine", "date"),
]


def code_hash(source: str) -> str:
    """Hash what decides a result: the four blocks of a script without comments and docstrings."""
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
    blocks = dict(zip(sections[1::2], sections[2::2], strict=True))
    return hashlib.sha256("".join(blocks[name] for name in BLOCKS).encode()).hexdigest()[:12]


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
    """The 5th, 50th and 95th percentile of each loss over the updates of a run."""
    rows = []
    for tag in sorted(tag for tag in events.Tags()["scalars"] if tag.startswith("losses/")):
        values = [event.value for event in events.Scalars(tag) if event.value == event.value]
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


def write_csv(path: Path, rows: list[dict], columns: list[str]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read_csv(path: Path) -> list[dict]:
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def record(run_dir: Path, replace: bool) -> dict:
    """Add one run to results/; a row of the same command is replaced. Returns the row."""
    import torch

    checkpoint = torch.load(run_dir / "checkpoint.pt", map_location="cpu", weights_only=True)
    script, args = checkpoint["script"], checkpoint["args"]
    source = (run_dir / "source.py").read_text()
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
    row = json.loads((run_dir / "result.json").read_text())
    row |= {key: args[key] for key in ("env_id", "seed", "total_timesteps")}
    row |= {package: importlib.metadata.version(package) for package in PACKAGES}
    row |= {"run": name, "script": script, "blocks": code_hash(source), "machine": machine()}
    row |= {"commit": commit_of(script, source), "python": platform.python_version()}
    processes = len(checkpoint["rng"]) if script == "ppo_distributed" else 1  # one state of each
    start = ["torchrun", "--nproc-per-node", str(processes)] if processes > 1 else ["python"]
    row["command"] = shlex.join([*start, f"{script}.py", *flags])
    row["date"] = time.strftime("%Y-%m-%d", time.gmtime((run_dir / "result.json").stat().st_mtime))
    row = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}

    results = ROOT / "results"
    rows = read_csv(results / "runs.csv")
    for old in rows:
        if old["run"] == name and old["command"] != row["command"] and not replace:
            sys.exit(f"error: {name} is the row of `{old['command']}`: --replace takes its place")
    rows = [old for old in rows if old["run"] != name] + [row]
    write_csv(results / "runs.csv", sorted(rows, key=lambda row: row["run"]), COLUMNS)
    events = read_events(run_dir)
    columns = ["step", "seconds", "return", "games"]
    write_csv(results / "curves" / f"{name}.csv", curve(events), columns)
    rows = [old for old in read_csv(results / "metrics.csv") if old["run"] != name]
    rows += [{"run": name} | metric for metric in metrics(events)]
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
    subprocess.run(command, check=True, capture_output=True)
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


def check_rows() -> None:
    """Add today's hash to the rows whose numbers today's code would give as well."""
    path = ROOT / "results" / "runs.csv"
    rows = read_csv(path)
    for row in rows:
        today = code_hash((ROOT / f"{row['script']}.py").read_text())
        if today not in row["blocks"].split():
            equal = same(row)
            serial = row["script"] == "appo_async" and "--serial" not in row["command"]
            verdict = "trains the same" + " in serial mode" * serial
            print(row["run"], verdict if equal else "trains otherwise: run it again")
            row["blocks"] += f" {today}" * (equal and not serial)
    write_csv(path, rows, COLUMNS)


if __name__ == "__main__":
    if sys.argv[1:] == ["--same"]:
        sys.exit(check_rows())
    words = [word for word in sys.argv[1:] if word != "--replace"]
    for run_dir in words or sys.exit(__doc__):
        row = record(Path(run_dir), replace="--replace" in sys.argv)
        print(row["run"], row["return_last100"], row["eval_mean"])
