"""Bad input ends with one line that names the flag, exit code 2, and nothing on the disk."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT, SCRIPTS, TINY, load_script, run_forked, run_script
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple
from toy_envs import ContinuousClock, ToyAtari

VECTOR, IMAGE = Box(-1, 1, (3,), np.float32), Box(0, 255, (84, 84, 3), np.uint8)
TWO, PARTS, FORCE = Discrete(2), MultiDiscrete([2, 2]), Box(-1, 1, (2,), np.float32)
SPACES = {  # environment: its observation space and its action space
    "Image-v0": (IMAGE, TWO),
    "Gray-v0": (Box(0, 255, (84, 84, 1), np.uint8), TWO),
    "FloatImage-v0": (Box(0, 1, (7, 7, 3), np.float32), TWO),
    "Matrix-v0": (Box(0, 1, (3, 3), np.float32), TWO),
    "Number-v0": (Box(0, 1, (), np.float32), TWO),
    "DictObs-v0": (Dict(a=VECTOR), TWO),
    "TupleObs-v0": (Tuple((VECTOR, VECTOR)), TWO),
    "DiscreteObs-v0": (Discrete(3), TWO),
    "BinaryObs-v0": (MultiBinary(3), TWO),
    "TextObs-v0": (Text(5), TWO),
    "Continuous-v0": (VECTOR, FORCE),
    "ContinuousMatrix-v0": (Box(0, 1, (3, 3), np.float32), FORCE),
    "ContinuousDictObs-v0": (Dict(a=VECTOR), FORCE),
    "ContinuousDiscreteObs-v0": (Discrete(3), FORCE),
    "IntegerAction-v0": (VECTOR, Box(-1, 1, (2,), np.int32)),
    "NumberAction-v0": (VECTOR, Box(-1, 1, (), np.float32)),
    "HalfPrecision-v0": (VECTOR, Box(-1, 1, (2,), np.float16)),
    "MultiDiscrete-v0": (VECTOR, PARTS),
    "MultiBinary-v0": (VECTOR, MultiBinary(2)),
    "DictAction-v0": (VECTOR, Dict(a=TWO)),
    "TupleAction-v0": (VECTOR, Tuple((TWO, FORCE))),
    "StartAtOne-v0": (VECTOR, Discrete(2, start=1)),
    "ImageMultiDiscrete-v0": (IMAGE, PARTS),
    "ImageStartAtOne-v0": (IMAGE, Discrete(2, start=1)),
    "ImageContinuous-v0": (IMAGE, FORCE),
    "ImageDictAction-v0": (IMAGE, Dict(a=TWO)),
    "ImagePartsAtOne-v0": (IMAGE, MultiDiscrete([2, 2], start=[0, 1])),
    "ImagePartsTable-v0": (IMAGE, MultiDiscrete([[2, 2], [3, 3]])),
    "ImageBinaryTable-v0": (IMAGE, MultiBinary([2, 3])),
    "PartsDictObs-v0": (Dict(a=IMAGE), PARTS),
    "PartsGrayScreen-v0": (Dict(screen=Box(0, 255, (84, 84, 1), np.uint8)), PARTS),
    "PartsFloatScreen-v0": (Dict(screen=Box(0, 1, (84, 84, 3), np.float32)), PARTS),
    "PartsTupleObs-v0": (Tuple((IMAGE, IMAGE)), PARTS),
}
MASKS = {  # environment of parts with 2 and 2 choices: its action mask
    "ShortMask-v0": np.ones(3, bool),
    "LongMask-v0": np.ones(5, bool),
    "TableMask-v0": np.ones((2, 2), bool),
    "ByteMask-v0": np.ones(4, np.int8),
    "ListMask-v0": [True, True, True, True],
    "NumberMask-v0": True,
    "PairMask-v0": (np.ones(2, bool), np.ones(2, bool)),
}
NOTHING_LEFT = {"FirstMask-v0": np.array([0, 0, 1, 1], bool)}
NOTHING_LEFT |= {"LastMask-v0": np.array([1, 1, 0, 0], bool)}


class AnySpaces(gym.Env):
    """An environment that is never stepped: its spaces and its action mask are all that matters."""

    def __init__(self, observation_space, action_space, mask=None, render_mode=None):
        self.observation_space, self.action_space = observation_space, action_space
        self.mask = mask

    def reset(self, *, seed=None, options=None):
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {"action_mask": self.mask}


class Broken(gym.Env):
    """An environment that cannot be made, and says why, or nothing."""

    def __init__(self, error, render_mode=None):
        raise error


for env_id, spaces in SPACES.items():
    kwargs = dict(zip(("observation_space", "action_space"), spaces, strict=True))
    gym.register(env_id, AnySpaces, kwargs=kwargs)
for env_id, mask in (MASKS | NOTHING_LEFT).items():
    kwargs = {"observation_space": IMAGE, "action_space": PARTS, "mask": mask}
    gym.register(env_id, AnySpaces, kwargs=kwargs)


class Unready(AnySpaces):
    """An environment that can be made, but has no first observation."""

    def reset(self, *, seed=None, options=None):
        raise RuntimeError("no such level")


class UnreadyAtari(ToyAtari):
    reset = Unready.reset


class Invisible(AnySpaces):
    """An environment whose pictures are not there."""

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 30}

    def render(self):
        return None


def unready(env_id: str, cls: type, observation_space: gym.Space, action_space: gym.Space):
    spaces = {"observation_space": observation_space, "action_space": action_space}
    gym.register(env_id, cls, kwargs=spaces)


unready("Unready-v0", Unready, VECTOR, TWO)
unready("UnreadyContinuous-v0", Unready, VECTOR, FORCE)
unready("UnreadyParts-v0", Unready, IMAGE, PARTS)
unready("Invisible-v0", Invisible, VECTOR, TWO)
gym.register("UnreadyAtari-v0", UnreadyAtari)
gym.register("Broken-v0", Broken, kwargs={"error": RuntimeError("no such\nlevel")})
gym.register("Silent-v0", Broken, kwargs={"error": AssertionError()})


def rows(flag: str, piece: str, *values: object) -> list[tuple]:
    """Values of a flag that are refused with this piece of a message."""
    return [(flag, value, piece) for value in values]


def envs(piece: str, env_ids: str) -> list[tuple]:
    """The same for environments, which may say what is wrong with them in their own words."""
    return rows("env-id", piece, *env_ids.split())


ALL = [
    *envs("doesn't exist", "Nope-v0 toy_envs:Nope-v0"),
    *envs("Did you mean: `CartPole`", "Cartpole-v1"),
    *envs("version `v9`", "CartPole-v9"),
    *envs("No module named 'no_such_module'", "no_such_module:Env-v0"),
    *rows("env-id", "Malformed environment ID", "a/b/c", ""),
    *envs("Empty module name", ":"),
    *envs("no such level", "Broken-v0"),
    *envs("AssertionError", "Silent-v0"),
    *rows("total-timesteps", "is not between 1 and inf", 0, -1),
    *rows("total-timesteps", "less than one batch", 100),
    *rows("learning-rate", "is not between 0 and 1", -1e-3, 1.5, "nan", "inf", "-inf"),
    *rows("num-envs", "is not between 1 and inf", 0, -4),
    *rows("num-steps", "is not between 1 and inf", 0, -128),
    *rows("gamma", "is not between 0 and 1", -0.1, 1.01, "nan"),
    *rows("gae-lambda", "is not between 0 and 1", -0.1, 1.01, "nan"),
    *rows("num-minibatches", "is not between 1 and inf", 0, -4),
    *rows("num-minibatches", "3 does not divide", 3),
    *rows("num-minibatches", "100000 does not divide", 100_000),
    *rows("update-epochs", "is not between 1 and inf", 0, -1),
    *rows("clip-coef", "is not between 0 and inf", -0.1, "nan"),
    *rows("ent-coef", "is not between 0 and 1000000000", -0.01, "nan"),
    *rows("vf-coef", "is not between 0 and 1000000000", -0.5, "nan"),
    *rows("max-grad-norm", "is not between 0 and inf", -0.5, "nan"),
    *rows("target-kl", "is not between 0 and inf", -0.01, "nan"),
    *rows("seed", "is not between 0 and 1000000000", -1, 10**10),
    *rows("checkpoint-every", "is not between 0 and inf", -1, "nan"),
    *rows("stop-at", "is not between 1 and inf", 0, -1),
    *rows("eval-episodes", "is not between 0 and 1000000000", -1),
    *rows("resume", "there is no no-such-run", "no-such-run"),
    *rows("evaluate", "there is no no-such-run", "no-such-run"),
    *rows("run-dir", "cannot write in", "a-file", "a-file/run", "a-file/deep/run"),
    *rows("run-dir", "cannot write in", "a-dead-link", "a-dead-link/run"),
    *rows("run-dir", "at most 255 bytes", "n" * 256, "new/" + "n" * 256 + "/run", "ñ" * 128),
    *[(flag, "", "is empty") for flag in ("run-dir", "resume", "evaluate")],
]
PPO = [
    *envs("Atari games fit ppo_atari.py, others ppo_multidiscrete.py", "Image-v0"),
    *envs("use ppo_continuous.py", "Pendulum-v1 Hopper-v4 Continuous-v0"),
    *envs("only from images", "MultiDiscrete-v0 MultiBinary-v0"),
    *envs("FlattenObservation", "Gray-v0 FloatImage-v0"),
    *envs("FlattenObservation", "FrozenLake-v1 Blackjack-v1 DictObs-v0 TupleObs-v0 BinaryObs-v0"),
    *envs("not Discrete(3)", "DiscreteObs-v0"),
    *envs("must be a flat Box", "TextObs-v0 Matrix-v0 Number-v0"),
    *envs("start at 0", "StartAtOne-v0"),
    *envs("must be Discrete", "DictAction-v0"),
    *envs("no such level", "Unready-v0"),
]
ATARI = [
    *envs("no such level", "UnreadyAtari-v0"),
    *envs("flat ones fit ppo.py", "CartPole-v1 Pendulum-v1"),
    *envs("must be RGB images", "DictObs-v0 DiscreteObs-v0 Matrix-v0 Gray-v0 FloatImage-v0"),
    *envs("use ppo_multidiscrete.py", "ImageMultiDiscrete-v0"),
    *envs("must be Discrete", "ImageContinuous-v0"),
    *envs("start at 0", "ImageStartAtOne-v0"),
    *envs("MultiDiscrete([n]) actions fit ppo_multidiscrete.py", "Image-v0"),
    *envs("use a NoFrameskip-v4 id", "ALE/Breakout-v5 Breakout-v4"),
]
CONTINUOUS = [
    *envs("use ppo.py", "CartPole-v1"),
    *envs("ppo_atari.py for Atari games", "Image-v0"),
    *envs("only from images", "MultiDiscrete-v0 MultiBinary-v0"),
    *envs(
        "must be a Box of floats",
        "DictAction-v0 TupleAction-v0 IntegerAction-v0 NumberAction-v0 HalfPrecision-v0",
    ),
    *envs("must be a flat Box", "ImageContinuous-v0 ContinuousMatrix-v0"),
    *envs("FlattenObservation", "ContinuousDictObs-v0 ContinuousDiscreteObs-v0"),
    *envs("no such level", "UnreadyContinuous-v0"),
    *envs("v2 and v3 based environments have been moved", "HalfCheetah-v2 Humanoid-v3"),
    *envs("version `v9`", "HalfCheetah-v9"),
]
LSTM = rows("num-minibatches", "does not divide num-envs 8", 3, 16)  # 16 divides the batch
MULTIDISCRETE = [
    *envs(
        "must be RGB images",
        "CartPole-v1 Hopper-v4 MultiDiscrete-v0 DictObs-v0 DiscreteObs-v0 TextObs-v0 "
        "PartsDictObs-v0 PartsGrayScreen-v0 PartsFloatScreen-v0 PartsTupleObs-v0",
    ),
    *envs("others need MultiDiscrete([n])", "Image-v0 ImageStartAtOne-v0"),
    *envs("continuous", "ImageContinuous-v0"),
    *envs("no such level", "UnreadyParts-v0"),
    *envs(
        "MultiDiscrete from 0, or MultiBinary",
        "ImageDictAction-v0 ImagePartsAtOne-v0 ImagePartsTable-v0 ImageBinaryTable-v0",
    ),
    *envs("use `VizdoomBasic-v1`", "VizdoomBasic-v0"),
    *envs("version `v9`", "VizdoomBasic-v9"),
    *rows("reward-scale", "is not between", 0, -0.01, "nan"),
    *rows("env-id", "of 4 bools", *MASKS),
    *rows("env-id", "forbids every choice", *NOTHING_LEFT),
]
ENVPOOL = [
    *envs("EnvPool has no BreakoutNoFrameskip-v4; the nearest are", "BreakoutNoFrameskip-v4"),
    *envs("Breakout-v5", "BreakoutNoFrameskip-v4 breakout-v5"),
    *envs("EnvPool has no toy_envs:Clock-v0", "toy_envs:Clock-v0"),
    *rows("env-id", "EnvPool has no ; the nearest are", ""),
    *envs("flat ones fit ppo.py", "CartPole-v1 HalfCheetah-v4"),
    *envs("must be images", "Taxi-v3"),
    *rows("num-threads", "is not between", -1),
    *(case for case in ALL if case[0] != "env-id"),  # its ids are EnvPool's
]
# its environments are counted otherwise, and any number of minibatches divides the batch
NOT_APPO = {("num-minibatches", 3), ("num-minibatches", 100_000)}
APPO = [
    *(case for case in ALL if case[0] != "num-envs" and case[:2] not in NOT_APPO),
    *(case for case in ATARI if case[1] != "Image-v0"),
    ("env-id", "Image-v0", "neither an Atari game nor ViZDoom"),
    ("num-workers", 0, "is not between 1 and"),
    ("envs-per-worker", 0, "is not between 1 and"),
    ("envs-per-worker", 1_000_000, "of shared memory are needed"),
    ("num-splits", 0, "is not between 1 and"),
    ("num-splits", 3, "3 does not divide 8 environments"),
    ("num-policy-workers", 0, "is not between 1 and"),
    ("num-policy-workers", 1000, "rollout workers ask for actions"),
    ("learner-threads", 0, "is not between 1 and"),
    ("minibatch-size", 0, "is not between 1 and"),
    ("minibatch-size", 100, "100 samples are not a multiple of --num-steps 32"),
    ("rho-bar", -1, "is not between 0 and"),
    ("rho-bar", "nan", "is not between 0 and"),
    ("c-bar", -1, "is not between 0 and"),
    ("max-policy-lag", -1, "is not between 0 and"),
    ("reward-scale", -0.01, "is not between"),
    ("reward-scale", "nan", "is not between"),
    ("reward-scale", "inf", "is not between"),
]
CASES = {
    "ppo": PPO,
    "ppo_atari": ATARI,
    "ppo_continuous": CONTINUOUS,
    "ppo_distributed": ATARI,
    "ppo_lstm": ATARI + LSTM,
    "ppo_multidiscrete": MULTIDISCRETE,
}
CASES = {script: ALL + cases for script, cases in CASES.items()}
CASES |= {"envpool_ppo": ENVPOOL, "appo_async": APPO}
TABLE = [(script, *case) for script, cases in CASES.items() for case in cases]


def refusal(script, argv: list[object], capsys) -> str:
    """The one line with which a script refuses these arguments."""
    before = sorted(Path().rglob("*"))
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_info:
        script.parse([str(word) for word in argv])
    assert exit_info.value.code == 2
    assert sorted(Path().rglob("*")) == before, "a refused command leaves nothing behind"
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    """Every test stands in a folder of its own, with a file in it."""
    monkeypatch.chdir(tmp_path)
    Path("a-file").write_text("not a directory")
    Path("a-dead-link").symlink_to("a-disk-that-is-not-mounted")


@pytest.mark.parametrize(("name", "flag", "value", "piece"), TABLE)
def test_table(name, flag, value, piece, capsys):
    line = refusal(load_script(name), [f"--{flag}={value}"], capsys)
    assert line.startswith(f"error: --{flag}: ")
    assert piece in line


USE = re.compile(r"use (ppo\w*)\.py")


@pytest.mark.parametrize("env_id", [*SPACES, "CartPole-v1", "Pendulum-v1", "VizdoomBasic-v1"])
def test_no_file_sends_in_circles(env_id):
    """Who uses the file that a message says to use ends at one that fits, or at another cure."""
    for name in SCRIPTS:
        seen = []
        while name:
            assert name not in seen, [*seen, name]
            seen.append(name)
            script = load_script(name)
            env = gym.make(env_id, disable_env_checker=True)
            problem = script.wrong_space(env) or ""
            env.close()
            found = USE.search(problem)
            name = found and found[1]


@pytest.mark.parametrize("frame", [None, np.zeros((4, 4), np.uint8)])
def test_a_film_of_nothing(frame, monkeypatch, capsys):
    """Nor of gray: moviepy would find out after the whole training."""
    monkeypatch.setattr(Invisible, "render", lambda self: frame)
    line = refusal(load_script("ppo"), ["--env-id=Invisible-v0", "--capture-video"], capsys)
    seen = " ".join(repr(frame).split())
    assert line == f"error: --capture-video: Invisible-v0 renders no image in color, but {seen}"


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_device_that_is_not_there(script, device, capsys):
    if script.SCRIPT == "ppo_distributed" and device == "mps":
        pytest.skip("this file knows of no mps, and tyro says so")
    if torch.get_device_module(device).is_available():
        pytest.skip(f"there is a {device} here")
    line = refusal(script, ["--device", device], capsys)
    assert line.startswith("error: --device: ")
    assert "use --device cpu" in line


def test_bounds_are_allowed(script):
    flags = ["--gamma", "1", "--gae-lambda", "1", "--learning-rate", "1", "--ent-coef", "0"]
    args = script.parse([*flags, "--clip-coef", "0", "--eval-episodes", "0"])
    assert (args.gamma, args.gae_lambda, args.learning_rate, args.ent_coef) == (1, 1, 1, 0)


def test_a_gpu_that_pytorch_cannot_use_is_none(script, monkeypatch):
    """With too old a driver PyTorch counts it, but has no use for it."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script.pick_device(script.Args()).type == "cpu"


