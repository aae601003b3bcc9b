"""The README and results/ say what the code does today."""

import csv
import functools
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT, SCRIPTS, TINY, load_script, source_of

sys.path.insert(0, str(ROOT / "scripts"))
import readme
import record
from record import code_hash, curve

README = (ROOT / "README.md").read_text()
with open(ROOT / "results" / "runs.csv", newline="") as file:
    ROWS = list(csv.DictReader(file))


def test_tables_are_current():
    for name in readme.TABLES:
        assert readme.filled(name) == (ROOT / name).read_text(), "run: python scripts/readme.py"


def test_details_are_linked_to_their_lines():
    """Each name, and each file that stands beside it, leads to the line of the detail's tag."""
    begin = README.index("<!-- table: details -->")
    rows = README[begin : README.index("<!-- end -->", begin)].splitlines()[3:]
    assert len(rows) > 50
    assert sum("/openai/baselines/blob/" in row for row in rows) > 35
    for row in rows:
        tag = re.match(r"\| \[(\w+ \d+) ", row)[1]
        links = re.findall(r"\((\w+)\.py#L(\d+)\)", row)
        assert links
        for name, line in links:
            assert f"# [{tag}]" in source_of(name).splitlines()[int(line) - 1], (name, line)
        for place in re.findall(r"\[(\S+\.py:[\d-]+)\]", row):
            path, lines = place.split(":")
            assert f"/baselines/{path}#L{lines.replace('-', '-L')})" in row, place


def test_a_million_is_the_mean_of_the_games_before_it(monkeypatch):
    """Of runs that went far, without experiments; nothing where a run has not come."""
    names = ("1__long", "2", "3__lr1e-3", "4__older")
    kept = {"env_id": "Breakout-v5", "script": "envpool_ppo", "seed": "1", "blocks": ""}
    kept |= {"steps": "2950000", "return_last100": "144", "eval_mean": "", "eval_std": ""}
    runs = [kept | {"run": f"Breakout-v5__envpool_ppo__{name}"} for name in names]
    runs[1] |= {"steps": "500000"}
    games = [(900_000, 50, 9), (950_000, 1, 1), (1_000_000, 4, 2), (1_100_000, 50, 9)]
    games += [(2_000_000, 7, 1), (2_950_000, 90, 9)]
    curve = [
        {"step": str(step), "return": str(score), "games": str(number)}
        for step, score, number in games
    ]
    monkeypatch.setattr(readme, "RUNS", runs)
    monkeypatch.setattr(readme, "read_csv", lambda path: curve)
    row, again = readme.millions_table().splitlines()[2:]
    assert again == row.replace("long", "older")
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[:5] == ["`envpool_ppo.py`, long", "1", "3", "7", ""]
    assert cells[5:] == [""] * 7 + ["**144** (older code)", ""]


