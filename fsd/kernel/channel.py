"""What a starting daemon tells the command that started it: JSON lines through a pipe.

`{"say": text}`, `{"supervisor": pid}`, then one of `{"ready": {...}}` and `{"error": {...}}`. The reader
leaves after that; later lines meet a closed pipe and are dropped. Imports neither pyfuse3 nor trio.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from fsd.model.errors import FsdError, InternalError, from_body


class Channel:
    """The writing end. Any thread; a line is one write, so lines do not mix."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    @property
    def fd(self) -> int | None:
        return self._fd

    def _send(self, value: dict[str, Any]) -> None:
        if self._fd is None:
            return
        try:
            os.write(self._fd, json.dumps(value).encode() + b"\n")
        except BrokenPipeError:
            self.close()

    def say(self, text: str) -> None:
        self._send({"say": text})

    def supervisor(self, pid: int) -> None:
        self._send({"supervisor": pid})

    def ready(self, answer: dict[str, Any]) -> None:
        self._send({"ready": answer})

    def failed(self, error: FsdError) -> None:
        self._send(error.body(error.request_id or ""))

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def read_until_ready(fd: int, say: Callable[[str], None], started: Callable[[int], None]) -> dict[str, Any]:
    """Read lines until the daemon is ready; returns its answer, raises its error. Closes `fd`."""
    with open(fd, "rb") as lines:
        for raw in lines:
            line = json.loads(raw)
            if "say" in line:
                say(line["say"])
            elif "supervisor" in line:
                started(line["supervisor"])
            elif "ready" in line:
                ready: dict[str, Any] = line["ready"]
                return ready
            else:
                raise from_body(line, 500)
    raise InternalError("the daemon ended before it was mounted, without a word", hint="see its log")
