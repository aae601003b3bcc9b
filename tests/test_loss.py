"""The update of every script: what `train` computes, against openai/baselines and SB3.

`train` runs for one iteration of a small environment full of noise, and is watched: the rollout
through the agent and compute_gae, each minibatch through the agent, and the gradients through
clip_grad_norm_. A large learning rate sends the ratios out of the clip range, so that every branch
of the losses is taken.
"""

import copy
import math
from types import SimpleNamespace

import fake_envpool
import gymnasium as gym
import numpy as np
import pytest
import stable_baselines3 as sb3
import torch
from conftest import SCRIPTS, load_script, sized
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import nn
from toy_envs import ToyAtari

each_script = pytest.mark.parametrize("name", SCRIPTS)


class Noise(gym.Env):
    """Random observations, rewards and ends: no two samples of a batch are alike."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (5,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, render_mode: str | None = None):
        self.render_mode = render_mode

    def _obs(self):
        return self.np_random.normal(size=5).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._obs(), {}

    def step(self, action):
        return self._obs(), self.np_random.normal(), self.np_random.random() < 0.1, False, {}


class NoiseAtari(ToyAtari):
    """A game that shows random blocks of colour, and rewards at random."""

    def _obs(self):
        blocks = self.np_random.integers(0, 256, (7, 5, 3), dtype=np.uint8)
        return blocks.repeat(30, axis=0).repeat(32, axis=1)

    def step(self, action):
        obs, _, terminated, truncated, info = super().step(action)
        return obs, self.np_random.normal(), terminated, truncated, info


class NoiseBox(Noise):
    action_space = gym.spaces.Box(-1, 1, (3,), np.float32)


class NoiseParts(Noise):
    """Random blocks of colour, and actions of three parts."""

    observation_space = gym.spaces.Box(0, 255, (84, 84, 3), np.uint8)
    action_space = gym.spaces.MultiDiscrete([3, 2, 4])

    def _obs(self):
        blocks = self.np_random.integers(0, 256, (7, 7, 3), dtype=np.uint8)
        return blocks.repeat(12, axis=0).repeat(12, axis=1)


class NoiseImage(Noise):
    """Random gray blocks in four pictures, and clipped rewards: what EnvPool shows of a game."""

    observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)

    def _obs(self):
        blocks = self.np_random.integers(0, 256, (4, 7, 7), dtype=np.uint8)
        return blocks.repeat(12, axis=1).repeat(12, axis=2)

    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, np.sign(reward), *rest


for env in (Noise, NoiseAtari, NoiseBox, NoiseParts, NoiseImage):
    gym.register(f"{env.__name__}-v0", env)
# for each script: the environment, and steps that are large for the clip range
VECTORS = {"env_id": "Noise-v0", "learning_rate": 0.01, "clip_coef": 0.1}
IMAGES = {"env_id": "NoiseAtari-v0", "learning_rate": 0.0003, "clip_coef": 0.02}
SETTINGS = {
    "ppo": VECTORS,
    "ppo_shared": VECTORS,
    "ppo_atari": IMAGES,
    "ppo_continuous": VECTORS | {"env_id": "NoiseBox-v0", "ent_coef": 0.01},
    "ppo_distributed": IMAGES,
    "ppo_lstm": IMAGES,
    "ppo_multidiscrete": IMAGES | {"env_id": "NoiseParts-v0", "reward_scale": 1.0},
    "envpool_ppo": IMAGES | {"env_id": "NoiseImage-v0"},
    "appo_async": IMAGES,
}
# for each script: the relative error that float32 may leave in a gradient
ROUNDING = dict.fromkeys(("ppo", "ppo_shared", "ppo_continuous"), 1e-6)
ROUNDING |= dict.fromkeys(set(SETTINGS) - set(ROUNDING), 5e-6)
# what an agent is given between observations and actions: masks, or the core's state and dones
INPUTS = {"ppo_multidiscrete": 1, "ppo_lstm": 2, "appo_async": 2}
METRICS = ("value_loss", "policy_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")


def watch_train(name: str, tmp_path, **changes) -> SimpleNamespace:
    """Train for one iteration and return all that went in and came out of the update.

    rollout: obs, actions, logprobs, values, advantages and returns, (num_steps * num_envs, ...).
    updates: one entry for each minibatch, see below. metrics: what was logged.
    """
    script = load_script(name)
    seen = SimpleNamespace(script=script, inputs=[], steps=[], orders=[], updates=[])
    judge, log = script.Agent.get_action_and_value, script.log
    advantages = "compute_vtrace" if name == "appo_async" else "compute_gae"
    compute_gae = getattr(script, advantages)
    clip, randperm = nn.utils.clip_grad_norm_, torch.randperm

    def watch_agent(agent, x, *more):
        results = judge(agent, x, *more)
        inputs, action = more[: INPUTS.get(name, 0)], more[INPUTS.get(name, 0) :]
        if not action:
            seen.inputs.append([part.clone() for part in inputs])
            seen.steps.append([x.clone(), *(results[i].clone() for i in (0, 1, 3))])
            return results
        if not results[1].requires_grad:  # appo_async.py looks at the whole batch at first
            return results
        for result in results[1:4]:
            result.retain_grad()  # so that each sample's part in the loss can be read
        agent = copy.deepcopy(agent)  # with the weights of this moment
        update = SimpleNamespace(agent=agent, obs=x, inputs=inputs, actions=action[0])
        update.logprobs, update.entropy, update.values = results[1:4]
        seen.updates.append(update)
        return results

    def watch_gae(*args):
        seen.advantages, seen.returns = compute_gae(*args)
        return seen.advantages, seen.returns

    def watch_randperm(*args, **kwargs):
        seen.orders.append(randperm(*args, **kwargs))
        return seen.orders[-1]

    def watch_clip(parameters, max_norm, **kwargs):
        parameters, update = list(parameters), seen.updates[-1]
        update.gradients = [p.grad.clone() for p in parameters]
        norm = clip(parameters, max_norm, **kwargs)
        update.clipped_gradients = [p.grad.clone() for p in parameters]
        return norm

    def watch_log(args, run, writer, metrics, last):
        seen.metrics = metrics
        return log(args, run, writer, metrics, last)

    args = {"num_envs": 4, "num_steps": 16, "total_timesteps": 64, "num_minibatches": 2}
    args |= {"update_epochs": 2, "eval_episodes": 0, "device": "cpu"} | SETTINGS[name] | changes
    seen.args = script.Args(run_dir=str(tmp_path / "run"), **sized(name, args))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script.Agent, "get_action_and_value", watch_agent)
        patch.setattr(script, advantages, watch_gae)
        patch.setattr(script, "log", watch_log)
        if name == "envpool_ppo":
            patch.setattr(script, "envpool", fake_envpool)
        patch.setattr(nn.utils, "clip_grad_norm_", watch_clip)
        patch.setattr(torch, "randperm", watch_randperm)
        if name == "ppo_lstm":  # as if it were in the middle of a run: there is something to forget
            patch.setattr(script.Agent, "initial_state", lambda _, n: torch.randn(2, n, 128))
        script.train(seen.args)

    obs, actions, logprobs, values = (torch.cat(parts) for parts in zip(*seen.steps, strict=True))
    advantages, returns = seen.advantages.flatten(), seen.returns.flatten()
    seen.rollout = {"obs": obs, "actions": actions, "logprobs": logprobs, "values": values}
    seen.rollout |= {"advantages": advantages, "returns": returns}
    rows, per_minibatch = torch.arange(64), 64 // seen.args.num_minibatches
    if name == "ppo_lstm":  # whole environments, in the order of time
        rows, per_minibatch = rows.view(16, 4), 4 // seen.args.num_minibatches
        seen.rollout["dones"] = torch.cat([dones for _, dones in seen.inputs])
    minibatches = torch.cat(seen.orders).split(per_minibatch)
    for update, inds in zip(seen.updates, minibatches, strict=True):
        update.rows = rows[..., inds].flatten()
        if len(update.obs) == 17 * 4:  # that first look, learned from as it came
            update.rows = rows
        update.batch = {key: whole[update.rows] for key, whole in seen.rollout.items()}
        if name == "ppo_lstm":
            update.batch["state"] = seen.inputs[0][0][:, inds]
    return seen


def categorical(logits, actions):
    """baselines common/distributions.py:161-204: neglogp and entropy."""
    log_probabilities = logits - logits.logsumexp(-1, keepdim=True)
    neglogpac = -log_probabilities[torch.arange(len(logits)), actions.long()]
    return neglogpac, -(log_probabilities.exp() * log_probabilities).sum(-1)


def diag_gaussian(mean, logstd, actions):
    """baselines common/distributions.py:227-248: neglogp and entropy."""
    size, std = mean.shape[1], logstd.exp()
    neglogpac = 0.5 * torch.square((actions - mean) / std).sum(-1)
    neglogpac = neglogpac + 0.5 * math.log(2.0 * math.pi) * size + logstd.sum(-1)
    return neglogpac, (logstd + 0.5 * math.log(2.0 * math.pi * math.e)).sum(-1)


def lstm(layer, xs, dones, state):
    """baselines a2c/utils.py:81-102; PyTorch has two biases, and the gates in its own order."""
    h, c = state
    hidden = []
    num_envs = len(h)
    for x, m in zip(xs.split(num_envs), dones.split(num_envs), strict=True):
        h, c = h * (1 - m[:, None]), c * (1 - m[:, None])
        z = x @ layer.weight_ih_l0.T + layer.bias_ih_l0 + h @ layer.weight_hh_l0.T
        i, f, u, o = (z + layer.bias_hh_l0).chunk(4, dim=1)
        c = f.sigmoid() * c + i.sigmoid() * u.tanh()
        h = o.sigmoid() * c.tanh()
        hidden.append(h)
    return torch.cat(hidden)


class Gate(nn.Module):
    """A ReLU that is open where another one was, which may differ by rounding alone."""

    def __init__(self, is_open: torch.Tensor):
        super().__init__()
        self.is_open = is_open

    def forward(self, x):
        assert x[(x > 0) != self.is_open].abs().sum() < 1e-5
        return x * self.is_open


def keep_gates(agent: nn.Module, obs: torch.Tensor):
    """Fix which ReLUs are open, as they are in float32.

    A gradient jumps where the input of one is 0, and of a hundred thousand some are so near to 0
    that rounding decides: on a Xeon with other kernels than an EPYC's the wrong way round.
    """
    found = [(i, layer) for i, layer in enumerate(agent.network) if isinstance(layer, nn.ReLU)]
    outputs = []
    hooks = [
        layer.register_forward_hook(lambda *call: outputs.append(call[-1])) for _, layer in found
    ]
    with torch.no_grad():
        agent.get_features(obs)
    for (i, _), hook, output in zip(found, hooks, outputs, strict=True):
        hook.remove()
        agent.network[i] = Gate(output > 0)


def double(update, name: str):
    """An update in float64: agent, batch, and the neglogp, entropy and value of each sample.

    Layers and distributions are put together here and not in the script.
    """
    agent = copy.deepcopy(update.agent)
    if hasattr(agent, "get_features"):
        keep_gates(agent, update.batch["obs"])
    agent = agent.double()
    batch = {key: x.double() for key, x in update.batch.items()}
    obs, actions = batch["obs"], batch["actions"]
    if name == "ppo":
        return agent, batch, *categorical(agent.actor(obs), actions), agent.critic(obs).flatten()
    if name == "ppo_continuous":
        policy = diag_gaussian(agent.actor_mean(obs), agent.actor_logstd, actions)
        return agent, batch, *policy, agent.critic(obs).flatten()
    hidden = agent.network(obs if name == "ppo_shared" else obs / 255)
    if name == "ppo_lstm":
        hidden = lstm(agent.lstm, hidden, batch["dones"], batch["state"])
    if name == "ppo_multidiscrete":
        logits = agent.actor(hidden).split(NoiseParts.action_space.nvec.tolist(), dim=1)
        parts = [categorical(*part) for part in zip(logits, actions.T, strict=True)]
        policy = [sum(terms) for terms in zip(*parts, strict=True)]
    else:
        policy = categorical(agent.actor(hidden), actions)
    return agent, batch, *policy, agent.critic(hidden).flatten()


def baselines_loss(agent, batch, neglogpac, entropy, vpred, args) -> dict[str, torch.Tensor]:
    """Write openai/baselines ppo2/model.py:68-108 and :133-139 again, in its own terms."""
    advs = batch["advantages"]
    if args.norm_adv:
        advs = (advs - advs.mean()) / (advs.numpy().std() + 1e-8)
    entropy = entropy.mean()
    ratio = torch.exp(-batch["logprobs"] - neglogpac)
    pg_losses = -advs * ratio
    pg_losses2 = -advs * torch.clip(ratio, 1.0 - args.clip_coef, 1.0 + args.clip_coef)
    pg_loss = torch.maximum(pg_losses, pg_losses2).mean()

    moved = torch.clip(vpred - batch["values"], -args.clip_coef, args.clip_coef)
    vf_losses1 = torch.square(vpred - batch["returns"])
    vf_losses2 = torch.square(batch["values"] + moved - batch["returns"])
    vf_losses = torch.maximum(vf_losses1, vf_losses2) if args.clip_vloss else vf_losses1
    vf_loss = 0.5 * vf_losses.mean()

    loss = pg_loss - entropy * args.ent_coef + vf_loss * args.vf_coef
    grads = torch.autograd.grad(loss, list(agent.parameters()))
    norm = torch.sqrt(sum(torch.square(grad).sum() for grad in grads))
    clipped = [grad * args.max_grad_norm / max(norm, args.max_grad_norm) for grad in grads]
    with torch.no_grad():
        logratio = ratio.log()
        return {
            "value_loss": vf_loss,
            "policy_loss": pg_loss,
            "entropy": entropy,
            "old_approx_kl": -logratio.mean(),
            "approx_kl": (ratio - 1 - logratio).mean(),
            "clipfrac": ((ratio - 1).abs() > args.clip_coef).double().mean(),
            "gradients": grads,
            "clipped_gradients": clipped,
            "norm": norm,
        }


def relative_error(ours, theirs) -> float:
    """How long the difference of two gradients is, in lengths of the second."""
    ours, theirs = (torch.cat([g.flatten().double() for g in grads]) for grads in (ours, theirs))
    return ((ours - theirs).norm() / theirs.norm()).item()


@each_script
def test_minibatches_are_the_rollout(name, tmp_path):
    """Each sample meets its own action, log-probability, value, advantage and return."""
    seen = watch_train(name, tmp_path)
    assert len(seen.updates) == 4
    for epoch in (seen.updates[:2], seen.updates[2:]):
        rows = torch.cat([update.rows for update in epoch])
        assert torch.equal(rows.sort().values, torch.arange(64))
    assert len(seen.rollout["obs"].flatten(1).unique(dim=0)) == 64  # all samples differ
    for update in seen.updates:
        assert torch.equal(update.obs, update.batch["obs"])
        assert torch.equal(update.actions, update.batch["actions"])
        if name == "ppo_lstm":
            assert torch.equal(update.inputs[0], update.batch["state"])
            assert torch.equal(update.inputs[1], update.batch["dones"])
    if name == "ppo_lstm":  # memory is lost within the sequences, not only where they begin
        assert seen.rollout["dones"][4:].any()


@each_script
def test_ratio_is_1_in_the_first_minibatch(name, tmp_path):
    first, *later = watch_train(name, tmp_path).updates
    assert ((first.logprobs - first.batch["logprobs"]).exp() - 1).abs().max() < 1e-5
    for update in later:
        assert ((update.logprobs - update.batch["logprobs"]).exp() - 1).abs().max() > 1e-3


@each_script
def test_metrics_at_ratio_1(name, tmp_path):
    metrics = watch_train(name, tmp_path, num_minibatches=1, update_epochs=1).metrics
    assert metrics["losses/clipfrac"] == 0
    assert abs(metrics["losses/approx_kl"]) < 1e-6
    assert abs(metrics["losses/old_approx_kl"]) < 1e-6


@each_script
@pytest.mark.parametrize("norm_adv", [True, False])
@pytest.mark.parametrize("clip_vloss", [True, False])
def test_update_equals_baselines(name, norm_adv, clip_vloss, tmp_path):
    """Gradients before and after their clipping, and the six metrics, in every minibatch."""
    changes = {"norm_adv": norm_adv, "clip_vloss": clip_vloss}
    # the value loss weighs 1, so that its mistakes cannot hide; 1.5 cuts some of the gradients
    seen = watch_train(name, tmp_path, vf_coef=1.0, max_grad_norm=1.5, **changes)
    theirs = [baselines_loss(*double(update, name), seen.args) for update in seen.updates]
    for update, expected in zip(seen.updates, theirs, strict=True):
        assert relative_error(update.gradients, expected["gradients"]) < ROUNDING[name]
        # PyTorch sums up the length of 1.7 million numbers in float32, which costs some digits
        assert relative_error(update.clipped_gradients, expected["clipped_gradients"]) < 1e-4
    for metric in METRICS:
        mean = np.mean([expected[metric].item() for expected in theirs])
        assert seen.metrics[f"losses/{metric}"] == pytest.approx(mean, rel=1e-4, abs=1e-6), metric
    # the run goes through what it is meant to test
    assert 0 < seen.metrics["losses/clipfrac"] < 1
    norms = [expected["norm"].item() for expected in theirs]
    assert max(norms) > 1.5, norms
    returns, values = seen.rollout["returns"].double(), seen.rollout["values"].double()
    explained = 1 - (returns - values).var() / returns.var()
    assert seen.metrics["losses/explained_variance"] == pytest.approx(explained.item(), abs=1e-5)


@each_script
def test_gradient_at_ratio_1_is_the_policy_gradient(name, tmp_path):
    """Where policy and rollout agree, the surrogate has the gradient of -A * log(pi)."""
    seen = watch_train(name, tmp_path, norm_adv=False, ent_coef=0.0, vf_coef=0.0)
    update = seen.updates[0]
    agent, batch, neglogpac, _, _ = double(update, name)
    objective = (batch["advantages"] * neglogpac).mean()
    grads = torch.autograd.grad(objective, list(agent.parameters()), materialize_grads=True)
    assert relative_error(update.gradients, grads) < ROUNDING[name]


@each_script
def test_sample_clipped_in_the_good_direction_has_no_gradient(name, tmp_path):
    """One that is out of the range in the bad direction keeps all of it."""
    seen = watch_train(name, tmp_path, norm_adv=False, update_epochs=4)
    clip_coef, good, bad = seen.args.clip_coef, 0, 0
    for update in seen.updates:
        advantages = update.batch["advantages"]
        ratio = (update.logprobs - update.batch["logprobs"]).exp().detach()
        high, low = ratio > 1 + clip_coef, ratio < 1 - clip_coef
        clipped = torch.where(advantages > 0, high, low)
        expected = torch.where(clipped, 0.0, -advantages * ratio / len(ratio))
        assert torch.equal(update.logprobs.grad == 0, clipped)
        assert torch.allclose(update.logprobs.grad, expected, rtol=1e-4, atol=1e-7)
        good, bad = good + clipped.sum(), bad + ((high | low) & ~clipped).sum()
    assert good > 10 and bad > 10  # both were tried


@each_script
def test_value_clipped_on_its_way_to_the_return_has_no_gradient(name, tmp_path):
    """Nor has the value function any part in a sample that it has moved far enough."""
    seen = watch_train(name, tmp_path, update_epochs=4)
    clip_coef, good, bad = seen.args.clip_coef, 0, 0
    for update in seen.updates:
        old, returns, new = update.batch["values"], update.batch["returns"], update.values.detach()
        out = (new - old).abs() > clip_coef
        v_clipped = old + (new - old).clamp(-clip_coef, clip_coef)
        clipped = out & ((v_clipped - returns).abs() > (new - returns).abs())
        expected = torch.where(clipped, 0.0, seen.args.vf_coef * (new - returns) / len(new))
        assert torch.allclose(update.values.grad, expected, rtol=1e-4, atol=1e-7)
        good, bad = good + clipped.sum(), bad + (out & ~clipped).sum()
    assert good > 10 and bad > 0


# Stable-Baselines3


class Trunk(BaseFeaturesExtractor):
    """The network of ppo_shared.py as SB3 wants it: a features extractor, with no layers behind."""

    def __init__(self, observation_space):
        super().__init__(observation_space, features_dim=64)
        size = observation_space.shape[0]
        self.net = nn.Sequential(nn.Linear(size, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())

    def forward(self, observations):
        return self.net(observations)


HEADS = {"actor": "action_net", "critic": "value_net"}
NATURE_CNN = (
    ("CnnPolicy", {}),
    HEADS
    | {f"network.{i}": f"features_extractor.cnn.{i}" for i in (0, 2, 4)}
    | {"network.7": "features_extractor.linear.0"},
)


def separate(actor: str):
    return (
        ("MlpPolicy", {"net_arch": {"pi": [64, 64], "vf": [64, 64]}}),
        {f"{actor}.{i}": f"mlp_extractor.policy_net.{i}" for i in (0, 2)}
        | {f"critic.{i}": f"mlp_extractor.value_net.{i}" for i in (0, 2)}
        | {f"{actor}.4": "action_net", "critic.4": "value_net"},
    )


# for each script: SB3's policy, and {our layer: its layer}; it has no LSTM
SB3_POLICIES = {
    "ppo": separate("actor"),
    "ppo_continuous": separate("actor_mean"),
    "ppo_shared": (
        ("MlpPolicy", {"net_arch": [], "features_extractor_class": Trunk}),
        HEADS | {f"network.{i}": f"features_extractor.net.{i}" for i in (0, 2)},
    ),
    "ppo_atari": NATURE_CNN,
    "ppo_distributed": NATURE_CNN,
    "ppo_multidiscrete": NATURE_CNN,
    "envpool_ppo": NATURE_CNN,
    "appo_async": NATURE_CNN,
}


class Spaces(gym.Env):
    """All that SB3 asks of an environment that it never plays."""

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space


def sb3_update(name: str, update, args) -> tuple[dict, dict]:
    """Let SB3 learn from the same batch with the same weights; its gradients and its log."""
    (policy, policy_kwargs), layers = SB3_POLICIES[name]
    obs, batch_size = update.batch["obs"], len(update.batch["obs"])
    low, high = (0, 255) if obs.dtype == torch.uint8 else (-np.inf, np.inf)
    obs_space = gym.spaces.Box(low, high, obs.shape[1:], obs.numpy().dtype)
    model = sb3.PPO(
        policy,
        Spaces(obs_space, gym.make(args.env_id).action_space),
        n_steps=batch_size,
        batch_size=batch_size,
        n_epochs=1,
        learning_rate=0.0,
        clip_range=args.clip_coef,
        clip_range_vf=None,
        normalize_advantage=False,
        ent_coef=args.ent_coef,
        vf_coef=args.vf_coef / 2,  # its value loss has no 1/2
        max_grad_norm=1e9,
        policy_kwargs=policy_kwargs,
        device="cpu",
    )
    model.set_logger(Logger(None, []))
    modules = dict(update.agent.named_modules())
    assert set(layers) == {n for n, m in modules.items() if isinstance(m, nn.Linear | nn.Conv2d)}
    for ours, theirs in layers.items():
        model.policy.get_submodule(theirs).load_state_dict(modules[ours].state_dict())
    if name == "ppo_continuous":
        model.policy.log_std.data = update.agent.actor_logstd.data[0]
    # in float64, so that all rounding is ours
    model.policy.double().features_extractor.register_forward_pre_hook(lambda _, x: x[0].double())

    buffer = model.rollout_buffer
    for key in ("values", "log_probs", "advantages", "returns"):
        getattr(buffer, key)[:, 0] = update.batch[key.replace("log_probs", "logprobs")]
    buffer.observations[:, 0] = obs
    buffer.actions[:, 0] = update.batch["actions"].reshape(batch_size, -1)
    buffer.full = True
    model.train()
    gradients = {
        f"{ours}.{kind}": parameter.grad
        for ours, theirs in layers.items()
        for kind, parameter in model.policy.get_submodule(theirs).named_parameters()
    }
    if name == "ppo_continuous":
        gradients["actor_logstd"] = model.policy.log_std.grad
    return gradients, model.logger.name_to_value


@pytest.mark.parametrize("name", SB3_POLICIES)
def test_update_equals_stable_baselines3(name, tmp_path):
    """Loss and gradient, for the whole batch as one minibatch, three times over."""
    changes = {"num_minibatches": 1, "update_epochs": 3}
    seen = watch_train(name, tmp_path, norm_adv=False, clip_vloss=False, **changes)
    logs = []
    for update in seen.updates:
        theirs, log = sb3_update(name, update, seen.args)
        ours = dict(zip(dict(update.agent.named_parameters()), update.gradients, strict=True))
        assert set(ours) == set(theirs)
        assert relative_error([ours[key] for key in theirs], theirs.values()) < ROUNDING[name]
        logs.append(log)
    assert logs[0]["train/clip_fraction"] == 0 < logs[1]["train/clip_fraction"] < 1

    def mean(key):
        return np.mean([log[f"train/{key}"] for log in logs])

    expected = {
        "value_loss": mean("value_loss") / 2,
        "policy_loss": mean("policy_gradient_loss"),
        "entropy": -mean("entropy_loss"),
        "approx_kl": mean("approx_kl"),
        "clipfrac": mean("clip_fraction"),
        "explained_variance": mean("explained_variance"),
    }
    ours = {key: seen.metrics[f"losses/{key}"] for key in expected}
    assert ours == pytest.approx(expected, rel=1e-5, abs=1e-6)
