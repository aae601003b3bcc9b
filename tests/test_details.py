"""One behavioural test for each detail in details.toml, and what the tags in the scripts promise.

test_mutations.py calls these tests with wrong implementations, so they look at what a script does,
never at how it is written.
"""

import ast
import copy
import itertools
import multiprocessing.connection
import os
import re
import threading
import tomllib
from dataclasses import replace
from types import SimpleNamespace

import detail_probes
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT, SCRIPTS, source_of
from detail_probes import (
    ACTION_SPACES,
    ScriptedAtari,
    act,
    make_agent,
    random_obs,
    register_atari,
    register_game,
    value_of,
    watch,
)
from torch import nn
from torch.nn import functional as F

POLICY_HEADS = {"ppo": "actor.4"}  # where it is not called actor
DETAILS = {
    detail["id"]: detail for detail in tomllib.loads((ROOT / "details.toml").read_text())["details"]
}
TAG = re.compile(r"# \[(\w+ \d+)(: off)?\]")


def shown_by(detail_id: str):
    """Run a test for every script that shows the detail and has no test of its own for it."""
    detail = DETAILS[detail_id]
    names = [name for name in detail["files"] if name not in detail.get("tests", {})]
    return pytest.mark.parametrize("script", names, indirect=True)


def assert_close(actual, expected, rtol=1e-4, atol=1e-6):
    torch.testing.assert_close(
        torch.as_tensor(actual).double(), torch.as_tensor(expected).double(), rtol=rtol, atol=atol
    )


# --- tags and list


@pytest.mark.parametrize("name", SCRIPTS)
def test_tags_are_those_of_the_list(name):
    tags = TAG.findall(source_of(name))
    shown = [tag for tag, off in tags if not off]
    off = [tag for tag, off in tags if off]
    assert len(shown) == len(set(shown)), "a tag stands twice"
    assert set(shown) == {i for i, detail in DETAILS.items() if name in detail["files"]}
    assert set(off) == {i for i, detail in DETAILS.items() if name in detail.get("off", [])}


@pytest.mark.parametrize("name", SCRIPTS)
def test_code_follows_every_tag(name):
    lines = source_of(name).splitlines()
    tagged = [i for i, line in enumerate(lines) if TAG.search(line)]
    for i in tagged:
        assert TAG.match(lines[i].strip()), f"line {i + 1}: a tag begins its comment"
        below = next(line.strip() for line in lines[i:] if not line.strip().startswith("#"))
        assert below, f"line {i + 1}: nothing stands below the tag"


@pytest.mark.parametrize("name", SCRIPTS)
def test_docstring_names_the_details(name):
    docstring = " ".join(ast.get_docstring(ast.parse(source_of(name))).split())
    line = re.search(r"Details shown: ([^;.]*)", docstring).group(1)
    named, group = set(), None
    for word, first, last in re.findall(r"([a-z]+)?\s*(\d+)(?:-(\d+))?", line.replace("and", ",")):
        group = word or group
        named |= {f"{group} {n}" for n in range(int(first), int(last or first) + 1)}
    tags = TAG.findall(source_of(name))
    assert named == {tag for tag, off in tags if not off and not tag.startswith("beyond")}
    off = set(re.findall(r"(\w+ \d+) is off", docstring))  # one by one
    assert off == {tag for tag, is_off in tags if is_off}


def test_the_list_is_complete():
    groups = {"core": 13, "atari": 9, "continuous": 9, "lstm": 5, "multidiscrete": 1}
    the_37 = {f"{group} {n}" for group, last in groups.items() for n in range(1, last + 1)}
    assert len(the_37) == 37
    more = {*(f"aux {n}" for n in range(1, 5)), *(f"beyond {n}" for n in range(1, 5))}
    more |= {f"appo {n}" for n in range(1, 7)}
    assert set(DETAILS) == the_37 | more


@pytest.mark.parametrize("detail_id", DETAILS)
def test_an_entry_of_the_list(detail_id):
    detail = DETAILS[detail_id]
    group, number = detail_id.split()
    tests = [path.read_text() for path in sorted((ROOT / "tests").glob("test_details*.py"))]
    assert set(detail.get("tests", {})) < set(detail["files"])
    for test in (detail["test"], *detail.get("tests", {}).values()):
        assert test.startswith(f"test_{group}_{int(number):02}_")
        assert sum(text.count(f"\ndef {test}(script") for text in tests) == 1
    assert detail["name"] and detail["what"].endswith(".") and detail["files"]
    if group == "appo":  # not of PPO: the paper says what they are
        assert "baselines" not in detail and "arXiv" in detail["source"]
    else:
        assert re.fullmatch(r"([\w/]+\.py:\d+(-\d+)?(, )?)*", detail["baselines"])
    if group == "beyond":
        assert not detail["baselines"]
    mutations = detail["mutations"]
    assert len(mutations) >= 2
    assert sum(mutation.get("ablate", False) for mutation in mutations) <= 1
    assert all(mutation["why"] and mutation["old"] != mutation["new"] for mutation in mutations)
    for name in detail["files"]:  # two or more in every file
        assert sum(name in m.get("files", detail["files"]) for m in mutations) >= 2


# --- core


def check_rollouts_go_on(script, tmp_path):
    # the second iteration goes on where the first stopped; 7 steps that fill no batch are dropped
    ends = [(7, 1, "terminated"), (10, 0, "terminated")]
    seen = watch(script, tmp_path, ends, total_timesteps=39, seed=5)
    assert seen.envs.reset_seeds == [5]
    assert len(seen.rollouts) == 2 and seen.envs.time == 16
    for k, rollout in enumerate(seen.rollouts):
        assert np.array_equal(rollout.obs, seen.envs.observations[8 * k : 8 * k + 8])
        assert np.array_equal(rollout.actions, seen.envs.actions[8 * k : 8 * k + 8])
    dones = torch.zeros(17, 2)  # dones[t] = 1: obs[t] is the first of an episode
    dones[8, 1] = dones[11, 0] = 1
    assert_close(torch.cat([rollout.dones for rollout in seen.rollouts]), dones[:16])
    assert_close(torch.stack([rollout.next_done for rollout in seen.rollouts]), dones[[8, 16]])


