# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#   "gymnasium[classic-control,mujoco]==1.4.0", "moviepy==2.2.1", "mujoco==4.0.0", "numpy==2.4.6",
#   "tensorboard==2.21.0", "torch==2.13.0", "tyro==1.0.17", "wandb==0.31.0",
# ]
# ///
"""Proximal Policy Optimization for continuous actions, as published for MuJoCo.

Differs from ppo.py in:
- Arguments: the MuJoCo hyperparameters
- Environment: observations and rewards normalized by running statistics, actions clipped
- Agent: a normal distribution in place of the categorical one
- Training: the statistics go into the checkpoint, and come back out of it

Details shown: core 1-13, continuous 1-9, aux 1 and 3.
The algorithm is in Schulman et al. 2017, arXiv 1707.06347. Tags in brackets number "The 37
Implementation Details of PPO" (Huang et al. 2022), "beyond" what goes past them, a flag each:
iclr-blog-track.github.io/2022/03/25/ppo-implementation-details. Where a comment says "baselines",
it means openai/baselines at ea25b9e.
Expected: HalfCheetah-v4, 1M steps: 1468 to 3512 over the last 100 episodes (seeds 1 to 3).

    python ppo_continuous.py --env-id HalfCheetah-v4 --seed 1
    python ppo_continuous.py --resume runs/RUN                      # go on after Ctrl-C or a kill
    python ppo_continuous.py --evaluate runs/RUN --capture-video    # one game as MP4
"""

import io
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import time
import warnings
import zipfile
from ctypes.util import find_library
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Literal, NoReturn

try:
    import gymnasium as gym
    import mujoco
    import numpy as np
    import torch
    import tyro
    from torch import nn
    from torch.utils.tensorboard import SummaryWriter
except ModuleNotFoundError as error:
    print(f"error: {error}: `uv run {__file__}` installs it first", file=sys.stderr)
    sys.exit(2)


# === Arguments
@dataclass
class Args:
    env_id: str = "HalfCheetah-v4"  # environment; module:Name-v0 imports your own
    total_timesteps: int = 1_000_000  # agent steps of all environments, in whole rollouts
    learning_rate: float = 3e-4  # Adam's step size at the start
    num_envs: int = 1  # environments stepped side by side
    num_steps: int = 2048  # steps in each environment between two updates
    anneal_lr: bool = True  # learning rate falls linearly to 0 at total-timesteps
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    num_minibatches: int = 32  # parts into which each epoch cuts the batch
    update_epochs: int = 10  # passes over the batch in one update
    norm_adv: bool = True  # normalize advantages, minibatch by minibatch
    clip_coef: float = 0.2  # a ratio (or value) that moves farther than this gains no more
    anneal_clip_coef: bool = False  # clip-coef falls linearly to 0 as well
    clip_vloss: bool = True  # clip the value loss
    ent_coef: float = 0.0  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # a longer gradient is scaled down to this length
    target_kl: float | None = None  # stop the epochs of an update above this KL (0.01 is usual)
    bootstrap_truncated: bool = False  # at a time limit, add the value of the last observation

    seed: int = 1  # seed of the network, the sampling and the environments
    torch_deterministic: bool = True  # bit-for-bit repeatable on CUDA too
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto: the fastest here
    compile: bool = False  # torch.compile the network (needs a C++ compiler)
    track: bool = False  # log to Weights & Biases too
    wandb_project_name: str = "ppo"  # W&B project
    wandb_entity: str | None = None  # W&B team
    capture_video: bool = False  # record the evaluation's first game as MP4
    run_dir: str | None = None  # where the run is kept; default runs/ENV__FILE__SEED__TIME
    checkpoint_every: float = 60.0  # seconds between two checkpoints
    stop_at: int | None = None  # save and end after this step; schedules run to total-timesteps
    resume: str | None = None  # go on with the run in this directory
    evaluate: str | None = None  # play with the agent in this directory, do not train
    eval_episodes: int = 10  # games in an evaluation; 0: none after training


# === Environment
# published results are those of the v4 environments, which Gymnasium calls out of date
warnings.filterwarnings("ignore", "(?s).*The environment .*-v4 is out of date")
# MuJoCo would write its warnings into a file wherever the user stands
mujoco.set_mju_user_warning(warnings.warn)
warnings.filterwarnings("ignore", "(?s).*settotalmass")  # in HalfCheetah's own XML
np.seterr(invalid="ignore")  # an infinite reward ends the run in one line, at the gradient
if __name__ == "__main__" and not os.getenv("DISPLAY") and find_library("EGL") == "libEGL.so.1":
    os.environ.setdefault("MUJOCO_GL", "egl")  # videos without a screen; Linux only


