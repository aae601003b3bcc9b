# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#   "ale-py==0.12.1", "gymnasium[atari]==1.4.0", "moviepy==2.2.1", "numpy==2.4.6",
#   "opencv-python-headless==5.0.0.93", "setproctitle==1.3.7", "tensorboard==2.21.0",
#   "torch==2.13.0", "tyro==1.0.17", "vizdoom==1.3.2", "wandb==0.31.0",
# ]
# ///
"""Asynchronous Proximal Policy Optimization (APPO), the architecture of Sample Factory.

Petrenko et al. 2020, arXiv 2006.11751. Three kinds of processes, each of which waits for nothing
but data (and a rollout worker for a place to put them):

    rollout workers  step environments; they hold no network
    policy workers   choose the actions of all rollout workers, in batches, with the newest weights
    learner          learns from whole trajectories; this is the process that you start

Differs from ppo_atari.py in:
- Arguments: the sampler's sizes, V-trace, --rnn, ViZDoom's --reward-scale; shorter rollouts, and
  twice the learning rate, since samples are learned from once and not four times
- Environment: ViZDoom too; EnvPool, with --native-envs; no --bootstrap-truncated; the workers are
  this file's own, so no --vector-mode either
- Agent: --rnn gru puts a recurrent core behind the Nature-CNN
- Advantages: V-trace, since the policy that acted is older than the one that learns
- Training: the three kinds of processes
- Run: the sampler's sizes and memory are checked, lag and waiting shown

Details shown: core 1-12, atari 1-9, lstm 1-5, aux 1 and 3, appo 1-6; core 13 is off.
The algorithm is in Schulman et al. 2017, arXiv 1707.06347. Tags in brackets number "The 37
Implementation Details of PPO" (Huang et al. 2022), "beyond" what goes past them, a flag each:
iclr-blog-track.github.io/2022/03/25/ppo-implementation-details. Where a comment says "baselines",
it means openai/baselines at ea25b9e.
Expected: Breakout, bf16: 46 to 73 over the last 100 games after 2.1M of 10M steps (six runs, 18
to 34 minutes), 408 and 370 after all of them (2.6 and 1.8 hours).
VizdoomBasic-v1, with --rnn gru and bf16: 82 and 80 after 200k steps (seed 1 twice, 3 minutes).
Not reproducible: which trajectories make a batch depends on timing. --serial is.

    python appo_async.py --env-id BreakoutNoFrameskip-v4 --precision bf16
    python appo_async.py --env-id VizdoomBasic-v1 --rnn gru --reward-scale 0.01
    python appo_async.py --resume runs/RUN                      # go on after Ctrl-C or a kill
    python appo_async.py --evaluate runs/RUN --capture-video    # one game as MP4, runs/RUN/videos
"""

import atexit
import copy
import ctypes
import io
import itertools
import json
import math
import mmap
import multiprocessing.resource_tracker
import os
import re
import select
import shlex
import shutil
import signal
import sys
import threading
import time
import warnings
import zipfile
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, NoReturn

try:
    import ale_py
    import cv2
    import gymnasium as gym
    import numpy as np
    import torch
    import tyro
    from setproctitle import setproctitle
    from torch import nn
    from torch.utils.tensorboard import SummaryWriter
    from vizdoom import gymnasium_wrapper  # noqa: F401
except ModuleNotFoundError as error:
    print(f"error: {error}: `uv run {__file__}` installs it first", file=sys.stderr)
    sys.exit(2)


# === Arguments
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass
class Args:
    env_id: str = "BreakoutNoFrameskip-v4"  # environment; module:Name-v0 imports your own
    total_timesteps: int = 10_000_000  # agent steps of all environments, in whole batches
    learning_rate: float = 5e-4  # Adam's step size at the start
    num_workers: int = min(CORES, 8)  # processes that step environments; each adds to the lag
    envs_per_worker: int = 8  # environments of each worker
    num_splits: int = 2  # parts of a worker's environments: one steps while others wait; 1: off
    num_policy_workers: int = 1  # processes that choose the actions
    learner_threads: int = max(1, min(CORES - 9, torch.get_num_threads()))  # threads of the learner
    num_steps: int = 32  # steps of a trajectory
    anneal_lr: bool = True  # learning rate falls linearly to 0 at total-timesteps
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    minibatch_size: int = 256  # samples of a gradient step
    num_minibatches: int = 1  # minibatches in a batch
    update_epochs: int = 1  # passes over the batch in one update
    rho_bar: float = 1.0  # V-trace: bound of the ratio that weighs a temporal difference
    c_bar: float = 1.0  # V-trace: bound of the ratio that carries one back in time
    max_policy_lag: int = 1000  # older samples, in updates, are left out; if all are, an error
    norm_adv: bool = True  # normalize advantages, minibatch by minibatch
    clip_coef: float = 0.1  # a ratio (or value) that moves farther than this gains no more
    anneal_clip_coef: bool = False  # clip-coef falls linearly to 0 as well
    clip_vloss: bool = True  # clip the value loss
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # a longer gradient is scaled down to this length
    target_kl: float | None = None  # stop the epochs of an update above this KL (0.01 is usual)
    rnn: Literal["none", "gru"] = "none"  # gru: a memory behind the convolutions
    reward_scale: float = 1.0  # ViZDoom's rewards are multiplied by this
    native_envs: bool = False  # train on Atari in EnvPool's C++: pip install envpool==1.2.5
    precision: Literal["fp32", "bf16"] = "fp32"  # bf16: the convolutional network in bfloat16
    serial: bool = False  # everything in one process: slow, repeatable, easy to debug

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

    @property
    def batch_size(self) -> int:
        return self.minibatch_size * self.num_minibatches

    @property
    def total_splits(self) -> int:
        return self.num_workers * self.num_splits

    @property
    def envs_per_split(self) -> int:
        return self.envs_per_worker // self.num_splits

    @property
    def slots_per_split(self) -> int:
        """One to be filled, and enough for a batch to be whole before any of it is learned from."""
        num_envs = self.total_splits * self.envs_per_split
        return 1 + math.ceil(self.batch_size / (self.num_steps * num_envs))


