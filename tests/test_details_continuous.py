"""One behavioural test for each of the details of continuous actions, as in test_details.py.

What normalizes is compared with openai/baselines' VecNormalize, written again in numpy, over the
same random stream of observations, rewards and ends.
"""

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from test_details import assert_close, mlp, shown_by
from torch import nn
from torch.distributions import Independent, Normal

ACTION_SHAPES = ((3,), (2, 3), (1,))
ENTROPY_OF_1 = 0.5 * np.log(2 * np.pi * np.e)  # of a normal distribution with deviation 1


# --- the agent


def new_agent(script, action_shape: tuple) -> nn.Module:
    spaces = SimpleNamespace(
        single_observation_space=gym.spaces.Box(-10, 10, (5,), np.float32),
        single_action_space=gym.spaces.Box(-0.5, 2.0, action_shape, np.float32),
    )
    torch.manual_seed(0)
    return script.Agent(spaces, script.Args())


def random_agent(script, action_shape: tuple) -> nn.Module:
    """An agent in the middle of its training: no two of its parameters are alike."""
    agent = new_agent(script, action_shape)
    for parameter in agent.parameters():
        nn.init.normal_(parameter, std=0.4)
    return agent


def random_obs(num: int) -> torch.Tensor:
    return torch.randn(num, 5, generator=torch.Generator().manual_seed(1))


def draw(agent: nn.Module, obs: torch.Tensor, num: int) -> torch.Tensor:
    """Actions for one observation, (num, *action_shape), float64."""
    torch.manual_seed(2)
    with torch.inference_mode():
        return agent.get_action_and_value(obs.expand(num, -1))[0].double()


@shown_by("continuous 1")
def test_continuous_01_normal_distribution(script):
    for action_shape in ACTION_SHAPES:
        agent, obs = random_agent(script, action_shape), random_obs(16)
        action, logprob, entropy, _ = agent.get_action_and_value(obs)
        assert action.shape == (16, *action_shape)
        mean, std = agent.actor_mean(obs), agent.actor_logstd.exp()
        normal = Independent(Normal(mean.double(), std.double()), len(action_shape))
        assert_close(logprob, normal.log_prob(action))
        assert_close(entropy, normal.entropy())
        given = torch.randn_like(action) * 3
        same, logprob, entropy, _ = agent.get_action_and_value(obs, given)
        assert torch.equal(same, given)
        assert_close(logprob, normal.log_prob(given))
        assert_close(entropy, normal.entropy())

        # samples have this distribution: as many in each tenth of it as there should be
        samples = draw(agent, obs[0], 20_000)
        tenths = (Normal(mean[0], std[0]).cdf(samples) * 10).long().clamp(0, 9).flatten(1)
        for component in tenths.T:
            shares = component.bincount(minlength=10) / 20_000
            assert (shares - 0.1).abs().max() < 0.012  # 5.6 standard deviations

    # the mean is what the last layer says, be it far outside of the action space
    head = [layer for layer in agent.actor_mean if isinstance(layer, nn.Linear)][-1]
    nn.init.zeros_(head.weight)
    nn.init.constant_(head.bias, 7.0)
    assert draw(agent, obs[0], 5_000).mean().item() == pytest.approx(7.0, abs=0.2)

    # at the start of a run the mean is near 0 in every state
    mean = new_agent(script, (3,)).actor_mean(random_obs(100))
    assert 0 < mean.abs().max() < 0.05


