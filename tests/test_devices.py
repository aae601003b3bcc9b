"""Training, resuming, evaluating on another device than the CPU: simulated, for want of a GPU."""

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, SCRIPTS, TINY, load_script, run_forked, source_of
from test_runs import same, same_state, scalars, train

FLAGS = [(name,) for name in SCRIPTS]
FLAGS += [("ppo_atari", "--precision", "bf16"), ("appo_async", "--precision", "bf16")]
FLAGS += [("appo_async", "--rnn", "gru"), ("envpool_ppo", "--async-envs")]
TRUNCATED = ("--env-id", "toy_envs:ClockTruncated-v0", "--bootstrap-truncated")
FLAGS += [("ppo", *TRUNCATED)]
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


# === A GPU that is not there: what its use begins with, and what needs none


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """PyTorch finds one GPU, and this process is on its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


def test_auto_is_a_gpu_where_the_network_is_large(gpu, script):
    small = script.SCRIPT in ("ppo", "ppo_shared", "ppo_continuous")
    device = script.pick_device(script.Args(torch_deterministic=False))
    assert device.type == ("cpu" if small else "cuda")


def test_repeatable_on_a_gpu(gpu, script, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "as it was")
    try:
        for wanted in (False, True):
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG")
            script.pick_device(script.Args(device="cuda", torch_deterministic=wanted))
            assert torch.are_deterministic_algorithms_enabled() == wanted
            assert (os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", "") == ":4096:8") == wanted
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True


def test_what_a_gpu_saved_is_read_without_one(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(script, "load", lambda *_: None)  # by train() here, once more
        patch.setattr(script, "gather", lambda mine: [mine], raising=False)  # ppo_distributed.py
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        train(script, "run")
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load("run/checkpoint.pt", weights_only=True)
    assert script.load("evaluate", "run")["global_step"] == 32


def test_random_state_of_a_gpu_is_saved(gpu, script, monkeypatch):
    states, found = [torch.arange(16, dtype=torch.uint8)], []
    monkeypatch.setattr(script, "gather", lambda mine: [mine], raising=False)  # ppo_distributed.py
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: states)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", found.extend)
    Path("run").mkdir()
    run = dict.fromkeys(("seconds", "episodes", "returns", "wandb_id"), 0)
    args = script.Args(run_dir="run")
    script.save(args, run | {"global_step": 0}, agent={}, optimizer={})
    network = SimpleNamespace(load_state_dict=lambda state: None)
    script.restore(script.load("resume", "run"), network, network)
    assert same(found, states)


def test_each_process_has_a_gpu_of_its_own(gpu, monkeypatch, capsys):
    script, chosen = load_script("ppo_distributed"), []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(script, "LOCAL_RANK", 3)
    script.pick_device(script.Args(device="cuda", torch_deterministic=False))
    assert chosen == [3]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        script.parse([])
    assert "2 processes need a GPU each, not 1: use --device cpu" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("has_bf16", [True, False])
def test_bf16_that_a_device_only_emulates_is_said(gpu, device, has_bf16, monkeypatch, capsys):
    script = load_script("ppo_atari")
    monkeypatch.setattr(script, "pick_device", lambda args: torch.device(device))
    there = lambda **_: has_bf16  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", there)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", there)
    script.open_run(script.Args(precision="bf16", run_dir="run"))[1].close()
    line = capsys.readouterr().out.splitlines()[1]
    assert line.startswith(f"device {device}, ")
    assert line.endswith("precision bf16") == has_bf16
    assert line.endswith("precision bf16, which this device lacks: fp32 is faster") != has_bf16
