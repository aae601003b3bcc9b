"""Steps per second beside Stable-Baselines3, in one run: `python benchmarks/speed.py [--rounds 5]`.

Both train PPO with the same hyperparameters on the same environments, in turn, each in a process of
its own and with its own best number of torch threads. What counts is the ratio within a round: this
machine and that one, and this minute and the next, differ by more than the two programs do. Set-up
and the first updates are left out. The medians go to results/speed.csv.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

CASES = {
    # name: (script, arguments, environments, steps before the clock starts, steps timed)
    "ppo.py, CartPole-v1, 4 environments": ("ppo", [], 4, 4096, 81920),
    "ppo.py --compile, CartPole-v1, 4 environments": ("ppo", ["--compile"], 4, 4096, 81920),
    "ppo_shared.py, CartPole-v1, 4 environments": ("ppo_shared", [], 4, 4096, 81920),
    "ppo_continuous.py, HalfCheetah-v4, 1 environment": ("ppo_continuous", [], 1, 4096, 20480),
    "ppo_atari.py, Breakout, 8 environments": ("ppo_atari", [], 8, 2048, 6144),
    "ppo_atari.py --precision bf16, Breakout, 8 environments": (
        "ppo_atari",
        ["--precision", "bf16"],
        8,
        2048,
        6144,
    ),
    "ppo_atari.py --vector-mode async --precision bf16, Breakout, 8 environments": (
        "ppo_atari",
        ["--vector-mode", "async", "--precision", "bf16"],
        8,
        2048,
        6144,
    ),
}


def time_ours(script: str, arguments: list[str], num_envs: int, warm: int, steps: int) -> float:
    """Run a script as a user does; steps/s between the log entries at `warm` and at the end."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tempfile.TemporaryDirectory() as folder:
        total = ["--total-timesteps", str(warm + steps), "--eval-episodes", "0"]
        command = [sys.executable, str(ROOT / f"{script}.py"), *arguments, *total]
        run = subprocess.run(
            [*command, "--run-dir", f"{folder}/run"], capture_output=True, text=True
        )
        if run.returncode:
            sys.exit(run.stderr)
        events = EventAccumulator(f"{folder}/run").Reload().Scalars("charts/SPS")
    timed = [event for event in events if event.step >= warm]
    first, last = timed[0], timed[-1]
    # seconds since the start of training, from the average speed up to that step
    return (last.step - first.step) / (last.step / last.value - first.step / first.value)


def time_peer(script: str, num_envs: int, warm: int, steps: int) -> float:
    """Stable-Baselines3 with the same hyperparameters, in this process; steps/s."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize

    atari, continuous = script == "ppo_atari", script == "ppo_continuous"
    num_steps, num_minibatches, num_epochs = (2048, 32, 10) if continuous else (128, 4, 4)
    learning_rate, clip = 3e-4 if continuous else 2.5e-4, 0.1 if atari else 0.2
    if atari:
        import ale_py  # noqa: F401

        env = VecFrameStack(make_atari_env("BreakoutNoFrameskip-v4", num_envs, seed=1), 4)
    else:
        torch.set_num_threads(1)
        env = make_vec_env("HalfCheetah-v4" if continuous else "CartPole-v1", num_envs, seed=1)
        env = VecNormalize(env) if continuous else env
    model = PPO(
        "CnnPolicy" if atari else "MlpPolicy",
        env,
        learning_rate=lambda progress: learning_rate * progress,
        n_steps=num_steps,
        batch_size=num_envs * num_steps // num_minibatches,
        n_epochs=num_epochs,
        clip_range=clip,
        clip_range_vf=clip,
        ent_coef=0.0 if continuous else 0.01,
        vf_coef=0.25,  # half of ours: its value loss has no 1/2
        seed=1,
        device="cpu",
    )
    model.learn(warm)
    start = time.perf_counter()
    model.learn(steps)
    return steps / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="times that both run, in turn")
    parser.add_argument("--only", default="", help="only the cases whose name contains this")
    parser.add_argument("--peer", nargs=4, help=argparse.SUPPRESS)  # one run of Stable-Baselines3
    args = parser.parse_args()
    if args.peer:
        print(time_peer(args.peer[0], *map(int, args.peer[1:])))
        return
    from record import git, machine, read_csv, write_csv

    path = ROOT / "results" / "speed.csv"
    for name, (script, arguments, *sizes) in CASES.items():
        if args.only not in name:
            continue
        ours, peer = [], []
        for _ in range(args.rounds):
            ours.append(time_ours(script, arguments, *sizes))
            command = [sys.executable, __file__, "--peer", script, *map(str, sizes)]
            peer.append(float(subprocess.check_output(command, text=True).split()[-1]))
            print(
                f"{name}: {ours[-1]:,.0f} / {peer[-1]:,.0f} = {ours[-1] / peer[-1]:.2f}", flush=True
            )
        ratios = [a / b for a, b in zip(ours, peer, strict=True)]
        row = {"what": name, "ours": round(statistics.median(ours))}
        row |= {"peer": round(statistics.median(peer)), "rounds": args.rounds}
        row |= {
            "ratio": f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        }
        row |= {"commit": git("rev-parse", "--short", "HEAD").strip(), "machine": machine()}
        rows = [old for old in read_csv(path) if old["what"] != name] + [row]
        columns = ["what", "ours", "peer", "ratio", "rounds", "commit", "machine"]
        write_csv(path, sorted(rows, key=lambda row: list(CASES).index(row["what"])), columns)


if __name__ == "__main__":
    main()
