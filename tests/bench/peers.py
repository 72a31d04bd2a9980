"""The filesystems compared. Each makes its own store below a directory, mounts, unmounts, goes away."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from support.processes import die_with_parent, free_ports, stop
from support.sandbox import Sandbox
from support.server import Server

from bench import proc

TIMEOUT = 300.0


class Failed(Exception):
    """A peer or a figure that does not work here; the run goes on without it."""


def run(argv: Sequence[str | Path], *, timeout: float = TIMEOUT, env: dict[str, str] | None = None) -> None:
    """Raises `Failed` with the end of what it said."""
    words = [os.fspath(word) for word in argv]
    try:
        done = subprocess.run(words, capture_output=True, timeout=timeout, env=env, check=False)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise Failed(f"{words[0]}: {exc}") from exc
    if done.returncode:
        told = (done.stderr or done.stdout).decode("utf-8", "replace").strip()[-300:]
        raise Failed(f"{' '.join(words[:3])}: exit {done.returncode}: {told}")


def sync_directory(path: Path) -> None:
    """syncfs of what `path` lies on, by coreutils."""
    run(["sync", "-f", path])


class Peer:
    """One filesystem. `root` is the directory measured. `start` may raise anything: the peer is then a named
    row. `unmount` returns when everything is where the product calls it durable and its daemon is gone."""

    name = ""

    def __init__(self, base: Path) -> None:
        self.base = base / self.name.replace(" ", "-").replace(",", "").replace("+", "")
        self.root = self.base / "m"
        self.peak = 0.0  # MiB, of the daemons, over all their lives
        self.root.mkdir(parents=True)

    def start(self) -> None: ...

    def mount(self) -> None: ...

    def unmount(self) -> None: ...

    def settle(self) -> None:
        """Wait until the daemon has nothing to do in the background, mounted as before."""

    def daemons(self) -> list[int]:
        return []

    def servers(self) -> list[int]:
        return []

    def note_memory(self) -> None:
        self.peak = max(self.peak, proc.memory(self.daemons(), "VmHWM"))

    def stop(self) -> None:
        """Whatever state it is in: nothing mounted, no process. The directory stays."""
        subprocess.run(["fusermount3", "-uzq", self.root], check=False, timeout=30, capture_output=True)


class Local(Peer):
    """The disk below, directly."""

    name = "ext4"

    def unmount(self) -> None:
        sync_directory(self.root)


class Passthrough(Peer):
    """libfuse's C example, the least a FUSE filesystem costs. Durable: the directory below is synced."""

    name = "passthrough_ll"

    def __init__(self, base: Path, binary: Path) -> None:
        super().__init__(base)
        self.binary = binary
        self.below = self.base / "below"
        self.below.mkdir()
        self.process: subprocess.Popen[bytes] | None = None

    def mount(self) -> None:
        options = f"xattr,source={self.below}"
        log = (self.base / "log").open("ab")
        self.process = subprocess.Popen(
            [self.binary, "-f", "-o", options, self.root], stderr=log, preexec_fn=die_with_parent
        )
        log.close()
        proc.await_true("mount of passthrough_ll", lambda: os.path.ismount(self.root), 20)

    def unmount(self) -> None:
        run(["fusermount3", "-u", self.root])
        if self.process is not None:
            self.process.wait(30)
            self.process = None
        sync_directory(self.below)

    def daemons(self) -> list[int]:
        return [self.process.pid] if self.process is not None else []

    def stop(self) -> None:
        super().stop()
        if self.process is not None:
            stop(self.process)