# === Environment
gym.register_envs(ale_py)
ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner from every environment
# ViZDoom as in the paper: an action lasts four frames, drawn at 160 x 120. Two buttons at once, so
# that one can turn and walk; and no file _vizdoom.ini wherever the user stands (a folder _vizdoom
# it makes all the same).
for env_id, spec in gym.registry.items():
    if env_id.startswith("Vizdoom"):
        spec.kwargs.update(frame_skip=4, max_buttons_pressed=2, screen_resolution="RES_160X120")
        spec.kwargs["doom_config_path"] = os.devnull


class NoopResetEnv(gym.Wrapper):
    """Do nothing for the first 1 to 30 frames of a game."""

    def reset(self, *, seed=None, options=None):
        # [atari 1] Random starts: without them every game of a deterministic policy is the same
        obs, info = self.env.reset(seed=seed, options=options)
        for _ in range(self.unwrapped.np_random.integers(1, 31)):
            obs, _, terminated, truncated, info = self.env.step(0)
            if terminated or truncated:
                obs, info = self.env.reset(options=options)
        return obs, info


class MaxAndSkipEnv(gym.Wrapper):
    """Repeat an action for four frames."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self.frames = np.zeros((2, *env.observation_space.shape), dtype=np.uint8)

    def step(self, action):
        # [atari 2] Frame skip: one decision for four frames, whose rewards are summed. The maximum
        # of the last two is seen, since the console draws some sprites in every other frame only;
        # it is taken in color, which makes moving sprites brighter than a maximum of grays would.
        # A game that ends early leaves older frames in place, as in baselines.
        total_reward = 0.0
        for skipped in range(4):
            obs, reward, terminated, truncated, info = self.env.step(action)
            if skipped >= 2:
                self.frames[skipped - 2] = obs
            total_reward += reward
            if terminated or truncated:
                break
        return self.frames.max(axis=0), total_reward, terminated, truncated, info


class EpisodicLifeEnv(gym.Wrapper):
    """Let a lost life end the episode, but start a new game only when the last one is lost."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self.lives = 0
        self.game_over = True

    def step(self, action):
        # [atari 3] Episodic life: a lost life ends the episode, so nothing after it counts
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.game_over = terminated or truncated
        lives = self.unwrapped.ale.lives()
        # lives == 0 is left to the game: some show it for a few frames before they are over
        if 0 < lives < self.lives:
            terminated = True
        self.lives = lives
        return obs, reward, terminated, truncated, info

    def reset(self, *, seed=None, options=None):
        if not self.game_over:
            # a game that ends in this step, or in the two of FireResetEnv, is not counted
            obs, _, terminated, truncated, info = self.env.step(0)
            self.game_over = terminated or truncated
        if self.game_over:
            obs, info = self.env.reset(seed=seed, options=options)
        self.lives = self.unwrapped.ale.lives()
        return obs, info


class FireResetEnv(gym.Wrapper):
    """Press FIRE in games that stand still until someone does."""

    def reset(self, *, seed=None, options=None):
        # [atari 4] Fire on reset: also after a lost life, since this wraps EpisodicLifeEnv. Actions
        # 1 (FIRE) and 2, as in baselines.
        self.env.reset(seed=seed, options=options)
        for action in (1, 2):
            obs, _, terminated, truncated, info = self.env.step(action)
            if terminated or truncated:
                obs, info = self.env.reset(options=options)
        return obs, info


class WarpFrame(gym.ObservationWrapper):
    """Turn the screen into 84 x 84 gray pixels."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self.observation_space = gym.spaces.Box(0, 255, (84, 84), np.uint8)

    def observation(self, frame):
        # [atari 5] Gray first, then averaged down; in the other order pixels differ
        frame = cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY)
        return cv2.resize(frame, (84, 84), interpolation=cv2.INTER_AREA)


class ClipRewardEnv(gym.RewardWrapper):
    """Reduce rewards to their sign."""

    def reward(self, reward):
        # [atari 6] Reward clipping: -1, 0 or 1, so that one learning rate fits every game
        return np.sign(reward)


class DoomFrame(gym.ObservationWrapper):
    """Shrink the screen to 72 x 128 pixels in color, color first."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self.observation_space = gym.spaces.Box(0, 255, (3, 72, 128), np.uint8)

    def observation(self, obs):
        frame = cv2.resize(obs["screen"], (128, 72), interpolation=cv2.INTER_AREA)
        return np.ascontiguousarray(frame.transpose(2, 0, 1))


class EnvPoolVectorEnv(gym.vector.VectorEnv):
    """Atari games that one C++ thread of EnvPool plays; game i has the seed `seed` + i.

    The details above are options here. envpool_ppo.py says what EnvPool makes of each: its no-ops,
    say, come after a lost life as well.
    """

    def __init__(self, env_id: str, num_envs: int, seed: int):
        import envpool

        options = {"num_envs": num_envs, "seed": seed, "num_threads": 1, "noop_max": 30}
        options |= {"frame_skip": 4, "episodic_life": True, "use_fire_reset": True}
        options |= {"gray_scale": True, "img_height": 84, "img_width": 84, "stack_num": 4}
        options |= {"use_inter_area_resize": True, "reward_clip": True, "full_action_space": False}
        options |= {"repeat_action_probability": 0.0, "max_episode_steps": 27_000}
        self.pool = envpool.make_gymnasium(native_id(env_id), **options)
        self.num_envs = num_envs
        self.single_observation_space = self.pool.observation_space
        self.single_action_space = self.pool.action_space
        self.scores, self.frames = np.zeros(num_envs), np.zeros(num_envs)

    def reset(self, *, seed=None, options=None):
        return self.pool.reset()

    def step(self, actions):
        obs, reward, terminated, truncated, info = self.pool.step(actions)
        self.scores += info["reward"]  # raw, and of whole games
        self.frames += 4
        over = info["terminated"].astype(bool) | truncated
        done = np.flatnonzero(terminated | truncated).astype(np.int32)
        if len(done):
            # EnvPool spends the next step of these games on a reset, and ignores its action. It is
            # taken at once, by them alone, and never seen: SAME_STEP, as below.
            self.pool.send(np.zeros(len(done), np.int32), done)
            obs[done], *_, fresh = self.pool.recv()
            # a game can end in the no-ops after a lost life, unsaid (RoadRunner): lives rise
            over[done] |= fresh["lives"] > info["lives"][done]
        episode = {"r": self.scores.copy(), "l": self.frames.copy()}
        infos = {"final_info": {"_episode": over, "episode": episode}}
        self.scores[over] = self.frames[over] = 0
        return obs, reward, terminated, truncated, infos


