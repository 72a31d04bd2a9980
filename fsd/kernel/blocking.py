"""Calls that block, made from a task of the main thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from fsd.host import threads
from fsd.kernel import tasks
from fsd.model.errors import FsdError

log = logging.getLogger(__name__)
T = TypeVar("T")


async def blocking(call: Callable[[], T], *, abandon: bool = True) -> T:
    """`call()` on a thread; with `abandon` who is cancelled does not wait for its end. Raises what it raises,
    and `Unavailable` where the system has no thread to give: another error would end the mount for a limit
    that is met for a moment."""
    try:
        return await tasks.in_thread(call, abandon=abandon)
    except RuntimeError as exc:
        error = threads.told(exc)
        if error is None:
            raise
        raise error from exc


async def in_passing(call: Callable[[], object], failed: str) -> None:
    """`call()` on a thread, for what the mount does without: where it fails, `failed` is logged."""
    try:
        await blocking(call)
    except FsdError as exc:
        log.warning("%s: %s", failed, exc)
