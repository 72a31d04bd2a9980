"""Loads `_extra.c`, which has libfuse pass on operations pyfuse3 knows nothing of. To be imported before it.

Built with the package where libfuse's headers fit; without it everything else works, and those operations are
answered as on a filesystem that has none.
"""

from __future__ import annotations

from collections.abc import Callable

from fsd.kernel.extensions import load


def _nothing(callable: Callable[..., object], /) -> None:
    """The extension is not there."""


_extension = load("_extra")
# Call it before a session is made, with what handles those operations: see `further`.
serve: Callable[[Callable[..., object]], None] = _extension.serve if _extension is not None else _nothing
