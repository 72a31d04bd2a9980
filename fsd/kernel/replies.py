"""Loads `_replies.c`, which can say in the answer to an open what pyfuse3 cannot. To be imported before it.

Built with the package where libfuse's headers are new enough; without it everything works, with one request
more for each file that is opened for reading.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


def _nothing(asked: bool, /) -> None:
    """The extension is not there."""


def _load() -> Callable[[bool], None]:
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL)  # so that pyfuse3 finds its function first
    try:
        from fsd.kernel._replies import without_flush
    except ImportError:
        return _nothing
    finally:
        sys.setdlopenflags(flags)
    return without_flush


# Call it right before the answer to each open: whether the kernel shall not ask for a flush at its close.
without_flush = _load()
