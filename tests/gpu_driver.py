"""What tests/test_gpu.py runs in a process of its own, which sees the GPU: conftest.py hides it.

    python gpu_driver.py SCRIPT FLAGS OF THE SCRIPT     # with --run-dir

Trains to half of --total-timesteps, resumes, trains to the end and evaluates. The last line says
how often a CUDA graph was recorded, and how often one was replayed.
"""

import importlib.util
import sys
from pathlib import Path

import torch

CALLS = {"capture_begin": 0, "replay": 0}


def count(name: str):
    method = getattr(torch.cuda.CUDAGraph, name)

    def counted(*args, **kwargs):
        CALLS[name] += 1
        return method(*args, **kwargs)

    setattr(torch.cuda.CUDAGraph, name, counted)


def load(name: str):
    path = Path(__file__).resolve().parent.parent / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    script = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


if __name__ == "__main__":
    name, *flags = sys.argv[1:]
    for method in CALLS:
        count(method)
    script = load(name)
    args = script.parse(flags)
    args.stop_at = args.total_timesteps // 2
    script.train(args)
    script.train(script.parse(["--resume", args.run_dir]))
    print(*CALLS.values())
