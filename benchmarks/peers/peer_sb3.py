"""Steps per second of Stable-Baselines3's PPO: peer_sb3.py SCRIPT NUM_ENVS WARM STEPS.

Trains what SCRIPT trains, with its hyperparameters; prints one number. Runs in an environment of
its own, which benchmarks/throughput.py makes.
"""

import sys
import time

import ale_py  # noqa: F401
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize


def main() -> None:
    script, num_envs, warm, steps = sys.argv[1], *map(int, sys.argv[2:])
    atari, continuous = script in ("ppo_atari", "envpool_ppo"), script == "ppo_continuous"
    num_steps, num_minibatches, num_epochs = (2048, 32, 10) if continuous else (128, 4, 4)
    learning_rate, clip = 3e-4 if continuous else 2.5e-4, 0.1 if atari else 0.2
    if atari:
        env = VecFrameStack(make_atari_env("BreakoutNoFrameskip-v4", num_envs, seed=1), 4)
    else:
        torch.set_num_threads(1)  # its best number for networks as small as these
        env = make_vec_env("HalfCheetah-v4" if continuous else "CartPole-v1", num_envs, seed=1)
        env = VecNormalize(env) if continuous else env
    model = PPO(
        "CnnPolicy" if atari else "MlpPolicy",
        env,
        learning_rate=lambda progress: learning_rate * progress,
        n_steps=num_steps,
        batch_size=num_envs * num_steps // num_minibatches,
        n_epochs=num_epochs,
        clip_range=clip,
        clip_range_vf=clip,
        ent_coef=0.0 if continuous else 0.01,
        vf_coef=0.25,  # half of ours: its value loss has no 1/2
        seed=1,
        device="cpu",
    )
    model.learn(warm)
    start = time.perf_counter()
    model.learn(steps)
    print(steps / (time.perf_counter() - start))


if __name__ == "__main__":
    main()
