"""The contract's `files` of a native checkpoint: made when asked for, with a name for every content.

A file of one block that is one whole blob is named by that blob's hash; any other is read and hashed once,
which a bounded memory keeps (its blocks decide its bytes). Names are rows as if the bytes had been uploaded
(`fsd.service.names`): young, counted by no checkpoint until one is appended that lists them.

What a manifest cannot say is refused with the path: names that are not UTF-8 or that its rules forbid,
devices, fifos and sockets, symlinks out of the tree, files larger than a blob can be.
"""

from __future__ import annotations

import hashlib
import stat
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from fsd.host.seam import Host
from fsd.meta.database import Database, Tx
from fsd.meta.sql import chunks, in_list
from fsd.model import blocks
from fsd.model.attrs import Attr
from fsd.model.blocks import Parts
from fsd.model.errors import Conflict, InvalidPath, UnsupportedEntry
from fsd.model.limits import BLOCK, CONTRACT_BLOB_MAX, RENDER_HASHES, RENDER_HOLES_MAX, RENDER_NAMES
from fsd.model.names import show
from fsd.model.trees import stays_inside
from fsd.service import names
from fsd.service.access import FsRef, hold_tree
from fsd.service.contract_check import FILES, JsonObject, is_path, name_of
from fsd.service.packs import Packs
from fsd.service.retained import At, State, state_of, still
from fsd.service.tree import block_parts, resolve, walk
from fsd.service.upload import Reading

_ALL: Final = 2**31


class _File(NamedTuple):
    """A regular file: `parts` its blocks in order, `digest` its SHA-256, None: to be read."""

    path: str
    attr: Attr
    parts: tuple[Parts, ...]
    digest: bytes | None


class Renderer:
    """Any thread; blocks."""

    def __init__(self, db: Database, packs: Packs, host: Host) -> None:
        self._db, self._packs, self._host = db, packs, host
        self._mutex = threading.Lock()
        self._hashed: OrderedDict[bytes, bytes] = OrderedDict()  # digest of blocks → SHA-256 of the bytes

    def render(self, fs: FsRef, at: At) -> list[JsonObject]:
        """The entries of a retained state, sorted by path bytes. Raises `NotFound` when it goes meanwhile,
        `InvalidPath`, `UnsupportedEntry`."""
        state, entries, files = self._db.read(lambda tx: self._collect(tx, fs, at))
        named = [
            one if one.digest is not None else one._replace(digest=self._hash(fs, state, one))
            for one in files
        ]
        for some in chunks(named, RENDER_NAMES):
            self._db.write(lambda tx, s=some: self._name(tx, fs, at, s))  # type: ignore[misc]
        for file in named:
            assert file.digest is not None, "all were hashed"
            entries.append(
                {
                    "path": file.path,
                    "kind": "file",
                    "blobKey": FILES + file.digest.hex(),
                    "size": file.attr.size,
                    "mode": stat.S_IMODE(file.attr.mode),
                    "mtimeNs": file.attr.mtime,
                }
            )
        return sorted(entries, key=lambda entry: str(entry["path"]))

    def _collect(self, tx: Tx, fs: FsRef, at: At) -> tuple[State, list[JsonObject], list[_File]]:
        """Everything of the state: entries that are no files, and the files."""
        state = state_of(tx, fs, at)
        top = resolve(tx, state.fs, (), at=state.at).need()
        entries: list[JsonObject] = []
        directories: dict[str, bool] = {}  # path → whether it is empty
        found: list[tuple[str, Attr, tuple[Parts, ...]]] = []
        holes = 0
        for raw, attr in walk(tx, state.fs, top, b"", _ALL, state.at):
            path = _path(raw)
            above = path.rpartition("/")[0]
            if above:
                directories[above] = False
            if attr.is_dir:
                directories[path] = True
            elif attr.is_file:
                _check_size(path, attr)
                held = block_parts(tx, state.fs, attr, 0, attr.blocks, state.at)
                holes += (attr.blocks - len(held)) * BLOCK
                if holes > RENDER_HOLES_MAX:
                    raise _too_much(
                        f"/{path} and other sparse files have over {RENDER_HOLES_MAX} bytes of holes"
                    )
                found.append((path, attr, tuple(held.get(i, blocks.HOLE) for i in range(attr.blocks))))
            else:
                entries.append(_other(path, attr))
        entries += [{"path": path, "kind": "dir"} for path, empty in directories.items() if empty]
        lengths = _lengths(tx, state.fs, {parts[0][0].hash for _, _, parts in found if _is_one(parts)})
        return state, entries, [_File(*one, _whole(one[1], one[2], lengths)) for one in found]

    def _hash(self, fs: FsRef, state: State, file: _File) -> bytes:
        """SHA-256 of the file's bytes."""
        key = hashlib.sha256(b"%d:" % file.attr.size + names.pack_parts(file.parts)).digest()
        with self._mutex:
            known = self._hashed.get(key)
        if known is not None:
            return known

        def read(tx: Tx) -> Reading:
            now = still(tx, fs, state)
            return Reading.open(tx, self._db, self._packs, fs, now, file.attr, 0, file.attr.size)

        reading = self._db.read(read)
        made = hashlib.sha256()
        while piece := reading.next_piece():
            made.update(piece)
        with self._mutex:
            self._hashed[key] = made.digest()
            while len(self._hashed) > RENDER_HASHES:
                self._hashed.popitem(last=False)
        return made.digest()

    def _name(self, tx: Tx, fs: FsRef, at: At, files: Sequence[_File]) -> None:
        """Give the contents of `files` their names."""
        hold_tree(tx, fs)
        state_of(tx, fs, at)
        now = self._host.wall_ns()
        wanted: set[bytes] = set()
        lost = self._packs.missing(tx, fs.id, wanted.union(*(names.hashes_of(file.parts) for file in files)))
        if lost:
            raise Conflict("content of the checkpoint is not stored", hint="run fsd audit")
        made = {file.digest: file for file in files if file.digest is not None}
        for digest, file in sorted(made.items()):
            name = name_of(FILES + digest.hex())
            names.insert(tx, self._packs, fs, name, file.attr.size, file.parts, now)


