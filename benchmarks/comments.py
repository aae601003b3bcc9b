"""How much faster is it, as the comments say? python benchmarks/comments.py [--rounds 9].

A comment in a script that says how much faster its line is stands below, with what the line does
and what would be there otherwise. Both are timed in turn, with sizes and number of threads as in
the file's defaults, and results/comments.csv has the medians (microseconds) and the ratio, with its
slowest and fastest round. Takes a minute on a machine that has nothing else to do.
"""

import argparse
import importlib
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

from record import ROOT, git, machine, write_csv

sys.path.insert(0, str(ROOT))

import numpy as np
import torch
from torch import nn

FIELDS = ["file", "comment", "what", "threads", "as_it_is", "otherwise", "ratio"]
FIELDS += ["commit", "machine"]
SECONDS = 0.15  # of each of the two, in a round
CLAIMS = []


def claim(file: str, comment: str, what: str, threads: int = 1):
    """Add a function that makes two others: what the file does, and what it could do instead."""

    def add(make):
        CLAIMS.append((file, comment, what, threads, make))
        return make

    return add


def made(name: str, **changed) -> nn.Module:
    """The agent of a script for its default environment."""
    script = importlib.import_module(name)
    args = script.Args(device="cpu", **changed)
    envs, _ = script.make_envs(args, 1, args.seed)
    envs.close()
    return script.Agent(envs, args)


def pixels(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def learning(agent: nn.Module, *inputs):
    """A step of the gradient, without PPO's loss, which is small beside the network."""
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-9, eps=1e-5, fused=True)

    def step():
        _, logprob, entropy, value, *_ = agent.get_action_and_value(*inputs)
        optimizer.zero_grad()
        (logprob.mean() + entropy.mean() + value.mean()).backward()
        optimizer.step()

    return step


@claim("ppo_atari", "1.4 times as fast on a CPU", "a minibatch of 256, fp32", threads=2)
def channels_last():
    torch.manual_seed(1)
    obs, actions = pixels(256, 4, 84, 84), torch.randint(0, 4, (256,))
    agent = made("ppo_atari")
    other = made("ppo_atari")
    other.network.to(memory_format=torch.contiguous_format)
    other.get_features = lambda x: other.network(x / 255.0)
    return learning(agent, obs, actions), learning(other, obs, actions)


@claim(
    "ppo_atari", "to divide them first takes 2 to 4 times as long", "256 observations", threads=2
)
def division():
    obs = pixels(256, 4, 84, 84).contiguous(memory_format=torch.channels_last)
    return lambda: obs.bfloat16() / 255.0, lambda: (obs / 255.0).bfloat16()


@claim("envpool_ppo", "which takes 7 times as long", "256 of 1,024 observations", threads=2)
def minibatch():
    obs, inds = pixels(1024, 4, 84, 84), torch.randperm(1024)[:256]
    return lambda: obs.index_select(0, inds), lambda: obs[inds]


@claim("ppo", "torch.distributions takes 5 times as long", "4 actions of 2 choices")
def categorical():
    agent, logits = made("ppo"), torch.randn(4, 2)
    agent.actor = nn.Identity()  # what is compared is the distribution
    agent.get_value = lambda x: x

    def distribution():
        pi = torch.distributions.Categorical(logits=agent.actor(logits))
        action = pi.sample()
        return action, pi.log_prob(action), pi.entropy(), agent.get_value(logits)

    by_hand = without_gradient(lambda: agent.get_action_and_value(logits))
    return by_hand, without_gradient(distribution)


@claim("ppo_continuous", "torch.distributions takes twice as long", "an action of 6 parts")
def normal():
    agent, mean = made("ppo_continuous"), torch.randn(1, 6)
    agent.actor_mean = nn.Identity()  # what is compared is the distribution
    agent.get_value = lambda x: x

    def distribution():
        std = agent.actor_logstd.exp()
        pi = torch.distributions.Normal(agent.actor_mean(mean), std.expand_as(mean))
        action = pi.sample()
        return action, pi.log_prob(action).sum(1), pi.entropy().sum(1), agent.get_value(mean)

    by_hand = without_gradient(lambda: agent.get_action_and_value(mean))
    return by_hand, without_gradient(distribution)


@claim("ppo", "4 times as fast on a small network", "a step of Adam")
def fused():
    steps = []
    for flags in ({"fused": True}, {}):
        agent = made("ppo")
        for parameter in agent.parameters():
            parameter.grad = torch.randn_like(parameter)
        steps.append(torch.optim.Adam(agent.parameters(), lr=1e-9, eps=1e-5, **flags).step)
    return steps


