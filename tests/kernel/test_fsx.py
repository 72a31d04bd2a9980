"""Content of files on a mount against a model: random operations in five modes, with remounts and kills."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fsx import MODES, PLAIN, Fsx, Mode
from support.sandbox import Sandbox
from support.server import Server

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(240)]


class Places:
    """Sandboxes of one filesystem, one mounted at a time, and the files checked in it."""

    def __init__(self, server: Server, base: Path) -> None:
        self.fs, self.base = server.create(), base
        self.box = Sandbox(base / "b0", self.fs)
        self.files: list[Fsx] = []
        self.number = 0
        self.box.mount()

    def file(self, name: str, seed: int, mode: Mode) -> Fsx:
        made = Fsx(self.box.mountpoint / name, seed, mode)
        self.files.append(made)
        return made

    def _open_all(self) -> None:
        for file in self.files:
            file.open(self.box.mountpoint / file.path.name)

    def elsewhere(self) -> None:
        """Unmount, delete the sandbox, mount in another one."""
        for file in self.files:
            file.close()
        self.box.unmount()
        self.box.lose()
        self.box.close()
        self.number += 1
        self.box = Sandbox(self.base / f"b{self.number}", self.fs)
        self.box.mount()
        self._open_all()

    def killed(self) -> None:
        """SIGKILL of the daemon while the files are open; the same place again."""
        self.box.kill()
        for file in self.files:
            file.close_broken()
        self.box.detach()
        self.box.mount()
        self._open_all()

    def close(self) -> None:
        self.box.close()


@pytest.fixture
def places(shared_server: Server, tmp_path: Path) -> Iterator[Places]:
    made = Places(shared_server, tmp_path)
    yield made
    made.close()


def test_five_modes(places: Places, seed: int) -> None:
    """All modes at once, a file each; between them another sandbox, a killed daemon, another sandbox."""
    files = [places.file(mode.name, seed, mode) for mode in MODES]
    for change in (places.elsewhere, places.killed, places.elsewhere):
        for _ in range(60):
            for file in files:
                file.step()
        change()
    for file in files:
        file.check()


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_many_operations(places: Places, mode: Mode, seed: int) -> None:
    """Thousands in one mode."""
    file = places.file(mode.name, seed, mode)
    for turn in range(8):
        for _ in range(25):
            file.step(50)
            file.check()
        (places.killed if turn % 2 else places.elsewhere)()
    file.check()


def test_the_checker_sees_what_is_wrong(tmp_path: Path) -> None:
    """One byte, one size, changed behind its back: each is found. And a local file has nothing wrong."""
    for mode in (PLAIN, MODES[1], MODES[3]):
        file = Fsx(tmp_path / mode.name, 1, mode)
        file.step(150)
        file.check()
        os.truncate(file.path, len(file.model) + 1)
        with pytest.raises(AssertionError, match="expected"):
            file.check()
        os.truncate(file.path, len(file.model))
        file.check()
        with open(file.path, "r+b") as wrong:
            first = wrong.read(1)
            wrong.seek(0)
            wrong.write(bytes([first[0] ^ 1]))
        with pytest.raises(AssertionError, match="byte 0 differs"):
            file.check()
        file.close()
