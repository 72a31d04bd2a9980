"""Parts of the kernel layer that need no mount: notifier, machine, mount table, log, stop routes."""

from __future__ import annotations

import logging
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.clock import MadeUp
from support.tinyvolume import TinyVolume

from fsd.host.seam import Host
from fsd.kernel import entries, feed, fresh, runtime, sender, supervisor, tasks
from fsd.kernel.logfile import WINDOW, Redacting, Throttle
from fsd.kernel.machine import GRACE, PAUSED, Machine
from fsd.kernel.mini import Scheduler
from fsd.kernel.mountpoint import parse_mountinfo
from fsd.kernel.notify import AGAIN_AFTER, RECENT, Notifier
from fsd.kernel.options import mount_id
from fsd.kernel.stop import Drained, Stopper, quiet
from fsd.model.errors import HistoryChanged, NotFound, Unavailable
from fsd.model.limits import ABSENT_MAX, LOG_REPEATS_MAX, MIB, PARKED_MAX
from fsd.vfs.asking import AskJob
from fsd.vfs.commit import CommitJob
from fsd.vfs.log import SyncJob
from fsd.vfs.types import Invalidation, Want


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_machine(clock: Clock, io_timeout: float = 5.0) -> Machine:
    host = replace(Host(), monotonic=clock)
    return Machine(cast(Any, TinyVolume()), cast(Any, None), cast(Any, None), Scheduler(), host, io_timeout)


class TestBroken:
    @pytest.mark.parametrize(
        ("job", "error", "broke"),
        [
            (CommitJob(cast(Any, None)), KeyError("x"), True),
            (SyncJob(frozenset(), (), Path(), Host()), AssertionError(), True),
            (CommitJob(cast(Any, None)), OSError("the disk"), False),
            (AskJob(()), KeyError("x"), False),
        ],
    )
    def test_what_may_be_half_changed_is_left(self, job: Any, error: Exception, broke: bool) -> None:
        machine, told = make_machine(Clock()), list[BaseException]()
        machine.broke = told.append

        def finish(job: object, result: object) -> None:
            raise error

        cast(Any, machine.volume).finish = finish
        with pytest.raises(type(error)):
            machine._finish(job, None)
        assert told == [error] * broke


class TestSender:
    def test_a_name_to_ask_about_again_is_not_given_up(self) -> None:
        """The flag is in the message's last word before the name (`struct fuse_notify_inval_entry_out`)."""
        for ask in (False, True):
            said = sender._message(1, Invalidation(7, b"name", ask=ask))
            assert struct.unpack_from("=IiQQII", said) == (len(said), 3, 0, 7, 4, int(ask))
            assert said[-5:] == b"name\0"


class TestNotifier:
    def make(self, answered: float, clock: Clock) -> Notifier:
        return Notifier(1, lambda: answered, replace(Host(), monotonic=clock))

    def test_what_was_answered_lately_is_invalidated_twice(self) -> None:
        clock = Clock()
        notifier = self.make(clock.now - RECENT / 2, clock)
        one = Invalidation(5, b"name")
        notifier.submit([one])
        assert notifier.take(clock.now) == one
        assert notifier.take(clock.now) is None
        assert notifier.take(clock.now + AGAIN_AFTER + 0.001) == one
        assert notifier.take(clock.now + 10) is None

    def test_what_was_answered_long_ago_is_invalidated_once(self) -> None:
        clock = Clock()
        notifier = self.make(clock.now - 1, clock)
        notifier.submit([Invalidation(5, None)])
        assert notifier.take(clock.now) == Invalidation(5, None)
        assert notifier.take(clock.now + 10) is None

    def test_equal_ones_that_wait_are_one(self) -> None:
        clock = Clock()
        notifier = self.make(0, clock)
        for _ in range(1000):
            notifier.submit([Invalidation(5, None), Invalidation(6, b"x")])
        taken = [notifier.take(clock.now) for _ in range(3)]
        assert taken == [Invalidation(5, None), Invalidation(6, b"x"), None]


