"""Scripts as processes of their own, without the seconds that their imports take each time.

A server imports once what all scripts import, and forks a child for each command. From there on the
child is what `python SCRIPT` would be: its own process id, session, environment, streams, signals
and exit code, and it ends as Python does. Imports are the one part of a script that is not seen so:
test_script_alone_in_an_empty_folder and the refusals in test_bad_input.py start Python itself.

    python processes.py     # the server: orders come through the socket that is its standard input
"""

import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

# not MuJoCo: how it draws is settled when it is imported
PRELOADED = ("torch", "torch._dynamo", "torch.utils.tensorboard", "gymnasium", "tyro", "cv2")
PRELOADED += ("ale_py", "envpool", "moviepy", "wandb")
ORDER_SIZE = 2**20  # bytes: a command and its environment


@functools.cache
def server() -> socket.socket:
    """Start the server; it ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    subprocess.Popen(
        [sys.executable, __file__],
        cwd=Path(__file__).parent,
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # what has threads should not fork
        stdin=theirs,
        stdout=subprocess.DEVNULL,
    )
    theirs.close()
    return ours


class Forked:
    """A script that runs: what the tests need of subprocess.Popen, whose child it is not."""

    def __init__(self, argv: list, cwd: Path, environ: dict[str, str]):
        order = {"argv": [str(word) for word in argv], "cwd": str(cwd), "environ": environ}
        self.news, news = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pipes = [os.pipe() for _ in ("stdout", "stderr")]
        theirs = [news.fileno(), *(write for _, write in pipes)]
        socket.send_fds(server(), [json.dumps(order).encode()], theirs)
        news.close()
        for _, write in pipes:
            os.close(write)
        self.texts = ["", ""]
        self.readers = [
            threading.Thread(target=self.read, args=(k, pipe), daemon=True)
            for k, (pipe, _) in enumerate(pipes)
        ]
        for reader in self.readers:
            reader.start()
        self.returncode = None
        self.pid = int(self.news.recv(16))

    def read(self, k: int, pipe: int) -> None:
        with open(pipe) as stream:
            self.texts[k] = stream.read()

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.news.settimeout(timeout)
            self.returncode = int(self.news.recv(16))
            self.news.close()
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(BlockingIOError):
            self.wait(0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end; returns all that it and its children have written."""
        self.wait(timeout)
        for reader in self.readers:
            reader.join(timeout)
            assert not reader.is_alive(), "a child keeps the streams open"
        return tuple(self.texts)

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def wait_for_orders() -> list[str]:
    """Serve until the tests end; returns in each child, which has become what was ordered."""
    orders = socket.socket(fileno=0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    while True:
        order, fds, *_ = socket.recv_fds(orders, ORDER_SIZE, 3)
        if not order:
            sys.exit()
        if not os.fork():
            break
        for fd in fds:
            os.close(fd)
    # in between: a parent that tells how its child ends
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    news, out, err = fds
    if pid := os.fork():
        os.close(out)
        os.close(err)
        os.write(news, b"%d" % pid)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(BrokenPipeError):
            os.write(news, b"%d" % code)
        os._exit(0)
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for fd, number in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (err, 2)):
        os.dup2(fd, number)
        os.close(fd)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - the server's was no pipe
    os.close(news)
    orders.detach()
    order = json.loads(order)
    os.environ.clear()
    os.environ.update(order["environ"])
    os.chdir(order["cwd"])
    return order["argv"]


if __name__ == "__main__":
    for module in PRELOADED:
        with contextlib.suppress(ImportError):  # not on every machine
            importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "what has threads should not fork"
    gc.freeze()  # nothing of all this is garbage: a child that looks for some takes seconds
    sys.argv = wait_for_orders()
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [str(Path(sys.argv[0]).absolute().parent), *filter(None, folders)]
    runpy.run_path(sys.argv[0], run_name="__main__")