def test_the_gpu_of_a_mac_has_to_be_asked_for(script, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.mps, "is_available", lambda: True)
    assert script.pick_device(script.Args()).type == "cpu"


def test_a_gpu_that_fails_at_its_first_use(script, monkeypatch, capsys):
    """Too old for this PyTorch, or full: here it is one that is not there.

    PyTorch's words for that depend on its build.
    """
    with pytest.raises((AssertionError, RuntimeError)) as error:
        torch.ones(1, device="cuda")
    monkeypatch.setattr(script, "pick_device", lambda args: torch.device("cuda"))
    line = refusal(script, [], capsys)
    assert line == f"error: --device: {' '.join(str(error.value).split())}"


@pytest.mark.parametrize(("num_envs", "num_steps", "num_minibatches"), [(1, 1, 1), (8, 1, 8)])
def test_one_sample_cannot_be_normalized(script, num_envs, num_steps, num_minibatches, capsys):
    sizes, flag = [f"--num-envs={num_envs}", f"--num-steps={num_steps}"], "num-minibatches"
    if script.SCRIPT == "appo_async":
        sizes, flag = ["--minibatch-size=1", f"--num-steps={num_steps}"], "minibatch-size"
    sizes += [f"--num-minibatches={num_minibatches}"]
    line = refusal(script, sizes, capsys)
    assert line.startswith(f"error: --{flag}: ")
    assert "--no-norm-adv" in line
    script.parse([*sizes, "--no-norm-adv"])  # as the message says


