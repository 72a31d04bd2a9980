"""The run in several pytests (support.workers), over a small tree of tests instead of ours."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from support import wait, workers
from support.wait import wait_for
from support.workers import WORKERS

CONFTEST = """
import os, sys
from pathlib import Path
import pytest
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from support import workers

def pytest_addoption(parser):
    parser.addoption("--shared", type=Path)

def pytest_configure(config):
    config.pluginmanager.register(workers.Worker(config.getoption("--shared")))

def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if item.name != "test_left_out"]

def told(*words):
    with (HERE / "told").open("a") as file:
        file.write(" ".join([str(os.getpid()), *words]) + "\\n")

@pytest.fixture(scope="session")
def session():
    told("begin")
    yield
    told("end")

@pytest.fixture
def tell(request, session):
    told(request.node.nodeid.rpartition("/")[2])
"""
MODULE = """
def test_first(tell):
    pass

def test_left_out(tell):
    pass

def test_second(tell):
    pass
"""
# Goes on when every worker has a module.
TOGETHER = """
from pathlib import Path
from support.wait import wait_for
from support.workers import WORKERS

def test_first(tell):
    Path(__file__).with_suffix(".began").touch()
    wait_for(lambda: len(list(Path(__file__).parent.glob("*.began"))) == WORKERS, 60, "the other workers")

def test_second(tell):
    pass
"""
# A module whose last test runs has the next one taken already: there is a second test.
HANGS = """
import signal
from pathlib import Path

def test_first(tell):
    Path(__file__).with_suffix(".began").touch()
    signal.pause()

def test_second():
    pass
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tests/support").mkdir(parents=True)
    for module in (workers, wait):
        assert module.__file__
        shutil.copy(module.__file__, tmp_path / "tests/support")
    (tmp_path / "tests/conftest.py").write_text(CONFTEST)
    return tmp_path