@shown_by("core 1")
def test_core_01_vectorized_architecture(script, tmp_path):
    check_rollouts_go_on(script, tmp_path)

    # environment i is seeded with seed + i, and the step that ends an episode starts the next
    envs, *_ = script.make_envs(script.Args(env_id=register_game(script)), 2, 5)
    games = [env.unwrapped for env in envs.unwrapped.envs]
    assert [game.np_random_seed for game in games] == [5, 6]
    actions, game = np.zeros(envs.action_space.shape, envs.action_space.dtype), games[0]
    begun = len(game.games)
    for _ in range(40):
        if envs.step(actions)[2][0]:
            break
    else:
        pytest.fail("no episode ended")
    assert len(game.games) == begun + 1
    steps = len(game.games[-1])
    envs.step(actions)
    assert len(game.games[-1]) > steps, "the next action is played"


@shown_by("core 2")
def test_core_02_orthogonal_initialization(script):
    agent = make_agent(script)
    layers = [m for m in agent.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    gains = []
    for layer in layers:
        weight = layer.weight.detach().double().flatten(1)
        weight = weight if weight.shape[0] <= weight.shape[1] else weight.T
        gram = weight @ weight.T
        gain = gram.diagonal().mean().sqrt()
        assert_close(gram, gain**2 * torch.eye(len(gram)), atol=1e-5 * gain.item() ** 2)
        assert not layer.bias.any()
        outputs = layer.out_features if isinstance(layer, nn.Linear) else None
        num_outputs = detail_probes.policy_outputs(detail_probes.action_space(script))
        expected = {1: 1.0, num_outputs: 0.01}.get(outputs, 2**0.5)
        assert_close(gain, expected)
        gains.append(round(gain.item(), 2))
    assert gains.count(0.01) == gains.count(1.0) == 1 and gains.count(1.41) == len(layers) - 2


@shown_by("core 3")
def test_core_03_adam_epsilon(script, tmp_path):
    # gradients as short as 1e-4 make epsilon felt
    flags = {"max_grad_norm": 1e-4, "anneal_lr": False, "learning_rate": 1e-3}
    seen = watch(script, tmp_path, **flags)
    moments = dict.fromkeys(seen.minibatches[0].before, (0.0, 0.0))
    for step, minibatch in enumerate(seen.minibatches, 1):
        for name, (m, v) in moments.items():
            gradient = minibatch.applied[name]
            m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
            moments[name] = m, v
            m, v = m / (1 - 0.9**step), v / (1 - 0.999**step)
            change = minibatch.after[name] - minibatch.before[name]
            assert_close(change, -1e-3 * m / (v.sqrt() + 1e-5), rtol=1e-3, atol=1e-7)


@shown_by("core 4")
def test_core_04_learning_rate_annealing(script, tmp_path):
    # five updates, of which two are run; the rest of 7 steps is in no update
    sizes = {"total_timesteps": 87, "stop_at": 32, "learning_rate": 1e-3}
    for anneal_lr, expected in ((True, (1e-3, 0.8e-3)), (False, (1e-3, 1e-3))):
        seen = watch(script, tmp_path, anneal_lr=anneal_lr, **sizes)
        rates = [[minibatch.lr for minibatch in rollout.minibatches] for rollout in seen.rollouts]
        assert len(rates) == 2
        for update, lr in zip(rates, expected, strict=True):
            assert update == pytest.approx([lr] * 4)


def gae_oracle(rollout):
    """baselines ppo2/runner.py:50-65, one environment at a time."""
    steps, num_envs = rollout.rewards.shape
    advantages = np.zeros((steps, num_envs))
    for i in range(num_envs):
        lastgaelam = 0.0
        for t in reversed(range(steps)):
            last = t == steps - 1
            nonterminal = 1.0 - float(rollout.next_done[i] if last else rollout.dones[t + 1, i])
            nextvalue = float(rollout.next_value[i] if last else rollout.values[t + 1, i])
            delta = float(rollout.rewards[t, i]) + rollout.gamma * nextvalue * nonterminal
            delta -= float(rollout.values[t, i])
            lastgaelam = delta + rollout.gamma * rollout.gae_lambda * nonterminal * lastgaelam
            advantages[t, i] = lastgaelam
    return torch.as_tensor(advantages)


@shown_by("core 5")
def test_core_05_gae(script, tmp_path):
    rng = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 40, 3, generator=rng)
    dones = (torch.rand(40, 3, generator=rng) < 0.2).float()
    next_value, next_done = torch.randn(3, generator=rng), torch.tensor([0.0, 1.0, 0.0])
    rollout = (rewards, values, dones, next_value, next_done, 0.9, 0.8)
    names = ("rewards", "values", "dones", "next_value", "next_done", "gamma", "gae_lambda")
    expected = gae_oracle(SimpleNamespace(**dict(zip(names, rollout, strict=True))))
    if script.__name__ == "appo_async":  # what V-trace comes to when the policy has not moved
        advantages, returns = script.compute_vtrace(torch.ones(40, 3), *rollout, 1.0, 1.0)
    else:
        advantages, returns = script.compute_gae(*rollout)
    assert_close(advantages, expected)
    assert_close(returns, expected + values)

    # training hands over the right things: a time limit is an end, as in baselines
    ends = [(3, 0, "terminated"), (5, 1, "truncated"), (12, 0, "both"), (15, 1, "truncated")]
    flags = {"total_timesteps": 32, "gamma": 0.9, "gae_lambda": 0.8, "learning_rate": 0.1}
    seen = watch(script, tmp_path, ends, **flags)
    for k, rollout in enumerate(seen.rollouts):
        steps = slice(8 * k, 8 * k + 8)
        ended = torch.as_tensor(seen.envs.terminated | seen.envs.truncated).double()
        expected = SimpleNamespace(
            rewards=seen.envs.rewards[steps],
            values=rollout.values,
            dones=torch.cat((torch.zeros(1, 2).double(), ended))[steps],
            next_value=rollout.next_value,
            next_done=ended[8 * k + 7],
            gamma=0.9,
            gae_lambda=0.8,
        )
        assert_close(rollout.advantages, gae_oracle(expected))
        # the value behind the rollout is that of the observation that the next one starts with,
        # before the update: the first minibatch still has the weights
        before = rollout.minibatches[0].before
        seen.agent.load_state_dict({name: value.float() for name, value in before.items()})
        next_obs = torch.as_tensor(seen.envs.observations[8 * k + 8])
        assert_close(rollout.next_value, seen.agent.get_value(next_obs).detach())