@pytest.mark.parametrize(
    "name", ["ppo_atari", "ppo_lstm", "ppo_multidiscrete", "ppo_distributed", "appo_async"]
)
def test_processes_on_windows(name, monkeypatch, capsys):
    script = load_script(name)
    windows = SimpleNamespace(**{**vars(os), "name": "nt"})
    monkeypatch.setattr(script, "os", windows)
    if name == "appo_async":
        argv, cure, alone = [], "--serial", ["--serial"]
    else:
        argv, cure, alone = ["--vector-mode", "async"], "sync", ["--vector-mode", "sync"]
    line = refusal(script, argv, capsys)
    assert line.startswith(f"error: {alone[0]}: ")
    assert line.endswith(f"on Windows, use {cure}")
    script.parse(alone)


# === Runs that cannot be resumed or evaluated


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory) -> bytes:
    """The checkpoint of a tiny ppo run that was stopped half-way, after step 16 of 32."""
    script = load_script("ppo")
    run_dir = tmp_path_factory.mktemp("stopped")
    tiny = TINY["ppo"] | {"stop_at": 16, "eval_episodes": 0, "run_dir": str(run_dir)}
    script.train(script.Args(**tiny))
    return (run_dir / "checkpoint.pt").read_bytes()


@pytest.fixture
def run_dir(stopped_run) -> Path:
    """A fresh copy of that run."""
    folder = Path("run")
    folder.mkdir()
    (folder / "checkpoint.pt").write_bytes(stopped_run)
    return folder


