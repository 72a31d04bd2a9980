"""The daemon's side of `--restore-head`: run `headrestore`, pass on what it says. Main thread."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from fsd.kernel import tasks
from fsd.kernel.stop import RESTORE_MOST
from fsd.kernel.streams import Gone, Process, start
from fsd.model.errors import InternalError, Unavailable, from_body

if TYPE_CHECKING:
    from fsd.kernel.daemon import Daemon

COMMAND: Final = [sys.executable, "-m", "fsd.kernel.headrestore"]
END_LEAST: Final = 5.0


async def restore_head(daemon: Daemon, session: int) -> bool:
    """Restore, where that is asked for; False when a stop was asked for meanwhile. Raises what the server or
    the local side said."""
    options, told = daemon.options, daemon.start.channel
    if not options.restore_thread or daemon.start.restarts:
        return True
    order = {
        "token": options.token.text(),
        "endpoint": options.endpoint,
        "insecure": options.insecure,
        "thread": options.restore_thread,
        "place": str(daemon.place),
        "remote_path": options.remote_path.decode("utf-8", "surrogateescape"),
        "session": session,
        "control": str(daemon.start.directory.socket_path(options.mount_id)),
        "replace": options.exclusive and not options.restore_if_empty,
        "if_empty": options.restore_if_empty,
    }
    told.say(f"restoring the head of {options.restore_thread!a}")
    answers: list[dict[str, Any]] = []

    async def run(scope: tasks.CancelScope) -> None:
        answers.append(await _answer(json.dumps(order).encode(), daemon))
        scope.cancel()

    async def stopped(scope: tasks.CancelScope, when: Callable[[], Awaitable[object]]) -> None:
        await when()
        scope.cancel()

    daemon.stopper.restoring = over = tasks.Event()
    try:
        async with tasks.open_nursery() as nursery:
            nursery.start_soon(run, nursery.cancel_scope)
            # Nothing may be restored into the directory below a mount that is gone.
            for when in (daemon.stopper.asked.wait, daemon.stopper.wait):
                nursery.start_soon(stopped, nursery.cancel_scope, when)
    finally:
        over.set()
    if not answers:
        told.failed(Unavailable("stopped before the head was restored"))
        return False
    if answers[0].keys().isdisjoint(("ok", "error")):
        raise InternalError("the restore of the thread's head broke", hint="see the log")
    if "ok" not in answers[0]:
        raise from_body(answers[0], 500)
    told.say(_sentence(options.restore_thread, answers[0]["ok"]))
    return True


async def _answer(order: bytes, daemon: Daemon) -> dict[str, Any]:
    """Its last line, empty if there is none; what it says before goes to who waits for the mount."""
    process = await start(COMMAND)
    line: dict[str, Any] = {}
    try:
        with contextlib.suppress(Gone):  # it broke: that is told by what it did not answer
            await process.stdin.send(order)
        process.stdin.close()
        held = b""
        async for piece in process.stdout.pieces():
            *whole, held = (held + piece).split(b"\n")
            for raw in whole:
                line = json.loads(raw)
                if "say" in line:
                    daemon.start.channel.say(line["say"])
        await process.wait()
    finally:
        await _end(process, max(END_LEAST, daemon.options.stop_timeout * RESTORE_MOST))
    return line


async def _end(process: Process, within: float) -> None:
    """One that is cut short takes away what it fetched, or puts the rest of it into its place, file by file;
    what it still says is of no use to anybody, but it must not wait for a reader."""
    with tasks.CancelScope(shield=True):
        if process.running():
            process.terminate()
            with tasks.move_on_after(within):
                async for _ in process.stdout.pieces():
                    pass
                await process.wait()
        process.close()
        with tasks.move_on_after(END_LEAST):  # what it is in the middle of is done first
            await process.wait()


def _sentence(thread: str, done: dict[str, Any]) -> str:
    if "there" in done:
        return f"nothing was restored: {done['there']}"
    if done["checkpoint_id"] is None:
        return f"the thread {thread!a} has no checkpoint yet: nothing was restored"
    return f"restored the checkpoint {done['checkpoint_id']}"