@shown_by("core 6")
def test_core_06_minibatch_updates(script, tmp_path):
    sizes = {"num_minibatches": 4, "update_epochs": 3, "learning_rate": 0.1}
    seen = watch(script, tmp_path, **sizes)
    rollout = seen.rollouts[0]
    assert [len(minibatch.rows) for minibatch in rollout.minibatches] == [4] * 12
    rows = torch.stack([minibatch.rows for minibatch in rollout.minibatches]).reshape(3, 16)
    everything = torch.arange(16)
    for epoch in rows:
        assert torch.equal(epoch.sort().values, everything), "not every sample exactly once"
        assert not torch.equal(epoch, everything), "not shuffled"
    assert not torch.equal(rows[0], rows[1]) and not torch.equal(rows[1], rows[2])
    for minibatch in rollout.minibatches:
        assert torch.equal(minibatch.actions, rollout.actions.flatten(0, 1)[minibatch.rows])


def implied_advantages(seen):
    """The advantages in use, from d loss / d logprob = -advantage * ratio / n without clipping."""
    for minibatch, sample in seen.samples():
        ratio = (minibatch.logprob - sample.logprobs).exp()
        gradient = minibatch.gradients["logprob"]
        yield sample.advantages, -gradient * len(gradient) / ratio


@shown_by("core 7")
def test_core_07_advantage_normalization(script, tmp_path, monkeypatch):
    unclipped = {"clip_coef": 1e3, "learning_rate": 0.1}
    seen = watch(script, tmp_path, **unclipped)
    for advantages, used in implied_advantages(seen):
        # numpy's std, as in baselines, divides by n
        std = ((advantages - advantages.mean()) ** 2).mean().sqrt()
        assert_close(used, (advantages - advantages.mean()) / (std + 1e-8), rtol=1e-3, atol=1e-4)
    seen = watch(script, tmp_path, norm_adv=False, **unclipped)
    for advantages, used in implied_advantages(seen):
        assert_close(used, advantages, rtol=1e-3, atol=1e-4)

    # the 1e-8 is there: of advantages that deviate by 1e-6 it takes a hundredth
    class Blind(detail_probes.LinearAgent):
        def __init__(self, envs, args):
            super().__init__(envs, args)
            nn.init.zeros_(self.critic.weight)
            nn.init.zeros_(self.critic.bias)

    monkeypatch.setattr(detail_probes, "LinearAgent", Blind)
    envs = detail_probes.ScriptedEnvs(script, 2)
    envs.rewards *= 1e-6
    seen = watch(script, tmp_path, envs=envs, gamma=0.0, learning_rate=0.0, clip_coef=1e3)
    for advantages, used in implied_advantages(seen):
        std = ((advantages - advantages.mean()) ** 2).mean().sqrt()
        assert 1e-7 < std < 1e-5
        assert_close(used, (advantages - advantages.mean()) / (std + 1e-8), rtol=1e-3, atol=1e-4)


def policy_gradient(logprob, old_logprob, advantages, clip_coef):
    """d/d logprob of mean(max(-A ratio, -A clip(ratio, 1 - c, 1 + c))), ppo2/model.py:78-86."""
    ratio = (logprob - old_logprob).exp()
    inside = torch.where(advantages > 0, ratio < 1 + clip_coef, ratio > 1 - clip_coef)
    return -advantages * ratio / len(ratio) * inside


@shown_by("core 8")
def test_core_08_clipped_surrogate_objective(script, tmp_path):
    flags = {"norm_adv": False, "learning_rate": 0.1, "num_steps": 32, "total_timesteps": 128}
    seen = watch(script, tmp_path, clip_coef=0.2, **flags)
    cases = set()  # where the ratio was, and the advantage
    for minibatch, sample in seen.samples():
        expected = policy_gradient(minibatch.logprob, sample.logprobs, sample.advantages, 0.2)
        assert_close(minibatch.gradients["logprob"], expected)
        logratio = minibatch.logprob - sample.logprobs
        for change, advantage in zip(logratio, sample.advantages, strict=True):
            region = int(change > np.log(1.2)) - int(change < np.log(0.8))
            cases.add((region, advantage.item() > 0))
    assert len(cases) == 6, "ratio below, in and above the range, for gains and for losses"

    # nothing has moved yet, so the first ratio of an update is 1
    agent, obs = make_agent(script), random_obs(script, 16)
    with torch.inference_mode():
        action, logprob, _, _ = act(script, agent, obs)
    assert_close(act(script, agent, obs, action.clone())[1].detach(), logprob)


