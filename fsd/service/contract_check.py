"""What the checkpoint contract accepts: ids, entries, artifacts, numbers. Pure; nothing here reads a store.

Values are what a JSON reader gives, so anything may be anything: a `bool` is no number, `5.0` is an integer
to JavaScript, lone surrogates arrive as ordinary strings. Messages show what was wrong in ASCII only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from fsd.model.errors import CheckpointInvalidEntry, CheckpointInvalidId, InvalidRange
from fsd.model.limits import CONTRACT_ID_MAX, SYMLINK_MAX
from fsd.model.trees import parents, stays_inside

JsonObject = dict[str, Any]
FILES: Final = "sandbox-files/sha256/"
ARTIFACTS: Final = "sandbox-artifacts/sha256/"
SAFE_MAX: Final = 2**53 - 1  # JavaScript's largest exact integer
_SHOWN: Final = 80

_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_SEGMENT: Final = "(?!\\.\\.?(?:/|\\Z))[^/\\\\\0\ud800-\udfff]+"
# No leading slash or drive, no empty segment, no `.` or `..`, no backslash, NUL or lone surrogate.
_PATH: Final = re.compile(f"(?![A-Za-z]:(?:/|\\Z)){_SEGMENT}(?:/{_SEGMENT})*")
_FILE_KEY: Final = re.compile("sandbox-files/sha256/[0-9a-f]{64}")
_ARTIFACT_KEY: Final = re.compile("sandbox-artifacts/sha256/[0-9a-f]{64}")


class Writer(NamedTuple):
    """Who says to hold a thread's lease. Where token or fence are none, `token` is empty or `fence` 0."""

    thread: str
    token: str
    fence: int


