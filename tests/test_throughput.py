"""benchmarks/throughput.py: what it times, and what it makes of the times."""

import subprocess
import sys
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import test_runs  # noqa: F401 - its environments
from conftest import ROOT, load_script
from tensorboard.backend.event_processing import event_accumulator

sys.path.insert(0, str(ROOT / "benchmarks"))
sys.path.insert(0, str(ROOT / "scripts"))
import health
import random_policy
import record
import throughput
import timeline
from throughput import Case

SLOW = Case("ppo", "a clock", 4, ["--env-id", "toy_envs:SlowClock-v0"], steps=1024)


@pytest.fixture(autouse=True)
def with_toys(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))


def test_a_run_is_timed():
    """Environments that take 2 ms each, one after the other: 500 steps/s at most.

    The lower limits leave room for other programs, such as other tests.
    """
    found = throughput.time_ours(SLOW)
    assert 100 < found["ours"] < 500
    assert 1 < found["startup"] < 60 and 100 < found["memory"] < 2000


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--only", "no such case"], "--only: no case of main, quick has 'no such case'"),
        (["--scaling", "--only", "no kind"], "--only: no kind of environment has 'no kind'"),
        (["--sampler", "--only", "HalfCheetah"], "--only: no case of sampler has 'HalfCheetah'"),
        (["--rounds", "0"], "--rounds: at least 1"),
        (["--out", "nowhere/speed.csv"], "--out: there is no directory nowhere"),
        (["--out", str(ROOT / "results/gpu.csv")], "gpu.csv holds other rows than those of"),
        (["--quick", "--out", "speed.csv"], "--out: --quick writes nothing"),
    ],
)
def test_what_would_time_nothing_is_refused(flags, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["throughput.py", *flags])
    with pytest.raises(SystemExit) as end:
        throughput.main()
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_the_parts_are_timed_and_make_a_bound():
    parts = throughput.parts_of(SLOW, 0.3)
    assert 100 < parts["environments"] < 500 and parts["epochs"] == 4
    assert parts["inference"] > 500 and parts["training"] > 500
    known = {"environments": 500.0, "inference": 1000.0, "training": 4000.0, "epochs": 4.0}
    found = throughput.held_against(100.0, known | {"ours": 200.0})
    assert found["bound"] == 250 and found["share"] == 0.8 and found["ratio"] == 2  # 2 + 1 + 1 ms


def test_ratios_are_of_one_round(monkeypatch):
    """The machine is slower in the second round, and ours twice as fast as the peer in each."""
    cases = [Case("ppo", "CartPole", 4), Case("ppo", "CartPole", 4, ["--compile"])]
    peers = iter([100.0, 120.0, 10.0, 12.0, 1000.0, 1200.0])  # before and after, three times
    ours = iter([220.0, 330.0, 22.0, 11.0, 2200.0, 1100.0])
    memory = iter([300, 300, 500, 300, 400, 300])

    def time_ours(case):
        return {"ours": next(ours), "memory": next(memory), "startup": 3.0}

    monkeypatch.setattr(throughput, "time_peer", lambda case: next(peers))
    monkeypatch.setattr(throughput, "time_ours", time_ours)
    monkeypatch.setattr(throughput, "parts_of", lambda case, seconds: {"bound": 1000.0})
    plain, compiled = throughput.compare(cases, rounds=3, seconds=1.0)
    assert plain["what"] == "ppo.py" and compiled["what"] == "ppo.py --compile"
    assert (plain["ours"], plain["theirs"], plain["rounds"]) == (220, 110, 3)
    assert plain["ratio"] == "2.00 (2.00 to 2.00)" and compiled["ratio"] == "1.00 (1.00 to 3.00)"
    assert plain["share"] == "0.22" and plain["memory_mb"] == 500