@shown_by("core 9")
def test_core_09_value_loss_clipping(script, tmp_path):
    flags = {"num_steps": 32, "total_timesteps": 64, "update_epochs": 6, "gamma": 0.0}
    flags |= {"vf_coef": 1.0, "clip_coef": 0.2, "learning_rate": 0.1}
    for clip_vloss in (True, False):
        seen = watch(script, tmp_path, clip_vloss=clip_vloss, **flags)
        cases = set()
        for minibatch, sample in seen.samples():
            move, error = minibatch.value - sample.values, minibatch.value - sample.returns
            clipped_error = sample.values + move.clamp(-0.2, 0.2) - sample.returns
            # 0.5 mean(max(error ** 2, clipped_error ** 2)), baselines model.py:68-75
            counts = (move.abs() < 0.2) | (error**2 > clipped_error**2) | (not clip_vloss)
            expected = error * counts / len(error)
            assert_close(minibatch.gradients["value"], expected, atol=1e-5)
            far = move.abs() > 0.2
            cases |= set(zip((move > 0)[far].tolist(), counts[far].tolist(), strict=True))
        if clip_vloss:  # values moved far, up and down, past the return and not
            assert len(cases) == 4, cases


@shown_by("core 10")
def test_core_10_overall_loss_and_entropy_bonus(script, tmp_path):
    flags = {"norm_adv": False, "clip_vloss": False, "clip_coef": 1e3, "max_grad_norm": 1e9}
    seen = watch(script, tmp_path, ent_coef=0.3, vf_coef=0.7, **flags)
    for minibatch, sample in seen.samples():
        n = len(minibatch.rows)
        ratio = (minibatch.logprob - sample.logprobs).exp()
        assert_close(minibatch.gradients["logprob"], -sample.advantages * ratio / n)
        assert_close(minibatch.gradients["entropy"], torch.full((n,), -0.3 / n))
        assert_close(minibatch.gradients["value"], 0.7 * (minibatch.value - sample.returns) / n)
        # one optimizer moves all parameters, by the gradient of this minibatch alone
        for name, raw in minibatch.raw.items():
            assert_close(minibatch.applied[name], raw)
            assert not torch.equal(minibatch.before[name], minibatch.after[name])
        assert set(minibatch.raw) == set(minibatch.before)

    if script.__name__ == "ppo_continuous":
        return  # its distribution has details of its own
    agent, obs = make_agent(script), random_obs(script, 16)
    nn.init.normal_(agent.get_submodule(POLICY_HEADS.get(script.__name__, "actor")).bias, std=1.0)
    torch.manual_seed(3)
    action, logprob, entropy, _ = act(script, agent, obs)
    every = [(a,) for a in range(3)]
    if script.__name__ in ACTION_SPACES:
        every = list(itertools.product(*map(range, ACTION_SPACES[script.__name__].nvec)))
    every = torch.tensor(every).reshape(len(every), *action.shape[1:])
    logprobs = [act(script, agent, obs, a.expand_as(action))[1] for a in every]
    logprobs = torch.stack(logprobs, -1).double()
    assert_close(logprobs.exp().sum(-1), torch.ones(16))
    same = action.reshape(16, 1, -1) == every.reshape(1, len(every), -1)
    chosen = same.all(-1).int().argmax(1)
    assert_close(logprob, logprobs.gather(1, chosen[:, None])[:, 0])
    assert_close(entropy, -(logprobs.exp() * logprobs).sum(-1))


@shown_by("core 11")
def test_core_11_global_gradient_clipping(script, tmp_path):
    for max_grad_norm in (0.05, 100.0):
        seen = watch(script, tmp_path, max_grad_norm=max_grad_norm)
        for minibatch in seen.minibatches:
            norm = sum((raw**2).sum() for raw in minibatch.raw.values()).sqrt().item()
            assert 0.05 < norm < 100
            for name, raw in minibatch.raw.items():
                expected = raw * min(1.0, max_grad_norm / (norm + 1e-6))
                assert_close(minibatch.applied[name], expected, atol=1e-7)


@shown_by("core 12")
def test_core_12_debug_variables(script, tmp_path):
    flags = {"norm_adv": False, "clip_coef": 0.2, "learning_rate": 0.1}
    seen = watch(script, tmp_path, total_timesteps=32, **flags)
    for k, rollout in enumerate(seen.rollouts):
        names = ("logprobs", "values", "advantages", "returns")
        flat = {name: getattr(rollout, name).flatten() for name in names}
        stats = []
        for minibatch in rollout.minibatches:
            old_logprob, old_value, advantages, returns = (x[minibatch.rows] for x in flat.values())
            logratio = minibatch.logprob - old_logprob
            ratio = logratio.exp()
            policy_loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
            clipped = old_value + (minibatch.value - old_value).clamp(-0.2, 0.2)
            errors = torch.stack((minibatch.value, clipped)) - returns
            stats.append(
                {
                    "value_loss": 0.5 * (errors**2).amax(0).mean(),
                    "policy_loss": policy_loss.mean(),
                    "entropy": minibatch.entropy.mean(),
                    "old_approx_kl": -logratio.mean(),
                    "approx_kl": (ratio - 1 - logratio).mean(),
                    "clipfrac": ((ratio - 1).abs() > 0.2).double().mean(),
                }
            )
        step = 16 * k + 16
        for name in stats[0]:
            mean = torch.stack([values[name] for values in stats]).mean().item()
            assert seen.scalars[f"losses/{name}"][k] == (step, pytest.approx(mean, abs=1e-5))
        returns, values = flat["returns"].numpy(), flat["values"].numpy()
        explained = 1 - np.var(returns - values) / np.var(returns)
        logged = seen.scalars["losses/explained_variance"][k]
        assert logged == (step, pytest.approx(explained, abs=1e-4))
        assert seen.scalars["charts/learning_rate"][k] == (step, pytest.approx((0.1, 0.05)[k]))
        assert seen.scalars["charts/SPS"][k][0] == step


def mlp(x, layers):
    """Two hidden layers of 64 tanh units, in float64."""
    assert [layer.weight.shape[0] for layer in layers[:2]] == [64, 64] and len(layers) == 3
    for i, layer in enumerate(layers):
        x = x @ layer.weight.detach().double().T + layer.bias.detach().double()
        x = x if i == 2 else x.tanh()
    return x