@shown_by("continuous 2")
def test_continuous_02_state_independent_deviation(script, tmp_path):
    for action_shape in ACTION_SHAPES:
        size = int(np.prod(action_shape))
        agent, obs = random_agent(script, action_shape), 5 * random_obs(64)
        _, logprob, entropy, _ = agent.get_action_and_value(obs)
        assert_close(entropy, entropy[:1].expand(64), rtol=1e-6)
        # one parameter makes the entropy, a number for each component, which the policy learns too
        assert entropy.requires_grad
        learned = []
        for loss in (entropy, logprob):
            agent.zero_grad()
            loss.sum().backward(retain_graph=True)
            learned.append({n for n, p in agent.named_parameters() if p.grad is not None})
        (name,) = learned[0]
        logstd = agent.get_parameter(name)
        assert logstd.grad.any()  # of the log-probability
        assert logstd.numel() == size
        assert len({round(x, 6) for x in logstd.flatten().tolist()}) == size
        std = logstd.detach().flatten().exp().double()
        for state in obs[:2]:
            assert_close(draw(agent, state, 20_000).flatten(1).std(0), std, rtol=0.03)
        assert_close(entropy[0].detach(), std.log().sum() + size * ENTROPY_OF_1)

    # 1 at the start, and something else after an update
    seen = train(script, tmp_path)
    first, last = seen.states[0], seen.run["agent"]
    assert torch.equal(first[name], torch.zeros_like(first[name]))
    assert (last[name] != 0).all()
    assert seen.entropies[0] == pytest.approx(3 * ENTROPY_OF_1)


@shown_by("continuous 3")
def test_continuous_03_independent_components(script):
    for action_shape in ACTION_SHAPES:
        agent, obs = random_agent(script, action_shape), random_obs(16)
        action, logprob, entropy, value = agent.get_action_and_value(obs)
        assert action.shape == (16, *action_shape)
        assert logprob.shape == entropy.shape == value.shape == (16,)
        normal = Normal(agent.actor_mean(obs).double(), agent.actor_logstd.double().exp())
        assert_close(logprob, normal.log_prob(action).flatten(1).sum(1))
        assert_close(entropy, normal.entropy().expand(16, *action_shape).flatten(1).sum(1))
        # moving one component changes the log-probability by that component's part, and no more
        for i in range(int(np.prod(action_shape))):
            moved = action.clone()
            moved.view(16, -1)[:, i] += 1.5
            change = agent.get_action_and_value(obs, moved)[1] - logprob
            parts = normal.log_prob(moved) - normal.log_prob(action)
            assert_close(change.detach(), parts.detach().flatten(1)[:, i], atol=1e-5)
        # components are drawn one by one, and so are the states of a batch
        samples = draw(agent, obs[0], 20_000).flatten(1)
        samples = torch.cat((samples[::2], samples[1::2]), 1)
        correlation = torch.corrcoef(samples.T).reshape(len(samples[0]), -1)
        assert (correlation - torch.eye(len(correlation))).abs().max() < 0.06  # 6 deviations


@shown_by("continuous 4")
def test_continuous_04_two_networks(script):
    for action_shape in ACTION_SHAPES:
        agent, obs = random_agent(script, action_shape), random_obs(16)
        action, logprob, entropy, value = agent.get_action_and_value(obs)
        layers = {
            name: [m for m in getattr(agent, name).modules() if isinstance(m, nn.Linear)]
            for name in ("actor_mean", "critic")
        }
        assert_close(value, mlp(obs.double(), layers["critic"])[:, 0])
        assert_close(agent.get_value(obs), value)
        mean = mlp(obs.double(), layers["actor_mean"]).unflatten(1, action_shape)
        normal = Normal(mean, agent.actor_logstd.double().exp())
        assert_close(logprob, normal.log_prob(action).flatten(1).sum(1))
        # neither learns from the other's loss
        parameters = dict(agent.named_parameters())
        for loss, own in ((value, "critic"), (logprob + entropy, "actor")):
            grads = torch.autograd.grad(
                loss.sum(), list(parameters.values()), retain_graph=True, allow_unused=True
            )
            moved = {name for name, grad in zip(parameters, grads, strict=True) if grad is not None}
            assert moved == {name for name in parameters if name.startswith(own)}


# --- the environment


MADE: list["Stream"] = []  # environments, in the order in which they were made


