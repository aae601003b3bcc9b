"""How long does a message take, there and back? python benchmarks/signalling.py [--trips 5000].

Two spawned processes pass a small message to and fro, by

    bell      what appo_async.py does: a counter in shared memory, and a byte in a pipe ("look")
    pipe      multiprocessing.Pipe: a tuple of three numbers is pickled
    queue     multiprocessing.SimpleQueue, the same tuple; it has a lock
    fifo      faster-fifo, what Sample Factory does, the same tuple; left out where not installed

and each way's median and range over several runs are printed, in microseconds per round trip, and
written to results/signalling.csv if all four could be measured. The Bell is a copy of
appo_async.py's, since faster-fifo has an older Python and PyTorch beside it:

    uv run --no-project --python 3.11 --with faster-fifo==1.5.2 benchmarks/signalling.py
"""

import argparse
import csv
import mmap
import multiprocessing
import os
import select
import statistics
import struct
import tempfile
import time
from pathlib import Path

try:
    from faster_fifo import Queue as FastQueue
except ModuleNotFoundError:
    FastQueue = None

CONTEXT = multiprocessing.get_context("spawn")
MESSAGE = (3, 17, 1)


class Bell:
    """As in appo_async.py."""

    def __init__(self):
        self.listener, self.rope = CONTEXT.Pipe(duplex=False)
        os.set_blocking(self.rope.fileno(), False)

    def ring(self):
        os.write(self.rope.fileno(), b"!")

    def wait(self, seconds: float):
        if select.select([self.listener], [], [], seconds)[0]:
            os.read(self.listener.fileno(), 1 << 16)


class Counted:
    """A way to one process: a counter in shared memory (a file's pages), and a Bell."""

    def __init__(self, path: str):
        self.path, self.bell = path, Bell()
        with open(path, "wb") as file:
            file.truncate(8)

    def open(self):
        with open(self.path, "r+b") as file:
            self.memory = mmap.mmap(file.fileno(), 8)
        self.count = 0

    def put(self):
        self.count += 1
        struct.pack_into("q", self.memory, 0, self.count)
        self.bell.ring()

    def get(self):
        self.count += 1
        while struct.unpack_from("q", self.memory)[0] != self.count:
            self.bell.wait(1.0)


class Piped:
    def __init__(self):
        self.listener, self.rope = CONTEXT.Pipe(duplex=False)

    def open(self):
        pass

    def put(self):
        self.rope.send(MESSAGE)

    def get(self):
        assert self.listener.recv() == MESSAGE


class Queued:
    def __init__(self, queue):
        self.queue = queue

    def open(self):
        pass

    def put(self):
        self.queue.put(MESSAGE)

    def get(self):
        assert self.queue.get() == MESSAGE


def answer(there, back, trips: int) -> None:
    there.open()
    back.open()
    for _ in range(trips):
        there.get()
        back.put()


def measure(there, back, trips: int) -> float:
    """Microseconds per round trip, after a tenth of them to get warm."""
    warm = trips // 10
    process = CONTEXT.Process(target=answer, args=(there, back, warm + trips), daemon=True)
    process.start()
    there.open()
    back.open()
    for trip in range(warm + trips):
        if trip == warm:
            start = time.perf_counter()
        there.put()
        back.get()
    seconds = time.perf_counter() - start
    process.join()
    return 1e6 * seconds / trips


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trips", type=int, default=5000)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as tmp:
        numbers = iter(range(10**6))
        ways = {
            "bell": lambda: Counted(f"{tmp}/{next(numbers)}"),
            "pipe": Piped,
            "queue": lambda: Queued(CONTEXT.SimpleQueue()),
        }
        if FastQueue:
            ways["fifo"] = lambda: Queued(FastQueue())
        else:
            print("fifo   faster-fifo is not installed")
        times = {way: [] for way in ways}
        for _ in range(args.runs):  # in turn, so that what else runs is the same for all
            for way, make in ways.items():
                times[way].append(measure(make(), make(), args.trips))
    rows = [["way", "us_per_round_trip", "low", "high", "trips", "runs"]]
    for way, values in times.items():
        low, middle, high = min(values), statistics.median(values), max(values)
        print(f"{way:6} {middle:7.1f} us per round trip ({low:.1f} to {high:.1f})")
        rows.append([way, *(round(us, 1) for us in (middle, low, high)), args.trips, args.runs])
    if FastQueue:
        path = Path(__file__).resolve().parent.parent / "results" / "signalling.csv"
        with open(path, "w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    main()
