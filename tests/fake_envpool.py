"""A stand-in for the module envpool that plays the tests' own Gymnasium environments, too.

As in EnvPool the step behind an end is the reset, and actions may be sent to some environments
alone. EnvPool's own ids are EnvPool's.
"""

from types import SimpleNamespace

import envpool
import gymnasium as gym
import numpy as np


def list_all_envs() -> list[str]:
    return [*envpool.list_all_envs(), *gym.registry]


def make_spec(env_id: str):
    if env_id in envpool.list_all_envs():
        return envpool.make_spec(env_id)
    return SimpleNamespace(config=SimpleNamespace(_fields=()))


def make_gymnasium(env_id: str, **options):
    if env_id in envpool.list_all_envs():
        return envpool.make_gymnasium(env_id, **options)
    return Pool(env_id, **options)


class Pool:
    def __init__(self, env_id, num_envs, seed, num_threads, render_mode=None):
        self.envs = [gym.make(env_id, render_mode=render_mode) for _ in range(num_envs)]
        self.config, self.seed = {"num_envs": num_envs}, seed
        self.observation_space = self.envs[0].observation_space
        self.action_space = self.envs[0].action_space
        self.over = np.zeros(num_envs, dtype=bool)
        self.sent: list = []

    def reset(self):
        self.over[:] = False
        obs = [env.reset(seed=self.seed + i)[0] for i, env in enumerate(self.envs)]
        return np.stack(obs), {"env_id": np.arange(len(obs), dtype=np.int32)}

    def send(self, actions, env_id=None):
        env_id = np.arange(len(self.envs)) if env_id is None else env_id
        assert len(actions) == len(env_id)
        self.sent.append((np.array(actions), np.array(env_id, dtype=np.int32)))

    def recv(self):
        actions, env_id = self.sent.pop(0)
        results = []
        for action, i in zip(actions, env_id, strict=True):
            if self.over[i]:
                results.append((self.envs[i].reset()[0], 0.0, False, False))
            else:
                results.append(self.envs[i].step(action)[:4])
            self.over[i] = any(results[-1][2:])
        obs, reward, terminated, truncated = map(np.stack, zip(*results, strict=True))
        return obs, reward.astype(np.float32), terminated, truncated, {"env_id": env_id}

    def step(self, actions):
        self.send(actions)
        return self.recv()

    def render(self, env_ids):
        return np.stack([self.envs[i].render() for i in env_ids])
