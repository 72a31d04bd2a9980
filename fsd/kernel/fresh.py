"""A daemon that is started again is of one version, whatever was installed meanwhile.

The supervisor has loaded what it needs; each daemon is forked from it and loads the rest. Where fsd was
installed anew in between (pip, `git pull`), that would be a daemon of two versions, which need not even
start. So the child then loads everything again, and is told what the old version was, field by field: what
the new one does not know is left out, what the old one did not have gets its default. Where no file of what
is loaded changed, what is loaded is the new version's too.

Rejected: a new interpreter for each daemon (the token would have to travel to it), and a supervisor that
loads all there is (15 MiB resident now, 33 then; the 150 ms of CPU are the daemon's either way).
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, Final

PACKAGE: Final = __name__.partition(".")[0]

Prints = dict[str, tuple[int, int, int] | None]


def prints() -> Prints:
    """What each loaded module's file is now: inode, mtime in ns, size. None: it is gone."""
    return {path: _print(path) for path in _paths()}


def changed(before: Prints) -> bool:
    """Whether a file of what was loaded then is another one by now."""
    return any(_print(path) != known for path, known in before.items())


def load_anew() -> None:
    """From here on every import of this package is of what is installed now."""
    for name in _names():
        del sys.modules[name]
    importlib.invalidate_caches()


def carried(value: Any) -> Any:
    """`value` as the module that is loaded by now makes it; what is no dataclass of this package stays."""
    from dataclasses import fields, is_dataclass  # seldom, and more than all the rest of this process

    kind = type(value)
    if not is_dataclass(kind) or kind.__module__.partition(".")[0] != PACKAGE:
        return value
    new = getattr(importlib.import_module(kind.__module__), kind.__qualname__)
    known = {field.name for field in fields(new) if field.init}
    told = [field.name for field in fields(kind) if field.name in known]
    return new(**{name: carried(getattr(value, name)) for name in told})


def _names() -> list[str]:
    return [name for name in sys.modules if name == PACKAGE or name.startswith(PACKAGE + ".")]


def _paths() -> list[str]:
    found = (getattr(sys.modules[name], "__file__", None) for name in _names())
    return [path for path in found if path]


def _print(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