class RunningMeanStd:
    """Mean and variance of all rows seen so far; Chan et al. 1979, as in baselines."""

    def __init__(self, shape: tuple):
        # NumPy: with torch an update takes 4 times as long
        self.mean, self.var, self.count = np.zeros(shape), np.ones(shape), 1e-4

    def update(self, rows: np.ndarray) -> None:
        mean = rows.sum(0) / len(rows)  # half the time of rows.mean(0) and rows.var(0)
        var = ((rows - mean) ** 2).sum(0) / len(rows)
        self.count = self.count + len(rows)
        share = len(rows) / self.count
        delta = mean - self.mean
        self.mean = self.mean + share * delta
        self.var = self.var + share * (var + (1 - share) * delta**2 - self.var)


class NormalizeEnv(gym.vector.VectorWrapper):
    """Clip actions; normalize observations and rewards, all environments by the same statistics.

    saved: statistics() to go on with, or {}. frozen: they do not change any more.
    """

    def __init__(self, envs: gym.vector.VectorEnv, gamma: float, saved: dict, frozen: bool):
        super().__init__(envs)
        shape = envs.single_observation_space.shape
        self.single_observation_space = gym.spaces.Box(-10, 10, shape, np.float32)
        self.observation_space = gym.spaces.Box(-10, 10, (self.num_envs, *shape), np.float32)
        self.low, self.high = envs.single_action_space.low, envs.single_action_space.high
        self.gamma, self.frozen = gamma, frozen
        self.rms = {"obs": RunningMeanStd(shape), "returns": RunningMeanStd(())}
        for name in saved:
            vars(self.rms[name]).update({key: x.numpy() for key, x in saved[name].items()})

    def statistics(self) -> dict:
        """Mean, variance and count of observations and returns, as tensors for a checkpoint."""
        return {
            name: {key: torch.tensor(x, dtype=torch.float64) for key, x in vars(rms).items()}
            for name, rms in self.rms.items()
        }

    def reset(self, *, seed=None, options=None):
        self.returns = np.zeros(self.num_envs)
        obs, infos = self.env.reset(seed=seed, options=options)
        return self.normalize(obs), infos

    def step(self, actions):
        # [continuous 5] Actions are clipped on their way to the environment only: the rollout keeps
        # what was sampled, for that is what its log-probability belongs to
        actions = actions.clip(self.low, self.high)
        obs, reward, terminated, truncated, infos = self.env.step(actions)
        # [continuous 8] Reward scaling by the standard deviation of the discounted sum so far. No
        # mean is subtracted: that would change what pays. The sum starts anew with an episode.
        self.returns = self.returns * self.gamma + reward
        if not self.frozen:
            self.rms["returns"].update(self.returns)
        reward = reward / math.sqrt(self.rms["returns"].var + 1e-8)
        self.returns[terminated | truncated] = 0.0
        # [continuous 9] Reward clipping
        reward = reward.clip(-10, 10)
        for i in np.flatnonzero(infos.get("_final_obs", ())):  # read by --bootstrap-truncated
            infos["final_obs"][i] = self.normalize(infos["final_obs"][i], update=False)
        return self.normalize(obs), reward, terminated, truncated, infos

    def normalize(self, obs: np.ndarray, update: bool = True) -> np.ndarray:
        obs, obs_rms = np.asarray(obs, np.float64), self.rms["obs"]
        # [continuous 6] Observation normalization, by statistics that include this observation
        if update and not self.frozen:
            obs_rms.update(obs)
        obs = (obs - obs_rms.mean) / np.sqrt(obs_rms.var + 1e-8)
        # [continuous 7] Observation clipping
        return obs.clip(-10, 10).astype(np.float32)


def make_envs(args: Args, num_envs: int, seed: int, frozen=None, resumed=None):
    """Make num_envs environments, environment i seeded with seed + i.

    frozen: the checkpoint that is evaluated, None in training. Only its first game is filmed,
    since every frame of a film is kept in memory until the game ends.
    resumed: the checkpoint that training goes on from, and whose statistics go on, too.
    Returns the vector environment and its first observations, (num_envs, *observation_shape).
    """

    def make_env(index: int) -> gym.Env:
        video = args.capture_video and frozen is not None and index == 0
        env = gym.make(args.env_id, **({"render_mode": "rgb_array"} if video else {}))
        env = gym.wrappers.RecordEpisodeStatistics(env)
        if video and hasattr(env.unwrapped, "mujoco_renderer"):
            # the camera that follows: in Gymnasium 1.4's default view the robot runs out of sight
            track = (env.unwrapped.model, mujoco.mjtObj.mjOBJ_CAMERA, "track")
            env.unwrapped.mujoco_renderer.camera_id = mujoco.mj_name2id(*track)
        if video:
            folder = f"{args.run_dir}/videos"
            env = gym.wrappers.RecordVideo(env, folder, lambda game: game == 0)
        return env

    # SAME_STEP: the step that ends an episode already returns the first observation of the next,
    # as in baselines. Gymnasium's default spends one more step on the reset, and the loop below
    # would learn from that step although its action is ignored.
    envs = gym.vector.SyncVectorEnv(
        [lambda i=i: make_env(i) for i in range(num_envs)],
        autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,
    )
    saved = (frozen or resumed or {}).get("normalizer", {})
    envs = NormalizeEnv(envs, args.gamma, saved, frozen=frozen is not None)
    return envs, envs.reset(seed=seed)[0]


