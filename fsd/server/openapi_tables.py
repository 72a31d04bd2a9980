"""What each route takes and gives beyond its path, and the shapes of the answers: the tables `openapi.py`
makes its document of. A test compares them with the running server.
"""

from __future__ import annotations

from typing import Final

from fsd.model.plain import dataclass, field
from fsd.wire.messages import MEDIA_TYPE

OCTETS: Final = "application/octet-stream"


@dataclass(frozen=True, slots=True)
class Says:
    """What a route takes and gives. `query`: name → JSON type; `body`: field → JSON type, or a media type;
    `gives`: status → schema name or media type. `needs`: admin, token, either or none."""

    needs: str
    gives: dict[int, str]
    query: dict[str, str] = field(default_factory=dict)
    body: dict[str, str] | str | None = None
    headers: tuple[str, ...] = ()


_FS: Final = "/v1/file-systems"
_NEW_FS: Final = {
    "display_name": "string",
    "labels": "object",
    "lease_duration_ms": "number",
    "renew_after_ms": "number",
}
_ID: Final = _FS + "/{id}"
_LIMITED: Final = {"limit": "integer", "cursor": "string"}
_WITH_FORKS: Final = {"cascade": "integer", "detach": "integer"}
_JOURNAL: Final = {
    "journal_id": "string",
    "kind": "string",
    "title": "string",
    "actor": "string",
    "labels": "array",
}
_SWEEP: Final = {
    "file_system_id": "string",
    "older_than_ms": "integer",
    "dry_run": "boolean",
    "vacuum": "boolean",
    "cursor": "string",
}
_APPEND: Final = {
    "entries": "array",
    "idempotency_key": "string",
    "expected_seq": "integer",
    "barrier": "boolean",
}
_PUT: Final = {
    "parents": "integer",
    "mode": "string",
    "uid": "integer",
    "gid": "integer",
    "mtime_ns": "integer",
    "overwrite": "integer",
    "append": "integer",
    "size": "integer",
    "data": "string",
}
_FIND: Final = {
    "name": "string",
    "type": "string",
    "min_size": "integer",
    "max_size": "integer",
    "newer_ns": "integer",
    "older_ns": "integer",
    "tag": "string",
    "limit": "integer",
    "after": "string",
}
_AT: Final = {"checkpoint": "string", "at_journal": "string", "fs_seq": "integer"}
_SESSION: Final = {
    "mount_id": "string",
    "host": "string",
    "path": "string",
    "remote_path": "string",
    "read_only": "boolean",
    "version": "string",
    "exclusive": "object",
}

# Method of the checkpoint contract → fields of its body.
_WRITER: Final = {"writer": "object"}
_OF_THREAD: Final = {"threadId": "string"}
_CONTRACT: Final[dict[str, dict[str, str]]] = {
    "append": {"checkpoint": "object", "expectedHeadId": "?string", **_WRITER},
    "deleteHead": {**_OF_THREAD, "checkpointId": "string", **_WRITER},
    "deleteCheckpoints": {**_OF_THREAD, "keep": "integer", **_WRITER},
    "forkFromCheckpoint": {
        "sourceThreadId": "string",
        "sourceCheckpointId": "string",
        "destinationThreadId": "string",
        "destinationCheckpointId": "string",
        "createdAt": "number",
        **_WRITER,
    },
    "acquireWriter": _OF_THREAD,
    "renew": _WRITER,
    "release": _WRITER,
    "get": {"id": "string", "portable": "boolean"},
    "list": {**_OF_THREAD, "render": "boolean", "portable": "boolean"},
    "getHead": _OF_THREAD,
    "listBlobReferences": {},
    "missingBlobs": {"id": "string"},
    "loadThread": _OF_THREAD,
    "saveThread": {**_OF_THREAD, "messages": "array"},
    "instances.get": {"key": "string"},
    "instances.upsert": {"record": "object"},
    "instances.delete": {"key": "string"},
    "sweep": {"olderThanMs": "number"},
}
_SHOWING: Final[dict[str, dict[str, str]]] = {
    "get": {"portable": "integer"},
    "list": {"render": "integer", "portable": "integer"},
}
_BLOB: Final = "/v1/blobs/{key}"

