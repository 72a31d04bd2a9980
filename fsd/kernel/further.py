"""Operations that reach us past pyfuse3 (`_extra.c`): each is a task of the loop beside pyfuse3's own.

The handlers are methods of `FsdOperations` like all others, with the same rules. A request is answered once,
whatever becomes of its handler: who is in the kernel for one that is not could not even be killed.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pyfuse3 import FUSEError, Operations

if TYPE_CHECKING:
    from fsd.kernel._extra import Request

log = logging.getLogger(__name__)

# How each is answered that went well, from what its handler returned.
_ANSWERS: Final[dict[str, Callable[[Request, Any], int]]] = {
    "lseek": lambda request, offset: request.found(offset),
    "fallocate": lambda request, _: request.fail(0),
    "copy_file_range": lambda request, count: request.wrote(count),
}
Spawn = Callable[[Callable[[], Coroutine[Any, Any, None]], str], object]


class Further:
    """Requests for `operations`. FUSE thread only."""

    def __init__(self, operations: Operations, spawn: Spawn) -> None:
        """`spawn` runs a coroutine function as a task of the loop, by a name."""
        self._operations = operations
        self._spawn = spawn

    def start(self, name: str, request: Request, *args: int) -> None:
        """Called by the extension, inside of pyfuse3's handling of the request: nothing may wait here."""
        self._spawn(partial(self._serve, name, request, args), name)

    async def _serve(self, name: str, request: Request, args: tuple[int, ...]) -> None:
        # Nothing may get out of here: the loop ends with a task of its own that does.
        try:
            try:
                value = await getattr(self._operations, name)(*args, request)
            except FUSEError as exc:
                self._said(name, request.fail(exc.errno))
            else:
                self._said(name, _ANSWERS[name](request, value))
        except Exception:
            # The request fails with EIO when it is dropped, unless it was answered.
            log.exception("%s failed unexpectedly; the caller gets EIO", name)

    @staticmethod
    def _said(name: str, result: int) -> None:
        # As with pyfuse3: a caller that was killed meanwhile takes no answer.
        if result not in (0, -errno.ENOENT):
            log.error("%s could not be answered: %s", name, errno.errorcode.get(-result, result))