class Stream(gym.Env):
    """Observations, rewards and ends at random, whatever is done; it keeps the actions.

    Observations are of several sizes: one is tiny, one large and far from 0, one constant. A few
    of them, and of the rewards, are far out. A tenth of the steps ends an episode, by a time limit,
    by the task, or by both.
    """

    scale = np.array([1.0, 1e-4, 30.0, 2.0, 0.0])
    offset = np.array([0.0, 0.0, 100.0, -3.0, 0.5])
    observation_space = gym.spaces.Box(-np.inf, np.inf, (5,), np.float64)  # as MuJoCo's

    def __init__(self, action_shape=(3,), reward_scale: float = 1.0, render_mode=None):
        self.reward_scale, self.render_mode = reward_scale, render_mode
        size = int(np.prod(action_shape))
        low, high = -1 - np.arange(size) / 10, 0.3 + np.arange(size) / 5
        low, high = (x.reshape(action_shape).astype(np.float32) for x in (low, high))
        self.action_space = gym.spaces.Box(low, high, dtype=np.float32)
        self.actions: list[np.ndarray] = []
        MADE.append(self)

    def draw(self, size: int) -> np.ndarray:
        far = 60 * np.sign(self.np_random.normal(size=size))
        return np.where(self.np_random.random(size) < 0.002, far, self.np_random.normal(size=size))

    def observe(self):
        return self.offset + self.scale * self.draw(5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe(), {}

    def step(self, action):
        self.actions.append(np.array(action))
        reward = self.reward_scale * (0.5 + self.draw(1).item())
        end = self.np_random.random()
        return self.observe(), reward, end < 0.06, 0.04 < end < 0.1, {}


for name, kwargs in {
    "Stream-v0": {},
    "StreamMatrix-v0": {"action_shape": (2, 3)},
    "StreamTinyRewards-v0": {"reward_scale": 1e-4},
}.items():
    gym.register(name, Stream, kwargs=kwargs, disable_env_checker=True)


class RunningMeanStd:
    """baselines common/running_mean_std.py:5-33"""

    def __init__(self, shape):
        self.mean, self.var, self.count = np.zeros(shape), np.ones(shape), 1e-4

    def update(self, x):
        batch_mean, batch_var, batch_count = x.mean(axis=0), x.var(axis=0), len(x)
        delta, tot_count = batch_mean - self.mean, self.count + batch_count
        m_a, m_b = self.var * self.count, batch_var * batch_count
        m_2 = m_a + m_b + np.square(delta) * self.count * batch_count / tot_count
        self.mean = self.mean + delta * batch_count / tot_count
        self.var, self.count = m_2 / tot_count, tot_count


class Baselines:
    """baselines common/vec_env/vec_normalize.py, in float64, over an environment of Stream.

    clip: the range of what comes out; infinite, and one sees what the other details do. saved: the
    statistics of a checkpoint. training: False, and they stay what they are.
    """

    def __init__(self, env_id, num_envs, seed, gamma, clip=np.inf, saved=None, training=True):
        self.envs = gym.vector.SyncVectorEnv(
            [lambda: gym.make(env_id)] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP
        )
        self.idle = np.zeros(self.envs.action_space.shape, np.float32)
        self.gamma, self.clip, self.training = gamma, clip, training
        self.ob_rms, self.ret_rms = RunningMeanStd(5), RunningMeanStd(())
        for name, rms in (("obs", self.ob_rms), ("returns", self.ret_rms)):
            for key, value in saved[name].items() if saved else ():
                setattr(rms, key, np.array(value.tolist()))
        self.ret = np.zeros(num_envs)
        self.obs = self._obfilt(self.envs.reset(seed=seed)[0])

    def normalized(self, obs):
        normal = (obs - self.ob_rms.mean) / np.sqrt(self.ob_rms.var + 1e-8)
        return np.clip(normal, -self.clip, self.clip)

    def _obfilt(self, obs):
        if self.training:
            self.ob_rms.update(obs)
        return self.normalized(obs)

    def step(self):
        """Return observations, rewards, ends, and {environment: last observation of an episode}."""
        obs, rews, terminated, truncated, infos = self.envs.step(self.idle)
        self.raw_rewards, news = rews, terminated | truncated
        # baselines never sees the last observation of an episode: it tells nothing to statistics
        final_obs = {i: self.normalized(infos["final_obs"][i]) for i in np.flatnonzero(news)}
        self.ret = self.ret * self.gamma + rews
        if self.training:
            self.ret_rms.update(self.ret)
        rews = np.clip(rews / np.sqrt(self.ret_rms.var + 1e-8), -self.clip, self.clip)
        self.ret[news] = 0.0
        return self._obfilt(obs), rews, (terminated, truncated), final_obs


def side_by_side(script, clip=np.inf, num_envs=3, steps=150, gamma=0.8, env_id="Stream-v0"):
    """Yield (ours, theirs) of a reset and of each step behind it.

    Both have obs, rewards, ends and final_obs, {environment: last observation of an episode}.
    """
    envs, obs, *_ = script.make_envs(script.Args(env_id=env_id, gamma=gamma), num_envs, 11)
    theirs = Baselines(env_id, num_envs, 11, gamma, clip)
    assert obs.dtype == np.float32 and obs.shape == (num_envs, 5)
    nothing = {"rewards": np.zeros(num_envs), "ends": (np.zeros(num_envs),) * 2, "final_obs": {}}
    yield SimpleNamespace(obs=obs, **nothing), SimpleNamespace(obs=theirs.obs, **nothing)
    for _ in range(steps):
        obs, rewards, terminated, truncated, infos = envs.step(theirs.idle)
        assert obs.dtype == np.float32 and obs.shape == (num_envs, 5)
        ended = np.flatnonzero(terminated | truncated)
        ours = (obs, rewards, (terminated, truncated), {i: infos["final_obs"][i] for i in ended})
        names = ("obs", "rewards", "ends", "final_obs")
        yield tuple(
            SimpleNamespace(**dict(zip(names, values, strict=True)))
            for values in (ours, theirs.step())
        )
    envs.close()


def train(script, run_dir, env_id="Stream-v0", **changes) -> SimpleNamespace:
    """Train for one iteration of 2 environments x 16 steps unless told otherwise, or evaluate.

    obs, actions, logprobs: what the agent saw and did, step by step. updates: (obs, actions,
    log-probabilities) of each minibatch. states: its weights at each of them. entropies. received:
    actions as each of the environments got them. run: the checkpoint.
    """
    sizes = {"num_envs": 2, "num_steps": 16, "total_timesteps": 32, "num_minibatches": 2}
    sizes |= {"update_epochs": 2, "eval_episodes": 0, "device": "cpu", "run_dir": str(run_dir)}
    args = script.Args(env_id=env_id, **(sizes | changes))
    seen = SimpleNamespace(args=args, obs=[], actions=[], logprobs=[], updates=[])
    seen.states, seen.entropies = [], []
    plain = script.Agent.get_action_and_value
    MADE.clear()

    def watched(agent, x, action=None):
        results = plain(agent, x, action)
        if action is None:
            seen.obs.append(x.clone())
            seen.actions.append(results[0].clone())
            seen.logprobs.append(results[1].clone())
        else:
            seen.updates.append((x, action, results[1].detach()))
            seen.states.append({k: v.clone() for k, v in agent.state_dict().items()})
            seen.entropies.append(results[2].mean().item())
        return results

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script.Agent, "get_action_and_value", watched)
        if args.evaluate:
            script.evaluate(args, script.load("evaluate", args.evaluate))
        else:
            script.train(args)
    seen.received = [np.array(env.actions) for env in MADE]
    seen.run = script.load("resume", str(run_dir))
    return seen


