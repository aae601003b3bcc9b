"""Airstriker, a shooter for the Sega Genesis: an action has parts of 3, 3 and 14 choices.

    pip install stable-retro==1.0.1
    python ppo_multidiscrete.py --env-id examples.airstriker:Airstriker-v0 --vector-mode async \
        --num-envs 2 --eval-episodes 2

stable-retro brings the game along. It allows one emulator in a process, and --vector-mode async has
a process for each core: neither number may be larger than that of the cores (two here). A run
remembers all three when it is resumed or evaluated.
"""

import os

import gymnasium as gym

os.environ.setdefault("PYGLET_HEADLESS", "1")  # no window, and none is looked for
import stable_retro


def make(render_mode: str | None = None) -> gym.Env:
    parts = {"use_restricted_actions": stable_retro.Actions.MULTI_DISCRETE}
    env = stable_retro.make("Airstriker-Genesis-v0", render_mode=render_mode, **parts)
    env.metadata = env.metadata | {"render_fps": 15}  # 60 frames a second, four to an action
    return gym.wrappers.MaxAndSkipObservation(env, skip=4)


gym.register("Airstriker-v0", make)
