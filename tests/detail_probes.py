"""What the tests of the details watch a script with: scripted environments, a small agent, a run.

`watch` calls `script.train` on a scripted vector environment with a linear agent, and returns what
went in and out: one Rollout for each iteration, one Minibatch for each step of the optimizer.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from types import ModuleType, SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import sized
from torch import nn
from torch.optim import optimizer as optim

# what each script's environment looks like to its agent, and to the stand-in for that agent
IMAGE_SCRIPTS = ("ppo_atari", "ppo_lstm", "ppo_multidiscrete", "envpool_ppo", "ppo_distributed")
IMAGE_SCRIPTS += ("appo_async",)
NUM_FRAMES = {"ppo_lstm": 1}  # of an image observation; 4 in the others
# between the observation and the action, get_action_and_value takes the state and done of the
# LSTM or GRU, or a mask
EXTRA_INPUTS = {"ppo_lstm": 2, "ppo_multidiscrete": 1, "appo_async": 2}
ACTION_SPACES = {
    "ppo_continuous": gym.spaces.Box(-1, 1, (3,), np.float32),
    "ppo_multidiscrete": gym.spaces.MultiDiscrete([2, 3]),
}


def action_space(script: ModuleType) -> gym.Space:
    return ACTION_SPACES.get(script.__name__, gym.spaces.Discrete(3))


def policy_outputs(space: gym.Space) -> int:
    """How many numbers a network puts out for a policy over these actions."""
    if isinstance(space, gym.spaces.MultiDiscrete):
        return int(space.nvec.sum())
    return space.shape[0] if isinstance(space, gym.spaces.Box) else int(space.n)


def agent_spaces(script: ModuleType) -> SimpleNamespace:
    """The spaces that Agent of a script reads from its vector environment."""
    if script.__name__ in IMAGE_SCRIPTS:
        shape = (NUM_FRAMES.get(script.__name__, 4), 84, 84)
        obs_space = gym.spaces.Box(0, 255, shape, np.uint8)
    else:
        obs_space = gym.spaces.Box(-np.inf, np.inf, (5,), np.float32)
    spaces = {"single_observation_space": obs_space, "single_action_space": action_space(script)}
    return SimpleNamespace(**spaces)


def make_agent(script: ModuleType, **changes) -> nn.Module:
    torch.manual_seed(0)
    return script.Agent(agent_spaces(script), script.Args(**changes))


def random_obs(script: ModuleType, num: int, seed: int = 0) -> torch.Tensor:
    space = agent_spaces(script).single_observation_space
    rng = np.random.default_rng(seed)
    if space.dtype == np.uint8:
        return torch.as_tensor(rng.integers(0, 256, (num, *space.shape), dtype=np.uint8))
    return torch.as_tensor(rng.normal(size=(num, *space.shape)).astype(np.float32))


def extra_inputs(script: ModuleType, agent: nn.Module, num: int) -> tuple:
    """What an agent is given beside num observations, each the first of an episode."""
    if EXTRA_INPUTS.get(script.__name__) == 2:
        return agent.initial_state(num), torch.zeros(num)
    return (torch.ones(num, 5, dtype=torch.bool),) if script.__name__ in EXTRA_INPUTS else ()


def act(script: ModuleType, agent: nn.Module, obs: torch.Tensor, action=None) -> tuple:
    """Actions, log-probabilities, entropies and values of observations, none after another."""
    inputs = (obs, *extra_inputs(script, agent, len(obs)), action)
    return agent.get_action_and_value(*inputs)[:4]


def value_of(script: ModuleType, agent: nn.Module, obs: torch.Tensor) -> torch.Tensor:
    if script.__name__ == "appo_async":  # it asks for values together with all else
        return act(script, agent, obs, torch.zeros(len(obs), dtype=torch.int64))[3]
    memory = extra_inputs(script, agent, len(obs)) if script.__name__ == "ppo_lstm" else ()
    return agent.get_value(obs, *memory)


class ScriptedEnvs:
    """A vector environment that plays a table back; no two of its observations are alike.

    ends: (step, environment, "terminated", "truncated" or "both"), where episodes end.
    """

    def __init__(self, script: ModuleType, num_envs: int, ends=(), length: int = 64):
        rng = np.random.default_rng(7)
        # (2, 3), so that flattening a batch must leave the shape of an observation alone
        shape = (length + 1, num_envs, 2, 3)
        if script.__name__ in IMAGE_SCRIPTS:
            draw, dtype = lambda: rng.integers(0, 256, shape, dtype=np.uint8), np.uint8
        else:
            draw, dtype = lambda: rng.normal(size=shape).astype(np.float32), np.float32
        self.observations, self.final_observations = draw(), draw()
        self.rewards = rng.normal(size=(length, num_envs))
        self.terminated = np.zeros((length, num_envs), dtype=bool)
        self.truncated = np.zeros((length, num_envs), dtype=bool)
        for step, i, how in ends:
            self.terminated[step, i] = how != "truncated"
            self.truncated[step, i] = how != "terminated"
        low, high = (0, 255) if dtype == np.uint8 else (-np.inf, np.inf)
        self.single_observation_space = gym.spaces.Box(low, high, shape[2:], dtype)
        self.single_action_space = action_space(script)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self.num_envs = num_envs
        self.pooled = script.__name__ == "envpool_ppo"
        self.slices = [slice(0, num_envs)]  # all in one pool
        self.reset_seeds: list = []
        self.actions: list[np.ndarray] = []

    def reset(self, *, seed=None, options=None):
        self.reset_seeds.append(seed)
        self.time = 0
        obs = self.observations[0].copy()
        return obs if self.pooled else (obs, {})

    def send(self, actions, p=0):
        self.sent = actions

    def recv(self, p=0):
        return self.step(self.sent)

    def step(self, actions):
        t = self.time
        self.time += 1
        self.actions.append(np.array(actions))
        ended, infos = self.terminated[t] | self.truncated[t], {}
        if ended.any():
            final_obs = np.full(self.num_envs, None)
            for i in np.flatnonzero(ended):
                final_obs[i] = self.final_observations[t, i]
            episode = {"r": np.ones(self.num_envs), "l": np.ones(self.num_envs, dtype=int)}
            infos = {"final_obs": final_obs, "_final_obs": ended, "_final_info": ended}
            infos["final_info"] = {"episode": episode, "_episode": ended}
        if self.pooled:
            episodes = [(i, 1.0, 1) for i in np.flatnonzero(ended)]
            infos = {"episodes": episodes, "final_obs": self.final_observations[t]}
        obs = self.observations[t + 1]
        return obs, self.rewards[t].copy(), self.terminated[t], self.truncated[t], infos

    def statistics(self):
        return {}  # ppo_continuous.py keeps them in its checkpoint

    def close(self):
        pass


class LinearAgent(nn.Module):
    """A linear policy and a linear value, in the place of a script's Agent."""

    def __init__(self, envs, args):
        super().__init__()
        self.image = envs.single_observation_space.dtype == np.uint8
        size = int(np.prod(envs.single_observation_space.shape))
        self.action_space = envs.single_action_space
        self.bf16 = False
        self.actor = nn.Linear(size, policy_outputs(self.action_space))
        self.critic = nn.Linear(size, 1)
        if isinstance(self.action_space, gym.spaces.Box):
            self.actor_logstd = nn.Parameter(torch.zeros(self.action_space.shape))

    def get_features(self, x):
        x = x.flatten(1).float()
        return x / 64 - 2 if self.image else x

    def initial_state(self, num_envs):
        return torch.zeros(2, num_envs, 1)

    def get_value(self, x, *_):
        return self.critic(self.get_features(x)).squeeze(-1)

    def get_action_and_value(self, x, action=None):
        features = self.get_features(x)
        outputs = self.actor(features)
        if isinstance(self.action_space, gym.spaces.Box):
            std = self.actor_logstd.exp().expand_as(outputs)
            parts = [torch.distributions.Normal(outputs, std)]
        else:
            nvec = getattr(self.action_space, "nvec", np.array([outputs.shape[1]])).tolist()
            parts = [torch.distributions.Categorical(logits=y) for y in outputs.split(nvec, dim=1)]
        single = isinstance(self.action_space, gym.spaces.Discrete)
        if action is None:
            action = torch.stack([part.sample() for part in parts], -1).flatten(1)
            action = action.squeeze(1) if single else action
        if isinstance(self.action_space, gym.spaces.Box):
            logprob, entropy = parts[0].log_prob(action).sum(1), parts[0].entropy().sum(1)
        else:
            columns = action.unsqueeze(1) if single else action
            logprobs = [part.log_prob(columns[:, k]) for k, part in enumerate(parts)]
            logprob, entropy = sum(logprobs), sum(part.entropy() for part in parts)
        return action, logprob, entropy, self.critic(features).squeeze(-1)


