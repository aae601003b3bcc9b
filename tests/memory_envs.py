"""An image game that only a memory can win, for `--env-id memory_envs:Recall-v0`."""

from types import SimpleNamespace

import gymnasium as gym
import numpy as np

CUE_FRAMES = 32  # NoopResetEnv plays 1 to 30 of them; what the agent sees first is always the cue
QUESTION_FRAMES = 4  # as many as MaxAndSkipEnv skips: the agent sees the question exactly once
GAME_FRAMES = 48


def screen(left: int, right: int) -> np.ndarray:
    """Two halves, each of one gray."""
    halves = np.repeat(np.array([left, right], np.uint8), 80)
    return np.broadcast_to(halves[None, :, None], (210, 160, 3))


class Recall(gym.Env):
    """One half of the screen is bright, then none is, then both are: which one was it?

    The game lasts 48 frames, whatever the player does. The action in the last one is the answer:
    reward 1 if it is the bright half, 0 for left and 1 for right, and -1 if it is not. The screen
    shows no time and no action, and all but the first frames look the same after either cue.
    """

    observation_space = gym.spaces.Box(0, 255, (210, 160, 3), np.uint8)
    action_space = gym.spaces.Discrete(2)
    cues, blank, question = (screen(255, 0), screen(0, 255)), screen(0, 0), screen(255, 255)

    def __init__(self, render_mode: str | None = None):
        self.render_mode = render_mode
        self.ale = SimpleNamespace(lives=lambda: 1)

    def get_action_meanings(self) -> list[str]:
        return ["LEFT", "RIGHT"]  # without FIRE there is no FireResetEnv

    def render(self) -> np.ndarray:
        if self.frame < CUE_FRAMES:
            return self.cues[self.cue].copy()
        asked = self.frame >= GAME_FRAMES - QUESTION_FRAMES
        return (self.question if asked else self.blank).copy()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cue = int(self.np_random.integers(2))
        self.frame = 0
        return self.render(), {}

    def step(self, action):
        self.frame += 1
        over = self.frame == GAME_FRAMES
        reward = (1.0 if action == self.cue else -1.0) if over else 0.0
        return self.render(), reward, over, False, {}


gym.register("Recall-v0", Recall)
