"""What the agent of ppo_atari.py sees, frame by frame, against a second implementation.

`reference` plays on the bare emulator, ale_py.ALEInterface, and follows the rules of
openai/baselines written as one loop: no wrapper, no OpenCV, no Gymnasium.

ale-py's own vector environment keeps the same rules as long as a life lasts, and the last test
compares that stretch. It departs from them, and so from openai/baselines, in this:

- No-ops: 0 to 29 frames, FIRE included; here 1 to 30, and FIRE comes after them.
- FIRE: one frame; here actions 1 and 2 for four frames each, and after every lost life too.
- Lost lives: `episodic_life` starts a new game with each, `life_loss_info` goes on in the next
  frame with a full stack; here a no-op of four frames, FIRE, and an empty stack.
- Gray before the maximum of two frames; here after. Where a sprite moves over a coloured
  background, the maximum of the colours is brighter than both (by 16 levels in Pong). In colour,
  with `grayscale=False`, there is no difference, so that is what the test asks for.
- The first frame of a game is a maximum, too; here it is not, which games without FIRE show.
- Rewards are clipped for good; here info keeps the raw score.
"""

import os
from collections import deque

import ale_py
import gymnasium as gym
import numpy as np
import pytest
from ale_py import roms
from ale_py.vector_env import AtariVectorEnv
from conftest import ROOT, load_script

GAMES = {"Breakout": "breakout", "Pong": "pong", "MsPacman": "ms_pacman"}
NOOP, FIRE, THIRD = 0, 1, 2  # indices into a game's own set of actions


def gray(screen: np.ndarray) -> np.ndarray:
    """0.299 R + 0.587 G + 0.114 B, as OpenCV rounds it: weights of 15 bits in whole numbers."""
    return (screen @ np.array([9798, 19235, 3735]) + 2**14) // 2**15


def warp(screen: np.ndarray) -> np.ndarray:
    """Gray, then 210 x 160 pixels cut into 2 x 21 pieces each, 5 x 40 of which make a new one."""
    rows = gray(screen).repeat(2, axis=0).reshape(84, 5, 160).sum(axis=1)
    pieces = rows.repeat(21, axis=1).reshape(84, 84, 40).sum(axis=2)
    return np.rint(pieces / 200).astype(np.uint8)


def reference(game: str, seed: int):
    """Play one environment: send an action, receive (obs, reward, done, finished game or None).

    finished is (raw score, raw frames), of a game that ended with this action.
    """
    np_seed, ale_seed = np.random.SeedSequence(seed).generate_state(2)
    random = np.random.default_rng(int(np_seed))
    ale = ale_py.ALEInterface()
    ale.setInt("random_seed", int(ale_seed.astype(np.int32)))
    ale.setFloat("repeat_action_probability", 0.0)
    ale.loadROM(roms.get_rom_path(game))
    buttons = ale.getMinimalActionSet()
    has_fire = ale_py.Action.FIRE in buttons
    third, fourth = np.zeros((2, 210, 160, 3), np.uint8)  # the last two screens of four
    score = frames = 0

    def frame(button: int) -> int:
        nonlocal score, frames
        reward = ale.act(buttons[button])
        score, frames = score + reward, frames + 1
        return reward

    def press(button: int) -> int:
        nonlocal third, fourth
        total = frame(button)
        total += 0 if ale.game_over() else frame(button)
        if not ale.game_over():
            total += frame(button)
            third = ale.getScreenRGB()
        if not ale.game_over():
            total += frame(button)
            fourth = ale.getScreenRGB()
        return total

    def new_game() -> np.ndarray:
        nonlocal score, frames
        ale.reset_game()
        score = frames = 0
        for _ in range(random.integers(1, 31)):
            frame(NOOP)
        return ale.getScreenRGB()

    def start_episode(is_new_game: bool, fire: bool) -> np.ndarray:
        if not is_new_game:
            press(NOOP)
            screen = np.maximum(third, fourth)
        if is_new_game or ale.game_over():
            screen = new_game()
        for button in (FIRE, THIRD) if fire else ():
            lives = ale.lives()
            press(button)
            screen = np.maximum(third, fourth)
            if ale.game_over() or 0 < ale.lives() < lives:
                screen = start_episode(ale.game_over(), fire=False)
        return screen

    empty = [np.zeros((84, 84), np.uint8)] * 3
    stack = deque([*empty, warp(start_episode(True, has_fire))], maxlen=4)
    reward, done, finished = 0, False, None
    while True:
        action = yield np.stack(stack), reward, done, finished
        lives = ale.lives()
        reward = np.sign(press(action))
        done = ale.game_over() or 0 < ale.lives() < lives
        finished = (score, frames) if ale.game_over() else None
        stack.append(warp(np.maximum(third, fourth)))
        if done:
            stack.extend([*empty, warp(start_episode(ale.game_over(), has_fire))])


def make_envs(game: str, num_envs: int, seed: int, name: str = "ppo_atari", **changes):
    """Make the environments of ppo_atari.py, or of a file that has them too."""
    script = load_script(name)
    args = script.Args(env_id=f"{game}NoFrameskip-v4", **changes)
    return script, *script.make_envs(args, num_envs, seed)


