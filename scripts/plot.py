"""Draw the README's pictures from results/curves/ and results/peers/ (needs the `bench` extra)."""

import re

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from record import ROOT, points, read_csv

RESULTS = ROOT / "results"


def thousands(x: float, _) -> str:
    """A number of steps, as an axis shows it."""
    return f"{x / 1e6:g}M" if x >= 1e6 else f"{x / 1000:.0f}k"


def finish(figure, axes, title: str, last_step: int, name: str) -> None:
    axes.set(xlabel="agent steps", ylabel="score of training games", xlim=(0, last_step))
    axes.set_title(title, fontsize=10)
    axes.xaxis.set_major_formatter(thousands)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.92")
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(RESULTS / name)


def curves(script: str, env_id: str, window: int, last_step: int):
    """Yield (row of runs.csv, its points) of all runs of a script in an environment."""
    for run in read_csv(RESULTS / "runs.csv"):
        if (run["script"], run["env_id"]) == (script, env_id):
            rows = read_csv(RESULTS / "curves" / f"{run['run']}.csv")
            yield run, points(rows, window, last_step)


def breakout() -> None:
    """The first steps of the schedule: a colour for each program, a thin line for each seed."""
    figure, axes = plt.subplots(figsize=(7, 3.6), dpi=150)
    window, last_step = 25_000, 500_000
    peers = read_csv(RESULTS / "peers" / "cleanrl_ppo_atari_breakout.csv")
    for seed in sorted({row["seed"] for row in peers}):
        label = "CleanRL ppo_atari.py, 3 seeds (two to 300k)" if seed == "1" else None
        rows = [row for row in peers if row["seed"] == seed]
        axes.plot(*points(rows, window, last_step), color="0.65", linewidth=1, label=label)
    rows = read_csv(RESULTS / "peers" / "sb3_ppo_atari_breakout.csv")
    line = points(rows, window, last_step)
    axes.plot(*line, "--", color="0.3", linewidth=1, label="Stable-Baselines3, 1 seed")
    drawn = {}
    for script, env_id in (("ppo_atari", "BreakoutNoFrameskip-v4"), ("envpool_ppo", "Breakout-v5")):
        for run, line in curves(script, env_id, window, last_step):
            if run["run"].endswith(("__alone", "__xeon")) or int(run["steps"]) > 4 * last_step:
                continue  # of other pictures; the latter's games are in windows that are too wide
            precision = "bf16" if "bf16" in run["run"] else "fp32"
            label = f"{script}.py, {precision}, 2 seeds"
            color = drawn.get(label, f"C{len(drawn)}")
            axes.plot(*line, color=color, label=None if label in drawn else label)
            drawn[label] = color
    axes.set_ylim(0, None)
    title = "BreakoutNoFrameskip-v4: the first 5 % of the 10M-step schedule"
    finish(figure, axes, title, last_step, "breakout.png")


