"""The example at the end of every command's --help is run as it stands; only places and ids are put in."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cli import ROWS
from support.leftovers import clear_records, fsd_mounts
from support.server import Server, TestFs

from fsd.cli.table import Command

PLACEHOLDER_FS = "fs_aaaaaaaaaaaaaaaaaaaa"
PLACEHOLDER_FORK = "fs_bbbbbbbbbbbbbbbbbbbb"
PLACEHOLDER_CHECKPOINT = "cp_0123456789abcdefghjk"
LAYER = "fsd fs create-layer --base-root-path / --layer-name try-1"
# What needs a live mount at the example's place first; and what no example shows alone.
MOUNTED = ("drain", "unmount", "wait", "wait-exit", "status")
ENDLESS = ("serve", "journal follow")
FILES = {
    "/tasks/task-42/plan.md": b"# Plan\n",
    "/tasks/task-42/Makefile": b"test:\n\techo tested > result\n",
    "/tasks/draft.md": b"draft\n",
    "/tasks/task-41/old": b"old\n",
    "/tasks/a": b"a\n",
}
JOURNAL = {"journal_id": "task-42", "title": "task 42", "actor": "agent:worker-1"}
EXAMPLES = [row for row in ROWS.rows if not row.refuse and row.handler]


def _name(row: Command) -> str:
    return " ".join(row.short or row.long)


class World:
    """A server with a filesystem as the examples suppose it, and a shell in a directory with plan.md."""

    def __init__(self, server: Server, base: Path) -> None:
        self.server, self.base = server, base
        self.fs: TestFs = server.create(labels={"team": "a"})
        for path, data in FILES.items():
            assert self.fs.ask("PUT", f"/files{path}?parents=1", data).status == 200
        entries = {"entries": [{"type": "task.checkpoint", "step": "begun"}]}
        assert self.fs.ask("POST", "/journals", JOURNAL).status == 201
        assert self.fs.ask("POST", "/journals/task-42/entries", entries).status == 200
        assert self.fs.ask("PUT", "/files/tasks/plan.md", b"# All\n").status == 200
        kept = self.fs.ask("POST", "/checkpoints", {"label": "begun"})
        assert kept.status == 201
        gone = {"action": "remove", "path": "/tasks/plan.md"}
        assert self.fs.ask("POST", "/actions", gone).status == 200
        self.checkpoint: str = kept.json["checkpoint_id"]
        made = server.admin("POST", f"/v1/file-systems/{self.fs.id}/tokens", {})
        self.token_id: str = made.json["token_id"]
        self.fork = PLACEHOLDER_FORK
        self.mount = base / "mnt"
        self.shown = base / "before"
        for directory in (self.mount, self.shown, base / "work", base / "run", base / "home"):
            directory.mkdir()
        (base / "plan.md").write_bytes(b"# Plan\n")
        (base / "Makefile").write_text("deploy:\n\techo deployed\n")
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(base / "home"),
            "XDG_RUNTIME_DIR": str(base / "run"),
            "FSD_ENDPOINT": server.url,
            "FSD_ADMIN_KEY": server.admin_key,
            **self.fs.env,
        }

    def shell(self, line: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        for name, value in (
            (PLACEHOLDER_FS, self.fs.id),
            ("TOKEN-ID", self.token_id),
            (PLACEHOLDER_CHECKPOINT, self.checkpoint),
            (PLACEHOLDER_FORK, self.fork),
            ("/mnt/before", str(self.shown)),
            ("/mnt/work", str(self.mount)),
            ("/var/lib/fsd", str(self.server.data_dir)),
            ("--seq 17", "--seq 1"),
        ):
            line = line.replace(name, value)
        fsd = f'fsd() {{ {shlex.quote(sys.executable)} -m fsd "$@"; }}\n'
        return subprocess.run(
            ["bash", "-euc", fsd + line],
            cwd=self.base,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def close(self) -> None:
        for path in fsd_mounts(self.base):
            self.shell(f"fsd unmount {shlex.quote(os.fspath(path))} --lazy", 30)
        clear_records(self.base)


@pytest.fixture
def world(shared_server: Server, tmp_path: Path) -> Iterator[World]:
    made = World(shared_server, tmp_path)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.kernel
@pytest.mark.timeout(240)
@pytest.mark.parametrize("row", [r for r in EXAMPLES if _name(r) not in (*ENDLESS, "audit")], ids=_name)
def test_the_example_works(world: World, row: Command) -> None:
    name = _name(row)
    if name in MOUNTED:
        done = world.shell("fsd mount /mnt/work && (cd /mnt/work && echo x > x && sync -f x)")
        assert done.returncode == 0, done.stderr
    if name == "recover":
        done = world.shell("fsd mount /mnt/work && fsd unmount /mnt/work")
        assert done.returncode == 0, done.stderr
    before = {
        "undelete": ["fsd rm /tasks/task-42/plan.md"],
        "merge": ["fsd fork --display-name try-2"],
        "fs list-layer-chain": ["fsd fs fork-layer --parent-layer-ref try-1 --layer-id try-1b"],
    }.get(name, [])
    if name.endswith(("-layer", "-layer-chain", "-layer-checkpoint")) and name != "fs create-layer":
        before.insert(0, LAYER)
    for line in before:
        done = world.shell(line)
        assert done.returncode == 0, done.stderr
        if name == "merge":
            world.fork = json.loads(done.stdout)["file_system_id"]
    for line in [*row.example.splitlines(), *row.long_example.splitlines()]:
        done = world.shell(line)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr


def test_following_shows_what_is_there_and_goes_on(world: World) -> None:
    (row,) = [r for r in EXAMPLES if _name(r) == "journal follow"]
    follower = subprocess.Popen(
        [sys.executable, "-m", "fsd", *shlex.split(row.example)[1:]],
        env=world.env,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert follower.stdout is not None
        assert "begun" in follower.stdout.readline()
        done = world.shell("""fsd journal append task-42 --entry-json '{"type":"t","step":"more"}'""")
        assert done.returncode == 0, done.stderr
        assert "more" in follower.stdout.readline()
        follower.send_signal(signal.SIGINT)
        assert follower.wait(60) == 130
    finally:
        follower.kill()
        follower.wait(60)


def test_serving_and_audit(server: Server, tmp_path: Path) -> None:
    """`serve` as its example, on another port; `audit` of what it stored, once it has stopped."""
    (serve,) = [r for r in EXAMPLES if _name(r) == "serve"]
    assert shlex.split(serve.example)[1:3] == ["serve", "--data-dir"]
    world = World(server, tmp_path)
    (audit,) = [r for r in EXAMPLES if _name(r) == "audit"]
    done = world.shell(audit.example)
    assert done.returncode == 7, "a running server holds its data directory"
    assert server.stop() == 0
    done = world.shell(audit.example)
    assert done.returncode == 0, done.stdout + done.stderr
