"""The details that envpool_ppo.py leaves to EnvPool: one behavioural test for each, on real games.

Every game is played a second time, frame by frame, by ale-py, whose console goes through the same
memory. So all that EnvPool waits, presses, skips, shows and pays can be told, to the last bit.
"""

import re
from types import SimpleNamespace

import cv2
import envpool
import numpy as np
import pytest
from ale_py import ALEInterface, LoggerMode, roms
from test_details import area_weights, check_rollouts_go_on

NOOP, FIRE = 0, 1
ALEInterface.setLoggerMode(LoggerMode.Error)
envpool_ppo = pytest.mark.parametrize("script", ["envpool_ppo"], indirect=True)


class Console:
    """A game of ale-py: 4 frames for an action, none of them repeated at random."""

    def __init__(self, env_id: str):
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", env_id.removesuffix("-v5")).lower()
        self.ale = ALEInterface()
        self.ale.setFloat("repeat_action_probability", 0.0)
        self.ale.setInt("random_seed", 0)
        self.ale.loadROM(roms.get_rom_path(name))
        self.ale.reset_game()
        self.actions = self.ale.getMinimalActionSet()
        self.score = 0

    def memory(self) -> bytes:
        return self.ale.getRAM().tobytes()

    def starts(self) -> dict[bytes, tuple[int, bool]]:
        """Memory after a number of frames without an action, and FIRE behind them or not."""
        waited, fired, before = {}, {}, self.ale.cloneState()
        for wait in range(40):
            waited.setdefault(self.memory(), (wait, False))
            here = self.ale.cloneState()
            self.ale.act(FIRE)
            fired.setdefault(self.memory(), (wait, True))
            self.ale.restoreState(here)
            self.ale.act(NOOP)
        self.ale.restoreState(before)
        return fired | waited  # FIRE that does nothing is none

    def begin(self, memory: np.ndarray) -> tuple[int, bool]:
        """Go where EnvPool's reset has led: a new game if the old one is over. Say which way."""
        if self.ale.game_over():
            self.ale.reset_game()
            self.score = 0
        starts = self.starts()
        assert memory.tobytes() in starts, "this is not how the game goes on"
        wait, fire = starts[memory.tobytes()]
        for action in [NOOP] * wait + [FIRE] * fire:
            self.ale.act(action)
        self.frames = [self.ale.getScreenGrayscale()] * 2
        return wait, fire

    def play(self, action: int) -> int:
        reward, self.frames = 0, []
        for _ in range(4):
            reward += self.ale.act(self.actions[action])
            self.frames.append(self.ale.getScreenGrayscale())
        self.score += reward
        return reward

    def picture(self) -> np.ndarray:
        """What is to be seen of the last two frames."""
        frame = np.maximum(*self.frames[-2:])
        return cv2.resize(frame, (84, 84), interpolation=cv2.INTER_AREA)


class Watched:
    """A pool that keeps the consoles' memory and all else that nobody hands on."""

    def __init__(self, pool):
        self.pool, self.memories, self.infos = pool, [], []
        self.in_flight = 0

    def __getattr__(self, name):
        return getattr(self.pool, name)

    def reset(self):
        obs, info = self.pool.reset()
        self.keep(info)
        return obs, info

    def send(self, actions, *env_id):
        self.in_flight += len(actions)
        self.pool.send(actions, *env_id)

    def recv(self):
        *results, info = self.pool.recv()
        self.in_flight -= len(results[1])
        self.keep(info)
        return *results, info

    def keep(self, info):
        self.infos.append(info)
        self.memories.append(info["ram"].copy())


def watch_pools(script) -> list[Watched]:
    """Watch all pools that the script makes from now on."""
    pools = []

    def make_gymnasium(*args, **options):
        pools.append(Watched(envpool.make_gymnasium(*args, **options)))
        return pools[-1]

    script.envpool = SimpleNamespace(make_spec=envpool.make_spec, make_gymnasium=make_gymnasium)
    return pools


def make_envs(script, env_id: str, num_envs: int = 1, seed: int = 3, **changes):
    """Make environments as the script does; returns them, what they show, and their pools."""
    pools = watch_pools(script)
    args = script.Args(env_id=env_id, num_threads=1, **changes)
    return *script.make_envs(args, num_envs, seed), pools


def follow(script, env_id: str, steps: int):
    """Play at random, on EnvPool and on a console. Yields (step, console) for each decision.

    start: (frames waited, FIRE pressed) where an episode begins; ended: "life", "game" or None.
    """
    envs, obs, (pool,) = make_envs(script, env_id)
    console, rng = Console(env_id), np.random.default_rng(0)
    assert envs.single_action_space.n == len(console.actions)
    start = console.begin(pool.memories.pop()[0])
    first = {"obs": obs[0], "reward": 0, "paid": 0, "shown": [console.picture()], "scores": []}
    yield SimpleNamespace(**first, terminated=False, ended=None, start=start), console
    lives = console.ale.lives()
    for _ in range(steps):
        action = rng.integers(envs.single_action_space.n)
        obs, reward, terminated, truncated, infos = envs.step(np.array([action]))
        step = SimpleNamespace(obs=obs[0], reward=reward[0], ended=None, start=None)
        step.paid, step.terminated = console.play(action), terminated[0]
        assert not truncated[0]
        assert pool.memories[0].tobytes() == console.memory(), "other actions, or frames"
        step.shown, step.scores = [console.picture()], list(script.finished_episodes(infos))
        left = console.ale.lives()
        if console.ale.game_over() or 0 < left < lives:
            step.ended = "game" if console.ale.game_over() else "life"
            step.final_score = console.score
            step.start = console.begin(pool.memories[-1][0])
            step.shown.append(console.picture())
        lives = console.ale.lives()
        pool.memories.clear()
        yield step, console