def breakout_whole() -> None:
    """The runs of the whole schedule, or far into it, and where those of others have ended."""
    wide = {"width_ratios": [3, 1], "wspace": 0.05}
    figure, (axes, beside) = plt.subplots(
        1, 2, figsize=(8, 3.2), dpi=150, sharey=True, gridspec_kw=wide
    )
    for script, env_id in (
        ("envpool_ppo", "Breakout-v5"),
        ("appo_async", "BreakoutNoFrameskip-v4"),
        ("ppo_atari", "BreakoutNoFrameskip-v4"),
    ):
        for run, (steps, means) in curves(script, env_id, 100_000, 10**7):
            if int(run["steps"]) > 5 * 10**6 or run["run"].endswith("__long"):
                stopped = ", stopped" * (run["finished"] == "False")
                older = ", older code" * run["run"].endswith("__older")
                label = f"{script}.py, bf16, seed {run['seed']}{stopped}{older}"
                # the last window is not whole
                axes.plot(np.array(steps[:-1]) / 1e6, means[:-1], label=label)
    axes.set(xlabel="agent steps, in millions", ylabel="score of training games")
    axes.set_xlim(0, 10)
    axes.legend(frameon=False, fontsize=7, labelspacing=0.25, loc="lower right")
    ends = [
        row
        for row in read_csv(RESULTS / "published.csv")
        if row["script"] in ("ppo_atari", "envpool_ppo") and row["env_id"].startswith("Breakout")
    ]
    names = []
    for number, row in enumerate(ends):
        mean, std = float(row["mean"]), float(row["std"])
        beside.errorbar(number, mean, yerr=std, color="0.3", fmt="o", ms=3)
        name, *details = row["source"].split(" in ")
        name += " EnvPool" * (row["script"] == "envpool_ppo")
        names.append(", ".join((name, *details)) + " scan" * ("_scan.py" in row["note"]))
    beside.set_xticks(range(len(names)), names, fontsize=6.5, rotation=90)
    beside.set_xlim(-0.7, len(names) - 0.3)
    beside.tick_params(left=False)
    beside.set_title("published, after 10M steps:\nmean ± deviation of seeds", fontsize=7)
    for panel in (axes, beside):
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="0.92")
        panel.set_axisbelow(True)
    beside.spines["left"].set_visible(False)
    axes.set_ylim(0)
    figure.savefig(RESULTS / "breakout_whole.png", bbox_inches="tight")


