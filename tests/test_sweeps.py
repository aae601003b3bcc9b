"""The sweeps are W&B's, and run without it; runs and timings are compared by their noise."""

import csv
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from conftest import ROOT, TINY, environment, load_script, run_forked

sys.path.insert(0, str(ROOT / "scripts"))
import readme
from record import read_csv

SWEEPS = sorted((ROOT / "sweeps").glob("*.yaml"))
REPRODUCE, COMPARE = ROOT / "benchmarks/reproduce.py", ROOT / "benchmarks/compare.py"
# https://docs.wandb.ai/models/sweeps/sweep-config-keys (W&B ships no schema)
KEYS = {
    *("program", "entity", "project", "description", "name", "method", "metric", "parameters"),
    *("early_terminate", "command", "run_cap"),
}
METHODS = {"grid", "random", "bayes"}
MACROS = {"${env}", "${interpreter}", "${program}", "${args}"}

each_sweep = pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reproduce = load(REPRODUCE)


@each_sweep
def test_sweep_is_one_of_wandbs(path):
    sweep = yaml.safe_load(path.read_text())
    assert sweep.keys() <= KEYS and {"program", "method", "parameters", "command"} <= sweep.keys()
    assert sweep["name"] == path.stem and sweep["method"] == "grid" and sweep["method"] in METHODS
    assert sweep["metric"] == {"name": "charts/episodic_return", "goal": "maximize"}
    for parameter in sweep["parameters"].values():
        assert parameter.keys() in ({"value"}, {"values"})
    words = sweep["command"]
    assert set(words) >= MACROS and {w for w in words if w.startswith("$")} == MACROS
    assert words[:3] == ["${env}", "${interpreter}", "${program}"] and words[-1] == "${args}"


@each_sweep
def test_sweep_fits_its_script(path):
    """Every name is an argument of the script, every value of its type, no flag has a value."""
    sweep = yaml.safe_load(path.read_text())
    script = load_script(Path(sweep["program"]).stem)
    for cell in reproduce.cells(sweep):
        words = reproduce.agent_command(sweep, cell)[3:]
        args = script.tyro.cli(script.Args, args=words)
        assert args.track
        for name, value in cell.items():
            assert getattr(args, name.replace("-", "_")) == value and not isinstance(value, bool)
    assert sweep["parameters"]["seed"]["values"][:3] == [1, 2, 3]
    assert script.Args.wandb_project_name == sweep["project"]


@each_sweep
def test_an_agents_command_trains(path, tmp_path):
    """The words that `wandb agent` would start, with the steps cut."""
    sweep = yaml.safe_load(path.read_text())
    name = Path(sweep["program"]).stem
    cell = reproduce.cells(sweep | {"parameters": dict(sweep["parameters"])})[0]
    words = reproduce.agent_command(sweep | {"program": str(ROOT / sweep["program"])}, cell)
    cut = TINY[name] | {"eval_episodes": 0, "run_dir": "run"}
    for key, value in cut.items():
        words.append(f"--{key.replace('_', '-')}" + ("" if value is True else f"={value}"))
    # one of them as it is, with W&B's own process, which takes seconds to start and to end
    offline = path.stem == "classic_control"
    if offline:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = environment(PATH=path, OMP_NUM_THREADS="1")
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    else:
        assert words[:2] == ["/usr/bin/env", "python"]
        done = run_forked(*words[2:], cwd=tmp_path, WANDB_MODE="disabled")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run/result.json").read_text())["finished"]
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == offline


def test_the_57_games_but_one():
    sweep = yaml.safe_load((ROOT / "sweeps/atari57.yaml").read_text())
    games = sweep["parameters"]["env-id"]["values"]
    import ale_py
    import gymnasium as gym

    gym.register_envs(ale_py)
    assert len(games) == len(set(games)) == 56 and set(games) <= set(gym.registry)
    assert "SurroundNoFrameskip-v4" not in gym.registry


# the local runner

