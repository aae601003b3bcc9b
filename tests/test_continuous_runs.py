"""Runs of ppo_continuous.py in MuJoCo itself: quiet, filmed without a screen, normalized alike."""

import ctypes.util
import json
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from conftest import ROOT, environment, load_script, run_script, with_mounts

# two iterations; environments * steps
SIZES = {"num_envs": 2, "num_steps": 32, "total_timesteps": 128}
SIZES |= {"num_minibatches": 4, "update_epochs": 2}
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MUJOCO_GL", raising=False)


def ppo_continuous(*argv: object) -> str:
    """Run the script without a screen; returns what it printed, which is no warning."""
    process = run_script(ROOT / "ppo_continuous.py", *argv, cwd=Path.cwd(), DISPLAY="")
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    assert not list(Path.cwd().rglob("MUJOCO_LOG.TXT"))
    return process.stdout


def train(script, env_id: str, **changes) -> dict:
    """Train in this process, without an evaluation; returns the checkpoint."""
    args = SIZES | {"eval_episodes": 0, "run_dir": "run"} | changes
    script.train(script.Args(env_id=env_id, **args))
    return script.load("resume", args["run_dir"])


def statistics(run: dict) -> list:
    """All that normalizes, one number after the other."""
    values = [value for rms in run["normalizer"].values() for value in rms.values()]
    return torch.cat([torch.as_tensor(value).double().flatten() for value in values]).tolist()


@pytest.mark.parametrize("env_id", ["InvertedPendulum-v4", "HalfCheetah-v4", "HalfCheetah-v5"])
def test_a_short_run(env_id):
    script = load_script("ppo_continuous")
    run = train(script, env_id)
    result = json.loads(Path("run", "result.json").read_text())
    assert (run["global_step"], result["steps"], result["finished"]) == (128, 128, True)
    if env_id.startswith("InvertedPendulum"):  # which falls soon; each step that it stands pays 1
        assert result["episodes"] > 5 and 3 < result["return_last100"] < 30
    else:  # which runs for 1000 steps, whatever happens
        assert result["episodes"] == 0
    assert all(weights.isfinite().all() for weights in run["agent"].values())

    # all observations but the last of an episode have been counted, also behind a resume
    obs, returns = run["normalizer"]["obs"], run["normalizer"]["returns"]
    assert obs["mean"].shape == obs["var"].shape == script.gym.make(env_id).observation_space.shape
    assert np.isfinite(statistics(run)).all() and (obs["var"] > 0).all() and returns["var"] > 0
    assert obs["count"] == pytest.approx(2 * (64 + 1), abs=0.01)
    script.train(script.parse(["--resume", "run", "--total-timesteps", "256"]))
    run = script.load("resume", "run")
    assert run["normalizer"]["obs"]["count"] == pytest.approx(2 * (64 + 1) * 2, abs=0.01)
    assert run["normalizer"]["returns"]["count"] == pytest.approx(2 * 64 * 2, abs=0.01)


def test_evaluation_leaves_the_statistics_alone():
    script = load_script("ppo_continuous")
    run = train(script, "InvertedPendulum-v4")
    before, file = statistics(run), Path("run", "checkpoint.pt").read_bytes()
    args = script.parse(["--evaluate", "run", "--eval-episodes", "3"])
    scores = script.evaluate(args, run)
    assert len(scores) == 3 and min(scores) > 1
    assert statistics(run) == before
    assert Path("run", "checkpoint.pt").read_bytes() == file
    assert script.evaluate(args, run) == scores


def test_half_cheetah_is_quiet():
    out = ppo_continuous("--env-id=HalfCheetah-v4", *FLAGS, "--run-dir=run", "--eval-episodes=1")
    assert "128 of 128 steps | return nan" in out
    assert "over 1 games" in out


@pytest.mark.skipif(not ctypes.util.find_library("EGL"), reason="libEGL is not installed")
def test_video_without_a_screen():
    train(load_script("ppo_continuous"), "InvertedPendulum-v4")
    out = ppo_continuous("--evaluate", "run", "--capture-video", "--eval-episodes", 2)
    assert "over 2 games" in out.splitlines()[-1]
    score = out.splitlines()[-1].split()
    assert score[0] == "score" and float(score[1]) > 1
    (film,) = Path("run", "videos").rglob("*.mp4")
    video, frames = cv2.VideoCapture(str(film)), []
    while (grabbed := video.read())[0]:
        frames.append(grabbed[1])
    assert len(frames) > 3
    assert frames[0].max() > 100 and frames[0].std() > 1  # neither black nor of one colour
    assert any((frame != frames[0]).any() for frame in frames)  # something moves


NO_EGL = """
for library in $(ldconfig -p | grep -o '/.*libEGL.*'); do
    mount --bind /dev/null "$library" || exit
done
ldconfig -X -C libraries 2> /dev/null
mount --bind libraries /etc/ld.so.cache"""


def test_a_film_that_cannot_be_drawn():
    """One line where libEGL is not, as in a small container; without a film it is not missed."""
    train(load_script("ppo_continuous"), "InvertedPendulum-v4")
    script = [*with_mounts(NO_EGL), sys.executable, ROOT / "ppo_continuous.py", "--evaluate", "run"]
    for flag, code, lines in (("--no-capture-video", 0, 0), ("--capture-video", 2, 1)):
        process = subprocess.run(
            [*script, flag, "--eval-episodes", "1"],
            env=environment(DISPLAY=""),
            capture_output=True,
            text=True,
            check=False,
        )
        assert process.returncode == code, process.stderr
        assert len(process.stderr.splitlines()) == lines, process.stderr
    assert process.stderr.startswith("error: --capture-video: an OpenGL platform library has not")
    assert not Path("run", "videos").exists()


@pytest.mark.skipif(not ctypes.util.find_library("EGL"), reason="libEGL is not installed")
@pytest.mark.parametrize("env_id", ["HalfCheetah-v4", "HalfCheetah-v5", "Walker2d-v4"])
def test_camera_follows(env_id, monkeypatch):
    """Who has run 30 meters is in the picture as at the start."""
    monkeypatch.setenv("MUJOCO_GL", "egl")  # as `python ppo_continuous.py` does
    script = load_script("ppo_continuous")
    envs, _ = script.make_envs(script.Args(env_id=env_id, capture_video=True), 1, 0, frozen={})
    env = envs.unwrapped.envs[0].unwrapped
    shares = []
    for meters in (0.0, 30.0):
        env.data.qpos[0] = meters
        script.mujoco.mj_forward(env.model, env.data)
        red, _, blue = env.render().astype(int).transpose(2, 0, 1)
        shares.append((red > blue + 20).mean())  # the body is brown, the floor and the sky are not
    envs.close()
    assert min(shares) > 0.01, shares