@shown_by("core 13")
def test_core_13_separate_networks(script):
    agent, obs = make_agent(script), random_obs(script, 16)
    policy = "actor_mean" if script.__name__ == "ppo_continuous" else "actor"
    parts = {}
    for name in (policy, "critic"):
        network = getattr(agent, name)
        parts[name] = [m for m in network.modules() if isinstance(m, nn.Linear)]
        for layer in parts[name]:
            nn.init.normal_(layer.weight, std=0.5)
    action, logprob, entropy, value = act(script, agent, obs)
    outputs = mlp(obs.double(), parts[policy])
    if policy == "actor":
        expected = outputs.log_softmax(-1).gather(1, action[:, None])[:, 0]
    else:
        expected = torch.distributions.Normal(outputs, 1.0).log_prob(action).sum(1)
    assert_close(logprob, expected)
    assert_close(value, mlp(obs.double(), parts["critic"])[:, 0])
    assert_close(agent.get_value(obs), value)

    for loss, own, other in ((value, "critic", policy), (logprob + entropy, policy, "critic")):
        agent.zero_grad()
        loss.sum().backward(retain_graph=True)
        for name, touched in ((own, True), (other, False)):
            for parameter in getattr(agent, name).parameters():
                moved = parameter.grad is not None and parameter.grad.any().item()
                assert moved == touched, f"{name} under the loss of the {own}"


@pytest.mark.parametrize("script", DETAILS["core 13"]["off"], indirect=True)
def test_core_13_off_means_one_trunk(script):
    agent, obs = make_agent(script), random_obs(script, 4)
    moved = []
    for loss in (value_of(script, agent, obs), act(script, agent, obs)[1]):
        agent.zero_grad()
        loss.sum().backward()
        moved.append({n for n, p in agent.named_parameters() if p.grad is not None})
    trunk = {n for n, _ in agent.named_parameters() if n.startswith(("network.", "lstm."))}
    assert moved[0] & moved[1] == trunk
    assert len(moved[0] - moved[1]) == len(moved[1] - moved[0]) == 2  # a weight and a bias


# --- atari


def actions_of(env) -> list[list[int]]:
    return env.unwrapped.games


@shown_by("atari 1")
def test_atari_01_random_starts(script):
    game = ScriptedAtari(lives=(3,) * 40)
    env = script.NoopResetEnv(game)
    waits = []
    for seed in range(250):
        obs, _ = env.reset(seed=seed)
        assert set(game.games[-1]) == {0}
        waits.append(len(game.games[-1]))
        assert np.array_equal(obs, game.picture(waits[-1]))
    assert set(waits) == set(range(1, 31))
    game.games.clear()
    for seed in range(5):  # the environment's own random numbers: the seed repeats them
        env.reset(seed=seed)
    assert [len(actions) for actions in game.games] == waits[:5]

    for end in ("terminated", "truncated"):  # a game that ends while it waits is begun anew
        short = ScriptedAtari(lives=(3,) * 4, end=end)
        env = script.NoopResetEnv(short)
        for seed in range(10):
            env.reset(seed=seed)
            assert max(map(len, short.games)) <= 3 and len(short.games[-1]) < 3
        assert len(short.games) > 10

    # frames are waited for, not decisions of four frames
    envs, _ = script.make_envs(script.Args(env_id=register_atari()), 20, 0)
    starts = [actions_of(env)[0].index(1) for env in envs.envs]
    assert {start % 4 for start in starts} == {0, 1, 2, 3} and max(starts) <= 30


@shown_by("atari 2")
def test_atari_02_frame_skip(script):
    picture = ScriptedAtari.picture
    for end in ("terminated", "truncated"):
        game = ScriptedAtari(rewards=[0] + [2**k for k in range(10)], lives=(3,) * 11, end=end)
        env = script.MaxAndSkipEnv(game)
        env.reset(seed=0)
        obs, reward, *ends, _ = env.step(2)
        assert game.games == [[2, 2, 2, 2]] and reward == 1 + 2 + 4 + 8 and not any(ends)
        assert np.array_equal(obs, np.maximum(picture(3), picture(4)))
        obs, reward, *ends, _ = env.step(3)
        assert game.games == [[2] * 4 + [3] * 4] and not any(ends)
        assert reward == 16 + 32 + 64 + 128
        assert np.array_equal(obs, np.maximum(picture(7), picture(8)))
        # the game ends in the second of four frames: no step behind the end; older frames stay
        obs, reward, *ends, _ = env.step(1)
        assert game.games == [[2] * 4 + [3] * 4 + [1] * 2]
        assert reward == 256 + 512 and ends == [end == "terminated", end == "truncated"]
        assert np.array_equal(obs, np.maximum(picture(7), picture(8)))


@shown_by("atari 3")
def test_atari_03_episodic_life(script):
    # lives by frame: one lost at 3, one won at 5 and lost at 7; none left from 9, over at 11
    game = ScriptedAtari(lives=(3, 3, 3, 2, 2, 3, 3, 2, 2, 0, 0, 0))
    env = script.EpisodicLifeEnv(game)
    obs, _ = env.reset(seed=4)
    assert game.reset_seeds == [4] and np.array_equal(obs, game.picture(0))
    ends = []
    for _ in range(6):
        terminated = env.step(1)[2]
        if terminated:
            ends.append(game.frame)
            env.reset()  # the same game goes on, with one frame of doing nothing
    assert ends == [3, 7]
    assert game.games == [[1, 1, 1, 0, 1, 1, 1, 0]]
    ends = [env.step(1)[2] for _ in range(3)]
    assert ends == [False, False, True], "the game says when it is over, not the last life"
    env.reset()
    assert len(game.games) == 2 and game.games[-1] == []

    # a time limit is an end of the game, and so is an end within the frame of doing nothing
    for lives, end, first_game in (
        ((3, 3, 3), "truncated", [1, 1]),
        ((3, 3, 2, 2), "terminated", [1, 1, 0]),
    ):
        game = ScriptedAtari(lives=lives, end=end)
        env = script.EpisodicLifeEnv(game)
        env.reset(seed=0)
        assert [any(env.step(1)[2:4]) for _ in range(2)] == [False, True]
        env.reset()
        assert game.games == [first_game, []]

    # scores are those of whole games
    lives = (3,) * 60 + (2,) * 60 + (0,)
    env_id = register_atari(lives=lives, rewards=(0,) + (1,) * 120)
    envs, _ = script.make_envs(script.Args(env_id=env_id), 1, 0)
    ends, scores = 0, []
    for _ in range(40):
        _, _, terminated, _, infos = envs.step(np.zeros(1, dtype=int))
        ends += terminated[0]
        scores += [score for _, score, _ in script.finished_episodes(infos)]
        if scores:
            break
    assert ends == 2 and scores == [120.0] and len(actions_of(envs.envs[0])) == 2


