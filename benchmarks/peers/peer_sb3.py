"""Stable-Baselines3's PPO with the hyperparameters of one of our scripts.

    peer_sb3.py SCRIPT NUM_ENVS WARM STEPS             # prints its steps per second
    peer_sb3.py SCRIPT NUM_ENVS --curve SEED STEPS     # prints its training returns

The first is what benchmarks/throughput.py starts, in an environment of its own that it makes. The
second trains the first STEPS steps of the script's schedule and prints what is kept in
results/peers: the mean return of the games that ended in each window of 5,000 steps.
"""

import sys
import time
from collections import defaultdict

import ale_py  # noqa: F401
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize

WINDOW = 5_000
# our --total-timesteps; all other scripts play Atari games, for 10M steps
SCHEDULE = {"ppo": 500_000, "ppo_shared": 500_000, "ppo_continuous": 1_000_000}


def make_model(script: str, num_envs: int, seed: int) -> PPO:
    atari, continuous = script not in SCHEDULE, script == "ppo_continuous"
    num_steps, num_minibatches, num_epochs = (2048, 32, 10) if continuous else (128, 4, 4)
    learning_rate, clip = 3e-4 if continuous else 2.5e-4, 0.1 if atari else 0.2
    if atari:
        env = VecFrameStack(make_atari_env("BreakoutNoFrameskip-v4", num_envs, seed=seed), 4)
    else:
        torch.set_num_threads(1)  # its best number for networks as small as these
        env_id = "HalfCheetah-v4" if continuous else "CartPole-v1"
        env = make_vec_env(env_id, num_envs, seed=seed)
        env = VecNormalize(env) if continuous else env
    return PPO(
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
        seed=seed,
        device="cpu",
    )


class Games(BaseCallback):
    """Keeps the raw score of each whole game by window of steps, and ends the training."""

    def __init__(self, steps: int):
        super().__init__()
        self.steps = steps
        self.returns: dict[int, list[float]] = defaultdict(list)

    def _on_step(self) -> bool:
        window = -(-self.num_timesteps // WINDOW) * WINDOW
        for info in self.locals["infos"]:
            if "episode" in info:
                self.returns[window].append(info["episode"]["r"])
        return self.num_timesteps < self.steps


def main() -> None:
    script, num_envs = sys.argv[1], int(sys.argv[2])
    if sys.argv[3] == "--curve":
        seed, steps = map(int, sys.argv[4:])
        games = Games(steps)
        model = make_model(script, num_envs, seed)
        model.learn(SCHEDULE.get(script, 10_000_000), callback=games)
        print("seed,step,return,games")
        for window, returns in sorted(games.returns.items()):
            print(f"{seed},{window},{sum(returns) / len(returns):.3f},{len(returns)}")
        return
    warm, steps = map(int, sys.argv[3:])
    model = make_model(script, num_envs, seed=1)
    model.learn(warm)
    start = time.perf_counter()
    model.learn(steps)
    print(steps / (time.perf_counter() - start))


if __name__ == "__main__":
    main()
