"""Handlers of checkpoints that are made here: through a mount, by the server, from a local directory."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from fsd.cli import local
from fsd.cli.context import Context
from fsd.cli.output import Document
from fsd.client.capture import Capture
from fsd.client.checkpoints import Checkpoints as ThreadStore
from fsd.client.contract import Contract, Writer
from fsd.client.http import Http
from fsd.client.native import Checkpoints
from fsd.client.policy import DEFAULT_EXCLUDE, FIELD, Policy
from fsd.client.redact import Secrets
from fsd.model.errors import FsdError, NotDrained, NotFound, UsageError
from fsd.model.limits import CONTRACT_BLOB_MAX, SECRET_BYTES_MAX
from fsd.model.words import counted

if TYPE_CHECKING:
    from fsd.kernel.runtime import Record

RENDER_WAIT: Final = 600.0  # seconds the files of a large tree may take to be named
SOURCE_KEEP: Final = 3600.0  # a checkpoint that only the way into a thread needs


def create(context: Context, args: SimpleNamespace) -> Document:
    """Through a mount here: what it shows at one moment. Without one, or with --remote: by the server."""
    if args.require_all and not args.remote:
        raise UsageError(
            "--require-all goes with --remote, where the server asks the mounts",
            hint="add --remote; a mount here is always asked, or it fails",
        )
    if args.remote and args.mount is not None:
        raise UsageError("--remote and --mount exclude each other", hint="give one of them")
    record = None if args.remote else _mount_of(context, args)
    ask = {"label": args.label, "expires_in_s": args.keep_for}
    ask = {name: value for name, value in ask.items() if value is not None}
    if args.thread is not None:
        made = _in_thread(context, args, record, ask)
    elif record is None:
        made = _by_server(context, args, ask)
    else:
        made = _through(context, args, record, ask)
    text = "checkpoint {checkpoint_id} of commit {fs_seq}\n"
    error: FsdError | None = None
    if made.get("not_flushed"):
        count = made.get("not_flushed_total", len(made["not_flushed"]))
        error = NotDrained(
            f"{counted(count, 'change', 'is', 'are')} not in the checkpoint: the first is "
            f"{made['not_flushed'][0].get('path')}",
            hint="`fsd recover` says what became of them",
        )
    if args.partial:
        error = None
    return Document(made, text=lambda value: text.format(**value), error=error)


def _mount_of(context: Context, args: SimpleNamespace) -> Record | None:
    """The mount to go through: the named one, else the one here. Others here are drained first, so that
    what was written through them before is in the checkpoint too."""
    if args.mount is not None:
        found: Record = local.runtime(context).find(Path(args.mount))
        return found
    found_here = local.mounts_here(context, context.data().file_system_id)
    here = [one for one in found_here if one.state == "mounted"]
    if not here:
        return None
    inside = [one for one in here if _is_inside(one.mountpoint)]
    chosen = (inside or here)[0]
    if len(here) > 1:
        from fsd.kernel import unmount as ways

        for other in here:
            if other is not chosen:
                ways.barrier(other, args.timeout or None)
    return chosen


def _is_inside(mountpoint: str) -> bool:
    try:
        where = os.getcwd()
    except OSError:
        return False
    return where == mountpoint or where.startswith(mountpoint.rstrip("/") + "/")


def _through(context: Context, args: SimpleNamespace, record: Record, ask: dict[str, Any]) -> dict[str, Any]:
    from fsd.kernel import unmount as ways

    return ways.checkpoint(
        record, ask, args.timeout or None, context.progress, context.host, partial=args.partial
    )


def _in_thread(
    context: Context, args: SimpleNamespace, record: Record | None, ask: dict[str, Any]
) -> dict[str, Any]:
    """Into a host's thread, under its lease: of what a mount here shows (a checkpoint of its own first, which
    goes when the thread has it), else of what the server has."""
    if not args.thread:
        raise UsageError("--thread is empty")
    if args.keep_for is not None:
        raise UsageError("--keep-for is not for a host's thread: its writer deletes checkpoints")
    http = Http(context.data(), context.host)
    source: dict[str, Any] | None = None
    if record is not None:
        source = _through(context, args, record, {"reason": "automatic", "expires_in_s": SOURCE_KEEP})
    contract = Contract(http)
    with Writer(contract, args.thread) as writer:
        head = contract.call("getHead", {"threadId": args.thread})
        body = {**ask, "thread": args.thread, "writer": writer.current(), "expected_head_id": head}
        if source is not None:
            body |= {"source": source["checkpoint_id"], "not_flushed": source["not_flushed"]}
        made = _post(context, args, http, body, RENDER_WAIT)
    if source is not None:
        made["not_flushed_total"] = source["not_flushed_total"]
        Checkpoints(http).delete(source["checkpoint_id"])
    return made


def _by_server(context: Context, args: SimpleNamespace, ask: dict[str, Any]) -> dict[str, Any]:
    return _post(context, args, Http(context.data(), context.host), dict(ask), 0.0)


def _post(
    context: Context, args: SimpleNamespace, http: Http, body: dict[str, Any], wait: float
) -> dict[str, Any]:
    if args.remote and args.drain:
        body["drain"] = {"timeout": args.drain}
        wait += args.drain
    if args.require_all:
        body["require_all"] = True
    route = f"/v1/file-systems/{context.data().file_system_id}/checkpoints"
    return http.json("POST", route, body=body, wait=wait)


# -- without a mount -----------------------------------------------------------------------------------


def policy_of(args: SimpleNamespace, *, skip_links: bool = False) -> Policy:
    """The policy the flags say. Raises `UsageError`."""
    made = Policy(
        tuple(args.include or ()), tuple(args.exclude) if args.exclude else DEFAULT_EXCLUDE, "", skip_links
    )
    made.check()
    return made


def _secrets(context: Context, args: SimpleNamespace) -> Secrets:
    values: list[bytes] = []
    for name in args.secret_env or ():
        value = context.env.variables.get(name)
        if not value:
            raise UsageError(f"the variable {name} of --secret-env is empty or not set")
        values.append(os.fsencode(value))
    for name in args.secret_file or ():
        try:
            with open(name, "rb") as file:
                value_read = file.read(SECRET_BYTES_MAX + 2).rstrip(b"\r\n")
        except OSError as exc:
            raise NotFound(f"the file of a secret, {name}, cannot be read: {exc.strerror}") from exc
        values.append(value_read)
    return Secrets(values)


def capture(context: Context, args: SimpleNamespace) -> Document:
    """Under the thread's lease: read and send the files, then append, then see that all of it is there."""
    policy, secrets = policy_of(args, skip_links=args.skip_links), _secrets(context, args)
    if not args.thread:
        raise UsageError("--thread is empty")
    contract = Contract(Http(context.data(), context.host))
    began = time.monotonic()
    store = ThreadStore(contract)
    with Writer(contract, args.thread) as writer:
        context.progress(f"reading {args.directory}")
        largest = CONTRACT_BLOB_MAX if args.max_file_size is None else args.max_file_size
        found = Capture(policy, secrets, contract, file_max=largest).run(args.directory)
        head = store.get_head(args.thread)
        record: dict[str, Any] = {
            "id": f"checkpoint-{context.host.token_bytes(12).hex()}",
            "threadId": args.thread,
            "parentCheckpointId": head,
            "createdAt": context.host.wall_ns() // 1_000_000,
            "reason": "named",
            "files": [entry.to_json() for entry in found.entries],
            "conversation": store.load_thread(args.thread),
            "artifacts": [],
            FIELD: policy.to_json(),
        }
        if args.label is not None:
            record["label"] = args.label
        if args.run_id is not None:
            record["sourceRunId"] = args.run_id
        store.append(record, expected_head_id=head, writer=writer)
        # What a sweep took meanwhile is told now, not by a restore later.
        lacking = store.missing_blobs(record["id"])
    answer = {
        "checkpoint_id": record["id"],
        "thread_id": args.thread,
        "parent_id": head,
        "label": args.label,
        "files": sum(1 for entry in found.entries if entry.key),
        "entries": len(found.entries),
        "bytes": found.bytes,
        "bytes_uploaded": found.uploaded,
        "skipped": found.skipped,
        "duration_ms": round((time.monotonic() - began) * 1000),
    }
    error = FsdError(f"{len(lacking)} contents of the checkpoint went away meanwhile") if lacking else None
    if error is not None:
        error.hint = "capture again: what a sweep took is sent again"
    return Document(
        answer,
        text=lambda v: (
            f"checkpoint {v['checkpoint_id']}: {counted(v['files'], 'file')}, {v['bytes']} bytes\n"
        ),
        error=error,
    )