SMALL = {
    "program": "ppo.py",
    "method": "grid",
    "parameters": {
        "env-id": {"values": ["CartPole-v1", "Acrobot-v1"]},
        "seed": {"values": [1, 2]},
        "total-timesteps": {"value": 2048},
    },
    "command": ["${env}", "${interpreter}", "${program}", "--track", "--no-anneal-lr", "${args}"],
}


def start(tmp_path: Path, sweep: dict, *flags: str) -> subprocess.Popen:
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(sweep, sort_keys=False))
    return subprocess.Popen(
        [sys.executable, REPRODUCE, "small.yaml", *flags],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # as of a terminal
    )


def children(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def finish(process: subprocess.Popen) -> tuple[int, str]:
    output = process.communicate(timeout=240)[0]
    return process.returncode, output


def wait_for(condition, seconds: float = 90) -> None:
    end = time.time() + seconds
    while not condition():
        assert time.time() < end
        time.sleep(0.05)


def test_reproduce_runs_each_cell_once(tmp_path):
    code, output = finish(start(tmp_path, SMALL, "--jobs", "2", "--", "--eval-episodes", "1"))
    assert code == 0 and output.splitlines()[-1] == "4 of 4 done, 0 running"
    results = sorted((tmp_path / "runs/small").glob("*/result.json"))
    assert [path.parent.name for path in results] == [
        f"{env}-v1__ppo__{seed}" for env in ("Acrobot", "CartPole") for seed in (1, 2)
    ]
    for path in results:
        args = json.loads(path.with_name("args.json").read_text())
        assert args["env_id"] in path.parent.name and path.parent.name.endswith(str(args["seed"]))
        assert (args["anneal_lr"], args["eval_episodes"], args["track"]) == (False, 1, False)
        assert "torch threads 1" in path.parent.with_name(path.parent.name + ".log").read_text()
    # all is done: a second call starts nothing
    before = [path.stat().st_mtime_ns for path in results]
    code, output = finish(start(tmp_path, SMALL))
    assert code == 0 and output.splitlines() == ["4 of 4 done, 0 running"]
    assert [path.stat().st_mtime_ns for path in results] == before
    # nor does one with other flags take the same runs for its own
    code, output = finish(start(tmp_path, SMALL, "--", "--gamma", "0.5"))
    assert code == 2 and "was begun as `python ppo.py " in output and "--out" in output
    other = ["--out", "other", "--", "--gamma", "0.5"]
    code, output = finish(start(tmp_path, SMALL, "--list", *other))
    assert code == 0 and not list((tmp_path / "other").glob("*/args.json"))  # starts nothing
    lines = output.splitlines()
    assert len(lines) == 4 and all(line.split()[:3] == ["to", "do", "python"] for line in lines)


def test_reproduce_keeps_cells_apart_whose_names_have_dots(tmp_path):
    rates = SMALL["parameters"] | {"learning-rate": {"values": [0.001, 0.0003]}}
    sweep = SMALL | {"parameters": rates | {"env-id": {"value": "CartPole-v1"}}}
    flags = ["--jobs", "4", "--", "--eval-episodes", "0", "--stop-at=1024"]
    for _ in range(2):  # the second time all have come as far as they are asked to
        code, output = finish(start(tmp_path, sweep, *flags))
        assert code == 0 and output.splitlines()[-1] == "4 of 4 done, 0 running"
        assert "another process" not in output


def test_reproduce_goes_on_after_ctrl_c(tmp_path):
    two = SMALL["parameters"] | {"env-id": {"value": "CartPole-v1"}}
    sweep = SMALL | {"parameters": two | {"total-timesteps": {"value": 120_000}}}
    process = start(tmp_path, sweep, "--jobs", "2", "--", "--eval-episodes", "0")
    runs = tmp_path / "runs/small"
    wait_for(lambda: len(list(runs.glob("*/checkpoint.pt"))) == 2)
    # a terminal sends it to all of its group: a run that got it from there and from us would end
    # at the second without saving
    assert {os.getpgid(pid) for pid in children(process.pid)}.isdisjoint({process.pid})
    os.killpg(process.pid, signal.SIGINT)
    code, output = finish(process)
    assert code == 0 and "0 of 2 done, 0 running" in output
    stopped = {p.parent.name: json.loads(p.read_text()) for p in runs.glob("*/result.json")}
    assert len(stopped) == 2 and not any(r["finished"] for r in stopped.values())
    code, output = finish(start(tmp_path, sweep, "--", "--eval-episodes", "0"))
    assert code == 0 and "2 of 2 done" in output
    for name in stopped:
        assert "going on after step" in (runs / f"{name}.log").read_text()
        assert json.loads((runs / name / "result.json").read_text())["finished"]


def test_reproduce_shares_out_the_threads(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda *_, env, **__: started.append(env))
    reproduce.Cell("run", [sys.executable, "ppo.py"], tmp_path).start(threads=3)
    assert started[0]["OMP_NUM_THREADS"] == "3"


def test_reproduce_goes_on_from_half_a_result(tmp_path):
    """The machine went down while it was written."""
    cell = reproduce.Cell("run", [sys.executable, "ppo.py"], tmp_path)
    cell.run_dir.mkdir(parents=True)
    for text, done in (("", False), ('{"finished": tr', False), ('{"finished": true}', True)):
        (cell.run_dir / "result.json").write_text(text)
        assert cell.done() == done


class FakeCell:
    """A run that has done 100 of 200 steps, one a second; it ends when it is told to stop."""

    def __init__(self, name: str = "run", total: int = 200):
        self.name, self.total, self.failed, self.told, self.threads = name, total, False, 0, None
        self.sent: list[int] = []
        self.process = SimpleNamespace(returncode=0, send_signal=self.sent.append)
        self.process.poll = lambda: 0 if self.sent else None

    def done(self) -> bool:
        return False

    def progress(self) -> tuple[int, int, float]:
        return 100, self.total, 1.0

    def start(self, threads: int) -> str:
        self.threads = threads
        os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C while it is started
        return ""


def test_reproduce_says_how_long_it_takes():
    one, two, three, long = FakeCell(), FakeCell(), FakeCell(), FakeCell(total=1100)
    assert reproduce.status([one], [one], 4).endswith("| 1 SPS in all | 0:01:40 left")
    # on two cores: 100 seconds each of the two that run, then 200 of the third
    assert reproduce.status([one, two, three], [one, two], 2).endswith("| 0:03:20 left")
    assert reproduce.status([one, long], [one, long], 2).endswith("| 0:16:40 left")


@pytest.mark.timeout(30)  # else it would go on for ever
def test_reproduce_stops_a_run_that_is_being_started(monkeypatch):
    """And starts no further one; each has its share of the cores as threads."""
    first, second = FakeCell(), FakeCell()
    before = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr(reproduce, "CORES", 8)
    try:
        assert reproduce.run([first, second], 2) == 0
    finally:
        for signum, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(signum, handler)
    assert first.sent == [signal.SIGINT] and (first.threads, second.threads) == (4, None)


def test_reproduce_reads_every_progress_line(tmp_path):
    """appo_async.py counts frames, four for each step."""
    lines = (
        "| 405 SPS | 0:10:00 left",
        "| 1,620 frames/s | lag 0/1/2 | waiting 1%/2%/3% | 0:10 left",
    )
    for line, unit in zip(lines, ("SPS", "frames/s"), strict=True):
        (found,) = reproduce.PROGRESS.findall(f"1,024 of 5,000,000 steps | return nan {line}")
        assert found[:2] == ("1,024", "5,000,000") and found[3] == unit
        cell = reproduce.Cell("run", [sys.executable, "ppo.py"], tmp_path)
        cell.log.write_text(f"1,024 of 5,000,000 steps | return nan {line}\n")
        assert cell.progress() == (1024, 5_000_000, 405.0)


def test_reproduce_never_runs_a_cell_twice(tmp_path):
    """A runner that is killed leaves its runs alive: the next one must leave them alone."""
    one = SMALL["parameters"] | {"env-id": {"value": "CartPole-v1"}, "seed": {"value": 1}}
    sweep = SMALL | {"parameters": one | {"total-timesteps": {"value": 50_000}}}
    first = start(tmp_path, sweep, "--", "--eval-episodes", "0")
    checkpoint = tmp_path / "runs/small/CartPole-v1__ppo__1/checkpoint.pt"
    wait_for(checkpoint.exists)
    first.kill()
    first.communicate()
    code, output = finish(start(tmp_path, sweep, "--", "--eval-episodes", "0"))
    assert "CartPole-v1__ppo__1 is being trained by another process" in output and code == 0
    assert "0 of 1 done" in output
    wait_for(checkpoint.with_name("result.json").exists)
    log = (tmp_path / "runs/small/CartPole-v1__ppo__1.log").read_text()
    assert log.count("device cpu") == 1 and "going on after step" not in log


def test_reproduce_leaves_a_run_with_other_flags_alone(tmp_path):
    """Also if that was begun after both runners had looked, and has been killed."""
    command = [sys.executable, str(ROOT / "ppo.py"), "--eval-episodes=0", "--total-timesteps=40000"]
    first = reproduce.Cell("run", command, tmp_path)
    second = reproduce.Cell("run", [*command, "--gamma", "0.5"], tmp_path)
    assert first.begun_with() is None and second.begun_with() is None
    assert first.start() == ""
    wait_for((tmp_path / "run/checkpoint.pt").exists)
    assert second.start() == "is being trained by another process"
    first.process.kill()
    first.process.wait()
    assert "was begun as `python ppo.py" in second.start() and second.process is None
    assert second.failed and not first.failed  # its runner says so with exit code 1
    assert first.begun_with() == first.settings()
    again = reproduce.Cell("run", [*command, "--stop-at", "5000"], tmp_path)
    assert again.start() == ""
    again.process.kill()
    again.process.wait()


def test_reproduce_records_a_failure_and_goes_on(tmp_path):
    parameters = SMALL["parameters"] | {"env-id": {"values": ["NoSuch-v1", "CartPole-v1"]}}
    code, output = finish(start(tmp_path, SMALL | {"parameters": parameters}))
    assert code == 1 and "2 of 4 done, 0 running, 2 failed" in output
    assert "NoSuch-v1__ppo__1 failed" in output and "error: --env-id" in output


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        (None, [], "there is no small.yaml"),
        ("program: [", [], "is no sweep with a grid"),
        ("program: ppo.py", [], "is no sweep with a grid"),
        ("program: \xe9", [], "is no sweep with a grid"),
        (yaml.safe_dump(SMALL | {"command": ["${env}"]}), [], "is no sweep with a grid"),
        (yaml.safe_dump(SMALL), ["--", "--stop-at", "abc"], "--stop-at: 'abc' is no number"),
        (yaml.safe_dump(SMALL), ["--", "--stop-at"], "--stop-at: '' is no number"),
        (yaml.safe_dump(SMALL), ["--jobs", "0"], "--jobs: 0 is less than 1"),
    ],
)
def test_reproduce_refuses(text, flags, message, tmp_path):
    if text:
        (tmp_path / "small.yaml").write_text(text, "latin-1")
    command = [sys.executable, REPRODUCE, "small.yaml", *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1


# the regression guard


def write(path: Path, rows: list[dict]) -> Path:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def runs(path: Path, scores: list[float]) -> Path:
    return write(
        path,
        [
            {"run": f"CartPole-v1__ppo__{i}", "steps": 1000, "return_last100": score}
            for i, score in enumerate(scores)
        ],
    )


@pytest.fixture
def compare(monkeypatch, capsys):
    """Call compare.py with a command line; returns its exit code and what it prints."""
    module = load(COMPARE)

    def call(*words: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["compare.py", *map(str, words)])
        try:
            code = module.main()
        except SystemExit as end:
            code = end.code
        return code, "".join(capsys.readouterr())

    return call


@pytest.mark.parametrize(
    ("new", "code", "verdict"),
    [
        ([480, 470, 490], 0, "the same runs"),
        ([478, 475, 488], 0, "no difference shown"),
        ([200, 210, 190], 1, "worse"),
        ([700, 710, 690], 0, "better"),
        ([480], 0, "two seeds a side are needed"),
    ],
)
def test_compare_returns(compare, new, code, verdict, tmp_path):
    old = runs(tmp_path / "old.csv", [490, 480, 470])
    found, output = compare(old, runs(tmp_path / "new.csv", new))
    assert found == code and verdict in output


def test_compare_leaves_out_what_is_in_both(compare, tmp_path):
    """Seeds that were kept would pull both means together. Equal scores alone are no such runs."""
    from scipy import stats

    old = runs(tmp_path / "old.csv", [490, 480, 470])
    code, output = compare(old, runs(tmp_path / "new.csv", [490, 480, 470, 400, 410, 405]))
    interval = stats.ttest_ind([400, 410, 405], [490, 480, 470], equal_var=False)
    low, high = interval.confidence_interval(0.95)
    assert code == 1 and "less 3 that are in both files" in output
    assert f"({low:+.1f} to {high:+.1f})" in output
    _, output = compare(old, runs(tmp_path / "new.csv", [480, 470, 490, 490]))
    assert "in both" not in output


def test_compare_returns_by_welchs_interval(compare, tmp_path):
    from scipy import stats

    a, b = [10.0, 12.0, 15.0], [11.0, 19.0, 16.0, 17.0]
    _, output = compare(runs(tmp_path / "a.csv", a), runs(tmp_path / "b.csv", b))
    interval = stats.ttest_ind(b, a, equal_var=False).confidence_interval(0.95)
    assert f"({interval.low:+.1f} to {interval.high:+.1f})" in output


def test_compare_equivalence(compare, tmp_path):
    """Not to find a difference is no proof that there is none: that takes a margin."""
    from scipy import stats

    old = runs(tmp_path / "old.csv", [490, 480, 470])
    new = runs(tmp_path / "new.csv", [478, 475, 488])
    assert compare(old, new, "--margin", 40)[0] == 0
    code, output = compare(old, new, "--margin", 5)
    assert code == 1 and "not shown to be the same within 5" in output
    for far in (-500, 500):  # a collapse, or a leap
        moved = runs(tmp_path / "far.csv", [score + far for score in (478, 475, 488)])
        assert compare(old, moved, "--margin", 40)[0] == 1
    # two one-sided tests at 5 %: the interval of 90 % has to lie within the margin
    widths = {}
    for level in (0.9, 0.95, 0.8):
        test = stats.ttest_ind([478, 475, 488], [490, 480, 470], equal_var=False)
        widths[level] = max(map(abs, test.confidence_interval(level)))
    assert compare(old, new, "--margin", (widths[0.9] + widths[0.95]) / 2)[0] == 0
    assert compare(old, new, "--margin", (widths[0.9] + widths[0.8]) / 2)[0] == 1


@pytest.mark.parametrize(
    ("flag", "value"), [("level", 95), ("level", 0), ("margin", -5), ("margin", "nan")]
)
def test_compare_refuses(flag, value, compare, tmp_path):
    old = runs(tmp_path / "old.csv", [490, 480, 470])
    code, output = compare(old, old, f"--{flag}", value)
    assert code == 2 and f"error: --{flag}: {float(value)} is not" in output


def test_compare_with_published(compare, tmp_path):
    """A published mean and deviation count as the seeds that they come from would."""
    from scipy import stats

    theirs, ours = [10.0, 12.0, 17.0], [11.0, 19.0, 16.0, 17.0]
    new = runs(tmp_path / "new.csv", ours)  # of 1,000 steps
    row = {"env_id": "CartPole-v1", "script": "ppo", "source": "X"}
    row |= {"mean": statistics.mean(theirs), "std": statistics.stdev(theirs)}
    rows = [row | {"note": note} for note in ("3 seeds, 1k steps", "3 seeds, 10M steps", "?")]
    old = write(tmp_path / "published.csv", rows)
    code, output = compare(old, new)
    interval = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    assert code == 0 and output.count("\n") == 1
    assert f"({interval.low:+.1f} to {interval.high:+.1f}): no difference shown" in output
    assert compare(old, new, "--margin", 1)[0] == 1
    assert compare(old, new, "--margin", 20)[0] == 0


@pytest.mark.parametrize(
    ("ratio", "code", "verdict"),
    [
        ("1.40 (1.30 to 1.50)", 0, "within noise"),
        ("1.00 (0.90 to 1.10)", 1, "slower"),
        ("2.00 (1.90 to 2.10)", 0, "faster"),
    ],
)
def test_compare_speed(compare, ratio, code, verdict, tmp_path):
    row = {"what": "ppo.py", "task": "CartPole", "num_envs": 4, "peer": "sb3", "rounds": 3}
    old = write(tmp_path / "old.csv", [row | {"ratio": "1.35 (1.25 to 1.45)"}])
    found, output = compare(old, write(tmp_path / "new.csv", [row | {"ratio": ratio}]))
    assert found == code and verdict in output
    # of two rounds both are below the other two by chance in one of six cases
    two = write(tmp_path / "two.csv", [row | {"ratio": ratio, "rounds": 2}])
    for pair in ((old, two), (two, old)):
        found, output = compare(*pair)
        assert found == 0 and "three rounds a side are needed to tell" in output


def test_compare_names_what_one_file_lacks(compare, tmp_path):
    """A guard that compares nothing has not said that all is well."""
    rows = [
        {"run": f"{env}__ppo__{seed}", "steps": 1000, "return_last100": 480}
        for env in "AB"
        for seed in (1, 2)
    ]
    both, one = write(tmp_path / "both.csv", rows), write(tmp_path / "one.csv", rows[:2])
    code, output = compare(both, one)
    assert code == 0 and "B ppo 1,000 steps: only in the old file" in output
    code, output = compare(one, write(tmp_path / "other.csv", rows[2:]))
    assert code == 2 and "nothing in common" in output


def test_compare_refuses_other_files(compare, tmp_path):
    old = runs(tmp_path / "old.csv", [1, 2])
    assert compare(old, tmp_path / "missing.csv")[0] == 2
    code, output = compare(old, write(tmp_path / "new.csv", [{"x": 1}]))
    assert code == 2 and "both files must be" in output


# the ablations


@pytest.fixture
def ablate(monkeypatch):
    monkeypatch.syspath_prepend(REPRODUCE.parent)
    return load(REPRODUCE.with_name("ablate.py"))


def test_a_stopped_ablation_has_no_rows(ablate, tmp_path):
    """A run that Ctrl-C ends writes its result.json, too; one that is killed says nothing."""
    ends = {"whole": (100_000, True), "stopped": (2048, False)}
    found = []
    for name, (steps, finished) in ends.items():
        (tmp_path / name).mkdir()
        result = {"steps": steps, "finished": finished, "return_last100": 7.0}
        (tmp_path / name / "result.json").write_text(json.dumps(result))
        found.append(ablate.reproduce.Cell(name, ["python", "ppo.py"], tmp_path))
    assert ablate.returns(found[:1]) == [7.0]
    assert ablate.returns(found) is None
    found[1].failed = True
    found[1].log.write_text("2,048 of 100,000 steps")
    assert ablate.returns(found) is None
    found[1].log.write_text("2,048 steps\nerror: the gradient is not finite after step 9")
    assert ablate.returns(found) == [7.0, None]


def test_ablations_lack_one_detail_each(ablate):
    for script in ("ppo", "ppo_continuous"):
        source = (ROOT / f"{script}.py").read_text()
        found = ablate.mutants(script)
        assert found.pop("all details") == source and len(set(found.values())) == len(found)
        ids = {" ".join(name.split()[:2]) for name in found}
        # core 12 are the numbers that are logged; without continuous 1 there is no policy
        core = {f"core {i}" for i in range(1, 14)} - {"core 12"}
        continuous = {f"continuous {i}" for i in range(2, 10)}
        # two networks are continuous 4 as well as core 13
        assert ids == (core if script == "ppo" else core - {"core 13"} | continuous)
        assert all(mutant != source for mutant in found.values())
    assert set(ablate.mutants("ppo", "core 7")) == {
        "all details",
        "core 7 Normalization of advantages",
    }
    wasted = "the reset takes a step of its own, whose action is ignored"
    for script, _, _ in ablate.TASKS.values():
        assert set(ablate.mutants(script, why="the reset takes")) == {"all details", wasted}


@pytest.mark.parametrize(("why", "count"), [("no such mutation", 0), ("the value", 4)])
def test_ablate_takes_one_mutation(why, count, ablate, monkeypatch, capsys, tmp_path):
    """Several would share a folder, and one of them be trained under the names of all."""
    monkeypatch.setattr(sys, "argv", ["ablate.py", "--mutation", why, "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        ablate.main()
    assert end.value.code == 2 and not list(tmp_path.iterdir())
    assert f"--mutation: {count} of ppo.py begin so, and it takes one" in capsys.readouterr().err


def test_ablate_knows_no_such_detail(ablate, monkeypatch, capsys, tmp_path):
    """It would train the whole algorithm alone, and put that in the place of the committed rows."""
    monkeypatch.setattr(sys, "argv", ["ablate.py", "--only", "core 70", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        ablate.main()
    assert end.value.code == 2 and not list(tmp_path.iterdir())
    assert "--only: ppo.py has no detail 'core 70' that can be ablated" in capsys.readouterr().err


def test_ablate_replaces_the_seeds_that_it_trains(ablate, monkeypatch, tmp_path):
    (tmp_path / "results").mkdir()
    columns = ["task", "script", "steps", "lacking", "seed", "return_last100", "blocks", "commit"]
    old = [("CartPole-v1", "all details", 1), ("CartPole-v1", "all details", 2)]
    old += [("CartPole-v1", "core 8 Clipped surrogate objective", 1), ("Breakout-v5", "", 1)]
    rows = [dict.fromkeys(columns, "old") | {"task": t, "lacking": w, "seed": s} for t, w, s in old]
    write(tmp_path / "results/ablations.csv", rows)

    def train(pool: list, jobs: int) -> int:
        for cell in pool:
            cell.run_dir.mkdir(parents=True)
            result = {"steps": 100_000, "finished": True, "return_last100": 7.0}
            (cell.run_dir / "result.json").write_text(json.dumps(result))
        return 0

    monkeypatch.setattr(ablate.reproduce, "run", train)
    monkeypatch.setattr(ablate, "draw", lambda rows: None)
    files = ("ppo.py", "details.toml")
    for file in files:
        (tmp_path / file).write_text((ROOT / file).read_text())
    monkeypatch.setattr(ablate, "ROOT", tmp_path)
    words = ["--only", "core 7", "--seeds", "1", "--out", str(tmp_path / "runs")]
    monkeypatch.setattr(sys, "argv", ["ablate.py", *words])
    assert ablate.main() == 0
    new = [
        (r["lacking"], r["seed"], r["return_last100"])
        for r in read_csv(tmp_path / "results/ablations.csv")
    ]
    assert new == [
        ("all details", "1", "7.0"),
        ("all details", "2", "old"),
        ("core 8 Clipped surrogate objective", "1", "old"),
        ("", "1", "old"),
        ("core 7 Normalization of advantages", "1", "7.0"),
    ]


def test_ablation_rows_are_of_todays_code():
    """Or of code that trains exactly as it does."""
    rows = read_csv(ROOT / "results/ablations.csv")
    for script in {row["script"] for row in rows}:
        blocks = {row["blocks"] for row in rows if row["script"] == script}
        assert blocks and blocks <= readme.known_hashes(script)


def test_an_ablation_leaves_runs_of_other_code_alone(ablate, tmp_path):
    """Else their results would be called today's."""
    task = next(task for task, (script, *_) in ablate.TASKS.items() if script == "ppo")
    (found, *_) = ablate.make_cells(task, "core 9", "", 1, tmp_path).values()
    (cell,) = found
    assert ablate.make_cells(task, "core 9", "", 1, tmp_path)  # the same code: goes on
    cell.run_dir.mkdir()
    (cell.run_dir / "checkpoint.pt").touch()
    program = Path(cell.command[1])
    program.write_text(program.read_text() + "\n# older")
    with pytest.raises(SystemExit, match="holds runs of older code"):
        ablate.make_cells(task, "core 9", "", 1, tmp_path)