def native_id(env_id: str) -> str:
    """EnvPool's name of NoFrameskip-v4."""
    return env_id.replace("NoFrameskip-v4", "-v5")


def make_envs(args: Args, num_envs: int, seed: int, frozen: dict | None = None):
    """Make num_envs environments, environment i seeded with seed + i.

    frozen: the checkpoint that is evaluated, None in training. Only its first game is filmed,
    since every frame of a film is kept in memory until the game ends.
    Returns the vector environment and its first observations, (num_envs, *observation_shape).
    """

    def make_env(index: int) -> gym.Env:
        video = args.capture_video and frozen is not None and index == 0
        env = gym.make(args.env_id, **({"render_mode": "rgb_array"} if video else {}))
        # innermost: whole games and raw scores, whatever the wrappers make of them
        env = gym.wrappers.RecordEpisodeStatistics(env)
        if env.spec.id.startswith("Vizdoom"):
            if video:  # 35 frames a second, of which one in 4 is seen
                folder = f"{args.run_dir}/videos"
                env = gym.wrappers.RecordVideo(env, folder, lambda game: game == 0, fps=9)
            env = DoomFrame(env)
            return gym.wrappers.TransformReward(env, lambda reward: reward * args.reward_scale)
        env = NoopResetEnv(env)
        env = MaxAndSkipEnv(env)
        if video:
            folder = f"{args.run_dir}/videos"
            env = gym.wrappers.RecordVideo(env, folder, lambda game: game == 0, fps=15)
        env = EpisodicLifeEnv(env)
        if "FIRE" in env.unwrapped.get_action_meanings():
            env = FireResetEnv(env)
        env = WarpFrame(env)
        env = ClipRewardEnv(env)
        # [atari 7] Four frames in one observation: where the ball is, and where it is going
        return gym.wrappers.FrameStackObservation(env, 4, padding_type="zero")

    if args.native_envs and frozen is None:  # an evaluation has the wrappers, as in ppo_atari.py
        envs = EnvPoolVectorEnv(args.env_id, num_envs, seed)
        return envs, envs.reset()[0]
    # SAME_STEP: the step that ends an episode already returns the first observation of the next,
    # as in baselines. Gymnasium's default spends one more step on the reset, and the loop below
    # would learn from that step although its action is ignored.
    make = [lambda i=i: make_env(i) for i in range(num_envs)]
    envs = gym.vector.SyncVectorEnv(make, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    # Ctrl-C and SIGTERM are for the process that saves: ViZDoom's programs, which the reset starts,
    # are born with both blocked
    mask = getattr(signal, "pthread_sigmask", None)  # Windows has none
    before = mask and mask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    obs = envs.reset(seed=seed)[0]
    if mask:
        mask(signal.SIG_SETMASK, before)
    return envs, obs


def finished_episodes(infos: dict):
    """Yield (environment, return, length) of each episode that ended in this step."""
    final_info = infos.get("final_info", {})  # _episode says for which environments
    for i in np.flatnonzero(final_info.get("_episode", ())):
        yield i, float(final_info["episode"]["r"][i]), int(final_info["episode"]["l"][i])


def wrong_space(env: gym.Env) -> str | None:
    """Say what in this environment this file cannot use, and which file can. None if all fits."""
    obs_space, action_space = env.observation_space, env.action_space
    doom = env.spec is not None and env.spec.id.startswith("Vizdoom")
    image = obs_space.dtype == np.uint8 and len(obs_space.shape) == 3 and obs_space.shape[2] == 3
    if not doom and not image:
        return f"observations must be RGB images, not {obs_space}: flat ones fit ppo.py"
    if isinstance(action_space, gym.spaces.MultiDiscrete | gym.spaces.MultiBinary):
        return "actions have several parts: use ppo_multidiscrete.py"
    if not isinstance(action_space, gym.spaces.Discrete) or action_space.start != 0:
        return f"actions must be Discrete and start at 0, not {action_space}"
    if doom:
        return None
    if not hasattr(env.unwrapped, "ale") or not hasattr(env.unwrapped, "get_action_meanings"):
        return "this is neither an Atari game nor ViZDoom"
    if getattr(env.unwrapped, "_frameskip", 1) != 1:
        return "frames are skipped already: use a NoFrameskip-v4 id"
    return None


# === Agent
TORCH_THREADS = 1  # in each worker: they are as many as the cores, or more
# --device auto takes the first that is there. A Mac's GPU has to be asked for: in PyTorch 2.13 its
# convolutions are slow in channels_last (pytorch issue 193349), and its noise can be 0 (192577).
AUTO_DEVICES = ("cuda", "cpu")
if sys.platform == "linux":
    # Freed blocks of up to 32 MB stay with this process. The system would take them back, and give
    # them out again page by page, cleared: an update is 1.15 times as fast without that.
    ctypes.CDLL(None).mallopt(-3, 2**25)  # M_MMAP_THRESHOLD
    ctypes.CDLL(None).mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def layer_init(layer: nn.Module, std: float = np.sqrt(2), bias_const: float = 0.0) -> nn.Module:
    # [core 2] Orthogonal initialization of the weights, constant biases
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    def __init__(self, envs: gym.vector.VectorEnv, args: Args):
        super().__init__()
        # [core 13: off] One trunk: both heads need the same features of the screen
        channels, height, width = envs.single_observation_space.shape
        for kernel, stride in ((8, 4), (4, 2), (3, 1)):
            height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
        # [atari 8] The Nature-CNN (Mnih et al. 2015), shared by both heads
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(channels, 32, 8, stride=4)),
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)),
            nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3, stride=1)),
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(64 * height * width, 512)),
            nn.ReLU(),
        ).to(memory_format=torch.channels_last)  # 1.4 times as fast on a CPU
        self.gru = nn.GRU(512, 512) if args.rnn == "gru" else None
        # [lstm 1] Orthogonal weights and zero biases, of a GRU as of an LSTM
        for name, parameter in self.gru.named_parameters() if self.gru else ():
            nn.init.orthogonal_(parameter) if "weight" in name else nn.init.zeros_(parameter)
        self.critic = layer_init(nn.Linear(512, 1), std=1.0)
        # std=0.01: all actions are about equally likely at the start
        self.actor = layer_init(nn.Linear(512, envs.single_action_space.n), std=0.01)
        self.bf16 = args.precision == "bf16"

    def get_features(self, x):
        x = x.contiguous(memory_format=torch.channels_last)
        # [beyond 2] bfloat16 for all layers here; weights, heads and losses stay float32. Bytes
        # fit in it exactly, and to divide them first takes 2 to 4 times as long, to the same bits.
        x = x.bfloat16() if self.bf16 else x
        # [atari 9] Pixels scaled to [0, 1]; until here they are bytes, a quarter of the memory
        x = x / 255.0
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16):
            return self.network(x).float()

    def get_hidden(self, x, hidden, done):
        """Run the core over num_steps observations of num_envs environments, time-major.

        x is (num_steps * num_envs, ...), done (num_steps * num_envs,), hidden (num_envs, 512) from
        before the first of them. Returns what the heads see, (num_steps * num_envs, 512), and the
        state after the last. Without a core, hidden is (num_envs, 0) and comes back as it was.
        """
        features = self.get_features(x)
        if self.gru is None:
            return features, hidden
        features = features.unflatten(0, (-1, len(hidden)))
        done = done.unflatten(0, (-1, len(hidden), 1))
        # [lstm 3] Reset at episode ends, also within a sequence: done marks the first observation
        # of an episode, for which what came before is forgotten. One call of the core for each
        # stretch without a reset is 1.6 times as fast as one for each step.
        resets = done.flatten(1).any(1).nonzero().flatten().tolist()
        outputs = []
        for start, end in itertools.pairwise(sorted({0, *resets, len(done)})):
            hidden = hidden * (1.0 - done[start])
            stretch, hidden = self.gru(features[start:end], hidden.unsqueeze(0))
            hidden = hidden.squeeze(0)
            outputs.append(stretch)
        return torch.cat(outputs).flatten(0, 1), hidden

    def initial_state(self, num_envs):
        # for an evaluation; in training, play() begins with zeros
        return self.critic.weight.new_zeros(num_envs, 512 if self.gru else 0)

    def get_action_and_value(self, x, hidden, done, action=None):
        """Action (sampled, unless given), logprob, entropy, value, new state: see get_hidden."""
        output, hidden = self.get_hidden(x, hidden, done)
        log_pi = self.actor(output).log_softmax(-1)  # (batch, actions)
        pi = log_pi.exp()
        # the categorical distribution by hand: torch.distributions takes 5 times as long
        if action is None:
            # a race (the Gumbel-max trick): action a arrives after noise / pi[a], a time of rate
            # pi[a], and is the first with probability pi[a]
            noise = torch.empty_like(pi).exponential_()
            action = (pi / noise).argmax(-1)
        logprob = log_pi.gather(-1, action.long().unsqueeze(-1)).squeeze(-1)
        entropy = -(pi * log_pi).sum(-1)
        return action, logprob, entropy, self.critic(output).squeeze(-1), hidden


