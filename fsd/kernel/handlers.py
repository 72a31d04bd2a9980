"""From a plain function to the coroutine pyfuse3 calls: what is done before, waiting, errors as errnos."""

from __future__ import annotations

import errno
import functools
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from pyfuse3 import FUSEError

from fsd.kernel.requests import take_released
from fsd.model.errors import FsdError
from fsd.vfs.types import Park

log = logging.getLogger(__name__)
R = TypeVar("R")


class Handling(Protocol):
    """Whose functions these are."""

    came_to: tuple[str, Park] | None  # a body's name: the shortcut called it for this request, and it parks

    async def parked(self, body: Callable[..., R], args: tuple[Any, ...], park: Park) -> R: ...
    def were_released(self, handles: Sequence[int]) -> None: ...


def translated(exc: BaseException, what: str) -> FUSEError:
    """The errno `exc` is told with. Unexpected ones are logged with their traceback."""
    if isinstance(exc, FUSEError):
        return exc
    if isinstance(exc, FsdError):
        if exc.errno in (errno.EIO, errno.ENOSPC):
            log.warning("%s: %s: %s", what, errno.errorcode[exc.errno], exc)
        return FUSEError(exc.errno)
    log.error("%s failed unexpectedly; the caller gets EIO", what, exc_info=exc)
    return FUSEError(errno.EIO)


def handler(body: Callable[..., R]) -> Callable[..., Coroutine[Any, Any, R]]:
    """pyfuse3's coroutine around `body`; see the module."""
    what = body.__name__

    @functools.wraps(body)
    async def run(self: Handling, *args: Any) -> R:
        released = take_released()
        if released is not None:
            self.were_released(released)
        came_to, self.came_to = self.came_to, None
        if came_to is not None and came_to[0] == what:
            return await self.parked(body, args, came_to[1])
        try:
            return body(self, *args)
        except Park as exc:
            # Its frames hold what the call had made so far, a megabyte for a read, and this one holds them.
            park = exc.with_traceback(None)
        except Exception as exc:  # noqa: BLE001 - translated, never swallowed
            raise translated(exc, what) from None
        return await self.parked(body, args, park)

    return run


def interrupted() -> FUSEError:
    """What a parked request of a caller that is to end ends with."""
    return FUSEError(errno.EINTR)
