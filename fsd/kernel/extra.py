"""Loads `_extra.c`, which has libfuse pass on operations pyfuse3 knows nothing of. To be imported before it.

Built with the package where libfuse's headers fit; without it everything else works, and those operations are
answered as on a filesystem that has none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


def _nothing(callable: Callable[..., object], /) -> None:
    """The extension is not there."""


def _load() -> Callable[[Callable[..., object]], None]:
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL)  # so that pyfuse3 finds its functions first
    try:
        from fsd.kernel._extra import serve
    except ImportError:
        return _nothing
    finally:
        sys.setdlopenflags(flags)
    return serve


# Call it before a session is made, with what handles those operations: see `further`.
serve = _load()
