"""Steps per second of Sample Factory 2.1.1's APPO: TASK SECONDS SETTINGS [FLAG ...].

TASK: breakout or doom_basic. Asynchronous, on the CPU, with rollouts of 32 and batches of 256, one
epoch; FLAGs come after these (the number of workers, of environments in each). Its own log says how
many frames it had after how many seconds; the first third is left out, and 4 frames are one agent
step. Runs in an environment of its own, which benchmarks/throughput.py makes.

SETTINGS: own, what its examples choose (observations and returns normalized by running statistics,
GAE, a larger network for Doom), or equal, those of appo_async.py: the Nature-CNN with ReLU, behind
it a GRU for Doom, no running statistics, the same losses, Doom's screen shrunk by averaging. What
stays different either way: GAE in place of V-trace, since 2.1.1's V-trace ends its learner with an
AttributeError as soon as it writes summaries; its Atari wrappers' order (resize, then gray); Doom's
HUD; and that its rollout and policy workers have a lower priority than its learner.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time

MAIN = {
    # ale_py must be imported in every process, whose __main__ is this file
    "breakout": "sf_examples.atari.train_atari",
    "doom_basic": "sf_examples.vizdoom.train_vizdoom",
}
EQUAL = [
    *("--encoder_conv_architecture=convnet_atari", "--nonlinearity=relu"),
    *("--normalize_input=False", "--normalize_returns=False"),
    *("--gae_lambda=0.95", "--ppo_clip_ratio=0.1", "--ppo_clip_value=0.1"),
    *("--exploration_loss=entropy", "--exploration_loss_coeff=0.01", "--value_loss_coeff=0.5"),
    *("--max_grad_norm=0.5", "--learning_rate=0.0005", "--adam_eps=1e-5"),
]
TASKS = {
    "breakout": ["--env=atari_breakout"],
    "doom_basic": ["--env=doom_basic", "--use_rnn=True", "--rnn_type=gru", "--rnn_size=512"],
}
LINE = re.compile(r"Total num frames: (\d+)")


def train(task: str, flags: list[str]) -> None:
    import importlib

    sys.argv = ["train", *flags]
    importlib.import_module(MAIN[task]).main()


def measure(task: str, seconds: float, settings: str, flags: list[str]) -> float:
    """Let it train for so long; agent steps per second between the log's entries."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--train", task, "--algo=APPO", "--device=cpu"]
        command += TASKS[task]
        command += ["--experiment=speed", f"--train_dir={folder}", "--log_to_file=False"]
        command += [
            "--async_rl=True",
            "--serial_mode=False",
            "--decorrelate_envs_on_one_worker=False",
        ]
        command += ["--num_workers=2", "--num_envs_per_worker=4", "--worker_num_splits=2"]
        command += EQUAL if settings == "equal" else []
        command += ["--rollout=32", "--batch_size=256", "--num_batches_per_epoch=1"]
        command += ["--num_epochs=1", "--save_every_sec=100000", *flags]
        env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        env |= {"WANDB_MODE": "disabled", "PEER_SETTINGS": settings}
        process = subprocess.Popen(
            command,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        seen: list[tuple[float, int]] = []
        latest = time.perf_counter() + 300  # a learner that has died leaves the others running
        try:
            for line in process.stdout:
                if match := LINE.search(line):
                    seen.append((time.perf_counter(), int(match[1])))
                if seen and seen[-1][1] > 0 and seen[-1][0] - first_moving(seen) > seconds:
                    break
                if time.perf_counter() > latest and not (seen and seen[-1][1]):
                    break
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    moving = [entry for entry in seen if entry[1] > 0]
    if len(moving) < 4:
        sys.exit("error: Sample Factory did not train")
    timed = moving[len(moving) // 3 :]
    (t0, frames0), (t1, frames1) = timed[0], timed[-1]
    return (frames1 - frames0) / 4 / (t1 - t0)


def first_moving(seen: list[tuple[float, int]]) -> float:
    return next(moment for moment, frames in seen if frames > 0)


if __name__ != "__main__" or sys.argv[1] == "--train":
    # Sample Factory's processes import this file again, and need the games
    import ale_py  # noqa: F401

    if os.environ["PEER_SETTINGS"] == "equal":
        from sample_factory.envs.env_wrappers import ResizeWrapper

        # grayscale, add_channel_dim, area_interpolation
        ResizeWrapper.__init__.__defaults__ = (True, False, True)

if __name__ == "__main__":
    if sys.argv[1] == "--train":
        train(sys.argv[2], sys.argv[3:])
    else:
        print(measure(sys.argv[1], float(sys.argv[2]), sys.argv[3], sys.argv[4:]))
