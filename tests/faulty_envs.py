"""Environments that go wrong after some steps, for `--env-id faulty_envs:NAME`."""

import time
from pathlib import Path

import gymnasium as gym
import numpy as np
from toy_envs import Clock, ContinuousClock, Panel, ToyAtari


class Spoiled:
    """From step `after` on, counted over all episodes, a clock shows or pays a bad number."""

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


class SpoiledClock(Spoiled, Clock):
    pass


class SpoiledContinuousClock(Spoiled, ContinuousClock):
    pass


class Nan:
    """A game that pays what is not a number."""

    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, np.nan, *rest


class NanAtari(Nan, ToyAtari):
    pass


class NanPanel(Nan, Panel):
    pass


gym.register("NanAtari-v0", NanAtari)
gym.register("NanPanel-v0", NanPanel)
BAD = {
    "NanObs-v0": {"obs": np.nan},
    "InfObs-v0": {"obs": np.inf},
    "NanReward-v0": {"reward": np.nan},
    "InfReward-v0": {"reward": np.inf},
}
for env_id, kwargs in BAD.items():
    gym.register(env_id, SpoiledClock, kwargs=kwargs)
    gym.register(f"Continuous{env_id}", SpoiledContinuousClock, kwargs=kwargs)


class NoLevel(Clock):
    """Reads a file that is not there."""

    def step(self, action):
        with open("no-such-level"):
            return super().step(action)


gym.register("NoLevel-v0", NoLevel)


class FuseAtari(ToyAtari):
    """A game that fails once there is a file `fuse`, and hangs once there is a file `hang`."""

    def step(self, action):
        if Path("hang").exists():
            time.sleep(1000)
        if Path("fuse").exists():
            Path("burnt").touch()  # a worker without a free slot comes here late
            raise RuntimeError("the fuse of a rollout worker")
        return super().step(action)


gym.register("FuseAtari-v0", FuseAtari)