SAYS: Final[dict[tuple[str, str], Says]] = {
    ("GET", "/healthz"): Says("none", {200: "Status"}),
    ("GET", "/readyz"): Says("none", {200: "Status"}),
    ("GET", "/metrics"): Says("none", {200: "text/plain"}),
    ("GET", "/openapi.json"): Says("none", {200: "Object"}),
    ("POST", _FS): Says("admin", {201: "CreatedFileSystem"}, body=_NEW_FS),
    ("POST", "/v1/sweep"): Says("admin", {200: "Swept"}, body=_SWEEP),
    ("GET", _FS): Says(
        "admin", {200: "FileSystems"}, {"display_name": "string", "label": "string", **_LIMITED}
    ),
    ("GET", _ID): Says("either", {200: "FileSystem"}, {"chain": "integer"}),
    ("GET", _ID + "/check"): Says("either", {200: "Check"}),
    ("DELETE", _ID): Says("admin", {200: "Deleting"}, _WITH_FORKS),
    ("POST", _ID + "/forks"): Says(
        "either",
        {201: "Fork"},
        body={
            "display_name": "string",
            "labels": "object",
            "checkpoint": "string",
            "of": "string",
            "layer": "object",
        },
    ),
    ("GET", _ID + "/forks"): Says("either", {200: "Forks"}, {"all": "integer", **_LIMITED}),
    ("DELETE", _ID + "/forks/{fork}"): Says("either", {200: "Deleting"}, _WITH_FORKS),
    ("GET", _ID + "/forks/{fork}/changes"): Says("either", {200: "ForkChanges"}, {"limit": "integer"}),
    ("POST", _ID + "/forks/{fork}/rollback"): Says("either", {200: "RolledBack"}, body={"force": "boolean"}),
    ("POST", _ID + "/forks/{fork}/checkpoints"): Says(
        "either",
        {201: "Object"},
        body={"label": "string", "reason": "string", "expires_in_s": "number", "not_flushed": "array"},
    ),
    ("POST", _ID + "/merges"): Says(
        "either",
        {200: "Merge"},
        body={"fork": "string", "dry_run": "boolean", "ours": "array", "theirs": "array"},
    ),
    ("POST", _ID + "/tokens"): Says(
        "admin", {201: "CreatedToken"}, body={"token_name": "string", "ttl_s": "integer"}
    ),
    ("GET", _ID + "/tokens"): Says(
        "admin",
        {200: "Tokens"},
        {"include_expired": "integer", "offset": "integer", "limit": "integer"},
    ),
    ("POST", _ID + "/tokens/{tid}/disable"): Says("admin", {200: "TokenStatus"}),
    ("POST", _ID + "/tokens/{tid}/enable"): Says("admin", {200: "TokenStatus"}),
    ("DELETE", _ID + "/tokens/{tid}"): Says("admin", {200: "TokenStatus"}),
    ("POST", _ID + "/journals"): Says("token", {200: "Journal", 201: "Journal"}, body=_JOURNAL),
    ("GET", _ID + "/journals"): Says(
        "token", {200: "Journals"}, {"kind": "string", "label": "string", **_LIMITED}
    ),
    ("GET", _ID + "/journals/{jid}"): Says("token", {200: "Journal"}),
    ("POST", _ID + "/journals/{jid}/entries"): Says("token", {200: "Appended"}, body=_APPEND),
    ("GET", _ID + "/journals/{jid}/entries"): Says(
        "token", {200: "Entries"}, {"after_seq": "integer", "limit": "integer", "wait": "number"}
    ),
    ("GET", _ID + "/journals/{jid}/verify"): Says("token", {200: "Verified"}, {"head_hash": "string"}),
    ("GET", _ID + "/journal-entries"): Says(
        "token",
        {200: "Matches"},
        {
            "type": "string",
            "status": "string",
            "actor": "string",
            "subject": "string",
            "journal_id": "string",
            "kind": "string",
            "label": "string",
            "since": "string",
            "until": "string",
            **_LIMITED,
        },
    ),
    ("GET", _ID + "/stat/{path}"): Says("token", {200: "Stat"}, {"follow": "integer", **_AT}),
    ("GET", _ID + "/files/{path}"): Says(
        "token", {200: OCTETS, 206: OCTETS}, {"holes": "integer", **_AT}, headers=("Range", "If-Match")
    ),
    ("PUT", _ID + "/files/{path}"): Says(
        "token", {200: "Stat"}, _PUT, OCTETS, headers=("If-Match", "If-None-Match")
    ),
    ("GET", _ID + "/list/{path}"): Says(
        "token", {200: "Object"}, {"limit": "integer", "after": "string", "recursive": "integer", **_AT}
    ),
    ("POST", _ID + "/actions"): Says(
        "token", {200: "Object"}, body={"action": "string", "dry_run": "boolean"}
    ),
    ("GET", _ID + "/find/{path}"): Says("token", {200: "Object"}, {**_FIND, **_AT}),
    ("POST", _ID + "/checkpoints"): Says(
        "token",
        {201: "NativeCheckpoint"},
        body={
            "label": "string",
            "reason": "string",
            "expires_in_s": "number",
            "not_flushed": "array",
            "drain": "object",
            "require_all": "boolean",
            "thread": "string",
            "writer": "object",
            "expected_head_id": "string",
            "source": "string",
        },
    ),
    ("GET", _ID + "/checkpoints"): Says("token", {200: "Object"}, {"thread": "string", **_LIMITED}),
    ("POST", _ID + "/checkpoints/prune"): Says(
        "token",
        {200: "Object"},
        body={"keep": "string", "named": "boolean", "asked_for": "boolean", "dry_run": "boolean"},
    ),
    ("GET", _ID + "/checkpoints/{cid}"): Says("token", {200: "Object"}),
    ("DELETE", _ID + "/checkpoints/{cid}"): Says("token", {200: "Object"}),
    ("GET", _ID + "/diff"): Says(
        "token", {200: "Object"}, {"from": "string", "to": "string", "limit": "integer", "after": "string"}
    ),
    ("GET", _ID + "/history/{path}"): Says("token", {200: "Object"}, {"follow": "boolean", **_LIMITED}),
    ("POST", _ID + "/restore"): Says(
        "token",
        {200: "Restored"},
        body={
            **_AT,
            "path": "string",
            "force": "boolean",
            "empty": "boolean",
            "own_sessions": "array",
            "dry_run": "boolean",
        },
    ),
    ("POST", _ID + "/undelete"): Says(
        "token",
        {200: "Restored"},
        body={"path": "string", "own_sessions": "array", "dry_run": "boolean"},
    ),
    ("GET", _ID + "/export/{path}"): Says("token", {200: "application/x-tar"}, _AT),
    ("POST", _ID + "/sessions"): Says("token", {201: "Session"}, body=_SESSION),
    ("GET", _ID + "/sessions"): Says("token", {200: "Object"}, _LIMITED),
    ("POST", _ID + "/sessions/{n}/end"): Says(
        "token", {200: "Object"}, body={"ended": "string", "pending": "array"}
    ),
    ("POST", _ID + "/sessions/{n}/barrier"): Says(
        "token",
        {200: "Object"},
        body={
            "ask": "integer",
            "included": "boolean",
            "fs_seq": "integer",
            "pending": "array",
            "reason": "string",
        },
    ),
    ("POST", _ID + "/sessions/{n}/report"): Says("token", {200: "Object"}, body={"pending": "array"}),
    ("POST", _ID + "/sessions/{n}/state"): Says("token", {200: "Kept"}, _AT),
    ("POST", _ID + "/leases"): Says(
        "token",
        {201: "Lease"},
        body={"path": "string", "host": "string", "command": "string", "ttl_s": "number"},
    ),
    ("GET", _ID + "/conflicts/{path}"): Says("token", {200: "Object"}, {"count": "integer", **_LIMITED}),
    ("POST", _ID + "/conflicts/{path}"): Says(
        "token", {200: "Object"}, body={"original": "string", "host": "string", "detail": "string"}
    ),
    ("GET", _ID + "/leases"): Says("token", {200: "Object"}),
    ("POST", _ID + "/leases/{fence}/renew"): Says(
        "token", {200: "Lease"}, body={"ttl_s": "number", "session": "integer"}
    ),
    ("POST", _ID + "/leases/{fence}/release"): Says("token", {200: "Object"}, body={}),
    ("POST", _ID + "/commits"): Says("token", {200: MEDIA_TYPE}, body=MEDIA_TYPE),
    ("POST", _ID + "/packs"): Says("token", {200: MEDIA_TYPE}, body=MEDIA_TYPE),
    ("POST", _ID + "/ns"): Says("token", {200: MEDIA_TYPE}, _AT, MEDIA_TYPE),
    ("POST", _ID + "/blobs"): Says("token", {200: MEDIA_TYPE}, {"keep": "integer"}, MEDIA_TYPE),
    ("GET", _ID + "/changes"): Says(
        "token",
        {200: MEDIA_TYPE},
        {"after": "integer", "session": "integer", "wait": "number", "root": "integer", "asked": "integer"}
        | {"known": "integer", "known_at": "integer"},
    ),
    **{
        ("POST", f"/v1/checkpoints/{op}"): Says("token", {200: "Result"}, _SHOWING.get(op, {}), body)
        for op, body in _CONTRACT.items()
    },
    ("GET", "/v1/blobs"): Says("token", {200: "Blobs"}, {"prefix": "string", **_LIMITED}),
    ("HEAD", _BLOB): Says("token", {200: OCTETS}),
    ("GET", _BLOB): Says("token", {200: OCTETS}),
    ("PUT", _BLOB): Says("token", {200: "Result", 201: "Result"}, body=OCTETS),
    ("DELETE", _BLOB): Says("token", {200: "Result"}),
}

