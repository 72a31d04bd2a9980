"""The daemon's side of `--restore-head`: run `headrestore`, pass on what it says. Trio's thread."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import trio

from fsd.kernel.stop import RESTORE_MOST
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

    async def run(scope: trio.CancelScope) -> None:
        answers.append(await _answer(json.dumps(order).encode(), daemon))
        scope.cancel()

    async def stopped(scope: trio.CancelScope, when: Callable[[], Awaitable[object]]) -> None:
        await when()
        scope.cancel()

    daemon.stopper.restoring = over = trio.Event()
    try:
        async with trio.open_nursery() as nursery:
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
    async with trio.open_nursery() as nursery:
        ending = partial(end, within=max(END_LEAST, daemon.options.stop_timeout * RESTORE_MOST))
        run = partial(trio.run_process, COMMAND, check=False, cwd="/", deliver_cancel=ending)
        process: trio.Process = await nursery.start(partial(run, stdin=order, stdout=subprocess.PIPE))
        assert process.stdout is not None, "it is a pipe"
        held = b""
        line: dict[str, Any] = {}
        async for piece in process.stdout:
            *whole, held = (held + piece).split(b"\n")
            for raw in whole:
                line = json.loads(raw)
                if "say" in line:
                    daemon.start.channel.say(line["say"])
    return line


async def end(process: trio.Process, within: float) -> None:
    """It takes away what it fetched, or puts the rest of it into its place, file by file."""
    process.terminate()
    await trio.sleep(within)
    process.kill()


def _sentence(thread: str, done: dict[str, Any]) -> str:
    if "there" in done:
        return f"nothing was restored: {done['there']}"
    if done["checkpoint_id"] is None:
        return f"the thread {thread!a} has no checkpoint yet: nothing was restored"
    return f"restored the checkpoint {done['checkpoint_id']}"
