"""The files differ from their parents in what their setting needs, and in nothing else."""

import ast
import importlib.util
import io
import re
import sys
import tokenize
import tomllib

import pytest
from conftest import ROOT, SCRIPTS, load_script, source_of


def load_diff():
    """Load scripts/diff.py, whose parser and family tree the tests share."""
    spec = importlib.util.spec_from_file_location("diff", ROOT / "scripts/diff.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


diff = load_diff()
PAIRS = list(diff.FAMILY.items())
BLOCKS = [(child, section) for child in diff.EQUAL for section in diff.EQUAL[child]]
PATHS = [path for d in (".", "scripts", "tests") for path in sorted((ROOT / d).glob("*.py"))]
RECORDS = tomllib.loads((ROOT / "tests/family.toml").read_text())
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HEADINGS = ["Header", "Arguments", "Environment", "Agent", "Advantages", "Training", "Run"]
# a module that is not named as its distribution is; torch writes TensorBoard's files by tensorboard
DISTRIBUTIONS = {"cv2": "opencv-python-headless", "torch.utils.tensorboard": "tensorboard"}

# what the algorithm of a file changes: statistics, the LSTM's state, masks, pools, other processes
MAY_DIFFER = {
    "ppo_continuous": {"Training"},
    "ppo_distributed": {"Training", "Run"},
    "ppo_lstm": {"Training", "Run"},
    "ppo_multidiscrete": {"Training", "Run"},
    "envpool_ppo": {"Training", "Run"},
    "appo_async": {"Advantages", "Training", "Run"},
}
# the arguments that a file has no use for, and those of its own, where nothing else is compared
ARGUMENTS_DIFFER = {
    "appo_async": (
        {"num_envs", "bootstrap_truncated", "vector_mode"},
        {"num_workers", "envs_per_worker", "num_splits", "num_policy_workers", "learner_threads"}
        | {"minibatch_size", "rho_bar", "c_bar", "max_policy_lag", "rnn", "reward_scale", "serial"}
        | {"native_envs"},
    ),
}
# the functions of Run that differ, and those that the parent has not
RUN_DIFFERS = {
    # who writes, who speaks, what all must agree on, and how a restarted group goes on
    "ppo_distributed": {
        *("fail", "wait_for_the_first", "check", "save", "restore", "pick_device", "connect"),
        *("check_equal", "open_run", "log", "close_run", "parse", "__main__"),
    },
    # masks and states have to do with sizes and with playing, the scale of rewards with resuming,
    # pools with how they are made
    "ppo_lstm": {"check", "evaluate"},
    "ppo_multidiscrete": {"check", "evaluate", "parse"},
    "envpool_ppo": {"check", "try_out"},
    # sizes, shared memory, the learner's threads, lag and waiting on the screen, the GRU's state,
    # and lag that grows without end
    "appo_async": {
        *("check", "try_out", "shared_megabytes", "pick_device", "log", "evaluate", "parse"),
        "__main__",
    },
}

each_script = pytest.mark.parametrize("name", SCRIPTS)
each_pair = pytest.mark.parametrize(("child", "parent"), PAIRS)


def header_of(source: str) -> dict:
    """Read a script's PEP 723 header, by the regular expression of that PEP."""
    pattern = r"(?m)^# /// script$\s(?P<content>(^#(| .*)$\s)+)^# ///$"
    (header,) = re.finditer(pattern, source)
    lines = header["content"].splitlines()
    return tomllib.loads("\n".join(line.removeprefix("#").removeprefix(" ") for line in lines))


def pins(dependencies: list[str]) -> dict[str, tuple[set[str], str]]:
    """Read `name[extra]==version` as {name: ({extra}, version)}."""
    found = {}
    for dependency in dependencies:
        name, extras, version = re.fullmatch(
            r"([a-z0-9-]+)(?:\[([a-z,-]+)\])?==([0-9.]+)", dependency
        ).groups()
        assert name not in found
        found[name] = (set((extras or "").split(",")) - {""}, version)
    return found


def imported_modules(source: str) -> set[str]:
    """Name all modules that a script imports, inside of functions too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            found.add(node.module)
    return found


def third_party(source: str) -> set[str]:
    """Name the distributions that a script imports from."""
    found = set()
    for module in imported_modules(source):
        top = module.split(".")[0]
        if top not in sys.stdlib_module_names:
            found.add(DISTRIBUTIONS.get(module) or DISTRIBUTIONS.get(top) or top.replace("_", "-"))
    return found


def arguments_of(source: str) -> dict[str, str]:
    """Read {argument: its inline comment} from the class Args."""
    tree = ast.parse(source)
    (args,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Args")
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    return {
        field.target.id: comments.get(field.lineno, "")
        for field in args.body
        if isinstance(field, ast.AnnAssign)
    }


# the family tree


def test_tree_holds_every_script():
    files = {path.stem for path in ROOT.glob("*.py")}
    assert files == set(SCRIPTS) == set(diff.FAMILY) | {"ppo"}
    assert set(diff.FAMILY) == set(diff.EQUAL) == set(RECORDS)
    assert set(diff.FAMILY.values()) <= files


@each_script
def test_headings(name):
    assert list(diff.sections(source_of(name))) == HEADINGS


@pytest.mark.parametrize(("child", "section"), BLOCKS)
def test_block_equals_parent(child, section):
    parent = diff.FAMILY[child]
    ours, theirs = (diff.sections(source_of(name))[section] for name in (child, parent))
    command = f"python scripts/diff.py {parent} {child}"
    assert ours == theirs, f"{section} must be the same in {child}.py and {parent}.py: {command}"


@each_pair
def test_core_blocks_must_be_equal(child, parent):
    """The table above cannot be emptied to make its test pass."""
    must = {"Advantages", "Training", "Run"} - MAY_DIFFER.get(child, set())
    assert set(diff.EQUAL[child]) >= must


def test_run_differs_where_it_may():
    assert set(RUN_DIFFERS) == {name for name in MAY_DIFFER if "Run" in MAY_DIFFER[name]}


@pytest.mark.parametrize("child", RUN_DIFFERS)
def test_run_differs_in_these_functions_alone(child):
    """All others are the parent's, in its order."""

    def name_of(node):
        main = isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)
        return "__main__" if main else getattr(node, "name", ast.unparse(node))

    def functions(name):
        run = diff.sections(source_of(name))["Run"]
        return {name_of(n): ast.get_source_segment(run, n) for n in ast.parse(run).body}

    ours, theirs = functions(child), functions(diff.FAMILY[child])
    assert [name for name in ours if name in theirs] == list(theirs)
    assert {name for name in ours if ours[name] != theirs.get(name)} == RUN_DIFFERS[child]