@shown_by("atari 4")
def test_atari_04_fire_on_reset(script):
    game = ScriptedAtari()
    obs, _ = script.FireResetEnv(game).reset(seed=0)
    assert game.games == [[1, 2]] and np.array_equal(obs, game.picture(2))
    for frames in (1, 2):  # a game that ends while FIRE is pressed is begun anew
        game = ScriptedAtari(lives=(3,) * frames + (0,))
        script.FireResetEnv(game).reset(seed=0)
        assert len(game.games) == (3 if frames == 1 else 2) and game.games[-1] == []

    lives = (3,) * 60 + (2,) * 340
    envs, _ = script.make_envs(script.Args(env_id=register_atari(lives=lives)), 1, 0)
    (actions,) = actions_of(envs.envs[0])
    assert actions[-8:] == [1] * 4 + [2] * 4 and set(actions[:-8]) == {0}
    for _ in range(30):
        before = len(actions)
        if envs.step(np.array([3]))[2][0]:
            break
    # a life is lost: a frame of doing nothing, then FIRE again, each held for four frames
    assert actions[before:] == [3] * 4 + [0] * 4 + [1] * 4 + [2] * 4
    env_id = register_atari(meanings=("NOOP", "UP", "DOWN"))
    envs, _ = script.make_envs(script.Args(env_id=env_id), 1, 0)
    assert set(actions_of(envs.envs[0])[0]) == {0}, "this game has no FIRE"


def area_weights(size: int, new_size: int) -> np.ndarray:
    """Row j: how much of each old pixel lies in new pixel j, as a share of the new pixel."""
    scale = size / new_size
    low, high = np.arange(new_size)[:, None] * scale, np.arange(1, new_size + 1)[:, None] * scale
    pixel = np.arange(size)[None]
    return np.clip(np.minimum(high, pixel + 1) - np.maximum(low, pixel), 0, None) / scale


@shown_by("atari 5")
def test_atari_05_warped_frames(script):
    env = script.WarpFrame(ScriptedAtari())
    assert env.observation_space == gym.spaces.Box(0, 255, (84, 84), np.uint8)
    frame = ScriptedAtari.picture(11)
    obs = env.observation(frame)
    assert obs.shape == (84, 84) and obs.dtype == np.uint8
    gray = np.round(frame.astype(np.float64) @ (0.299, 0.587, 0.114))
    expected = np.round(area_weights(210, 84) @ gray @ area_weights(160, 84).T)
    difference = np.abs(obs - expected)
    # ties may be rounded either way
    assert difference.max() <= 1 and (difference == 0).mean() > 0.99


@shown_by("atari 6")
def test_atari_06_reward_clipping(script):
    env = script.ClipRewardEnv(ScriptedAtari())
    rewards = {-7.5: -1, -0.25: -1, 0.0: 0, 0.5: 1, 3.0: 1}
    assert [env.reward(reward) for reward in rewards] == list(rewards.values())
    # the sum of four frames is clipped, and the score is not
    lives = (3,) * 120 + (0,)
    env_id = register_atari(lives=lives, rewards=(0.0,) + (1.0, 1.0, 1.0, 1.0, -9.0) * 24)
    envs, _ = script.make_envs(script.Args(env_id=env_id), 1, 0)
    game, clipped = envs.envs[0].unwrapped, set()
    for _ in range(40):
        first = game.frame
        _, reward, terminated, _, infos = envs.step(np.array([2]))
        if terminated[0]:
            break
        expected = np.sign(sum(game.rewards[first + 1 : first + 5]))
        assert reward[0] == expected
        clipped.add(expected)
    assert clipped == {-1, 1}
    assert [score for _, score, _ in script.finished_episodes(infos)] == [24 * (4 - 9)]


@shown_by("atari 7")
def test_atari_07_frame_stack(script):
    # an episode ends: a life of the Atari game, or the other game as a whole
    kwargs = {"lives": (3,) * 60 + (2,) * 340}
    if plain := script.__name__ == "ppo_multidiscrete":
        kwargs = {"lives": (3,) * 14, "action_space": ACTION_SPACES[script.__name__]}
    envs, obs, *_ = script.make_envs(script.Args(env_id=register_atari(**kwargs)), 1, 0)
    warp = script.WarpFrame(ScriptedAtari()).observation
    game = envs.envs[0].unwrapped
    assert obs.shape == (1, 4, 84, 84) and obs.dtype == np.uint8

    def newest():
        skipped = game.frame if plain else game.frame - 1
        return warp(np.maximum(game.picture(skipped), game.picture(game.frame)))

    frames = [np.zeros((84, 84)), np.zeros((84, 84)), np.zeros((84, 84)), newest()]
    assert np.array_equal(obs[0], frames)
    episodes = 0
    action = np.ones(envs.action_space.shape, int)
    for _ in range(20):
        obs, _, terminated, _, _ = envs.step(action)
        # the oldest frame goes, the newest comes last; an episode, a life, starts with no frames
        if terminated[0]:
            frames, episodes = [np.zeros((84, 84))] * 4, episodes + 1
        frames = [*frames[1:], newest()]
        assert np.array_equal(obs[0], frames)
    assert episodes == 1


