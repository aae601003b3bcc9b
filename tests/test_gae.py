"""compute_gae of every script, as properties over random rollouts, in float64."""

import functools
import itertools

import numpy as np
import pytest
import torch
from conftest import SCRIPTS, load_script
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

unit = st.floats(0, 1)  # gamma and lambda
numbers = st.floats(-10, 10)


def for_all(**strategies):
    """Hold a property for every script and for 60 draws, which are the same in every run."""

    def decorate(test):
        test = settings(max_examples=60, deadline=None, derandomize=True)(given(**strategies)(test))
        return pytest.mark.parametrize("name", SCRIPTS)(test)

    return decorate


@functools.cache
def gae_of(name: str):
    """Call a script's compute_gae with NumPy arrays, which it must leave as they are."""
    script = load_script(name)

    def on_policy(rewards, *more):
        """What V-trace comes to where the policy has not moved since."""
        return script.compute_vtrace(torch.ones_like(rewards), rewards, *more, 1.0, 1.0)

    compute_gae = on_policy if name == "appo_async" else script.compute_gae

    def call(rollout, gamma, gae_lambda):
        tensors = [torch.tensor(array, dtype=torch.float64) for array in rollout]
        before = [tensor.clone() for tensor in tensors]
        advantages, returns = compute_gae(*tensors, gamma, gae_lambda)
        assert all(map(torch.equal, tensors, before))
        assert advantages.dtype == returns.dtype == torch.float64
        assert torch.equal(returns, advantages + tensors[1])
        return advantages.numpy()

    return call


def same(ours, theirs) -> bool:
    return np.shape(ours) == np.shape(theirs) and np.allclose(ours, theirs, rtol=1e-9, atol=1e-9)


@st.composite
def rollouts(draw, min_envs=1, max_envs=3, ends=True):
    """Draw rewards, values, dones, next_value, next_done: episodes may end anywhere, or never."""
    rows, columns = draw(st.integers(1, 9)), draw(st.integers(min_envs, max_envs))
    done = st.sampled_from([0.0, 1.0] if ends else [0.0])
    shape = (rows, columns)
    rewards, values = (draw(arrays(np.float64, shape, elements=numbers)) for _ in range(2))
    dones = draw(arrays(np.float64, shape, elements=done))
    next_value = draw(arrays(np.float64, columns, elements=numbers))
    next_done = draw(arrays(np.float64, columns, elements=done))
    return rewards, values, dones, next_value, next_done


def per_env(rollout):
    """Yield each environment's rewards, values and ends as lists; values have one more entry.

    ends[t] says that the action of step t ended an episode: dones, one row later.
    """
    rewards, values, dones, next_value, next_done = rollout
    for env in range(rewards.shape[1]):
        yield (
            rewards[:, env].tolist(),
            [*values[:, env].tolist(), float(next_value[env])],
            [*(dones[1:, env] == 1).tolist(), bool(next_done[env])],
        )


@for_all(rollout=rollouts(), gamma=unit, gae_lambda=unit)
def test_equals_the_definition(name, rollout, gamma, gae_lambda):
    """Equation 16: the weighted mean of the estimates that look 1, 2, 3, ... steps ahead."""
    expected = np.zeros_like(rollout[0])
    for env, (rewards, values, ends) in enumerate(per_env(rollout)):
        for start in range(len(rewards)):
            discounted, estimates = 0.0, []
            for ahead, t in enumerate(range(start, len(rewards))):
                discounted += gamma**ahead * rewards[t]
                tail = 0.0 if ends[t] else gamma ** (ahead + 1) * values[t + 1]
                estimates.append(discounted + tail - values[start])
                if ends[t]:
                    break
            *others, last = estimates  # all that is known at the end goes to the longest one
            weights = [gae_lambda**i for i in range(len(estimates))]
            mean = (1 - gae_lambda) * sum(w * e for w, e in zip(weights, others, strict=False))
            expected[start, env] = mean + weights[-1] * last
    assert same(gae_of(name)(rollout, gamma, gae_lambda), expected)


@for_all(rollout=rollouts(), gamma=unit, gae_lambda=unit)
def test_equals_the_scalar_loop_of_baselines(name, rollout, gamma, gae_lambda):
    """openai/baselines ppo2/runner.py:50-65, one number at a time."""
    mb_rewards, mb_values, mb_dones, last_values, last_dones = rollout
    expected = np.zeros_like(mb_rewards)
    nsteps, nenvs = mb_rewards.shape
    for env in range(nenvs):
        lastgaelam = 0.0
        for t in range(nsteps - 1, -1, -1):
            if t == nsteps - 1:
                nextnonterminal = 1.0 - last_dones[env]
                nextvalue = last_values[env]
            else:
                nextnonterminal = 1.0 - mb_dones[t + 1, env]
                nextvalue = mb_values[t + 1, env]
            delta = mb_rewards[t, env] + gamma * nextvalue * nextnonterminal - mb_values[t, env]
            lastgaelam = delta + gamma * gae_lambda * nextnonterminal * lastgaelam
            expected[t, env] = lastgaelam
    assert same(gae_of(name)(rollout, gamma, gae_lambda), expected)