def _check_size(path: str, attr: Attr) -> None:
    """Raises `UnsupportedEntry` for what no blob can be. A hole is hashed like bytes: without a bound one
    `truncate -s 16T` would keep a thread busy for hours."""
    if attr.size > CONTRACT_BLOB_MAX:
        raise _too_much(f"/{path} has {attr.size} bytes, a blob of a manifest at most {CONTRACT_BLOB_MAX}")


def _too_much(message: str) -> UnsupportedEntry:
    return UnsupportedEntry(
        message, hint="as a native checkpoint it is kept, and fsd checkpoint export has it"
    )


def _is_one(parts: tuple[Parts, ...]) -> bool:
    return len(parts) == 1 and len(parts[0]) == 1


def _whole(attr: Attr, parts: tuple[Parts, ...], lengths: dict[bytes, int]) -> bytes | None:
    """The SHA-256 of a file's bytes where its rows say it."""
    if not attr.size:
        return hashlib.sha256().digest()
    if not _is_one(parts):
        return None
    ((one,),) = parts
    whole = one.off == one.boff == 0 and one.length == attr.size == lengths.get(one.hash)
    return one.hash if whole else None


def _lengths(tx: Tx, fs: int, digests: set[bytes]) -> dict[bytes, int]:
    found: dict[bytes, int] = {}
    for some in chunks(sorted(digests)):
        marks, values = in_list(some)
        rows: list[tuple[Any, ...]] = tx.all(
            f"SELECT hash, raw_len FROM blob WHERE fs=? AND hash IN {marks}", (fs, *values)
        )
        found.update((digest, int(length)) for digest, length in rows)
    return found


def _path(raw: bytes) -> str:
    try:
        path = raw.decode()
    except UnicodeDecodeError as exc:
        raise InvalidPath(
            f"/{show(raw)} is not UTF-8, so no manifest can name it",
            hint="rename it; as a native checkpoint it is kept, and fsd checkpoint export has it",
        ) from exc
    if not is_path(path):
        raise InvalidPath(
            f"/{show(raw)} is no path that a manifest can hold (a backslash, or a drive letter)",
            hint="rename it; as a native checkpoint it is kept, and fsd checkpoint export has it",
        )
    return path


def _other(path: str, attr: Attr) -> JsonObject:
    """The entry of a symlink; nothing else that is neither file nor directory has one."""
    if not stat.S_ISLNK(attr.mode):
        raise UnsupportedEntry(f"/{path} is a device, fifo or socket, which no manifest can hold")
    raw = attr.target or b""
    try:
        target = raw.decode()
    except UnicodeDecodeError as exc:
        raise InvalidPath(f"/{path} leads to {show(raw)}, which is not UTF-8") from exc
    if not stays_inside(path, target):
        raise UnsupportedEntry(f"the symlink /{path} leads out of the tree, to {show(raw)}")
    return {"path": path, "kind": "symlink", "target": target}