def clip_to_bounds(actions: torch.Tensor, env: Stream) -> np.ndarray:
    return np.clip(actions.numpy(), env.action_space.low, env.action_space.high)


@shown_by("continuous 5")
def test_continuous_05_clipped_actions(script, tmp_path):
    for number, env_id in enumerate(("Stream-v0", "StreamMatrix-v0")):
        run_dir = tmp_path / str(number)
        seen = train(script, run_dir, env_id)
        space = MADE[0].action_space
        sampled = torch.stack(seen.actions)
        assert sampled.shape == (16, 2, *space.shape)
        # samples go beyond every bound, and what the environment gets stops there
        low, high = torch.as_tensor(space.low), torch.as_tensor(space.high)
        assert (sampled < low).flatten(0, 1).any(0).all()
        assert (sampled > high).flatten(0, 1).any(0).all()
        for i, received in enumerate(seen.received):
            assert np.array_equal(received, clip_to_bounds(sampled[:, i], MADE[i]))
        # the update learns from what was sampled, and so does the log-probability
        obs = torch.stack(seen.obs).flatten(0, 1)
        for update, (mb_obs, mb_actions, newlogprob) in enumerate(seen.updates):
            rows = (mb_obs.unsqueeze(1) == obs).all(-1)
            assert (rows.sum(1) == 1).all()
            rows = rows.int().argmax(1)
            assert torch.equal(mb_actions, sampled.flatten(0, 1)[rows])
            if update == 0:  # nothing has moved yet
                assert_close(newlogprob, torch.stack(seen.logprobs).flatten()[rows], atol=1e-5)

        # an evaluation clips, too
        played = train(script, run_dir, env_id, evaluate=str(run_dir), eval_episodes=2)
        sampled = torch.stack(played.actions)
        for i, received in enumerate(played.received):
            assert np.array_equal(received, clip_to_bounds(sampled[:, i], MADE[i]))