def rewrite(run_dir: Path, **changes) -> None:
    """Put other values in a checkpoint; None takes the entry out."""
    run = torch.load(run_dir / "checkpoint.pt", weights_only=True) | changes
    run = {key: value for key, value in run.items() if changes.get(key, 0) is not None}
    torch.save(run, run_dir / "checkpoint.pt")


def test_the_run_is_good_before_it_is_damaged(run_dir):
    assert load_script("ppo").parse(["--resume", "run"]).total_timesteps == 32
    assert (
        load_script("ppo").parse(["--evaluate", "run", "--eval-episodes", "3"]).eval_episodes == 3
    )


def test_run_without_evaluation_can_be_evaluated(run_dir):
    """The run was made with --eval-episodes 0; its last line says --evaluate run all the same."""
    assert load_script("ppo").parse(["--evaluate", "run"]).eval_episodes == 10


def empty(path):
    path.write_bytes(b"")


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1  # a single bit, inside of a tensor
    path.write_bytes(content)


def text(path):
    path.write_text("step 16 of 32")


def other_zip(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("hello.txt", "hello")


def directory(path):
    path.unlink()
    path.mkdir()


def other_object(path):
    torch.save([1, 2, 3], path)


def whole_module(path):
    torch.save(torch.nn.Linear(2, 2), path)


def no_args(path):
    rewrite(path.parent, args=None)


def unknown_argument(path):
    rewrite(path.parent, args={"env_id": "CartPole-v1", "a_flag_of_an_older_version": 1})


DAMAGE = [empty, cut, flip, text, other_zip, directory, other_object, whole_module, no_args]
DAMAGE += [unknown_argument]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("flag", ["resume", "evaluate"])
def test_damaged_checkpoint(flag, damage, run_dir, capsys):
    damage(run_dir / "checkpoint.pt")
    line = refusal(load_script("ppo"), [f"--{flag}", "run"], capsys)
    assert line.startswith(f"error: --{flag}: run/checkpoint.pt is damaged")


def test_checkpoint_of_a_file_with_one_more_argument(run_dir, capsys):
    unknown_argument(run_dir / "checkpoint.pt")
    line = refusal(load_script("ppo"), ["--evaluate", "run"], capsys)
    assert "no checkpoint of this ppo.py" in line and "'a_flag_of_an_older_version'" in line


@pytest.mark.parametrize("flag", ["resume", "evaluate"])
def test_checkpoint_of_another_network(flag, script, monkeypatch, capsys):
    """As after a change of the Agent: its run must stay what it is. As it was, it is accepted."""
    tiny = TINY[script.SCRIPT] | {"stop_at": 16, "eval_episodes": 0, "run_dir": "run"}
    script.train(script.Args(**tiny))
    command = [f"--{flag}", "run", "--eval-episodes", "1"]
    script.parse(command)
    before = {path: path.read_bytes() for path in Path("run").iterdir()}
    init = script.Agent.__init__

    def changed_init(self, *arguments):
        init(self, *arguments)
        self.critic = torch.nn.Linear(3, 1)

    monkeypatch.setattr(script.Agent, "__init__", changed_init)
    line = refusal(script, command, capsys)
    assert line.startswith(f"error: --{flag}: run does not fit the network of {script.SCRIPT}.py: ")
    assert "critic" in line
    assert {path: path.read_bytes() for path in Path("run").iterdir()} == before


PARTS_OF_A_RUN = "global_step seconds episodes returns wandb_id agent optimizer rng"


@pytest.mark.parametrize("key", PARTS_OF_A_RUN.split())
def test_checkpoint_with_a_part_missing(key, run_dir, capsys):
    rewrite(run_dir, **{key: None})
    line = refusal(load_script("ppo"), ["--resume", "run"], capsys)
    assert line.startswith("error: --resume: run/checkpoint.pt is damaged")


def test_no_flipped_byte_goes_unnoticed(run_dir, capsys):
    script, path = load_script("ppo"), run_dir / "checkpoint.pt"
    good, content = script.load("resume", "run"), path.read_bytes()
    refused, harmless = 0, 0
    for position in range(0, len(content), len(content) // 200):
        damaged = bytearray(content)
        damaged[position] ^= 0xFF
        path.write_bytes(damaged)
        try:
            run = script.load("resume", "run")
        except SystemExit as error:
            assert error.code == 2
            refused += 1
        else:  # a time stamp, or padding: nothing that is read
            assert all(run["agent"][name].equal(good["agent"][name]) for name in good["agent"])
            assert {**run, "agent": 0, "optimizer": 0, "rng": 0} == {
                **good,
                "agent": 0,
                "optimizer": 0,
                "rng": 0,
            }
            harmless += 1
    assert refused > harmless


@pytest.mark.parametrize("flag", ["resume", "evaluate"])
@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "ppo"])
def test_checkpoint_of_another_script(name, flag, run_dir, capsys):
    line = refusal(load_script(name), [f"--{flag}", "run"], capsys)
    problem = "run/checkpoint.pt was written by ppo.py: use a file of that name"
    assert line == f"error: --{flag}: {problem}"


