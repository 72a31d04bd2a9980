"""Work in one sandbox, looked at again in another; and shell scripts of tools."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.sandbox import Sandbox
from support.server import Server


class Twice:
    """Work in one sandbox, then `again` in another at another path, the first being lost."""

    def __init__(self, server: Server, base: Path) -> None:
        fs = server.create()
        self.boxes = [Sandbox(base / name, fs) for name in ("first", "second")]
        self.boxes[0].mount()

    @property
    def top(self) -> Path:
        return self.boxes[0].mountpoint

    def again(self) -> Path:
        answer = self.boxes[0].unmount(timeout=300)
        assert answer["pending"] == {"operations": 0, "files": 0, "bytes": 0}
        self.boxes[0].lose()
        self.boxes[1].mount()
        return self.boxes[1].mountpoint

    def close(self) -> None:
        for box in self.boxes:
            box.close()


@pytest.fixture
def twice(trusted: Server, tmp_path: Path) -> Iterator[Twice]:
    made = Twice(trusted, tmp_path)
    try:
        yield made
    finally:
        made.close()


# `silent COMMAND…` for scripts: it says nothing, and does not fail, as `test -z "$(COMMAND)"` lets it.
SILENT = 'silent() { local told; told=$("$@"); test -z "$told"; }; '


def sh(directory: Path, script: str, *argv: object, timeout: float = 90) -> str:
    """`script` in `directory` with `argv` as $1 and so on; fails with what it said."""
    done = subprocess.run(
        ["bash", "-euc", SILENT + script, "-", *map(str, argv)],
        cwd=directory,
        env={**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"{script}\n{done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout.strip()


GIT = "git -c user.name=n -c user.email=e@example.org -c init.defaultBranch=main -c safe.directory='*'"
