# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#   "ale-py==0.12.1", "gymnasium[atari]==1.4.0", "moviepy==2.2.1", "numpy==2.4.6",
#   "opencv-python-headless==5.0.0.93", "tensorboard==2.21.0", "torch==2.13.0", "tyro==1.0.17",
#   "wandb==0.31.0",
# ]
# ///
"""Proximal Policy Optimization for Atari games, as published for openai/baselines ppo2.

Differs from ppo_shared.py in:
- Arguments: the Atari hyperparameters, --precision and --vector-mode
- Environment: six wrappers, four frames in one observation, and processes on demand
- Agent: the Nature-CNN, and pixels scaled to [0, 1]; all cores, and a GPU where there is one

Details shown: core 1-12, atari 1-9, aux 1 and 3; core 13 is off.
The algorithm is in Schulman et al. 2017, arXiv 1707.06347. Tags in brackets number "The 37
Implementation Details of PPO" (Huang et al. 2022), "beyond" what goes past them, a flag each:
iclr-blog-track.github.io/2022/03/25/ppo-implementation-details. Where a comment says "baselines",
it means openai/baselines at ea25b9e.
Expected, Breakout, last 100 games: 15.8, 16.0 after 500k of 10M steps (fp32), 408 at 10M (bf16).

    python ppo_atari.py --env-id BreakoutNoFrameskip-v4 --seed 1
    python ppo_atari.py --resume runs/RUN                      # go on after Ctrl-C or a kill
    python ppo_atari.py --evaluate runs/RUN --capture-video    # one game as MP4, runs/RUN/videos
"""

import atexit
import contextlib
import ctypes
import io
import json
import math
import multiprocessing.resource_tracker
import os
import re
import shlex
import shutil
import signal
import sys
import time
import warnings
import zipfile
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Literal, NoReturn

if "mode async" in " ".join(sys.argv).replace("=", " "):
    # PyTorch's idle threads spin for 7 ms before they sleep, on cores where games are to be played.
    # With 0.5 ms ppo_atari.py is 1.06 (fp32) to 1.16 times (bf16) as fast. PyTorch reads it once.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")

try:
    import ale_py
    import cv2
    import gymnasium as gym
    import numpy as np
    import torch
    import tyro
    from torch import nn
    from torch.utils.tensorboard import SummaryWriter
except ModuleNotFoundError as error:
    print(f"error: {error}: `uv run {__file__}` installs it first", file=sys.stderr)
    sys.exit(2)


# === Arguments
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass
class Args:
    env_id: str = "BreakoutNoFrameskip-v4"  # environment; module:Name-v0 imports your own
    total_timesteps: int = 10_000_000  # agent steps of all environments, in whole rollouts
    learning_rate: float = 2.5e-4  # Adam's step size at the start
    num_envs: int = 8  # environments stepped side by side
    num_steps: int = 128  # steps in each environment between two updates
    anneal_lr: bool = True  # learning rate falls linearly to 0 at total-timesteps
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    num_minibatches: int = 4  # parts into which each epoch cuts the batch
    update_epochs: int = 4  # passes over the batch in one update
    norm_adv: bool = True  # normalize advantages, minibatch by minibatch
    clip_coef: float = 0.1  # a ratio (or value) that moves farther than this gains no more
    anneal_clip_coef: bool = False  # clip-coef falls linearly to 0 as well
    clip_vloss: bool = True  # clip the value loss
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # a longer gradient is scaled down to this length
    target_kl: float | None = None  # stop the epochs of an update above this KL (0.01 is usual)
    bootstrap_truncated: bool = False  # at a time limit, add the value of the last observation
    precision: Literal["fp32", "bf16"] = "fp32"  # bf16: the convolutional network in bfloat16
    vector_mode: Literal["sync", "async"] = "sync"  # async: in processes, one for each core

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
gym.register_envs(ale_py)
ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner from every environment


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


