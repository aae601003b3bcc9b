"""scripts/plot.py: which points of which runs a picture shows."""

import sys

import pytest
from conftest import ROOT

pytest.importorskip("matplotlib", reason="of the bench extra")
sys.path.insert(0, str(ROOT / "scripts"))
import plot


def test_a_point_is_the_mean_of_the_games_in_its_window():
    """A window ends with the step that its number of steps divides; longer games count no more."""
    rows = [("10", "1.0", "1"), ("10", "4.0", "2"), ("11", "7.0", "1"), ("21", "9.0", "1")]
    rows = [dict(zip(("step", "return", "games"), row, strict=True)) for row in rows]
    assert plot.points(rows, 10, 20) == ([5, 15], [3, 7])
    for row in rows:
        del row["games"]  # a line for each game, as of a peer
    assert plot.points(rows, 10, 20) == ([5, 15], [2.5, 7])


def test_curves_are_those_of_the_script_and_the_environment(monkeypatch):
    names = [("a", "ppo", "X"), ("b", "ppo", "Y"), ("c", "ppo_lstm", "X"), ("d", "ppo", "X")]
    runs = [dict(zip(("run", "script", "env_id"), name, strict=True)) for name in names]
    curve = {"step": "1", "games": "1"}
    files = {"runs.csv": runs} | {
        f"{row['run']}.csv": [curve | {"return": i}] for i, row in enumerate(runs)
    }
    monkeypatch.setattr(plot, "read_csv", lambda path: files[path.name])
    found = [(run["run"], means) for run, (_, means) in plot.curves("ppo", "X", 10, 10)]
    assert found == [("a", [0]), ("d", [3])]