# === Advantages
def compute_vtrace(
    ratios, rewards, values, dones, next_value, next_done, gamma, gae_lambda, rho_bar, c_bar
):
    """Advantages of trajectories that an older policy made, and the returns to be learned.

    ratios are pi(a|s) / mu(a|s), the probability of an action now over that when it was taken;
    ratios, rewards, values and dones are (num_steps, num_envs), next_value and next_done
    (num_envs,). Values are those of the network that learns.
    Careful: dones[t] = 1 means that obs[t] is the first of a new episode, not that the action of
    step t ended one. What follows step t is therefore cut off by dones[t + 1].
    Espeholt et al. 2018, equation 1, with the lambda of remark 2.
    """
    # [core 5] Generalized Advantage Estimation is what this comes to if all ratios are 1
    # [appo 5] V-trace: a step that the policy would take less often now counts less (rho), and so
    # does, from there on, all that followed it (c). A ratio above 1 is cut, which bounds variance.
    # With lambda 1 and equal bounds, v_t - V(s_t) is the factor of IMPALA's gradient, rho_t * (r_t
    # + gamma * v_{t+1} - V(s_t)). PPO's loss multiplies it by the ratio once more, as in Sample
    # Factory: a good step that has become half as likely counts a quarter.
    nextvalues = torch.cat((values[1:], next_value.unsqueeze(0)))
    nextnonterminal = 1.0 - torch.cat((dones[1:], next_done.unsqueeze(0)))
    deltas = ratios.clamp(max=rho_bar) * (rewards + gamma * nextvalues * nextnonterminal - values)
    carry = gae_lambda * ratios.clamp(max=c_bar)
    advantages = torch.zeros_like(rewards)
    lastgaelam = torch.zeros_like(next_value)
    for t in reversed(range(len(rewards))):
        lastgaelam = deltas[t] + gamma * carry[t] * nextnonterminal[t] * lastgaelam
        advantages[t] = lastgaelam
    return advantages, advantages + values


# === Training
class Bell:
    """Wakes one process; any other may ring.

    A byte written into a pipe, without a lock: a process that is killed, at any instruction, leaves
    nothing behind for which others would wait. The byte means "look again" and no more, so it does
    no harm if one is missing, or rung for someone who has just been replaced.
    """

    def __init__(self):
        self.listener, self.rope = torch.multiprocessing.Pipe(duplex=False)
        os.set_blocking(self.rope.fileno(), False)

    def ring(self):
        with suppress(BlockingIOError):  # a full pipe wakes as well
            os.write(self.rope.fileno(), b"!")

    def wait(self, seconds: float):
        if select.select([self.listener], [], [], seconds)[0]:
            os.read(self.listener.fileno(), 1 << 16)