def check_run(seen, theirs, name: str) -> None:
    """Compare the statistics in a checkpoint, and observations as the agent saw them."""
    for obs in seen.obs:
        assert_close(obs, theirs.obs, rtol=1e-5)
        theirs.obs = theirs.step()[0]
    saved, rms = seen.run["normalizer"][name], {"obs": theirs.ob_rms, "returns": theirs.ret_rms}
    assert set(saved) == {"mean", "var", "count"}
    for key, value in saved.items():
        # in full precision, and of the kind that a checkpoint may hold
        assert isinstance(value, torch.Tensor) and value.dtype == torch.float64
        both = (torch.as_tensor(x, dtype=torch.float64) for x in (value, getattr(rms[name], key)))
        assert_close(*both, rtol=1e-12, atol=1e-14)


def check_checkpoints(script, run_dir, name: str) -> None:
    """Compare the statistics of a run and of the run that goes on from it."""
    flags = {"gamma": 0.8, "seed": 3}
    seen = train(script, run_dir, **flags)
    check_run(seen, Baselines("Stream-v0", 2, 3, 0.8, clip=10), name)
    # the environments start anew, with another seed; the statistics go on
    saved = seen.run["normalizer"]
    seen = train(script, run_dir, resume=str(run_dir), total_timesteps=64, **flags)
    assert seen.run["global_step"] == 64
    check_run(seen, Baselines("Stream-v0", 2, 3 + 32, 0.8, clip=10, saved=saved), name)


@shown_by("continuous 6")
def test_continuous_06_observation_normalization(script, tmp_path):
    for num_envs in (3, 1):
        ends = 0
        for ours, theirs in side_by_side(script, num_envs=num_envs):
            inside = np.abs(theirs.obs) < 9.9  # what is clipped is another detail
            assert_close(ours.obs[inside], theirs.obs[inside], rtol=1e-5)
            # the last observation of an episode is normalized, but not counted
            for i, final_obs in theirs.final_obs.items():
                inside = np.abs(final_obs) < 9.9
                assert_close(ours.final_obs[i][inside], final_obs[inside], rtol=1e-5)
                ends += 1
        assert ends > 5
    check_checkpoints(script, tmp_path, "obs")

    # an evaluation normalizes by the statistics of the checkpoint, which stay what they are
    before = (tmp_path / "checkpoint.pt").read_bytes()
    seen = train(script, tmp_path, evaluate=str(tmp_path), eval_episodes=3, seed=3)
    saved = seen.run["normalizer"]
    theirs = Baselines("Stream-v0", 3, 3 + 10**9, 0.8, clip=10, saved=saved, training=False)
    assert len(seen.obs) > 5
    check_run(seen, theirs, "obs")
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


