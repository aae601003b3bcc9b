"""A game that only a memory can win: the LSTM learns it, and the same network without does not."""

import itertools
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import load_script
from memory_envs import Recall

# A game takes about 8 steps, and only its last action counts. The low discount keeps praise and
# blame away from the others: with 0.99 the same takes two to three times as long.
FLAGS = {
    "env_id": "memory_envs:Recall-v0",
    "num_envs": 16,
    "num_steps": 16,
    "learning_rate": 1e-3,
    "gamma": 0.5,
    "total_timesteps": 5120,
    "eval_episodes": 0,
    "device": "cpu",
}


@pytest.fixture
def script() -> ModuleType:
    return load_script("ppo_lstm")


def without_memory(agent: type) -> type:
    """The same agent, but each of its steps starts from a state that is multiplied by 0."""

    class Forgetful(agent):
        def get_hidden(self, x, lstm_state, done):
            return super().get_hidden(x, lstm_state, torch.ones_like(done))

    return Forgetful


def test_the_game_cannot_be_won_without_memory(script):
    args = script.Args(**FLAGS)
    script.check(args)  # plays in ppo_lstm.py as it is
    env = script.make_envs(args, 1, 0)[0].envs[0]
    game = env.unwrapped
    assert isinstance(game, Recall) and env.action_space.n == 2
    games = {}
    for cue, noops in itertools.product((0, 1), range(1, 31)):  # all that is random in a game
        answer = noops // 2 % 2
        draw = {1: cue, 2: noops}
        game.np_random = SimpleNamespace(integers=lambda *bounds, draw=draw: draw[len(bounds)])
        seen, rewards, over = [env.reset()[0]], [], False
        while not over:
            # only what is done at the sight of the question counts
            action = answer if seen[-1].min() == 255 else 1 - answer
            obs, reward, over, *_ = env.step(action)
            seen.append(obs)
            rewards.append(reward)
        games[cue, noops] = seen[:-1], rewards
        assert rewards == [0] * (len(rewards) - 1) + [1 if answer == cue else -1]
        assert 5 <= len(rewards) <= 12

    for noops in range(1, 31):
        # two games with the same answer: which cue it was, only the first observations say
        (left, left_rewards), (right, right_rewards) = games[0, noops], games[1, noops]
        differ = [not np.array_equal(a, b) for a, b in zip(left, right, strict=True)]
        cues = sum(differ)
        assert cues >= 1 and differ == [True] * cues + [False] * (len(differ) - cues)
        assert len(differ) - cues >= 3, "some steps lie between the cue and the answer"
        # the question looks the same in all games, so whatever a policy makes of it alone, it makes
        # of it after both cues: half of its answers are wrong
        assert left[-1].shape == (1, 84, 84) and (left[-1] == 255).all()
        assert left_rewards[-1] + right_rewards[-1] == 0


def agent_made_by_hand(agent: type) -> type:
    """An agent that is told which half is brighter, and whose first LSTM unit adds this up."""

    class HandMade(agent):
        def __init__(self, envs, args):
            super().__init__(envs, args)
            with torch.no_grad():
                for parameter in (*self.lstm.parameters(), *self.actor.parameters()):
                    parameter.zero_()
                for gate in (0, 1, 3):  # input, forget and output gate stay open
                    self.lstm.bias_ih_l0[128 * gate] = 20.0
                self.lstm.weight_ih_l0[128 * 2, 0] = 20.0
                self.actor.weight[:, 0] = torch.tensor([-20.0, 20.0])

        def get_features(self, x):
            left, right = x.float().mean((1, 2)).split(42, -1)
            return torch.nn.functional.pad((right - left).mean(-1, keepdim=True) / 255, (0, 511))

    return HandMade


def test_an_evaluation_has_memory(script, monkeypatch, tmp_path):
    args = script.Args(**FLAGS | {"eval_episodes": 30, "run_dir": str(tmp_path)})
    plain = script.Agent
    envs = script.make_envs(args, 1, 0)[0]
    run = {"agent": agent_made_by_hand(plain)(envs, args).state_dict()}
    monkeypatch.setattr(script, "Agent", agent_made_by_hand(plain))
    assert script.evaluate(args, run) == [1.0] * 30
    monkeypatch.setattr(script, "Agent", without_memory(agent_made_by_hand(plain)))
    assert abs(np.mean(script.evaluate(args, run))) <= 0.5


@pytest.mark.slow
def test_memory_is_learned(script, tmp_path):
    """5,120 steps; seeds 1 to 3 reach a mean of 0.9 over 100 games after 2,200 to 2,600."""
    result = script.train(script.Args(**FLAGS, run_dir=str(tmp_path)))
    assert result["steps"] == 5120
    assert result["return_last100"] >= 0.9
    # and the agent that was saved plays as well
    args = script.parse(["--evaluate", str(tmp_path), "--eval-episodes", "20"])
    assert np.mean(script.evaluate(args, script.load("evaluate", args.evaluate))) >= 0.8


@pytest.mark.slow
def test_nothing_is_learned_without_memory(script, monkeypatch, tmp_path):
    """5,120 steps as well, with the same flags: the state is zero in each of them."""
    monkeypatch.setattr(script, "Agent", without_memory(script.Agent))
    result = script.train(script.Args(**FLAGS, run_dir=str(tmp_path)))
    assert result["steps"] == 5120
    assert abs(result["return_last100"]) <= 0.3