def nature_cnn(x, parameters):
    """Mnih et al. 2015; x is scaled already."""
    for stride in (4, 2, 1):
        x = F.conv2d(x, parameters.pop(0), parameters.pop(0), stride).relu()
    return F.linear(x.flatten(1), parameters.pop(0), parameters.pop(0)).relu()


@shown_by("atari 8")
def test_atari_08_nature_cnn(script):
    agent, obs = make_agent(script), random_obs(script, 2)
    shapes = [tuple(p.shape) for p in agent.network.parameters() if p.ndim > 1]
    assert shapes == [(32, obs.shape[1], 8, 8), (64, 32, 4, 4), (64, 64, 3, 3), (512, 3136)]
    parameters = [p.detach().double() for p in agent.network.parameters()]
    hidden = nature_cnn(obs.double() / 255, parameters)
    if script.__name__ == "ppo_lstm":  # behind the CNN, from the state zero
        hidden = copy.deepcopy(agent.lstm).double()(hidden.unsqueeze(0))[0][0]
    value = value_of(script, agent, obs)
    heads = [(head.weight.double(), head.bias.double()) for head in (agent.critic, agent.actor)]
    assert_close(value, F.linear(hidden, *heads[0])[:, 0])
    action, logprob, _, same_value = act(script, agent, obs)
    logits = F.linear(hidden, *heads[1])
    nvec = getattr(ACTION_SPACES.get(script.__name__), "nvec", [logits.shape[1]])
    parts = zip(logits.split(list(nvec), 1), action.reshape(2, -1).T, strict=True)
    log_pi = [part.log_softmax(-1).gather(1, a[:, None])[:, 0] for part, a in parts]
    assert_close(logprob, sum(log_pi))
    assert_close(same_value, value)
    for loss in (same_value, logprob):  # both heads teach the trunk
        agent.zero_grad()
        loss.sum().backward(retain_graph=True)
        assert all(p.grad is not None and p.grad.any() for p in agent.network.parameters())


@shown_by("atari 9")
def test_atari_09_scaled_pixels(script, tmp_path):
    agent, obs = make_agent(script), random_obs(script, 2)
    inputs = []
    agent.network.register_forward_pre_hook(lambda network, args: inputs.append(args[0]))
    value_of(script, agent, obs)
    act(script, agent, obs)
    assert len(inputs) == 2
    for x in inputs:
        assert x.dtype == torch.float32
        assert_close(x, obs.double() / 255)
    # bytes until they reach the network
    seen = watch(script, tmp_path)
    assert seen.rollouts[0].obs.dtype == seen.minibatches[0].obs.dtype == torch.uint8


# --- aux and beyond


