"""One behavioural test for each of the five details of the LSTM, in the manner of test_details.py.
The GRU of appo_async.py shares four of them.

`watch` runs `script.train` with the script's own Agent and, beside it, a plain LSTM in float64 that
takes one step after the other and knows from the environments where episodes begin. What the agent
says of an observation is compared with what the plain one says, in the rollout and in every update.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import sized
from detail_probes import ScriptedEnvs, make_agent
from test_details import assert_close, shown_by
from torch.nn import functional as F

NUM_ENVS, NUM_STEPS = 4, 8  # of a rollout
TWO_ROLLOUTS = 2 * NUM_ENVS * NUM_STEPS
CORES = {"appo_async": {"rnn": "gru"}}  # arguments that switch the core on


def pictures(*shape: int, seed: int = 0) -> np.ndarray:
    """Blocks of gray: a convolution hardly tells one picture of finer noise from another."""
    blocks = np.random.default_rng(seed).integers(0, 256, (*shape, 1, 6, 6), dtype=np.uint8)
    return blocks.repeat(14, axis=-1).repeat(14, axis=-2)


class PictureEnvs(ScriptedEnvs):
    """ScriptedEnvs to be seen by an agent of full size.

    lives: those of `ends` that end a life, not the game.
    """

    def __init__(self, script, ends=(), lives=()):
        super().__init__(script, NUM_ENVS, ends, length=24)
        self.observations = pictures(25, NUM_ENVS)
        self.final_observations = pictures(24, NUM_ENVS, seed=1)
        self.single_observation_space = SimpleNamespace(shape=(1, 84, 84), dtype=np.dtype(np.uint8))
        self.game_over = self.terminated | self.truncated
        for step, i, _ in lives:
            self.game_over[step, i] = False
        every = np.ndindex(25, NUM_ENVS)
        self.places = {self.observations[step, i].tobytes(): (step, i) for step, i in every}

    def step(self, actions):
        *answer, infos = super().step(actions)
        if infos:
            infos["final_info"]["_episode"] = self.game_over[self.time - 1]
        return *answer, infos

    def first(self, step: int) -> torch.Tensor:
        """For which environments the observation of this step is the first of an episode."""
        ended = self.terminated | self.truncated
        return torch.as_tensor(ended[step - 1] if step else np.ones(NUM_ENVS, dtype=bool))

    def place(self, picture: torch.Tensor) -> tuple[int, int]:
        """The step and the environment of an observation."""
        key = picture.numpy().tobytes()
        assert key in self.places, "this was never observed"
        return self.places[key]


def plain_step(agent, features, state, first):
    """One step of the core, (envs, 512); returns what the heads see and the state behind it."""
    core = agent.gru if hasattr(agent, "gru") else agent.lstm
    weight_ih, weight_hh, bias_ih, bias_hh = (p.double() for p in core.parameters())
    state = torch.where(first[:, None], 0.0, state)
    if core is not getattr(agent, "lstm", None):
        r_x, z_x, n_x = F.linear(features, weight_ih, bias_ih).chunk(3, 1)
        r_h, z_h, n_h = F.linear(state, weight_hh, bias_hh).chunk(3, 1)
        z = (z_x + z_h).sigmoid()
        state = (1 - z) * (n_x + (r_x + r_h).sigmoid() * n_h).tanh() + z * state
        return state, state
    h, c = state
    gates = F.linear(features, weight_ih, bias_ih) + F.linear(h, weight_hh, bias_hh)
    i, f, g, o = gates.chunk(4, 1)  # PyTorch's order
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return h, torch.stack((h, c))


def plain_heads(agent, hidden, actions):
    """(envs, 3): log-probability of the actions, entropy, value."""
    heads = [(head.weight.double(), head.bias.double()) for head in (agent.actor, agent.critic)]
    log_pi = F.linear(hidden, *heads[0]).log_softmax(-1)
    logprob = log_pi.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    entropy = -(log_pi.exp() * log_pi).sum(-1)
    return torch.stack((logprob, entropy, F.linear(hidden, *heads[1]).squeeze(-1)), -1)


@dataclass
class Minibatch:
    places: list[tuple[int, int]]  # step, counted from the rollout's first, and environment
    said: torch.Tensor  # (samples, 3), see plain_heads
    expected: torch.Tensor
    gradient: torch.Tensor  # (samples, 512): of the sum of what was said, to the CNN's features
    expected_gradient: torch.Tensor


@dataclass
class Rollout:
    start: int  # its first step
    state: torch.Tensor  # of the plain LSTM, before that
    said: list[torch.Tensor] = field(default_factory=list)  # (envs, 3) for each step
    expected: list[torch.Tensor] = field(default_factory=list)
    actions: list[torch.Tensor] = field(default_factory=list)
    states: list[torch.Tensor] = field(default_factory=list)  # behind each step
    minibatches: list[Minibatch] = field(default_factory=list)


class Watch:
    """A run, or an evaluation, with the plain LSTM beside it."""

    def __init__(self, script, envs: PictureEnvs):
        self.script, self.envs = script, envs
        self.asynchronous = script.__name__ == "appo_async"
        self.plain_agent = script.Agent
        self.plain_gae = script.compute_vtrace if self.asynchronous else script.compute_gae
        self.state = torch.zeros((NUM_ENVS, 512) if self.asynchronous else (2, NUM_ENVS, 128))
        self.state = self.state.double()
        self.rollouts: list[Rollout] = []
        self.scalars: dict[str, list[float]] = {}

    def make_envs(self, args, num_envs, seed, frozen=None):
        if self.asynchronous and num_envs == 1:  # for its spaces
            return self.envs, pictures(1)
        assert num_envs == NUM_ENVS
        return self.envs, self.envs.reset(seed=seed)[0]

    def save(self, args, run, **state):
        return run | state

    def add_scalar(self, name, value, step):
        self.scalars.setdefault(name, []).append(float(value))

    def flush(self):
        pass

    def close(self):
        pass

    def make_agent(self, envs, args):
        watch = self

        class WatchedAgent(self.plain_agent):  # a class, so that copies are watched too
            def get_features(self, x):
                watch.features = super().get_features(x)
                return watch.features

            def get_action_and_value(self, x, state, done, action=None):
                answer = super().get_action_and_value(x, state, done, action)
                said = torch.stack(answer[1:4], -1)
                if action is None:
                    with torch.inference_mode(False), torch.no_grad():
                        watch.act(x, answer[0].clone(), said.double())
                elif len(x) == (NUM_STEPS + 1) * NUM_ENVS:  # the learner's first look at a batch
                    watch.rollouts[-1].judged = said.detach().unflatten(0, (-1, NUM_ENVS))
                else:
                    watch.learn(x, said)
                return answer

        self.agent = WatchedAgent(envs, args)
        with torch.no_grad():
            # a policy that is nearly uniform says little of the state
            self.agent.actor.weight *= 100
        return self.agent

    def act(self, x, actions, said):
        """A step of the rollout."""
        time = self.envs.time
        assert np.array_equal(x, self.envs.observations[time])
        if not self.rollouts or self.rollouts[-1].minibatches:
            self.rollouts.append(Rollout(time, self.state))
        rollout = self.rollouts[-1]
        step = plain_step(self.agent, self.features.double(), self.state, self.envs.first(time))
        hidden, self.state = step
        rollout.actions.append(actions)
        rollout.said.append(said)
        rollout.expected.append(plain_heads(self.agent, hidden, actions))
        rollout.states.append(self.state)

    def compute_vtrace(self, ratios, *args):
        self.rollouts[-1].ratios = ratios.clone()
        return self.compute_gae(*args, ratios=ratios)

    def compute_gae(self, rewards, values, dones, next_value, *more, ratios=None):
        rollout, time = self.rollouts[-1], self.envs.time
        rollout.rewards, rollout.next_value = rewards.clone(), next_value.clone()
        with torch.no_grad():
            # every other observation that can have a value, with the state of its environment
            first = self.envs.first(time)
            obs = self.envs.observations[time]
            rollout.expected_next_value = self.plain_value(obs, self.state, first)
            steps = zip(range(rollout.start, time), rollout.states, strict=True)
            never = torch.zeros(NUM_ENVS, dtype=bool)
            finals = [self.plain_value(self.envs.final_observations[t], s, never) for t, s in steps]
            rollout.final_values = torch.stack(finals)
        ratios = () if ratios is None else (ratios,)
        return self.plain_gae(*ratios, rewards, values, dones, next_value, *more)

    def plain_value(self, obs, state, first):
        features = self.agent.get_features(torch.as_tensor(obs)).double()
        hidden, _ = plain_step(self.agent, features, state, first)
        return plain_heads(self.agent, hidden, torch.zeros(NUM_ENVS, dtype=int))[:, 2]

    def learn(self, x, said):
        """A minibatch: the plain LSTM goes through the whole rollout with the weights of now."""
        rollout = self.rollouts[-1]
        assert said.requires_grad
        (gradient,) = torch.autograd.grad(said.sum(), self.features, retain_graph=True)
        places = [self.envs.place(picture) for picture in x]
        places = [(step - rollout.start, i) for step, i in places]
        assert all(0 <= step < NUM_STEPS for step, _ in places), "of another rollout"
        steps, inds = torch.tensor(places).T

        obs = self.envs.observations[rollout.start : rollout.start + NUM_STEPS]
        with torch.no_grad():
            features = self.agent.get_features(torch.as_tensor(obs).flatten(0, 1)).double()
        features = features.unflatten(0, (NUM_STEPS, NUM_ENVS)).requires_grad_()
        state, expected = rollout.state, []
        for step in range(NUM_STEPS):
            first = self.envs.first(rollout.start + step)
            hidden, state = plain_step(self.agent, features[step], state, first)
            expected.append(plain_heads(self.agent, hidden, rollout.actions[step]))
        expected = torch.stack(expected)[steps, inds]
        (expected_gradient,) = torch.autograd.grad(expected.sum(), features)
        parts = (said, expected, gradient, expected_gradient[steps, inds])
        minibatch = Minibatch(places, *(part.detach().double() for part in parts))
        rollout.minibatches.append(minibatch)

    # what a test reads
    @property
    def minibatches(self) -> list[Minibatch]:
        return [minibatch for rollout in self.rollouts for minibatch in rollout.minibatches]

    def assert_states_of_rollouts(self):
        for rollout in self.rollouts:
            assert_close(torch.stack(rollout.said), torch.stack(rollout.expected), atol=1e-5)
            assert_close(rollout.next_value, rollout.expected_next_value, atol=1e-5)

    def assert_states_of_updates(self):
        for rollout in self.rollouts if self.asynchronous else ():
            # what was judged before the first step of an update is what was said in the rollout
            assert_close(rollout.judged[:-1], torch.stack(rollout.said), atol=1e-5)
            assert_close(rollout.ratios, torch.ones(NUM_STEPS, NUM_ENVS), atol=1e-5)
        for minibatch in self.minibatches:
            assert_close(minibatch.said, minibatch.expected, atol=1e-5)


def play(script, tmp_path, ends=(), lives=(), run=None, **changes) -> Watch:
    """Run `script.train` for one iteration, or `script.evaluate` with the agent of a run."""
    sizes = {"num_envs": NUM_ENVS, "num_steps": NUM_STEPS, "num_minibatches": 2}
    sizes |= {"update_epochs": 2, "total_timesteps": NUM_ENVS * NUM_STEPS, "learning_rate": 1e-3}
    flags = {"eval_episodes": NUM_ENVS if run else 0, "device": "cpu", "run_dir": str(tmp_path)}
    changes |= CORES.get(script.__name__, {})
    args = script.Args(**sized(script.__name__, sizes | flags | changes))
    seen = Watch(script, PictureEnvs(script, [*ends, *lives], lives))
    with pytest.MonkeyPatch.context() as patch:
        for name in {"make_envs", "compute_gae", "compute_vtrace", "save"} & set(vars(script)):
            patch.setattr(script, name, getattr(seen, name))
        patch.setattr(script, "Agent", seen.make_agent)
        if run:
            script.evaluate(args, run)
        else:
            patch.setattr(script, "SummaryWriter", lambda *_, **__: seen)
            script.train(args)
    return seen


# episodes that end within a rollout, in its first and in its last step, and in two steps running
ENDS = [(0, 1, "terminated"), (2, 0, "terminated"), (3, 0, "truncated"), (4, 2, "both")]
ENDS += [(7, 1, "terminated"), (8, 1, "terminated"), (11, 3, "truncated")]


@shown_by("lstm 1")
def test_lstm_01_initialization(script):
    is_lstm = script.__name__ == "ppo_lstm"
    lstm = make_agent(script).lstm if is_lstm else make_agent(script, rnn="gru").gru
    parameters = {name: p.detach().double() for name, p in lstm.named_parameters()}
    weight_ih, weight_hh = parameters.pop("weight_ih_l0"), parameters.pop("weight_hh_l0")
    gates, size = (4, 128) if is_lstm else (3, 512)
    assert weight_ih.shape == (gates * size, 512) and weight_hh.shape == (gates * size, size)
    # orthogonal as a whole, all gates together
    for weight in (weight_ih, weight_hh):
        assert_close(weight.T @ weight, torch.eye(weight.shape[1]), atol=1e-5)
    assert parameters and not any(bias.any() for bias in parameters.values())
    if not is_lstm:
        return
    # so, where nothing is seen and nothing was said, half of the cell is forgotten
    cell = torch.randn(1, 128)
    _, (h, c) = lstm(torch.zeros(1, 512), (torch.zeros(1, 128), cell))
    assert_close(c.detach(), 0.5 * cell)
    assert_close(h.detach(), 0.5 * (0.5 * cell).tanh())


@shown_by("lstm 2")
def test_lstm_02_zero_state_at_the_start(script, tmp_path):
    # the plain LSTM's state is zero before the first step, and no rollout or update touches it; the
    # rollout ends with an episode in one environment, which is nothing to the others
    seen = play(script, tmp_path, ENDS, update_epochs=1, total_timesteps=TWO_ROLLOUTS)
    assert len(seen.rollouts) == 2
    carried = seen.rollouts[1].state[..., ~seen.envs.first(NUM_STEPS), :]
    assert carried.shape[-2] == 3 and carried.abs().mean() > 0.01
    seen.assert_states_of_rollouts()


def pieces(done):
    """Cut steps into stretches (start, end) before every done."""
    cuts = sorted({0, len(done), *np.flatnonzero(done).tolist()})
    return pairwise(cuts)


@shown_by("lstm 3")
def test_lstm_03_reset_at_episode_ends(script, tmp_path):
    agent = make_agent(script, **CORES.get(script.__name__, {}))
    rng = torch.Generator().manual_seed(0)
    channels = next(agent.network.parameters()).shape[1]
    obs = torch.as_tensor(pictures(8, 3)).expand(8, 3, channels, 84, 84)
    actions = torch.randint(3, (8, 3), generator=rng)
    state = torch.randn(agent.initial_state(3).shape, generator=rng).requires_grad_()
    done = torch.zeros(8, 3)
    done[0, 1] = done[3, 0] = done[4, 0] = done[4, 1] = done[7, 0] = 1
    whole = agent.get_action_and_value(obs.flatten(0, 1), state, done.flatten(), actions.flatten())
    said = torch.stack(whole[1:4], -1).unflatten(0, (8, 3))
    if hasattr(agent, "get_value"):
        assert_close(agent.get_value(obs.flatten(0, 1), state, done.flatten()), whole[3])

    with torch.no_grad():
        # a sequence with ends in it is what its episodes are, each on its own from the state zero
        for i in range(3):
            for start, end in pieces(done[:, i]):
                own = agent.initial_state(1) if done[start, i] else state[..., i : i + 1, :]
                never = torch.zeros(end - start)
                inputs = (obs[start:end, i], own, never, actions[start:end, i])
                alone = agent.get_action_and_value(*inputs)
                assert_close(said[start:end, i], torch.stack(alone[1:4], -1), atol=1e-5)
            assert_close(whole[4][..., i : i + 1, :], alone[4], atol=1e-5)
        # and what its steps are, one after the other, as in a rollout
        memory = state
        for step in range(8):
            *alone, memory = agent.get_action_and_value(
                obs[step], memory, done[step], actions[step]
            )
            assert_close(said[step], torch.stack(alone[1:4], -1), atol=1e-5)
        assert_close(whole[4], memory, atol=1e-5)
    # the gradient stops where the memory does
    (gradient,) = torch.autograd.grad(said[4:, :, 2].sum(), state)
    reached = gradient.abs().sum(-1).reshape(-1, 3).sum(0) > 0
    assert reached.tolist() == [False, False, True]

    # training is told of the right ends: an observation that is the first of an episode comes
    # without memories, in the rollout, behind it and in the update
    flags = {"gamma": 0.5, "update_epochs": 1}
    if bootstraps := hasattr(script.Args, "bootstrap_truncated"):
        flags["bootstrap_truncated"] = True
    seen = play(script, tmp_path, ENDS, total_timesteps=TWO_ROLLOUTS, **flags)
    seen.assert_states_of_rollouts()
    seen.assert_states_of_updates()
    # an episode's last observation still has those of its own environment
    for rollout in seen.rollouts if bootstraps else ():
        steps = slice(rollout.start, rollout.start + NUM_STEPS)
        cut = torch.as_tensor(seen.envs.truncated & ~seen.envs.terminated)[steps]
        assert cut.any()
        expected = torch.as_tensor(seen.envs.rewards[steps]) + 0.5 * cut * rollout.final_values
        assert_close(rollout.rewards, expected, atol=1e-5)

    # so it is in an evaluation: the memory is kept, up to the end of a life or a game
    ends = [(5, 0, "terminated"), (6, 1, "truncated"), (9, 2, "terminated"), (15, 3, "terminated")]
    lives = [(3, 0, "terminated"), (7, 3, "terminated"), (8, 0, "terminated")]
    run = {"agent": seen.agent.state_dict()}
    seen = play(script, tmp_path, ends, lives, run)
    assert seen.envs.time == 16 and len(seen.rollouts) == 1
    assert_close(
        torch.stack(seen.rollouts[0].said), torch.stack(seen.rollouts[0].expected), atol=1e-5
    )


@shown_by("lstm 4")
def test_lstm_04_sequential_minibatches(script, tmp_path):
    # with a learning rate of 0 the ratio is 1 all through an update
    flags = {"update_epochs": 6, "learning_rate": 0.0}
    seen = play(script, tmp_path, ENDS, **flags)
    deals = []
    for minibatch in seen.minibatches:
        steps, inds = np.array(minibatch.places).T
        envs = frozenset(inds.tolist())
        assert len(envs) == 2 and len(steps) == 2 * NUM_STEPS
        for i in envs:  # each with all of its steps, in the order of time
            assert steps[inds == i].tolist() == list(range(NUM_STEPS))
        deals.append(envs)
    assert len(deals) == 6 * 2
    epochs = list(zip(deals[::2], deals[1::2], strict=True))
    assert all(a | b == frozenset(range(NUM_ENVS)) for a, b in epochs), "not each exactly once"
    assert len(set(epochs)) > 1, "each epoch in the same order"
    assert len({frozenset(epoch) for epoch in epochs}) > 1, "always the same ones together"
    for minibatch in seen.minibatches:
        rollout = torch.stack(seen.rollouts[0].said)
        steps, inds = np.array(minibatch.places).T
        assert_close(minibatch.said, rollout[steps, inds], atol=1e-5)
    for name in ("approx_kl", "old_approx_kl"):
        assert abs(seen.scalars[f"losses/{name}"][0]) < 1e-5, "the ratio is not 1"


@shown_by("lstm 5")
def test_lstm_05_states_are_rebuilt(script, tmp_path):
    seen = play(script, tmp_path, ENDS, total_timesteps=TWO_ROLLOUTS)
    # the weights move: what an epoch says is by those of now, from the state before the rollout
    seen.assert_states_of_updates()
    first, *_, last = seen.rollouts[1].minibatches
    assert (last.said.mean(0) - first.said.mean(0)).abs().max() > 1e-2
    # and the gradient goes back through the whole rollout
    for minibatch in seen.minibatches:
        assert_close(minibatch.gradient, minibatch.expected_gradient, rtol=1e-3, atol=1e-5)