def asynchronous() -> None:
    """appo_async.py beside ppo_atari.py: the same game against minutes and against steps."""
    runs = {row["run"]: row for row in read_csv(RESULTS / "runs.csv")}
    names = {  # on the Xeon in slow hours and in a better one, and on the EPYC
        "appo_async__1__bf16": "-",
        "appo_async__2__bf16__2.1M": ":",
        "appo_async__2__bf16": "--",
        "ppo_atari__1__bf16__long": "-",
        "ppo_atari__1__bf16__alone": "--",
        "appo_async__1__bf16__lr2.5e-4__again": "-",
    }
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.2), dpi=150, sharey=True)
    for name, line in names.items():
        run = runs[f"BreakoutNoFrameskip-v4__{name}"]
        rows = read_csv(RESULTS / "curves" / f"{run['run']}.csv")
        rows = [row for row in rows if int(row["step"]) <= 2_100_000]
        slow = " --learning-rate 2.5e-4" * ("lr" in name)
        label = f"{run['script']}.py{slow}, {float(run['sps']):,.0f} steps/s"
        color = "C2" if slow else "C0" if run["script"] == "appo_async" else "C1"
        style = {"color": color, "linestyle": line}
        for (column, width, unit), axes in zip(
            (("seconds", 120, 60), ("step", 50_000, 1e6)), panels, strict=True
        ):
            x = [int(float(row[column]) // width) for row in rows]
            games = [int(row["games"]) for row in rows]
            sums = [float(row["return"]) * n for row, n in zip(rows, games, strict=True)]
            played = np.bincount(x, games)
            whole = np.flatnonzero(played)[:-1]  # the last window is not
            means = np.bincount(x, sums)[whole] / played[whole]
            axes.plot((whole + 0.5) * width / unit, means, label=label, **style)
    for axes, label in zip(
        panels, ("minutes of training", "agent steps, in millions"), strict=True
    ):
        axes.set_xlabel(label)
        axes.set(xlim=0, ylim=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.92")
    panels[0].set(xticks=range(0, 41, 10), xlim=(0, 40))
    panels[1].set_xticks([0, 0.5, 1, 1.5, 2])
    panels[0].set_ylabel("score of training games")
    panels[1].legend(frameon=False, fontsize=6.5, loc="upper left")
    title = "BreakoutNoFrameskip-v4, bf16; dotted: a better hour; dashed: another machine"
    figure.suptitle(title, fontsize=10)
    figure.tight_layout(w_pad=2)
    figure.savefig(RESULTS / "async.png")


def pendulum() -> None:
    figure, axes = plt.subplots(figsize=(7, 3), dpi=150)
    labels = {False: "as published: a time limit is an end", True: "--bootstrap-truncated"}
    for run, line in curves("ppo_continuous", "Pendulum-v1", 6_000, 300_000):
        bootstrap = "bootstrap" in run["run"]
        label = labels.pop(bootstrap, None)
        axes.plot(*line, color="C0" if bootstrap else "0.5", linewidth=1.5, label=label)
    title = "Pendulum-v1, ppo_continuous.py, 3 seeds each: every episode ends by a time limit"
    finish(figure, axes, title, 300_000, "pendulum.png")


def health() -> None:
    """A value function that does not see health, trusted (lambda 0.95) and not trusted (1)."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3), dpi=150, sharey=True)
    env_id = "VizdoomHealthGathering-v1"
    (at_random,) = (
        float(row["mean"])
        for row in read_csv(RESULTS / "random.csv")
        if (row["env_id"], row["script"]) == (env_id, "appo_async")
    )
    settings = (  # what stands behind the seed in a run's name, without lambda
        (["bf16", "lr2.5e-4"], "batches of 256, --learning-rate 2.5e-4", 200_000),
        (["bf16", "gru", "batch1024"], "--rnn gru --minibatch-size 1024", 500_000),
    )
    for axes, (flags, title, last_step) in zip(panels, settings, strict=True):
        axes.axhline(at_random, color="0.3", linestyle=":", label="random actions")
        labels = {False: "--gae-lambda 0.95, the default", True: "--gae-lambda 1"}
        for run, line in curves("appo_async", env_id, last_step // 20, last_step):
            found = run["run"].split("__")[3:]
            if [flag for flag in found if flag != "lambda1"] == flags:
                whole = "lambda1" in found
                label = labels.pop(whole, None)
                axes.plot(*line, color="C0" if whole else "0.6", linewidth=1.5, label=label)
        finish(figure, axes, title, last_step, "health.png")
    panels[0].set_ylim(0, 1750)
    panels[1].set_ylabel("")
    panels[1].get_legend().remove()
    figure.suptitle(f"{env_id}, appo_async.py, 3 seeds each", fontsize=10)
    figure.tight_layout()
    figure.savefig(RESULTS / "health.png")


def several_seeds() -> None:
    """A panel for each environment and file that three seeds or more were trained in.

    Without flags but --precision bf16, which changes how numbers are rounded and not what is done.
    """
    groups: dict[tuple[str, str], list[dict]] = {}
    for run in read_csv(RESULTS / "runs.csv"):
        flags = run["run"].split("__")[3:]
        # appo_async.py's are in docs/async.md, where HealthGathering has a picture of its own
        other = run["env_id"].startswith("memory_envs") or run["script"] == "appo_async"
        if flags in ([], ["bf16"]) and not other:
            key = run["env_id"], run["script"] + ".py" + ", bf16" * bool(flags)
            groups.setdefault(key, []).append(run)
    groups = {key: runs for key, runs in groups.items() if len(runs) >= 3}
    random = {
        (r["env_id"], r["script"]): float(r["mean"]) for r in read_csv(RESULTS / "random.csv")
    }
    columns = 3
    figure, panels = plt.subplots(
        -(-len(groups) // columns), columns, figsize=(9, 2.3 * -(-len(groups) // columns)), dpi=150
    )
    for axes in panels.flat[len(groups) :]:
        axes.set_visible(False)
    for ((env_id, name), runs), axes in zip(groups.items(), panels.flat, strict=False):
        last_step = max(int(run["steps"]) for run in runs)
        window = last_step // 40
        lines = []
        for run in runs:
            steps, means = points(read_csv(RESULTS / "curves" / f"{run['run']}.csv"), window, 10**9)
            lines.append(np.interp((np.arange(40) + 0.5) * window, steps, means))
        lines, middle = np.array(lines), (np.arange(40) + 0.5) * window
        # 95 % interval of the mean, by drawing as many seeds with replacement
        draws = np.random.default_rng(0).integers(0, len(lines), (2000, len(lines)))
        low, high = np.percentile(lines[draws].mean(1), [2.5, 97.5], axis=0)
        axes.margins(y=0.1)
        axes.fill_between(middle, low, high, color="C0", alpha=0.25, linewidth=0)
        axes.plot(middle, lines.mean(0), color="C0")
        script = runs[0]["script"]
        if (env_id, script) in random:
            axes.axhline(random[env_id, script], color="0.6", linewidth=0.8, linestyle=":")
        axes.set_title(f"{env_id}\n{name}, {len(runs)} seeds", fontsize=8)
        axes.set_axisbelow(True)
        axes.xaxis.set_major_formatter(thousands)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.92")
    figure.supxlabel("agent steps", fontsize=9)
    figure.supylabel("score of training games", fontsize=9)
    figure.tight_layout()
    figure.savefig(RESULTS / "curves.png")


def scaling() -> None:
    """Steps/s of each kind of vector environment against its size, alone and with a policy."""
    kinds: dict[str, list[dict]] = {}
    for row in read_csv(RESULTS / "scaling.csv"):
        kinds.setdefault(row["kind"], []).append(row)
    figure, panels = plt.subplots(1, 3, figsize=(9, 3.6), dpi=150)
    titles = {"alone": "random actions, steps/s", "with_policy": "with the Nature-CNN, steps/s"}
    titles |= {"memory_mb": "what the environments add in memory, MB"}
    for (column, title), axes in zip(titles.items(), panels, strict=True):
        for color, (kind, rows) in enumerate(kinds.items()):
            threads = max(int(row["threads"]) for row in rows)
            rows = [row for row in rows if int(row["threads"]) == threads]
            numbers = [int(row["num_envs"]) for row in rows]
            values = [float(row[column]) for row in rows]
            axes.plot(numbers, values, ".-", color=f"C{color}", label=kind, linewidth=1)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:.0f}")
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("environments", fontsize=8)
        axes.tick_params(labelsize=7)
        if column == "memory_mb":
            axes.set_yscale("log")
        else:
            axes.set_ylim(0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.92")
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, frameon=False, fontsize=7, ncols=4, loc="lower center")
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    figure.savefig(RESULTS / "scaling.png")


def speed() -> None:
    """How many times as fast as the peer, a bar for each case of the README's table of speeds."""
    names = {"sb3": "Stable-Baselines3", "sample_factory": "Sample Factory, equal settings"}
    rows = [row for row in read_csv(RESULTS / "speed.csv") if row["peer"] in names]
    cases: dict[tuple, dict] = {}
    for row in rows:  # behind the first of a kind come others with more or fewer environments
        cases.setdefault((row["what"], row["task"]), row)
    bars = [*cases.values()]
    figure, axes = plt.subplots(figsize=(9, 0.26 * len(bars) + 0.9), dpi=150)
    for y, row in enumerate(reversed(bars)):
        ratio, low, high = map(float, re.findall(r"[\d.]+", row["ratio"]))
        color = "C0" if row["peer"] == "sb3" else "C1"
        whiskers = [[ratio - low], [high - ratio]]
        axes.barh(y, ratio, 0.7, color=color, xerr=whiskers, ecolor="0.3", label=names[row["peer"]])
    flags = r" --(env-id|num-workers|envs-per-worker|reward-scale) \S+"
    labels = [f"{re.sub(flags, '', row['what'])} · {row['task']}" for row in bars]
    axes.set_yticks(range(len(bars)), labels[::-1], fontsize=7)
    axes.axvline(1, color="0.3", linewidth=0.8)
    axes.set_xlabel(
        "times as fast as the peer; the line: from the slowest round to the fastest", fontsize=8
    )
    axes.tick_params(axis="x", labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    unique = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
    above = {"ncols": 2, "loc": "lower left", "bbox_to_anchor": (0, 1)}
    axes.legend(
        [*unique.values()][::-1], [*unique.keys()][::-1], frameon=False, fontsize=7, **above
    )
    axes.margins(y=0.01)
    figure.tight_layout()
    figure.savefig(RESULTS / "speed.png")


if __name__ == "__main__":
    breakout()
    breakout_whole()
    asynchronous()
    speed()
    scaling()
    several_seeds()
    pendulum()
    health()