class TestFeed:
    def test_a_page_that_cannot_be_applied_is_not_asked_for_in_a_loop(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Pauses(Exception):
            pass

        def pause(seconds: float) -> None:
            raise Pauses(seconds)

        def post(apply: Callable[[], object]) -> None:  # as the loop does: the error is logged there
            with pytest.raises(ValueError, match="broken"):
                apply()

        def broken(page: object) -> None:
            raise ValueError("broken")

        machine = SimpleNamespace(
            host=Host(), post=post, volume=SimpleNamespace(apply_feed=broken), settle=None, pump=None
        )
        notifier = SimpleNamespace(submit=None)
        made = feed.Feed(cast(Any, machine), cast(Any, None), cast(Any, None), cast(Any, notifier))
        monkeypatch.setattr(feed, "_pace", SimpleNamespace(wait=pause))
        with pytest.raises(Pauses, match=str(feed.RETRY)):
            made._have_applied(cast(Any, None))

    def test_an_answer_that_was_long_on_its_way_ends_no_silence(self) -> None:
        """It may have been made before all that was committed meanwhile."""
        clock, heard, waits = Clock(), list[bool](), list[float]()
        core = SimpleNamespace(mark=None)
        volume = SimpleNamespace(feed_seq=5, session=1, root_ino=1, core=core, kernel_holds=list)
        volume.told_more = lambda page: False
        volume.feed_silent, volume.still_absent = heard.append, iter
        volume.history_changed = lambda error: None
        machine = SimpleNamespace(
            host=replace(Host(), monotonic=clock),
            volume=volume,
            post=lambda act: act(),
            pump=list,
            settle=list,
        )
        notifier = SimpleNamespace(submit=lambda told: None)
        made = feed.Feed(cast(Any, machine), cast(Any, None), entries.Entries(1), cast(Any, notifier))
        took = [feed.WAIT, feed.SILENT + 1, 2 * feed.SILENT, 0.1]
        seen = []

        def changes(seq: int, session: int, wait: float, *more: object) -> object:
            waits.append(wait)
            seen.append(made._silent)
            if not took:
                raise HistoryChanged("the end of the test")
            for _ in range(10):  # the timer looks meanwhile
                clock.now += took[0] / 10
                made.look()
            took.pop(0)
            return SimpleNamespace(asks=(), changes=(), reset=False, head=5)

        made._remote = cast(Any, SimpleNamespace(changes=changes))
        made._work()
        assert seen == [False, False, True, True, False]
        assert heard == [True, False]
        assert waits == [feed.WAIT, feed.WAIT, 0.0, 0.0, feed.WAIT]

    def test_who_starts_over_has_the_kernel_forget_what_did_not_exist(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        core = SimpleNamespace(take_absent=list)
        machine = SimpleNamespace(host=Host(), volume=SimpleNamespace(core=core, still_absent=iter))
        told = entries.Entries(1)
        made = feed.Feed(cast(Any, machine), cast(Any, None), told, cast(Any, None))
        monkeypatch.setattr(made, "_thread", SimpleNamespace(start=lambda: None))
        made.start()
        told.absent(7, b"x")
        assert core.take_absent() == [Invalidation(7, b"x", ask=True)]
        assert core.take_absent() == []


def test_absent_names_that_are_too_many_are_forgotten_many_at_once() -> None:
    told = entries.Entries(1)
    heard: list[list[Invalidation]] = []
    told.forget = heard.append
    names = [b"%d" % number for number in range(ABSENT_MAX + 3 * entries.FORGOTTEN_AT_ONCE)]
    for name in names:
        told.absent(7, name)
        assert len(told._absent) <= ABSENT_MAX
    assert len(heard) == 3
    forgotten = [one.name for ones in heard for one in ones]
    assert forgotten + [one.name for one in told.take_absent()] == names


def shown(**more: object) -> Any:
    """An inode as entries are made of it."""
    numbers = dict.fromkeys(("uid", "gid", "atime", "mtime", "ctime", "stamp", "rdev", "lookups"), 0)
    found = {"ino": 7, "kernel": None, "mode": 0o100644, "nlink": 1, "size": 10_240, "stale": False}
    return SimpleNamespace(**{**numbers, **found, **more})


class TestEntries:
    @pytest.mark.parametrize(("rdev", "blocks"), [(0, 20), (4096, 12), (10_240, 0), (0x80001, 20), (-1, 20)])
    def test_what_is_no_number_of_holes_counts_none(self, rdev: int, blocks: int) -> None:
        """The first versions kept a device's number of any inode."""
        entry = entries.Entries(1).of(shown(rdev=rdev))
        assert (entry.st_blocks, entry.st_rdev) == (blocks, 0)

    def test_what_is_shown_for_want_of_newer_is_not_kept(self) -> None:
        """Nobody would make the kernel forget it: it was told of the change before."""
        made, inode = entries.Entries(1), shown(mode=0o40755)
        kept = made.of(inode)
        assert made.of(inode) is kept and kept.attr_timeout == kept.entry_timeout == entries.TIMEOUT
        inode.stale = True
        for entry in (made.of(inode), made.passing(inode)):
            assert (entry.attr_timeout, entry.entry_timeout) == (0.0, entries.TIMEOUT)
            assert entry.st_size == kept.st_size
        inode.stale = False
        assert made.of(inode) is kept and kept.attr_timeout == entries.TIMEOUT


class TestMachine:
    def test_a_waiter_ends_at_its_deadline(self) -> None:
        clock = Clock()
        machine = make_machine(clock)
        woken: list[object] = []
        machine.watch(Want("never"), woken.append, within=machine.handler_timeout())
        for _ in range(4):
            clock.now += (5 + GRACE - 0.1) / 4
            machine.tick()
        assert woken == []
        clock.now += 0.2
        machine.tick()
        machine.tick()
        assert len(woken) == 1
        assert isinstance(woken[0], Unavailable)

    def test_a_pause_of_the_process_is_no_time_that_anybody_waited(self) -> None:
        clock, longer = Clock(), list[float]()
        machine = make_machine(clock)
        cast(Any, machine.volume).extend = longer.append
        woken: list[object] = []
        since = machine.clock()
        machine.watch(Want("never"), woken.append, within=machine.handler_timeout())
        clock.now += 3600.0
        # Who is woken by an answer before the first tick has not waited an hour either.
        assert machine.clock() == since + PAUSED
        assert not machine.is_over(since)
        machine.tick()
        assert machine.clock() == since + PAUSED
        assert (woken, longer) == ([], [3600.0 - PAUSED])
        for _ in range(5):
            clock.now += 1.0
            machine.tick()
        assert (len(woken), machine.is_over(since), longer) == (1, True, [3600.0 - PAUSED])

    def test_no_time_out_waits_for_ever(self) -> None:
        clock = Clock()
        machine = make_machine(clock, io_timeout=0)
        woken: list[object] = []
        machine.watch(Want("never"), woken.append, within=machine.handler_timeout())
        clock.now += 1e6
        machine.tick()
        assert woken == []

    def test_the_waiter_over_the_bound_is_refused(self) -> None:
        machine = make_machine(Clock())
        forgets = [machine.watch(Want("never"), lambda error: None, within=None) for _ in range(PARKED_MAX)]
        with pytest.raises(Unavailable, match="wait for the server already"):
            machine.watch(Want("one more"), lambda error: None, within=None)
        # The daemon's own barrier must never be the one that is refused.
        machine.watch(Want("barrier"), lambda error: None, within=None, request=False)()
        forgets[0]()
        machine.watch(Want("fits again"), lambda error: None, within=None)

    def test_the_end_of_the_connection_ends_its_requests_and_not_the_last_flush(self) -> None:
        """An unmount is told to the main thread, which begins to send the rest, before the loop has ended."""
        machine = make_machine(Clock())
        parked: list[object] = []
        flush: list[object] = []
        machine.watch(Want("a read"), parked.append, within=None)
        machine.watch(Want("the barrier"), flush.append, within=None, request=False)
        machine.fail_requests(Unavailable("gone"))
        machine.fail_requests(Unavailable("gone"))
        assert [str(one) for one in parked] == ["gone"]
        assert flush == []
        machine.stop()
        assert [type(one) for one in flush] == [Unavailable]

    @pytest.mark.parametrize("then", ["pump", "tick", "stop", "another answer"])
    def test_who_waits_for_an_answer_goes_before_what_follows_from_it(self, then: str) -> None:
        """And that comes once, before anything else is told to the volume."""
        machine, order = make_machine(Clock()), list[object]()
        volume, want = cast(Any, machine.volume), Want("fsync")
        volume.heard = lambda job, result: want.end() or True
        volume.finish = lambda job, result: order.append((job, result))
        volume.tick = lambda now: order.append("tick")
        volume.close = lambda: order.append("closed")
        machine.news = lambda: order.append("news")
        machine.watch(want, lambda error: order.append("woken"), within=None)
        machine._heard(cast(Any, "job"), "answer")
        assert order == ["woken"]
        if then == "another answer":
            machine._finish(cast(Any, "other"), "result")
        else:
            getattr(machine, then)()
        after: dict[str, list[object]] = {"pump": [], "tick": ["tick"], "stop": ["closed"]}
        assert order == ["woken", "news", ("job", "answer"), *after.get(then, [("other", "result")])]
        machine.pump()
        assert len(order) == len(set(order))

    def test_an_answer_that_cannot_be_looked_at_is_not_lost_in_silence(self) -> None:
        """Nothing would be sent after it any more."""
        machine, broke = make_machine(Clock()), list[BaseException]()
        machine.broke = broke.append

        def heard(job: object, result: object) -> bool:
            raise ZeroDivisionError

        cast(Any, machine.volume).heard = heard
        with pytest.raises(ZeroDivisionError):
            machine._heard(cast(Any, "job"), "answer")
        assert [type(one) for one in broke] == [ZeroDivisionError]

    def test_what_nobody_waits_for_follows_at_once(self) -> None:
        machine, order = make_machine(Clock()), list[object]()
        volume = cast(Any, machine.volume)
        volume.heard = lambda job, result: False
        volume.finish = lambda job, result: order.append(result)
        machine._heard(cast(Any, "job"), "answer")
        assert order == ["answer"]

    def test_a_want_that_has_ended_wakes_at_once(self) -> None:
        machine = make_machine(Clock())
        want = Want("done")
        want.end()
        woken: list[object] = []
        machine.watch(want, woken.append, within=1)
        assert woken == [None]


class TestMemory:
    PROGRAM = """
from fsd.kernel.memory import GiveBack, resident, tune
tune()
made = GiveBack()
made.look()
pieces = [bytes(65536) for _ in range(1024)]
full = resident()
del pieces[::2], pieces[::3]
kept = resident()
made.look()
print(full, kept, resident())
"""

    def test_what_was_freed_among_others_is_given_back(self) -> None:
        """A process of its own: what pytest has freed already would be in the way."""
        run = subprocess.run([sys.executable, "-c", self.PROGRAM], capture_output=True, text=True, timeout=60)
        full, kept, small = map(int, run.stdout.split())
        assert kept > full - 8 * MIB, "the C library gave it back by itself: this checked nothing"
        assert small < full - 24 * MIB

    def test_the_supervisor_loads_no_more_than_it_needs(self) -> None:
        """It keeps for good what `fsd mount` loaded before it forked."""
        program = "import sys, fsd.cli.main, fsd.kernel.supervisor; print(*sys.modules)"
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        loaded = set(run.stdout.split())
        assert "fsd.kernel.supervisor" in loaded, run.stderr
        unwanted = {"datetime", "http.client", "ssl", "subprocess", "textwrap", "traceback", "trio"}
        assert not loaded & unwanted

    def test_the_heap_is_given_back_before_the_supervisor_is_forked(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[str] = []

        def fork() -> int:
            seen.append("fork")
            return 1

        monkeypatch.setattr(supervisor, "give_back", lambda: seen.append("give back"))
        monkeypatch.setattr(supervisor, "_fork", fork)
        monkeypatch.setattr(supervisor.os, "setsid", lambda: None)
        read_end, write_end = os.pipe()
        os.close(read_end)
        nothing = cast(Any, None)  # what the parent of the supervisor does not look at
        assert supervisor._detached(nothing, nothing, -1, write_end) == 0
        os.close(write_end)
        assert seen == ["give back", "fork"]


class TestMountTable:
    def test_escapes_layers_and_ids(self) -> None:
        raw = (
            b"22 1 0:21 / /proc rw,nosuid shared:13 - proc proc rw\n"
            b"40 1 0:44 / /mnt/with\\040space rw,relatime - fuse.fsd fsd:fs_abc:0123 rw,user_id=0\n"
            b"41 40 0:45 / /mnt/with\\040space rw - tmpfs tmpfs rw\n"
            b"garbage\n"
        )
        entries = parse_mountinfo(raw)
        assert [entry.fstype for entry in entries] == ["proc", "fuse.fsd", "tmpfs"]
        assert entries[1].path == Path("/mnt/with space")
        assert entries[1].ids == ("fs_abc", "0123")
        assert entries[1].device == "0:44"
        assert entries[2].ids is None

    @pytest.mark.parametrize(
        ("here", "everywhere", "read_only"),
        [
            ("rw", "rw", False),
            ("ro,nosuid", "rw", True),
            ("rw,nosuid", "ro,user_id=0", True),
            ("ro", "ro", True),
        ],
    )
    def test_read_only_here_or_everywhere(self, here: str, everywhere: str, read_only: bool) -> None:
        line = f"40 1 0:44 / /mnt/ro {here} shared:1 - fuse.fsd ro {everywhere}\n".encode()
        assert parse_mountinfo(line)[0].read_only is read_only

    def test_a_name_that_is_no_text_survives(self) -> None:
        line = b"40 1 0:44 / /mnt/\xff\\134x rw - fuse.fsd fsd:a:b rw\n"
        assert bytes(parse_mountinfo(line)[0].path) == b"/mnt/\xff\\x"

    def test_the_mount_id_is_the_place_and_the_subtree(self) -> None:
        one = mount_id("fs_a", b"/x", Path("/mnt/a"))
        assert one == mount_id("fs_a", b"//x/", Path("/mnt/a"))
        others = {
            mount_id("fs_b", b"/x", Path("/mnt/a")),
            mount_id("fs_a", b"/y", Path("/mnt/a")),
            mount_id("fs_a", b"/x", Path("/mnt/b")),
        }
        assert len(others | {one}) == 4


class TestLog:
    def record(self, text: str, *args: object) -> logging.LogRecord:
        return logging.LogRecord("fsd", logging.WARNING, __file__, 1, text, args, None)

    def test_one_message_cannot_fill_a_disk(self) -> None:
        clock = Clock()
        throttle = Throttle(replace(Host(), monotonic=clock))
        passed = [throttle.filter(self.record("read of %d failed", n)) for n in range(1000)]
        assert sum(map(bool, passed)) == LOG_REPEATS_MAX
        assert throttle.filter(self.record("something else"))
        clock.now += WINDOW + 1
        after = self.record("read of %d failed", 1)
        assert throttle.filter(after)
        assert f"[{1000 - LOG_REPEATS_MAX} more like it" in after.getMessage()

    def test_tokens_are_taken_out(self) -> None:
        text = "no answer for fsd1.eyJmcyI6ImEifQ.AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
        assert "AAAA" not in Redacting("%(message)s").format(self.record(text))


class TestDrain:
    """How long a barrier is waited for. The time is made up; a pause of the sandbox is a jump of it."""

    def drained(self, within: float, pause: float, sent_after: float, *, runs: bool = True) -> Drained:
        """The pause begins at 1.5 s; `sent_after` it everything is sent. `runs`: the FUSE thread goes on."""
        time = MadeUp()

        async def main() -> Drained:
            host = replace(Host(), monotonic=tasks.current_time)
            tiny = TinyVolume()
            tiny.stuck = 1
            machine = Machine(
                cast(Any, tiny), cast(Any, None), cast(Any, None), Scheduler(), host, io_timeout=60.0
            )
            answers = [True]  # it stood still after the barrier was begun
            cast(Any, machine).post = lambda func: func()

            async def call(func: Callable[[], object], within: float = 5.0) -> object:
                if runs or answers:
                    answers[:1] = []
                    return func()
                await tasks.sleep(within)
                return None

            async def ticks() -> None:
                while runs:
                    await tasks.sleep(0.1)
                    machine.tick()

            async def sandbox() -> None:
                await tasks.sleep(1.5)
                time.jump(pause)
                await tasks.sleep(sent_after)
                for parked in machine.snapshot() if runs else ():
                    parked.want.end()
                machine.settle()

            stopper = Stopper(cast(Any, SimpleNamespace(machine=machine, call=call)))
            async with tasks.open_nursery() as nursery:
                nursery.start_soon(ticks)
                nursery.start_soon(sandbox)
                done = await stopper.drain(within, quiet)
                nursery.cancel_scope.cancel()
            return done

        return tasks.run(main, clock=time)

    @pytest.mark.parametrize("pause", [0.0, 4.0, 9.0, 3600.0])
    def test_a_pause_is_no_time_that_was_waited(self, pause: float) -> None:
        assert self.drained(5.0, pause, 1.0).error is None

    def test_who_waited_as_long_as_was_asked_is_told(self) -> None:
        for pause in (0.0, 9.0):
            done = self.drained(5.0, pause, 600.0)
            assert isinstance(done.error, Unavailable)
            assert "no answer in time" in str(done.error)
            assert done.took - pause < 8.0

    def test_a_thread_that_stands_still_is_waited_for_no_longer(self) -> None:
        done = self.drained(20.0, 3600.0, 0.0, runs=False)
        assert "the FUSE thread does not answer" in str(done.error)
        assert done.took - 3600.0 < 60.0


class TestFresh:
    def test_what_a_daemon_was_told_is_carried_over_field_by_field(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """To a version that knows one field more and one less."""
        module = sys.modules[__name__]

        @dataclass
        class Told:
            kept: int
            old: int
            inner: Any = None

        @dataclass
        class Newer:
            kept: int
            inner: Any = None
            new: int = 7

        monkeypatch.setattr(fresh, "PACKAGE", __name__.partition(".")[0])
        Told.__qualname__ = "Told"
        monkeypatch.setattr(module, "Told", Newer, raising=False)
        made = fresh.carried(Told(1, 2, Told(3, 4, Path("/x"))))
        assert made == Newer(1, Newer(3, Path("/x"), 7), 7)
        assert fresh.carried("text") == "text"

    def test_only_another_file_is_a_change(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "loaded.py"
        file.write_text("x = 1\n")
        monkeypatch.setitem(sys.modules, "fsd.loaded", cast(Any, SimpleNamespace(__file__=str(file))))
        before = fresh.prints()
        assert not fresh.changed(before)
        other = tmp_path / "other"
        other.write_text("x = 1\n")
        other.replace(file)
        assert fresh.changed(before)
        again = fresh.prints()
        file.unlink()
        assert fresh.changed(again)
        assert not fresh.changed({})


def test_a_pointer_is_followed_from_its_own_directory_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root's commands see mounts that were made under another XDG_RUNTIME_DIR."""
    fixed, real = (runtime.RuntimeDir(tmp_path / name, Host()) for name in ("fixed", "real"))
    monkeypatch.setattr(runtime, "fixed_directory", lambda uid: fixed.path)
    fixed.make()
    real.make()
    record = runtime.Record("m", "fs", "/place", "s", "d", "l", "e", "/", str(real.path))
    real.write(record)
    real.point(record)
    real.update("m", pid=7, state=runtime.MOUNTED)
    for directory in (fixed, real):
        assert directory.read("m").pid == 7
        assert [(one.pid, one.state) for one in directory.records()] == [(7, runtime.MOUNTED)]
    real.record_path("m").unlink()
    assert fixed.read("m") == record  # all that is known of it
    with pytest.raises(NotFound):
        real.read("m")
