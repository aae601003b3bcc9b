"""Environments that go wrong after some steps, for `--env-id faulty_envs:NAME`."""

import gymnasium as gym
import numpy as np
from toy_envs import Clock, ToyAtari


class Spoiled(Clock):
    """A Clock that from step `after` on, counted over all episodes, shows or pays a bad number."""

    def __init__(
        self,
        obs: float = 1.0,
        reward: float = 1.0,
        after: int = 40,
        render_mode: str | None = None,
    ):
        super().__init__(render_mode=render_mode)
        self.bad_obs, self.bad_reward, self.after, self.steps = obs, reward, after, 0

    def step(self, action):
        self.steps += 1
        obs, reward, *rest = super().step(action)
        if self.steps >= self.after:
            obs, reward = np.full_like(obs, self.bad_obs), self.bad_reward
        return obs, reward, *rest


class NanAtari(ToyAtari):
    """A game that pays what is not a number."""

    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, np.nan, *rest


gym.register("NanAtari-v0", NanAtari)
gym.register("NanObs-v0", Spoiled, kwargs={"obs": np.nan})
gym.register("NanReward-v0", Spoiled, kwargs={"reward": np.nan})
gym.register("InfReward-v0", Spoiled, kwargs={"reward": np.inf})