def play(pipe, make_share, seeds) -> None:
    """Step a share of the environments in a process of its own, for as long as the pipe is open.

    What it sends is in the order in which SyncVectorEnv asks: spaces, resets, then step by step.
    """
    os.set_inheritable(pipe.fileno(), False)  # processes that a game starts would keep it open
    envs = make_share()
    answers = [(env.observation_space, env.action_space) for env in envs]
    answers += [env.reset(seed=seed) for env, seed in zip(envs, seeds, strict=True)]
    while True:
        try:
            pipe.send(answers)
            actions = pipe.recv()
        except (EOFError, ConnectionError):  # the other end is closed, or its process is dead
            break
        answers = []
        for env, action in zip(envs, actions, strict=True):
            obs, reward, terminated, truncated, info = env.step(action)
            answers.append((obs, reward, terminated, truncated, info))
            if terminated or truncated:
                answers.append(env.reset())
    for env in envs:
        env.close()


class RemoteEnv(gym.Env):
    """An environment in another process; its answers arrive before anyone asks for them."""

    def __init__(self, answers: list):
        self.answers = answers
        self.observation_space, self.action_space = answers.pop(0)

    def answer(self, *_, **__):
        return self.answers.pop(0)

    reset = step = answer


class ProcessVectorEnv(gym.vector.SyncVectorEnv):
    """SyncVectorEnv over one process for each core: environment i is in process i % cores.

    They are reset once, with the seed that they are made with.
    """

    def __init__(self, make: list, seed: int, **kwargs):
        context, n = multiprocessing.get_context("forkserver"), min(CORES, len(make))
        self.pipes, self.processes, self.answers = [], [], [[] for _ in range(n)]
        atexit.register(self.close)
        for i in range(n):
            pipe, far_end = context.Pipe()
            share = gym.vector.utils.CloudpickleWrapper(lambda i=i: [f() for f in make[i::n]])
            arguments = far_end, share, range(seed + i, seed + len(make), n)
            process = context.Process(target=play, args=arguments, daemon=True)
            process.start()
            far_end.close()  # the process has it now, and when that dies, the pipe is closed
            self.pipes.append(pipe)
            self.processes.append(process)
        self.receive()
        remote = [lambda i=i: RemoteEnv(self.answers[i % n]) for i in range(len(make))]
        super().__init__(remote, **kwargs)

    def receive(self):
        for pipe, process, answers in zip(self.pipes, self.processes, self.answers, strict=True):
            try:
                answers += pipe.recv()
            except (EOFError, ConnectionError):
                process.join(5)
                problem = f"a process with environments has ended, exit code {process.exitcode}"
                raise ChildProcessError(problem) from None

    def step(self, actions):
        for i, pipe in enumerate(self.pipes):
            with contextlib.suppress(ConnectionError):  # of a process that has ended: see receive
                pipe.send(actions[i :: len(self.pipes)])
        self.receive()
        return super().step(actions)

    def close_extras(self, **kwargs):
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(5)
            process.kill()


def make_envs(args: Args, num_envs: int, seed: int, frozen: dict | None = None):
    """Make num_envs environments, environment i seeded with seed + i.

    frozen: the checkpoint that is evaluated, None in training. Only its first game is filmed,
    since every frame of a film is kept in memory until the game ends.
    Returns the vector environment and its first observations, (num_envs, *observation_shape).
    """
    filmed = args.capture_video and frozen is not None  # processes get this, and not the network

    def make_env(index: int) -> gym.Env:
        video = filmed and index == 0
        env = gym.make(args.env_id, **({"render_mode": "rgb_array"} if video else {}))
        # innermost: whole games and raw scores, whatever the wrappers make of them
        env = gym.wrappers.RecordEpisodeStatistics(env)
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

    # SAME_STEP: the step that ends an episode already returns the first observation of the next,
    # as in baselines. Gymnasium's default spends one more step on the reset, and the loop below
    # would learn from that step although its action is ignored.
    make = [lambda i=i: make_env(i) for i in range(num_envs)]
    same_step = gym.vector.AutoresetMode.SAME_STEP
    if args.vector_mode == "async":
        # [beyond 4] Environments in processes, one for each core, forked from one that has imported
        # torch, whose memory they share. One process for each game, as AsyncVectorEnv has it, is
        # 0.9 times as fast with 8 games on two cores, and takes 60 MB more for each.
        multiprocessing.set_forkserver_preload(["torch", "tyro", "tensorboard"])
        # Signals are for the process that saves: the others are born with them blocked. The tracker
        # comes first, because its start would unblock them.
        multiprocessing.resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        envs = ProcessVectorEnv(make, seed, autoreset_mode=same_step)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    else:
        envs = gym.vector.SyncVectorEnv(make, autoreset_mode=same_step)
    return envs, envs.reset(seed=seed)[0]


