"""Talking to a mount's daemon over its control socket: one JSON line asked, lines answered.

An answer is `{"progress": {...}}` any number of times, then `{"ok": {...}}` or `{"error": {...}}` (an error
body as on the wire, with `exit`). Imports neither pyfuse3 nor trio.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from fsd.model.errors import FsdError, InternalError, NotFound, Unavailable, from_body
from fsd.model.limits import CONTROL_LINE_MAX

CONNECT_TIMEOUT: Final = 5.0
# How much later than the time a command gave its daemon must have said that it is over.
LATE: Final = 10.0
_PIECE: Final = 1 << 16
_PEER: Final = struct.Struct("3i")  # pid, uid, gid

Progress = Callable[[dict[str, Any]], None]


class NoDaemon(NotFound):
    """Nobody listens on the control socket."""

    code = "no_daemon"


def connect(path: Path) -> socket.socket:
    """A connection to the socket at `path`, however long its name. Raises `NoDaemon`."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(CONNECT_TIMEOUT)
    try:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # sun_path holds 107 bytes; through /proc the directory's length does not count.
            sock.connect(f"/proc/self/fd/{directory}/{path.name}")
        finally:
            os.close(directory)
    except OSError as exc:
        sock.close()
        raise NoDaemon(
            f"no daemon answers at {path}: {exc.strerror or exc}",
            hint="it has ended or is being restarted; `fsd mount` starts it again",
        ) from exc
    return sock


def request(
    path: Path,
    verb: str,
    args: dict[str, Any] | None = None,
    *,
    timeout: float | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Ask the daemon at socket `path`; returns what it answered.

    `timeout` bounds the silence between two lines (the daemon sends progress every second while it works),
    and so does a `timeout` among `args`, by which it has answered. Raises the daemon's error as the class it
    is, `NoDaemon`, `Unavailable` when it is silent, or `InternalError` when it went away meanwhile.
    """
    sock = connect(path)
    within = (args or {}).get("timeout")
    if timeout is not None and within is not None:
        timeout = min(timeout, within + LATE)
    try:
        sock.settimeout(timeout)
        sock.sendall(json.dumps({"verb": verb, "args": args or {}}).encode() + b"\n")
        for raw in _lines(sock, timeout):
            answer = json.loads(raw)
            if "progress" in answer:
                if progress is not None:
                    progress(answer["progress"])
            elif "ok" in answer:
                ok: dict[str, Any] = answer["ok"]
                return ok
            else:
                raise from_body(answer, 500)
        raise InternalError(f"the daemon ended while it answered {verb!r}")
    except TimeoutError as exc:
        raise _silent(sock, f"the daemon did not answer {verb!r} within {timeout:g} s") from exc
    except (OSError, ValueError) as exc:
        raise InternalError(f"the control socket broke while it answered {verb!r}: {exc}") from exc
    finally:
        sock.close()


def _lines(sock: socket.socket, timeout: float | None) -> Iterator[bytes]:
    """What arrives, line by line, until the other side ends. `TimeoutError` after so long a silence."""
    held = bytearray()
    while len(held) <= CONTROL_LINE_MAX:
        line, end, rest = held.partition(b"\n")
        if end:
            held = rest
            yield bytes(line)
            continue
        _await(sock, timeout)
        got = sock.recv(_PIECE)
        if not got:
            return
        held += got
    raise ValueError("a line without an end")


def _await(sock: socket.socket, timeout: float | None) -> None:
    """Until something arrives. Looked at piece by piece: of the time in which this process did not run (a
    paused sandbox, the daemon with it) no more than one counts."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    left = timeout if timeout is not None else float("inf")
    while left > 0:
        piece = min(left, 1.0)
        if poll.poll(piece * 1000):
            return
        left -= piece
    raise TimeoutError


def _silent(sock: socket.socket, text: str) -> Unavailable:
    """Why a daemon says nothing, as far as can be seen from outside."""
    pid, _, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if not pid:  # in a container that does not see it; `kill 0` would be for the caller's own processes
        return Unavailable(text, hint="see its log; its process is not one of this container's")
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        state = b""
    if state in (b"T", b"t"):
        return Unavailable(f"{text}: the process {pid} is stopped", hint=f"`kill -CONT {pid}` lets it go on")
    return Unavailable(text, hint=f"`kill -USR1 {pid}` has it write into its log where it stands")


def error_line(error: FsdError) -> dict[str, Any]:
    """The answer line of `error`."""
    return error.body(error.request_id or "")
