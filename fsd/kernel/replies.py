"""Loads `_replies.c`, which can say in the answer to an open what pyfuse3 cannot. To be imported before it.

Built with the package where libfuse's headers are new enough; without it everything works, with one request
more for each file that is opened for reading.
"""

from __future__ import annotations

from collections.abc import Callable

from fsd.kernel.extensions import load


def _nothing(asked: bool, /) -> None:
    """The extension is not there."""


_extension = load("_replies")
# Call it right before the answer to each open: whether the kernel shall not ask for a flush at its close.
without_flush: Callable[[bool], None] = _extension.without_flush if _extension is not None else _nothing
