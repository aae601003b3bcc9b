"""What appo_async.py is made of, each part alone: appo_parts.py WHAT SECONDS [FLAG ...].

    bound       environments, inference and learning, each in as many processes as there are cores,
                at the same time, since two busy cores are slower than two times one; inference
                with as many observations at once as a policy worker has in a short real run
    simulation  as many processes as workers that do nothing but step environments
    native      the same with --native-envs
    sampler     rollout workers, policy worker and shared memory as they are, with a network that
                costs nothing and a learner that only gives slots back

FLAGs are those of appo_async.py. Prints NAME=VALUE pairs, rates in steps (or samples) per second,
all processes together. benchmarks/throughput.py calls it, in a process of its own.
"""

import dataclasses
import functools
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from torch import nn

import appo_async as appo

COUNTS = "APPO_COUNTS"  # the environment variable that tells policy workers where to write
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


class Trivial(nn.Module):
    """Random actions, by way of a linear layer that sees 16 pixels."""

    bf16 = False

    def __init__(self, envs, args):
        super().__init__()
        self.heads = nn.Linear(16, 1 + int(envs.single_action_space.n))

    def initial_state(self, num_envs):
        return self.heads.weight.new_zeros(num_envs, 0)

    def get_action_and_value(self, x, hidden, done):
        x = x.flatten(1)
        output = self.heads(x[:, :: x.shape[1] // 16][:, :16] / 255.0)
        log_pi = output[:, 1:].log_softmax(-1)
        action = torch.randint(log_pi.shape[1], (len(x), 1))
        return action[:, 0], log_pi.gather(1, action)[:, 0], None, output[:, 0], hidden


def rate(function, seconds: float, barrier=None) -> float:
    """Calls per second, after a few that do not count; at a barrier, processes begin at once."""
    for _ in range(3):
        function()
    if barrier:
        barrier.wait()
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        function()
        calls += 1
    return calls / (time.perf_counter() - start)


def simulation(args, worker: int, seconds: float, barrier) -> dict:
    """A rollout worker's environments, one split after the other, with actions drawn before."""
    splits = []
    for split in range(worker * args.num_splits, (worker + 1) * args.num_splits):
        seed = args.seed + split * args.envs_per_split
        envs, _ = appo.make_envs(args, args.envs_per_split, seed)
        n = envs.single_action_space.n
        splits.append((envs, np.random.randint(0, n, (64, args.envs_per_split))))
    turn = 0

    def play() -> None:
        nonlocal turn
        turn += 1
        for envs, actions in splits:
            envs.step(actions[turn % 64])

    found = {"environments": args.envs_per_worker * rate(play, seconds, barrier)}
    barrier.wait()  # nobody closes while others measure
    for envs, _ in splits:
        envs.close()
    return found


def counting_part(args, shared, member: int, role: str, index: int, parent: int) -> None:
    """appo_async.run_part in a process that counts how many observations it answers at once."""
    sizes, judge = [], appo.Agent.get_action_and_value

    def counted(self, x, *words):
        sizes.append(len(x))
        return judge(self, x, *words)

    appo.Agent.get_action_and_value = counted
    try:
        appo.run_part(args, shared, member, role, index, parent)
    finally:
        if role == "policy":
            Path(os.environ[COUNTS], f"{index}.sizes").write_text(" ".join(map(str, sizes)))


def batch_that_occurs(args) -> int:
    """The mean number of observations in a policy worker's forward pass, in eight updates."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ[COUNTS], appo.run_part = folder, counting_part
        short = {"stop_at": 8 * args.batch_size, "eval_episodes": 0, "run_dir": f"{folder}/run"}
        appo.train(dataclasses.replace(args, **short))
        sizes = [int(n) for path in Path(folder).glob("*.sizes") for n in path.read_text().split()]
    return round(sum(sizes) / len(sizes))


def network(batch: int, args, worker: int, seconds: float, barrier) -> dict:
    """Inference for a batch of that size, and one epoch over one minibatch, as in an update."""
    device = appo.pick_device(args)
    envs, obs = appo.make_envs(args, 1, args.seed)
    agent = appo.Agent(envs, args).to(device)
    envs.close()
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-9, eps=1e-5, fused=True)
    acting = appo.Agent(envs, args).to(device)
    if acting.bf16:
        acting.network.bfloat16()

    def some(rows: int):
        return torch.as_tensor(obs).expand(rows, *obs.shape[1:]).contiguous(), torch.zeros(rows)

    few, few_done = some(batch)
    few_hidden = acting.initial_state(batch)
    columns = args.minibatch_size // args.num_steps
    # an update of one minibatch also judges what the bootstrap needs, in the same pass
    rows = (args.num_steps + (args.num_minibatches == 1)) * columns
    many, many_done = some(rows)
    many_hidden, actions = agent.initial_state(columns), torch.zeros(rows, dtype=torch.int64)
    judge = agent.get_action_and_value
    if args.compile:
        judge = torch.compile(judge, dynamic=False)

    @torch.inference_mode()
    def infer() -> None:
        acting.get_action_and_value(few, few_hidden, few_done)

    def learn() -> None:
        _, logprob, entropy, value, _ = judge(many, many_hidden, many_done, actions)
        optimizer.zero_grad()
        (logprob.mean() + entropy.mean() + value.mean()).backward()
        nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
        optimizer.step()

    return {
        "inference": batch * rate(infer, seconds, barrier),
        "training": args.minibatch_size * rate(learn, seconds, barrier),
    }


def part(results, function, *words) -> None:
    """One process of in_parallel."""
    torch.set_num_threads(1)
    results.put(function(*words))


def in_parallel(function, args, processes: int, seconds: float) -> dict:
    """Run a part in several processes at once; the sum of their rates."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(processes, timeout=300), context.Queue()
    members = [
        context.Process(target=part, args=(results, function, args, i, seconds, barrier))
        for i in range(processes)
    ]
    for member in members:
        member.start()
    found = [results.get(timeout=600) for _ in members]
    for member in members:
        member.join()
    return {name: sum(rates[name] for rates in found) for name in found[0]}


def sampler(args, seconds: float) -> dict:
    """Steps per second of everything but the network and the learning."""
    envs, obs = appo.make_envs(args, 1, args.seed)
    shared = appo.Shared(args, Trivial(envs, args), obs.shape[1:])
    envs.close()
    team = appo.Team(args, shared)
    x = shared.arrays()

    def give_back_until(condition) -> None:
        while not condition():
            team.wait()
            for split in range(args.total_splits):
                while x.consumed[split] < x.filled[split]:
                    x.consumed[split] += 1
                    shared.ring(split // args.num_splits)

    give_back_until(lambda: (x.filled > 0).all())  # every environment has started
    shared.seconds_waited.zero_()
    start, before = time.perf_counter(), x.asked.sum()
    give_back_until(lambda: time.perf_counter() - start > seconds)
    steps, passed = (x.asked.sum() - before) * args.envs_per_split, time.perf_counter() - start
    waits = shared.seconds_waited
    team.close()
    found = {"sampler": steps / passed}
    roles = {"rollout": waits[: args.num_workers], "policy": waits[args.num_workers : -1]}
    return found | {f"waiting_{role}": (w.mean() / passed).item() for role, w in roles.items()}


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    what, seconds, *flags = sys.argv[1:]
    args = appo.tyro.cli(appo.Args, args=flags)
    seconds = float(seconds)
    if what == "bound":
        batch = batch_that_occurs(args)
        found = in_parallel(simulation, args, CORES, seconds)
        found |= in_parallel(functools.partial(network, batch), args, CORES, seconds)
        found |= {"epochs": args.update_epochs, "batch": batch}
    elif what == "simulation":
        found = in_parallel(simulation, args, args.num_workers, seconds)
    elif what == "native":
        args = dataclasses.replace(args, native_envs=True)
        found = in_parallel(simulation, args, args.num_workers, seconds)
        found = {"native": found["environments"]}
    else:
        found = sampler(args, seconds)
    print(*(f"{name}={value:.3f}" for name, value in found.items()))
