"""`fsd bench` of a mount and of a plain directory: it measures, checks what it reads, and leaves nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.cli import process
from support.sandbox import sandbox
from support.server import TestFs, clean_env

SMALL = ["--files", "20", "--size", "3M"]


def test_a_plain_directory(tmp_path: Path) -> None:
    done = process("bench", os.fspath(tmp_path), *SMALL, "--output", "json", env=clean_env())
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["path"] == os.fspath(tmp_path)
    assert all(one["value"] > 0 for one in told["figures"].values())
    assert {"us", "ms", "MiB/s"} == {one["unit"] for one in told["figures"].values()}
    assert not list(tmp_path.iterdir())


def test_a_place_that_is_not_there_is_said(tmp_path: Path) -> None:
    done = process("bench", os.fspath(tmp_path / "no"), env=clean_env())
    assert done.code != 0
    assert "no" in done.err


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    done = process("bench", os.fspath(tmp_path), "--dry-run", "--output", "json", env=clean_env())
    assert done.code == 0, done.err
    assert json.loads(done.out)["dry_run"] is True
    assert not list(tmp_path.iterdir())


@pytest.mark.kernel
def test_a_mount(tmp_path_factory: pytest.TempPathFactory, shared_fs: TestFs) -> None:
    with sandbox(tmp_path_factory.mktemp("b"), shared_fs) as box:
        done = box.fsd("bench", os.fspath(box.mountpoint), *SMALL, "--output", "text")
        assert "fsync of a small file, median" in done.stdout
        assert not os.listdir(box.mountpoint)
        box.unmount()