def finished_episodes(infos: dict):
    """Yield (environment, return, length) of each episode that ended in this step."""
    final_info = infos.get("final_info", {})  # _episode says for which environments
    for i in np.flatnonzero(final_info.get("_episode", ())):
        yield i, float(final_info["episode"]["r"][i]), int(final_info["episode"]["l"][i])


def wrong_space(env: gym.Env) -> str | None:
    """Say what in this environment this file cannot use, and which file can. None if all fits."""
    obs_space, action_space = env.observation_space, env.action_space
    if obs_space.dtype != np.uint8 or len(obs_space.shape) != 3 or obs_space.shape[2] != 3:
        return f"observations must be RGB images, not {obs_space}: flat ones fit ppo.py"
    if isinstance(action_space, gym.spaces.MultiDiscrete | gym.spaces.MultiBinary):
        return "actions have several parts: use ppo_multidiscrete.py"
    if not isinstance(action_space, gym.spaces.Discrete) or action_space.start != 0:
        return f"actions must be Discrete and start at 0, not {action_space}"
    if not hasattr(env.unwrapped, "ale") or not hasattr(env.unwrapped, "get_action_meanings"):
        return "no Atari game (no ale.lives()): MultiDiscrete([n]) actions fit ppo_multidiscrete.py"
    if getattr(env.unwrapped, "_frameskip", 1) != 1:
        return "frames are skipped already: use a NoFrameskip-v4 id"
    return None


# === Agent
TORCH_THREADS = torch.get_num_threads()  # PyTorch's own choice, one for each core
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
        # [atari 8] The Nature-CNN (Mnih et al. 2015), shared by both heads
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(4, 32, 8, stride=4)),
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)),
            nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3, stride=1)),
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(64 * 7 * 7, 512)),
            nn.ReLU(),
        ).to(memory_format=torch.channels_last)  # 1.4 times as fast on a CPU
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

    def get_value(self, x):
        return self.critic(self.get_features(x)).squeeze(-1)

    def get_action_and_value(self, x, action=None):
        """Action (sampled, unless given), its log-probability, entropy and value, each (batch,)."""
        hidden = self.get_features(x)
        log_pi = self.actor(hidden).log_softmax(-1)  # (batch, actions)
        pi = log_pi.exp()
        # the categorical distribution by hand: torch.distributions takes 5 times as long
        if action is None:
            # a race (the Gumbel-max trick): action a arrives after noise / pi[a], a time of rate
            # pi[a], and is the first with probability pi[a]
            noise = torch.empty_like(pi).exponential_()
            action = (pi / noise).argmax(-1)
        logprob = log_pi.gather(-1, action.long().unsqueeze(-1)).squeeze(-1)
        entropy = -(pi * log_pi).sum(-1)
        return action, logprob, entropy, self.critic(hidden).squeeze(-1)


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
    envs, next_obs = make_envs(args, args.num_envs, args.seed + global_step)
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
            state = save(args, run, agent=agent.state_dict(), optimizer=optimizer.state_dict())
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
