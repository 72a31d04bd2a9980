"""Loads the extensions in C whose functions stand before libfuse's. Each is built with the package where
libfuse's headers fit; what lacks one says what it goes without."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType


def load(name: str) -> ModuleType | None:
    """The extension `name` of this package; None where it was not built. To be called before pyfuse3 is
    imported, which finds functions of these names first here and then in libfuse."""
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL)
    try:
        return importlib.import_module(f"fsd.kernel.{name}")
    except ImportError:
        return None
    finally:
        sys.setdlopenflags(flags)
