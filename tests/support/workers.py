"""Run the tests in several pytests at once: they wait more than they compute.

    python tests/support/workers.py LIMIT [pytest's options]

Each worker goes through the modules in the same order and takes the next that nobody took (`--shared`): its
servers are its own, and who is slow takes fewer. What the first worker prints is shown as it comes, what the
others print when all have ended. After LIMIT seconds, or at SIGINT, SIGTERM or SIGHUP, all get SIGINT (pytest
then still tells what it did and clears up) and, a minute later or at the next signal, SIGKILL. The exit
status is 124 after LIMIT, else what `status` makes of theirs.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import IO

import pytest

TESTS = Path(__file__).resolve().parent.parent
WORKERS = 3
# The directory with the longest modules first, the one with the shortest last: the workers end
# at about the same time.
ORDER = ("system", "fault", "kernel", "property", "contract", "unit")
GRACE = 60
FAILED, NONE_CHOSEN = 1, 5  # pytest's: tests failed, and nothing else went wrong; no test was chosen


def claim(shared: Path, name: str) -> bool:
    """Whether `name` is ours: of all who ask, in whatever process, exactly one hears True."""
    try:
        os.close(os.open(shared / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True


def playing(shared: Path, pid: int) -> Path:
    """What tells the test a worker is in."""
    return shared / f"{pid}.playing"


class Worker:
    """pytest's plugin for one of several that share the modules: each is first only noted, and collected when
    it was taken. (That each worker collected all took as long as a tenth of the tests.)"""

    def __init__(self, shared: Path) -> None:
        self._shared = shared
        self._modules: list[pytest.Module] | None = []  # those noted; None: taken ones are collected

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        playing(self._shared, os.getpid()).write_text(nodeid)

    def pytest_sessionfinish(self) -> None:
        playing(self._shared, os.getpid()).unlink(missing_ok=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> pytest.CollectReport | None:
        if self._modules is None or not isinstance(collector, pytest.Module):
            return None
        self._modules.append(collector)
        return pytest.CollectReport(collector.nodeid, "passed", None, [])

    def _tests(self, session: pytest.Session) -> Iterator[pytest.Item]:
        """Of the modules that nobody else took; each is taken when its first test is asked for."""
        modules, self._modules = self._modules or [], None
        collected = 0
        for module in modules:
            if not claim(self._shared, module.nodeid.replace("/", "+")):
                continue
            session.items = list(session.genitems(module))
            session.config.hook.pytest_collection_modifyitems(
                session=session, config=session.config, items=session.items
            )
            session.config.hook.pytest_collection_finish(session=session)
            collected += len(session.items)
            session.testscollected = collected
            yield from session.items

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """pytest's own. The next test is known before one is played, as its fixtures want it: the servers of
        the session outlive the module."""
        tests = self._tests(session)
        item = next(tests, None)
        while item is not None:
            following = next(tests, None)
            if not session.config.option.collectonly:
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
            item = following
        return True


def directories() -> list[str]:
    """Those with tests, in the order in which they are played; one that ORDER does not know comes first."""
    found = {one.parent.name for one in TESTS.glob("*/test_*.py")}
    known = [name for name in ORDER if name in found]
    return [f"{TESTS.name}/{name}" for name in [*sorted(found.difference(known)), *known]]


class Stopped(Exception):
    """A signal asked for the end."""


def stop(number: int, _frame: FrameType | None) -> None:
    raise Stopped(f"signal {number}")


_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def end_with_parent() -> None:
    """For `preexec_fn`: SIGINT when who started it was killed; pytest clears up then."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGINT)


def end(running: list[subprocess.Popen[bytes]]) -> None:
    """SIGINT, then SIGKILL, to what still runs. Who was killed has cleared nothing up: with it goes its
    group, the servers it started."""
    deadline = time.monotonic() + GRACE
    for one in running:
        if one.poll() is None:
            one.send_signal(signal.SIGINT)
    for one in running:
        try:
            one.wait(max(0.0, deadline - time.monotonic()))
        except (subprocess.TimeoutExpired, Stopped):
            deadline = 0.0
            one.kill()
            one.wait()
        if one.returncode < 0:
            with suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)


def ended(worker: subprocess.Popen[bytes], shared: Path) -> int:
    """Its exit status; 1 where it is 0 although a test went on, which is told in any case."""
    code: int = worker.returncode
    within = playing(shared, worker.pid)
    if not within.exists():
        return code
    print(f"\ntest: a worker ended with status {code} in the middle of {within.read_text()}", flush=True)
    return code or 1


def status(ends: list[int]) -> int:
    """Of all, from those of the workers. Failed tests hide nothing else: what a worker that was killed did
    not play is in no list of what failed (.ci/run plays that again). That no test was chosen counts only
    where none was chosen at all."""
    chosen = [one for one in ends if one != NONE_CHOSEN] or ends
    return next((one for one in chosen if one not in (0, FAILED)), max(chosen, default=FAILED))


def main(limit: float, options: list[str]) -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, stop)
    began = time.monotonic()
    late = False
    with ExitStack() as stack:
        shared = stack.enter_context(tempfile.TemporaryDirectory(prefix="shared."))
        own = [f"--shared={shared}", "-o", "console_output_style=classic"]  # no per cents: of what?
        command = [sys.executable, "-m", "pytest", *options, *own, *directories()]
        shown: list[IO[bytes] | None] = [None]
        shown += [stack.enter_context(tempfile.TemporaryFile()) for _ in range(WORKERS - 1)]
        running: list[subprocess.Popen[bytes]] = []
        try:
            for out in shown:
                # In sessions of their own: a ^C at the terminal reaches them once, through this process.
                running.append(
                    subprocess.Popen(
                        command,
                        stdout=out,
                        stderr=out and subprocess.STDOUT,
                        start_new_session=True,
                        preexec_fn=end_with_parent,
                    )
                )
            for one in running:
                one.wait(max(0.0, began + limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            late = True
        except Stopped as exc:
            print(f"test: {exc}", file=sys.stderr)
        end(running)
        sys.stdout.flush()
        for out in filter(None, shown):
            out.seek(0)
            shutil.copyfileobj(out, sys.stdout.buffer)
        ends = [ended(one, Path(shared)) for one in running]
        print(f"test: {WORKERS} workers, {time.monotonic() - began:.0f} s", flush=True)
    return 124 if late else status(ends)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