def test_the_first_updates_are_not_timed(monkeypatch):
    """100 seconds pass before the first, in which the network is compiled, then half a second."""
    seconds = {512: 100.0, 1024: 110.0, 1536: 110.5, 2048: 111.0}
    events = [SimpleNamespace(step=s, value=s / t, wall_time=0.0) for s, t in seconds.items()]
    log = SimpleNamespace(Reload=lambda: SimpleNamespace(Scalars=lambda tag: events))
    monkeypatch.setattr(event_accumulator, "EventAccumulator", lambda folder: log)
    process = SimpleNamespace(poll=lambda: 0, returncode=0)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: process)
    assert throughput.time_ours(SLOW)["ours"] == pytest.approx(1024)


def test_a_call_serves_all_environments(monkeypatch):
    monkeypatch.setattr(throughput, "rate", lambda function, seconds: function() or 1.0)
    parts = throughput.measure_parts(SLOW, 0)
    assert parts == {"environments": 4, "inference": 4, "training": 128, "epochs": 4}


def test_memory_of_children_counts():
    hoard = "hoard = bytearray(200 * 2**20); print(1, flush=True); input()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hoard!r}])"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", parent], **pipes) as process:
        process.stdout.readline()
        assert 200 < throughput.tree_memory(process.pid) < 300
        process.communicate(b"end\n")


def test_sizes_are_held_against_the_least_of_their_round(monkeypatch):
    """The machine is half as fast in the second round."""
    cases = [
        Case("appo_async", "Breakout", n, peer=throughput.EIGHT, group="appo_sizes")
        for n in (16, 32)
    ]
    ours = iter([100.0, 150.0, 50.0, 75.0])
    whole = {"memory": 300, "startup": 3.0, "shared": 1, "predicted": 1, "bound": 1000.0}
    monkeypatch.setattr(throughput, "time_ours", lambda case: whole | {"ours": next(ours)})
    monkeypatch.setattr(throughput, "parts_of", lambda case, seconds: {})
    least, more = throughput.compare_sizes(cases, rounds=2, seconds=1.0)
    assert least["ratio"] == "1.00 (1.00 to 1.00)" and more["ratio"] == "1.50 (1.50 to 1.50)"


def test_a_part_is_held_against_the_simulations_around_it(monkeypatch):
    rates = iter([100.0, 75.0, 200.0])
    monkeypatch.setattr(
        throughput,
        "parts_of",
        lambda case, seconds, what: {
            ("environments" if what == "simulation" else what): next(rates)
        },
    )
    (row,) = throughput.compare_alone([Case("appo_async", "Breakout", 8, group="sampler")], 1, 1.0)
    assert row["ratio"] == "0.50 (0.50 to 0.50)" and row["theirs"] == 150


def test_scaling_times_games_that_are_out_of_step(monkeypatch):
    """Each has played 200 steps before the first is timed; then both ways take turns."""
    played, timed, acts, real = [], [], [], throughput.visit_all

    def counted(envs, act, obs):
        def look(obs):
            actions = act(obs)
            acts.append(type(actions.flat[0]))
            return actions

        visit = real(envs, look, obs)
        return lambda: played.append(visit()) or played[-1]

    def rate(function, seconds):
        timed.append((sum(played), function()))
        return 10.0

    monkeypatch.setattr(throughput, "visit_all", counted)
    monkeypatch.setattr(throughput, "rate", rate)
    row = throughput.scaling_row("ppo_atari.py", 2, 1, 0.1)
    assert [n for n, _ in timed] == [402 + 4 * turn for turn in range(6)]  # two visits a turn
    assert acts[:200] == [np.int32] * 200  # at random
    assert acts[200:] == [*[np.int32] * 2, *[np.int64] * 2] * 3  # at random, by the network
    assert (row["alone"], row["with_policy"], row["loop"]) == (20, 20, "")


