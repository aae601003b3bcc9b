"""Is EnvPool's Breakout the same game in every version? Prints one line of what it returns.

Eight games with the same seed and the same random actions, lost lives end episodes and rewards are
clipped, as in CleanRL's EnvPool script. `observations` and `rest` are the beginning of a SHA-256 of
all pixels, and of rewards, ends, lives and raw rewards. Versions before 1.0 need a Python of their
own, each:

    python3.9 -m venv old && old/bin/pip install envpool==0.6.6 "gym==0.23.1" "numpy<1.24"
    old/bin/python benchmarks/peers/envpool_versions.py >> results/envpool_versions.csv
"""

import hashlib

import envpool
import numpy as np

STEPS, GAMES = 2000, 8

api = "gymnasium" if int(envpool.__version__.split(".")[0]) >= 1 else "gym"
envs = envpool.make(
    "Breakout-v5", env_type=api, num_envs=GAMES, episodic_life=True, reward_clip=True, seed=1
)
first = envs.reset()
observations = hashlib.sha256((first[0] if isinstance(first, tuple) else first).tobytes())
rest, games, score = hashlib.sha256(), 0, 0.0
rng = np.random.default_rng(0)
for _ in range(STEPS):
    obs, reward, *ends, info = envs.step(rng.integers(0, 4, GAMES))
    done = np.logical_or.reduce(ends)
    observations.update(obs.tobytes())
    for array in (reward, done, info["lives"], info["reward"]):
        rest.update(np.asarray(array, dtype=np.float64).tobytes())
    games += int((done & (info["lives"] == 0)).sum())
    score += float(np.sum(info["reward"]))
hashes = (observations.hexdigest()[:12], rest.hexdigest()[:12])
print(envpool.__version__, STEPS * GAMES, games, score, *hashes, sep=",")
