"""Actions of several parts and masks: a behavioural test for each detail, as in test_details.py.

The agents here have no convolutions: an observation of 512 pixels is its own features. What an
agent says is compared with torch.distributions in float64, part by part, over the choices that are
left. The environments are scripted, Gymnasium itself makes a vector environment of them.
"""

import functools
import itertools
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from test_details import assert_close, shown_by
from torch import nn
from torch.distributions import Categorical

OBS_SPACE = gym.spaces.Box(0, 255, (512, 1, 1), np.uint8)
UNEQUAL = gym.spaces.MultiDiscrete([3, 3, 14])
SHORT = gym.spaces.MultiDiscrete([2, 5])
BUTTONS = gym.spaces.MultiBinary(4)


def parts_of(space: gym.Space) -> list[int]:
    """How many choices each part of an action has."""
    return [2] * space.n if isinstance(space, gym.spaces.MultiBinary) else space.nvec.tolist()


# --- the agent


def make_agent(script, space: gym.Space, plain_agent=None) -> nn.Module:
    """An agent whose features are its observation, and whose policy is far from uniform."""
    spaces = SimpleNamespace(single_observation_space=OBS_SPACE, single_action_space=space)
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.init, "orthogonal_", lambda weight, gain: weight)  # slow, and overwritten
        agent = (plain_agent or script.Agent)(spaces, script.Args())
    agent.network = nn.Flatten()
    for head in (agent.actor, agent.critic):
        nn.init.normal_(head.weight, std=0.1)
    # all logits may be far down together, which changes no probability
    nn.init.normal_(agent.actor.bias, mean=-100.0)
    return agent


def random_obs(num: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (num, *OBS_SPACE.shape), dtype=torch.uint8, generator=rng)


def random_masks(parts: list[int], *shape: int) -> np.ndarray:
    """(*shape, sum of parts) bool, about half of all choices; one at least of each part."""
    rng = np.random.default_rng(3)
    masks = []
    for choices in parts:
        mask = rng.random((*shape, choices)) < 0.5
        np.put_along_axis(mask, rng.integers(choices, size=(*shape, 1)), True, axis=-1)
        masks.append(mask)
    return np.concatenate(masks, axis=-1)


def no_masks(script, space: gym.Space, num: int) -> torch.Tensor:
    """What an agent is given where the environments have no masks."""
    envs = SimpleNamespace(num_envs=num, single_action_space=space)
    return torch.as_tensor(script.action_masks({}, envs))


def logits_of(agent: nn.Module, obs: torch.Tensor) -> torch.Tensor:
    return agent.actor(obs.flatten(1) / 255).double()


def oracle(logits, parts, action, masks=None):
    """The log-probability and the entropy of whole actions, over what the masks leave."""
    masks = torch.ones(logits.shape, dtype=torch.bool) if masks is None else masks
    rows = []
    for row, whole_action in enumerate(action.long()):
        logprobs, entropies = [], []
        for part, choice in enumerate(whole_action):
            allowed = masks[row].split(parts)[part]
            assert choice < len(allowed) and allowed[choice], "there is no such choice"
            pi = Categorical(logits=logits[row].split(parts)[part][allowed])
            # the place of the choice among those that are allowed
            logprobs.append(pi.log_prob(allowed[:choice].sum()))
            entropies.append(pi.entropy())
        rows.append((sum(logprobs), sum(entropies)))
    return tuple(torch.stack(values) for values in zip(*rows, strict=True))


def assert_samples_like(agent, obs, parts, masks, allowed=True) -> None:
    """Actions for one observation are as frequent, all parts together, as they should be.

    masks: what the agent is given, (number of actions, ...); allowed: which choices that allows.
    """
    num, logits = len(masks), logits_of(agent, obs[None])[0].detach()
    logits = logits.where(torch.as_tensor(allowed), -torch.inf)
    probabilities = functools.reduce(
        lambda joint, part: (joint[:, None] * part.softmax(-1)).flatten(),
        logits.split(parts),
        torch.ones(1, dtype=torch.float64),
    )
    with torch.inference_mode():
        actions = agent.get_action_and_value(obs.expand(num, *obs.shape), masks)[0]
    assert actions.shape == (num, len(parts))
    assert (actions >= 0).all() and (actions < torch.tensor(parts)).all(), "no such choice"
    places = np.ravel_multi_index(actions.numpy().T, parts)
    counts = torch.as_tensor(np.bincount(places, minlength=len(probabilities))).double()
    assert not counts[probabilities == 0].any(), "a forbidden choice was played"
    # five standard deviations, and three more for what is rare
    slack = 5 * (probabilities * num).sqrt() + 3
    assert ((counts - probabilities * num).abs() < slack).all()