def test_quick_writes_nothing(monkeypatch):
    compared = []

    def compare(group, rounds, seconds):
        compared.extend(group)
        yield {"what": "ppo.py"}

    def write(*_):
        raise AssertionError("half a second is no measurement")

    monkeypatch.setattr(throughput, "compare", compare)
    row = {"num_envs": 1, "kind": "none", "threads": 1}
    monkeypatch.setattr(throughput, "scaling_rows", lambda *_: [row])
    monkeypatch.setattr(record, "write_csv", write)
    for flags in (["--only", "ppo.py"], ["--scaling"]):
        monkeypatch.setattr(sys, "argv", ["throughput.py", "--quick", *flags])
        throughput.main()
    assert compared


def test_medians_go_where_they_are_told(monkeypatch, tmp_path):
    """A file for each machine, in which a row takes the place of the one of its name alone."""
    speeds = iter((100, 101, 102, 103))

    def compare(group, rounds, seconds):
        for case in group:
            row = {"what": case.name, "task": case.task, "num_envs": case.num_envs}
            yield row | {"peer": case.peer, "ours": next(speeds)}

    monkeypatch.setattr(throughput, "compare", compare)
    path = tmp_path / "laptop.csv"
    for only in ("CartPole", "--compile, CartPole"):
        monkeypatch.setattr(sys, "argv", ["throughput.py", "--out", str(path), "--only", only])
        throughput.main()
    rows = {row["what"]: row["ours"] for row in record.read_csv(path)}
    assert rows == {"ppo.py": "100", "ppo.py --compile": "103", "ppo_shared.py": "102"}


def test_random_games_count_by_environment():
    """Short ones end more often, and count no more than long ones."""
    scores = random_policy.play(load_script("ppo"), "Uneven-v0", games=2, num_envs=2)
    assert sorted(scores) == [2, 2, 20, 20]


def test_walking_is_judged_by_lambda():
    """Every game begins with a step of walking, which pays 1 in the next; one has no end."""
    dones = np.zeros((6, 2))
    dones[3], dones[5, 1] = 1, 1
    forward = np.array([[1, 0, 0, 1, 0], [1, 0, 0, 1, 0]], dtype=bool).T
    steps = {"rewards": np.roll(forward, 1, axis=0), "values": np.zeros((6, 2))}
    steps |= {"dones": dones, "forward": forward}
    script = load_script("appo_async")
    blind, sees = (health.walking(script, steps, 1.0, gae_lambda) for gae_lambda in (0.0, 1.0))
    # by what is paid at once: nothing for three steps of walking, 3 for five others
    assert (blind["walking"], sees["walking"]) == ("-0.6", "0.4")
    assert (sees["steps"], sees["games"]) == (8, 3)
    assert float(sees["low"]) <= float(sees["walking"]) <= float(sees["high"])


def test_games_are_played_for_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # ViZDoom leaves a folder
    script = load_script("appo_async")
    args = script.Args(env_id="VizdoomHealthGathering-v1")
    envs, _ = script.make_envs(args, 1, seed=1)
    agent = script.Agent(envs, args)
    envs.close()
    run = {"args": asdict(args), "agent": agent.state_dict()}
    steps = health.play(script, run, games=1, num_envs=2)
    assert steps["dones"].sum() >= 1 and len(steps["dones"]) == len(steps["rewards"]) + 1
    assert (steps["rewards"] == 4).any() and 0.2 < steps["forward"].mean() < 0.7


def test_the_timeline_shows_an_update_of_the_second_half():
    learner = [("publish", 0.0, 0.1), ("wait", 0.0, 1.0)]
    learner += [("publish", end - 0.1, end) for end in (2.0, 3.0, 4.0, 5.0)]
    assert timeline.updates(learner) == [(1.0, 2.0), (2.0, 3.0), (3.0, 4.0), (4.0, 5.0)]
    worker = [("wait", 0.0, 3.95), ("step", 3.95, 9.0)]
    rows = timeline.window({"learner": learner, "rollout 0": worker}, 0.6)
    found = {(row["what"], row["start_ms"], row["end_ms"]) for row in rows}
    steps = {("wait", "0.00", "50.00"), ("step", "50.00", "600.00")}
    assert found == steps | {("update", "0.00", "100.00"), ("update", "100.00", "600.00")}
