"""How much faster are updates if freed memory stays? python benchmarks/freed_memory.py [--runs 6].

The files for images ask glibc to keep freed blocks (mallopt, under `# === Agent`). Without that it
gives those of every minibatch back to the system in some processes, and in others not: that depends
on what happens to lie at the end of its heap. So ppo_atari.py's update is timed here in a number of
processes, by turns with those lines and without, in the state in which training has it: games made,
and minibatches of 256. Of each process results/freed_memory.csv has the samples learned per second,
and the pages of 4 KB that the system cleared for a minibatch.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

from record import ROOT, git, machine, write_csv

FIELDS = ["precision", "threads", "memory", "samples_per_s", "pages", "commit", "machine"]
SECONDS = 3.0


def load(memory: str) -> types.ModuleType:
    """ppo_atari.py, as it is ("kept") or without the lines that keep memory ("default")."""
    source = (ROOT / "ppo_atari.py").read_text()
    if memory == "default":
        start = source.index('if sys.platform == "linux":')
        end = source.index("\n\n", start)
        assert source[start:end].count("mallopt") == 2
        source = source[:start] + source[end:]
    script = types.ModuleType("ppo_atari")
    script.__file__ = str(ROOT / "ppo_atari.py")
    sys.modules["ppo_atari"] = script  # where dataclass looks for it
    exec(compile(source, script.__file__, "exec"), script.__dict__)
    return script


def measure(memory: str, precision: str, threads: int) -> None:
    """Print samples per second and pages per minibatch."""
    script = load(memory)
    import torch

    torch.manual_seed(1)
    torch.set_num_threads(threads)
    args = script.Args(precision=precision, device="cpu")
    envs, _ = script.make_envs(args, args.num_envs, args.seed)
    agent = script.Agent(envs, args)
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-9, eps=1e-5, fused=True)
    obs = torch.randint(0, 255, (1024, 4, 84, 84), dtype=torch.uint8)
    actions = torch.randint(0, 4, (1024,))

    def update():
        mb_inds = torch.randperm(1024)[:256]
        _, logprob, entropy, value = agent.get_action_and_value(obs[mb_inds], actions[mb_inds])
        optimizer.zero_grad()
        (logprob.mean() + entropy.mean() + value.mean()).backward()
        torch.nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()

    for _ in range(5):
        update()
    count, start = 0, time.perf_counter()
    pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    while time.perf_counter() - start < SECONDS:
        update()
        count += 1
    seconds = time.perf_counter() - start
    pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - pages
    print(round(256 * count / seconds), round(pages / count), flush=True)
    os._exit(0)  # the games need no farewell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=6, help="processes of each kind")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        memory, precision, threads = args.one
        measure(memory, precision, int(threads))
    origin = {"commit": git("rev-parse", "--short", "HEAD").strip(), "machine": machine()}
    rows = []
    for precision in ("fp32", "bf16"):
        for threads in (1, 2):
            found = {"default": [], "kept": []}
            for _ in range(args.runs):
                for memory, kept in found.items():
                    command = [sys.executable, __file__, "--one", memory, precision, str(threads)]
                    words = subprocess.check_output(command, text=True).split()
                    row = [precision, threads, memory, *map(int, words[-2:]), *origin.values()]
                    rows.append(dict(zip(FIELDS, row, strict=True)))
                    kept.append(rows[-1]["samples_per_s"])
            text = ", ".join(f"{memory} {sorted(kept)}" for memory, kept in found.items())
            gain = statistics.median(found["kept"]) / statistics.median(found["default"])
            print(f"{precision}, threads {threads}: {text}: medians {gain:.2f}", flush=True)
    write_csv(ROOT / "results" / "freed_memory.csv", rows, FIELDS)


if __name__ == "__main__":
    main()
