# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#   "envpool==1.2.5", "gymnasium==1.4.0", "moviepy==2.2.1", "numpy==2.4.6",
#   "tensorboard==2.21.0", "torch==2.13.0", "tyro==1.0.17", "wandb==0.31.0",
# ]
# ///
"""Proximal Policy Optimization on EnvPool's Atari games and other images, played in C++ threads.

Differs from ppo_atari.py in:
- Arguments: --async-envs and --num-threads in the place of --vector-mode
- Environment: a pool of C++ threads, or two, in the place of the wrappers
- Agent: images of other sizes, too
- Training: a rollout visits one half of the environments after the other; CUDA graphs
- Run: EnvPool makes the environment that is tried out, and knows the nearest ids

Details shown: core 1-12, atari 1-9, aux 1 and 3; core 13 is off.
The algorithm is in Schulman et al. 2017, arXiv 1707.06347. Tags in brackets number "The 37
Implementation Details of PPO" (Huang et al. 2022), "beyond" what goes past them, a flag each:
iclr-blog-track.github.io/2022/03/25/ppo-implementation-details. Where a comment says "baselines",
it means openai/baselines at ea25b9e.
Expected, Breakout, the last 100 games: 415 after 10M steps (seed 1, bf16); 14.5 and 16.5 after 500k
of them (2 seeds, fp32).

    python envpool_ppo.py --env-id Breakout-v5 --seed 1        # EnvPool's name of NoFrameskip-v4
    python envpool_ppo.py --resume runs/RUN                    # go on after Ctrl-C or a kill
    python envpool_ppo.py --evaluate runs/RUN --capture-video  # one game as MP4, runs/RUN/videos
"""

import ctypes
import difflib
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
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Literal, NoReturn

try:
    import envpool
    import gymnasium as gym
    import numpy as np
    import torch
    import tyro
    from torch import nn
    from torch.utils.tensorboard import SummaryWriter
except ModuleNotFoundError as error:
    hint = "; EnvPool comes for Linux, Windows and Macs with ARM" if error.name == "envpool" else ""
    print(f"error: {error}: `uv run {__file__}` installs it first{hint}", file=sys.stderr)
    sys.exit(2)


# === Arguments
@dataclass
class Args:
    env_id: str = "Breakout-v5"  # environment, one of envpool.list_all_envs()
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
    async_envs: bool = False  # half of the environments play while the network serves the others
    num_threads: int = 0  # threads that play, in each pool; 0: as many as PyTorch has

    seed: int = 1  # seed of the network, the sampling and the environments
    torch_deterministic: bool = True  # bit-for-bit repeatable on CUDA too
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto: the fastest here
    compile: bool = False  # torch.compile the network (needs a C++ compiler)
    cuda_graphs: bool = True  # on CUDA, record the work on the GPU once and replay it
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
class EnvPoolVectorEnv(gym.vector.VectorEnv):
    """The environments of one or more pools. recv(p) waits for what send(actions, p) has begun.

    num_envs environments are dealt out evenly; environment i has the seed `seed` + i, in whichever
    pool it is. slices[p] says which ones are in pool p. video: the folder for a film of the first
    game of environment 0.
    """

    def __init__(self, pools: list, video: str | None = None):
        self.pools, self.video, self.film = pools, video, None
        bounds = np.cumsum([0, *(pool.config["num_envs"] for pool in pools)]).tolist()
        self.slices = [slice(*pair) for pair in pairwise(bounds)]
        self.num_envs = bounds[-1]
        self.single_observation_space = pools[0].observation_space
        self.single_action_space = pools[0].action_space
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, self.num_envs)
        self.scores, self.lengths = np.zeros(self.num_envs), np.zeros(self.num_envs, dtype=int)

    def reset(self) -> np.ndarray:
        return np.concatenate([pool.reset()[0] for pool in self.pools])

    def send(self, actions: np.ndarray, p: int = 0) -> None:
        self.pools[p].send(actions)

    def recv(self, p: int = 0) -> tuple:
        """Return what step() of a vector environment does, for the environments of pool p."""
        pool, here = self.pools[p], self.slices[p]
        obs, reward, terminated, truncated, info = pool.recv()
        # Scores are raw and of whole games, whatever the options make of rewards and lost lives.
        # Lengths are in steps; those of resets do not count.
        self.scores[here] += info.get("reward", reward)
        self.lengths[here] += 1
        over = info.get("terminated", terminated) | truncated
        if self.video and p == 0:
            self.add_frame(pool.render(env_ids=info["env_id"][:1])[0])

        infos, done = {}, np.flatnonzero(terminated | truncated).astype(np.int32)
        if len(done):
            # EnvPool spends the next step of these environments on a reset: the action is ignored,
            # the reward is 0, and the observations before and after it belong to two episodes (or
            # lives). CleanRL learns from that step. Here it is taken at once, by these environments
            # alone, and never seen: as in the siblings, an end comes with the next beginning.
            infos["final_obs"] = obs.copy()  # read by --bootstrap-truncated
            pool.send(np.zeros(len(done), np.int32), done)
            obs[done], *_, fresh = pool.recv()
            # A game can end in the no-ops after a lost life, unsaid (RoadRunner): lives rise.
            if "lives" in info:
                over[done] |= fresh["lives"] > info["lives"][done]

        over = here.start + np.flatnonzero(over)
        if 0 in over:
            self.video = None  # the film is whole
        infos["episodes"] = [(i, float(self.scores[i]), int(self.lengths[i])) for i in over]
        self.scores[over], self.lengths[over] = 0, 0
        return obs, reward, terminated, truncated, infos

    def step(self, actions: np.ndarray) -> tuple:
        self.send(actions)
        return self.recv()

    def add_frame(self, frame: np.ndarray) -> None:
        """Add a frame, (height, width, 3), to the film."""
        from moviepy.video.io.ffmpeg_writer import FFMPEG_VideoWriter

        if self.film is None:
            os.makedirs(self.video, exist_ok=True)
            self.film = FFMPEG_VideoWriter(f"{self.video}/game.mp4", frame.shape[1::-1], fps=15)
        self.film.write_frame(frame)

    def close_extras(self, **kwargs) -> None:
        if self.film is not None:
            self.film.close()