def test_a_run_was_repeated():
    """The second run's games are those that the first has in its curve."""
    with open(ROOT / "results" / "repeated.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    path = ROOT / "results" / "curves" / "BreakoutNoFrameskip-v4__ppo_atari__1__bf16__xeon.csv"
    with open(path, newline="") as file:
        curve = list(csv.DictReader(file))
    assert len(rows) == len(curve) == 482
    for row, window in zip(rows, curve, strict=True):
        assert (row["step"], row["games"]) == (window["step"], window["games"])
        assert float(row["return"]) == float(window["return"])
        assert (row["games_again"], row["return_again"]) == (row["games"], row["return"])


def test_a_result_of_older_code_is_marked():
    today = code_hash(source_of("ppo"))
    assert "older code" not in readme.stale({"script": "ppo", "blocks": f"another {today}"})
    older = {"script": "ppo", "blocks": "another"}
    assert "older code" in readme.stale(older)
    new = {"script": "ppo", "blocks": today}
    marks = [readme.stale_all(runs) for runs in ([new, new], [older, older], [new, older])]
    assert marks == ["", " (older code)", " (1 of older code)"]


def test_minutes_are_those_of_todays_code_where_it_has_run(monkeypatch):
    """A row of older code is not shown in the place of a seed that today's code trained."""
    first = "CartPole-v1__ppo__1"
    monkeypatch.setattr(readme, "stale", lambda run: " (older code)" * (run["run"] == first))
    table = readme.minutes_table()
    assert "`python ppo.py --seed " in table and "`python ppo.py`" not in table


def test_a_speed_of_older_code_is_marked(monkeypatch):
    """Also if a run shows that the code of then trains as today's does: it may be slower."""
    today = code_hash(source_of("ppo"))
    speed = {"what": "ppo.py --compile", "blocks": "another"}
    monkeypatch.setattr(readme, "RUNS", [{"script": "ppo", "blocks": f"another {today}"}])
    assert "older code" in readme.stale_speed(speed)
    assert "older code" not in readme.stale_speed(speed | {"blocks": today})


def test_every_table_marks_older_code(monkeypatch):
    monkeypatch.setattr(readme, "code_hash", lambda source: "of tomorrow")
    names = (
        "files",
        "results",
        "experiments",
        "runs",
        "speed",
        "sizes",
        "sampler",
        "native",
        "many",
    )
    for name in names:
        rows = getattr(readme, f"{name}_table")().splitlines()[2:]
        assert rows and all("(older code)" in row for row in rows if "not measured" not in row), (
            name
        )


def test_a_setting_stands_in_one_of_two_tables():
    """Else an experiment counts as a result, or is shown nowhere."""
    published, experiments = readme.results_table(), readme.experiments_table()
    for (script, env_id, flags), runs in readme.groups().items():
        named = f"| {env_id} | `{script}.py`" + (f", {flags}" if flags else "") + " |"
        tried = any(word in flags for word in ("alone", "xeon", "noclip", "serial", "T=128"))
        assert (named in published) != (named in experiments)
        assert not (tried and named in published), runs[0]["run"]
    for flags in ("bf16, gru |", "bf16, gru, batch1024, lambda1 |", "bootstrap |"):
        assert f"`, {flags}" in published


def test_intervals_draw_seeds_within_each_environment():
    """Two environments without any spread have none together; drawn from all, they would."""
    flat = [np.zeros(3), np.ones(3)]
    assert readme.interval(flat, lambda x: x.mean(1)) == "0.50 (0.50 to 0.50)"
    wide = readme.interval([np.array([0.0, 1.0]), np.ones(2)], lambda x: x.mean(1))
    assert wide == "0.75 (0.50 to 1.00)"
    unequal = readme.interval([np.zeros(2), np.ones(3)], lambda x: x.mean(1))
    assert unequal == "0.50 (0.50 to 0.50)"
    assert readme.interquartile_mean(np.array([[9.0, 0.0, 1.0, 2.0]])) == 1.5
    # of six scores the middle half is three: two whole ones, and half of each neighbor
    six = [np.array([0.0, 1.0, 2.0]), np.array([3.0, 4.0, 11.0])]
    assert readme.interval(six, readme.interquartile_mean).startswith("2.50 (")
    six[1][1] = 10.0
    assert readme.interval(six, readme.interquartile_mean).startswith("3.50 (")


def test_a_row_is_replaced_by_its_own_command_only(tmp_path, monkeypatch):
    """Else a run with another learning rate would silently become the published one."""
    ppo = load_script("ppo")
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setattr(record, "commit_of", lambda script, source: "0000000")
    (tmp_path / "results" / "curves").mkdir(parents=True)

    def recorded(folder, replace=False, **arguments):
        sizes = {"total_timesteps": 2048, "eval_episodes": 0, "run_dir": str(tmp_path / folder)}
        ppo.train(ppo.Args(**sizes, **arguments))
        row = record.record(tmp_path / folder, replace)
        (kept,) = record.read_csv(tmp_path / "results" / "runs.csv")
        assert kept["command"] == row["command"]
        return row

    first = recorded("first")
    assert recorded("again")["return_last100"] == first["return_last100"]
    with pytest.raises(SystemExit, match=r"CartPole-v1__ppo__1 is the row of .*--replace"):
        recorded("other", learning_rate=0.01)
    assert "--learning-rate 0.02" in recorded("forced", True, learning_rate=0.02)["command"]
    # another seed of other arguments would be averaged with the first
    with pytest.raises(SystemExit, match=r"CartPole-v1__ppo__1 was .*--as NAME"):
        recorded("seed", seed=2)
    assert [row["run"] for row in record.read_csv(tmp_path / "results" / "runs.csv")] == [
        "CartPole-v1__ppo__1"
    ]


@pytest.mark.parametrize("missing", ["checkpoint.pt", "result.json"])
def test_a_run_that_has_not_ended_is_not_recorded(missing, tmp_path):
    for file in {"checkpoint.pt", "result.json"} - {missing}:
        (tmp_path / file).touch()
    with pytest.raises(SystemExit, match=f"error: .* has no {missing}: .* when it has ended"):
        record.record(tmp_path)


def test_what_is_averaged_differs_in_the_seed_alone():
    groups: dict = {}
    for row in ROWS:
        settings = record.settings_of(row["command"]), row["steps"]
        assert groups.setdefault(record.group_of(row["run"]), settings) == settings


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ("nothing", "nothing", True),
        ("lr=args.learning_rate, eps=1e-5", "lr=args.learning_rate, eps=1.1e-5", False),
        ("].append(episodic_return)", "].append(1 + episodic_return)", False),
    ],
)
def test_same_is_what_takes_the_same_steps(old, new, verdict, monkeypatch):
    """An epsilon of Adam's that differs by a tenth, in weights; a score, in what was played."""
    source = (ROOT / "ppo.py").read_text()
    assert old == "nothing" or source.count(old) == 1
    monkeypatch.setattr(record, "git", lambda *words: "# then\n" + source.replace(old, new))
    row = {"script": "ppo", "commit": "0000000", "command": "python ppo.py --stop-at 500000"}
    assert record.same(row) == verdict


