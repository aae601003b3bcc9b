"""The pages of docs/ name what is there: functions, tags, flags, metrics, files."""

import ast
import re

import pytest
from conftest import ROOT, load_script, source_of

PAGES = sorted((ROOT / "docs").glob("*.md"))
ASYNC = (ROOT / "docs/async.md").read_text()
SOURCE = source_of("appo_async")


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
    links = re.findall(r"\[`([\w.]+)`\]\(\.\./appo_async\.py\)", ASYNC)
    names = set(links) - {"appo_async.py"}
    assert len(names) >= 8 and names <= definitions(SOURCE)


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
    arguments = set(vars(load_script("appo_async").Args()))
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