@dataclass
class Minibatch:
    """One step of the optimizer; what has to do with numbers is in float64."""

    obs: torch.Tensor
    actions: torch.Tensor
    rows: torch.Tensor  # which samples of the rollout, time-major, these are
    logprob: torch.Tensor
    entropy: torch.Tensor
    value: torch.Tensor
    gradients: dict = field(default_factory=dict)  # of the loss with respect to those three
    raw: dict = field(default_factory=dict)  # by parameter, out of backward
    applied: dict = field(default_factory=dict)  # by parameter, as the optimizer takes them
    before: dict = field(default_factory=dict)  # parameters before the step
    after: dict = field(default_factory=dict)  # and behind it
    lr: float = 0.0


@dataclass
class Rollout:
    """One iteration. All but next_value and next_done are (num_steps, num_envs, ...)."""

    obs: torch.Tensor
    actions: torch.Tensor
    logprobs: torch.Tensor
    rewards: torch.Tensor
    values: torch.Tensor
    dones: torch.Tensor
    next_value: torch.Tensor
    next_done: torch.Tensor
    gamma: float
    gae_lambda: float
    advantages: torch.Tensor
    returns: torch.Tensor
    minibatches: list[Minibatch] = field(default_factory=list)


class Watch:
    """One short run of `train`, seen through its environments, agent, optimizer and log."""

    def __init__(self, script: ModuleType, args, envs: ScriptedEnvs):
        self.script, self.args, self.envs = script, args, envs
        self.extras = EXTRA_INPUTS.get(script.__name__, 0)
        self.make_infos = script.__name__ == "ppo_multidiscrete"
        self.asynchronous = script.__name__ == "appo_async"
        self.plain_gae = None if self.asynchronous else script.compute_gae
        self.plain_vtrace = script.compute_vtrace if self.asynchronous else None
        self.agent = None
        self.rollouts: list[Rollout] = []
        self.calls: list[tuple] = []  # of the agent, since the last rollout
        self.scalars: dict[str, list] = {}
        self.minibatch = None

    # what the script calls
    def make_envs(self, args, num_envs, seed, frozen=None, resumed=None):
        if num_envs != self.envs.num_envs:  # appo_async.py asks one for its spaces
            return ScriptedEnvs(self.script, num_envs), np.zeros((num_envs, 2, 3), np.uint8)
        first = self.envs.reset(seed=seed)
        if self.envs.pooled:
            return self.envs, first
        return self.envs, *(first if self.make_infos else first[:1])

    def save(self, args, run, **state):
        return run | state

    def add_scalar(self, name, value, step):
        self.scalars.setdefault(name, []).append((step, float(value)))

    def flush(self):
        pass

    def close(self):
        pass

    def make_agent(self, envs, args):
        watch = self

        class WatchedAgent(LinearAgent):  # a class, so that copies of the agent are watched too
            def initial_state(self, num_envs):
                state = super().initial_state(num_envs)
                return torch.zeros(num_envs, 0) if watch.asynchronous else state

            def get_action_and_value(self, x, *more):
                state = more[: watch.extras // 2]  # of an LSTM, handed back as it came
                action = more[watch.extras] if len(more) > watch.extras else None
                answer = super().get_action_and_value(x, action)
                if action is None:
                    watch.calls.append(tuple(part.clone() for part in (x, *answer)))
                elif not (watch.asynchronous and watch.calls):  # it judges the batch as a whole
                    watch.start_minibatch(x, *answer)
                return *answer, *state

        self.agent = WatchedAgent(envs, args)
        for name, parameter in self.agent.named_parameters():
            parameter.register_hook(self.keep_gradient(name, "raw"))
        return self.agent

    def compute_vtrace(self, ratios, *args):
        return self.keep_rollout(args[:7], self.plain_vtrace(ratios, *args))

    def compute_gae(self, *args):
        return self.keep_rollout(args, self.plain_gae(*args))

    def keep_rollout(self, args, answer):
        rewards, _, dones, next_value, next_done, gamma, gae_lambda = args
        advantages, returns = answer
        obs, actions, logprobs, _, own_values = map(torch.stack, zip(*self.calls, strict=True))
        parts = (logprobs, rewards, own_values, dones, next_value, next_done)
        parts = [part.double() for part in parts]
        gae = (advantages.double(), returns.double())
        self.rollouts.append(Rollout(obs, actions, *parts, gamma, gae_lambda, *gae))
        self.calls = []
        return advantages, returns

    # what is seen of an update
    def keep_gradient(self, name, where):
        def hook(gradient):
            getattr(self.minibatch, where)[name] = gradient.detach().double()

        return hook

    def start_minibatch(self, x, action, logprob, entropy, value):
        rollout = self.rollouts[-1]
        same = (x.unsqueeze(1) == rollout.obs.flatten(0, 1).unsqueeze(0)).flatten(2).all(-1)
        assert (same.sum(1) == 1).all(), "an update learns from observations of another rollout"
        outputs = {"logprob": logprob, "entropy": entropy, "value": value}
        doubles = {name: output.detach().double() for name, output in outputs.items()}
        self.minibatch = Minibatch(x, action, same.int().argmax(1), **doubles)
        rollout.minibatches.append(self.minibatch)
        for name, output in outputs.items():
            self.minibatch.gradients[name] = torch.zeros_like(doubles[name])
            output.register_hook(self.keep_gradient(name, "gradients"))

    def parameters(self):
        named = self.agent.named_parameters()
        return {name: parameter.detach().double() for name, parameter in named}

    def before_step(self, optimizer, args, kwargs):
        self.minibatch.lr = optimizer.param_groups[0]["lr"]
        self.minibatch.before = self.parameters()
        named = self.agent.named_parameters()
        self.minibatch.applied = {n: p.grad.double() for n, p in named if p.grad is not None}

    def after_step(self, optimizer, args, kwargs):
        self.minibatch.after = self.parameters()

    # what a test reads
    @property
    def minibatches(self) -> list[Minibatch]:
        return [minibatch for rollout in self.rollouts for minibatch in rollout.minibatches]

    def samples(self):
        """Yield (minibatch, samples of its rollout by name) for each step of the optimizer."""
        for rollout in self.rollouts:
            names = ("logprobs", "values", "advantages", "returns")
            flat = {name: getattr(rollout, name).flatten() for name in names}
            for minibatch in rollout.minibatches:
                rows = {name: values[minibatch.rows] for name, values in flat.items()}
                yield minibatch, SimpleNamespace(**rows)


def watch(script: ModuleType, tmp_path, ends=(), envs=None, **changes) -> Watch:
    """Run `script.train`, one iteration of 2 environments x 8 steps unless told otherwise.

    envs: to be played in the place of all environments, by one of several processes.
    """
    sizes = {"num_envs": 2, "num_steps": 8, "num_minibatches": 2, "update_epochs": 2}
    run = {"total_timesteps": 16, "eval_episodes": 0, "device": "cpu", "run_dir": str(tmp_path)}
    sizes |= run | changes
    args = script.Args(**sized(script.__name__, sizes))
    seen = Watch(script, args, envs or ScriptedEnvs(script, sizes["num_envs"], ends))
    hooks = (
        optim.register_optimizer_step_pre_hook(seen.before_step),
        optim.register_optimizer_step_post_hook(seen.after_step),
    )
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name in {"make_envs", "compute_gae", "compute_vtrace", "save"} & set(vars(script)):
                patch.setattr(script, name, getattr(seen, name))
            patch.setattr(script, "Agent", seen.make_agent)
            patch.setattr(script, "SummaryWriter", lambda *_, **__: seen)
            script.train(args)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


class ScriptedAtari(gym.Env):
    """An Atari game after a script: lives[k] and rewards[k] belong to frame k of each game.

    Frame k is noise of its own, frames[k]; the game ends, as `end` says, with the last entry of
    lives. It goes on counting when it is stepped behind its end, which nobody should do.
    """

    observation_space = gym.spaces.Box(0, 255, (210, 160, 3), np.uint8)

    def __init__(
        self,
        lives=(3,) * 400,
        rewards=(),
        meanings=("NOOP", "FIRE", "RIGHT", "LEFT"),
        end: str = "terminated",
        action_space: gym.Space | None = None,
        render_mode: str | None = None,
    ):
        self.script, self.rewards, self.meanings, self.end = lives, rewards, meanings, end
        self.render_mode = render_mode
        self.action_space = action_space or gym.spaces.Discrete(len(meanings))
        self.ale = SimpleNamespace(lives=lambda: self.script[min(self.frame, len(lives) - 1)])
        self.games: list[list[int]] = []  # the actions of each game
        self.reset_seeds: list = []

    def get_action_meanings(self):
        return list(self.meanings)

    @staticmethod
    @lru_cache(128)
    def picture(frame: int) -> np.ndarray:
        return np.random.default_rng(frame).integers(0, 256, (210, 160, 3), dtype=np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.reset_seeds.append(seed)
        self.games.append([])
        self.frame = 0
        return self.picture(0), {}

    def step(self, action):
        self.games[-1].append(int(np.sum(action)))
        self.frame += 1
        over = self.frame >= len(self.script) - 1
        reward = self.rewards[self.frame] if self.frame < len(self.rewards) else 0.0
        terminated, truncated = over and self.end == "terminated", over and self.end == "truncated"
        return self.picture(self.frame), reward, terminated, truncated, {}


def register_atari(**kwargs) -> str:
    """Register a ScriptedAtari of these arguments; returns its id."""
    gym.registry.pop("ScriptedAtari-v0", None)
    gym.register("ScriptedAtari-v0", ScriptedAtari, kwargs=kwargs)
    return "ScriptedAtari-v0"


class ScriptedVector(gym.Env):
    """Episodes of 20 steps with a vector of noise to see; counts like ScriptedAtari."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def __init__(self, action_space: gym.Space, render_mode: str | None = None):
        self.action_space, self.games = action_space, []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.games.append([])
        return self.np_random.normal(size=2).astype(np.float32), {}

    def step(self, action):
        self.games[-1].append(action)
        obs = self.np_random.normal(size=2).astype(np.float32)
        return obs, 0.0, len(self.games[-1]) == 20, False, {}


def register_game(script: ModuleType) -> str:
    """Register a game of at most 40 steps that fits the script; returns its id."""
    if script.__name__ in IMAGE_SCRIPTS:
        length = 20 if script.__name__ == "ppo_multidiscrete" else 100
        spaces = {"action_space": ACTION_SPACES.get(script.__name__)}
        return register_atari(lives=(3,) * length + (0,), **spaces)
    gym.registry.pop("ScriptedVector-v0", None)
    kwargs = {"action_space": action_space(script)}
    gym.register("ScriptedVector-v0", ScriptedVector, kwargs=kwargs)
    return "ScriptedVector-v0"
