"""Play 100 games at random: what is learned must be above this. Rows go to results/random.csv.

python benchmarks/random_policy.py ppo_atari BreakoutNoFrameskip-v4
python benchmarks/random_policy.py ppo_continuous Hopper-v4

The environments are those of the script, wrappers included, and the score is the raw one that it
reports. Ten environments play ten games each, so that short games do not count more than long ones.
"""

import importlib
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]


def play(script, env_id: str, games: int = 10, num_envs: int = 10) -> list[float]:
    """Scores of `games` games in each of num_envs environments, with uniformly drawn actions."""
    args = script.Args(env_id=env_id)
    envs = script.make_envs(args, num_envs, seed=10**8)[0]
    envs.action_space.seed(1)
    scores: list[list[float]] = [[] for _ in range(num_envs)]
    while any(len(mine) < games for mine in scores):
        infos = envs.step(envs.action_space.sample())[-1]
        for i, score, _ in script.finished_episodes(infos):
            scores[i] += [score] if len(scores[i]) < games else []
    envs.close()
    return sum(scores, [])  # noqa: RUF017


def main() -> None:
    from record import read_csv, write_csv

    if len(sys.argv) != 3:
        sys.exit(__doc__)
    name, env_id = sys.argv[1:]
    scores = play(importlib.import_module(name), env_id)
    mean, half = statistics.mean(scores), 1.96 * statistics.stdev(scores) / len(scores) ** 0.5
    row = {"env_id": env_id, "script": name, "games": len(scores), "mean": round(mean, 3)}
    row |= {"low": round(mean - half, 3), "high": round(mean + half, 3)}
    path = ROOT / "results" / "random.csv"
    rows = [old for old in read_csv(path) if (old["env_id"], old["script"]) != (env_id, name)]
    rows = sorted([*rows, row], key=lambda row: (row["script"], row["env_id"]))
    write_csv(path, rows, list(row))
    print(row)


if __name__ == "__main__":
    main()
