"""Commands of fsd by a process that has loaded the program already: to load it takes five times the CPU of
what it does, and the tests run thousands.

Each is a process of its own all the same, forked, with its own streams, environment, working directory and
end. Only those run so that do nothing but speak with a server or a mount, and with `--all` none do.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from fsd.cli import main, start, table  # noqa: F401 (loaded, for those that are forked)
from support.leftovers import MARK

HANDLERS = ("checkpoint", "control", "copy", "cut", "files", "fork", "journal", "mount")
NOT = ("mount", "checkpoint mount")  # what a daemon has loaded it keeps
LOADED = (
    *(f"fsd.cli.do_{name}" for name in HANDLERS),
    *(f"fsd.client.{name}" for name in ("download", "grep", "upload")),
    *(f"fsd.kernel.{name}" for name in ("control_client", "prune", "remains", "runtime", "unmount")),
    "jmespath",
)
VARIABLES = ("FSD_", "TI_", "XDG_", "HOME", "PATH")  # others may mean something to Python as it starts
MOST = 50_000  # bytes: of words and environment, and of input (a pipe takes as many at once)
ROWS = table.load()
_Started = tuple[int, socket.socket, subprocess.Popen[bytes]]
_started: list[_Started] = []
_lock = threading.Lock()
_status = struct.Struct("=q")
enabled = True  # False: with --all


def run(
    argv: Sequence[str | bytes],
    env: Mapping[str, str],
    *,
    stdin: bytes = b"",
    timeout: float = 60,
    cwd: str | os.PathLike[str] | None = None,
    anew: bool = False,
) -> subprocess.CompletedProcess[bytes]:
    """The command, as `subprocess.run` does it; forked where that can be, and not `anew`."""
    words = [os.fsdecode(word) for word in argv]
    if not anew and _possible(words, env, stdin):
        code, out, err = _forked(words, env, stdin, timeout, os.fspath(cwd or os.getcwd()))
        return subprocess.CompletedProcess(["fsd", *words], code, out, err)
    full = [sys.executable, "-m", "fsd", *argv]
    return subprocess.run(
        full, env=env, input=stdin, capture_output=True, timeout=timeout, cwd=cwd, check=False
    )


def _possible(argv: Sequence[str], env: Mapping[str, str], stdin: bytes) -> bool:
    found = ROWS.find(list(argv))
    size = sum(map(len, argv)) + sum(map(len, env.values()))
    return (
        enabled
        and found is not None
        and found[0].handler.partition(":")[0].removeprefix("do_") in HANDLERS
        and found[0].name not in NOT
        and all(name.startswith(VARIABLES) or (name, at) == ("LANG", "C.UTF-8") for name, at in env.items())
        and max(size, len(stdin)) < MOST
    )


def _forked(
    argv: Sequence[str], env: Mapping[str, str], stdin: bytes, timeout: float, cwd: str
) -> tuple[int, bytes, bytes]:
    """The exit code (negative: of a signal), what it wrote to stdout, and to stderr."""
    pipes = [os.pipe() for _ in range(3)]
    (to_read, to_write), (out, out_there), (err, err_there) = pipes
    here, there = socket.socketpair()
    os.write(to_write, stdin)
    os.close(to_write)
    theirs = [to_read, out_there, err_there]
    try:
        order = json.dumps([list(argv), dict(env), cwd]).encode()
        socket.send_fds(_server(), [order], [*theirs, there.fileno()])
    finally:
        there.close()
        for fd in theirs:
            os.close(fd)
    with here, os.fdopen(out, "rb") as one, os.fdopen(err, "rb") as two:
        (pid,) = _status.unpack(here.recv(_status.size))
        deadline = time.monotonic() + timeout
        try:
            written = _read((one.fileno(), two.fileno()), deadline)
            here.settimeout(max(0.01, deadline - time.monotonic()))
            (code,) = _status.unpack(here.recv(_status.size))
        except BaseException as exc:
            # Also where the test is stopped meanwhile: nobody else would end it.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            if isinstance(exc, TimeoutError):
                raise subprocess.TimeoutExpired(["fsd", *argv], timeout) from None
            raise
    return code, *written


def _read(streams: tuple[int, int], deadline: float) -> tuple[bytes, bytes]:
    """Both to their ends. Raises `TimeoutError`."""
    read: dict[int, list[bytes]] = {fd: [] for fd in streams}
    with selectors.DefaultSelector() as selector:
        for fd in streams:
            selector.register(fd, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                some = os.read(key.fd, 1 << 20)
                read[key.fd].append(some)
                if not some:
                    selector.unregister(key.fd)
    return b"".join(read[streams[0]]), b"".join(read[streams[1]])


def _server() -> socket.socket:
    """The way to this process's own, which is started when it is first wanted and ends when we have."""
    with _lock:
        if not _started or _started[0][0] != os.getpid():
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            program = "import sys; sys.path.insert(0, sys.argv[1])\n"
            program += f"from {__name__} import serve; serve(int(sys.argv[2]))"
            tests = os.fspath(Path(__file__).parent.parent)
            process = subprocess.Popen(
                [sys.executable, "-c", program, tests, str(theirs.fileno())],
                # The mark is to be seen of each command, too, whatever environment that is given.
                env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", MARK: os.environ.get(MARK, "")},
                cwd="/",  # a test may be in a mount
                pass_fds=[theirs.fileno()],
                # Pipes, as each command has them: what Python found out about its streams holds for them.
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            theirs.close()
            _started[:] = [(os.getpid(), ours, process)]
        return _started[0][1]


def end() -> None:
    """End this process's own, if it has one. Its commands are not ended: one that is left is to be told."""
    with _lock:
        if _started and _started[0][0] == os.getpid():
            _, ours, process = _started.pop()
            with ours, process:
                process.kill()


def serve(number: int) -> None:
    """The process that has loaded everything: forks for each order, and tells how it ended."""
    for name in LOADED:
        importlib.import_module(name)
    gc.freeze()
    orders = socket.socket(fileno=number)
    running: dict[int, tuple[int, socket.socket]] = {}  # the child's pidfd: its pid, and whom to tell
    poll = select.poll()
    poll.register(orders, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd != orders.fileno():
                poll.unregister(fd)
                pid, told = running.pop(fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with told, suppress(BrokenPipeError):  # who waited for it has given up
                    told.send(_status.pack(code))
                os.close(fd)
                continue
            order, fds, _, _ = socket.recv_fds(orders, 4 * MOST, 4)
            if not order:
                return
            pid = os.fork()
            if pid == 0:
                _become(order, fds)
            told = socket.socket(fileno=fds.pop())
            with suppress(BrokenPipeError):
                told.send(_status.pack(pid))
            for one in fds:
                os.close(one)
            child = os.pidfd_open(pid)
            running[child] = pid, told
            poll.register(child, select.POLLIN)


def _become(order: bytes, fds: list[int]) -> NoReturn:
    """The command, in a process just forked."""
    code = 1
    try:
        argv, env, cwd = json.loads(order)
        for stream in range(3):
            os.dup2(fds[stream], stream)
        os.closerange(3, 1 << 16)  # what this process is told by, and others' ends
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        sys.argv = ["fsd", *argv]
        code = start.main()
        for thread in threading.enumerate():  # as the interpreter does at its end
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else 1
    finally:
        if sys.exc_info()[0] is not None:
            sys.excepthook(*sys.exc_info())
        os._exit(code)
