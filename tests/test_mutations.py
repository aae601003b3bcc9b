"""Every recorded mutation of a detail must make the test of that detail fail.

A test that no wrong implementation can fail proves nothing. The mutated source is run in this
process as a module, in the place of the script that the test is given.

What a script has byte for byte from its parent, which test_family.py holds, is mutated in the
parent; `-m slow` does it in every script.
"""

import functools
import importlib
import inspect

import pytest
from conftest import ROOT, load_script, source_of
from test_details import DETAILS
from test_family import diff

# where an assertion of a test is raised: there, in assert_close of PyTorch, in pytest.fail
MODULES = [
    importlib.import_module(path.stem) for path in sorted((ROOT / "tests").glob("test_details*.py"))
]
ASSERTING = (
    *(f"{module.__name__}.py" for module in MODULES),
    *("detail_probes.py", "_comparison.py", "outcomes.py"),
)


@functools.cache
def sections_of(name: str) -> dict[str, str]:
    return diff.sections(source_of(name))


def inherited(detail: dict, mutation: dict, name: str) -> bool:
    """Whether the script's parent has the same text, and gets the same mutation and test."""
    parent, tests = diff.FAMILY.get(name), detail.get("tests", {})
    return (
        parent in mutation.get("files", detail["files"])
        and tests.get(parent) == tests.get(name)
        and any(mutation["old"] in sections_of(name)[section] for section in diff.EQUAL[name])
    )


MUTANTS = [
    pytest.param(
        *(detail, mutation, name),
        id=f"{detail['id']}-{number}-{name}",
        marks=[pytest.mark.slow] if inherited(detail, mutation, name) else [],
    )
    for detail in DETAILS.values()
    for number, mutation in enumerate(detail["mutations"], 1)
    for name in mutation.get("files", detail["files"])
]


@pytest.mark.parametrize(("detail", "mutation", "name"), MUTANTS)
def test_mutation_is_noticed(detail, mutation, name, request):
    source = source_of(name)
    assert source.count(mutation["old"]) == 1, "`old` must stand once in the script"
    mutant = load_script(name, source.replace(mutation["old"], mutation["new"]))
    wanted = detail.get("tests", {}).get(name, detail["test"])
    (test,) = (vars(module)[wanted] for module in MODULES if wanted in vars(module))
    others = [argument for argument in inspect.signature(test).parameters if argument != "script"]
    fixtures = {argument: request.getfixturevalue(argument) for argument in others}
    # an assertion of the test, not a crash: a mutant that cannot run shows nothing
    with pytest.raises((AssertionError, pytest.fail.Exception)) as failure:
        test(script=mutant, **fixtures)
    assert failure.traceback[-1].path.name in ASSERTING
