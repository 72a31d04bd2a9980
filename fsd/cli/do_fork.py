"""Handlers of forks, merges and layers.

A layer is a fork; `create-layer` keeps an id of its caller's choice beside it. They are looked for among the
forks of the filesystem the identity is for, and the forks of those.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

from fsd.cli import local, values
from fsd.cli.checkpoint_ids import whole_id
from fsd.cli.context import Context
from fsd.cli.do_files import shown_name
from fsd.cli.output import Document, lines_of, table
from fsd.client.control import Control
from fsd.client.forks import Forks
from fsd.client.http import Http
from fsd.model.errors import Conflict, NotFound, UsageError
from fsd.model.words import counted

JsonObject = dict[str, Any]
_SHOWN: Final = 100  # conflicts of a merge as text; --output json has more


def _forks(context: Context, file_system_id: str | None) -> Forks:
    identity, wanted = context.admin_or_owner(file_system_id)
    return Forks(Http(identity, context.host), wanted)


def fork(context: Context, args: SimpleNamespace) -> Document:
    forks = _forks(context, args.file_system_id)
    labels = values.labels(args.label) or None
    checkpoint = args.checkpoint
    if checkpoint is not None and not context.claim.admin_key:  # with that, checkpoints cannot be listed
        checkpoint = whole_id(context, checkpoint)
    if checkpoint is None and not args.no_barrier:
        local.barrier(context, forks.file_system_id, undone="no fork was made")
    return Document(forks.create(display_name=args.display_name, labels=labels, checkpoint=checkpoint))


def merge(context: Context, args: SimpleNamespace) -> Document:
    forks = _merging(context, args)
    if not args.no_barrier:
        known = {one["file_system_id"]: one["origin_id"] for one in forks.below()}
        _both_sent(context, args.fork, known.get(args.fork, forks.file_system_id))
    answer = forks.merge(args.fork, ours=args.ours, theirs=args.theirs, dry_run=args.dry_run)
    _merge_seen(context, answer)
    return _merged(answer)


def _both_sent(context: Context, fork: str, parent: str) -> None:
    """What mounts here hold, of either side, is part of the merge, and of a look at what it would do. (The
    parent may itself be a fork of the filesystem whose token is used.)"""
    for side in (fork, parent):
        local.barrier(context, side, undone="nothing was merged")


def _merge_seen(context: Context, answer: JsonObject) -> None:
    if answer["status"] == "merged":
        local.seen(context, answer["file_system_id"], answer["fs_seq"])


def _merging(context: Context, args: SimpleNamespace) -> Forks:
    """The admin key needs no parent named: the fork knows it."""
    claim = context.claim
    if claim.admin_key and not (args.file_system_id or claim.file_system_id or claim.token):
        http = Http(context.admin(), context.host)
        origin = Control(http).describe(args.fork).get("origin_id")
        if origin is None:
            raise Conflict(f"{args.fork} is no fork", hint="see `fsd list`")
        return Forks(http, origin)
    return _forks(context, args.file_system_id)


def _merged(answer: JsonObject) -> Document:
    """Conflicts are printed and end with 1; nothing was done then."""
    error = None
    if answer["status"] == "conflicts":
        count = answer["conflicts_total"]
        error = Conflict(
            f"{counted(count, 'conflict')}: nothing was merged",
            hint="decide them with --ours PATTERN and --theirs PATTERN, or change one side and merge again",
        )
    return Document(answer, text=_merge_text, error=error)


def _merge_text(answer: JsonObject) -> str:
    lines = [f"{answer['status']}\tapplied {answer['applied']}\tfs_seq {answer['fs_seq']}"]
    lines += [f"{one['change']}\t{shown_name(one, 'path')}" for one in answer.get("changes", [])[:_SHOWN]]
    rows = [
        {
            "path": one["path"],
            "conflict": one["kind"],
            **{side: _side(one[side]) for side in ("base", "ours", "theirs")},
        }
        for one in answer["conflicts"][:_SHOWN]
    ]
    shown = table(rows, ("path", "conflict", "base", "ours", "theirs")) if rows else ""
    return lines_of(lines) + shown


def _side(one: JsonObject | None) -> str:
    return "-" if one is None else f"{one['kind']} {one['size_bytes']} {one['mode']} {one['revision']}"


# -- layers ------------------------------------------------------------------------------------------


def create_layer(context: Context, args: SimpleNamespace) -> Document:
    if args.base_root_path != "/":
        raise UsageError("a layer is of the whole filesystem", hint="leave --base-root-path out, or give /")
    forks = _forks(context, args.file_system_id)
    if not args.no_barrier:
        local.barrier(context, forks.file_system_id, undone="no layer was made")
    return Document(_make(forks, args, tags=args.tag))


def fork_layer(context: Context, args: SimpleNamespace) -> Document:
    forks = _forks(context, args.file_system_id)
    parent = _find(forks, args.parent_layer_ref)
    if args.checkpoint_id is None and not args.no_barrier:
        local.barrier(context, parent["file_system_id"], undone="no layer was made")
    return Document(_make(forks, args, of=parent["file_system_id"], checkpoint=args.checkpoint_id))


def _make(
    forks: Forks,
    args: SimpleNamespace,
    *,
    tags: list[str] | None = None,
    of: str | None = None,
    checkpoint: str | None = None,
) -> JsonObject:
    if args.layer_id is not None and any(
        args.layer_id in (one["layer"]["id"], one["file_system_id"]) for one in _layers(forks)
    ):
        raise Conflict(f"there is a layer {args.layer_id} already")
    layer = {"id": args.layer_id, "name": args.layer_name, "tags": tags or [], "actor_id": args.actor_id}
    made = forks.create(display_name=args.layer_name, of=of, checkpoint=checkpoint, layer=layer)
    return {**_shown(made, _layers(forks)), "fs_token": made["fs_token"]}


def _layers(forks: Forks) -> list[JsonObject]:
    """Every fork: one that `fsd fork` made is a layer under its own id."""
    found = forks.below()
    for one in found:
        plain: JsonObject = {"id": None, "name": one["display_name"] or None, "tags": [], "actor_id": None}
        one["layer"] = one["layer"] or plain
    return found


def _id_of(one: JsonObject) -> str:
    found: str = one["layer"]["id"] or one["file_system_id"]
    return found


def _find(forks: Forks, ref: str) -> JsonObject:
    """The layer with this id, or the one of this name."""
    layers = _layers(forks)
    named = [one for one in layers if ref in (_id_of(one), one["file_system_id"])]
    named = named or [one for one in layers if one["layer"]["name"] == ref]
    if not named:
        raise NotFound(f"no layer {ref}", hint="see `fsd fs list-layers`")
    if len(named) > 1:
        raise Conflict(f"{len(named)} layers are called {ref}", hint="give the layer's id")
    return named[0]


def _above(one: JsonObject, layers: list[JsonObject]) -> list[JsonObject]:
    """The layer and those it was made from, itself first."""
    known = {layer["file_system_id"]: layer for layer in layers}
    found = [one]
    while found[-1]["origin_id"] in known:
        found.append(known[found[-1]["origin_id"]])
    return found


def _shown(one: JsonObject, layers: list[JsonObject]) -> JsonObject:
    chain = _above(one, layers)
    layer = one["layer"]
    return {
        "layer_id": _id_of(one),
        "file_system_id": one["file_system_id"],
        "base_root_path": "/",
        "name": layer["name"],
        "tags": layer["tags"],
        "state": "open",
        "durability_mode": "restore-safe",
        "actor_id": layer["actor_id"],
        "durable_seq": one["fs_seq"],
        "created_at": one["created_at"],
        "updated_at": one["created_at"],
        "sealed_at": None,
        "parent_layer_id": _id_of(chain[1]) if len(chain) > 1 else None,
        "origin_seq": one["origin_seq"],
        "origin_checkpoint_id": one["origin_checkpoint"],
        "depth": len(chain),
        "root_layer_id": _id_of(chain[-1]),
    }


def list_layers(context: Context, args: SimpleNamespace) -> Document:
    layers = _layers(_forks(context, args.file_system_id))
    return Document({"layers": [_shown(one, layers) for one in layers]})


def describe_layer(context: Context, args: SimpleNamespace) -> Document:
    forks = _forks(context, args.file_system_id)
    return Document(_shown(_find(forks, args.layer_id), _layers(forks)))


def layer_chain(context: Context, args: SimpleNamespace) -> Document:
    forks = _forks(context, args.file_system_id)
    one, layers = _find(forks, args.layer_ref), _layers(forks)
    chain = [{**_shown(layer, layers), "limit_seq": layer["fs_seq"]} for layer in _above(one, layers)]
    for above, below in zip(chain[1:], chain):
        above["limit_seq"] = below["origin_seq"]
    return Document({"chain": chain})


def diff_layer(context: Context, args: SimpleNamespace) -> Document:
    forks = _forks(context, args.file_system_id)
    one = _find(forks, args.layer_id)
    local.sent_if_it_can_be(context, one["file_system_id"])
    found = forks.changes(one["file_system_id"])
    return Document(
        {
            "layer_id": _id_of(one),
            "entries": found["changes"],
            "entries_total": found["changes_total"],
            "durable_seq": found["fork_seq"],
        }
    )


def checkpoint_layer(context: Context, args: SimpleNamespace) -> Document:
    forks = _forks(context, args.file_system_id)
    one = _find(forks, args.layer_id)
    if not args.no_barrier:
        local.barrier(context, one["file_system_id"], undone="no checkpoint was made")
    made = forks.checkpoint(one["file_system_id"], args.label)
    return Document(
        {
            "checkpoint_id": made["checkpoint_id"],
            "layer_id": _id_of(one),
            "durable_seq": made["fs_seq"],
            "label": made["label"],
            "created_at": made["created_at"],
        }
    )


def rollback_layer(context: Context, args: SimpleNamespace) -> Document:
    forks = _forks(context, args.file_system_id)
    one = _find(forks, args.layer_id)
    if not args.no_barrier:  # what mounts here hold is kept with the rest
        local.barrier(context, one["file_system_id"], undone="nothing was rolled back")
    done = forks.rollback(one["file_system_id"], force=args.force)
    local.seen(context, one["file_system_id"], done["fs_seq"])
    return Document({"operation": "rollback-layer", "layer_id": _id_of(one), **done})


def commit_layer(context: Context, args: SimpleNamespace) -> Document:
    forks = _forks(context, args.file_system_id)
    one = _find(forks, args.layer_id)
    if not args.no_barrier:
        _both_sent(context, one["file_system_id"], one["origin_id"])
    answer = forks.merge(one["file_system_id"])
    _merge_seen(context, answer)
    document = _merged(answer)
    status = {"merged": "committed"}.get(document.value["status"], document.value["status"])
    value = {**document.value, "status": status, "layer_id": _id_of(one)}
    return Document(value, text=document.text, error=document.error)


def delete_layer(context: Context, args: SimpleNamespace) -> Document:
    forks = _forks(context, args.file_system_id)
    one, layers = _find(forks, args.layer_ref), _layers(forks)
    below = [layer for layer in layers if one in _above(layer, layers)[1:]]
    if below and not args.cascade:
        raise Conflict(
            f"{counted(len(below), 'layer', 'was', 'were')} made from {args.layer_ref}",
            hint="--cascade deletes them too",
            details={"layers": [_id_of(layer) for layer in below]},
        )
    context.confirm(f"Delete the layer {args.layer_ref} with all its files?", needs_yes=True)
    for layer in [*reversed(below), one]:
        forks.delete(layer["file_system_id"], cascade=args.cascade)
    return Document(
        {"layer_id": _id_of(one), "status": "deleting", "layers_deleted": [_id_of(layer) for layer in below]}
    )
