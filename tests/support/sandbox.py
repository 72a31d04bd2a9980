"""A disposable sandbox with a mount, played by real processes: what it holds can be killed, cut and wiped.

Its directory holds a home, a state directory (or that lies on a disk of its own), a runtime directory and the
mount point; its environment holds the two values and nothing else of fsd's.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from support import preloaded
from support.leftovers import clear_records, fsd_mounts
from support.server import Server, TestFs
from support.wait import wait_for


class Sandbox:
    """`options` go to every `fsd mount`; `supervised` False adds `--no-supervisor`. Close it always."""

    def __init__(
        self,
        base: Path,
        fs: TestFs,
        *options: str,
        state: Path | None = None,
        supervised: bool = False,
        endpoint: str | None = None,
    ) -> None:
        self.base, self.fs = base, fs
        self.mountpoint, self.state = base / "m", state or base / "state"
        self.options = [*options, *([] if supervised else ["--no-supervisor"])]
        for directory in (self.mountpoint, base / "run", base / "home"):
            directory.mkdir(parents=True, exist_ok=True)
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": os.fspath(base / "home"),
            "XDG_RUNTIME_DIR": os.fspath(base / "run"),
            "LANG": "C.UTF-8",
            **fs.env,
        }
        if "FSD_TEST_RUN" in os.environ:
            self.env["FSD_TEST_RUN"] = os.environ["FSD_TEST_RUN"]
        if endpoint:
            self.env["FSD_ENDPOINT"] = endpoint
        self.record = base / "no-record"
        self.pids: list[int] = []  # the supervisor first, so that it brings nothing back
        self._began: dict[int, int] = {}  # a number may be another process's by now: when ours began

    def fsd(self, *argv: str, timeout: float = 60, check: bool = True) -> subprocess.CompletedProcess[str]:
        """A command in this sandbox. With `check`, a failure shows what it said and the daemon's log."""
        raw = preloaded.run(argv, self.env, timeout=timeout)
        done = subprocess.CompletedProcess(raw.args, raw.returncode, raw.stdout.decode(), raw.stderr.decode())
        if check and done.returncode:
            raise AssertionError(
                f"fsd {' '.join(argv)}: exit {done.returncode}\n{done.stderr}\n{self.logs()}"
            )
        return done

    def json(self, *argv: str, timeout: float = 60) -> Any:
        return json.loads(self.fsd(*argv, "--output", "json", timeout=timeout).stdout)

    def logs(self) -> str:
        """The ends of the daemon's logs, for messages."""
        texts = []
        for path in sorted(self.state.rglob("*.log")) if self.state.exists() else []:
            try:
                texts.append(f"--- {path.name}\n" + path.read_text(errors="replace")[-3000:])
            except OSError as exc:
                texts.append(f"--- {path.name}: {exc}")
        return "\n".join(texts)

    def mount(self, *options: str, timeout: float = 90) -> None:
        """Mount, or mount again; the same place and state."""
        made = self.json(
            "mount",
            os.fspath(self.mountpoint),
            "--state-dir",
            os.fspath(self.state),
            *self.options,
            *options,
            timeout=timeout,
        )
        self.record = Path(made["control_socket"]).with_suffix(".json")
        self._note(made)

    def _note(self, told: dict[str, Any]) -> None:
        self.pids = [int(told[key]) for key in ("supervisor_pid", "pid") if told.get(key)]
        self._began = {pid: began(pid) for pid in self.pids}

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.json("status", os.fspath(self.mountpoint))
        return found

    def record_state(self) -> str:
        """What the mount's record says of it: mounted, detached, ended, …"""
        return str(json.loads(self.record.read_text())["state"])

    @property
    def daemon(self) -> int:
        return self.pids[-1]

    def signal(self, number: int) -> None:
        """To the supervisor and the daemon, as far as they live."""
        for pid in filter(self._ours, self.pids):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue  # gone already

    def _ours(self, pid: int) -> bool:
        return self._began.get(pid) in (None, began(pid))

    def kill(self) -> None:
        """SIGKILL both, and wait until they are gone."""
        self.signal(signal.SIGKILL)
        wait_for(
            lambda: not any(self._ours(pid) and alive(pid) for pid in self.pids), 30, "killed processes to go"
        )

    def detach(self) -> None:
        """Take away what a killed daemon left in the kernel."""
        for path in fsd_mounts(self.base):
            subprocess.run(["fusermount3", "-uz", path], check=False, timeout=50, capture_output=True)

    def lose(self) -> None:
        """The sandbox is gone: processes, mount, and everything it had on disk."""
        self.kill()
        self.detach()
        if self.state.exists():
            shutil.rmtree(self.state)
        shutil.rmtree(self.base / "run")
        (self.base / "run").mkdir()

    def drain(self, timeout: float = 60) -> dict[str, Any]:
        found: dict[str, Any] = self.json("drain", os.fspath(self.mountpoint), timeout=timeout)
        return found

    def wait_shown(self, seq: int, timeout: float = 60) -> None:
        """Until the mount shows commit `seq`, `fs_seq` in what another's `drain` tells."""
        self.json("wait", os.fspath(self.mountpoint), "--seq", str(seq), "--timeout", "50s", timeout=timeout)

    def unmount(self, timeout: float = 60) -> dict[str, Any]:
        found: dict[str, Any] = self.json("unmount", os.fspath(self.mountpoint), timeout=timeout)
        return found

    def wait_remounted(self, killed: int, timeout: float = 60) -> None:
        """Until the supervisor has mounted again after the daemon `killed` died."""

        def again() -> bool:
            done = self.fsd("status", os.fspath(self.mountpoint), "--output", "json", check=False)
            if done.returncode:
                return False
            told = json.loads(done.stdout)
            if told.get("pid") in (None, 0, killed) or not os.path.ismount(self.mountpoint):
                return False
            self._note(told)
            return True

        wait_for(again, timeout, f"the mount to come back\n{self.logs()}", every=0.1)

    def close(self) -> None:
        """Whatever state it is in: nothing is left of it."""
        self.signal(signal.SIGKILL)
        self.detach()
        wait_for(
            lambda: not any(self._ours(pid) and alive(pid) for pid in self.pids), 30, "killed processes to go"
        )
        clear_records(self.base)