@each_pair
def test_layer_init_equals_parent(child, parent):
    def layer_init(name):
        source = source_of(name)
        (function,) = (n for n in ast.parse(source).body if getattr(n, "name", "") == "layer_init")
        return ast.get_source_segment(source, function)

    assert layer_init(child) == layer_init(parent)


@each_pair
def test_diff_size_is_the_recorded_one(child, parent):
    size = diff.diff_size(source_of(parent), source_of(child), diff.COMPARED.get(child))
    removed, added = map(int, re.fullmatch(r"-(\d+) \+(\d+)", RECORDS[child]).groups())
    grown = size.removed + size.added - removed - added
    how = f"grew by {grown}" if grown > 0 else f"shrank by {-grown}" if grown else "changed"
    assert str(size) == RECORDS[child], (
        f"the diff of {parent}.py and {child}.py {how} lines, from {RECORDS[child]} to {size}: see "
        f"`python scripts/diff.py {parent} {child}`; if it is meant, record it in tests/family.toml"
    )


@pytest.mark.parametrize("child", diff.COMPARED)
def test_arguments_differ_in_these_alone(child):
    """What is called the same comes in the parent's order."""
    ours, theirs = (list(arguments_of(source_of(n))) for n in (child, diff.FAMILY[child]))
    assert (set(theirs) - set(ours), set(ours) - set(theirs)) == ARGUMENTS_DIFFER[child]
    assert [name for name in ours if name in theirs] == [name for name in theirs if name in ours]
    assert set(diff.COMPARED[child]) == {"Environment", "Agent", "Run"}


@each_script
def test_docstring_tells_the_diff(name):
    """It names the parent, and has one bullet for each section that differs."""
    docstring = ast.get_docstring(ast.parse(source_of(name)))
    told = re.findall(r"Differs from (\w+)\.py in:\n((?:[- ] .+\n)+)", docstring)
    if name not in diff.FAMILY:
        assert "Differs from" not in docstring
        return
    ((parent, bullets),) = told
    assert parent == diff.FAMILY[name]
    ours, theirs = diff.sections(source_of(name)), diff.sections(source_of(parent))
    differ = [section for section in HEADINGS[1:] if ours[section] != theirs[section]]
    assert re.findall(r"^- (\w+): ", bullets, re.MULTILINE) == differ


@each_script
def test_no_assert_decides_anything(name):
    """`python -O` leaves them out."""
    assert not [
        node for node in ast.walk(ast.parse(source_of(name))) if isinstance(node, ast.Assert)
    ]


# one file is all that is needed

OPTIONAL = {"appo_async": "envpool"}  # for a flag, whose help says how to install it


@pytest.mark.parametrize(("name", "package"), OPTIONAL.items())
def test_optional_package_is_the_pinned_one(name, package):
    (pinned,) = PYPROJECT["optional-dependencies"][package]
    assert package in third_party(source_of(name))
    assert re.search(rf"  # .*: pip install {re.escape(pinned)}$", source_of(name), re.MULTILINE)