def finished_episodes(infos: dict):
    """Yield (environment, return, length) of each episode that ended in this step."""
    final_info = infos.get("final_info", {})  # _episode says for which environments
    for i in np.flatnonzero(final_info.get("_episode", ())):
        yield i, float(final_info["episode"]["r"][i]), int(final_info["episode"]["l"][i])


def wrong_space(env: gym.Env) -> str | None:
    """Say what in this environment this file cannot use, and which file can. None if all fits."""
    obs_space, action_space = env.observation_space, env.action_space
    if isinstance(action_space, gym.spaces.Discrete):
        return "actions are discrete: use ppo.py, or ppo_atari.py for Atari games"
    if isinstance(action_space, gym.spaces.MultiDiscrete | gym.spaces.MultiBinary):
        return "actions have several parts: ppo_multidiscrete.py takes such, but only from images"
    floats = isinstance(action_space, gym.spaces.Box) and action_space.dtype in ("f4", "f8")
    if not floats or not action_space.shape:
        return f"actions must be a Box of floats with a dimension or more, not {action_space}"
    if not isinstance(obs_space, gym.spaces.Box) or len(obs_space.shape) != 1:
        return f"observations must be a flat Box, not {obs_space}: wrap it in FlattenObservation"
    return None


# === Agent
TORCH_THREADS = 1  # layers of 64 units are too small to gain from a second thread
AUTO_DEVICES = ("cpu",)  # nor from a GPU: --device cuda forces one


