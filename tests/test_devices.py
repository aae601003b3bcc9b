"""Training, resuming, evaluating on another device than the CPU: simulated, for want of a GPU."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SCRIPTS, TINY, load_script, run_forked, source_of
from test_runs import same_state, scalars

FLAGS = [(name,) for name in SCRIPTS]
FLAGS += [("ppo_atari", "--precision", "bf16"), ("appo_async", "--precision", "bf16")]
FLAGS += [("appo_async", "--rnn", "gru"), ("envpool_ppo", "--async-envs")]
# lines of ppo.py that forget where tensors are
FORGOTTEN = [
    ("action.cpu().numpy()", "action.numpy()"),
    ("rewards = torch.zeros(shape, device=device)", "rewards = torch.zeros(shape)"),
    ("dtype=dtype, device=device)", "dtype=dtype)"),
    ("agent = Agent(envs, args).to(device)\n    # [core 3]", "agent = Agent(envs, args)\n    #"),
]


def run_on(device: str, name: str, *flags: str) -> subprocess.CompletedProcess:
    """Train, resume and evaluate on a device, in a folder of its name."""
    words = []
    for key, value in (TINY[name] | {"run_dir": "run", "eval_episodes": 1}).items():
        flag = "--" + key.replace("_", "-")
        words += [flag] if value is True else [flag, value]
    Path(device).mkdir(exist_ok=True)
    driver = ROOT / "tests/simulated_device.py"
    return run_forked(driver, name, device, *words, *flags, cwd=Path.cwd() / device)


def outcome(device: str) -> tuple:
    result = json.loads(Path(device, "run/result.json").read_text())
    del result["seconds"], result["sps"]
    return result, scalars(f"{device}/run")


@pytest.mark.parametrize("flags", FLAGS, ids=" ".join)
def test_the_run_of_the_cpu_on_another_device(flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script, devices = load_script(flags[0]), ("cpu", "simulated")
    for device in devices:
        process = run_on(device, *flags)
        assert process.returncode == 0, process.stderr
        assert f"device {device}," in process.stdout
    cpu, simulated = (script.load("resume", f"{device}/run") for device in devices)
    if flags[0] == "ppo_lstm":
        torch.testing.assert_close(cpu["agent"], simulated["agent"], rtol=0, atol=1e-6)
    else:
        assert same_state(cpu, simulated)
        assert outcome("cpu") == outcome("simulated")


@pytest.mark.parametrize("old, new", FORGOTTEN, ids=[old for old, _ in FORGOTTEN])
def test_what_a_gpu_refuses_is_refused(old, new, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = source_of("ppo")
    assert old in source
    for device, code in (("cpu", 0), ("simulated", 1)):
        Path(device).mkdir()
        Path(device, "ppo.py").write_text(source.replace(old, new))
        process = run_on(device, "ppo")
        assert process.returncode == code, process.stderr
    assert "RuntimeError" in process.stderr
