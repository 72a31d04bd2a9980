"""The control socket: one JSON line asked, progress lines and one answer sent (see control_client.py).

Runs in tasks of the daemon's main thread. The verbs themselves are the daemon's.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from fsd.kernel import tasks
from fsd.kernel.control_client import error_line
from fsd.kernel.streams import Gone, Stream
from fsd.model.errors import FsdError, InternalError, UsageError
from fsd.model.limits import CONTROL_CLIENTS_MAX, CONTROL_REQUEST_MAX

log = logging.getLogger(__name__)

ACCEPT_PAUSE: Final = 0.2

Tell = Callable[[str], Awaitable[None]]
Verb = Callable[[dict[str, Any], Tell], Awaitable[tuple[dict[str, Any], Callable[[], None] | None]]]


def listen(path: Path) -> socket.socket:
    """A listening socket at `path` (0600), however long its directory's name."""
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sock.bind(f"/proc/self/fd/{directory}/{path.name}")
    finally:
        os.close(directory)
    os.chmod(path, 0o600)
    sock.listen(CONTROL_CLIENTS_MAX)
    return sock


class ControlServer:
    """Serves `verbs`: each returns its answer and what to call once that is sent. A verb that raises
    `FsdError` answers it; the daemon lives on whatever happens."""

    def __init__(self, sock: socket.socket, verbs: dict[str, Verb]) -> None:
        self._sock = sock
        self._verbs = verbs
        self._serving = 0
        self._left = tasks.Event()

    async def run(self) -> None:
        self._sock.setblocking(False)
        async with tasks.open_nursery() as nursery:
            while True:
                await tasks.wait_readable(self._sock.fileno())
                try:
                    stream = Stream(self._sock.accept()[0].detach())
                except BlockingIOError:
                    continue
                except OSError as exc:
                    # No descriptors or no memory: who asks waits in the listen queue, and the mount lives on.
                    log.warning("no command can be taken on now: %s", exc)
                    await tasks.sleep(ACCEPT_PAUSE)
                    continue
                while self._serving >= CONTROL_CLIENTS_MAX:
                    self._left = tasks.Event()
                    await self._left.wait()
                self._serving += 1
                nursery.start_soon(self._serve, stream)

    async def _serve(self, stream: Stream) -> None:
        try:
            async with stream:
                await self._answer(stream)
        except Gone as exc:
            log.debug("a command went away: %r", exc)
        except Exception:
            log.exception("the control socket failed")
        finally:
            self._serving -= 1
            self._left.set()

    async def _answer(self, stream: Stream) -> None:
        async def send(value: dict[str, Any]) -> None:
            await stream.send(json.dumps(value).encode() + b"\n")

        async def tell(text: str) -> None:
            await send({"progress": {"text": text}})

        after: Callable[[], None] | None = None
        try:
            with tasks.fail_after(10):
                asked = await _line(stream)
            verb = self._verbs.get(str(asked.get("verb")))
            args = asked.get("args")
            if verb is None or not isinstance(args, dict):
                raise UsageError(f"unknown control verb {asked.get('verb')!r}")
            ok, after = await verb(args, tell)
            answer = {"ok": ok}
        except tasks.TooSlow:
            answer = error_line(UsageError("no request came"))
        except FsdError as exc:
            answer = error_line(exc)
        except Gone:
            raise
        except Exception as exc:
            log.exception("a control verb failed")
            answer = error_line(InternalError(f"the daemon failed: {exc!r}", hint="see its log"))
        try:
            await send(answer)
        finally:
            if after is not None:
                after()


async def _line(stream: Stream) -> dict[str, Any]:
    raw = b""
    while not raw.endswith(b"\n"):
        piece = await stream.receive(4096)
        raw += piece
        if not piece or len(raw) > CONTROL_REQUEST_MAX:
            raise UsageError("a control request is one line of JSON")
    try:
        asked = json.loads(raw)
    except ValueError as exc:
        raise UsageError("a control request is one line of JSON") from exc
    if not isinstance(asked, dict):
        raise UsageError("a control request is an object")
    return asked
