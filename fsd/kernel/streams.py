"""Streams and child processes for tasks of the daemon's main thread."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final

from fsd.kernel import tasks
from fsd.kernel.blocking import blocking

if TYPE_CHECKING:
    import subprocess

PIECE: Final = 65536


class Gone(Exception):
    """Nobody is at the other end any more."""


class Stream:
    """Bytes from and to `fd`, which is its own: a socket, or an end of a pipe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        os.set_blocking(fd, False)

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Also a second time."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    async def receive(self, most: int = PIECE) -> bytes:
        """What is there, at least a byte; nothing at the end. Raises `Gone`."""
        while True:
            try:
                return os.read(self._fd, most)
            except BlockingIOError:
                await tasks.wait_readable(self._fd)
            except OSError as exc:
                raise Gone(str(exc)) from exc

    async def pieces(self) -> AsyncIterator[bytes]:
        """All of it."""
        while piece := await self.receive():
            yield piece

    async def send(self, data: bytes) -> None:
        """Raises `Gone`."""
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._fd, left) :]
            except BlockingIOError:
                await tasks.wait_writable(self._fd)
            except OSError as exc:
                raise Gone(str(exc)) from exc


class Process:
    """A child that reads `stdin` and writes `stdout`."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        self._child = child
        self.pid = child.pid
        with child.stdin, child.stdout:
            # Descriptors of their own: what subprocess made of the others may go when it likes.
            self.stdin = Stream(os.dup(child.stdin.fileno()))
            try:
                self.stdout = Stream(os.dup(child.stdout.fileno()))
            except OSError:
                self.stdin.close()
                raise

    def running(self) -> bool:
        return self._child.poll() is None

    def terminate(self) -> None:
        self._child.terminate()

    async def wait(self) -> int:
        """Its status, once it has ended."""
        if not self.running():  # its number may be another's by now
            return self._child.wait()
        try:
            ended = os.pidfd_open(self.pid)
        except OSError:  # before Linux 5.3
            return await blocking(self._child.wait)
        try:
            await tasks.wait_readable(ended)
        finally:
            os.close(ended)
        return self._child.wait()

    def close(self) -> None:
        """End it, if it has not ended yet."""
        if self.running():
            self._child.kill()
        self.stdin.close()
        self.stdout.close()


async def start(command: Sequence[str | Path]) -> Process:
    """Run it, in the root directory. Raises what `Popen` raises; nothing runs then."""
    import subprocess  # where a mount restores

    pipe = subprocess.PIPE

    def begun() -> Process:
        child = subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd="/")
        try:
            return Process(child)
        except OSError:  # no descriptor is left
            child.kill()
            child.wait()
            raise

    return await blocking(begun, abandon=False)