@claim("ppo_continuous", "half the time of rows.mean(0) and rows.var(0)", "one row of 17")
def moments():
    rows = np.random.default_rng(1).normal(size=(1, 17))

    def sums():
        mean = rows.sum(0) / len(rows)
        return mean, ((rows - mean) ** 2).sum(0) / len(rows)

    return sums, lambda: (rows.mean(0), rows.var(0))


@claim("ppo_continuous", "NumPy: with torch an update takes 4 times as long", "one row of 17")
def statistics_in_numpy():
    script = importlib.import_module("ppo_continuous")
    ours, other = script.RunningMeanStd((17,)), script.RunningMeanStd((17,))
    other.mean, other.var = map(torch.as_tensor, (other.mean, other.var))
    rows = np.random.default_rng(1).normal(size=(1, 17))
    tensor = torch.as_tensor(rows)
    return lambda: ours.update(rows), lambda: other.update(tensor)


def stretch(core: nn.Module, num_steps: int, num_envs: int):
    """A core over some steps of some environments: in one call, and in one for each step."""
    features = torch.randn(num_steps, num_envs, 512)
    state = torch.zeros(1, num_envs, core.hidden_size)
    state = (state, state) if isinstance(core, nn.LSTM) else state

    def whole():
        core(features, state)[0].mean().backward()

    def steps():
        last, outputs = state, []
        for step in range(num_steps):
            output, last = core(features[step : step + 1], last)
            outputs.append(output)
        torch.cat(outputs).mean().backward()

    return whole, steps


STRETCH = "5 to 25 times as fast as one for each step"


@claim("ppo_lstm", STRETCH, "128 steps of 2 environments, no reset", threads=2)
def lstm():
    return stretch(nn.LSTM(512, 128), 128, 2)


@claim("ppo_lstm", STRETCH, "8 steps of 2 environments, no reset", threads=2)
def short_lstm():
    return stretch(nn.LSTM(512, 128), 8, 2)


@claim(
    "appo_async", "1.6 times as fast as one for each step", "32 steps of 8 environments, no reset"
)
def gru():
    return stretch(nn.GRU(512, 512), 32, 8)


@claim("appo_async", "one number is read in a tenth of the time", "one counter")
def counter():
    tensor = torch.zeros(8, dtype=torch.int64).share_memory_()
    array = tensor.numpy()
    return lambda: int(array[3]), lambda: int(tensor[3])


@claim("appo_async", "cast once, not in each call: that is a third of it", "4 observations, bf16")
def cast_once():
    obs, done = pixels(4, 4, 84, 84), torch.zeros(4)
    other = made("appo_async", precision="bf16")
    agent = made("appo_async", precision="bf16")
    agent.network.bfloat16()
    state = agent.initial_state(4)
    return [
        without_gradient(lambda agent=agent: agent.get_action_and_value(obs, state, done))
        for agent in (agent, other)
    ]


@claim("appo_async", "which saves a quarter of the update", "a batch of 256, fp32")
def first_pass():
    agent = made("appo_async")
    obs, done, actions = pixels(264, 4, 84, 84), torch.zeros(264), torch.randint(0, 4, (264,))
    state = agent.initial_state(8)
    update = learning(agent, obs, state, done, actions)
    judge = without_gradient(lambda: agent.get_action_and_value(obs, state, done, actions))
    return update, lambda: (judge(), update())


def without_gradient(function):
    def call():
        with torch.inference_mode():
            return function()

    return call


def seconds_of(function, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="turns of each of the two")
    rounds = parser.parse_args().rounds
    origin = {"commit": git("rev-parse", "--short", "HEAD").strip(), "machine": machine()}
    rows = []
    for file, comment, what, threads, make in CLAIMS:
        if comment not in (ROOT / f"{file}.py").read_text():
            sys.exit(f"error: {file}.py no longer says: {comment}")
        torch.set_num_threads(threads)
        pair = make()
        calls = [max(1, round(SECONDS / seconds_of(function, 3))) for function in pair]
        times = [[seconds_of(*job) for job in zip(pair, calls, strict=True)] for _ in range(rounds)]
        ours, others = (1e6 * statistics.median(column) for column in zip(*times, strict=True))
        ratios = sorted(other / our for our, other in times)
        ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        values = (file, comment, what, threads, f"{ours:.3g}", f"{others:.3g}", ratio)
        rows.append(dict(zip(FIELDS, (*values, *origin.values()), strict=True)))
        print(f"{file}.py, {comment} ({what}): {ratio}", flush=True)
    write_csv(ROOT / "results" / "comments.csv", rows, FIELDS)


if __name__ == "__main__":
    main()