def make_pool(args: Args, num_envs: int, seed: int, video: bool):
    """Make one pool of num_envs environments, environment i seeded with seed + i."""
    options = {"num_envs": num_envs, "seed": seed, "num_threads": args.num_threads or TORCH_THREADS}
    known = envpool.make_spec(args.env_id).config._fields
    if video:
        options["render_mode"] = "rgb_array"
    if "use_combined_action" in known:
        options["use_combined_action"] = True  # ViZDoom: an action is a set of buttons
        os.makedirs("_vizdoom", exist_ok=True)  # games that start together crash over making it
    if "noop_max" in known:
        # Atari. All that matters is written out, for EnvPool's own choices are others.
        options |= {
            # [atari 1] Random starts: 1 to 30 frames without an action, FIRE counted. EnvPool has
            # them after a lost life as well, where baselines goes on after one step.
            "noop_max": 30,
            # [atari 2] Frame skip: one decision for four frames; the maximum of the last two is
            # seen. EnvPool takes it of grays, baselines of colors.
            "frame_skip": 4,
            # [atari 3] Episodic life: a lost life ends the episode, so nothing after it counts
            "episodic_life": True,
            # [atari 4] Fire on reset, also after a lost life. It is pressed for one frame, in
            # baselines for four, and then action 2 for four.
            "use_fire_reset": True,
            # [atari 5] Gray, then averaged down
            "gray_scale": True,
            "img_height": 84,
            "img_width": 84,
            "use_inter_area_resize": True,
            # [atari 6] Reward clipping: -1, 0 or 1, so that one learning rate fits every game
            "reward_clip": True,
            # [atari 7] Four frames in one observation. A game starts with four times its first
            # frame, and a lost life leaves the stack alone; in baselines both start with zeros.
            "stack_num": 4,
            # as NoFrameskip-v4: every action is played, and a game lasts 108,000 frames at most
            "repeat_action_probability": 0.0,
            "full_action_space": False,
            "max_episode_steps": 27_000,
        }
    return envpool.make_gymnasium(args.env_id, **options)


def make_envs(args: Args, num_envs: int, seed: int, frozen: dict | None = None):
    """Make num_envs environments, environment i seeded with seed + i.

    frozen: the checkpoint that is evaluated, None in training. Only an evaluation records video.
    Returns the vector environment and its first observations, (num_envs, *observation_shape).
    """
    video = args.capture_video and frozen is not None
    size = num_envs // 2 if args.async_envs and frozen is None else num_envs
    pools = [make_pool(args, size, seed + first, video) for first in range(0, num_envs, size)]
    envs = EnvPoolVectorEnv(pools, f"{args.run_dir}/videos" if video else None)
    return envs, envs.reset()


def finished_episodes(infos: dict):
    """Yield (environment, return, length) of each episode that ended in this step."""
    yield from infos["episodes"]