def test_checkpoint_of_another_script_with_other_arguments(run_dir, capsys):
    args = torch.load(run_dir / "checkpoint.pt", weights_only=True)["args"]
    rewrite(run_dir, script="ppo_atari", args=args | {"precision": "fp32", "vector_mode": "sync"})
    line = refusal(load_script("ppo"), ["--resume", "run"], capsys)
    assert "was written by ppo_atari.py" in line


def test_a_film_of_no_game(script, capsys):
    line = refusal(script, ["--capture-video", "--eval-episodes", "0"], capsys)
    assert line.startswith("error: --capture-video: films the evaluation: needs --eval-episodes")


@pytest.mark.parametrize("env_id", ["BreakoutNoFrameskip-v4", "ALE/Breakout-v5"])
def test_atari_is_in_another_file(env_id, tmp_path):
    """In a process of its own, where nothing else has made Atari known."""
    process = run_script(ROOT / "ppo.py", "--env-id", env_id, cwd=tmp_path)
    assert process.returncode == 2 and "(Atari: ppo_atari.py, " in process.stderr
    assert len(process.stderr.splitlines()) == 1 and not (tmp_path / "runs").exists()


def test_run_dir_that_holds_a_run(script, run_dir, capsys):
    line = refusal(script, ["--run-dir", "run"], capsys)
    assert line.startswith("error: --run-dir: ")
    assert "holds a run: --resume it" in line
    os.remove("run/checkpoint.pt")  # it takes much space; the result is still one
    Path("run/result.json").touch()
    assert refusal(script, ["--run-dir", "run"], capsys) == line


