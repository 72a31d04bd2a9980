"""The test clock: a request's own time, only on a server started with `--test-clock`.

`X-Fsd-Test-Now: <epoch ms>` sets what the service takes for now while it serves that request; without the
header it uses the machine's clock. A server without the flag refuses a request that carries the header.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Final

from fsd.host.seam import Host
from fsd.model.errors import UsageError
from fsd.model.plain import replace

HEADER: Final = b"x-fsd-test-now"
_MS_MAX: Final = 6_000_000_000_000  # the year 2160: ns of it, and of what expires later, fit 64 bits
_now: ContextVar[int | None] = ContextVar("fsd_test_now", default=None)


def with_test_clock(host: Host) -> Host:
    """`host` with a wall clock that follows the request's header."""
    real = host.wall_ns

    def wall_ns() -> int:
        fixed = _now.get()
        return real() if fixed is None else fixed

    return replace(host, wall_ns=wall_ns)


def take_header(headers: list[tuple[bytes, bytes]], *, allowed: bool) -> None:
    """Set this request's time from its header; raises `UsageError` for one that is refused."""
    found = [value for name, value in headers if name == HEADER]
    if not found:
        _now.set(None)
        return
    if not allowed:
        raise UsageError("this server has no test clock", hint="start it with --test-clock, in tests only")
    if len(found) > 1 or not found[0].isdigit() or len(found[0]) > 13 or int(found[0]) > _MS_MAX:
        raise UsageError(f"X-Fsd-Test-Now is milliseconds since 1970, at most {_MS_MAX}")
    _now.set(int(found[0]) * 1_000_000)