class Shared:
    """All that more than one process sees, in shared memory.

    Each split, some of a worker's environments, has slots for trajectories, and fills them in turn.
    Four counters for each split say whose turn it is. Each has one writer, and is written after
    what it speaks of (x86 keeps this order; ARM: docs/async.md). So nothing needs a lock, nor any
    repair when a worker is killed: what it had finished counts, and what it had begun does not.

    asked, answered: while they differ, a rollout worker waits and a policy worker acts.
    filled, consumed: the slots from consumed to filled are the learner's, the others the worker's.
    """

    def __init__(self, args: Args, agent: Agent, obs_shape: tuple[int, ...]):
        # [appo 1] Trajectories in shared memory, written where they will be read: slot, step,
        # environment; with one step more, for the observation to bootstrap from
        shape = (args.total_splits * args.slots_per_split, args.num_steps + 1, args.envs_per_split)
        self.obs = torch.zeros(shape + obs_shape, dtype=torch.uint8)
        self.dones = torch.zeros(shape)  # 1: the observation is the first of a new episode
        self.hidden = torch.zeros(shape + agent.initial_state(1).shape[1:])
        self.actions = torch.zeros(shape, dtype=torch.int64)
        self.logprobs = torch.zeros(shape)
        self.values = torch.zeros(shape)
        self.rewards = torch.zeros(shape)
        self.versions = torch.zeros(shape, dtype=torch.int64)  # of the weights that chose
        self.episodes = torch.zeros((*shape, 2))  # return and length of an episode that ended here
        self.asked = torch.zeros(args.total_splits, dtype=torch.int64)
        self.answered, self.filled, self.consumed = (self.asked.clone() for _ in range(3))
        self.positions = torch.zeros((args.total_splits, 2), dtype=torch.int64)  # slot and step
        self.version = torch.zeros(1, dtype=torch.int64)  # updates made so far
        members = args.num_workers + args.num_policy_workers + 1
        self.seconds_waited = torch.zeros(members, dtype=torch.float64)
        self.stop = torch.zeros(1)
        self.weights = [copy.deepcopy(agent) for _ in range(2)]
        self.bells = []  # of the rollout workers, the policy workers, and the learner

    def tensors(self) -> list[torch.Tensor]:
        tensors = [x for x in vars(self).values() if isinstance(x, torch.Tensor)]
        return tensors + [x for agent in self.weights for x in agent.parameters()]

    def share(self):
        for tensor in self.tensors():
            tensor.share_memory_()
        self.bells = [Bell() for _ in self.seconds_waited]

    def arrays(self) -> SimpleNamespace:
        """The same memory as NumPy arrays: one number is read in a tenth of the time.

        And images are copied whole, where PyTorch's indexing takes them byte by byte.
        """
        tensors = {name: x for name, x in vars(self).items() if isinstance(x, torch.Tensor)}
        return SimpleNamespace(**{name: tensor.numpy() for name, tensor in tensors.items()})

    def ring(self, member: int):
        if self.bells:
            self.bells[member].ring()

    def publish(self, agent: Agent, version: int):
        # [appo 3] Weights in shared memory, twice: the newest are never written to
        self.weights[version % 2].load_state_dict(agent.state_dict())
        self.version[0] = version


def play(args: Args, shared: Shared, split: int):
    """Fill trajectory after trajectory with one split's environments; yield where it must wait."""
    x = shared.arrays()
    worker, learner = split // args.num_splits, -1
    policy = args.num_workers + worker % args.num_policy_workers
    seed = args.seed + split * args.envs_per_split + int(x.version[0]) * args.batch_size
    envs, next_obs = make_envs(args, args.envs_per_split, seed)
    # [lstm 2] The state is zero at the start of a run, and of a worker that replaces another
    next_done, next_hidden = 0.0, 0.0
    try:
        while True:
            # [appo 6] Back-pressure: no free slot, no step, until the learner has caught up
            while x.filled[split] - x.consumed[split] == args.slots_per_split:
                yield
            slot = split * args.slots_per_split + x.filled[split] % args.slots_per_split
            x.obs[slot, 0], x.dones[slot, 0], x.hidden[slot, 0] = next_obs, next_done, next_hidden
            x.episodes[slot] = 0
            for step in range(args.num_steps):
                x.positions[split] = slot, step
                newest = int(x.version[0])
                x.asked[split] += 1
                shared.ring(policy)
                while x.answered[split] != x.asked[split]:
                    yield
                # what acts was the newest when it was asked, or lag could grow without end
                if (behind := newest - x.versions[slot, step, 0]) > 0:
                    raise TimeoutError(f"policy workers do not get new weights: {behind} behind")
                next_obs, reward, terminated, truncated, infos = envs.step(x.actions[slot, step])
                next_done = terminated | truncated
                x.rewards[slot, step] = reward
                x.obs[slot, step + 1], x.dones[slot, step + 1] = next_obs, next_done
                for i, episodic_return, episodic_length in finished_episodes(infos):
                    x.episodes[slot, step, i] = episodic_return, episodic_length
            next_hidden = x.hidden[slot, -1].copy()
            x.filled[split] += 1
            shared.ring(learner)
    finally:
        envs.close()


def rollout_worker(args: Args, shared: Shared, index: int):
    # [appo 2] Double-buffered sampling: zip steps one split after the other, each as far as it gets
    # until it needs actions. Those of the first are computed while the second is stepped.
    splits = range(index * args.num_splits, (index + 1) * args.num_splits)
    yield from zip(*(play(args, shared, split) for split in splits), strict=True)


def policy_worker(args: Args, shared: Shared, index: int):
    x, device = shared.arrays(), pick_device(args)
    agent, version = copy.deepcopy(shared.weights[0]).to(device), -1
    if agent.bf16:
        agent.network.bfloat16()  # cast once, not in each call: that is a third of it
    workers = np.arange(args.total_splits) // args.num_splits
    mine = workers % args.num_policy_workers == index
    while True:
        splits = np.flatnonzero(mine & (x.asked != x.answered))
        if not splits.size:
            yield
            continue
        # The newest weights before every batch of actions, also in the middle of a trajectory. If
        # newer ones have come out meanwhile, what was copied may be half overwritten: copy again.
        while version != x.version[0]:
            version = int(x.version[0])
            agent.load_state_dict(shared.weights[version % 2].state_dict())
        slots, steps = x.positions[splits].T
        inputs = (
            torch.from_numpy(array[slots, steps]).flatten(0, 1).to(device)
            for array in (x.obs, x.hidden, x.dones)
        )
        with torch.inference_mode():
            action, logprob, _, value, hidden = agent.get_action_and_value(*inputs)
        shape = (len(splits), args.envs_per_split)
        x.actions[slots, steps] = action.cpu().unflatten(0, shape)
        x.logprobs[slots, steps] = logprob.cpu().unflatten(0, shape)
        x.values[slots, steps] = value.cpu().unflatten(0, shape)
        x.versions[slots, steps] = version  # how old will it be when it is learned from?
        x.hidden[slots, steps + 1] = hidden.cpu().unflatten(0, shape)
        x.answered[splits] = x.asked[splits]
        for worker in set(workers[splits]):
            shared.ring(worker)