def test_a_run_without_a_game_is_no_row(tmp_path, monkeypatch):
    ppo = load_script("ppo")
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setattr(record, "commit_of", lambda script, source: "0000000")
    (tmp_path / "results").mkdir()
    sizes = {"total_timesteps": 16, "num_envs": 2, "num_steps": 4, "num_minibatches": 2}
    ppo.train(
        ppo.Args(**sizes, env_id="MountainCar-v0", eval_episodes=0, run_dir=f"{tmp_path}/run")
    )
    with pytest.raises(SystemExit, match="no game has ended"):
        record.record(tmp_path / "run")
    assert not list((tmp_path / "results").iterdir())


def test_a_run_that_was_stopped_is_named_with_its_length(tmp_path, monkeypatch):
    """Its command makes a run as long."""
    ppo = load_script("ppo")
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setattr(record, "commit_of", lambda script, source: "0000000")
    monkeypatch.setattr(ppo, "STOP", [2])
    (tmp_path / "results" / "curves").mkdir(parents=True)
    ppo.train(ppo.Args(num_steps=512, eval_episodes=0, run_dir=f"{tmp_path}/run"))
    row = record.record(tmp_path / "run", label="long")
    assert row["command"] == "python ppo.py --num-steps 512 --stop-at 2048 --eval-episodes 0"
    assert (row["run"], row["resumes"]) == ("CartPole-v1__ppo__1__long", 0)


def test_a_pause_is_no_training():
    """A run of 10 steps a second that was stopped after 100 steps, and resumed a day later."""
    events = {
        "charts/episodic_return": [(40, 1, 3.0), (100, 2, 5.0), (140, 86_400, 7.0)],
        "charts/SPS": [(50, 1, 10.0), (100, 2, 10.0), (150, 86_400, 10.0)],
    }
    scalars = {
        tag: [SimpleNamespace(step=step, wall_time=time, value=value) for step, time, value in rows]
        for tag, rows in events.items()
    }
    rows = curve(SimpleNamespace(Scalars=scalars.get), rows=4)
    assert [(row["return"], row["seconds"]) for row in rows] == [
        (3.0, 5.0),
        (5.0, 10.0),
        (7.0, 14.0),
    ]


def git(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False
    )


@functools.cache
def hash_at(commit: str, script: str) -> str:
    """The hash of a script as a commit has it. No history: skipped; no such commit: an error."""
    shown = git("show", f"{commit}:{script}.py")
    if shown.returncode:
        if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
            pytest.skip("needs the git history: " + shown.stderr.strip())
        pytest.fail(shown.stderr)
    return code_hash(shown.stdout)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["run"])
