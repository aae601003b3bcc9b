"""Steps per second beside other implementations, and beside what the machine allows.

    python benchmarks/throughput.py                    # the main cases: 45 minutes
    python benchmarks/throughput.py --quick            # once, shorter, nothing written: 5 minutes
    python benchmarks/throughput.py --only bf16        # what has this in its name or task
    python benchmarks/throughput.py --sizes            # 1 to 64 environments: 20 minutes a round
    python benchmarks/throughput.py --scaling          # Breakout by kind of environment: an hour
    python benchmarks/throughput.py --appo             # appo_async.py, Sample Factory: 100 minutes
    python benchmarks/throughput.py --sampler          # its sampler, pure simulation: 20 minutes
    python benchmarks/throughput.py --native           # EnvPool in its workers: 15 minutes
    python benchmarks/throughput.py --appo-sizes       # 8 to 64 environments a worker: 30 minutes

Ours and the peer train the same thing with the same hyperparameters in turn, each in a process of
its own, the peer in an environment of its own that is made here. What counts is the ratio within a
round, since this hour and the next differ by more than two programs do. Set-up, compilation and the
first updates are left out. The bound is what one process would reach if it did nothing but play,
infer and learn, one after the other, at the rates that were measured in the same run:
1 / (1 / environments + 1 / inference + epochs / training). For appo_async.py, which uses all cores,
each rate is that of as many processes as cores doing this work at once (benchmarks/appo_parts.py).
Medians go to results/speed.csv, those of --scaling to results/scaling.csv. Each row takes the place
of the one of the same name: on another machine, name another file with --out.

Sample Factory runs in two ways: with appo_async.py's network and settings ("sample_factory"), and
with those that its examples choose ("sample_factory_own"); benchmarks/peers says what these are.
"""

import argparse
import contextlib
import dataclasses
import importlib
import io
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

PEERS = {
    "sb3": [
        *("torch==2.13.0", "stable-baselines3==2.9.2", "gymnasium[atari,mujoco]==1.4.0"),
        *("ale-py==0.12.1", "mujoco==4.0.0", "opencv-python-headless==5.0.0.93"),
    ],
    "sample_factory": [
        *("torch==2.13.0", "sample-factory==2.1.1", "gymnasium[mujoco]==0.29.1", "mujoco<2.5"),
        *("vizdoom<2.0", "setuptools<81", "ale-py==0.10.2"),
    ],
}
BF16, COMPILE, ASYNC = ["--precision", "bf16"], ["--compile"], ["--vector-mode", "async"]
HALVES = ["--async-envs"]
TWO_WORKERS = ["--num-workers", "2", "--envs-per-worker"]
DOOM = ["--env-id", "VizdoomBasic-v1", "--rnn", "gru", "--reward-scale", "0.01"]
PEER_TASKS = {"Breakout": "breakout", "VizdoomBasic": "doom_basic"}  # Sample Factory's names


EIGHT, SIMULATION = "8 a worker", "pure simulation"  # no programs, but what others are held against
ALONE = {
    "sampler": "appo_async.py, the sampler alone,",
    "native": "EnvPool in appo_async.py's workers, alone,",
}


@dataclasses.dataclass
class Case:
    script: str
    task: str  # for the reader
    num_envs: int
    flags: list[str] = dataclasses.field(default_factory=list)
    steps: int = 4096  # timed, after a quarter of them
    peer: str = "sb3"
    group: str = "main"  # or quick as well, sizes, appo, appo_sizes, or one of ALONE
    processes: int = 1  # of torchrun, with one thread each

    @property
    def name(self) -> str:
        start = ["torchrun", "--nproc-per-node", str(self.processes)] if self.processes > 1 else []
        if self.group in ALONE:
            return " ".join([ALONE[self.group], *self.flags])
        return " ".join([*start, f"{self.script}.py", *self.flags])