class JuiceFs(Peer):
    """JuiceFS with its defaults on a local folder; the metadata in SQLite."""

    name = "juicefs, SQLite"

    def __init__(self, base: Path, binary: Path) -> None:
        super().__init__(base)
        self.binary = binary
        self.mounted: list[int] = []

    @property
    def meta(self) -> str:
        return f"sqlite3://{self.base / 'meta.db'}"

    def start(self) -> None:
        folder = f"{self.base / 'folder'}/"
        run([self.binary, "format", "--storage", "file", "--bucket", folder, self.meta, "bench"])

    def mount(self) -> None:
        before = proc.running(self.binary)
        run(
            [
                self.binary,
                "mount",
                "--background",
                "--no-usage-report",
                "--log",
                self.base / "log",
                "--cache-dir",
                self.base / "cache",
                self.meta,
                self.root,
            ]
        )
        proc.await_true("mount of JuiceFS", lambda: os.path.ismount(self.root), 30)
        self.mounted = sorted(proc.running(self.binary) - before)

    def unmount(self) -> None:
        run([self.binary, "umount", self.root])
        proc.await_end(self.mounted, 60)
        self.mounted = []

    def daemons(self) -> list[int]:
        return self.mounted

    def stop(self) -> None:
        if self.binary.exists():  # else nothing was mounted: it could not be installed
            argv = [self.binary, "umount", "--force", self.root]
            subprocess.run(argv, check=False, timeout=60, capture_output=True)
        super().stop()
        try:
            proc.await_end(self.mounted, 10)
        except TimeoutError:
            for pid in self.mounted:
                subprocess.run(["kill", "-KILL", str(pid)], check=False)


class JuiceFsRedis(JuiceFs):
    """The same with the metadata in Redis, which appends to a file and syncs it each second."""

    name = "juicefs, Redis"

    def __init__(self, base: Path, binary: Path) -> None:
        super().__init__(base, binary)
        self.port = free_ports(1)[0]
        self.redis: subprocess.Popen[bytes] | None = None

    @property
    def meta(self) -> str:
        return f"redis://127.0.0.1:{self.port}/1"

    def start(self) -> None:
        found = shutil.which("redis-server")
        if found is None:
            raise Failed("redis-server is not installed")
        argv = [found, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", os.fspath(self.base)]
        log = (self.base / "redis.log").open("ab")
        self.redis = subprocess.Popen(
            [*argv, "--appendonly", "yes"], stdout=log, stderr=log, preexec_fn=die_with_parent
        )
        log.close()
        client = shutil.which("redis-cli") or "redis-cli"
        ping = [client, "-p", str(self.port), "ping"]
        proc.await_true(
            "redis-server",
            lambda: subprocess.run(ping, capture_output=True, check=False).stdout.strip() == b"PONG",
            20,
        )
        super().start()

    def servers(self) -> list[int]:
        return [self.redis.pid] if self.redis is not None else []

    def stop(self) -> None:
        super().stop()
        if self.redis is not None:
            stop(self.redis)


class Fsd(Peer):
    """fsd as it is installed: server on SQLite and a directory, a supervised mount. Another `endpoint` than
    the server's own is for a proxy in between."""

    name = "fsd"

    def __init__(self, base: Path, *, server: Server | None = None, endpoint: str | None = None) -> None:
        super().__init__(base)
        self.server = server or Server(self.base / "server")
        self.own_server = server is None
        self.endpoint = endpoint
        self.sandbox: Sandbox | None = None
        self.supervisor_peak = 0.0

    def start(self) -> None:
        if self.own_server:
            self.server.start()
        self.sandbox = Sandbox(
            self.base, self.server.create(), supervised=True, endpoint=self.endpoint or self.server.url
        )

    def box(self) -> Sandbox:
        assert self.sandbox is not None, "not started"
        return self.sandbox

    def mount(self) -> None:
        self.box().mount()

    def unmount(self) -> None:
        self.box().unmount(timeout=TIMEOUT)

    def settle(self) -> None:
        self.box().drain(timeout=TIMEOUT)

    def daemons(self) -> list[int]:
        return self.box().pids[-1:] if self.sandbox is not None else []

    def servers(self) -> list[int]:
        return [self.server.pid]

    def note_memory(self) -> None:
        super().note_memory()
        self.supervisor_peak = max(self.supervisor_peak, proc.memory(self.box().pids[:-1], "VmHWM"))

    def stop(self) -> None:
        if self.sandbox is not None:
            self.sandbox.close()
        if self.own_server:
            self.server.end()