# --- training


class MaskedGame(gym.Env):
    """A game after a script: masks[t] goes with observation t, which is unlike any other.

    masks: (length, sum of choices), None for a game without masks. silent: the steps in which it
    says nothing of masks. ends: the steps that end an episode; the step itself shows an observation
    and a mask of no use, and the reset behind it those of its time.
    """

    observation_space = OBS_SPACE

    def __init__(self, index: int, space: gym.Space, masks, silent=(), ends=()):
        self.index, self.action_space, self.masks = index, space, masks
        self.silent, self.ends = silent, ends
        self.time, self.actions = 0, []
        self.rng = np.random.default_rng(index)

    @staticmethod
    def picture(index: int, time: int) -> np.ndarray:
        rng = np.random.default_rng((index, time))
        return rng.integers(0, 256, OBS_SPACE.shape, dtype=np.uint8)

    def info(self, mask) -> dict:
        return {} if self.masks is None or self.time in self.silent else {"action_mask": mask}

    def look(self):
        mask = None if self.masks is None else self.masks[self.time]
        return self.picture(self.index, self.time), self.info(mask)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.look()

    def step(self, action):
        self.actions.append(np.array(action))
        self.time += 1
        reward = self.rng.normal()
        if self.time in self.ends:
            decoy = None if self.masks is None else ~self.masks[self.time]
            return np.zeros(OBS_SPACE.shape, np.uint8), reward, True, False, self.info(decoy)
        obs, info = self.look()
        return obs, reward, False, False, info


NUM_ENVS, NUM_STEPS, ITERATIONS = 3, 4, 2
LENGTH = NUM_STEPS * ITERATIONS + 1  # observations, the one behind the last step among them
# an end within a rollout, and two in the last step of one
ENDS = {1: (2,), 0: (4,), 2: (4, 7)}


def make_games(space: gym.Space, masks, silent=frozenset(), ends=ENDS):
    """A vector environment of MaskedGames. masks: (LENGTH, NUM_ENVS, choices); silent: (t, i)."""
    games = []
    for i in range(NUM_ENVS):
        steps = [t for t, environment in silent if environment == i]
        own = None if masks is None else masks[:, i]
        games.append(MaskedGame(i, space, own, steps, ends.get(i, ())))
    return gym.vector.SyncVectorEnv(
        [lambda game=game: gym.wrappers.RecordEpisodeStatistics(game) for game in games],
        autoreset_mode=AutoresetMode.SAME_STEP,
    )


def played(envs) -> np.ndarray:
    """The actions that reached the environments, (steps, NUM_ENVS, parts)."""
    return np.stack([env.unwrapped.actions for env in envs.envs], axis=1)


def run(script, function: str, envs, *args, **changes):
    """Call `train` or `evaluate` with these environments; returns the calls of the agent.

    A call is (observations, masks, actions or None), (action, log-probability, entropy, value).
    """
    calls, plain_agent = [], script.Agent
    sizes = {"num_envs": NUM_ENVS, "num_steps": NUM_STEPS, "num_minibatches": 2, "update_epochs": 3}
    sizes["total_timesteps"] = NUM_ENVS * NUM_STEPS * ITERATIONS

    def make_watched(vector_env, args):
        agent = make_agent(script, vector_env.single_action_space, plain_agent)
        plain = agent.get_action_and_value

        def get_action_and_value(*inputs):
            outputs = plain(*inputs)
            inputs = (*inputs, None)[:3]
            copies = [x if x is None else x.detach().clone() for x in (*inputs, *outputs)]
            calls.append((copies[:3], copies[3:]))
            return outputs

        agent.get_action_and_value = get_action_and_value
        return agent

    def make_envs(args, num_envs, seed, frozen=None):
        assert num_envs == NUM_ENVS
        return envs, *envs.reset(seed=seed)

    writer = SimpleNamespace(
        add_scalar=lambda *_: None, flush=lambda: None, close=lambda: None, add_text=lambda *_: None
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "Agent", make_watched)
        patch.setattr(script, "make_envs", make_envs)
        patch.setattr(script, "save", lambda args, run, **state: run | state)
        patch.setattr(script, "SummaryWriter", lambda *_, **__: writer)
        getattr(script, function)(script.Args(**(sizes | changes)), *args)
    return calls