@shown_by("aux 1")
def test_aux_01_clip_range_annealing(script, tmp_path):
    flags = {"total_timesteps": 64, "stop_at": 32, "clip_coef": 0.2, "vf_coef": 1.0}
    flags |= {"norm_adv": False, "anneal_lr": False, "learning_rate": 0.1, "update_epochs": 4}
    for anneal_clip_coef, ranges in ((True, (0.2, 0.15)), (False, (0.2, 0.2))):
        seen = watch(script, tmp_path, anneal_clip_coef=anneal_clip_coef, **flags)
        clipfracs = [[], []]
        for i, (minibatch, sample) in enumerate(seen.samples()):
            clip_coef = ranges[i // 8]
            expected = policy_gradient(
                minibatch.logprob, sample.logprobs, sample.advantages, clip_coef
            )
            assert_close(minibatch.gradients["logprob"], expected)
            move, error = minibatch.value - sample.values, minibatch.value - sample.returns
            clipped_error = sample.values + move.clamp(-clip_coef, clip_coef) - sample.returns
            counts = (move.abs() < clip_coef) | (error**2 > clipped_error**2)
            assert_close(minibatch.gradients["value"], error * counts / len(error), atol=1e-5)
            ratio = (minibatch.logprob - sample.logprobs).exp()
            clipfracs[i // 8].append(((ratio - 1).abs() > clip_coef).double().mean().item())
        logged = [value for _, value in seen.scalars["losses/clipfrac"]]
        assert logged == pytest.approx([np.mean(fractions) for fractions in clipfracs])


@shown_by("aux 3")
def test_aux_03_early_stopping(script, tmp_path):
    sizes = {"num_envs": 4, "num_steps": 4, "num_minibatches": 4}
    sizes |= {"update_epochs": 5, "learning_rate": 0.05}
    seen = watch(script, tmp_path, **sizes)
    kls = []
    for minibatch, sample in seen.samples():
        logratio = minibatch.logprob - sample.logprobs
        kls.append((logratio.exp() - 1 - logratio).mean().item())
    assert len(kls) == 20, "without a target nothing stops"
    last = np.array(kls).reshape(5, 4)[:, -1]
    stops = set()
    targets = sorted(kls)[1:]
    for low, high in zip(targets[::2], targets[1::2], strict=False):
        target = (low + high) / 2
        epochs = next((e + 1 for e in range(5) if last[e] > target), 5)
        run = watch(script, tmp_path, target_kl=target, **sizes)
        assert len(run.minibatches) == 4 * epochs
        stops.add(epochs)
    assert len(stops) > 2


@shown_by("beyond 1")
def test_beyond_01_bootstrap_truncated(script, tmp_path):
    ends = [(2, 0, "truncated"), (2, 1, "terminated"), (4, 0, "both"), (6, 1, "truncated")]
    for bootstrap_truncated in (True, False):
        flags = {"bootstrap_truncated": bootstrap_truncated, "gamma": 0.5}
        seen = watch(script, tmp_path, ends, **flags)
        rollout, envs = seen.rollouts[0], seen.envs
        expected = torch.as_tensor(envs.rewards[:8]).clone()
        before = rollout.minibatches[0].before
        seen.agent.load_state_dict({name: value.float() for name, value in before.items()})
        if bootstrap_truncated:
            for step, i in ((2, 0), (6, 1)):
                final_obs = torch.as_tensor(envs.final_observations[step, i : i + 1])
                expected[step, i] += 0.5 * seen.agent.get_value(final_obs).item()
        assert_close(rollout.rewards, expected)


@shown_by("beyond 2")
def test_beyond_02_bf16(script):
    obs, values = random_obs(script, 8), {}
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        agent = make_agent(script, precision=precision)
        dtypes = {}
        for name, module in agent.named_modules():
            module.register_forward_hook(
                lambda module, args, out, name=name, dtypes=dtypes: dtypes.update(
                    {name: (out[0] if isinstance(out, tuple) else out).dtype}
                )
            )
        _, logprob, entropy, values[precision] = act(script, agent, obs)
        assert dtypes.pop("actor") == dtypes.pop("critic") == torch.float32
        assert dtypes.pop("lstm", torch.float32) == torch.float32
        assert set(dtypes.values()) == {dtype}
        assert {x.dtype for x in (logprob, entropy, values[precision])} == {torch.float32}
        values[precision].sum().backward()
        for parameter in agent.parameters():
            assert parameter.dtype == torch.float32
            assert parameter.grad is None or parameter.grad.dtype == torch.float32
    assert_close(values["bf16"], values["fp32"], rtol=0.05, atol=0.05)
    assert not torch.equal(values["bf16"], values["fp32"])


@shown_by("beyond 3")
def test_beyond_03_compile(script, tmp_path, monkeypatch):
    options, shapes = [], []

    def fake_compile(function, **kwargs):
        options.append(kwargs)

        def compiled(x, *more):
            shapes.append(len(x))
            return function(x, *more)

        return compiled

    monkeypatch.setattr(torch, "compile", fake_compile)
    watch(script, tmp_path)
    assert not options
    seen = watch(script, tmp_path, compile=True)
    # one shape of its own for a step of the rollout and for a minibatch, and no other way round it
    assert options == [{"dynamic": False}]
    # ppo_lstm.py compiles the convolutions, which the value behind the rollout needs, too
    rollout = [2] * (9 if script.__name__ == "ppo_lstm" else 8)
    # in appo_async.py it is the learner alone, which judges the batch, 9 steps of 2, at first
    rollout = [18] if script.__name__ == "appo_async" else rollout
    assert shapes == rollout + [8] * len(seen.minibatches)


def same(a, b) -> bool:
    """Say whether two infos are equal, whatever is in them, but for the seconds of an episode."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a.keys() - {"t"})
    if isinstance(a, np.ndarray) and a.dtype == object:
        return a.shape == b.shape and all(map(same, a, b))
    return np.array_equal(a, b) and np.asarray(a).dtype == np.asarray(b).dtype


class TellingAtari(ScriptedAtari):
    """Games of which no two are alike, that say what was done and in the end what was drawn."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.script = (3,) * self.np_random.integers(100, 140) + (0,)
        return self.np_random.integers(256, size=(210, 160, 3), dtype=np.uint8), {"new": 1}

    def step(self, action):
        obs, _, *ends, _ = super().step(action)
        info = {"action": action, "parts": {"frame": self.frame}}
        if any(ends):
            info["drawn"] = self.np_random.random(2)
            if self.np_random.random() < 0.5:  # a time limit is an end as well
                ends.reverse()
        return obs, float(np.sum(action)), *ends, info


class ThreadContext:
    """A context of multiprocessing whose processes are threads, each with its own end of a pipe."""

    Pipe = staticmethod(multiprocessing.Pipe)

    def __init__(self):
        self.started = 0

    def Process(self, target, args, daemon):
        def run(pipe, *args):
            with multiprocessing.connection.Connection(pipe) as pipe:
                target(pipe, *args)

        self.started += 1
        pipe, *args = args
        thread = threading.Thread(target=run, args=(os.dup(pipe.fileno()), *args), daemon=daemon)
        thread.kill, thread.exitcode = lambda: None, 1
        return thread


@shown_by("beyond 4")
def test_beyond_04_vector_mode(script, monkeypatch):
    contexts = {how: ThreadContext() for how in ("fork", "forkserver", "spawn")}
    monkeypatch.setattr(multiprocessing, "get_context", contexts.get)
    gym.registry.pop("TellingAtari-v0", None)
    spaces = {"action_space": ACTION_SPACES.get(script.__name__)}
    gym.register("TellingAtari-v0", TellingAtari, kwargs=spaces)
    args = script.Args(env_id="TellingAtari-v0", vector_mode="async")
    for cores, processes in ((1, 1), (4, 4), (64, 6)):
        monkeypatch.setattr(script, "CORES", cores)
        sync, *first = script.make_envs(replace(args, vector_mode="sync"), 6, 5)
        assert not any(context.started for context in contexts.values())
        envs, *first_here = script.make_envs(args, 6, 5)
        # a fork of a process that runs torch's threads can hang
        assert contexts["fork"].started == 0
        assert sum(context.started for context in contexts.values()) == processes
        assert all(map(same, first, first_here))
        for name in ("num_envs", "single_observation_space", "single_action_space", "action_space"):
            assert getattr(envs, name) == getattr(sync, name)
        sync.action_space.seed(1)
        scores = []
        for _ in range(150 // (1 if script.__name__ == "ppo_multidiscrete" else 4)):
            actions = sync.action_space.sample()
            outcome = sync.step(actions)
            assert all(map(same, outcome, envs.step(actions)))
            scores += script.finished_episodes(outcome[-1])
        assert {i for i, _, _ in scores} == {0, 1, 2, 3, 4, 5}
        envs.close()
        assert not any(thread.is_alive() for thread in envs.processes)
        for context in contexts.values():
            context.started = 0