def cases() -> list[Case]:
    # Sample Factory's batch of 256 from rollouts of 32, seen once
    one_epoch = ["--num-steps", "32", "--num-minibatches", "1", "--update-epochs", "1"]
    found = [
        Case("ppo", "CartPole", 4, steps=81920, group="quick"),
        Case("ppo", "CartPole", 4, COMPILE, steps=81920),
        Case("ppo_shared", "CartPole", 4, steps=81920),
        Case("ppo_continuous", "HalfCheetah", 1, steps=20480, group="quick"),
        Case("ppo_continuous", "HalfCheetah", 1, COMPILE, steps=20480),
        Case("ppo_atari", "Breakout", 8, group="quick"),
        Case("ppo_atari", "Breakout", 8, ASYNC),
        Case("ppo_atari", "Breakout", 8, BF16),
        Case("ppo_atari", "Breakout", 8, ASYNC + BF16),
        Case("ppo_atari", "Breakout", 8, BF16 + COMPILE),
        Case("ppo_distributed", "Breakout", 8),
        Case("ppo_distributed", "Breakout", 8, processes=2),
        Case("ppo_distributed", "Breakout", 8, BF16),
        Case("ppo_distributed", "Breakout", 8, BF16, processes=2),
        Case("envpool_ppo", "Breakout", 8),
        Case("envpool_ppo", "Breakout", 8, BF16, group="quick"),
        Case("envpool_ppo", "Breakout", 8, HALVES + BF16),
        Case("envpool_ppo", "Breakout", 8, BF16 + COMPILE),
        Case("envpool_ppo", "Breakout", 8, HALVES + BF16 + COMPILE),
    ]
    # an environment for each of num_envs; Sample Factory has as many workers with as many each
    sizes = [("Breakout", n, flags) for n in (8, 16) for flags in ([], ["--native-envs"])]
    sizes.append(("VizdoomBasic", 8, DOOM))
    for peer in ("sample_factory", "sample_factory_own"):
        for (task, num_envs, flags), precision in itertools.product(sizes, ([], BF16)):
            flags = [*flags, *TWO_WORKERS, str(num_envs // 2), *precision]
            found.append(Case("appo_async", task, num_envs, flags, 40960, peer, "appo"))
    # one process, and one that uses EnvPool's threads, with the same batch
    found += [
        Case("ppo_atari", "Breakout", 8, BF16 + one_epoch, 16384, "sample_factory", "appo"),
        Case("envpool_ppo", "Breakout", 8, BF16 + one_epoch, 16384, "sample_factory", "appo"),
    ]
    for each in (8, 16, 32, 64):
        flags = [*TWO_WORKERS, str(each), *BF16]
        found.append(Case("appo_async", "Breakout", 2 * each, flags, 98304, EIGHT, "appo_sizes"))
    for part, total in itertools.product(ALONE, (8, 16, 32, 64)):
        flags = [*TWO_WORKERS, str(total // 2)]
        found.append(Case("appo_async", "Breakout", total, flags, 0, SIMULATION, part))
    # the sizes that main has not; 64 HalfCheetahs fill batches of 131,072 steps
    found += [Case("ppo", "CartPole", n, steps=40960, group="sizes") for n in (1, 8, 16, 64)]
    for n, steps in ((4, 20480), (8, 20480), (16, 20480), (64, 262144)):
        found.append(Case("ppo_continuous", "HalfCheetah", n, steps=steps, group="sizes"))
    found += [Case("ppo_atari", "Breakout", n, BF16, group="sizes") for n in (1, 4, 16, 64)]
    found.append(Case("ppo_atari", "Breakout", 64, group="sizes"))  # 8 minutes a round
    return found


def arguments(case: Case):
    """The script as a module, and its arguments as the command line would give them."""
    script = importlib.import_module(case.script)
    return script, script.tyro.cli(script.Args, args=flags_of(case))


def flags_of(case: Case) -> list[str]:
    """Flags of ours, on the CPU as the peers.

    appo_async.py has no --num-envs: so many workers, so many environments in each.
    """
    own = case.script == "appo_async"
    sizes = case.flags if own else [*case.flags, "--num-envs", str(case.num_envs)]
    return [*sizes, "--device", "cpu"]


def batch_of(args) -> int:
    """The samples of an update."""
    return args.batch_size if hasattr(args, "num_workers") else args.num_envs * args.num_steps


def peer_python(peer: str) -> str:
    """The interpreter of an environment with a peer, made at the first call."""
    folder = ROOT / "benchmarks" / f".venv-{peer}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        print(f"installing {peer} in {folder.relative_to(ROOT)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        for packages in (PEERS[peer][:1], PEERS[peer]):  # torch first: the others must take it
            subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
        (folder / "complete").touch()
    return str(python)


def tree_memory(pid: int, kind: str = "Pss") -> int:
    """Megabytes of a process and its descendants; what they share is counted once.

    kind: Pss, or Pss_Shmem for what is in shared memory only.
    """
    total, pids = 0, [pid]
    while pids:
        pid = pids.pop()
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += int(rollup.split(f"{kind}:")[1].split()[0])
            for task in Path(f"/proc/{pid}/task").iterdir():
                pids += map(int, (task / "children").read_text().split())
        except (OSError, IndexError):
            continue  # it has just ended
    return total // 1024


def time_ours(case: Case) -> dict:
    """Run a script as a user does; steps/s, memory in MB, seconds from the start to an update."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, args = arguments(case)
    batch = batch_of(args)
    warm, timed = (max(2, round(steps / batch)) for steps in (case.steps / 4, case.steps))
    with tempfile.TemporaryDirectory() as folder:
        total = ["--total-timesteps", str((warm + timed) * batch), "--eval-episodes", "0"]
        command, env = [sys.executable], dict(os.environ)
        if case.processes > 1:
            command += ["-m", "torch.distributed.run", "--nproc-per-node", str(case.processes)]
            env["OMP_NUM_THREADS"] = "1"
        command += [str(ROOT / f"{case.script}.py"), *flags_of(case), *total]
        command += ["--run-dir", f"{folder}/run"]
        start, memory, shared = time.time(), 0, 0
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, env=env, **pipes)
        while process.poll() is None:
            memory = max(memory, tree_memory(process.pid))
            if case.group == "appo_sizes":
                shared = max(shared, tree_memory(process.pid, "Pss_Shmem"))
            time.sleep(2)
        if process.returncode:
            sys.exit(process.stderr.read().decode())
        events = EventAccumulator(f"{folder}/run").Reload().Scalars("charts/SPS")
    first, last = (next(e for e in events if e.step >= warm * batch), events[-1])
    # seconds since the start of training, from the average speed up to that step
    seconds = last.step / last.value - first.step / first.value
    startup = events[0].wall_time - start
    found = {"ours": (last.step - first.step) / seconds, "memory": memory, "startup": startup}
    if case.group == "appo_sizes":
        script, args = arguments(case)
        found |= {"shared": shared, "predicted": round(script.shared_megabytes(args) / 1.048576)}
    return found


def answer_of(command: list[str]) -> str:
    """The last line that a program prints. What it warns of is shown only if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout.splitlines()[-1]


def time_peer(case: Case) -> float:
    """The peer's steps/s on the same task, with the same batch and as many passes over it."""
    _, args = arguments(case)
    batch = batch_of(args)
    warm, timed = (max(2, round(steps / batch)) * batch for steps in (case.steps / 4, case.steps))
    peer, own = case.peer.removesuffix("_own"), case.peer.endswith("_own")
    words = [case.script, case.num_envs, warm, timed]
    if peer == "sample_factory":
        words = [PEER_TASKS[case.task], max(15, case.steps / 450), "own" if own else "equal"]
        words += ["--num_workers=2", f"--num_envs_per_worker={case.num_envs // 2}"]
    command = [peer_python(peer), str(ROOT / f"benchmarks/peers/peer_{peer}.py")]
    command += map(str, words)
    return float(answer_of(command).split()[-1])


def rate(function, seconds: float) -> float:
    """Calls per second, after a few that do not count."""
    for _ in range(3):
        function()
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        function()
        calls += 1
    return calls / (time.perf_counter() - start)


def measure_parts(case: Case, seconds: float) -> dict:
    """Steps/s of the environments alone and of inference alone; samples/s of training alone."""
    script, args = arguments(case)  # before PyTorch, which it may tell how long threads spin
    import torch

    device = script.pick_device(args)
    envs, obs = script.make_envs(args, args.num_envs, args.seed)
    slices = getattr(envs, "slices", [slice(0, args.num_envs)])
    chosen = [envs.action_space.sample() for _ in range(64)]

    def play() -> None:
        actions = chosen.pop()
        chosen.insert(0, actions)
        if len(slices) == 1:
            envs.step(actions)
            return
        for p, here in enumerate(slices):
            envs.send(actions[here], p)
        for p in range(len(slices)):
            envs.recv(p)

    agent = script.Agent(envs, args).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-9, fused=True)
    judge = agent.get_action_and_value
    if args.compile:
        judge = torch.compile(judge, dynamic=False)
    minibatch = args.num_envs * args.num_steps // args.num_minibatches
    few = torch.as_tensor(obs[slices[0]])
    many = torch.as_tensor(obs).repeat_interleave(-(-minibatch // len(obs)), 0)[:minibatch]
    actions = torch.as_tensor(envs.action_space.sample()[:1]).expand(
        minibatch, *chosen[0].shape[1:]
    )

    @torch.inference_mode()
    def infer() -> None:
        judge(few)

    def learn() -> None:
        _, logprob, entropy, value = judge(many, actions)
        optimizer.zero_grad()
        (logprob.mean() + entropy.mean() + value.mean()).backward()
        torch.nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()

    parts = {"environments": args.num_envs * rate(play, seconds)}
    parts["inference"] = len(few) * rate(infer, seconds)
    parts["training"] = minibatch * rate(learn, seconds)
    envs.close()
    return {name: round(value) for name, value in parts.items()} | {"epochs": args.update_epochs}


def parts_of(case: Case, seconds: float, what: str = "bound") -> dict:
    """measure_parts in a process of its own: a library's threads outlive what used them."""
    words = [sys.executable, __file__, "--parts", case.script, str(case.num_envs), str(seconds)]
    if case.script == "appo_async":
        words = [sys.executable, str(ROOT / "benchmarks/appo_parts.py"), what, str(seconds)]
    pairs = answer_of([*words, *case.flags]).split()
    return {name: float(value) for name, value in (pair.split("=") for pair in pairs)}


def compare(group: list[Case], rounds: int, seconds: float):
    """Yield the rows of results/speed.csv of cases that have one task and number of environments.

    A round is every peer, ours in turn, every peer again; what counts is the ratio to a peer's
    mean. What is held against two peers is timed once.
    """
    found: list[list[dict]] = [[] for _ in group]
    peers = {case.peer: case for case in reversed(group)}  # as the first of its cases
    for _ in range(rounds):
        before, results = {peer: time_peer(case) for peer, case in peers.items()}, {}
        for case in group:
            if case.name not in results:
                results[case.name] = time_ours(case) | parts_of(case, seconds)
        theirs = {peer: (before[peer] + time_peer(case)) / 2 for peer, case in peers.items()}
        for case, kept in zip(group, found, strict=True):
            kept.append(held_against(theirs[case.peer], results[case.name]))
            report(case, kept[-1])
    for case, results in zip(group, found, strict=True):
        yield row_of(case, results)


def compare_sizes(group: list[Case], rounds: int, seconds: float):
    """Yield rows: more environments in a worker beside the least, in the same round."""
    if group[0].num_envs != 16:
        sys.exit(f"error: --only leaves out {EIGHT}, which the others are held against")
    found: list[list[dict]] = [[] for _ in group]
    for _ in range(rounds):
        for case, kept in zip(group, found, strict=True):
            new = time_ours(case) | parts_of(case, seconds)
            least = new if case is group[0] else found[0][-1]
            kept.append(held_against(least["ours"], new))
            report(case, kept[-1])
    for case, results in zip(group, found, strict=True):
        yield row_of(case, results)


def compare_alone(group: list[Case], rounds: int, seconds: float):
    """Yield rows: a part of appo_async.py that only plays, between two pure simulations."""
    for case in group:
        found = []
        for _ in range(rounds):
            before = parts_of(case, 5 * seconds, "simulation")["environments"]
            new = {"ours": parts_of(case, 5 * seconds, case.group)[case.group]}
            after = parts_of(case, 5 * seconds, "simulation")["environments"]
            new["environments"] = new["bound"] = (before + after) / 2
            found.append(held_against(new["bound"], new))
            report(case, found[-1])
        yield row_of(case, found)


def held_against(theirs: float, new: dict) -> dict:
    """Add to a measurement its ratio to the peer's, and its share of the bound."""
    if "training" in new:
        playing = 1 / new["environments"] + 1 / new["inference"]
        new = new | {"bound": 1 / (playing + new["epochs"] / new["training"])}
    ratios = {"ratio": new["ours"] / theirs, "share": new["ours"] / new["bound"]}
    return new | {"theirs": theirs} | ratios


def report(case: Case, new: dict) -> None:
    print(
        f"{case.name}, {case.task}, {case.num_envs}: {new['ours']:,.0f} steps/s, "
        f"{new['ratio']:.2f} of {case.peer}, {new['share']:.0%} of the bound",
        flush=True,
    )


def row_of(case: Case, results: list[dict]) -> dict:
    """The row of results/speed.csv: medians of the rounds."""
    middle = {key: statistics.median(new[key] for new in results) for key in results[0]}
    ratios = [new["ratio"] for new in results]
    row = {"what": case.name, "task": case.task, "num_envs": case.num_envs}
    row |= {"ours": round(middle["ours"]), "peer": case.peer}
    row |= {"theirs": round(middle["theirs"])}
    row |= {"ratio": f"{middle['ratio']:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"}
    parts = ("environments", "inference", "training")
    row |= {name: round(middle[name]) if name in middle else "" for name in parts}
    row |= {"bound": round(middle["bound"]), "share": f"{middle['share']:.2f}"}
    whole = "startup" in middle  # a run of the script, not of a part
    row |= {"memory_mb": max(new["memory"] for new in results) if whole else ""}
    row |= {"startup_s": f"{middle['startup']:.1f}" if whole else "", "rounds": len(results)}
    memory = {"predicted_mb": "predicted", "shared_mb": "shared"}  # what processes share
    return row | {name: round(middle[key]) if key in middle else "" for name, key in memory.items()}


# a visit takes in what some environments have done, sends them on, and says how many they were
def visit_all(envs, act, obs):
    """Visit a vector environment, all of it at once."""
    obs = envs.reset()[0] if obs is None else obs

    def visit() -> int:
        nonlocal obs
        obs = envs.step(act(obs))[0]
        return len(obs)

    return visit


def visit_halves(envs, act, obs):
    """Visit one half of envpool_ppo.py's environments after the other."""
    turns = itertools.count()
    for p, here in enumerate(envs.slices):
        envs.send(act(obs[here]), p)

    def visit() -> int:
        p = next(turns) % 2
        obs = envs.recv(p)[0]
        envs.send(act(obs), p)
        return len(obs)

    return visit


def visit_first(pool, act, _):
    """Visit the environments of EnvPool that are ready first: its own asynchronous mode."""
    pool.async_reset()

    def visit() -> int:
        obs, *_, info = pool.recv()
        pool.send(act(obs), info["env_id"])
        return len(obs)

    return visit


def loop_rate(name: str, num_envs: int, threads: int, steps: float, flags=()) -> float:
    """Steps/s of a script's whole training loop, with a policy that looks at one pixel.

    One epoch; the first iteration is left out. PyTorch has one thread, which is enough for a pixel:
    a second one would spin for a while after every copy, on a core where a game could be played.
    """
    import torch
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    class Glance(torch.nn.Module):
        def __init__(self, envs, args):
            super().__init__()
            self.head = torch.nn.Linear(1, envs.single_action_space.n + 1)

        def get_value(self, x):
            return self.head(x[:, 0, 0, :1] / 255)[:, -1]

        def get_action_and_value(self, x, action=None):
            *logits, value = self.head(x[:, 0, 0, :1] / 255).unbind(-1)
            log_pi = torch.stack(logits, -1).log_softmax(-1)
            if action is None:
                action = log_pi.exp().multinomial(1).squeeze(-1)
            logprob = log_pi.gather(-1, action.unsqueeze(-1)).squeeze(-1)
            return action, logprob, -(log_pi.exp() * log_pi).sum(-1), value

    script, args = arguments(Case(name, "Breakout", num_envs, list(flags)))
    plain = script.Agent, script.TORCH_THREADS
    script.Agent, script.TORCH_THREADS = Glance, 1
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"num_envs": num_envs, "num_threads": threads, "eval_episodes": 0}
        sizes |= {"update_epochs": 1, "run_dir": folder}
        batch = num_envs * args.num_steps
        sizes["total_timesteps"] = batch * (1 + max(2, round(steps / batch)))
        with contextlib.redirect_stdout(io.StringIO()):
            script.train(dataclasses.replace(args, **sizes))
        first, *_, last = EventAccumulator(folder).Reload().Scalars("charts/SPS")
    script.Agent, script.TORCH_THREADS = plain
    torch.set_num_threads(script.TORCH_THREADS)
    return (last.step - first.step) / (last.step / last.value - first.step / first.value)


KINDS = {  # of vector environments: smallest and largest number, and whether it has threads
    "ppo_atari.py": (1, 256, False),
    "ppo_atari.py --vector-mode async": (1, 256, False),
    "ale-py's vector environment": (1, 256, True),
    "EnvPool": (1, 256, True),
    "EnvPool, whichever half is ready": (2, 256, True),
    "envpool_ppo.py": (1, 256, True),
    "envpool_ppo.py --async-envs": (2, 256, True),
}


def scaling_row(kind: str, n: int, threads: int, seconds: float) -> dict:
    """A row of results/scaling.csv: Breakout, n games, stepped in every way that it has by turns.

    memory_mb is what the games add to this process and those that it starts.
    """
    importlib.import_module("ppo_atari")  # before PyTorch, whose spins it shortens beside processes
    import ale_py
    import envpool
    import gymnasium as gym
    import numpy as np
    import torch

    gym.register_envs(ale_py)
    bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    script, args = arguments(Case("ppo_atari", "Breakout", 8, BF16 if bf16 else []))
    script.pick_device(args)
    agent = script.Agent(argparse.Namespace(single_action_space=gym.spaces.Discrete(4)), args)

    def at_random(obs):
        return np.random.randint(0, 4, len(obs)).astype(np.int32)

    @torch.inference_mode()
    def by_policy(obs):
        return agent.get_action_and_value(torch.as_tensor(obs))[0].numpy()

    def make():
        if kind == "ale-py's vector environment":
            return gym.make_vec("ALE/Breakout-v5", num_envs=n, num_threads=threads), None
        if kind.startswith("EnvPool"):
            sizes = {"batch_size": n // 2} if "half" in kind else {}
            pool = envpool.make_gymnasium("Breakout-v5", num_envs=n, num_threads=threads, **sizes)
            return pool, None
        name, *flags = kind.replace(".py", "").split()
        flags += ["--num-threads", str(threads)] if name == "envpool_ppo" else []
        script, args = arguments(Case(name, "Breakout", n, flags))
        return script.make_envs(args, n, 1)  # and their first observations

    ways, way = {"alone": at_random, "with_policy": by_policy}, "alone"
    visiting = visit_first if "half" in kind else visit_halves if HALVES[0] in kind else visit_all
    before = tree_memory(os.getpid())
    envs, obs = make()
    visit = visiting(envs, lambda obs: ways[way](obs), obs)
    played = visit()
    memory = tree_memory(os.getpid()) - before
    # Games that begin together end together, and are reset by all threads at once, so that they are
    # faster in their first second than later. They are not timed until they are out of step.
    while played < 200 * n:
        played += visit()
    rates = {"alone": [], "with_policy": [], "loop": []}
    for _ in range(3):
        for way in ways:
            rates[way].append(visit() * rate(visit, seconds))
        if kind.startswith("envpool_ppo.py"):
            steps = seconds * rates["alone"][-1]
            rates["loop"].append(loop_rate("envpool_ppo", n, threads, steps, kind.split()[1:]))
    envs.close()
    middle = {name: round(statistics.median(x)) if x else "" for name, x in rates.items()}
    return {"memory_mb": memory, "precision": args.precision} | middle


def scaling_rows(seconds: float, only: str):
    """Yield the rows of results/scaling.csv, each measured in a process of its own."""
    cores = len(os.sched_getaffinity(0))
    for n, kind in itertools.product((1, 2, 4, 8, 16, 32, 64, 128, 256), KINDS):
        smallest, largest, threaded = KINDS[kind]
        counts = sorted({1, cores}) if threaded else [1]
        wanted = smallest <= n <= largest and only in f"{kind}, Breakout, {n}"
        for threads in counts if wanted else ():
            words = [sys.executable, __file__, "--scaling-row", kind, n, threads, seconds]
            answer = answer_of(list(map(str, words)))
            row = {"kind": kind, "num_envs": n, "threads": threads}
            row |= json.loads(answer)
            print(row, flush=True)
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="times that both run, in turn")
    parser.add_argument("--only", default="", help="only cases with this in 'WHAT, TASK, NUMBER'")
    parser.add_argument("--out", type=Path, help="a CSV file for the medians (a new one, or older)")
    parser.add_argument("--quick", action="store_true", help="one short round, nothing written")
    parser.add_argument("--sizes", action="store_true", help="the cases that vary num_envs")
    parser.add_argument("--scaling", action="store_true", help="environments by kind and number")
    parser.add_argument("--appo", action="store_true", help="appo_async.py and Sample Factory")
    parser.add_argument("--sampler", action="store_true", help="its sampler and pure simulation")
    parser.add_argument("--native", action="store_true", help="EnvPool in its workers, the same")
    parser.add_argument("--appo-sizes", action="store_true", help="8 to 64 environments a worker")
    if sys.argv[1:2] == ["--parts"]:  # of one case, in this process
        script, num_envs, seconds, *flags = sys.argv[2:]
        parts = measure_parts(Case(script, "", int(num_envs), flags), float(seconds))
        print(*(f"{name}={value}" for name, value in parts.items()))
        return
    if sys.argv[1:2] == ["--scaling-row"]:
        kind, n, threads, seconds = sys.argv[2:]
        print(json.dumps(scaling_row(kind, int(n), int(threads), float(seconds))))
        return
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds: at least 1")
    if args.out and (args.quick or not args.out.parent.is_dir()):
        missing = f"there is no directory {args.out.parent}"
        parser.error(f"--out: {'--quick writes nothing' if args.quick else missing}")
    from record import code_hash, git, machine, read_csv, write_csv

    origin = {"commit": git("rev-parse", "--short", "HEAD").strip(), "machine": machine()}
    if args.scaling:
        path, key = args.out or ROOT / "results" / "scaling.csv", ("num_envs", "kind", "threads")
        rows = {tuple(row[k] for k in key): row for row in read_csv(path)}
        found = False
        for row in scaling_rows(0.1 if args.quick else 1.0, args.only):
            found = True
            rows[tuple(str(row[k]) for k in key)] = row | origin
            if not args.quick:
                write_csv(path, list(rows.values()), list(row | origin))
        if not found:
            parser.error(f"--only: no kind of environment has {args.only!r}")
        return
    path = args.out or ROOT / "results" / "speed.csv"
    key = ("what", "task", "num_envs", "peer")
    order = [(case.name, case.task, str(case.num_envs), case.peer) for case in cases()]
    if any(tuple(old.get(k) for k in key) not in order for old in read_csv(path)):
        parser.error(f"--out: {path} holds other rows than those of this program")
    special = [name for name in ("sizes", "appo", *ALONE, "appo_sizes") if getattr(args, name)]
    wanted = set(special) or ({"quick"} if args.quick else {"quick", "main"})
    groups: dict[tuple, list[Case]] = {}
    ways = dict.fromkeys(ALONE, compare_alone) | {"appo_sizes": compare_sizes}
    for case in cases():
        if args.only in f"{case.name}, {case.task}, {case.num_envs}" and case.group in wanted:
            case.steps //= 4 if args.quick else 1
            place = (case.group,) if case.group in ways else (case.task, case.num_envs)
            groups.setdefault(place, []).append(case)
    if not groups:
        parser.error(f"--only: no case of {', '.join(sorted(wanted))} has {args.only!r}")
    for group in groups.values():
        rounds, seconds = (1, 0.5) if args.quick else (args.rounds, 3.0)
        way = ways.get(group[0].group, compare)
        for row in way(group, rounds, seconds):
            if args.quick:
                continue
            script = re.search(r"\w+\.py", row["what"])[0]
            row |= {"blocks": code_hash((ROOT / script).read_text())} | origin
            old = [old for old in read_csv(path) if any(old[k] != str(row[k]) for k in key)]
            rows = sorted([*old, row], key=lambda r: order.index(tuple(str(r[k]) for k in key)))
            write_csv(path, rows, list(row))


if __name__ == "__main__":
    main()