def train(script, tmp_path, envs):
    """Two iterations. Returns the calls of the rollouts, and those of the updates."""
    options = {"eval_episodes": 0, "device": "cpu", "run_dir": str(tmp_path)}
    calls = run(script, "train", envs, **options)
    assert [len(inputs[0]) for inputs, _ in calls] == (
        [NUM_ENVS] * NUM_STEPS + [NUM_ENVS * NUM_STEPS // 2] * 6
    ) * ITERATIONS
    rollouts = [(inputs, outputs) for inputs, outputs in calls if inputs[2] is None]
    updates = [(inputs, outputs) for inputs, outputs in calls if inputs[2] is not None]
    assert len(rollouts) == NUM_STEPS * ITERATIONS
    return rollouts, updates


PLACES = {
    MaskedGame.picture(i, t).tobytes(): (t, i)
    for t, i in itertools.product(range(LENGTH), range(NUM_ENVS))
}


def places(obs: torch.Tensor) -> tuple[list[int], list[int]]:
    """The steps of a batch of observations, and their environments."""
    return tuple(zip(*(PLACES[picture.numpy().tobytes()] for picture in obs), strict=True))


def assert_learns_from_the_rollout(rollouts, updates, envs) -> None:
    """Updates judge the actions that were played, and before they change anything as likely."""
    actions, dtype = played(envs), envs.single_action_space.dtype
    logprobs = torch.stack([outputs[1] for _, outputs in rollouts])
    assert np.array_equal(torch.stack([outputs[0] for _, outputs in rollouts]), actions)
    for k, (inputs, outputs) in enumerate(updates):
        rows = places(inputs[0])
        assert np.array_equal(inputs[2], actions[rows]) and inputs[2].numpy().dtype == dtype
        if k % 6 == 0:  # the first minibatch of an update
            assert_close(outputs[1], logprobs[rows])


# --- the details


@shown_by("multidiscrete 1")
def test_multidiscrete_01_independent_components(script, tmp_path):
    for space in (UNEQUAL, SHORT, BUTTONS):
        parts = parts_of(space)
        agent, obs = make_agent(script, space), random_obs(16)
        logits = logits_of(agent, obs)
        assert logits.shape == (16, sum(parts))
        free = no_masks(script, space, 16)
        sampled = agent.get_action_and_value(obs, free)[0]
        rng = torch.Generator().manual_seed(2)
        drawn = [torch.randint(0, choices, (16,), generator=rng) for choices in parts]
        given = torch.stack(drawn, dim=1).to(torch.as_tensor(space.sample()).dtype)
        for action in (sampled, given):
            _, logprob, entropy, _ = agent.get_action_and_value(obs, free, action)
            expected = oracle(logits, parts, action)
            assert_close(logprob, expected[0].detach())
            assert_close(entropy, expected[1].detach())
            # and they teach the policy what they should
            loss, expected = (logprob + 3 * entropy).sum(), (expected[0] + 3 * expected[1]).sum()
            head = list(agent.actor.parameters())
            gradients = (
                torch.autograd.grad(loss, head),
                torch.autograd.grad(expected, head, retain_graph=True),
            )
            for gradient, own in zip(*gradients, strict=True):
                assert_close(gradient, own, rtol=1e-3, atol=1e-5)
        assert_samples_like(agent, obs[0], parts, no_masks(script, space, 8_000))

    # all parts of an action are kept, in the type of the space, with the observation
    for space in (UNEQUAL, BUTTONS):
        envs = make_games(space, None)
        rollouts, updates = train(script, tmp_path, envs)
        actions = played(envs)
        assert actions.shape == (NUM_STEPS * ITERATIONS, NUM_ENVS, len(parts_of(space)))
        assert all(space.contains(a.astype(space.dtype)) for a in actions.reshape(-1, *space.shape))
        assert_learns_from_the_rollout(rollouts, updates, envs)


@shown_by("aux 4")
def test_aux_04_invalid_action_masking(script, tmp_path):
    for space in (UNEQUAL, BUTTONS):
        parts = parts_of(space)
        agent, obs = make_agent(script, space), random_obs(16)
        masks = torch.as_tensor(random_masks(parts, 16))
        masks[0] = True
        masks[1] = torch.cat([torch.arange(choices) == choices - 1 for choices in parts])
        seen = []
        agent.actor.register_forward_hook(lambda module, args, out, seen=seen: seen.append(out))
        action, logprob, entropy, value = agent.get_action_and_value(obs, masks)
        logits = seen[0].detach().double().requires_grad_()
        expected = oracle(logits, parts, action, masks)
        assert_close(logprob, expected[0].detach())
        assert_close(entropy, expected[1].detach())
        _, judged, entropy, _ = agent.get_action_and_value(obs, masks, action)
        assert_close(judged, logprob)
        loss, expected = (judged + 3 * entropy).sum(), (expected[0] + 3 * expected[1]).sum()
        (gradient,) = torch.autograd.grad(loss, seen[1])
        assert not gradient[~masks].any(), "a forbidden choice has a gradient"
        assert_close(gradient, torch.autograd.grad(expected, logits)[0], rtol=1e-3, atol=1e-5)
        agent.actor._forward_hooks.clear()
        assert_close(agent.get_value(obs), value)  # the state's worth has no mask
        for row in (1, 2):
            assert_samples_like(agent, obs[row], parts, masks[row].expand(8_000, -1), masks[row])

    # masks change with every step; one that an environment does not give allows everything
    masks = random_masks(parts_of(UNEQUAL), LENGTH, NUM_ENVS)
    silent = {(0, 1), (2, 1), (3, 2), (7, 0), (7, 2), *((5, i) for i in range(3))}
    expected = masks.copy()
    expected[tuple(zip(*silent, strict=True))] = True
    envs = make_games(UNEQUAL, masks, silent)
    rollouts, updates = train(script, tmp_path, envs)
    actions = played(envs)
    for t, (inputs, _) in enumerate(rollouts):
        assert np.array_equal(inputs[1], expected[t]), f"not the masks of step {t}"
    for inputs, _ in updates:
        assert np.array_equal(inputs[1], expected[places(inputs[0])]), "others than in the rollout"
    allowed = np.take_along_axis(expected[:-1], actions + np.array([0, 3, 6]), axis=-1)
    assert allowed.all(), "a forbidden choice was played"
    assert_learns_from_the_rollout(rollouts, updates, envs)

    # where there are no masks everything is allowed
    free = make_games(UNEQUAL, None), make_games(UNEQUAL, np.ones_like(masks))
    (rollouts, updates), _ = [train(script, tmp_path, envs) for envs in free]
    assert all(inputs[1].all() for inputs, _ in rollouts + updates)
    assert np.array_equal(*map(played, free))

    # a part without any choice is an error of the environment, at a reset or later
    for t, part in ((0, slice(3, 6)), (3, slice(None)), (2, slice(0, 3)), (2, slice(6, None))):
        wrong = masks.copy()
        wrong[t, 1, part] = False
        with pytest.raises(ValueError, match="every choice"):
            train(script, tmp_path, make_games(UNEQUAL, wrong))

    # an evaluation plays by the same masks, until each environment has ended a game
    last = {0: (8,), 1: (3, 8), 2: (6,)}
    envs = make_games(UNEQUAL, masks, ends=last)
    state = make_agent(script, UNEQUAL).state_dict()
    options = {"eval_episodes": NUM_ENVS, "device": "cpu"}
    calls = run(script, "evaluate", envs, {"agent": state}, **options)
    assert len(calls) == LENGTH - 1
    for t, (_, outputs) in enumerate(calls):
        allowed = np.take_along_axis(masks[t], outputs[0].numpy() + np.array([0, 3, 6]), axis=-1)
        assert allowed.all(), "a forbidden choice was played in an evaluation"
    assert np.array_equal(torch.stack([outputs[0] for _, outputs in calls]), played(envs))