@envpool_ppo
def test_core_01_vectorized_architecture_envpool(script, tmp_path):
    check_rollouts_go_on(script, tmp_path)

    # environment i is seeded with seed + i, in one pool and in two
    starts = Console("Breakout-v5").starts()
    expected = [make_envs(script, "Breakout-v5", 1, seed)[2][0].memories[0] for seed in range(3, 7)]
    expected = [starts.get(memory.tobytes()) for (memory,) in expected]
    assert len(set(expected)) == 4
    for async_envs in (False, True):
        _, _, pools = make_envs(script, "Breakout-v5", 4, 3, async_envs=async_envs)
        assert len(pools) == 1 + async_envs
        found = [starts.get(memory.tobytes()) for pool in pools for memory in pool.memories[0]]
        assert found == expected

    # the step that ends an episode starts the next, and its action is played
    ends = 0
    for step, _ in follow(script, "Breakout-v5", 80):  # which compares the memory of every step
        ends += step.ended is not None
    assert ends > 1


@envpool_ppo
def test_atari_01_random_starts_envpool(script):
    # pressing FIRE counts as one of the frames
    for env_id, fire in (("Breakout-v5", True), ("MsPacman-v5", False)):
        starts = Console(env_id).starts()
        envs, _, (pool,) = make_envs(script, env_id, 4)
        for _ in range(60):
            envs.reset()
        found = [starts.get(memory.tobytes()) for memory in np.concatenate(pool.memories)]
        assert set(found) == {(frames - fire, fire) for frames in range(1, 31)}
    # the seed repeats them
    _, _, (again,) = make_envs(script, env_id, 4)
    _, _, (other,) = make_envs(script, env_id, 4, seed=100)
    assert np.array_equal(again.memories[0], pool.memories[0])
    assert not np.array_equal(other.memories[0], pool.memories[0])


@envpool_ppo
def test_atari_02_frame_skip_envpool(script):
    flicker = 0
    for step, console in follow(script, "Breakout-v5", 60):  # which compares the memory
        assert np.array_equal(step.obs[-1], step.shown[-1]), "the maximum of the last two frames"
        flicker += (console.frames[-1] != console.frames[-2]).any()
    assert flicker > 20


@envpool_ppo
def test_atari_03_episodic_life_envpool(script):
    ends, scores = [], []
    for step, _ in follow(script, "Breakout-v5", 450):
        assert step.terminated == (step.ended is not None)
        if step.ended:
            ends.append(step.ended)
        # scores are those of whole games
        final_scores = [step.final_score] if step.ended == "game" else []
        assert [score for _, score, _ in step.scores] == final_scores
        scores += final_scores
    assert ends[:5] == ["life"] * 4 + ["game"] and len(scores) > 1 and scores[0] > 0


@envpool_ppo
def test_atari_04_fire_on_reset_envpool(script):
    starts = [step.start for step, _ in follow(script, "Breakout-v5", 200) if step.start]
    assert len(starts) > 4 and all(fire for _, fire in starts), "behind a lost life, too"
    _, fire = next(follow(script, "MsPacman-v5", 0))[0].start
    assert not fire, "this game has no FIRE"


@envpool_ppo
def test_atari_05_warped_frames_envpool(script):
    for step, console in follow(script, "MsPacman-v5", 20):
        gray = np.round(console.ale.getScreenRGB() @ (0.2989, 0.587, 0.114))
        assert np.abs(console.frames[-1] - gray).max() <= 1
        assert step.obs.shape == (4, 84, 84) and step.obs.dtype == np.uint8
        frame = np.maximum(*console.frames[-2:]).astype(np.float64)
        expected = np.round(area_weights(210, 84) @ frame @ area_weights(160, 84).T)
        difference = np.abs(step.obs[-1] - expected)
        # ties may be rounded either way
        assert difference.max() <= 1 and (difference == 0).mean() > 0.99


@envpool_ppo
def test_atari_06_reward_clipping_envpool(script):
    paid, scores = set(), []
    for env_id, steps in (("Berzerk-v5", 500), ("Skiing-v5", 20)):
        for step, _ in follow(script, env_id, steps):
            assert step.reward == np.sign(step.paid)
            paid.add(step.paid)
            # the score is not clipped
            scores += [(score, step.final_score) for _, score, _ in step.scores]
            if scores and env_id == "Berzerk-v5":
                break
    assert max(paid) > 1 and min(paid) < -1
    ((score, expected),) = scores
    assert score == expected >= 50


@envpool_ppo
def test_atari_07_frame_stack_envpool(script):
    frames, ends = None, set()
    for step, _ in follow(script, "Breakout-v5", 260):
        # the oldest frame goes, the newest comes last; a lost life leaves the others alone
        new_game = frames is None or step.ended == "game"
        frames = [step.shown[-1]] * 4 if new_game else [*frames, *step.shown][-4:]
        ends.add(step.ended)
        assert np.array_equal(step.obs, frames)
    assert ends == {None, "life", "game"}
