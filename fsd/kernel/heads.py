"""The daemon's side of `--restore-head`: run `headrestore`, have its work shown. Trio's thread."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Final

import trio

from fsd.model.errors import InternalError, Unavailable, from_body

if TYPE_CHECKING:
    from fsd.kernel.daemon import Daemon

SHOWN_WITHIN: Final = 30.0  # the change feed tells of the server's own commit
PACE: Final = 0.02


async def restore_head(daemon: Daemon, session: int) -> str:
    """Restore; a sentence for people. Raises what the server or the local side said."""
    options = daemon.options
    order = {
        "token": options.token.text(),
        "endpoint": options.endpoint,
        "insecure": options.insecure,
        "thread": options.restore_thread,
        "place": str(daemon.place),
        "remote_path": options.remote_path.decode("utf-8", "surrogateescape"),
        "session": session,
        "replace": options.exclusive,
    }
    daemon.start.channel.say(f"restoring the head of {options.restore_thread!a}")
    done = await trio.run_process(
        [sys.executable, "-m", "fsd.kernel.headrestore"],
        stdin=json.dumps(order).encode(),
        capture_stdout=True,
        check=False,
        cwd="/",
    )
    try:
        answer = json.loads(done.stdout)
    except ValueError as exc:
        raise InternalError("the restore of the thread's head broke", hint="see the log") from exc
    if "ok" not in answer:
        raise from_body(answer, 500)
    found = answer["ok"]
    if found["checkpoint_id"] is None:
        return f"the thread {options.restore_thread!a} has no checkpoint yet: nothing was restored"
    await _show(daemon, found["fs_seq"])
    return f"restored the checkpoint {found['checkpoint_id']}"


async def _show(daemon: Daemon, seq: int | None) -> None:
    machine = daemon.machine
    assert machine is not None
    end = trio.current_time() + SHOWN_WITHIN
    while seq is not None and machine.volume.feed_seq < seq:
        if trio.current_time() > end:
            raise Unavailable(f"the mount does not show commit {seq} of the restore")
        await trio.sleep(PACE)
