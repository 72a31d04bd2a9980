"""Changes of names and attributes by path: `POST …/actions`, each one commit. Fields: docs/protocol.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from fsd.meta.database import Tx
from fsd.model.errors import UsageError
from fsd.server.context import (
    Context,
    context,
    flag,
    idempotent_call,
    only,
    read_json,
    send,
    string,
    to_answer,
    whole,
)
from fsd.server.tree_json import (
    cursor_of,
    field_bytes,
    field_mode,
    field_path,
    from_b64,
    named,
    read_cursor,
    read_revision,
    stat_object,
)
from fsd.service.access import FsRef, Grant, check_own, hold_tree
from fsd.service.copytree import TreeCopy
from fsd.service.idempotency import Answer, Call
from fsd.service.paths import Copied, Done, Paths, Plan
from fsd.service.tree import seq_of

ID_MAX: Final = 2**32 - 1
TIME_MAX: Final = 2**63 - 1

Body = Mapping[str, Any]
Planner = Callable[[Paths, Tx, FsRef, Body], Plan]


def change(
    ctx: Context,
    fs: FsRef,
    who: Grant,
    call: Call | None,
    effect: Callable[[Tx], tuple[Answer, Done]],
    *,
    frees: bool = False,
) -> Answer:
    """One transaction under the filesystem's lock, with its idempotency key; then the feed is woken. `frees`:
    see `Database.write`."""
    made: list[Done] = []

    def run(tx: Tx) -> Answer:
        made.clear()
        hold_tree(tx, fs, who)

        def once(inner: Tx) -> Answer:
            answer, done = effect(inner)
            made.append(done)
            return answer

        return ctx.service.idempotency.run(tx, call, once)

    answer = ctx.service.forks.when_copied(fs, lambda: ctx.service.db.write(run, frees=frees))
    for done in made:
        if done.moved:
            ctx.service.feed.wake(fs.id, done.seq)
    return answer


async def act(request: Request) -> Response:
    """One change of names or attributes, in one commit; with `dry_run` it is only checked."""
    ctx = context(request)
    body, raw = await read_json(request)
    name = string(body, "action")
    if name not in _ACTIONS:
        raise UsageError(f"action is one of {', '.join(sorted(_ACTIONS))}")
    fields, planner = _ACTIONS[name]
    only(body, "action", "dry_run", *fields)
    dry_run = flag(body, "dry_run") or False

    def work() -> Answer:
        fs, who = ctx.authenticate(request)
        if dry_run:
            return _rehearse(ctx, fs, name, lambda tx: planner(ctx.service.paths, tx, fs, body))
        call = idempotent_call(request, who.token_id, raw)

        def effect(tx: Tx) -> tuple[Answer, Done]:
            done = ctx.service.paths.execute(tx, fs, planner(ctx.service.paths, tx, fs, body))
            return to_answer(_done(name, done)), done

        return change(ctx, fs, who, call, effect, frees=name == "remove")

    return send(await ctx.run(work))


def _done(name: str, done: Done) -> dict[str, Any]:
    found: dict[str, Any] = {"action": name, "status": "ok", "fs_seq": done.seq}
    if done.place is not None and done.place.node is not None:
        found["stat"] = stat_object(done.place.path, done.place.node, done.seq)
    if name == "remove":
        found.update(removed=done.removed, more=done.more)
    if done.copied is not None:
        found.update(_copied(done.copied))
    return found


def _rehearse(ctx: Context, fs: FsRef, name: str, plan: Callable[[Tx], Plan]) -> Answer:
    def read(tx: Tx) -> Answer:
        check_own(tx, fs)
        made = plan(tx)
        found = {
            "action": name,
            "status": "ok",
            "dry_run": True,
            "operations": len(made.ops),
            "fs_seq": seq_of(tx, fs.id),
        }
        if name == "remove":
            found.update(removed=made.removed, more=made.more)
        if made.copied is not None:
            found.update(_copied(made.copied))
        return to_answer(found)

    return ctx.service.forks.when_copied(fs, lambda: ctx.service.db.read(read))


def _mkdir(paths: Paths, tx: Tx, fs: FsRef, body: Body) -> Plan:
    return paths.mkdir(
        tx,
        fs,
        field_path(body, "path"),
        mode=field_mode(body),
        parents=flag(body, "parents") or False,
        uid=_id(body, "uid"),
        gid=_id(body, "gid"),
    )


def _remove(paths: Paths, tx: Tx, fs: FsRef, body: Body) -> Plan:
    match = string(body, "if_match")
    return paths.remove(
        tx,
        fs,
        field_path(body, "path"),
        recursive=flag(body, "recursive") or False,
        if_match=None if match is None else read_revision(match, "if_match"),
    )


def _rename(paths: Paths, tx: Tx, fs: FsRef, body: Body) -> Plan:
    return paths.rename(
        tx, fs, field_path(body, "from"), field_path(body, "to"), overwrite=_default_true(body, "overwrite")
    )


def _copy(paths: Paths, tx: Tx, fs: FsRef, body: Body) -> Plan:
    return paths.copy(
        tx, fs, field_path(body, "from"), field_path(body, "to"), overwrite=_default_true(body, "overwrite")
    )


def _copy_tree(paths: Paths, tx: Tx, fs: FsRef, body: Body) -> Plan:
    build = paths.builder()
    copy = TreeCopy(
        tx, fs.id, build, overwrite=_default_true(body, "overwrite"), resume=flag(body, "resume") or False
    )
    after = read_cursor(string(body, "after"))
    did = copy.step(field_path(body, "from"), field_path(body, "to"), after)
    return Plan(build.ops, copied=did, more=did.after is not None)


def _copied(did: Copied) -> dict[str, Any]:
    """What a step did, with what failed by path and why."""
    return {
        **did.counts,
        "failed": [
            {**named("path", path), "code": why.code, "message": why.message} for path, why in did.failed
        ],
        "not_copied": [named("path", path) for path in did.not_copied],
        "next_after": None if did.after is None else cursor_of(did.after),
    }


def _symlink(paths: Paths, tx: Tx, fs: FsRef, body: Body) -> Plan:
    target, match = field_bytes(body, "target"), string(body, "if_match")
    return paths.symlink(
        tx,
        fs,
        target,
        field_path(body, "path"),
        overwrite=flag(body, "overwrite") or False,
        if_match=None if match is None else read_revision(match, "if_match"),
    )


def _hardlink(paths: Paths, tx: Tx, fs: FsRef, body: Body) -> Plan:
    return paths.hardlink(tx, fs, field_path(body, "source"), field_path(body, "path"))


def _setattr(paths: Paths, tx: Tx, fs: FsRef, body: Body) -> Plan:
    given = {
        "mode": field_mode(body),
        "uid": _id(body, "uid"),
        "gid": _id(body, "gid"),
        "mtime_ns": _time(body, "mtime_ns"),
        "atime_ns": _time(body, "atime_ns"),
    }
    if all(value is None for value in given.values()):
        raise UsageError(f"{body['action']} needs what to set")
    return paths.setattr(tx, fs, field_path(body, "path"), follow=_default_true(body, "follow"), **given)


def _setxattr(paths: Paths, tx: Tx, fs: FsRef, body: Body) -> Plan:
    value = string(body, "value_b64")
    if value is None:
        raise UsageError("value_b64 is missing")
    name, raw = field_bytes(body, "name"), from_b64(value, "value_b64")
    return paths.setxattr(tx, fs, field_path(body, "path"), name, raw, follow=_default_true(body, "follow"))


def _removexattr(paths: Paths, tx: Tx, fs: FsRef, body: Body) -> Plan:
    path, name = field_path(body, "path"), field_bytes(body, "name")
    return paths.setxattr(tx, fs, path, name, None, follow=_default_true(body, "follow"))


def _default_true(body: Body, name: str) -> bool:
    value = flag(body, name)
    return True if value is None else value


def _id(body: Body, name: str) -> int | None:
    value = whole(body, name)
    if value is not None and not 0 <= value <= ID_MAX:
        raise UsageError(f"{name} is a number from 0 to {ID_MAX}")
    return value


def _time(body: Body, name: str) -> int | None:
    value = whole(body, name)
    if value is not None and not -TIME_MAX <= value <= TIME_MAX:
        raise UsageError(f"{name} is out of range")
    return value


_ACTIONS: Final[dict[str, tuple[tuple[str, ...], Planner]]] = {
    "mkdir": (("path", "mode", "parents", "uid", "gid"), _mkdir),
    "remove": (("path", "recursive", "if_match"), _remove),
    "rename": (("from", "to", "overwrite"), _rename),
    "copy": (("from", "to", "overwrite"), _copy),
    "copy_tree": (("from", "to", "overwrite", "resume", "after"), _copy_tree),
    "symlink": (("target", "path", "overwrite", "if_match"), _symlink),
    "hardlink": (("source", "path"), _hardlink),
    "chmod": (("path", "mode", "follow"), _setattr),
    "chown": (("path", "uid", "gid", "follow"), _setattr),
    "utimens": (("path", "mtime_ns", "atime_ns", "follow"), _setattr),
    "setxattr": (("path", "name", "value_b64", "follow"), _setxattr),
    "removexattr": (("path", "name", "follow"), _removexattr),
}