@for_all(rollout=rollouts(), gamma=unit)
def test_lambda_1_is_the_discounted_return_less_the_value(name, rollout, gamma):
    expected = np.zeros_like(rollout[0])
    for env, (rewards, values, ends) in enumerate(per_env(rollout)):
        following = values[-1]  # what comes after the rollout is worth next_value
        for t in reversed(range(len(rewards))):
            following = rewards[t] + (0.0 if ends[t] else gamma * following)
            expected[t, env] = following - values[t]
    assert same(gae_of(name)(rollout, gamma, 1.0), expected)


@for_all(rollout=rollouts(), gamma=unit)
def test_lambda_0_is_the_error_of_one_step(name, rollout, gamma):
    expected = np.zeros_like(rollout[0])
    for env, (rewards, values, ends) in enumerate(per_env(rollout)):
        for t, reward in enumerate(rewards):
            target = reward if ends[t] else reward + gamma * values[t + 1]
            expected[t, env] = target - values[t]
    assert same(gae_of(name)(rollout, gamma, 0.0), expected)


@for_all(rollout=rollouts(max_envs=1), gamma=unit, gae_lambda=unit, other=numbers)
def test_episodes_are_apart(name, rollout, gamma, gae_lambda, other):
    """The advantages of a rollout are those of its episodes, one by one.

    What an ended episode finds behind it, here the number `other`, has no influence.
    """
    rewards, values, dones, next_value, next_done = rollout
    cuts = [0, *(t for t in range(1, len(rewards)) if dones[t, 0]), len(rewards)]
    parts = []
    for start, stop in itertools.pairwise(cuts):
        inside = slice(start, stop)
        last = stop == len(rewards)
        behind = next_value if last else np.array([other])
        ended = next_done if last else np.ones(1)
        episode = rewards[inside], values[inside], np.zeros((stop - start, 1)), behind, ended
        parts.append(gae_of(name)(episode, gamma, gae_lambda))
    assert same(gae_of(name)(rollout, gamma, gae_lambda), np.concatenate(parts))


@for_all(rollout=rollouts(), gamma=unit, gae_lambda=unit)
def test_first_row_of_dones_is_not_used(name, rollout, gamma, gae_lambda):
    """dones[0] is about what came before the rollout."""
    rewards, values, dones, next_value, next_done = rollout
    changed = dones.copy()
    changed[0] = 1 - changed[0]
    ours = gae_of(name)(rollout, gamma, gae_lambda)
    theirs = gae_of(name)((rewards, values, changed, next_value, next_done), gamma, gae_lambda)
    assert np.array_equal(ours, theirs)


@for_all(data=st.data(), rollout=rollouts(min_envs=2), gamma=unit, gae_lambda=unit)
def test_environments_can_be_permuted(name, data, rollout, gamma, gae_lambda):
    order = data.draw(st.permutations(range(rollout[0].shape[1])))
    permuted = [array[..., order] for array in rollout]
    ours = gae_of(name)(permuted, gamma, gae_lambda)
    assert np.array_equal(ours, gae_of(name)(rollout, gamma, gae_lambda)[:, order])


@for_all(data=st.data(), first=rollouts(), a=numbers, b=numbers, gamma=unit, gae_lambda=unit)
def test_linear_in_rewards_and_values(name, data, first, a, b, gamma, gae_lambda):
    rewards, values, dones, next_value, next_done = first
    other = [data.draw(arrays(np.float64, x.shape, elements=numbers)) for x in first]

    def gae(rewards, values, next_value):
        return gae_of(name)((rewards, values, dones, next_value, next_done), gamma, gae_lambda)

    combined = gae(*(a * first[i] + b * other[i] for i in (0, 1, 3)))
    ours = a * gae(rewards, values, next_value) + b * gae(other[0], other[1], other[3])
    assert np.allclose(ours, combined, rtol=1e-9, atol=1e-7)  # the terms are up to 100 times larger
    # in the rewards alone, where nothing is predicted
    zeros = np.zeros_like(values), np.zeros_like(next_value)
    assert same(a * gae(rewards, *zeros), gae(a * rewards, *zeros))


@for_all(
    rollout=rollouts(ends=False),
    shift=numbers,
    gamma=st.floats(0, 0.99),
    gae_lambda=unit,
)
def test_constant_reward_that_was_predicted_changes_nothing(
    name, rollout, shift, gamma, gae_lambda
):
    """In an endless episode, `shift` more in each step is worth shift / (1 - gamma)."""
    rewards, values, dones, next_value, next_done = rollout
    worth = shift / (1 - gamma)
    shifted = rewards + shift, values + worth, dones, next_value + worth, next_done
    ours = gae_of(name)(rollout, gamma, gae_lambda)
    assert np.allclose(ours, gae_of(name)(shifted, gamma, gae_lambda), rtol=1e-9, atol=1e-8)