def test_rows_come_from_their_commit(row):
    """The script in the commit that a row names hashes to the row's hash."""
    assert hash_at(row["commit"], row["script"]) == row["blocks"].split()[0]


def test_a_foreign_source_is_not_executed(tmp_path):
    """Somebody's run may hold any code: only what stands in the history is run to be recorded."""
    ppo = load_script("ppo")
    ppo.train(ppo.Args(**TINY["ppo"], run_dir=str(tmp_path), eval_episodes=0))
    with open(tmp_path / "source.py", "a") as file:
        file.write(f"Path({str(tmp_path / 'executed')!r}).touch()\n")
    with pytest.raises(SystemExit, match=r"no commit holds the ppo\.py of this run"):
        record.record(tmp_path)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("table", ["speed", "speed_xeon", "ablations"])
def test_other_rows_come_from_their_commit(table):
    with open(ROOT / "results" / f"{table}.csv", newline="") as file:
        for row in csv.DictReader(file):
            script = row.get("script") or re.search(r"\w+(?=\.py)", row["what"])[0]
            assert hash_at(row["commit"], script) == row["blocks"].split()[0], row


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["run"])
def test_rows_have_a_curve(row):
    with open(ROOT / "results" / "curves" / f"{row['run']}.csv", newline="") as file:
        curve = list(csv.DictReader(file))
    assert 10 < len(curve) <= 500
    assert sum(int(point["games"]) for point in curve) == int(row["episodes"])


def test_the_hash_sees_code_only():
    source = source_of("ppo")
    assert code_hash(source) == code_hash(source.replace("# [core 5]", "# [a comment]"))
    assert code_hash(source) == code_hash(source.replace('"""Train one', '"""Train an'))
    assert code_hash(source) == code_hash(source.replace("def fail(", "def stop("))
    assert code_hash(source) == code_hash(source.replace("use ppo_continuous.py", "no"))  # refuses
    assert code_hash(source) != code_hash(source.replace("gamma * gae_lambda", "gae_lambda"))
    assert code_hash(source) != code_hash(source.replace("AUTO_DEVICES = (", "AUTO = ("))  # next
    source = source_of("ppo_continuous")
    assert source.count('not os.getenv("DISPLAY")') == 1  # how films are drawn
    assert code_hash(source) == code_hash(source.replace('not os.getenv("DISPLAY")', "True"))
    assert code_hash(source) != code_hash(source.replace('np.seterr(invalid="ignore")', ""))
    source = source_of("appo_async")
    for old, counts in (("time.monotonic() + 3", False), ("bells[-1].wait(0.5", True)):
        assert source.count(old) == 1  # in Team.close, which ends processes, and in Team.wait
        assert (code_hash(source) != code_hash(source.replace(old, old + "1"))) == counts


def test_commands_use_flags_that_exist():
    """Every flag in a command line of the README or of a docstring is one of that script's."""
    for text in (README, *map(source_of, SCRIPTS)):
        for name, arguments in re.findall(r"python (\w+)\.py ((?:--[^\n`#]+)+)", text):
            if name in SCRIPTS:
                flags = {flag.replace("-", "_") for flag in re.findall(r"--([a-z-]+)", arguments)}
                assert flags <= set(vars(load_script(name).Args())), (name, flags)


def test_the_trained_agent_in_ten_lines(tmp_path, monkeypatch):
    """The README's code block plays with a real checkpoint."""
    ppo = load_script("ppo")
    ppo.train(ppo.Args(**TINY["ppo"], run_dir=str(tmp_path), eval_episodes=0))
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in block.splitlines() if line]) <= 16
    names: dict = {}
    exec(block.replace("runs/RUN", str(tmp_path)), names)
    assert names["envs"].single_observation_space.contains(names["obs"][0])
    saved = ppo.load("evaluate", str(tmp_path))["agent"]
    assert all(tensor.equal(saved[name]) for name, tensor in names["agent"].state_dict().items())


