"""Draw results/breakout.png from results/curves/ and results/peers/ (needs the `bench` extra)."""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from record import ROOT, read_csv

WINDOW = 25_000  # steps in one point of a line
LAST_STEP = 500_000
RESULTS = ROOT / "results"


def points(rows: list[dict]) -> tuple[list[float], list[float]]:
    """Mean score of the games in each window of steps, against the middle of the window."""
    windows: dict[int, list] = {}
    for row in rows:
        if int(row["step"]) > LAST_STEP:
            continue
        games = int(row.get("games", 1))
        windows.setdefault((int(row["step"]) - 1) // WINDOW, []).append(
            (float(row["return"]), games)
        )
    steps = [(index + 0.5) * WINDOW for index in sorted(windows)]
    means = [
        sum(score * games for score, games in windows[index])
        / sum(games for _, games in windows[index])
        for index in sorted(windows)
    ]
    return steps, means


def main() -> None:
    figure, axes = plt.subplots(figsize=(7, 3.6), dpi=150)
    peers = read_csv(RESULTS / "peers" / "cleanrl_ppo_atari_breakout.csv")
    for seed in sorted({row["seed"] for row in peers}):
        label = "CleanRL ppo_atari.py, 3 seeds" if seed == "1" else None
        rows = [row for row in peers if row["seed"] == seed]
        axes.plot(*points(rows), color="0.65", linewidth=1, label=label)
    for run in read_csv(RESULTS / "runs.csv"):
        if run["script"] == "ppo_atari" and run["env_id"] == "BreakoutNoFrameskip-v4":
            rows = read_csv(RESULTS / "curves" / f"{run['run']}.csv")
            label = f"ppo_atari.py, seed {run['seed']}"
            axes.plot(
                *points(rows), linewidth=2, label=label + (", bf16" if "bf16" in run["run"] else "")
            )
    axes.set(
        xlabel="agent steps", ylabel="score of training games", xlim=(0, LAST_STEP), ylim=(0, None)
    )
    axes.set_title("BreakoutNoFrameskip-v4: the first 5 % of the 10M-step schedule", fontsize=10)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:.0f}k")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.92")
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(RESULTS / "breakout.png")


if __name__ == "__main__":
    main()