def run_part(args: Args, shared: Shared, member: int, role: str, index: int, parent: int):
    """A process of its own for a rollout or policy worker."""
    setproctitle(f"appo {role} {index}")
    os.setpgrp()  # with the programs that it starts: ViZDoom is one for each environment
    threading.Thread(target=end_orphan, args=(parent,), daemon=True).start()
    torch.set_num_threads(TORCH_THREADS)
    torch.manual_seed(args.seed + 10**6 * (1 + member) + int(shared.version[0]))
    part = {"rollout": rollout_worker, "policy": policy_worker}[role](args, shared, index)
    x = shared.arrays()
    for _ in part:
        start = time.perf_counter()
        shared.bells[member].wait(1.0)
        x.seconds_waited[member] += time.perf_counter() - start
        if x.stop or os.getppid() != parent:  # nobody is left to learn
            break
    signal.alarm(5)  # an environment that does not close
    part.close()


def end_orphan(parent: int) -> None:
    """End this process and its programs, if it is still there seconds after its parent's end."""
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(3.0)  # before the alarm of run_part, which would spare the programs
    end_group(os.getpgrp())


def end_group(group: int) -> None:
    """End the programs that a killed worker has started, and remove what they leave in memory."""
    engines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended meanwhile
            words = path.read_bytes().split(b"\0")
            if b"+viz_instance_id" in words and os.getpgid(int(path.parent.name)) == group:
                engines.append(words[words.index(b"+viz_instance_id") + 1].decode())
    for path in Path("/dev/shm").glob("ViZDoom*"):
        if path.name.endswith(tuple(engines)):
            path.unlink(missing_ok=True)
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)  # perhaps this process's own group


class Team:
    """The rollout and policy workers: processes or, with --serial, parts of this one."""

    def __init__(self, args: Args, shared: Shared):
        self.args, self.shared, self.processes, self.parts = args, shared, [], []
        self.members = [("rollout", i) for i in range(args.num_workers)]
        self.members += [("policy", i) for i in range(args.num_policy_workers)]
        if args.serial:
            make = {"rollout": rollout_worker, "policy": policy_worker}
            self.parts = [make[role](args, shared, index) for role, index in self.members]
            return
        setproctitle("appo learner")
        # A process that wakes up waits for its turn, and does not push aside the one that computes:
        # up to 1.07 times as fast where there are more processes than cores. Workers inherit this.
        with suppress(AttributeError, OSError):  # on Linux only, and not in every container
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        shared.share()
        self.deaths = [(-1, 0)] * args.num_workers  # trajectories at the last one, and how many
        atexit.register(self.close)  # if a start fails, those that have started are to stop
        self.processes = [self.start(member) for member in range(len(self.members))]

    def start(self, member: int):
        context = torch.multiprocessing.get_context("spawn")
        args = (self.args, self.shared, member, *self.members[member], os.getpid())
        process = context.Process(target=run_part, args=args, daemon=True)
        # Ctrl-C and SIGTERM are for the process that saves: the workers are born with both blocked.
        # The tracker comes first, because its start would unblock them.
        multiprocessing.resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
        return process

    def wait(self):
        """Let the others work until there is news, or for half a second."""
        start = time.perf_counter()
        for part in reversed(self.parts):  # policy workers first: whoever has asked is answered
            next(part)
        if self.processes:
            self.shared.bells[-1].wait(0.5)
            self.look_after()
        self.shared.seconds_waited[-1] += time.perf_counter() - start

    def look_after(self):
        """Replace rollout workers that were killed. ChildProcessError: one has failed by itself."""
        for member, process in enumerate(self.processes):
            if process.exitcode is None:
                continue
            role, index = self.members[member]
            who = f"{role} worker {index}"
            if role == "policy" or process.exitcode >= 0:
                raise ChildProcessError(f"{who} ended with exit code {process.exitcode}")
            splits = slice(index * self.args.num_splits, (index + 1) * self.args.num_splits)
            if (self.shared.asked[splits] != self.shared.answered[splits]).any():
                continue  # a policy worker is about to write where the successor would
            filled, deaths = int(self.shared.filled[splits].sum()), self.deaths[member]
            self.deaths[member] = (filled, 1 + deaths[1] if deaths[0] == filled else 1)
            if self.deaths[member][1] > 5:
                raise ChildProcessError(f"{who} dies before it has finished a trajectory")
            end_group(process.pid)
            show(f"\n{who} was killed by signal {-process.exitcode}: another takes its place\n")
            self.processes[member] = self.start(member)

    def close(self):
        self.shared.stop[0] = 1
        for part in self.parts:
            part.close()
        for member in range(len(self.processes)):
            self.shared.ring(member)
        deadline = time.monotonic() + 3
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode != 0:
                end_group(process.pid)
                process.kill()
        self.processes = []  # this is called again at exit, when their ids may be others'