def assert_same_pixels(ours: np.ndarray, theirs: np.ndarray, step: int) -> int:
    """Rounding may differ by one gray level, where the exact mean lies half-way; count these."""
    difference = np.abs(ours.astype(int) - theirs)
    assert (difference <= 1).all(), f"step {step}: {difference.max()} gray levels"
    return np.count_nonzero(difference)


# games, and how many steps with random actions take them past at least one game over
@pytest.mark.parametrize(
    ("name", "game", "steps"),
    [
        ("ppo_atari", "Breakout", 500),
        ("ppo_atari", "Pong", 1000),
        ("ppo_atari", "MsPacman", 700),
        ("appo_async", "Breakout", 500),
    ],
)
def test_frames_rewards_ends_and_scores(name, game, steps):
    script, envs, obs = make_envs(game, num_envs=2, seed=7, name=name)
    players = [reference(GAMES[game], seed) for seed in (7, 8)]  # environment i has seed + i
    expected = [next(player) for player in players]
    rng = np.random.default_rng(0)
    rounded = episodes = 0
    scores, expected_scores = [], []
    for step in range(steps):
        for i in range(2):
            rounded += assert_same_pixels(obs[i], expected[i][0], step)
        actions = rng.integers(envs.single_action_space.n, size=2)
        obs, rewards, terminated, truncated, infos = envs.step(actions)
        expected = [player.send(action) for player, action in zip(players, actions, strict=True)]
        assert rewards.tolist() == [reward for _, reward, _, _ in expected], step
        assert terminated.tolist() == [done for _, _, done, _ in expected], step
        assert not truncated.any()
        episodes += terminated.sum()
        scores += script.finished_episodes(infos)
        expected_scores += [(i, *game[3]) for i, game in enumerate(expected) if game[3]]
    envs.close()
    assert rounded < 1e-3 * steps * 2 * obs[0].size
    assert scores == expected_scores
    assert {i for i, _, _ in scores} == {0, 1}  # each environment came to the end of a game
    lives = {"Breakout": 5, "Pong": 1, "MsPacman": 3}[game]
    assert episodes >= lives * len(scores)


def test_sync_and_async_agree_bit_for_bit(monkeypatch):
    """The processes play the same games: observations, rewards, ends and scores."""
    monkeypatch.syspath_prepend(str(ROOT))  # where they find ppo_atari
    script, sync, obs = make_envs("Breakout", 4, seed=3)
    monkeypatch.setattr(script, "CORES", 2)
    _, processes, async_obs = make_envs("Breakout", 4, seed=3, vector_mode="async")
    assert isinstance(sync, gym.vector.SyncVectorEnv)
    assert len({process.pid for process in processes.processes} - {os.getpid()}) == 2
    rng, scores = np.random.default_rng(1), []
    for _ in range(300):
        assert np.array_equal(obs, async_obs) and obs.dtype == async_obs.dtype
        actions = rng.integers(4, size=4)
        obs, *outcome, infos = sync.step(actions)
        async_obs, *async_outcome, async_infos = processes.step(actions)
        assert all(map(np.array_equal, outcome, async_outcome))
        scores += script.finished_episodes(infos)
        assert list(script.finished_episodes(async_infos)) == list(script.finished_episodes(infos))
    sync.close()
    processes.close()
    assert scores


def noops(seed: int) -> int:
    """Say how many no-ops an environment with this seed begins with."""
    np_seed, _ = np.random.SeedSequence(seed).generate_state(2)
    return np.random.default_rng(int(np_seed)).integers(1, 31)


@pytest.mark.parametrize("game", GAMES)
def test_agrees_with_ale_vector_env_for_one_life(game):
    """Aligned by a seed whose no-ops are whole steps of four frames, and by playing FIRE there.

    In colour, see above; ours is gray before it is small, theirs after, which rounds otherwise.
    """
    seed = next(seed for seed in range(100) if noops(seed) % 4 == 0)
    _, envs, obs = make_envs(game, num_envs=1, seed=seed)
    reset = {"noop_max": 0, "use_fire_reset": False}
    theirs = AtariVectorEnv(GAMES[game], 1, grayscale=False, num_threads=1, **reset)
    theirs.reset(seed=seed)
    fire = [] if game == "MsPacman" else [FIRE, THIRD]
    for action in [NOOP] * (noops(seed) // 4) + fire:
        their_obs, _, _, _, infos = theirs.step(np.array([action]))
    lives, rng, total = infos["lives"][0], np.random.default_rng(1), 0
    for step in range(200):
        # our stack is empty at the start; without FIRE, our first frame is no maximum of two
        known = min(4, step + bool(fire))
        assert_same_pixels(obs[0, 4 - known :], gray(their_obs[0, 4 - known :]), step)
        actions = rng.integers(envs.single_action_space.n, size=1)
        obs, rewards, terminated, _, _ = envs.step(actions)
        their_obs, their_rewards, _, _, infos = theirs.step(actions)
        assert rewards == their_rewards
        assert terminated == (0 < infos["lives"] < lives)
        total += abs(their_rewards[0])
        if terminated:
            break
    envs.close()
    theirs.close()
    assert step > 50 and total > 0
