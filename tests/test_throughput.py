"""benchmarks/throughput.py: what it times, and what it makes of the times."""

import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import throughput
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
    ours = iter([220.0, 110.0, 22.0, 33.0, 2200.0, 1100.0])
    whole = {"memory": 300, "startup": 3.0}
    monkeypatch.setattr(throughput, "time_peer", lambda case: next(peers))
    monkeypatch.setattr(throughput, "time_ours", lambda case: whole | {"ours": next(ours)})
    monkeypatch.setattr(throughput, "parts_of", lambda case, seconds: {"bound": 1000.0})
    plain, compiled = throughput.compare(cases, rounds=3, seconds=1.0)
    assert plain["what"] == "ppo.py" and compiled["what"] == "ppo.py --compile"
    assert (plain["ours"], plain["theirs"], plain["rounds"]) == (220, 110, 3)
    assert plain["ratio"] == "2.00 (2.00 to 2.00)" and compiled["ratio"] == "1.00 (1.00 to 3.00)"
    assert plain["share"] == "0.22" and plain["memory_mb"] == 300
