"""No post is lost, whenever it comes: also between the two steps of taking the eventfd's count."""

from __future__ import annotations

import os
import threading

import pytest
from support.wait import wait_for

from fsd.kernel import mini


@pytest.mark.parametrize("moment", ["before the read", "after the read"])
def test_a_post_while_the_inbox_is_being_drained(monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    scheduler = mini.Scheduler()
    heard: list[str] = []
    late = threading.Event()
    real = os.eventfd_read
    interrupted: list[bool] = []

    def read(fd: int) -> int:
        first = not interrupted
        interrupted.append(True)
        if first and moment == "before the read":
            scheduler.post(lambda: heard.append("second"))
        count = real(fd)
        if first and moment == "after the read":
            scheduler.post(lambda: heard.append("second"))
        return count

    monkeypatch.setattr(mini.os, "eventfd_read", read)
    waits: list[mini.Wait] = []

    async def main() -> None:
        waits.append(scheduler.make_wait())
        await waits[0]

    thread = threading.Thread(target=scheduler.run, args=(main,), daemon=True)
    thread.start()
    scheduler.post(lambda: heard.append("first"))
    # Only the first drain is interrupted; what is posted after it must be heard like everything before.
    wait_for(lambda: len(heard) == 2, what="both posts to be heard")
    assert sorted(heard) == ["first", "second"]  # the first may itself come after that drain began
    scheduler.post(late.set)
    assert late.wait(60), "a later post was never heard"
    scheduler.post(lambda: waits[0].fire())
    thread.join(60)
    assert not thread.is_alive()
    scheduler.close()
