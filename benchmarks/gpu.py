"""Steps per second on a GPU (CUDA): python benchmarks/gpu.py [--seconds 60] [--only graphs].

Each case is one process that trains on Breakout as a user would, until it is stopped. What counts
are the steps of --seconds, after a first rate has been shown; set-up and recording are left out.
"alone" is EnvPool by itself, with random actions: what a network that takes no time would reach.
Rows go to results/gpu.csv.
"""

import argparse
import math
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

from record import ROOT, machine, read_csv, write_csv

FIELDS = ["script", "flags", "steps_per_s", "seconds", "torch", "commit", "machine"]
BF16, EAGER, HALVES = "--precision bf16", "--no-cuda-graphs", "--async-envs"
EIGHT, FOUR = "--num-threads 8", "--num-threads 4"
CASES = [("alone", f"--num-envs {n} --num-threads {t}") for n in (8, 16) for t in (4, 8, 16)]
CASES += [
    ("envpool_ppo", BF16),
    ("envpool_ppo", f"{BF16} {EIGHT}"),
    ("envpool_ppo", f"{BF16} {FOUR}"),
    ("envpool_ppo", f"{BF16} {EIGHT} {EAGER}"),
    ("envpool_ppo", f"{BF16} {EIGHT} --num-envs 16 --num-steps 64"),
    ("envpool_ppo", f"{BF16} {FOUR} {HALVES}"),
    ("envpool_ppo", EIGHT),
    ("envpool_ppo", f"{EIGHT} {EAGER}"),
    ("ppo_atari", f"{BF16} --vector-mode async"),
    ("ppo_atari", BF16),
    ("envpool_ppo", f"{BF16} {EIGHT} --compile"),
]


def time_script(script: str, flags: str, seconds: float) -> tuple[float, float]:
    """Train for some seconds; steps per second of training, and the seconds that counted."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, ROOT / f"{script}.py", *flags.split(), "--device", "cuda"]
        command += ["--run-dir", f"{folder}/run", "--eval-episodes", "0"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for line in process.stdout:
            if "SPS" in line:
                break
        time.sleep(seconds + 1)
        process.send_signal(signal.SIGINT)
        process.communicate()
        if process.returncode:
            return math.nan, 0.0  # it has said why
        events = EventAccumulator(f"{folder}/run", size_guidance={"scalars": 0}).Reload()
        events = events.Scalars("charts/SPS")
    # seconds of training, from the average speed up to a step
    moments = [event.step / event.value for event in events]
    first = next(i for i, moment in enumerate(moments) if moment > moments[0] + 1)
    counted = moments[-1] - moments[first]
    return (events[-1].step - events[first].step) / counted, counted


def time_alone(flags: str, seconds: float) -> tuple[float, float]:
    """Let EnvPool play with random actions."""
    sys.path.insert(0, str(ROOT))
    import numpy as np
    import tyro

    import envpool_ppo

    args = tyro.cli(envpool_ppo.Args, args=flags.split())
    num_envs = args.num_envs
    envs, _ = envpool_ppo.make_envs(args, num_envs, args.seed)
    actions = np.random.default_rng(1).integers(0, 4, (1000, num_envs), dtype=np.int32)
    for t in range(300):
        envs.step(actions[t])
    steps, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        envs.step(actions[steps % 1000])
        steps += 1
    counted = time.perf_counter() - start
    return steps * num_envs / counted, counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--only", default="", help="cases with this in their flags")
    parser.add_argument("--commit", default="", help="where there is no repository to ask")
    parser.add_argument("--out", type=Path, default=ROOT / "results/gpu.csv")
    options = parser.parse_args()
    import torch

    where = f"{torch.cuda.get_device_name()}, {machine()}"
    for script, flags in (case for case in CASES if options.only in case[1]):
        if script == "alone":
            rate, counted = time_alone(flags, min(2, options.seconds))
        else:
            rate, counted = time_script(script, flags, options.seconds)
        print(f"{script:12} {flags:60} {rate:8,.0f} steps/s", flush=True)
        values = (script, flags, f"{rate:.0f}", round(counted), torch.__version__)
        row = dict(zip(FIELDS, (*values, options.commit, where), strict=True))
        write_csv(options.out, [*read_csv(options.out), row], FIELDS)


if __name__ == "__main__":
    main()
