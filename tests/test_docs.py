"""The pages of docs/ name what is there: functions, tags, flags, metrics, files."""

import ast
import csv
import re

import pytest
from conftest import ROOT, SCRIPTS, load_script, source_of

PAGES = sorted((ROOT / "docs").glob("*.md"))
ASYNC = (ROOT / "docs/async.md").read_text()
SOURCE = source_of("appo_async")
MEASURED = list(csv.DictReader((ROOT / "results/comments.csv").open()))


def definitions(source: str) -> set[str]:
    """Functions and classes of a script, and methods as Class.method."""
    found = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (item for item in node.body if isinstance(item, ast.FunctionDef))
            found |= {f"{node.name}.{method.name}" for method in methods}
    return found


def test_functions_of_appo_async_exist():
    links = re.findall(r"\[`([\w.]+)`\]\(\.\./appo_async\.py(?:#L\d+)?\)", ASYNC)
    names = set(links) - {"appo_async.py"}
    assert len(names) >= 8 and names <= definitions(SOURCE)


def test_functions_are_linked_to_their_lines():
    links = re.findall(r"\[`([\w.]+)`\]\(\.\./appo_async\.py#L(\d+)\)", ASYNC)
    assert len(links) >= 8
    for name, line in links:
        begins = SOURCE.splitlines()[int(line) - 1]
        assert re.match(rf" *(def|class) {name.split('.')[-1]}\b", begins), (name, begins)


def test_tags_of_appo_async_exist():
    named = set(re.findall(r"`\[(\w+ \d+)\]`", ASYNC))
    there = set(re.findall(r"# \[(appo \d+)\]", SOURCE))
    assert named == there, "each tag is explained, and nothing else"


def test_a_tag_stands_in_the_function_that_is_named_with_it():
    """`[appo 2]` in [`rollout_worker`](...): that function holds the tag."""
    pairs = re.findall(r"`\[(appo \d+)\]` in \[`([\w.]+)`\]", ASYNC)
    assert len(pairs) >= 4
    for tag, name in pairs:
        (node,) = (n for n in ast.parse(SOURCE).body if getattr(n, "name", "") == name)
        assert f"[{tag}]" in ast.get_source_segment(SOURCE, node), (tag, name)


def test_flags_metrics_and_fields_of_appo_async_exist():
    defaults = vars(load_script("appo_async").Args())
    switched_off = {f"no_{name}" for name, value in defaults.items() if isinstance(value, bool)}
    arguments = {*defaults, *switched_off}
    flags = set(re.findall(r"`--([a-z-]+)", ASYNC))
    assert flags and {flag.replace("-", "_") for flag in flags} <= arguments
    for metric in set(re.findall(r"`charts/(\w+)`", ASYNC)):
        kind, last = metric.rsplit("_", 1)  # policy_lag_mean is written by a loop over the last
        by_parts = f"charts/{kind}_" in SOURCE and f'"{last}"' in SOURCE
        assert by_parts or f"charts/{metric}" in SOURCE, metric
    for field in ("asked", "answered", "filled", "consumed"):
        assert f"`{field}`" in ASYNC and f"x.{field}" in SOURCE


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 150
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if not target.startswith("https://"):
            assert (path.parent / target).exists(), target


def test_the_papers_are_cited():
    for number in ("1602.01783", "1803.00933", "1802.01561", "2006.11751"):
        assert f"https://arxiv.org/abs/{number}" in ASYNC


def test_the_timeline_is_small():
    assert (ROOT / "results/timeline.png").stat().st_size < 150_000


# what the words of a comment mean for the time that is saved
WORDS = {
    "half the time": 2,
    "twice as long": 2,
    "a tenth of the time": 10,
    "that is a third of it": 1 / (1 - 1 / 3),
    "saves a quarter of the update": 1 / (1 - 1 / 4),
}
SPEEDS = r"(?:([\d.]+) to )?([\d.]+) times as (?:fast|long|slow)|" + "|".join(WORDS)


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row['file']}, {row['what']}")
def test_a_comment_says_how_much_faster_it_was_measured(row):
    """The median lies in the range that the comment names, or within a third of its number."""
    comment = row["comment"]
    assert comment in source_of(row["file"])
    low, high = re.search(SPEEDS, comment).groups()
    stated = WORDS.get(re.search(SPEEDS, comment)[0]) or float(high)
    measured = float(row["ratio"].split()[0])
    assert (float(low) if low else stated / 4 * 3) <= measured <= stated * (1 if low else 4 / 3)


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_comment_names_a_speed_that_was_not_measured(name):
    sources = {row["comment"] for row in MEASURED}
    # whole runs: in asides.csv, speed.csv and freed_memory.csv
    sources |= {"0.9 times as fast with 8 games", "an update is 1.15 times as fast"}
    sources |= {"1.16 times", "up to 1.07 times as fast where there are more"}
    comments = " ".join(re.findall(r"# (.*)", source_of(name)))
    for found in re.finditer(SPEEDS, comments):
        around = comments[max(0, found.start() - 60) : found.end() + 60]
        assert any(source in around for source in sources), around
