"""Processes that do nothing but save checkpoints, to be killed: see test_faults.py.

    python save_loop.py SCRIPT RUN_DIR

For each line on the standard input, fork a child that saves without end; say its process id and
wait for its end. Checkpoint number n holds a tensor that is n everywhere.
"""

import os
import sys

import torch
from conftest import load_script

SIZE = 500_000  # 2 MB: most of the time goes into writing


def save_forever(script, run_dir: str) -> None:
    args, step = script.Args(run_dir=run_dir), 0
    run = {"seconds": 0.0, "episodes": 0, "returns": [], "wandb_id": None}
    if hasattr(script, "connect"):  # a process saves what all of its group have
        script.connect(args, torch.device("cpu"))
    while True:
        step += 1
        agent = {"weight": torch.full((SIZE,), step)}
        script.save(args, run | {"global_step": step}, agent=agent, optimizer={})


if __name__ == "__main__":
    name, run_dir = sys.argv[1:]
    script = load_script(name)
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            save_forever(script, run_dir)
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print("ended", flush=True)