def test_a_recorded_command_is_that_of_the_run():
    args = load_script("ppo").Args()
    changed = vars(args) | {"anneal_lr": False, "anneal_clip_coef": True, "seed": 7, "track": True}
    words = ["--seed", "7", "--no-anneal-lr", "--anneal-clip-coef"]
    assert sorted(record.changed_arguments(source_of("ppo"), changed)) == sorted(words)


def test_a_speed_is_that_of_the_same_code(monkeypatch, tmp_path):
    """Comments, line breaks and the clock apart: what trains the same may be slower."""
    source = source_of("ppo")
    monkeypatch.setattr(record, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "ppo.py").write_text(source)
    path, row = tmp_path / "speed.csv", {"what": "ppo.py --compile", "commit": "0", "blocks": "a"}
    for old, new, kept in (
        ("# [core 5]", "# [a comment]", True),
        (
            "restore(run, agent, optimizer)\n",
            "restore(\n        run, agent, optimizer\n    )\n",
            True,
        ),
        ("global_step, time.perf_counter() - start", "global_step, time.time() - start", True),
        ("eps=1e-5, fused=True", "eps=1e-5", False),
        ("action.cpu().numpy()", "action.clone().cpu().numpy()", False),
    ):
        assert old in source
        before = source.replace(old, new)
        monkeypatch.setattr(record, "git", lambda *_, before=before: before)
        record.write_csv(path, [row], list(row))
        for _ in range(2):  # the second time it is there already
            record.check_speeds(path)
        (found,) = record.read_csv(path)
        assert found["blocks"] == ("a" + f" {code_hash(source)}" * kept)


def test_a_speed_does_not_know_what_its_flags_leave_out(monkeypatch, tmp_path):
    """EnvPool in appo_async.py decides the speeds of --native-envs, and those of no other row."""
    source, path = source_of("appo_async"), tmp_path / "speed.csv"
    monkeypatch.setattr(record, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "appo_async.py").write_text(source)
    whats = ("appo_async.py --native-envs --num-workers 2", "appo_async.py --num-workers 2")
    for old, new, kept in (
        ('"stack_num": 4', '"stack_num": 1', [False, True]),
        ('"NoFrameskip-v4", "-v5"', '"NoFrameskip-v4", "-v6"', [False, True]),
        ("    if args.native_envs and frozen is None:", "    if args.native_envs:", [False, False]),
        ("envs = EnvPoolVectorEnv(args.env_id, num_envs, seed)", "envs = None", [False, True]),
        ('padding_type="zero"', 'padding_type="reset"', [False, False]),
    ):
        assert source.count(old) == 1
        monkeypatch.setattr(record, "git", lambda *_, a=old, b=new: source.replace(a, b))
        rows = [{"what": what, "commit": "0", "blocks": "a"} for what in whats]
        record.write_csv(path, rows, list(rows[0]))
        record.check_speeds(path)
        assert [len(row["blocks"].split()) == 2 for row in record.read_csv(path)] == kept


def test_an_asynchronous_run_is_only_as_good_as_its_training_block(monkeypatch, tmp_path, capsys):
    """Serial mode does not show the order of its data, so being the same there is not enough."""
    source = source_of("appo_async")
    row = {"run": "a", "script": "appo_async", "commit": "0", "blocks": "before"}
    monkeypatch.setattr(record, "same", lambda row: True)
    monkeypatch.setattr(record, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "appo_async.py").write_text(source)
    for old, new, kept in (
        ("agent = agent.to(device)", "agent = agent.to(device=device)", False),
        ("layer.bias, bias_const", "layer.bias,  bias_const", True),
        # how Training's lines are broken, and the clock that it reads
        ("agent = agent.to(device)", "agent = (agent.to(device))", True),
        ("global_step, time.perf_counter() - start", "global_step, time.time() - start", True),
    ):
        assert source.count(old) == 1
        before = source.replace(old, new)
        monkeypatch.setattr(record, "git", lambda *_, before=before: before)
        record.write_csv(tmp_path / "results/runs.csv", [row], record.COLUMNS)
        record.check_row(row)
        (found,) = record.read_csv(tmp_path / "results/runs.csv")
        assert (len(found["blocks"].split()) == 2) == kept
        assert ("run it again" in capsys.readouterr().out) != kept
