"""Small deterministic environments, for `--env-id toy_envs:NAME`."""

import time

import gymnasium as gym
import numpy as np


class Clock(gym.Env):
    """Episodes of exactly `length` steps; observation (time, 1); reward 1 for action 0, else 0.

    end: "terminated" or "truncated", how the last step ends the episode.
    """

    observation_space = gym.spaces.Box(0.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length: int = 8, end: str = "terminated", render_mode: str | None = None):
        self.length, self.end, self.render_mode = length, end, render_mode

    def _obs(self):
        return np.array([self.time / self.length, 1.0], dtype=np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self._obs(), {}

    def step(self, action):
        self.time += 1
        done = self.time == self.length
        terminated, truncated = done and self.end == "terminated", done and self.end == "truncated"
        return self._obs(), float(action == 0), terminated, truncated, {}


class SlowClock(Clock):
    """A Clock whose steps take 2 ms each, on any machine."""

    def step(self, action):
        time.sleep(0.002)
        return super().step(action)


class ImageClock(Clock):
    """A Clock whose time is seen in four gray pictures, as EnvPool shows a game."""

    observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)

    def _obs(self):
        return np.full((4, 84, 84), 30 * self.time, np.uint8)


class ContinuousClock(Clock):
    """A Clock whose actions are numbers from -1 to 1: reward `pay` where the first is above 0.

    blind: the time is never seen, all observations are 0.
    """

    def __init__(
        self,
        length: int = 8,
        end: str = "terminated",
        shape: tuple = (2,),
        dtype: str = "float32",
        pay: float = 1.0,
        blind: bool = False,
        render_mode: str | None = None,
    ):
        super().__init__(length, end, render_mode)
        self.observation_space = gym.spaces.Box(0.0, 1.0, (2,), np.dtype(dtype).type)
        self.action_space = gym.spaces.Box(-1.0, 1.0, shape, np.float32)
        self.pay, self.blind = pay, blind

    def _obs(self):
        return (super()._obs() * (not self.blind)).astype(self.observation_space.dtype)

    def step(self, action):
        assert action.shape == self.action_space.shape
        assert not (np.abs(action) > 1).any()  # clipped; not a number is what it is
        obs, _, *rest = super().step(0)
        return obs, self.pay * (action.flat[0] > 0), *rest


class Panel(gym.Env):
    """A screen and a row of switches: reward 1 for each switch that is not at 0; 8 steps.

    choices: of each switch; binary: as a MultiBinary; in_dict: the screen comes in a dictionary.
    masked: choice 0 is forbidden in every odd step, and taking it an error; only then is there an
    action mask.
    """

    def __init__(
        self,
        choices: tuple = (2, 3),
        binary: bool = False,
        in_dict: bool = False,
        masked: bool = False,
        render_mode: str | None = None,
    ):
        screen = gym.spaces.Box(0, 255, (60, 80, 3), np.uint8)
        self.observation_space = gym.spaces.Dict(screen=screen) if in_dict else screen
        spaces = gym.spaces
        self.action_space = spaces.MultiBinary(3) if binary else spaces.MultiDiscrete(choices)
        self.choices, self.masked, self.in_dict = choices, masked, in_dict

    def _obs(self):
        screen = np.full((60, 80, 3), 30 * self.time, np.uint8)
        return {"screen": screen} if self.in_dict else screen

    def _info(self):
        allowed = [choice > 0 for n in self.choices for choice in range(n)]
        return {"action_mask": np.array(allowed)} if self.masked and self.time % 2 else {}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self._obs(), self._info()

    def step(self, action):
        assert action in self.action_space
        if self.masked and self.time % 2 and not np.all(action):
            raise ValueError(f"{action} is forbidden in step {self.time}")
        self.time += 1
        reward = float(np.count_nonzero(action))
        return self._obs(), reward, self.time == 8, False, self._info()


class OneState(gym.Env):
    """Nothing but reward 1, for ever; a time limit cuts episodes after 10 steps."""

    observation_space = gym.spaces.Box(1.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.ones(1, np.float32), {}

    def step(self, action):
        return np.ones(1, np.float32), 1.0, False, False, {}


class FakeAle:
    """The one question that the wrappers ask the emulator."""

    def __init__(self, env):
        self.env = env

    def lives(self) -> int:
        return self.env.lives


class ToyAtari(gym.Env):
    """An Atari game in miniature: RGB frames that count themselves, scripted lives and rewards.

    Every frame shows (frames played in this game) % 256 in all pixels and earns reward 2; a life is
    lost every `frames_per_life` frames; the game is over with the last of `start_lives` lives.
    """

    observation_space = gym.spaces.Box(0, 255, (210, 160, 3), np.uint8)
    action_space = gym.spaces.Discrete(4)

    def __init__(
        self, frames_per_life: int = 40, start_lives: int = 3, render_mode: str | None = None
    ):
        self.frames_per_life, self.start_lives = frames_per_life, start_lives
        self.render_mode = render_mode
        self.ale = FakeAle(self)
        self.actions: list[int] = []  # all actions of this game, frame by frame
        self.games = 0

    def get_action_meanings(self) -> list[str]:
        return ["NOOP", "FIRE", "RIGHT", "LEFT"]

    def _obs(self):
        return np.full((210, 160, 3), len(self.actions) % 256, dtype=np.uint8)

    def render(self):
        return self._obs()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.actions, self.lives = [], self.start_lives
        self.games += 1
        return self._obs(), {}

    def step(self, action):
        self.actions.append(int(action))
        if len(self.actions) % self.frames_per_life == 0:
            self.lives -= 1
        return self._obs(), 2.0, self.lives <= 0, False, {}


gym.register("Clock-v0", Clock)
gym.register("SlowClock-v0", SlowClock)
gym.register("ClockTruncated-v0", Clock, kwargs={"end": "truncated"})
gym.register("ImageClock-v0", ImageClock)
gym.register("ContinuousClock-v0", ContinuousClock)
gym.register("BlindClock-v0", ContinuousClock, kwargs={"blind": True})
gym.register("OneState-v0", OneState, max_episode_steps=10)
gym.register("Panel-v0", Panel)
gym.register("PanelMasked-v0", Panel, kwargs={"masked": True})
gym.register("ToyAtari-v0", ToyAtari)
