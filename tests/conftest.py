"""What every test file uses: the scripts as modules, and as processes."""

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

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


def load_script(name: str, source: str | None = None) -> types.ModuleType:
    """Execute a script as a module, or a changed source in its place; __main__ does not run."""
    module = types.ModuleType(name)
    module.__file__ = str(ROOT / f"{name}.py")
    sys.modules[name] = module  # dataclasses look their module up there
    exec(compile(source or source_of(name), module.__file__, "exec"), module.__dict__)
    return module


def run_script(*argv: object, cwd: Path, timeout: float = 120, **environ: str):
    """Run `python *argv` to its end; returns the completed process with its text output."""
    command = [sys.executable, *map(str, argv)]
    env = os.environ | {"PYTHONPATH": str(ROOT / "tests"), "WANDB_MODE": "offline"} | environ
    return subprocess.run(
        command, cwd=cwd, env=env, timeout=timeout, capture_output=True, text=True, check=False
    )


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