def test_a_run_in_runs_is_in_nobodys_way(script, run_dir):
    """Its directory was the one above those that runs without --run-dir get."""
    os.rename("run", "runs")
    args = script.parse(["--device=cpu"])
    assert args.run_dir is None


FORBIDDEN = ["--run-dir", "--resume", "--evaluate"]


@pytest.mark.parametrize("flag", FORBIDDEN)
def test_a_place_where_one_may_not_look(flag, tmp_path):
    """Path.exists() raises PermissionError there, up to Python 3.13."""
    (tmp_path / "closed").mkdir(mode=0o000)
    command = [sys.executable, ROOT / "ppo.py", flag, tmp_path / "closed" / "run"]
    if os.geteuid() == 0:  # root may look everywhere, until it gives these rights up
        if not shutil.which("setpriv"):
            pytest.skip("root may look everywhere, and there is no setpriv")
        command = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", *command]
    process = subprocess.run(command, capture_output=True, text=True, cwd="/")
    assert (process.returncode, len(process.stderr.splitlines())) == (2, 1), process.stderr
    assert process.stderr.startswith(f"error: {flag}: ")


def test_a_run_that_is_read_only_can_be_evaluated(run_dir, monkeypatch, capsys):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    script = load_script("ppo")
    assert script.parse(["--evaluate", "run"]).eval_episodes == 10
    line = refusal(script, ["--evaluate", "run", "--capture-video"], capsys)
    assert line.startswith("error: --run-dir: cannot write in ")