@each_script
def test_imports_only_what_its_header_pins(name):
    """No sibling, no shared module: the standard library and the header's packages, each used."""
    source = source_of(name)
    assert third_party(source) - {OPTIONAL.get(name)} == set(
        pins(header_of(source)["dependencies"])
    )
    assert not re.search(r"importlib|__import__|\bexec\(|\brunpy\b", source)


@each_script
def test_header_agrees_with_pyproject(name):
    header = header_of(source_of(name))
    assert header["requires-python"] == PYPROJECT["requires-python"]
    extras = PYPROJECT["optional-dependencies"]
    project = pins(PYPROJECT["dependencies"]) | pins(extras["envpool"])
    assert set(extras["envpool"]) <= set(extras["test"]), "the tests need the same EnvPool"
    for package, (extras, version) in pins(header["dependencies"]).items():
        assert package in project, f"pyproject.toml does not name {package}"
        assert version == project[package][1], f"pyproject.toml pins another {package}"
        assert extras <= project[package][0], f"pyproject.toml lacks an extra of {package}"


# what a reader sees


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_no_line_is_longer_than_100_columns(path):
    lines = path.read_text().splitlines()
    assert not [f"{path.name}:{n}" for n, line in enumerate(lines, 1) if len(line) > 100]


@each_script
def test_comment_share(name):
    """Between 10 and 25 % of the lines that are not blank hold a comment."""
    source = source_of(name)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
    lines = sum(bool(line.strip()) for line in source.splitlines())
    share = len(comments) / lines
    assert 0.10 <= share <= 0.25, f"{len(comments)} comments in {lines} lines: {share:.0%}"


@each_script
def test_help_shows_the_comment_of_every_argument(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as end:
        load_script(name).parse(["--help"])
    assert end.value.code == 0
    shown = " ".join(re.sub(r"[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    arguments = arguments_of(source_of(name))
    assert len(arguments) >= 30
    for argument, comment in arguments.items():
        flag = f"--{argument.replace('_', '-')}"
        assert comment, f"{flag} has no inline comment"
        # the flag, its type or its negation, then the comment, the default, and the next flag
        pattern = rf"{flag}(,| )[^()]*?{re.escape(comment)} \(default: "
        assert re.search(pattern, shown), f"--help does not say of {flag}: {comment}"


# openai/baselines' defaults.py for Atari and MuJoCo, and those of the article for the others
EVERYWHERE = {"gamma": 0.99, "gae_lambda": 0.95, "anneal_lr": True, "norm_adv": True}
EVERYWHERE |= {"clip_vloss": True, "vf_coef": 0.5, "max_grad_norm": 0.5, "target_kl": None}
EVERYWHERE |= {"anneal_clip_coef": False, "bootstrap_truncated": False, "seed": 1}
CLASSIC = {"learning_rate": 2.5e-4, "num_envs": 4, "num_steps": 128, "num_minibatches": 4}
CLASSIC |= {"update_epochs": 4, "clip_coef": 0.2, "ent_coef": 0.01, "total_timesteps": 500_000}
ATARI = CLASSIC | {"num_envs": 8, "clip_coef": 0.1, "total_timesteps": 10_000_000}
MUJOCO = {"learning_rate": 3e-4, "num_envs": 1, "num_steps": 2048, "num_minibatches": 32}
MUJOCO |= {"update_epochs": 10, "clip_coef": 0.2, "ent_coef": 0.0, "total_timesteps": 1_000_000}
# Sample Factory's batches: seen once, from short rollouts; so the steps are larger (docs/async.md)
APPO = {"num_steps": 32, "minibatch_size": 256, "num_minibatches": 1, "update_epochs": 1}
APPO |= {"learning_rate": 5e-4}
DEFAULTS = {
    "ppo": CLASSIC,
    "ppo_shared": CLASSIC,
    "ppo_atari": ATARI,
    "ppo_continuous": MUJOCO,
    "ppo_lstm": ATARI,
    "ppo_multidiscrete": ATARI | {"total_timesteps": 2_000_000},
    "envpool_ppo": ATARI,
    "ppo_distributed": ATARI,
    "appo_async": {name: x for name, x in ATARI.items() if name != "num_envs"} | APPO,
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_hyperparameters_are_the_published_ones(name):
    """A default that changes makes every row of results/ that does not name it another run."""
    args = load_script(name).Args()
    for argument, value in (EVERYWHERE | DEFAULTS[name]).items():
        if (name, argument) != ("appo_async", "bootstrap_truncated"):  # which it lacks
            assert getattr(args, argument) == value, argument
    assert len(DEFAULTS) == len(SCRIPTS)
