"""scripts/diff.py: cuts at headings, counts what differs, shows it, and carries blocks."""

import pytest
from conftest import ROOT, run_script
from test_family import diff

OLD = "import a\n\n\n# === One\nx = 1\ny = 1\n\n\n# === Two\nz = 1\n"
NEW = "import a\n\n\n# === One\nx = 2\ny = 1\nw = 1\n\n\n# === Two\nz = 1\n"


@pytest.fixture
def family(tmp_path):
    """A family in miniature: the script, and files of a few lines that it takes for the others."""
    (tmp_path / "scripts").mkdir()
    source = (ROOT / "scripts/diff.py").read_text()
    (tmp_path / "scripts/diff.py").write_text(source)
    for name in ("ppo", *diff.FAMILY):
        text = f'"""This is {name}."""\n\n\n# === Agent\n{name} = 1\n\n\n# === Run\nrun = 1\n'
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def run(family, *argv, **environ):
    return run_script(family / "scripts/diff.py", *argv, cwd=family, **environ)


def test_sections_make_up_the_text():
    parts = diff.sections(OLD)
    assert list(parts) == ["Header", "One", "Two"]
    assert "".join(parts.values()) == OLD
    assert parts["Two"] == "# === Two\nz = 1\n"


def test_sections_refuse_a_heading_that_stands_twice():
    with pytest.raises(ValueError, match="twice"):
        diff.sections(OLD + "# === One\n")


def test_diff_size_counts_lines_and_places():
    assert diff.diff_size(OLD, OLD) == (0, 0, 0)
    assert diff.diff_size(OLD, NEW) == (1, 2, 2)
    assert diff.diff_size(NEW, OLD) == (2, 1, 2)
    assert diff.diff_size(OLD, "") == (len(OLD.splitlines()), 0, 3)


def test_relatives_follow_required_equality_up_and_down():
    assert diff.relatives("ppo_atari", "Run") >= {"ppo", "ppo_shared"}
    assert diff.relatives("ppo", "Run") >= {"ppo_shared", "ppo_atari"}
    assert not diff.relatives("ppo", "Agent")


def test_shows_a_pair_by_section(family):
    done = run(family, "ppo", "ppo_shared.py")
    assert done.returncode == 0 and not done.stderr
    assert done.stdout.splitlines() == [
        "ppo.py -> ppo_shared.py  -2 +2, 2 places",
        "=== Header  -1 +1, 1 places",
        "@@ -1,3 +1,3 @@",
        '-"""This is ppo."""',
        '+"""This is ppo_shared."""',
        " ",
        " ",
        "=== Agent  -1 +1, 1 places",
        "@@ -4,4 +4,4 @@",
        " # === Agent",
        "-ppo = 1",
        "+ppo_shared = 1",
        " ",
        " ",
        "=== Run  equal, 2 lines",
    ]


def test_one_file_is_seen_from_its_parent(family):
    assert run(family, "ppo_atari").stdout == run(family, "ppo_shared", "ppo_atari").stdout


def test_colour_on_request_only(family, capsys, monkeypatch):
    assert "\033[" not in run(family, "ppo_atari").stdout  # a pipe is no terminal
    monkeypatch.setattr(diff, "ROOT", family)
    monkeypatch.setattr("sys.argv", ["diff.py", "ppo_atari"])
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    diff.main()
    assert (
        "\033[31m-ppo_shared = 1\033[0m\n\033[32m+ppo_atari = 1\033[0m" in capsys.readouterr().out
    )
    monkeypatch.setenv("NO_COLOR", "1")
    diff.main()
    assert "\033[" not in capsys.readouterr().out


def test_sizes_name_every_pair(family):
    lines = run(family, "--sizes").stdout.splitlines()
    for line, (child, parent) in zip(lines[1:], diff.FAMILY.items(), strict=True):
        # of the Header and the Agent, which differ, one may be left out
        size = ["-1", "+1", "1"] if child in diff.COMPARED else ["-2", "+2", "2"]
        assert line.split()[:9] == [parent, "->", child, *size, "9", "->", "9"]
        assert line.endswith("(Environment, Agent, Run alone)") == (child in diff.COMPARED)


def test_carry_copies_one_block_and_leaves_the_rest(family):
    edited = family / "ppo_atari.py"
    edited.write_text(edited.read_text().replace("run = 1", "run = 2  # ±"))
    before = (family / "ppo_shared.py").read_text()
    assert run(family, "ppo_atari", "ppo", "--carry", "Run").returncode == 0
    assert (family / "ppo.py").read_text().endswith("ppo = 1\n\n\n# === Run\nrun = 2  # ±\n")
    assert (family / "ppo_shared.py").read_text() == before


def test_carry_to_the_family(family):
    edited = family / "ppo_shared.py"
    edited.write_text(edited.read_text().replace("run = 1", "run = 2"))
    done = run(family, "ppo_shared", "--carry", "Run", "--to-family")
    relatives = diff.relatives("ppo_shared", "Run")
    assert done.returncode == 0 and len(done.stdout.splitlines()) == len(relatives)
    for name in relatives:
        text = (family / f"{name}.py").read_text()
        assert f"{name} = 1\n" in text and text.endswith("run = 2\n")


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["ppo_nothing"], "ppo_nothing.py"),
        (["ppo", "ppo_nothing"], "ppo_nothing.py"),
        (["ppo"], "has no parent"),
        ([], "name two files"),
        (["ppo", "ppo_shared", "ppo_atari"], "name two files"),
        (["ppo", "ppo_atari", "--carry", "Nothing"], "no section Nothing"),
        (["ppo", "--carry", "Run"], "name two files"),
        (["ppo", "--carry", "Agent", "--to-family"], "must have the same Agent"),
        (["ppo", "ppo_atari", "--to-family"], "--carry"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(family, argv, problem):
    done = run(family, *argv)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("error: ") and problem in done.stderr
    assert len(done.stderr.splitlines()) == 1
