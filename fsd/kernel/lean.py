"""Loads pyfuse3 without what it would load and never use here: trio, whose place *mini* takes before anything
of it is called, and `importlib.metadata`, which it asks for its own version. Together more than fsd."""

from __future__ import annotations

import sys
from types import ModuleType


class _Unused(ModuleType):
    """Stands for a module while pyfuse3 is loaded."""


def _no_version(name: str) -> str:
    raise LookupError(name)


def _stand_ins() -> dict[str, ModuleType]:
    metadata = _Unused("importlib.metadata")
    metadata.version, metadata.PackageNotFoundError = _no_version, LookupError  # type: ignore[attr-defined]
    found = {"trio": _Unused("trio"), metadata.__name__: metadata}
    return {name: module for name, module in found.items() if name not in sys.modules}


def load_pyfuse3() -> None:
    """Where it is not loaded yet. `session` sets its `trio`."""
    if "pyfuse3" in sys.modules:
        return
    stand_ins = _stand_ins()
    sys.modules.update(stand_ins)
    try:
        import pyfuse3  # noqa: F401
    finally:
        for name in stand_ins:
            del sys.modules[name]