# Field → JSON type; "?" in front: may be null. Fields not listed may appear too.
SCHEMAS: Final[dict[str, dict[str, str]]] = {
    "Object": {},
    "Result": {"result": "any"},
    "Blobs": {"blobs": "array", "cursor": "?string"},
    "Status": {"status": "string"},
    "CreatedFileSystem": {
        "file_system_id": "string",
        "fs_token": "string",
        "token_id": "string",
        "region_code": "string",
        "status": "string",
        "display_name": "string",
        "labels": "object",
        "created_at": "string",
    },
    "FileSystem": {
        "file_system_id": "string",
        "display_name": "string",
        "labels": "object",
        "region_code": "string",
        "status": "string",
        "kind": "string",
        "created_at": "string",
        "seq": "integer",
        "usage": "object",
    },
    "FileSystems": {"region_code": "string", "file_systems": "array", "next_cursor": "?string"},
    "Fork": {
        "file_system_id": "string",
        "fs_token": "string",
        "token_id": "string",
        "region_code": "string",
        "status": "string",
        "display_name": "string",
        "labels": "object",
        "created_at": "string",
        "origin_id": "string",
        "origin_seq": "integer",
        "origin_checkpoint": "?string",
        "fs_seq": "integer",
        "copied": "boolean",
        "server_ms": "number",
    },
    "Forks": {"forks": "array", "next_cursor": "?string"},
    "ForkChanges": {
        "fork_id": "string",
        "base_seq": "integer",
        "fork_seq": "integer",
        "changes": "array",
        "changes_total": "integer",
    },
    "RolledBack": {
        "status": "string",
        "fork_id": "string",
        "base_seq": "integer",
        "fs_seq": "integer",
        "undo_checkpoint_id": "?string",
        "server_ms": "number",
    },
    "Merge": {
        "status": "string",
        "file_system_id": "string",
        "fork_id": "string",
        "base_seq": "integer",
        "fork_seq": "integer",
        "fs_seq": "integer",
        "applied": "integer",
        "conflicts": "array",
        "conflicts_total": "integer",
        "server_ms": "number",
    },
    "Swept": {
        "dry_run": "boolean",
        "file_systems": "integer",
        "pins": "integer",
        "rows": "integer",
        "blobs": "integer",
        "blob_bytes": "integer",
        "packs": "integer",
        "packs_rewritten": "integer",
        "packs_gathered": "integer",
        "packs_damaged": "integer",
        "bytes_rewritten": "integer",
        "objects": "integer",
        "object_bytes": "integer",
        "strays": "integer",
        "stray_bytes": "integer",
        "database": "object",
        "next_cursor": "?string",
    },
    "Check": {"file_system_id": "string", "status": "string", "checks": "array"},
    "Deleting": {"file_system_id": "string", "status": "string", "forks_deleted": "array"},
    "CreatedToken": {
        "file_system_id": "string",
        "token_id": "string",
        "token_name": "string",
        "scope_kind": "string",
        "status": "string",
        "expired": "boolean",
        "issued_at": "string",
        "expires_at": "?string",
        "fs_token": "string",
    },
    "Tokens": {"tokens": "array", "next_offset": "?integer"},
    "TokenStatus": {"file_system_id": "string", "token_id": "string", "status": "string"},
    "Journal": {
        "file_system_id": "string",
        "journal_id": "string",
        "kind": "string",
        "title": "string",
        "actor": "?object",
        "labels": "array",
        "next_seq": "integer",
        "genesis_hash": "string",
        "head_hash": "string",
        "created_at": "string",
        "updated_at": "string",
    },
    "Journals": {"journals": "array", "next_cursor": "?string"},
    "Appended": {
        "journal_id": "string",
        "append_id": "string",
        "first_seq": "integer",
        "last_seq": "integer",
        "count": "integer",
        "head_hash": "string",
        "idempotent": "boolean",
        "checkpoint_id": "?string",
    },
    "Entries": {"entries": "array", "next_after_seq": "integer"},
    "Matches": {"matches": "array", "next_cursor": "?string"},
    "Verified": {
        "ok": "boolean",
        "journal_id": "string",
        "entries": "integer",
        "head_hash": "string",
        "hash_chain_ok": "boolean",
        "first_bad_seq": "?integer",
        "reason": "string",
    },
    "Stat": {
        "path": "string",
        "kind": "string",
        "is_dir": "boolean",
        "size_bytes": "integer",
        "mode": "string",
        "ino": "string",
        "revision": "string",
        "fs_seq": "integer",
    },
    "NativeCheckpoint": {
        "checkpoint_id": "string",
        "thread_id": "string",
        "parent_id": "?string",
        "fs_seq": "integer",
        "label": "?string",
        "reason": "string",
        "entries": "integer",
        "created_at": "string",
        "not_flushed": "array",
        "server_ms": "number",
    },
    "Restored": {
        "status": "string",
        "fs_seq": "integer",
        "restored_seq": "integer",
        "path": "string",
        "changes": "integer",
        "undo_checkpoint_id": "?string",
        "server_ms": "number",
    },
    "Session": {
        "session": "integer",
        "ticket": "string",
        "seq": "integer",
        "previous": "?object",
        "server_version": "string",
        "block_size": "integer",
        "fence": "integer",
    },
    "Kept": {"fs_seq": "integer", "expires_at": "string", "renew_after_s": "number"},
    "Lease": {
        "kind": "string",
        "fence": "integer",
        "path": "string",
        "host": "string",
        "since": "string",
        "expires": "string",
    },
    "Error": {"error": "object"},
}