def wrong_space(env: gym.Env) -> str | None:
    """Say what in this environment this file cannot use, and which file can. None if all fits."""
    obs_space, action_space = env.observation_space, env.action_space
    if not isinstance(obs_space, gym.spaces.Box) or len(obs_space.shape) != 3:
        return f"observations must be images, not {obs_space}: flat ones fit ppo.py"
    if obs_space.dtype != np.uint8 or min(obs_space.shape[1:]) < 36:
        return f"images must be bytes, (channels, at least 36, at least 36), not {obs_space}"
    if not isinstance(action_space, gym.spaces.Discrete) or action_space.start != 0:
        return f"actions must be Discrete and start at 0, not {action_space}"
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
        channels, *size = envs.single_observation_space.shape
        for kernel, stride in ((8, 4), (4, 2), (3, 1)):
            size = [(pixels - kernel) // stride + 1 for pixels in size]
        # [core 13: off] One trunk: both heads need the same features of the screen
        # [atari 8] The Nature-CNN (Mnih et al. 2015), shared by both heads
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(channels, 32, 8, stride=4)),
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)),
            nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3, stride=1)),
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(64 * math.prod(size), 512)),
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
class CudaGraph:
    """A function of tensors whose work on the GPU is recorded once, then replayed in one call.

    Without it, Python starts some hundred kernels for one step of Adam, and for networks this small
    that takes longer than they do: a run on an H100 is 1.7 times as fast with it. A replay runs the
    recorded kernels on the recorded memory. So inputs are copied to where the first ones lay,
    results stand where the next call will overwrite them, and sizes stay the same. Nothing in the
    function may wait for a result, as .item() does.
    """

    def __init__(self, function):
        self.function, self.calls, self.graph = function, 0, torch.cuda.CUDAGraph()

    def __call__(self, *inputs):
        inputs = [torch.as_tensor(value, device="cuda") for value in inputs]
        self.calls += 1
        if self.calls <= 3:  # libraries choose their kernels, and Adam makes its state
            return self.function(*inputs)
        if self.calls == 4:
            self.inputs = [value.clone() for value in inputs]
            with torch.cuda.graph(self.graph):
                self.results = self.function(*self.inputs)
        for recorded, value in zip(self.inputs, inputs, strict=True):
            recorded.copy_(value)
        self.graph.replay()
        return self.results


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

    def update(learning_rate, clip_coef, *minibatch):
        """Take one step of Adam. Returns the losses, and the length of the gradient."""
        mb_obs, mb_actions, mb_logprobs, mb_advantages, mb_returns, mb_values = minibatch
        _, newlogprob, entropy, newvalue = agent.get_action_and_value(mb_obs, mb_actions)
        logratio = newlogprob - mb_logprobs
        ratio = logratio.exp()  # 1, up to rounding, in the first minibatch of an update

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
        v_loss = (newvalue - mb_returns) ** 2
        if args.clip_vloss:
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
        # the rate is an input, as a number would be recorded; Adam asks whether this is recorded
        recording = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        optimizer.param_groups[0] |= {"lr": learning_rate, "capturable": recording}
        optimizer.step()

        # [core 12] Debug variables; approx_kl (mostly below 0.02) is the estimator that is
        # never negative, old_approx_kl is mean(-logratio): joschu.net/blog/kl-approx.html
        with torch.no_grad():
            old_approx_kl = (-logratio).mean()
            approx_kl = ((ratio - 1) - logratio).mean()
            clipfrac = ((ratio - 1.0).abs() > clip_coef).float().mean()
            losses = (v_loss, pg_loss, entropy_loss, old_approx_kl, approx_kl, clipfrac)
            return torch.stack((*losses, grad_norm))

    act, gae = agent.get_action_and_value, compute_gae
    if args.cuda_graphs and device.type == "cuda":
        act, gae, update = CudaGraph(act), CudaGraph(gae), CudaGraph(update)

    def tensor(array):
        return torch.as_tensor(array, device=device)

    # the rollout: (num_steps, num_envs) of everything
    shape = (args.num_steps, args.num_envs)
    obs = torch.zeros(shape + next_obs.shape[1:], dtype=tensor(next_obs).dtype, device=device)
    actions = tensor(np.zeros((args.num_steps, *envs.action_space.shape), envs.action_space.dtype))
    logprobs = torch.zeros(shape, device=device)
    values = torch.zeros(shape, device=device)
    # what the network does not see goes to a GPU in one piece, when the rollout is whole
    rewards, dones = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    start_time, last_save = time.perf_counter() - run["seconds"], -math.inf

    for iteration in range(global_step // batch_size + 1, num_iterations + 1):
        # [core 4] Learning rate annealing: from learning_rate in the first update to almost 0
        # in the last, constant within an update
        frac = 1.0 - (iteration - 1) / num_iterations
        learning_rate = args.learning_rate * (frac if args.anneal_lr else 1.0)
        # [aux 1] Clip range annealing
        clip_coef = args.clip_coef * (frac if args.anneal_clip_coef else 1.0)

        # Each visit to a pool takes in what its last actions brought, and sends the next ones. With
        # two pools (--async-envs) one plays while the network serves the other. EnvPool's own
        # asynchronous mode, batch_size < num_envs, returns whoever is ready first, to be told apart
        # by env_id. Then the fast ones are ahead, and a rollout of num_steps from each still waits
        # for the slowest.
        for step in range(args.num_steps + 1):
            for p, here in enumerate(envs.slices):
                if step > 0:
                    next_obs[here], reward, terminated, truncated, infos = envs.recv(p)
                    next_done[here] = terminated | truncated
                    rewards[step - 1, here] = reward
                    global_step += len(reward)

                    if args.bootstrap_truncated and (cut := truncated & ~terminated).any():
                        # [beyond 1] An episode that a time limit cut off would have gone on. What
                        # that would be worth joins its last reward, since GAE sees an end there
                        # and stops.
                        final_obs = tensor(infos["final_obs"][cut])
                        with torch.inference_mode():
                            bonus = args.gamma * agent.get_value(final_obs)
                        rewards[step - 1, here][cut] += bonus.cpu().numpy()
                    for _, episodic_return, episodic_length in finished_episodes(infos):
                        run["episodes"] += 1
                        run["returns"].append(episodic_return)
                        writer.add_scalar("charts/episodic_return", episodic_return, global_step)
                        writer.add_scalar("charts/episodic_length", episodic_length, global_step)
                if step < args.num_steps:
                    obs[step, here] = tensor(next_obs[here])
                    dones[step, here] = next_done[here]  # 1: obs is the first of an episode
                    with torch.inference_mode():
                        action, logprob, _, value = act(obs[step, here])
                    envs.send(action.cpu().numpy(), p)
                    actions[step, here], logprobs[step, here] = action, logprob
                    values[step, here] = value

        with torch.no_grad():
            next_value = agent.get_value(tensor(next_obs))
        ends = tensor(dones), next_value, tensor(next_done)
        advantages, returns = gae(tensor(rewards), values, *ends, args.gamma, args.gae_lambda)

        rollout = (obs, actions, logprobs, advantages, returns, values)
        batch = [data.flatten(0, 1) for data in rollout]  # (num_steps * num_envs, ...) of each

        stats = []
        for _ in range(args.update_epochs):
            # [core 6] Minibatch updates: each epoch shuffles the batch anew and uses every sample
            # exactly once
            b_inds = torch.randperm(batch_size, device=device)
            for mb_inds in b_inds.split(minibatch_size):
                # data[mb_inds] copies images byte by byte on a CPU, which takes 7 times as long
                minibatch = (data.index_select(0, mb_inds) for data in batch)
                stats.append(update(learning_rate, clip_coef, *minibatch).clone())

            # [aux 3] Early stopping: no further epoch once the last minibatch shows too large a KL
            approx_kl = stats[-1][4]
            if args.target_kl is not None and approx_kl > args.target_kl:
                break

        names = ("value_loss", "policy_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")
        # over all minibatches of the update
        *means, grad_norm = torch.stack(stats).mean(0).tolist()
        if not math.isfinite(grad_norm):  # every weight is spoiled, and is not saved
            raise FloatingPointError(f"the gradient is not finite after step {global_step}")
        metrics = {f"losses/{name}": mean for name, mean in zip(names, means, strict=True)}
        unexplained = (returns - values).var() / returns.var()
        metrics["losses/explained_variance"] = 1.0 - unexplained.item()  # 0 or less: useless
        metrics["charts/learning_rate"] = learning_rate
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
        "ent_coef vf_coef seed eval_episodes num_threads": (0, 10**9),
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
    if args.async_envs and args.num_envs % 2:
        fail("num_envs", f"--async-envs needs two halves, and {args.num_envs} is odd")
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
        if args.env_id not in (ids := envpool.list_all_envs()):
            near = difflib.get_close_matches(args.env_id, ids, cutoff=0.0)
            fail(flag, f"EnvPool has no {args.env_id}; the nearest are {', '.join(near)}")
        env = make_pool(args, 1, args.seed, args.capture_video)
        if problem := wrong_space(env):
            fail(flag, f"{args.env_id}: {problem}")
        if args.capture_video:
            flag = "capture_video"
            import moviepy  # noqa: F401

            env.reset()
            if np.ndim(frame := env.render()[0]) != 3:
                fail(flag, f"{args.env_id} renders no image in color, but {frame!r}")
        if args.track:
            flag = "track"
            import wandb

            if os.environ.get("WANDB_MODE", "online") == "online" and not wandb.login(prompt=False):
                fail(flag, "W&B has no key here: run `wandb login`, or set WANDB_MODE=offline")
        if args.compile:
            flag = "compile"
            torch.compile(torch.sin)(torch.ones(1, device=pick_device(args)))
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
