"""Stacks in the log: on demand, when the FUSE thread hangs, and not when the whole process was stopped."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
from support.tinyplace import Tiny
from support.wait import wait_for

from fsd.kernel import unmount

pytestmark = pytest.mark.kernel


def test_stacks_are_dumped_into_the_log_on_sigusr1(tiny: Tiny) -> None:
    assert tiny.start().returncode == 0
    record = tiny.record()
    os.kill(record.pid, signal.SIGUSR1)
    text = wait_for(
        lambda: t if "Current thread" in (t := Path(record.log).read_text()) else None, 30, "the stacks"
    )
    assert text is not None
    assert "mini.py" in text
    assert "tasks.py" in text
    assert unmount.status(tiny.place, tiny.directory)["state"] == "mounted"


def test_a_hang_of_the_fuse_thread_dumps_all_stacks(tiny: Tiny) -> None:
    assert tiny.start("hang").returncode == 0
    assert not (tiny.place / "hang6000").exists()
    text = Path(tiny.record().log).read_text()
    assert "the FUSE thread has not turned" in text
    assert text.count("all stacks follow") == 1
    assert "tinyvolume.py" in text
    assert unmount.status(tiny.place, tiny.directory)["state"] == "mounted"


def test_a_daemon_that_was_stopped_goes_on_without_a_word(tiny: Tiny) -> None:
    """As when its sandbox was paused: nothing hung, and no stacks are taken from threads that run."""
    assert tiny.start("hang").returncode == 0
    record = tiny.record()
    os.kill(record.pid, signal.SIGSTOP)
    threading.Event().wait(6)  # three times what a thread may stand still for in this test
    os.kill(record.pid, signal.SIGCONT)
    for _ in range(20):
        assert not (tiny.place / "absent").exists()
        threading.Event().wait(0.05)
    assert tiny.record().pid == record.pid
    wait_for(lambda: "silent for" in Path(record.log).read_text(), what="the feed to be missed")
    text = Path(record.log).read_text()
    assert "most recent call first" not in text
    assert "has not turned" not in text
    assert "Traceback" not in text