REFUSED = [  # of the run above, at step 16 of 32
    ("--evaluate run --resume run", "evaluate", "no --resume"),
    ("--evaluate run --eval-episodes 0", "evaluate", "--eval-episodes of at least 1"),
    ("--evaluate run --env-id Acrobot-v1", "evaluate", "keeps its --env-id CartPole-v1"),
    ("--resume run --env-id Acrobot-v1", "resume", "keeps its --env-id CartPole-v1"),
    ("--resume run --run-dir elsewhere", "resume", "and its directory"),
    ("--resume run --stop-at 16", "stop-at", "at step 16 already"),
    ("--resume run --stop-at 8", "stop-at", "at step 16 already"),
    ("--resume run --total-timesteps 16", "resume", "is finished"),
    ("--resume run --total-timesteps 31", "resume", "is finished"),
    ("--resume run --num-minibatches 3", "num-minibatches", "does not divide"),
    (
        "--resume run --num-steps 16 --total-timesteps 64",
        "resume",
        "choose a batch size that divides step 16: 32 does not",
    ),
    ("--resume run --gamma 2", "gamma", "is not between"),
    ("--resume run --num-envs 0", "num-envs", "is not between"),
    ("--resume run --num-steps -8", "num-steps", "is not between"),
    ("--resume run --total-timesteps 0", "total-timesteps", "is not between"),
]


@pytest.mark.parametrize(("command", "flag", "piece"), REFUSED)
def test_what_a_saved_run_refuses(command, flag, piece, run_dir, capsys):
    line = refusal(load_script("ppo"), command.split(), capsys)
    assert line.startswith(f"error: --{flag}: ")
    assert piece in line


def test_finished_run_resumed(script, capsys):
    tiny = TINY[script.SCRIPT] | {"eval_episodes": 0, "run_dir": "run"}
    script.train(script.Args(**tiny))
    line = refusal(script, ["--resume", "run"], capsys)
    assert line == "error: --resume: run is finished: go further with --total-timesteps"
    assert script.parse(["--resume", "run", "--total-timesteps", "48"]).total_timesteps == 48


@pytest.mark.parametrize(
    ("name", "changed", "kept"),
    [
        ("appo_async", "--rnn=gru", "--rnn none, --reward-scale 1.0"),  # fits no other network
        ("appo_async", "--reward-scale=5", "--rnn none, --reward-scale 1.0"),
        ("ppo_multidiscrete", "--reward-scale=5", "--reward-scale 0.01"),
    ],
)
def test_what_a_run_is_about_stays(name, changed, kept, capsys):
    """Its network, and what it is paid: the value function knows no other rewards."""
    script = load_script(name)
    tiny = TINY[name] | {"eval_episodes": 0, "run_dir": "run", "stop_at": 16}
    script.train(script.Args(**tiny))
    for flag in ("resume", "evaluate"):
        line = refusal(script, [f"--{flag}", "run", changed], capsys)
        assert line == f"error: --{flag}: run has {kept}"


def test_an_environment_that_has_changed(monkeypatch, capsys):
    """The statistics of a run of ppo_continuous.py are those of its observations."""
    script = load_script("ppo_continuous")
    tiny = TINY["ppo_continuous"] | {"eval_episodes": 0, "run_dir": "run", "stop_at": 16}
    script.train(script.Args(**tiny | {"env_id": "toy_envs:ContinuousClock-v0"}))
    monkeypatch.setattr(ContinuousClock, "observation_space", Box(0, 1, (3,), np.float32))
    monkeypatch.setattr(ContinuousClock, "_obs", lambda self: np.zeros(3, np.float32))
    for flag in ("resume", "evaluate"):
        line = refusal(script, [f"--{flag}", "run"], capsys)
        assert line.startswith(f"error: --{flag}: run does not fit the network of ppo_continuous")


# === What tyro refuses, it reports in its own way


TYRO_REFUSES = [  # command, what the message names
    ("--num-envs four", "--num-envs"),
    ("--total-timesteps 1e6", "--total-timesteps"),
    ("--seed 1.5", "--seed"),
    ("--gamma", "--gamma"),
    ("--gamma high", "--gamma"),
    ("--device tpu", "--device"),
    ("--track yes", "yes"),
    ("--nope", "--nope"),
    ("CartPole-v1", "CartPole-v1"),
    ("--learning-rat 0.1", "--learning-rat"),
    ("--precision fp8", "--precision"),
]


@pytest.mark.parametrize(("command", "named"), TYRO_REFUSES)
def test_tyro_refuses(script, command, named, capsys):
    with pytest.raises(SystemExit) as exit_info:
        script.parse(command.split())
    assert exit_info.value.code == 2
    captured = capsys.readouterr()
    assert named in captured.err
    assert "Traceback" not in captured.err
    assert not captured.out
    assert sorted(Path().iterdir()) == [Path("a-dead-link"), Path("a-file")]


# === As real processes


def check_process(process, flag: str, piece: str) -> None:
    assert process.returncode == 2, process.stderr
    assert process.stdout == ""
    (line,) = process.stderr.splitlines()
    assert line.startswith(f"error: --{flag}: ")
    assert piece in line
    assert sorted(path.name for path in Path().iterdir()) == ["a-dead-link", "a-file"]


