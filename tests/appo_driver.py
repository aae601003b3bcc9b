"""appo_async.py with a ledger: what was stepped, what was learned from, what was pickled.

    python appo_driver.py ARGUMENTS OF appo_async.py

The environment VizdoomLedger-v0 (no ViZDoom: so called, its rewards and pixels arrive unchanged)
shows who it is and how often it was stepped, and writes that to ledger/ID in shared pages, which
outlive a kill. The learner compares what it gets with that, and appends to the file `learned`. With
a learning rate of 0 every ratio is 1, which says that observations, states, actions and log-
probabilities belong together. After each batch it appends to `filled` how many slots every split
had filled by then. Each policy worker writes the seed of its noise to `noise`, and like the learner
its number of PyTorch's threads to `threads`. With FILL=1 in the environment, all weights of a
version are one number instead, policy workers read them slowly, and none may see two numbers. With
RUNG=1 nobody looks again without having been rung for: a bell that is missing ends the run instead
of making it slow; and the learner pauses once, so that all slots fill. SLOW=rollout makes every
step slow, SLOW=learner every update. Processes write what they pickle, and what they write, to
`sent`. The network is small: races, not numbers, are wanted. A file `fuse` makes the policy workers
fail.
"""

import functools
import mmap
import multiprocessing.connection
import os
import pickle
import select
import signal
import sys
import time
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import appo_async

MARK = np.dtype([("id", "<u8"), ("time", "<u4"), ("action", "u1"), ("first", "u1")])
FILL, RUNG, SLOW = "FILL" in os.environ, "RUNG" in os.environ, os.environ.get("SLOW")
PAGE = np.dtype([("pid", "<u8"), ("time", "<u8"), ("seed", "<u8")])  # of a file in ledger/
LEARNED = np.dtype([("id", "<u8"), ("time", "<u8")])  # a trajectory: whose, and when it began


class Ledger(gym.Env):
    """Every observation has the environment's number and time on it; reward k for the k-th step."""

    observation_space = gym.spaces.Dict(screen=gym.spaces.Box(0, 255, (72, 128, 3), np.uint8))
    action_space = gym.spaces.Discrete(3)

    def __init__(self, render_mode=None):
        self.id, self.time, self.action = int.from_bytes(os.urandom(7), "little"), 0, 0
        self.page, self.seed = None, None

    def _obs(self, first):
        screen = np.zeros((72, 128, 3), np.uint8)
        mark = np.array([(self.id, self.time, self.action, first)], MARK)
        screen[0, : MARK.itemsize, 0] = mark.view(np.uint8)
        return {"screen": screen}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seed = self.seed if seed is None else seed
        return self._obs(True), {}

    def step(self, action):
        if self.page is None:
            Path("ledger").mkdir(exist_ok=True)
            with open(f"ledger/{self.id}", "w+b") as file:
                file.truncate(PAGE.itemsize)
                self.page = np.frombuffer(mmap.mmap(file.fileno(), PAGE.itemsize), PAGE)
            self.page["pid"], self.page["seed"] = os.getpid(), self.seed
        time.sleep(0.01 * (SLOW == "rollout"))
        self.time += 1
        self.page["time"] = self.time
        self.action = action
        return self._obs(False), float(self.time), self.np_random.random() < 0.05, False, {}


gym.register("VizdoomLedger-v0", Ledger)


class SmallAgent(appo_async.Agent):
    used = False

    def __init__(self, envs, args):
        super().__init__(envs, args)
        pixels = nn.Sequential(nn.AvgPool2d(8), nn.Flatten())
        self.network = nn.Sequential(pixels, nn.Linear(3 * 9 * 16, 512), nn.Tanh())

    def get_action_and_value(self, x, hidden, done, action=None):
        if not SmallAgent.used:
            SmallAgent.used = True
            with open("threads", "a") as file:
                print("policy" if action is None else "learner", torch.get_num_threads(), file=file)
            if action is None:
                with open("noise", "a") as file:
                    print(torch.initial_seed(), file=file)
        if action is not None:
            SmallAgent.batch = x.numpy(), done.numpy(), action.numpy()
        elif Path("fuse").exists():
            Path("burnt").touch()
            raise RuntimeError("the fuse of a policy worker")
        elif FILL:
            numbers = torch.cat([x.flatten() for x in self.parameters()])
            assert (numbers == numbers[0]).all(), "half-written weights"
        return super().get_action_and_value(x, hidden, done, action)

    def load_state_dict(self, state):
        for name, tensor in self.state_dict().items():
            time.sleep(0.003 * FILL)
            tensor.copy_(state[name])


