"""The client without a mount: direct commands' calls, copies and `run` over HTTP, and the Python library.

`connect` and `connect_async` are the library; docs/python.md. `http` is the transport under all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from fsd.client.aio import AsyncFileSystem, connect_async
    from fsd.client.library import FileSystem, connect

__all__ = ["AsyncFileSystem", "FileSystem", "connect", "connect_async"]

# Loaded when they are first named: a command that needs none of it starts faster.
_WHERE: Final = {
    "AsyncFileSystem": "fsd.client.aio",
    "connect_async": "fsd.client.aio",
    "FileSystem": "fsd.client.library",
    "connect": "fsd.client.library",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_WHERE[name]), name)