def train(args: Args) -> dict:
    """Train one agent. Returns what result.json in the run directory says."""
    num_iterations = args.total_timesteps // args.batch_size
    num_columns = args.batch_size // args.num_steps  # environments' trajectories in a batch
    device = pick_device(args)
    torch.manual_seed(args.seed)
    run, writer = open_run(args)  # run: what a checkpoint carries on
    global_step = run["global_step"]

    envs, next_obs = make_envs(args, 1, args.seed)
    agent = Agent(envs, args)
    envs.close()
    shared = Shared(args, agent, next_obs.shape[1:])
    agent = agent.to(device)
    # [core 3] Adam with epsilon 1e-5 (PyTorch's default is 1e-8)
    # fused: one call for the whole step, 4 times as fast on a small network
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    restore(run, agent, optimizer)
    version = global_step // args.batch_size
    shared.publish(agent, version)
    if args.compile:
        # [beyond 3] Compiled for the batch of an update, and for a minibatch if that is smaller
        agent.get_action_and_value = torch.compile(agent.get_action_and_value, dynamic=False)

    # [core 1] Vectorized architecture: num_workers * envs_per_worker environments, each of which
    # goes on where its last trajectory stopped, without a reset, so long episodes are learned from
    # piece by piece.
    team = Team(args, shared)
    x = shared.arrays()
    megabytes = sum(tensor.nbytes for tensor in shared.tensors()) / 1e6
    environments = f"{args.num_workers} x {args.envs_per_worker} environments"
    print(f"{environments}, {megabytes:,.0f} MB of shared memory")
    print("lag: min/mean/max in updates; waiting, of all time: rollout/policy/learner", flush=True)
    while not x.asked.all():
        team.wait()
    finished_trajectories, seen = deque(), [0] * args.total_splits
    shared.seconds_waited.zero_()
    start_time, last_save = time.perf_counter() - run["seconds"], -math.inf
    team_time = time.perf_counter()  # since then, everyone works

    for iteration in range(version + 1, num_iterations + 1):
        # [core 4] Learning rate annealing: from learning_rate in the first update to almost 0
        # in the last, constant within an update
        frac = 1.0 - (iteration - 1) / num_iterations
        optimizer.param_groups[0]["lr"] = args.learning_rate * (frac if args.anneal_lr else 1.0)
        # [aux 1] Clip range annealing
        clip_coef = args.clip_coef * (frac if args.anneal_clip_coef else 1.0)

        team.look_after()  # also if there are always enough, and nobody waits
        # Looked for before every update, also if there are enough: the oldest are learned first
        while True:
            for split in range(args.total_splits):
                while seen[split] < x.filled[split]:
                    slot = split * args.slots_per_split + seen[split] % args.slots_per_split
                    finished_trajectories.extend((slot, i) for i in range(args.envs_per_split))
                    seen[split] += 1
            if len(finished_trajectories) >= num_columns:
                break
            team.wait()
        columns = [finished_trajectories.popleft() for _ in range(num_columns)]
        (obs, dones, hidden, actions, logprobs, rewards, values, versions, episodes) = (
            torch.stack([tensor[slot, :, i] for slot, i in columns], dim=1).to(device)
            for tensor in (
                *(shared.obs, shared.dones, shared.hidden, shared.actions, shared.logprobs),
                *(shared.rewards, shared.values, shared.versions, shared.episodes),
            )
        )  # (num_steps + 1, num_columns, ...) each; the last row is there to bootstrap from
        for slot, i in columns:
            if i == args.envs_per_split - 1:  # all of this slot has been copied
                x.consumed[slot // args.slots_per_split] += 1
                shared.ring(slot // args.slots_per_split // args.num_splits)
        global_step += args.batch_size
        for episodic_return, episodic_length in episodes[episodes[..., 1] > 0].tolist():
            run["episodes"] += 1
            run["returns"].append(episodic_return)
            writer.add_scalar("charts/episodic_return", episodic_return, global_step)
            writer.add_scalar("charts/episodic_length", episodic_length, global_step)
        # [appo 4] Policy lag, in updates: the policy that chose has been replaced so many times
        lag = version - versions[:-1]
        if lag.min() > args.max_policy_lag:
            cure = "use fewer environments, a larger batch or a higher --max-policy-lag"
            raise TimeoutError(f"all samples lag by more than {args.max_policy_lag}: {cure}")

        # What the network says of the batch before its first step. If that step uses the whole
        # batch, it learns from this very pass, which saves a quarter of the update.
        whole = args.num_minibatches == 1
        with torch.set_grad_enabled(whole):
            inputs = obs.flatten(0, 1), hidden[0], dones.flatten(), actions.flatten()
            _, *first, _ = agent.get_action_and_value(*inputs)
        first = [tensor.unflatten(0, dones.shape) for tensor in first]
        newvalues = first[2].detach()
        advantages, returns = compute_vtrace(
            *((first[0].detach() - logprobs)[:-1].exp(), rewards[:-1], newvalues[:-1], dones[:-1]),
            *(newvalues[-1], dones[-1], args.gamma, args.gae_lambda, args.rho_bar, args.c_bar),
        )

        def rows(tensor):
            """Put what is shuffled along dim 1: samples or, with a core, whole trajectories."""
            tensor = tensor[: args.num_steps]
            return tensor if args.rnn == "gru" else tensor.flatten(0, 1).unsqueeze(0)

        b_obs, b_dones, b_actions, b_logprobs = map(rows, (obs, dones, actions, logprobs))
        b_advantages, b_returns, b_values = map(rows, (advantages, returns, values))
        b_valid = rows(lag <= args.max_policy_lag)
        # [lstm 5] Every epoch rebuilds the states, from the one before the trajectory's first step
        b_hidden = rows(hidden)[0]

        stats = []
        for epoch in range(args.update_epochs):
            # [core 6] Minibatch updates: each epoch shuffles the batch anew and uses every sample
            # exactly once.
            # [lstm 4] With a core, trajectories are shuffled, and stay whole
            b_inds = torch.randperm(b_valid.shape[1], device=device)
            for mb_inds in b_inds.split(len(b_inds) // args.num_minibatches):
                valid = b_valid[:, mb_inds]
                if not valid.any():
                    continue
                if whole and epoch == 0:
                    new = (rows(tensor)[:, mb_inds] for tensor in first)
                else:
                    _, *new, _ = agent.get_action_and_value(
                        b_obs[:, mb_inds].flatten(0, 1),
                        b_hidden[mb_inds],
                        b_dones[:, mb_inds].flatten(),
                        b_actions[:, mb_inds].flatten(),
                    )
                    new = (tensor.unflatten(0, valid.shape) for tensor in new)
                newlogprob, entropy, newvalue = (tensor[valid] for tensor in new)
                logratio = newlogprob - b_logprobs[:, mb_inds][valid]
                ratio = logratio.exp()

                mb_advantages = b_advantages[:, mb_inds][valid]
                if args.norm_adv:
                    # [core 7] Advantages normalized within the minibatch, not within the batch; the
                    # deviation is NumPy's, divided by n (correction=0)
                    mb_std = mb_advantages.std(correction=0)
                    mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_std + 1e-8)

                # [core 8] Clipped surrogate objective: the larger of two losses is the pessimistic
                # one, so a ratio that has left the clip range in the good direction gains no more.
                # Sample Factory clips to [1 / (1 + e), 1 + e], and the ratio to [0.05, 20] before.
                pg_loss1 = -mb_advantages * ratio
                pg_loss2 = -mb_advantages * ratio.clamp(1 - clip_coef, 1 + clip_coef)
                pg_loss = torch.max(pg_loss1, pg_loss2).mean()

                # [core 9] Value loss clipping around the value that the rollout predicted
                mb_returns = b_returns[:, mb_inds][valid]
                v_loss = (newvalue - mb_returns) ** 2
                if args.clip_vloss:
                    mb_values = b_values[:, mb_inds][valid]
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
        metrics["charts/policy_lag_min"] = lag.min().item()
        metrics["charts/policy_lag_mean"] = lag.float().mean().item()
        metrics["charts/policy_lag_max"] = lag.max().item()
        # the share of the time that each kind of process has waited: who does not is the bottleneck
        waits = shared.seconds_waited.split((args.num_workers, args.num_policy_workers, 1))
        for role, seconds in zip(("rollout", "policy", "learner"), waits, strict=True):
            metrics[f"charts/waiting_{role}"] = (
                seconds.mean() / (time.perf_counter() - team_time)
            ).item()
        version = iteration
        shared.publish(agent, version)
        run["global_step"], run["seconds"] = global_step, time.perf_counter() - start_time

        finished = iteration == num_iterations
        stop = finished or bool(STOP) or global_step >= (args.stop_at or math.inf)
        log(args, run, writer, metrics, stop)
        if stop or time.perf_counter() - last_save >= args.checkpoint_every:
            last_save = time.perf_counter()
            state = save(args, run, agent=agent.state_dict(), optimizer=optimizer.state_dict())
            writer.flush()
        if stop:
            break

    team.close()
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
        "total_timesteps num_steps num_minibatches update_epochs stop_at": (1, math.inf),
        "num_workers envs_per_worker num_splits num_policy_workers minibatch_size": (1, 10**9),
        "learner_threads": (1, 10**9),
        "clip_coef max_grad_norm target_kl checkpoint_every": (0, math.inf),
        "ent_coef vf_coef seed eval_episodes rho_bar c_bar max_policy_lag reward_scale": (0, 10**9),
        "learning_rate gamma gae_lambda": (0, 1),
    }
    for names, (low, high) in limits.items():
        for name in names.split():
            if (value := getattr(args, name)) is not None and not low <= value <= high:
                fail(name, f"{value} is not between {low} and {high}")
    for name in ("run_dir", "resume", "evaluate"):
        if getattr(args, name) == "":
            fail(name, "is empty")
    unit = args.minibatch_size if args.rnn == "gru" else args.batch_size
    if unit % args.num_steps:
        fail("minibatch_size", f"{unit} samples are not a multiple of --num-steps {args.num_steps}")
    if args.minibatch_size == 1 and args.norm_adv:
        fail("minibatch_size", "one sample cannot be normalized: use more, or --no-norm-adv")
    batch_size = args.batch_size
    if args.total_timesteps < batch_size:
        fail("total_timesteps", f"{args.total_timesteps} is less than one batch of {batch_size}")
    if args.envs_per_worker % args.num_splits:
        fail("num_splits", f"{args.num_splits} does not divide {args.envs_per_worker} environments")
    if args.num_policy_workers > args.num_workers:
        fail("num_policy_workers", f"only {args.num_workers} rollout workers ask for actions")
    if os.name == "nt" and not args.serial:
        fail("serial", "the processes need Linux or macOS: on Windows, use --serial")
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
        if args.native_envs and not args.evaluate:
            flag = "native_envs"
            import envpool

            if native_id(args.env_id) not in envpool.list_all_envs():
                fail(flag, f"EnvPool has no {args.env_id}: use a NoFrameskip-v4 id")
        if Path("/dev/shm").exists() and not (args.serial or args.evaluate):
            megabytes, free = shared_megabytes(args), shutil.disk_usage("/dev/shm").free / 1e6
            flag = "envs_per_worker"
            if megabytes > free:
                space = f"{megabytes:.0f} MB of shared memory are needed, {free:.0f} MB are free"
                fail(flag, f"{space}: use fewer, or docker run --shm-size={2 * megabytes:.0f}m")
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
        fail(flag, f"{error} (your own: module:Name-v0)")
    except Exception as error:
        missing = getattr(error, "name", None) if isinstance(error, ImportError) else None
        fail(flag, f"{error}: pip install {missing}" if missing else str(error) or repr(error))


def shared_megabytes(args: Args) -> float:
    """The size of what the processes share, without making it."""
    envs, obs = make_envs(args, 1, args.seed)
    envs.close()
    with torch.device("meta"):
        shared = Shared(args, Agent(envs, args), obs.shape[1:])
    return sum(tensor.nbytes + mmap.PAGESIZE for tensor in shared.tensors()) / 1e6  # whole pages


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
    worker = multiprocessing.parent_process() is not None
    torch.set_num_threads(TORCH_THREADS if worker else min(args.learner_threads, CORES))
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
        lag = "/".join(f"{metrics[f'charts/policy_lag_{x}']:.3g}" for x in ("min", "mean", "max"))
        roles = ("rollout", "policy", "learner")
        waiting = "/".join(f"{metrics[f'charts/waiting_{role}']:.0%}" for role in roles)
        line = f"{step:,} of {goal:,} steps | return {mean:.1f} | {4 * sps:,.0f} frames/s"
        line += f" | lag {lag} | waiting {waiting} | {left} left"
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
        state, done = agent.initial_state(args.eval_episodes), torch.zeros(args.eval_episodes)
        while len(scores) < args.eval_episodes and not STOP:
            inputs = torch.as_tensor(obs, device=device), state, done.to(device)
            action, _, _, _, state = agent.get_action_and_value(*inputs)
            obs, _, terminated, truncated, infos = step_shielded(envs, action.cpu().numpy())
            done = torch.as_tensor(terminated | truncated).float()
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
        if (args.rnn, args.reward_scale) != (saved.rnn, saved.reward_scale):
            fail(flag, f"{run_dir} has --rnn {saved.rnn}, --reward-scale {saved.reward_scale}")
    check(args)
    if args.resume:
        step, batch_size = run["global_step"], args.batch_size
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
    except (FloatingPointError, ChildProcessError, TimeoutError) as error:
        sys.exit(f"error: {error}; what was saved in {args.run_dir} is kept")