appo_async.Agent = SmallAgent
publish = appo_async.Shared.publish


def publish_one_number(self, agent, version):
    for tensor in agent.parameters():
        tensor.data.fill_(1e-3 / (1 + version))
    publish(self, agent, version)


if FILL:
    appo_async.Shared.publish = publish_one_number
compute_vtrace = appo_async.compute_vtrace


def audit(ratios, rewards, *rest):
    """What the learner got is what was stepped, column by column."""
    num_steps, columns = rewards.shape
    x, dones, actions = (
        part.reshape(num_steps + 1, columns, *part.shape[1:]) for part in SmallAgent.batch
    )
    marks = np.ascontiguousarray(x[:, :, 0, 0, : MARK.itemsize]).view(MARK)[..., 0]
    assert (marks["id"] == marks["id"][0]).all()
    assert (marks["time"] == marks["time"][0] + np.arange(num_steps + 1)[:, None]).all()
    assert (rewards.numpy() == marks["time"][1:]).all()
    played = marks["action"][1:] == actions[:-1]  # a reset shows the last action as well
    assert played.all()
    assert (dones == (marks["first"] & (marks["time"] > 0))).all()
    assert FILL or (ratios - 1).abs().max() < 1e-3, ratios
    rows = np.zeros(columns, LEARNED)
    rows["id"], rows["time"] = marks["id"][0], marks["time"][0]
    with open("learned", "ab") as file:
        file.write(rows.tobytes())
    time.sleep(0.1 * (SLOW == "learner") + 0.5 * (RUNG and not Path("filled").exists()))
    with open("filled", "ab") as file:
        file.write(SHARED[0].filled.numpy().tobytes())
    return compute_vtrace(ratios, rewards, *rest)


appo_async.compute_vtrace = audit

wait = appo_async.Bell.wait


def wait_until_rung(self, seconds):
    assert select.select([self.listener], [], [], 60)[0], "nobody rings"
    wait(self, seconds)


if RUNG:
    appo_async.Bell.wait = wait_until_rung


# === What is sent, from when a process has begun its work
BUSY = []


def watch(owner, name, describe):
    plain = getattr(owner, name)

    def watched(*args, **kwargs):
        if BUSY and (what := describe(*args)):
            with open("sent", "a") as file:
                print(os.getpid(), name, what, file=file)
        return plain(*args, **kwargs)

    setattr(owner, name, staticmethod(watched) if isinstance(owner, type) else watched)


def always(*args):
    return "called"


def watch_method(owner, name):
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def watched(self, *args, **kwargs):
        if BUSY:
            with open("sent", "a") as file:
                print(os.getpid(), name, file=file)
        return plain(self, *args, **kwargs)

    setattr(owner, name, watched)


watch(ForkingPickler, "dumps", always)
watch(pickle, "dumps", always)
watch(pickle, "dump", always)
watch(os, "write", lambda fd, data: "" if len(data) == 1 else f"{len(data)} bytes")
watch_method(multiprocessing.connection.Connection, "_send_bytes")
watch_method(multiprocessing.connection.Connection, "_recv_bytes")


def busy(function, during):
    """The function, during or after which nothing may be pickled; or during which it may."""

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        before = BUSY.copy()
        BUSY[:] = ["busy"] if during else []
        try:
            return function(*args, **kwargs)
        finally:
            BUSY[:] = before

    return wrapped


appo_async.run_part = busy(appo_async.run_part, True)
appo_async.save = busy(appo_async.save, False)
appo_async.Team.start = busy(appo_async.Team.start, False)
start_team, SHARED = appo_async.Team.__init__, []


def start_team_first(self, args, shared):
    start_team(self, args, shared)
    SHARED.append(shared)
    BUSY[:] = ["busy"]


appo_async.Team.__init__ = start_team_first

if __name__ == "__main__":
    signal.signal(signal.SIGINT, appo_async.request_stop)
    signal.signal(signal.SIGTERM, appo_async.request_stop)
    args = appo_async.parse()
    try:
        appo_async.train(args)
    except OSError as error:  # as in appo_async.py
        sys.exit(f"error: {error}")