WITHOUT_ALE = "--env-id BreakoutNoFrameskip-v4"  # nothing in ppo.py imports Atari's games
PROCESSES = [
    ("ppo", WITHOUT_ALE, "env-id", "doesn't exist"),
    ("ppo", "--env-id Hopper-v4", "env-id", "use ppo_continuous.py"),
    ("ppo_shared", "--num-minibatches 3", "num-minibatches", "does not divide"),
    ("ppo_atari", "--env-id ALE/Breakout-v5", "env-id", "use a NoFrameskip-v4 id"),
    ("ppo_continuous", "--env-id HalfCheetah-v3", "env-id", "gymnasium-robotics"),
    ("ppo_lstm", "--num-envs 6", "num-minibatches", "4 does not divide num-envs 6"),
    ("ppo_multidiscrete", "--resume nothing", "resume", "there is no nothing/checkpoint.pt"),
    ("envpool_ppo", "--env-id BreakoutNoFrameskip-v4", "env-id", "Breakout-v5"),
    ("appo_async", "--env-id CartPole-v1", "env-id", "flat ones fit ppo.py"),
    ("envpool_ppo", "--async-envs --num-envs 1 --num-minibatches 2", "num-envs", "1 is odd"),
]


@pytest.mark.parametrize(("name", "command", "flag", "piece"), PROCESSES)
def test_process(name, command, flag, piece, tmp_path):
    run = run_script if (name, command) == ("ppo", WITHOUT_ALE) else run_forked
    process = run(ROOT / f"{name}.py", *command.split(), cwd=tmp_path)
    check_process(process, flag, piece)


def test_capture_video_of_what_cannot_draw(tmp_path):
    command = "--env-id toy_envs:Clock-v0 --capture-video"
    process = run_forked(ROOT / "ppo.py", *command.split(), cwd=tmp_path)
    check_process(process, "capture-video", "render")


def test_capture_video_names_its_flag(capsys):
    line = refusal(load_script("ppo"), ["--env-id", "toy_envs:Clock-v0", "--capture-video"], capsys)
    assert line.startswith("error: --capture-video: ")


def test_track_without_a_key(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    (home := tmp_path / "home").mkdir()
    (work := tmp_path / "work").mkdir()
    process = run_forked(ROOT / "ppo.py", "--track", cwd=work, HOME=str(home), WANDB_MODE="online")
    monkeypatch.chdir(work)
    Path("a-file").touch()
    Path("a-dead-link").symlink_to("a-disk-that-is-not-mounted")
    check_process(process, "track", "run `wandb login`, or set WANDB_MODE=offline")


def test_compile_without_a_compiler(tmp_path):
    process = run_script(ROOT / "ppo.py", "--compile", cwd=tmp_path, CXX="no-such-compiler")
    assert process.returncode == 2
    (line,) = process.stderr.splitlines()
    assert line.startswith("error: --compile: ")


HIDE = """
import sys

class Hidden:
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden)
"""


@pytest.mark.parametrize("argv", [[], ["--resume", "run"]])
def test_what_wandb_refuses(argv, run_dir):
    """It does so when the run starts: nothing is written, and nothing is lost, before."""
    Path("run/result.json").touch()
    before = {path: path.read_bytes() for path in run_dir.iterdir()}
    words = [*argv, "--track", "--wandb-project-name", "a/b"]
    process = run_forked(ROOT / "ppo.py", *words, cwd=Path.cwd())
    assert process.returncode == 2
    (line,) = process.stderr.splitlines()
    assert line.startswith("error: --track: ") and "'a/b'" in line
    assert {path: path.read_bytes() for path in run_dir.iterdir()} == before
    assert not Path("runs").exists()


EXTRAS = [("ppo", "moviepy", "capture-video"), ("ppo", "wandb", "track")]
EXTRAS += [("appo_async", "envpool", "native-envs")]


@pytest.mark.parametrize(("name", "package", "flag"), EXTRAS)
def test_missing_package(name, package, flag, tmp_path_factory, tmp_path):
    """Python runs sitecustomize.py before the script; this one hides a package from it."""
    folder = tmp_path_factory.mktemp("hide")
    (folder / "sitecustomize.py").write_text(HIDE.format(package=package))
    process = run_script(ROOT / f"{name}.py", f"--{flag}", cwd=tmp_path, PYTHONPATH=str(folder))
    check_process(process, flag, f"pip install {package}")


NEEDS = [("ppo", "tyro"), ("ppo_atari", "cv2"), ("ppo_continuous", "mujoco")]
NEEDS += [("appo_async", "setproctitle")]
NEEDS += [("ppo_lstm", "ale_py"), ("ppo_multidiscrete", "vizdoom"), ("envpool_ppo", "envpool")]


@pytest.mark.parametrize(("name", "package"), NEEDS)
def test_missing_import(name, package, tmp_path_factory, tmp_path):
    folder = tmp_path_factory.mktemp("hide")
    (folder / "sitecustomize.py").write_text(HIDE.format(package=package))
    process = run_script(ROOT / f"{name}.py", cwd=tmp_path, PYTHONPATH=str(folder))
    assert process.returncode == 2
    (line,) = process.stderr.splitlines()
    assert line.startswith(f"error: No module named '{package}': `uv run ")
    assert ("Macs with ARM" in line) == (package == "envpool")  # elsewhere it cannot be installed
    assert not (tmp_path / "runs").exists()
