"""Calls that block, made from trio's thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import trio

from fsd.host import threads

T = TypeVar("T")


async def blocking(call: Callable[[], T], *, abandon: bool = True) -> T:
    """`call()` on a thread; with `abandon` who is cancelled does not wait for its end. Raises what it raises,
    and `Unavailable` where the system has no thread to give: an error of trio's own there would end the mount
    for a limit that is met for a moment."""
    try:
        return await trio.to_thread.run_sync(call, abandon_on_cancel=abandon)
    except RuntimeError as exc:
        error = threads.told(exc)
        if error is None:
            raise
        raise error from exc