def shown(value: object) -> str:
    """`value` for a message: ASCII, cut."""
    text = ascii(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def check_id(value: object, what: str) -> str:
    """`value` if it is an id; raises `CheckpointInvalidId`."""
    if not isinstance(value, str):
        raise CheckpointInvalidId(f"{what} is no string")
    if not value:
        raise CheckpointInvalidId(f"{what} is empty")
    if _SURROGATE.search(value):
        raise CheckpointInvalidId(f"{what} {shown(value)} holds an unpaired surrogate")
    if len(value) > CONTRACT_ID_MAX // 4 and len(value.encode()) > CONTRACT_ID_MAX:
        raise CheckpointInvalidId(f"{what} is longer than {CONTRACT_ID_MAX} bytes")
    return value


def check_writer(value: object) -> Writer:
    """The writer in a body; raises `CheckpointInvalidId` for one without a good thread id."""
    if not isinstance(value, dict):
        raise CheckpointInvalidId("writer is no object with threadId, ownerToken and fence")
    thread = check_id(value.get("threadId"), "writer.threadId")
    token, fence = value.get("ownerToken"), integral(value.get("fence"))
    good = isinstance(token, str) and token.isascii()
    return Writer(thread, str(token) if good else "", fence or 0)


def finite(value: object) -> float | None:
    """A finite JSON number as a double, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def integral(value: object) -> int | None:
    """A whole number from 0 to 2^53-1 (`5.0` is one), None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if isinstance(value, float):
        if not value.is_integer():
            return None
        value = int(value)
    return value if 0 <= value <= SAFE_MAX else None


def check_created(value: object) -> float:
    """`createdAt` in ms; raises `CheckpointInvalidEntry`."""
    number = finite(value)
    if number is None:
        raise CheckpointInvalidEntry(f"createdAt is no finite number: {shown(value)}")
    return number


def check_keep(value: object) -> int:
    """How many checkpoints stay; raises `CheckpointInvalidEntry`."""
    number = integral(value)
    if not number:
        raise CheckpointInvalidEntry(f"keep is a whole number of 1 or more, not {shown(value)}")
    return number


def check_older(value: object) -> float:
    """`olderThanMs`; raises `InvalidRange`."""
    number = finite(value)
    if number is None or number < 0:
        raise InvalidRange(f"olderThanMs is a finite number of 0 or more, not {shown(value)}")
    return number


def check_files(value: object) -> list[JsonObject]:
    """The entries of a manifest; raises `CheckpointInvalidEntry`. Linear in their number."""
    entries = _objects(value, "files")
    paths: set[str] = set()
    solid: set[str] = set()  # what nothing may lie beneath
    for at, entry in enumerate(entries):
        path, kind = entry.get("path"), entry.get("kind")
        if not isinstance(path, str) or not _PATH.fullmatch(path):
            raise CheckpointInvalidEntry(f"files[{at}].path {shown(path)}: {_why(path)}")
        if path in paths:
            raise CheckpointInvalidEntry(f"files[{at}].path {shown(path)} is there twice")
        paths.add(path)
        if kind == "file":
            _check_file(entry, at)
            solid.add(path)
        elif kind == "dir":
            _no_bytes(entry, at)
        elif kind == "symlink":
            _no_bytes(entry, at)
            _check_target(path, entry.get("target"), at)
            solid.add(path)
        else:
            raise CheckpointInvalidEntry(f"files[{at}].kind is file, dir or symlink, not {shown(kind)}")
    beneath = parents(paths) & solid
    if beneath:
        raise CheckpointInvalidEntry(f"files: something lies beneath {shown(min(beneath))}, no directory")
    return entries


def _check_file(entry: JsonObject, at: int) -> None:
    key, size = entry.get("blobKey"), entry.get("size")
    if not isinstance(key, str) or not _FILE_KEY.fullmatch(key):
        raise CheckpointInvalidEntry(f"files[{at}].blobKey is no {FILES}<64 hex digits>: {shown(key)}")
    if integral(size) is None:
        raise CheckpointInvalidEntry(f"files[{at}].size is no whole number from 0 to 2^53-1: {shown(size)}")


def _no_bytes(entry: JsonObject, at: int) -> None:
    if "blobKey" in entry or "size" in entry:
        raise CheckpointInvalidEntry(f"files[{at}] is no file: it has neither blobKey nor size")


def _check_target(path: str, target: object, at: int) -> None:
    """A link that leaves the tree is refused here as a restore would refuse it."""
    where = f"files[{at}].target {shown(target)}"
    if not isinstance(target, str) or not target or "\0" in target or _SURROGATE.search(target):
        raise CheckpointInvalidEntry(f"{where} is no text of one character or more without NUL")
    if len(target.encode()) > SYMLINK_MAX:
        raise CheckpointInvalidEntry(f"{where} is longer than {SYMLINK_MAX} bytes")
    if not stays_inside(path, target):
        raise CheckpointInvalidEntry(f"{where} leaves the tree")


def is_path(text: str) -> bool:
    """Whether a manifest may hold the path."""
    return _PATH.fullmatch(text) is not None


def _why(path: object) -> str:
    if not isinstance(path, str) or not path:
        return "a path is a text of one character or more"
    if "\0" in path or "\\" in path:
        return "a path holds no NUL and no backslash"
    if _SURROGATE.search(path):
        return "a path holds no unpaired surrogate"
    if path.startswith("/") or re.match("[A-Za-z]:(?:/|\\Z)", path):
        return "a path is relative"
    return "a path has no empty segment, no '.' and no '..'"


def check_artifacts(value: object) -> list[JsonObject]:
    """The artifacts of a checkpoint; raises `CheckpointInvalidEntry`."""
    artifacts = _objects(value, "artifacts")
    for at, one in enumerate(artifacts):
        for name in ("artifactId", "name", "mimeType"):
            text = one.get(name)
            if not isinstance(text, str) or not text or _SURROGATE.search(text):
                raise CheckpointInvalidEntry(f"artifacts[{at}].{name} is no text: {shown(text)}")
        key = one.get("blobKey")
        if not isinstance(key, str) or not _ARTIFACT_KEY.fullmatch(key):
            raise CheckpointInvalidEntry(
                f"artifacts[{at}].blobKey is no {ARTIFACTS}<64 hex digits>: {shown(key)}"
            )
        if integral(one.get("size")) is None:
            raise CheckpointInvalidEntry(f"artifacts[{at}].size is no whole number from 0 to 2^53-1")
        if finite(one.get("createdAt")) is None:
            raise CheckpointInvalidEntry(f"artifacts[{at}].createdAt is no finite number")
    return artifacts


def _objects(value: object, what: str) -> list[JsonObject]:
    if not isinstance(value, list):
        raise CheckpointInvalidEntry(f"{what} is no array")
    for at, one in enumerate(value):
        if not isinstance(one, dict):
            raise CheckpointInvalidEntry(f"{what}[{at}] is no object")
    return value


def keys_of(files: Sequence[JsonObject], artifacts: Sequence[JsonObject]) -> list[bytes]:
    """The distinct names a checkpoint counts, in order."""
    made = {name_of(entry["blobKey"]) for entry in files if entry["kind"] == "file"}
    made.update(name_of(one["blobKey"]) for one in artifacts)
    return sorted(made)


def name_of(key: str) -> bytes:
    """The stored form of a good key: 33 bytes that sort as the text does."""
    if key.startswith(FILES):
        return b"\x01" + bytes.fromhex(key[len(FILES) :])
    return b"\x00" + bytes.fromhex(key[len(ARTIFACTS) :])


def key_text(name: bytes) -> str:
    """The key whose stored form `name` is."""
    return (FILES if name[0] == 1 else ARTIFACTS) + name[1:].hex()


def is_key(text: str) -> bool:
    return _FILE_KEY.fullmatch(text) is not None or _ARTIFACT_KEY.fullmatch(text) is not None