def put(tree: Path, name: str, text: str) -> None:
    path = tree / "tests" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def start(tree: Path, limit: float, *options: str) -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [
        sys.executable,
        "tests/support/workers.py",
        str(limit),
        "-p",
        "no:cacheprovider",
        "-q",
        *options,
    ]
    return subprocess.Popen(
        command, cwd=tree, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def told(tree: Path) -> list[list[str]]:
    path = tree / "tests/told"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def test_each_module_is_played_once_and_by_one(tree: Path) -> None:
    modules = {f"system/test_t{number}.py": TOGETHER for number in range(WORKERS)}
    modules |= dict.fromkeys(("unit/test_d.py", "unknown/test_e.py", "unit/test_f.py"), MODULE)
    for name, text in modules.items():
        put(tree, name, text)
    run = start(tree, 200)
    out = run.communicate(timeout=200)[0]
    assert run.returncode == 0, out
    played = [line for line in told(tree) if "::" in line[1]]
    names = [Path(name).name for name in modules]
    assert sorted(line[1] for line in played) == sorted(
        f"{name}::test_{which}" for name in names for which in ("first", "second")
    )
    for name in names:
        assert len({pid for pid, test in played if test.startswith(name)}) == 1
    assert played[0][1] == "test_e.py::test_first", "a directory of unknown length comes first"
    sessions = [pid for pid, word in told(tree) if word in ("begin", "end")]
    assert len(sessions) == 2 * WORKERS and len(set(sessions)) == WORKERS, "each worker has one session"
    counts = [int(line.split()[0]) for line in out.splitlines() if " passed in " in line]
    assert sum(counts) == 2 * len(modules), out


def test_what_fails_fails_the_run_and_keeps_none_from_being_played(tree: Path) -> None:
    put(tree, "system/test_a.py", "import nowhere_to_be_found\n")
    put(tree, "system/test_b.py", "def test_first():\n    assert 0\n")
    put(tree, "unit/test_c.py", MODULE)
    run = start(tree, 200)
    out = run.communicate(timeout=200)[0]
    assert run.returncode == 1, out
    assert "nowhere_to_be_found" in out and "assert 0" in out and len(told(tree)) == 4, out


@pytest.mark.parametrize("code", [0, 3])
def test_a_worker_that_ends_in_a_test_is_named_and_fails_the_run(tree: Path, code: int) -> None:
    put(tree, "unit/test_a.py", f"import os\n\ndef test_first():\n    os._exit({code})\n")
    run = start(tree, 200)
    out = run.communicate(timeout=200)[0]
    assert run.returncode == (code or 1), out
    assert f"a worker ended with status {code} in the middle of tests/unit/test_a.py::test_first" in out


@pytest.mark.parametrize(
    ("ends", "all_in_all"),
    [
        *(([0, 0], 0), ([0, 5], 0), ([5, 5], 5), ([5, 0, 1], 1), ([0, 2, 5], 2), ([0, -9], -9)),
        # What is more than a failed test must not look like one: .ci/run plays those again.
        *(([1, -9], -9), ([1, 3, 2], 3), ([1, 0, 1], 1)),
    ],
)
def test_the_exit_status(ends: list[int], all_in_all: int) -> None:
    assert workers.status(ends) == all_in_all


def test_a_signal_ends_all_and_they_clear_up(tree: Path) -> None:
    for number in range(WORKERS):
        put(tree, f"unit/test_{number}.py", HANGS)
    run = start(tree, 200)
    wait_for(lambda: len(list(tree.glob("tests/unit/*.began"))) == WORKERS, 100, "all to hang")
    run.send_signal(signal.SIGTERM)
    out = run.communicate(timeout=200)[0]
    assert run.returncode == 2 and out.count("! KeyboardInterrupt !") == WORKERS, out
    assert sum(word == "end" for _, word in told(tree)) == WORKERS


def test_who_was_killed_leaves_none_running(tree: Path) -> None:
    """They went on for as long as their tests took."""
    for number in range(WORKERS):
        put(tree, f"unit/test_{number}.py", HANGS)
    run = start(tree, 200)
    wait_for(lambda: len(list(tree.glob("tests/unit/*.began"))) == WORKERS, 100, "all to hang")
    run.kill()
    out = run.communicate(timeout=200)[0]  # ends with the last who has the pipe
    assert "! KeyboardInterrupt !" in out
    wait_for(lambda: sum(word == "end" for _, word in told(tree)) == WORKERS, 60, "all to clear up")


def test_two_modules_of_one_name_are_both_played_or_told(tree: Path) -> None:
    put(tree, "system/test_a.py", MODULE)
    put(tree, "unit/test_a.py", MODULE)
    run = start(tree, 200)
    out = run.communicate(timeout=200)[0]
    played = [line for line in told(tree) if "::" in line[1]]
    assert (run.returncode, len(played)) == (0, 4) or "import file mismatch" in out, out


def test_a_module_that_cannot_be_loaded_is_told_among_what_failed(tmp_path: Path) -> None:
    """.ci/run would take it for played when it plays other failures again."""
    (tmp_path / "test_broken.py").write_text("import nowhere_to_be_found\n")
    listed, shared = tmp_path / "listed", tmp_path / "shared"
    shared.mkdir()
    words = ["-p", "conftest", "-p", "no:cacheprovider", f"--failures={listed}", f"--shared={shared}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "test_broken.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.fspath(workers.TESTS)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert listed.read_text() == "test_broken.py\n"


@pytest.mark.parametrize("again", [False, True])
def test_who_does_not_end_is_killed_with_what_it_started(
    monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """After its time of grace, and at once where a signal comes again."""
    monkeypatch.setattr(workers, "GRACE", 1000 if again else 0)
    script = "trap '' INT; sleep 1000 & echo; exec sleep 1000"
    running = [
        subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True)
        for _ in range(2)
    ]
    streams = [one.stdout for one in running if one.stdout]
    assert [stream.readline() for stream in streams] == [b"\n"] * 2
    was, signals = subprocess.Popen.wait, [workers.Stopped()] if again else []

    def wait(one: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if signals:
            raise signals.pop()
        return was(one, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    try:
        workers.end(running)
        assert [one.returncode for one in running] == [-signal.SIGKILL] * 2
        for stream in streams:  # at their ends when nobody has them open
            assert select.select([stream], [], [], 60)[0], "what it started is still there"
            stream.close()
    finally:
        for one in running:
            with suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)


def test_the_limit_has_a_status_of_its_own(tree: Path) -> None:
    put(tree, "unit/test_a.py", HANGS)
    run = start(tree, 0.01)
    assert run.communicate(timeout=200)[1] is None
    assert run.returncode == 124
