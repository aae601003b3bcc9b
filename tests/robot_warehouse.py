"""EnvPool's Jumanji tasks, one environment at a time: `--env-id robot_warehouse:NAME`.

EnvPool has batches only, calls actions of several parts a Box, puts the action mask into the
observation, and resets with the step behind the last. Here they are what a script expects: the
action space is a MultiDiscrete, the mask stands in info["action_mask"], an observation is a
picture, and a reset is a reset. Names with Unmasked in them keep the masks to themselves.

In RobotWarehouse and in Cleaner a forbidden choice ends the episode. EnvPool's RobotWarehouse shows
little more than where the robots are, and hardly ever pays: Cleaner is the one to learn.
"""

import envpool
import gymnasium as gym
import numpy as np

# choices of parts of an action that were played since the start of the process
PLAYED = {"allowed": 0, "forbidden": 0}


def draw_views(obs: dict) -> np.ndarray:
    """RobotWarehouse: what each of the 4 robots sees, 66 small numbers, in a quarter of its own."""
    cells = np.zeros((4, 70), dtype=np.uint8)
    cells[:, :66] = np.clip(obs["agents_view"] * 36, 0, 255)
    quarters = np.zeros((4, 42, 42), dtype=np.uint8)
    quarters[:, :, :40] = np.kron(cells.reshape(4, 7, 10), np.ones((1, 6, 4), dtype=np.uint8))
    return np.block([[quarters[0], quarters[1]], [quarters[2], quarters[3]]])


def draw_floor(obs: dict) -> np.ndarray:
    """Cleaner: 10 x 10 tiles, dirty, clean or wall, and a dot for each of the 3 robots."""
    tiles = np.array([100, 200, 0], dtype=np.uint8)[obs["grid"]]
    picture = np.zeros((84, 84), dtype=np.uint8)
    picture[2:82, 2:82] = np.kron(tiles, np.ones((8, 8), dtype=np.uint8))
    for (row, column), level in zip(obs["agents_locations"], (255, 150, 50), strict=True):
        picture[8 * row + 4 : 8 * row + 8, 8 * column + 4 : 8 * column + 8] = level
    return picture


DRAW = {"RobotWarehouse-v0": draw_views, "Cleaner-v0": draw_floor}


class Jumanji(gym.Env):
    """A task of EnvPool's Jumanji. masks: whether info["action_mask"] is given."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    observation_space = gym.spaces.Box(0, 255, (84, 84, 3), np.uint8)

    def __init__(self, task: str, masks: bool = True, render_mode: str | None = None):
        self.task, self.masks, self.render_mode = task, masks, render_mode
        self.pool = envpool.make_gymnasium(task, num_envs=1)
        space = self.pool.action_space
        assert not space.low.any()
        self.action_space = gym.spaces.MultiDiscrete(space.high - space.low + 1)

    def _look(self, obs: dict) -> tuple[np.ndarray, dict]:
        """What the environment shows of its state, and the info that goes with it."""
        obs = {name: value[0] for name, value in obs.items()}
        self.allowed = obs["action_mask"]  # (parts, choices)
        picture = DRAW[self.task](obs)
        self.picture = np.repeat(picture[:, :, None], 3, axis=2)
        return self.picture, {"action_mask": self.allowed.flatten()} if self.masks else {}

    def render(self) -> np.ndarray:
        return self.picture

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:  # EnvPool takes a seed only when it is made
            self.pool = envpool.make_gymnasium(self.task, num_envs=1, seed=seed)
        picture, info = self._look(self.pool.reset()[0])
        while not self.allowed.any(axis=1).all():  # Cleaner walls a robot in now and then
            picture, info = self._look(self.pool.reset()[0])
        return picture, info

    def step(self, action):
        allowed = int(self.allowed[range(len(action)), action].sum())
        PLAYED["allowed"] += allowed
        PLAYED["forbidden"] += len(action) - allowed
        obs, reward, terminated, truncated, _ = self.pool.step(np.array([action], np.int32))
        picture, info = self._look(obs)
        return picture, float(reward[0]), bool(terminated[0]), bool(truncated[0]), info


for task in DRAW:
    gym.register(task, Jumanji, kwargs={"task": task})
    gym.register(task.replace("-", "Unmasked-"), Jumanji, kwargs={"task": task, "masks": False})
