"""Wait for a condition instead of for a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# Never set: waiting on it is a pause that is no synchronization, only the pace of asking.
_never = threading.Event()


def wait_for(condition: Callable[[], T], timeout: float = 30.0, what: str = "", every: float = 0.02) -> T:
    """The first true value of `condition()`; raises AssertionError naming `what` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout} s in vain for {what or condition}; last value {value!r}")
        _never.wait(every)
