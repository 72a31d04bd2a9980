"""The three standard streams of the process, also where whoever started it had closed some of them."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress
from typing import IO, Any

from fsd.cli.context import Streams


def streams() -> Streams:
    """The process's streams; call once. Puts `Messages` in the place of `sys.stderr`."""
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr = Messages(sys.stderr)

    def terminal(stream: IO[Any] | None) -> bool:
        return stream is not None and stream.isatty()

    # A stream that was closed before we started is None. Messages nobody reads may be dropped; input that is
    # not there is no empty input: it would replace a file by nothing.
    return Streams(
        stdin=sys.stdin.buffer if sys.stdin is not None else io.BufferedReader(_ClosedInput()),
        stdout=sys.stdout.buffer if sys.stdout is not None else ClosedOutput(),
        stderr=sys.stderr if sys.stderr is not None else io.StringIO(),
        interactive=terminal(sys.stdin) and terminal(sys.stderr),
        stdout_terminal=terminal(sys.stdout),
        stderr_terminal=terminal(sys.stderr),
    )


class Messages(io.TextIOWrapper):
    """Standard error. A message that cannot be written (a log on a full disk, a reader that is gone) must not
    end a mount or a server, nor take the place of the exit code that was meant: 6, say. The newest few KiB
    are written later, where they can be. Nor may a locale that cannot write a name be an error."""

    def __init__(self, stderr: io.TextIOWrapper) -> None:
        super().__init__(stderr.buffer, stderr.encoding, "backslashreplace", line_buffering=True)

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError:
            return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


class _ClosedInput(io.RawIOBase):
    """Standard input that was closed before we started: reading it fails, as read(2) does."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF), "standard input")


class ClosedOutput(io.BytesIO):
    """Standard output that was closed before we started. Who asked for bytes (`cat`) did not get them, and is
    told so; the document of a command that did what it was asked to do is not written at all."""

    def write(self, data: object) -> int:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF), "standard output")