def began(pid: int) -> int:
    """When it began, in ticks since the boot: another for each that has the number. 0: there is none."""
    try:
        raw = Path("/proc", str(pid), "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(raw.rpartition(b")")[2].split()[19])


def alive(pid: int) -> bool:
    """Whether the process runs. A zombie does not, unless threads of it are still ending: until then its
    files are open."""
    try:
        raw = Path("/proc", str(pid), "stat").read_bytes()
        threads = len(os.listdir(f"/proc/{pid}/task"))
    except (FileNotFoundError, ProcessLookupError):
        return False
    return threads > 1 or raw.rsplit(b")", 1)[1].split()[0] not in (b"Z", b"X")


@contextmanager
def sandbox(base: Path, fs: TestFs, *options: str, **more: Any) -> Iterator[Sandbox]:
    """A mounted sandbox; closed at the end."""
    made = Sandbox(base, fs, *options, **more)
    try:
        made.mount()
        yield made
    finally:
        made.close()


@pytest.fixture
def short_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a short path (control sockets have at most 107 bytes)."""
    return tmp_path_factory.mktemp("s")


@pytest.fixture
def boxes(short_dir: Path) -> Iterator[Callable[..., Sandbox]]:
    """Makes sandboxes, given a name and what `Sandbox` takes; all are closed at the end, stopped ones too."""
    with ExitStack() as made:

        def make(name: str, fs: TestFs, *options: str, **more: Any) -> Sandbox:
            box = Sandbox(short_dir / name, fs, *options, **more)
            made.callback(box.close)
            return box

        yield make


@pytest.fixture
def box(trusted: Server, tmp_path: Path) -> Iterator[Sandbox]:
    """A mount of a filesystem of the test's own; the server is audited at the end."""
    with sandbox(tmp_path / "one", trusted.create()) as made:
        yield made
