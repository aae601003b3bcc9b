"""What every test file uses: the scripts as modules, and as processes."""

import contextlib
import functools
import os
import subprocess
import sys
import types
from pathlib import Path

import gymnasium as gym
import pytest
import torch
from processes import Forked
from vizdoom import gymnasium_wrapper  # noqa: F401

# On a machine with a GPU as well: PyTorch forbids a fork to compute gradients after its parent has
# computed some there, and what runs in this process would go to the GPU.
if "ALL_GPUS" not in os.environ:  # for tests/test_gpu.py; xdist's workers load this file once more
    os.environ["ALL_GPUS"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("ppo", "ppo_shared", "ppo_atari", "ppo_continuous", "ppo_lstm", "ppo_multidiscrete")
SCRIPTS += ("envpool_ppo", "ppo_distributed", "appo_async")
# the smallest run of each script that goes through every line of training
TINY = {
    name: {"num_envs": 2, "num_steps": 8, "num_minibatches": 2, "total_timesteps": 32}
    for name in SCRIPTS
}
# one process: what its workers do, they do in a fixed order
TINY["appo_async"] = {"num_workers": 1, "envs_per_worker": 2, "num_splits": 1, "num_steps": 8}
TINY["appo_async"] |= {"minibatch_size": 8, "num_minibatches": 2, "total_timesteps": 32}
TINY["appo_async"] |= {"serial": True}

DOOMS = {id: dict(gym.registry[id].kwargs) for id in gym.registry if id.startswith("Vizdoom")}


def sized(name: str, sizes: dict) -> dict:
    """Arguments in the words of the script: num_envs are one worker's in appo_async.py.

    A batch is then what these environments do in num_steps, as it is in the other scripts.
    """
    if name != "appo_async":
        return sizes
    sizes = TINY[name] | sizes
    num_envs = sizes.pop("num_envs", sizes["envs_per_worker"])
    sizes["minibatch_size"] = num_envs * sizes["num_steps"] // sizes["num_minibatches"]
    return sizes | {"envs_per_worker": num_envs}


def source_of(name: str) -> str:
    return (ROOT / f"{name}.py").read_text()


@functools.cache
def code_of(name: str) -> types.CodeType:
    """A script, compiled: hundreds of tests load the same."""
    return compile(source_of(name), str(ROOT / f"{name}.py"), "exec")


def load_script(name: str, source: str | None = None) -> types.ModuleType:
    """Execute a script as a module, or a changed source in its place; __main__ does not run."""
    for env_id, kwargs in DOOMS.items():  # scripts change them, each in its own way
        gym.registry[env_id].kwargs = dict(kwargs)
    module = types.ModuleType(name)
    module.__file__ = str(ROOT / f"{name}.py")
    sys.modules[name] = module  # dataclasses look their module up there
    code = compile(source, module.__file__, "exec") if source else code_of(name)
    exec(code, module.__dict__)
    return module


def environment(**changes: str) -> dict[str, str]:
    """Of a process that the tests start; it finds their environments."""
    return os.environ | {"PYTHONPATH": str(ROOT / "tests"), "WANDB_MODE": "offline"} | changes


def run_script(*argv: object, cwd: Path, timeout: float = 120, **environ: str):
    """Run `python *argv` to its end; returns the completed process with its text output."""
    command = [sys.executable, *map(str, argv)]
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment(**environ),
        timeout=timeout,
        capture_output=True,
        text=True,
        check=False,
    )


def run_forked(*argv: object, cwd: Path, timeout: float = 120, **environ: str):
    """The same by a process that has what it imports already, which saves seconds."""
    if sys.platform != "linux":
        return run_script(*argv, cwd=cwd, timeout=timeout, **environ)
    process = Forked(argv, cwd, environment(**environ))
    try:
        stdout, stderr = process.communicate(timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(argv, process.returncode, stdout, stderr)


def with_mounts(setup: str) -> list[str]:
    """What comes before a command that sees the mounts made by this line of sh, it alone."""
    for flags in ("-m", "-rm"):
        command = ["unshare", flags, "sh", "-c", f'{setup} && exec "$@"', "sh"]
        with contextlib.suppress(OSError):
            if not subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
                return command
    pytest.skip("a mount namespace is not permitted here")


@pytest.fixture(params=SCRIPTS)
def script(request) -> types.ModuleType:
    """Each script of the family, freshly loaded."""
    return load_script(request.param)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Tests run side by side with other work: one thread, and no account or network."""
    torch.set_num_threads(1)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.syspath_prepend(str(ROOT / "tests"))
