"""Does walking pay in HealthGathering, and what does GAE say? Rows: results/health_advantages.csv.

python appo_async.py --env-id VizdoomHealthGathering-v1 --total-timesteps 4000000 --seed 1 \
    --learning-rate 2.5e-4 --reward-scale 0.01 --precision bf16 --stop-at 40000 --run-dir runs/RUN
python benchmarks/health.py runs/RUN 1200

Plays so many games with an agent that has just begun to learn, and takes the mean advantage of the
steps in which it pressed MOVE_FORWARD, less that of the others, for several lambdas. With lambda 1
an advantage is what was really paid until the end of the game, less the value of the state, so it
is right on average; with 0.95 it trusts the value function from about 17 steps on, with 0 at once.
The interval comes from drawing games with replacement. Takes three minutes. Rows of the same seed
are replaced.
"""

import importlib
import sys
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]


def play(script, run: dict, games: int, num_envs: int = 16) -> dict[str, np.ndarray]:
    """Rewards, values, dones (of the step before) and forward, (steps, num_envs) each.

    values and dones have one row more, of the observation after the last step.
    """
    args = script.Args(**run["args"] | {"capture_video": False})
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    envs, obs = script.make_envs(args, num_envs, seed=10**6)
    agent = script.Agent(envs, args)
    agent.load_state_dict(run["agent"])
    doom = envs.envs[0].unwrapped
    buttons = [button.name for button in doom.game.get_available_buttons()]
    walks = np.array(doom.button_map)[:, buttons.index("MOVE_FORWARD")] == 1
    state, done, ended = agent.initial_state(num_envs), torch.zeros(num_envs), 0
    kept: dict[str, list] = {name: [] for name in ("rewards", "values", "dones", "forward")}
    while True:
        with torch.inference_mode():
            inputs = torch.as_tensor(obs), state, done
            action, _, _, value, state = agent.get_action_and_value(*inputs)
        kept["values"].append(value.numpy())
        kept["dones"].append(done.numpy())
        if ended >= games:
            break
        obs, reward, terminated, truncated, _ = envs.step(action.numpy())
        kept["rewards"].append(reward)
        kept["forward"].append(walks[action.numpy()])
        done = torch.as_tensor(terminated | truncated).float()
        ended += int(done.sum())
    envs.close()
    return {name: np.array(rows) for name, rows in kept.items()}


def walking(script, steps: dict[str, np.ndarray], gamma: float, gae_lambda: float) -> dict:
    """The advantage of walking over not walking, with its 95 % interval."""
    names = ("rewards", "values", "dones")
    rewards, values, dones = (torch.tensor(steps[name]).float() for name in names)
    advantages, _ = script.compute_vtrace(  # on-policy: GAE
        *(torch.ones_like(rewards), rewards, values[:-1], dones[:-1]),
        *(values[-1], dones[-1], gamma, gae_lambda, 1.0, 1.0),
    )
    # games numbered through all environments; the last of each has no end, and is left out
    number = np.cumsum(steps["dones"], axis=0)
    whole = number[:-1] < number[-1]
    games = (number[:-1] + np.arange(number.shape[1]) * (number.max() + 1))[whole].astype(int)
    sums = [
        np.bincount(games, weights, minlength=games.max() + 1)
        for walk in (steps["forward"][whole], ~steps["forward"][whole])
        for weights in (advantages.numpy()[whole] * walk, walk)
    ]
    sums = np.array(sums)[:, np.unique(games)]  # (4, games)

    def difference(drawn):
        walked, times_walked, stood, times_stood = sums[:, drawn].sum(-1)
        return walked / times_walked - stood / times_stood

    rng, count = np.random.default_rng(0), sums.shape[1]
    draws = [difference(rng.integers(count, size=count)) for _ in range(1000)]
    low, high = np.percentile(draws, (2.5, 97.5))
    row = {"gae_lambda": gae_lambda, "walking": difference(np.arange(count)), "low": low}
    row = {name: f"{x:.4f}".rstrip("0").rstrip(".") for name, x in (row | {"high": high}).items()}
    return row | {"steps": int(whole.sum()), "games": count}


def main() -> None:
    from record import read_csv, write_csv

    if len(sys.argv) != 3:
        sys.exit(__doc__)
    script = importlib.import_module("appo_async")
    run = torch.load(Path(sys.argv[1], "checkpoint.pt"), map_location="cpu", weights_only=True)
    steps = play(script, run, int(sys.argv[2]))
    gamma = run["args"]["gamma"]
    seed = {"seed": run["args"]["seed"]}
    rows = [seed | walking(script, steps, gamma, gae_lambda) for gae_lambda in (0.0, 0.95, 1.0)]
    path = ROOT / "results" / "health_advantages.csv"
    others = [old for old in read_csv(path) if old["seed"] != str(seed["seed"])]
    write_csv(path, sorted(others + rows, key=lambda row: int(row["seed"])), list(rows[0]))
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
