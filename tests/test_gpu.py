"""Training, resuming, evaluating on a real GPU (CUDA). Where there is none, all is skipped."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SCRIPTS, TINY, load_script
from test_runs import same

pytestmark = pytest.mark.skipif(not Path("/dev/nvidia0").exists(), reason="there is no GPU")

FLAGS = [(name,) for name in SCRIPTS if name != "ppo_multidiscrete"]
FLAGS += [("ppo_multidiscrete", "--env-id", "toy_envs:Panel-v0")]
FLAGS += [("ppo_atari", "--precision", "bf16"), ("ppo_lstm", "--precision", "bf16")]
FLAGS += [("appo_async", "--rnn", "gru", "--precision", "bf16")]
# long enough for graphs to be recorded and replayed before and after the resumption
GRAPHS = ("envpool_ppo", "--total-timesteps", "256")
FLAGS += [GRAPHS, (*GRAPHS, "--async-envs", "--precision", "bf16")]
FLAGS += [(*GRAPHS, "--no-cuda-graphs"), (*GRAPHS, "--target-kl", "1e-9", "--anneal-clip-coef")]


def run_on_gpu(run_dir: str, name: str, *flags: str) -> tuple[dict, list[int]]:
    """Train, resume and evaluate; returns the checkpoint, and how often graphs were used."""
    words = []
    for key, value in (TINY[name] | {"run_dir": run_dir, "eval_episodes": 1}).items():
        flag = "--" + key.replace("_", "-")
        words += [flag] if value is True else [flag, str(value)]
    words += ["--device", "cuda", *flags]
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": os.environ["ALL_GPUS"], "OMP_NUM_THREADS": "1"}
    environ["PYTHONPATH"] = os.pathsep.join((str(ROOT / "tests"), environ.get("PYTHONPATH", "")))
    driver = [sys.executable, ROOT / "tests/gpu_driver.py", name, *words]
    process = subprocess.run(driver, env=environ, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("device cuda,") == 2, process.stdout
    assert "score " in process.stdout
    run = load_script(name).load("resume", run_dir)
    assert all(tensor.isfinite().all() for tensor in run["agent"].values())
    return run, [int(word) for word in process.stdout.splitlines()[-1].split()]


@pytest.mark.parametrize("flags", FLAGS, ids=" ".join)
def test_twice_the_same_run(flags, tmp_path, monkeypatch):
    """Bit for bit, as --torch-deterministic promises."""
    monkeypatch.chdir(tmp_path)
    (one, graphs), (two, _) = (run_on_gpu(run_dir, *flags) for run_dir in ("one", "two"))
    keys = ("agent", "optimizer", "rng", "normalizer", "returns")
    assert [key for key in keys if not same(one.get(key), two.get(key))] == []
    if flags[: len(GRAPHS)] == GRAPHS:
        recorded, replayed = graphs
        used = "--no-cuda-graphs" not in flags
        assert bool(recorded) == bool(replayed > 100) == used


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_graphs_change_no_result(precision, tmp_path, monkeypatch):
    """What is recorded once takes in what changes: the data, the learning rate, the clip range."""
    monkeypatch.chdir(tmp_path)
    flags = (*GRAPHS, "--precision", precision, "--anneal-clip-coef", "--learning-rate", "0.001")
    (graphs, _), (eager, _) = (
        run_on_gpu(run_dir, *flags, flag)
        for run_dir, flag in (("graphs", "--cuda-graphs"), ("eager", "--no-cuda-graphs"))
    )
    assert graphs["returns"] == eager["returns"]
    # Adam divides by the size of gradients, of which some are rounding alone
    torch.testing.assert_close(graphs["agent"], eager["agent"], rtol=0, atol=3e-4)


def test_a_gradient_that_is_not_finite_is_found_after_the_replays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = (*GRAPHS, "--learning-rate", "1", "--max-grad-norm", "1e30", "--vf-coef", "1e9")
    with pytest.raises(AssertionError, match="the gradient is not finite after step"):
        run_on_gpu("run", *flags)
