"""Every test run: the `support` package on the path, `--all`, and no mount or process left behind."""

from __future__ import annotations

import faulthandler
import os
import platform
import secrets
import signal
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from support import leftovers, preloaded, workers

# Every fixture that more than one module wants is imported here, and nowhere else.
from support.clientcase import client_fixture  # noqa: F401
from support.contract import contract_server, store  # noqa: F401
from support.filesclient import files, proxy  # noqa: F401
from support.postgres import either, postgres_server  # noqa: F401
from support.reading import trusted  # noqa: F401
from support.sandbox import box, boxes, short_dir  # noqa: F401
from support.seaweed import seaweed_bucket, seaweed_server  # noqa: F401
from support.server import server, shared_fs, shared_server  # noqa: F401
from support.tinyplace import tiny  # noqa: F401
from support.twice import twice  # noqa: F401
from support.usermount import open_dir  # noqa: F401
from support.wait import wait_for

_run_id = secrets.token_hex(8)
_left: list[str] = []
_cannot: list[str] = []
_failed: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run the tests marked long (minutes each)")
    parser.addoption(
        "--rounds", type=int, default=0, help="rounds of each random cell (default 1; 50 with --all)"
    )
    parser.addoption("--shared", type=Path, help="directory in which several pytests take modules (workers)")
    parser.addoption("--failures", type=Path, help="file to add the ids of failed tests to, one a line")
    parser.addoption("--seed", type=int, default=None, help="of every random test (default: see the fixture)")


def pytest_configure(config: pytest.Config) -> None:
    os.environ[leftovers.MARK] = _run_id
    faulthandler.enable()
    preloaded.enabled = not config.getoption("--all")
    if shared := config.getoption("--shared"):
        config.pluginmanager.register(workers.Worker(shared))
    # Whoever started the run may ignore them (nohup, a script's background): what tests start must not.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `turn` is a random one, played in rounds."""
    if "turn" in metafunc.fixturenames:
        rounds = metafunc.config.getoption("--rounds") or (50 if metafunc.config.getoption("--all") else 1)
        metafunc.parametrize("turn", range(rounds), ids=lambda number: f"round{number}")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """What a random test starts from: the same in every short run, another in each `--all`; printed."""
    given: int | None = request.config.getoption("--seed")
    if given is None:
        everywhere = zlib.crc32(request.node.nodeid.encode())
        given = secrets.randbelow(1_000_000) if request.config.getoption("--all") else everywhere % 1_000_000
    print(f"seed {given}")
    return given


def missing() -> dict[str, str]:
    """Marker → why the tests that bear it cannot run here."""
    found = {}
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        found["kernel"] = "/dev/fuse is absent or not accessible"
    if os.geteuid() != 0 or not os.path.exists("/dev/loop-control"):
        found["loop"] = "no loop devices, or not root"
    if os.geteuid() != 0:
        found["root"] = "not root"
    if platform.machine() != "x86_64":
        found["x86_64"] = "another processor than x86-64"
    if "sha_ni" not in Path("/proc/cpuinfo").read_text().split():
        found["sha_ni"] = "a processor without SHA instructions"
    return found


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without `--all`: long tests are left out, and those whose need is missing here, each by name.

    With `--all` nothing is left out: what cannot run here fails.
    """
    if config.getoption("--all"):
        return
    here = missing()
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        why = [reason for marker, reason in here.items() if item.get_closest_marker(marker)]
        long = item.get_closest_marker("long")
        if why and not long:
            _cannot.append(f"{item.nodeid}: {why[0]}")
        (dropped if long or why else kept).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


@pytest.fixture(scope="session", autouse=True)
def _nothing_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """At the end of the run: what is still mounted below its directory or still running is ended and told."""
    yield
    preloaded.end()
    base = tmp_path_factory.getbasetemp()
    for mount in leftovers.clear_mounts(base):
        _left.append(f"mount {mount}")
    try:
        # A daemon may be in its last moments after a fixture's unmount.
        wait_for(lambda: not leftovers.marked_processes(_run_id), 30, "the run's processes to end")
    except AssertionError:
        alive = leftovers.marked_processes(_run_id)
        _left.extend(f"process {pid}: {command}" for pid, command in alive.items())
        leftovers.end_processes(list(alive))
    leftovers.clear_records(base)


def pytest_runtest_logreport(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.failed and report.nodeid not in _failed:
        _failed.append(report.nodeid)


pytest_collectreport = pytest_runtest_logreport  # a module that cannot be loaded


def pytest_sessionfinish(session: pytest.Session) -> None:
    if listed := session.config.getoption("--failures"):
        with listed.open("a") as file:
            file.writelines(f"{name}\n" for name in [*_failed, *_left])
    if _left and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _cannot:
        terminalreporter.section("left out because they cannot run here (with --all they fail)")
        for name in _cannot:
            terminalreporter.line(name)
    if _left:
        terminalreporter.section("LEFT BEHIND by the tests (ended now; the run fails)", red=True)
        for line in _left:
            terminalreporter.line(line)
