"""A start that gets no thread says which limit that is."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from fsd.host import threads

LIMITS = {resource.RLIMIT_NPROC: 60, resource.RLIMIT_NOFILE: 24}


def no_thread() -> RuntimeError:
    return RuntimeError("can't start new thread")


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(threads, "_CGROUPS", tmp_path)
    monkeypatch.setattr(resource, "getrlimit", lambda what: (LIMITS.get(what, resource.RLIM_INFINITY), 100))
    return tmp_path


def test_what_is_a_lack_of_threads(cgroups: Path) -> None:
    """As the nurseries of a starting daemon and an executor wrap it, and a fork's own error."""
    caused = ValueError("starting")
    caused.__cause__ = no_thread()
    for exc in (
        no_thread(),
        ExceptionGroup("outer", [ValueError(), ExceptionGroup("inner", [no_thread()])]),
        caused,
        BlockingIOError(11, "Resource temporarily unavailable"),
    ):
        found = threads.told(exc)
        assert found is not None and found.__cause__ is exc
        assert "60 processes and threads of this user (RLIMIT_NPROC)" in found.message
        assert "ulimit -u" in found.hint and "cgroup" in found.hint


def test_a_limit_on_memory_is_named(cgroups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's stack is memory: what is short there is told with what is short of processes."""
    monkeypatch.setitem(LIMITS, resource.RLIMIT_AS, 120_000_000)
    found = threads.told(no_thread())
    assert found is not None
    assert "120000000 bytes of addresses of a process (RLIMIT_AS)" in found.message
    assert "ulimit -v" in found.hint and "ulimit -u" in found.hint


def test_a_lack_of_descriptors_is_told_as_one(cgroups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for exc in (OSError(24, "Too many open files"), ExceptionGroup("outer", [OSError(23, "x")])):
        found = threads.failure(exc, "mounting failed")
        assert found.code == "unavailable" and found.__cause__ is exc
        assert "24 of a process (RLIMIT_NOFILE)" in found.message and "ulimit -n" in found.hint
    monkeypatch.delitem(LIMITS, resource.RLIMIT_NOFILE)
    found = threads.failure(OSError(23, "Too many open files in system"), "mounting failed")
    assert "fs.file-max" in found.message


def test_what_is_none(cgroups: Path) -> None:
    """An EAGAIN that came before something else is mostly a socket's."""
    other = ValueError("broken")
    other.__context__ = other.__cause__ = BlockingIOError(11, "not ready")
    for exc in (other, RuntimeError("another"), OSError(12, "no memory"), ExceptionGroup("x", [other])):
        assert threads.told(exc) is None


def test_limits_of_cgroups_are_named(cgroups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one and of those above it."""
    lists = {"/proc/self/cgroup": ["4:memory:/m", "3:pids:/pod/one", "0::/slice"]}
    read = threads._lines
    monkeypatch.setattr(threads, "_lines", lambda path: lists.get(str(path)) or read(path))
    for place, most in (("pids/pod/one", "max"), ("pids/pod", "40"), ("slice", "50"), ("memory/m", "9")):
        (cgroups / place).mkdir(parents=True, exist_ok=True)
        (cgroups / place / "pids.max").write_text(f"{most}\n")
    found = threads.told(no_thread())
    assert found is not None
    told = found.message.partition("limits: ")[2].split(", ")
    assert told == [
        "60 processes and threads of this user (RLIMIT_NPROC)",
        f"40 in {cgroups / 'pids/pod/pids.max'}",
        f"50 in {cgroups / 'slice/pids.max'}",
    ]
