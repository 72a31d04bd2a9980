"""An unmount that could not be done, whatever the reason, leaves a daemon that ends with the next one."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fsd.kernel import stop, tasks
from fsd.kernel.stop import Drained, Stopper, Tell, quiet
from fsd.model.errors import Busy
from fsd.vfs.types import Pending

CLEAN = Pending(0, 0, 0, 0.0, b"", "")


class Drains(Stopper):
    """With everything sent."""

    async def drain(self, within: float | None, tell: Tell) -> Drained:
        return Drained(None, CLEAN, CLEAN, 0.0)


@pytest.mark.parametrize("error", [OSError(errno.EAGAIN, "no process"), Busy("in use")])
def test_the_daemon_ends_when_somebody_unmounts_it_later(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no process could be made for fusermount3 it lived on for good, and kept the place locked."""

    def fails(place: object, *, lazy: bool) -> None:
        raise error

    monkeypatch.setattr(stop, "detach", fails)

    async def main() -> int:
        daemon = SimpleNamespace(
            machine=None,
            kernel_gone=tasks.Event(),
            place="/nowhere",
            options=SimpleNamespace(io_timeout=5.0, source="fsd:none:none"),
            update=lambda **changes: None,
        )
        stopper = Drains(cast(Any, daemon))
        with pytest.raises(type(error)):
            await stopper.unmount(5.0, False, quiet)
        async with tasks.open_nursery() as nursery:
            nursery.start_soon(stopper.watch_kernel)
            daemon.kernel_gone.set()
            with tasks.fail_after(60):
                ending = await stopper.wait()
        return ending.code

    assert tasks.run(main) == 0