@shown_by("continuous 7")
def test_continuous_07_observation_clipping(script):
    clipped = []
    for ours, theirs in side_by_side(script, clip=10, num_envs=8):
        assert_close(ours.obs, theirs.obs, rtol=1e-5)
        for i, final_obs in theirs.final_obs.items():
            assert_close(ours.final_obs[i], final_obs, rtol=1e-5)
        clipped += ours.obs[np.abs(theirs.obs) == 10].tolist()
    assert clipped.count(10) > 0 and clipped.count(-10) > 0
    assert len(clipped) == clipped.count(10) + clipped.count(-10)

    # and the space says so
    envs, obs, *_ = script.make_envs(script.Args(env_id="Stream-v0"), 2, 0)
    assert envs.single_observation_space == gym.spaces.Box(-10, 10, (5,), np.float32)
    assert obs in envs.observation_space


@shown_by("continuous 8")
def test_continuous_08_reward_scaling(script, tmp_path):
    for num_envs, gamma, env_id in (
        (3, 0.8, "Stream-v0"),
        (1, 0.99, "Stream-v0"),
        (3, 0.8, "StreamTinyRewards-v0"),
    ):
        ends = np.zeros(2)
        for ours, theirs in side_by_side(script, num_envs=num_envs, gamma=gamma, env_id=env_id):
            inside = np.abs(theirs.rewards) < 9.9  # what is clipped is another detail
            assert_close(ours.rewards[inside], theirs.rewards[inside], rtol=1e-9, atol=0)
            assert np.array_equal(ours.ends, theirs.ends)
            ends += np.sum(theirs.ends, axis=1)
        assert ends.min() > 3
    check_checkpoints(script, tmp_path, "returns")

    # in an evaluation the statistics stay what they are
    run = script.load("evaluate", str(tmp_path))
    envs, *_ = script.make_envs(script.Args(env_id="Stream-v0", gamma=0.8), 2, 0, frozen=run)
    theirs = Baselines("Stream-v0", 2, 0, 0.8, saved=run["normalizer"], training=False)
    for _ in range(30):
        _, rewards, *_ = envs.step(theirs.idle)
        expected = theirs.step()[1]
        inside = np.abs(expected) < 9.9
        assert_close(rewards[inside], expected[inside], rtol=1e-9, atol=0)


@shown_by("continuous 9")
def test_continuous_09_reward_clipping(script):
    clipped, score, scores = [], np.zeros(8), []
    envs, *_ = script.make_envs(script.Args(env_id="Stream-v0", gamma=0.5), 8, 12)
    theirs = Baselines("Stream-v0", 8, 12, gamma=0.5, clip=10)
    for _ in range(250):
        _, rewards, terminated, truncated, infos = envs.step(theirs.idle)
        expected = theirs.step()[1]
        assert_close(rewards, expected, rtol=1e-9)
        clipped += rewards[np.abs(expected) == 10].tolist()
        # the score of an episode is neither scaled nor clipped
        score += theirs.raw_rewards
        for i, episodic_return, _ in script.finished_episodes(infos):
            scores.append(episodic_return)
            assert episodic_return == pytest.approx(score[i])
        score[terminated | truncated] = 0
    assert clipped.count(10) > 0 and clipped.count(-10) > 0
    assert len(clipped) == clipped.count(10) + clipped.count(-10)
    assert len(scores) > 20
