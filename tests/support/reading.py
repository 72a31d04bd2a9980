"""The committed tree as the server has it, read over the wire without a mount; and the server's own audit."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from fsd.host.seam import Host
from fsd.meta.database import open_database
from fsd.model.attrs import ROOT_INO, Attr, Entry
from fsd.model.blocks import pieces
from fsd.model.errors import Unavailable
from fsd.model.limits import BLOCK, FULL_LIST_BLOCKS
from fsd.model.token import parse
from fsd.remote.hot import HttpRemote, RemoteOptions
from fsd.service.access import FsRef
from fsd.service.audit import audit
from fsd.wire.frame import open_blob
from fsd.wire.messages import BLOCKS, LIST
from support.recording import Found, Value
from support.server import Server

TIMEOUT = 60.0
SILENCES = 6  # of a server on a busy machine: each is waited for twice as long as the one before
T = TypeVar("T")


def remote_for(token: str, url: str | None = None) -> HttpRemote:
    """A client of the filesystem that `token` names; `url` where the token's own endpoint is not meant."""
    parsed = parse(token)
    endpoint = url or next(iter(parsed.regions.values()))
    return HttpRemote(RemoteOptions(endpoint, parsed), Host())


def committed_tree(token: str, url: str | None = None) -> Found:
    """Path → value of everything committed, content verified against its hashes."""
    remote = remote_for(token, url)
    found: Found = {}
    try:
        _walk(remote, ROOT_INO, "", found)
    finally:
        remote.close()
    return found


def _patiently(ask: Callable[[], T]) -> T:
    """What `ask` returns, asked again after a silence as a mount does."""
    for _ in range(SILENCES):
        try:
            return ask()
        except Unavailable as exc:
            silence = exc
    raise silence


def _walk(remote: HttpRemote, ino: int, prefix: str, found: Found) -> None:
    for entry in _listing(remote, ino):
        path = prefix + os.fsdecode(entry.name)
        attr = entry.attr
        mode = attr.mode & 0o7777
        if stat.S_ISDIR(attr.mode):
            found[path] = Value("d", mode, hashlib.sha256(b"").hexdigest())
            _walk(remote, attr.ino, path + "/", found)
        elif stat.S_ISLNK(attr.mode):
            assert attr.target is not None
            found[path] = Value("l", 0o777, os.fsdecode(attr.target))
        else:
            found[path] = Value("f", mode, hashlib.sha256(_content(remote, attr)).hexdigest())


def _listing(remote: HttpRemote, ino: int) -> list[Entry]:
    entries: list[Entry] = []
    after, more = b"", True
    while more:
        question = (LIST, ino, after, 1000)
        _, answers = _patiently(lambda: remote.ask([question], TIMEOUT))  # noqa: B023
        page, more = answers[0]
        entries += page
        after = page[-1].name if page else b""
    return entries


def _content(remote: HttpRemote, attr: Attr) -> bytes:
    blocks = {0: attr.first_block()}
    for first in range(1, attr.blocks, FULL_LIST_BLOCKS):
        question = (BLOCKS, attr.ino, first, FULL_LIST_BLOCKS)
        _, answers = _patiently(lambda: remote.ask([question], TIMEOUT))  # noqa: B023
        blocks.update(answers[0][1])
    data = bytearray(attr.size)
    for index, parts in blocks.items():
        hashes = {part.hash for part in parts}
        got, absent = _patiently(lambda: remote.blobs(list(hashes), TIMEOUT)) if hashes else ([], [])  # noqa: B023
        assert not absent, f"inode {attr.ino} names blobs that are not stored"
        opened = {blob.hash: open_blob(blob) for blob in got}
        length = min(BLOCK, attr.size - index * BLOCK)
        for piece in pieces(parts, 0, max(0, length)):
            at = index * BLOCK + piece.at
            data[at : at + piece.length] = opened[piece.hash][piece.boff : piece.boff + piece.length]
    return bytes(data)


def audit_all(data_dir: Path) -> list[Any]:
    """Findings of the audit over every filesystem of a stopped server (SQLite)."""
    database = open_database(data_dir, Host())
    try:
        rows = database.read(lambda tx: tx.all("SELECT id, name FROM fs WHERE status = 'active' ORDER BY id"))
        return [(name, finding) for number, name in rows for finding in audit(database, FsRef(number, name))]
    finally:
        database.close()


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The trusted side of a module's tests; at the end every filesystem on it is audited."""
    made = Server(tmp_path_factory.mktemp("trusted"))
    try:
        yield made.start()
        made.stop()
        assert not audit_all(made.data_dir)
    finally:
        made.end()