def layer_init(layer: nn.Module, std: float = np.sqrt(2), bias_const: float = 0.0) -> nn.Module:
    # [core 2] Orthogonal initialization of the weights, constant biases
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    def __init__(self, envs: gym.vector.VectorEnv, args: Args):
        super().__init__()
        obs_size = envs.single_observation_space.shape[0]
        action_shape = envs.single_action_space.shape
        # [core 13] Separate networks for policy and value, without a weight in common: they meet
        # in the length of the whole gradient (core 11) and the early stop (aux 3) alone
        # [continuous 4] Two layers of 64 units and tanh in each of them
        self.critic = nn.Sequential(
            layer_init(nn.Linear(obs_size, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 1), std=1.0),
        )
        # [continuous 1] A normal distribution, whose mean the network gives
        self.actor_mean = nn.Sequential(
            layer_init(nn.Linear(obs_size, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            # std=0.01: the mean starts near 0 in every state
            layer_init(nn.Linear(64, math.prod(action_shape)), std=0.01),
            nn.Unflatten(-1, action_shape),
        )
        # [continuous 2] The standard deviation is the same in every state: a parameter, 1 at first
        self.actor_logstd = nn.Parameter(torch.zeros(1, *action_shape))

    def get_value(self, x):
        return self.critic(x).squeeze(-1)

    def get_action_and_value(self, x, action=None):
        """Action (batch, *action_shape), sampled unless given; logprob, entropy, value (batch,)."""
        mean, logstd = self.actor_mean(x), self.actor_logstd
        std = logstd.exp()
        # the normal distribution by hand: torch.distributions takes twice as long
        if action is None:
            action = (mean + std * torch.randn_like(mean)).detach()
        logprob = -0.5 * ((action - mean) / std) ** 2 - logstd - 0.5 * math.log(2 * math.pi)
        entropy = (logstd + 0.5 * math.log(2 * math.pi * math.e)).expand_as(mean)
        # [continuous 3] Independent components: probabilities multiply, so their logarithms add up
        return action, logprob.flatten(1).sum(-1), entropy.flatten(1).sum(-1), self.get_value(x)


# === Advantages
def compute_gae(rewards, values, dones, next_value, next_done, gamma, gae_lambda):
    """Advantages of a rollout by GAE(lambda), and the returns that the value function learns.

    rewards, values, dones are (num_steps, num_envs), next_value and next_done (num_envs,).
    Careful: dones[t] = 1 means that obs[t] is the first of a new episode, not that the action of
    step t ended one. What follows step t is therefore cut off by dones[t + 1].
    Schulman et al. 2016, equations 11-16; openai/baselines ppo2/runner.py:50-65.
    """
    # [core 5] Generalized Advantage Estimation. The end of an episode, a time limit included,
    # stops both the bootstrap and the sum: the next row already belongs to another episode.
    nextvalues = torch.cat((values[1:], next_value.unsqueeze(0)))
    nextnonterminal = 1.0 - torch.cat((dones[1:], next_done.unsqueeze(0)))
    deltas = rewards + gamma * nextvalues * nextnonterminal - values
    advantages = torch.zeros_like(rewards)
    lastgaelam = torch.zeros_like(next_value)
    for t in reversed(range(len(rewards))):
        lastgaelam = deltas[t] + gamma * gae_lambda * nextnonterminal[t] * lastgaelam
        advantages[t] = lastgaelam
    return advantages, advantages + values


# === Training
def train(args: Args) -> dict:
    """Train one agent. Returns what result.json in the run directory says."""
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    num_iterations = args.total_timesteps // batch_size
    device = pick_device(args)
    torch.manual_seed(args.seed)
    run, writer = open_run(args)  # run: what a checkpoint carries on
    global_step = run["global_step"]

    # [core 1] Vectorized architecture: num_envs environments step together for num_steps, then the
    # network learns from that rollout. The next rollout goes on where this one stopped, without a
    # reset, so long episodes are learned from piece by piece.
    envs, next_obs = make_envs(args, args.num_envs, args.seed + global_step, resumed=run)
    next_done = np.zeros(args.num_envs, dtype=bool)
    agent = Agent(envs, args).to(device)
    # [core 3] Adam with epsilon 1e-5 (PyTorch's default is 1e-8)
    # fused: one call for the whole step, 4 times as fast on a small network
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    restore(run, agent, optimizer)
    if args.compile:
        # [beyond 3] Compiled twice, for the batch of a rollout step and for that of an update
        agent.get_action_and_value = torch.compile(agent.get_action_and_value, dynamic=False)

    def tensor(array, dtype=None):
        return torch.as_tensor(array, dtype=dtype, device=device)

    # the rollout: (num_steps, num_envs) of everything
    shape = (args.num_steps, args.num_envs)
    obs = torch.zeros(shape + next_obs.shape[1:], dtype=tensor(next_obs).dtype, device=device)
    actions = tensor(np.zeros((args.num_steps, *envs.action_space.shape), envs.action_space.dtype))
    logprobs = torch.zeros(shape, device=device)
    rewards = torch.zeros(shape, device=device)
    dones = torch.zeros(shape, device=device)
    values = torch.zeros(shape, device=device)
    start_time, last_save = time.perf_counter() - run["seconds"], -math.inf

    for iteration in range(global_step // batch_size + 1, num_iterations + 1):
        # [core 4] Learning rate annealing: from learning_rate in the first update to almost 0
        # in the last, constant within an update
        frac = 1.0 - (iteration - 1) / num_iterations
        optimizer.param_groups[0]["lr"] = args.learning_rate * (frac if args.anneal_lr else 1.0)
        # [aux 1] Clip range annealing
        clip_coef = args.clip_coef * (frac if args.anneal_clip_coef else 1.0)

        for step in range(args.num_steps):
            global_step += args.num_envs
            obs[step] = tensor(next_obs)
            dones[step] = tensor(next_done)  # 1: obs[step] is the first of a new episode
            with torch.inference_mode():
                action, logprob, _, value = agent.get_action_and_value(obs[step])
            actions[step], logprobs[step], values[step] = action, logprob, value
            next_obs, reward, terminated, truncated, infos = envs.step(action.cpu().numpy())
            next_done = terminated | truncated
            rewards[step] = tensor(reward, torch.float32)

            if args.bootstrap_truncated and (cut := truncated & ~terminated).any():
                # [beyond 1] An episode that a time limit cut off would have gone on. The value of
                # what would have come is added to its last reward, since GAE stops there.
                final_obs = tensor(np.stack(infos["final_obs"][cut]), obs.dtype)
                with torch.inference_mode():
                    rewards[step, tensor(cut)] += args.gamma * agent.get_value(final_obs)
            for _, episodic_return, episodic_length in finished_episodes(infos):
                run["episodes"] += 1
                run["returns"].append(episodic_return)
                writer.add_scalar("charts/episodic_return", episodic_return, global_step)
                writer.add_scalar("charts/episodic_length", episodic_length, global_step)

        with torch.no_grad():
            next_value = agent.get_value(tensor(next_obs))
        advantages, returns = compute_gae(
            rewards, values, dones, next_value, tensor(next_done), args.gamma, args.gae_lambda
        )

        b_obs = obs.flatten(0, 1)  # (num_steps * num_envs, *observation_shape)
        b_actions = actions.flatten(0, 1)
        b_logprobs = logprobs.flatten()
        b_advantages = advantages.flatten()
        b_returns = returns.flatten()
        b_values = values.flatten()

        stats = []
        for _ in range(args.update_epochs):
            # [core 6] Minibatch updates: each epoch shuffles the batch anew and uses every sample
            # exactly once
            b_inds = torch.randperm(batch_size, device=device)
            for mb_inds in b_inds.split(minibatch_size):
                _, newlogprob, entropy, newvalue = agent.get_action_and_value(
                    b_obs[mb_inds], b_actions[mb_inds]
                )
                logratio = newlogprob - b_logprobs[mb_inds]
                ratio = logratio.exp()  # 1, up to rounding, in the first minibatch of an update

                mb_advantages = b_advantages[mb_inds]
                if args.norm_adv:
                    # [core 7] Advantages normalized within the minibatch, not within the batch; the
                    # deviation is NumPy's, divided by n (correction=0)
                    mb_std = mb_advantages.std(correction=0)
                    mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_std + 1e-8)

                # [core 8] Clipped surrogate objective: the larger of two losses is the pessimistic
                # one, so a ratio that has left the clip range in the good direction gains no more
                pg_loss1 = -mb_advantages * ratio
                pg_loss2 = -mb_advantages * ratio.clamp(1 - clip_coef, 1 + clip_coef)
                pg_loss = torch.max(pg_loss1, pg_loss2).mean()

                # [core 9] Value loss clipping around the value that the rollout predicted
                mb_returns = b_returns[mb_inds]
                v_loss = (newvalue - mb_returns) ** 2
                if args.clip_vloss:
                    mb_values = b_values[mb_inds]
                    v_clipped = mb_values + (newvalue - mb_values).clamp(-clip_coef, clip_coef)
                    v_loss = torch.max(v_loss, (v_clipped - mb_returns) ** 2)
                v_loss = 0.5 * v_loss.mean()

                # [core 10] One loss for policy and value, less a bonus for entropy: exploration
                entropy_loss = entropy.mean()
                loss = pg_loss - args.ent_coef * entropy_loss + args.vf_coef * v_loss

                optimizer.zero_grad()
                loss.backward()
                # [core 11] Global gradient clipping: all gradients together, to at most this length
                grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                if not torch.isfinite(grad_norm):  # the step would spoil every weight
                    raise FloatingPointError(f"the gradient is not finite after step {global_step}")
                optimizer.step()

                # [core 12] Debug variables; approx_kl (mostly below 0.02) is the estimator that is
                # never negative, old_approx_kl is mean(-logratio): joschu.net/blog/kl-approx.html
                with torch.no_grad():
                    old_approx_kl = (-logratio).mean()
                    approx_kl = ((ratio - 1) - logratio).mean()
                    clipfrac = ((ratio - 1.0).abs() > clip_coef).float().mean()
                    losses = (v_loss, pg_loss, entropy_loss, old_approx_kl, approx_kl, clipfrac)
                    stats.append(torch.stack(losses))

            # [aux 3] Early stopping: no further epoch once the last minibatch shows too large a KL
            if args.target_kl is not None and approx_kl > args.target_kl:
                break

        names = ("value_loss", "policy_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")
        means = torch.stack(stats).mean(0).tolist()  # over all minibatches of the update
        metrics = {f"losses/{name}": mean for name, mean in zip(names, means, strict=True)}
        unexplained = (b_returns - b_values).var() / b_returns.var()
        metrics["losses/explained_variance"] = 1.0 - unexplained.item()  # 0 or less: useless
        metrics["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
        run["global_step"], run["seconds"] = global_step, time.perf_counter() - start_time

        finished = iteration == num_iterations
        stop = finished or bool(STOP) or global_step >= (args.stop_at or math.inf)
        log(args, run, writer, metrics, stop)
        if stop or time.perf_counter() - last_save >= args.checkpoint_every:
            last_save = time.perf_counter()
            parts = {"agent": agent.state_dict(), "optimizer": optimizer.state_dict()}
            state = save(args, run, **parts, normalizer=envs.statistics())
            writer.flush()
        if stop:
            break

    envs.close()
    return close_run(args, state, writer, finished)


# === Run
STOP = []  # what has asked this run to end
SCRIPT = Path(__file__).stem


def fail(flag: str, problem: object) -> NoReturn:
    """End with exit code 2 and one line that names the flag."""
    print(f"error: --{flag.replace('_', '-')}: {' '.join(str(problem).split())}", file=sys.stderr)
    sys.exit(2)


def check(args: Args) -> None:
    """Fail on arguments that cannot work, before anything is written."""
    limits = {
        "total_timesteps num_envs num_steps num_minibatches update_epochs stop_at": (1, math.inf),
        "clip_coef max_grad_norm target_kl checkpoint_every": (0, math.inf),
        "ent_coef vf_coef seed eval_episodes": (0, 10**9),
        "learning_rate gamma gae_lambda": (0, 1),
    }
    for names, (low, high) in limits.items():
        for name in names.split():
            if (value := getattr(args, name)) is not None and not low <= value <= high:
                fail(name, f"{value} is not between {low} and {high}")
    for name in ("run_dir", "resume", "evaluate"):
        if getattr(args, name) == "":
            fail(name, "is empty")
    batch_size = args.num_envs * args.num_steps
    if batch_size % args.num_minibatches:
        fail("num_minibatches", f"{args.num_minibatches} does not divide the batch of {batch_size}")
    if batch_size == args.num_minibatches and args.norm_adv:
        fail("num_minibatches", "one sample cannot be normalized: use fewer, or --no-norm-adv")
    if args.total_timesteps < batch_size:
        fail("total_timesteps", f"{args.total_timesteps} is less than one batch of {batch_size}")
    if os.name == "nt" and getattr(args, "vector_mode", "sync") == "async":
        fail("vector_mode", "the processes need Linux or macOS: on Windows, use sync")
    if args.evaluate and (args.resume or not args.eval_episodes):
        fail("evaluate", "needs --eval-episodes of at least 1, and no --resume")
    if args.capture_video and not args.eval_episodes:
        fail("capture_video", "films the evaluation: needs --eval-episodes, or --no-capture-video")
    if args.device != "auto" and not torch.get_device_module(args.device).is_available():
        fail("device", f"PyTorch {torch.__version__} finds no {args.device} here: use --device cpu")
    folder = Path(args.run_dir or "runs").absolute()
    kept = (folder / name for name in ("checkpoint.pt", "result.json"))
    begun = args.run_dir and any(map(os.path.exists, kept))
    if begun and not (args.resume or args.evaluate):
        fail("run_dir", f"{folder} holds a run: --resume it, or choose another directory")
    if any(len(os.fsencode(name)) > 255 for name in folder.parts):
        fail("run_dir", "a directory's name has at most 255 bytes: choose a shorter one")
    folder = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    writes = not args.evaluate or args.capture_video
    if writes and not (os.path.isdir(folder) and os.access(folder, os.W_OK)):
        fail("run_dir", f"cannot write in {folder}")
    with warnings.catch_warnings(action="ignore"):
        try_out(args)


def try_out(args: Args) -> None:
    """Use once what the run will need: where much can go wrong, trying is the best check."""
    flag = "device"
    try:
        # a GPU may be too old for this PyTorch, or have no memory left
        torch.ones(1, device=pick_device(args)).sin().item()
        flag = "env_id"
        env = gym.make(args.env_id)
        if problem := wrong_space(env):
            fail(flag, f"{args.env_id}: {problem}")
        env.reset(seed=args.seed)
        env.close()
        if args.capture_video:
            flag = "capture_video"
            import moviepy  # noqa: F401

            os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # drawing needs no screen
            env = gym.make(args.env_id, render_mode="rgb_array")
            env.reset(seed=args.seed)
            if np.ndim(frame := env.render()) != 3:
                fail(flag, f"{args.env_id} renders no image in color, but {frame!r}")
            env.close()
        if args.track:
            flag = "track"
            import wandb

            if os.environ.get("WANDB_MODE", "online") == "online" and not wandb.login(prompt=False):
                fail(flag, "W&B has no key here: run `wandb login`, or set WANDB_MODE=offline")
        if args.compile:
            flag = "compile"
            torch.compile(torch.sin)(torch.ones(1, device=pick_device(args)))
    except (gym.error.NameNotFound, gym.error.NamespaceNotFound) as error:
        hint = "Atari: ppo_atari.py, ViZDoom: ppo_multidiscrete.py, your own: module:Name-v0"
        fail(flag, f"{error} ({hint})")
    except Exception as error:
        missing = getattr(error, "name", None) if isinstance(error, ImportError) else None
        fail(flag, f"{error}: pip install {missing}" if missing else str(error) or repr(error))


def load(flag: str, run_dir: str) -> dict:
    """Read a checkpoint. It holds tensors, numbers and strings only, so no code can hide in it."""
    path = Path(run_dir, "checkpoint.pt")
    if not os.path.exists(path):  # Path.exists() fails where one may not look
        fail(flag, f"there is no {path}")
    try:
        if zipfile.ZipFile(path).testzip():  # compares checksums, which torch.load does not
            raise ValueError("wrong checksum")
        run = torch.load(path, map_location="cpu", weights_only=True)
        if run["script"] != SCRIPT:
            fail(flag, f"{path} was written by {run['script']}.py: use a file of that name")
        run["args"] = Args(**run["args"])
        known = "global_step seconds episodes returns wandb_id agent optimizer rng"
        if set(known.split()) - run.keys():
            raise ValueError("a part is missing")
    except Exception as error:  # a damaged file can fail in any way
        # a TypeError names the argument that Args does not have, in a file that has been changed
        problem = error if isinstance(error, TypeError) else type(error).__name__
        fail(flag, f"{path} is damaged, or no checkpoint of this {SCRIPT}.py: {problem}")
    return run


def save(args: Args, run: dict, **state) -> dict:
    """Write checkpoint.pt beside the old, then rename: a kill leaves a whole one. Returns it."""
    run = run | state | {"script": SCRIPT, "args": asdict(args)}
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    run["rng"] = [torch.get_rng_state(), *cuda]
    buffer = io.BytesIO()
    torch.save(run, buffer)
    path = Path(args.run_dir, "checkpoint.pt")
    with open(path.with_suffix(".tmp"), "wb") as file:
        file.write(buffer.getbuffer())
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)
    return run


def restore(run: dict, agent: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put the network, optimizer and random state of a checkpoint in place."""
    if "agent" in run:  # a new run has none
        agent.load_state_dict(run["agent"])
        optimizer.load_state_dict(run["optimizer"])
        # other numbers than at the start, where no saved state fits: MPS, another number of GPUs
        torch.manual_seed(run["args"].seed + run["global_step"])
        torch.set_rng_state(run["rng"][0])
        if len(run["rng"]) == torch.cuda.device_count() + 1:
            torch.cuda.set_rng_state_all(run["rng"][1:])


def pick_device(args: Args) -> torch.device:
    """Choose the device, and set PyTorch up for it."""
    device = args.device
    if device == "auto":
        device = next(d for d in AUTO_DEVICES if torch.get_device_module(d).is_available())
    if device == "cuda" and args.torch_deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # no memory is read before it is written here: filling it first would only take time
        torch.utils.deterministic.fill_uninitialized_memory = False
    torch.set_num_threads(TORCH_THREADS)
    return torch.device(device)


def open_run(args: Args) -> tuple[dict, SummaryWriter]:
    """Open the run directory, a new one or the one to resume; say what is going to run."""
    # what a run carries on; a resumed run's has all of its checkpoint
    run = {"global_step": 0, "seconds": 0.0, "episodes": 0, "returns": [], "wandb_id": None}
    if args.resume:
        run = load("resume", args.resume)
    # speed is that of this process: a run that is resumed may be slower or faster from there on
    run["start"] = run["global_step"], run["seconds"]
    run["shown"] = -math.inf  # when the progress line was printed
    name = f"{args.env_id}__{SCRIPT}__{args.seed}__{int(1000 * time.time())}"
    name = re.sub("[/:]", "-", name)
    chosen = args.resume or args.run_dir
    args.run_dir = chosen or f"runs/{name}"
    if args.track:
        import wandb

        names = {"project": args.wandb_project_name, "entity": args.wandb_entity}
        names["name"] = Path(args.run_dir).name
        wandb_run = {"id": run["wandb_id"], "resume": "allow", "config": asdict(args)}
        wandb_run |= {"sync_tensorboard": True, "save_code": True}
        try:
            run["wandb_id"] = wandb.init(**names, **wandb_run).id
        except wandb.Error as error:
            fail("track", error)
    os.makedirs(args.run_dir, exist_ok=bool(chosen))
    Path(args.run_dir, "result.json").unlink(missing_ok=True)  # until this run has ended
    Path(args.run_dir, "args.json").write_text(json.dumps(asdict(args), indent=1))
    shutil.copyfile(__file__, Path(args.run_dir, "source.py"))
    device, threads = pick_device(args), torch.get_num_threads()
    precision = getattr(args, "precision", "fp32")
    # without oneDNN's bfloat16, PyTorch computes it number by number, 7 times slower than fp32
    onednn = device.type == "cpu" and torch.backends.mkldnn.is_available()
    emulated = onednn and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if device.type == "cuda":  # GPUs older than the A100 have none
        emulated = not torch.cuda.is_bf16_supported(including_emulation=False)
    if precision == "bf16" and emulated:
        precision += ", which this device lacks: fp32 is faster"
    show(shlex.join(["python", *sys.argv]) + "\n")
    show(f"device {device}, torch threads {threads}, precision {precision}\n")
    if args.resume:
        show(f"going on after step {run['global_step']:,}; the environments start new episodes\n")
    # purge_step takes back what was logged after the checkpoint
    purge_step = run["global_step"] + 1 if args.resume else None
    return run, SummaryWriter(args.run_dir, purge_step=purge_step)


def show(text: str) -> None:
    """Print without a newline. If nobody can read it any more, the run is to save and end."""
    try:
        print(text, end="", flush=True)
    except RuntimeError:  # a signal has come while something was printed
        pass
    except BrokenPipeError as error:  # in `python FILE | tee log`, Ctrl-C ends tee as well
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        STOP.append(error)


def log(args: Args, run: dict, writer: SummaryWriter, metrics: dict, last: bool) -> None:
    """Write an iteration's metrics to TensorBoard, and keep the progress line up to date."""
    run["returns"] = run["returns"][-100:]  # all that return_last100 needs
    first_step, first_seconds = run["start"]
    step, live = run["global_step"], sys.stdout.isatty()
    sps = (step - first_step) / (run["seconds"] - first_seconds)
    for name, value in {**metrics, "charts/SPS": sps}.items():
        writer.add_scalar(name, value, step)
    if last or time.perf_counter() - run["shown"] > (0.2 if live else 10):
        run["shown"] = time.perf_counter()
        mean = np.mean(run["returns"][-20:]) if run["returns"] else math.nan
        goal = min(args.stop_at or math.inf, args.total_timesteps)
        left = timedelta(seconds=int(min(max(0, goal - step) / sps, 10**9)))
        line = f"{step:,} of {goal:,} steps | return {mean:.1f} | {sps:,.0f} SPS | {left} left"
        start, end = ("\r\033[K", "\n" if last else "") if live else ("", "\n")
        width = shutil.get_terminal_size().columns - 1 if live else None
        show(start + line[:width] + end)


def step_shielded(envs: gym.vector.VectorEnv, actions: np.ndarray) -> tuple:
    """Step. Programs that start meanwhile (ffmpeg, which films) hear neither Ctrl-C nor SIGTERM."""
    if not hasattr(signal, "pthread_sigmask"):  # on Windows
        return envs.step(actions)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        return envs.step(actions)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def evaluate(args: Args, run: dict) -> list[float]:
    """Play one whole game in each of --eval-episodes environments; returns the raw scores.

    One game each: the first games to end would be the short ones. Actions are sampled as in
    training, but from a random stream of its own: evaluating changes no training.
    """
    show(f"playing {args.eval_episodes} games to their end; Ctrl-C stops\n")
    device, scores = pick_device(args), {}
    gpus = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    with torch.random.fork_rng(gpus), torch.inference_mode():
        torch.manual_seed(args.seed)
        envs, obs = make_envs(args, args.eval_episodes, args.seed + 10**9, frozen=run)
        agent = Agent(envs, args).to(device)
        agent.load_state_dict(run["agent"])
        while len(scores) < args.eval_episodes and not STOP:
            action = agent.get_action_and_value(torch.as_tensor(obs, device=device))[0]
            obs, _, _, _, infos = step_shielded(envs, action.cpu().numpy())
            for i, episodic_return, _ in finished_episodes(infos):
                scores.setdefault(i, episodic_return)
        envs.close()
    if len(scores) < args.eval_episodes:  # a signal: what has ended so far are the short games
        print("no score: not all games have ended")
        return []
    scores = list(scores.values())
    print(f"score {np.mean(scores):.1f} ± {np.std(scores):.1f} over {len(scores)} games")
    return scores


def close_run(args: Args, run: dict, writer: SummaryWriter, finished: bool) -> dict:
    """Write result.json, evaluate a finished run, and say what can be done next."""
    result = {"steps": run["global_step"], "seconds": run["seconds"], "episodes": run["episodes"]}
    result["sps"] = run["global_step"] / run["seconds"]
    result["return_last100"] = float(np.mean(run["returns"])) if run["returns"] else None
    result |= {"eval_mean": None, "eval_std": None, "finished": finished}
    path = Path(args.run_dir, "result.json")
    path.write_text(json.dumps(result, indent=1))  # in case the evaluation is killed
    if finished and args.eval_episodes and (scores := evaluate(args, run)):
        result |= {"eval_mean": float(np.mean(scores)), "eval_std": float(np.std(scores))}
        path.write_text(json.dumps(result, indent=1))
    writer.close()
    if args.track:
        import wandb

        wandb.finish()
    run_dir = shlex.quote(args.run_dir)
    flags = f" --total-timesteps {2 * args.total_timesteps}" if finished else ""
    script, label = shlex.quote(sys.argv[0]), "longer:" if finished else "go on: "
    print(f"watch:  python {script} --evaluate {run_dir} --capture-video")
    print(f"{label} python {script} --resume {run_dir}{flags}")
    print(f"curves: tensorboard --logdir {shlex.quote(str(Path(args.run_dir).parent))}")
    return result


def parse(argv: list[str] | None = None) -> Args:
    """Read the command line; --resume and --evaluate start from the arguments that were saved."""
    args = tyro.cli(Args, args=argv)
    flag = "resume" if args.resume else "evaluate"
    if run_dir := getattr(args, flag):
        run = load(flag, run_dir)
        saved = replace(run["args"], resume=None, evaluate=None, run_dir=run_dir)
        if saved.stop_at and saved.stop_at <= run["global_step"]:
            saved.stop_at = None  # it has stopped there
        if args.evaluate:  # the run may have been trained without an evaluation
            saved.eval_episodes = saved.eval_episodes or Args.eval_episodes
            saved.capture_video = saved.track = saved.compile = False
        args = tyro.cli(Args, args=argv, default=saved)
        if (args.env_id, args.run_dir) != (saved.env_id, run_dir):
            fail(flag, f"{run_dir} keeps its --env-id {saved.env_id} and its directory")
    check(args)
    if args.resume:
        step, batch_size = run["global_step"], args.num_envs * args.num_steps
        if step // batch_size >= args.total_timesteps // batch_size:
            fail(flag, f"{run_dir} is finished: go further with --total-timesteps")
        if step % batch_size:
            fail(flag, f"choose a batch size that divides step {step}: {batch_size} does not")
        if args.stop_at and args.stop_at <= step:
            fail("stop_at", f"{run_dir} is at step {step} already")
    if run_dir:  # try its weights before anything is written there
        with warnings.catch_warnings(action="ignore"), torch.random.fork_rng(devices=[]):
            try:
                envs = make_envs(replace(args, capture_video=False), 1, args.seed, frozen=run)[0]
                Agent(envs, args).load_state_dict(run["agent"])
            except (RuntimeError, ValueError) as error:
                problem = str(error).splitlines()[-1]
                fail(flag, f"{run_dir} does not fit the network of {SCRIPT}.py: {problem}")
            envs.close()
    return args


def request_stop(signum: int, frame: object) -> None:
    """End the run after this iteration. A second signal ends it at once."""
    STOP.append(signum)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    show("\nstopping soon; a second signal ends at once\n")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, request_stop)
    signal.signal(signal.SIGTERM, request_stop)
    args = parse()
    try:
        evaluate(args, load("evaluate", args.evaluate)) if args.evaluate else train(args)
    except (FloatingPointError, ChildProcessError) as error:
        sys.exit(f"error: {error}; what was saved in {args.run_dir} is kept")
