"""`fsd audit`: the named invariants of stored filesystems, read from the database and the object store.

Changes nothing, except with `--repair --yes`: then what the plan says, in one transaction a filesystem.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fsd.cli.context import Context
from fsd.cli.env import BLOBS, DATABASE, store_url
from fsd.cli.output import Document, table
from fsd.model.errors import FsdError, IntegrityError, NotFound, UsageError
from fsd.model.words import counted

if TYPE_CHECKING:
    from fsd.blobs.store import BlobStore
    from fsd.meta.database import Database
    from fsd.service.access import FsRef
    from fsd.service.repair import Repair

KEEP = "keep a copy of the data directory before anything else"


def audit(context: Context, args: SimpleNamespace) -> Document:
    from fsd.meta.database import check_url, open_database
    from fsd.service.access import FsRef
    from fsd.service.open import ServiceOptions, store_of

    database: str | None = None
    if args.data_dir is None:
        database = store_url(context.env, args.database, DATABASE, "--database", context.say)
    if args.data_dir is not None and args.database is not None:
        raise UsageError("--data-dir and --database name two databases", hint="give one of them")
    if args.data_dir is None and database is None:
        raise UsageError("--data-dir or --database (else FSD_DATABASE_URL) is needed")
    if args.data_dir is not None:
        _check_is_data(Path(args.data_dir))
    if args.plan is not None and not args.repair:
        raise UsageError("--plan belongs to --repair")
    blobs = store_url(context.env, args.blobs, BLOBS, "--blobs", context.say)
    store: BlobStore | None = None
    if args.data_dir is not None or blobs is not None:
        store = store_of(ServiceOptions(Path(args.data_dir or "."), database, blobs), context.host)
    elif args.read_data or args.repair:
        raise UsageError(
            "--read-data and --repair need the packs: --data-dir or --blobs (else FSD_BLOBS_URL)"
        )
    db = open_database(check_url(database) if database else Path(args.data_dir), context.host)
    try:
        rows = db.read(
            lambda tx: tx.all("SELECT id, name, status FROM fs WHERE status IN ('active','kept') ORDER BY id")
        )
        asked = [row for row in rows if args.file_system_id in (None, row[1])]
        wanted = [FsRef(*row[:2]) for row in asked if row[2] == "active"]
        kept = [FsRef(*row[:2]) for row in asked if row[2] == "kept"]
        if args.file_system_id is not None and not asked:
            raise NotFound(f"no filesystem {args.file_system_id} there")
        if args.repair:
            assert store is not None
            return _repair(context, args, db, store, wanted)
        return _look(args, db, store, wanted, kept)
    finally:
        db.close()


def _check_is_data(directory: Path) -> None:
    """Opening makes what is absent, and all is well with what is empty: the wrong directory must not pass."""
    from fsd.meta.sqlite import FILE

    if not directory.is_dir():
        raise NotFound(f"there is no data directory {directory}")
    if not (directory / FILE).is_file():
        raise NotFound(
            f"{directory} holds no {FILE}: it is no data directory of `fsd serve`, or its database is lost",
            hint="give the directory that `fsd serve --data-dir` has; of a lost database bring a copy back",
        )


def _look(
    args: SimpleNamespace, db: Database, store: BlobStore | None, wanted: list[FsRef], kept: list[FsRef]
) -> Document:
    """Of those that are `kept` there are only packs, for the forks that use them."""
    from random import SystemRandom

    from fsd.service.audit import audit as check
    from fsd.service.audit_store import audit_store, unknown_file_systems

    findings = _lost(args, db)
    packs = read = strays = looked = 0
    for fs in [*wanted, *kept]:
        try:
            found = check(db, fs) if fs in wanted else []
        except NotFound:
            if args.file_system_id is not None:
                raise
            continue  # deleted since the list was read: the server may run
        looked += fs in wanted
        if store is not None:
            more, seen = audit_store(db, store, fs, read_data=args.read_data, rng=SystemRandom())
            found += more
            packs, read, strays = packs + seen.packs, read + seen.read, strays + seen.strays
        findings += [{"file_system_id": fs.name, **one._asdict()} for one in found]
    unknown = unknown_file_systems(db, store) if store is not None and args.file_system_id is None else []
    value = {
        "ok": not findings,
        "file_systems": looked,
        "packs": packs,
        "packs_read": read,
        "objects_without_row": strays,
        "unknown_file_systems": unknown,
        "findings": findings,
    }
    return Document(value, text=_text, error=_error(findings, KEEP + "; then fsd audit --repair"))


def _lost(args: SimpleNamespace, db: Database) -> list[dict[str, Any]]:
    """What is left of filesystems that nothing names any more, unless only one is asked about."""
    from fsd.service.audit import rows_of_lost

    if args.file_system_id is not None:
        return []
    return [{"file_system_id": "unknown", **one._asdict()} for one in rows_of_lost(db)]


def _repair(
    context: Context, args: SimpleNamespace, db: Database, store: BlobStore, wanted: list[FsRef]
) -> Document:
    from random import SystemRandom

    from fsd.service import repair
    from fsd.service.audit_store import audit_store

    plans = _of_each(args, wanted, lambda fs: repair.plan(db, store, fs))
    due = {fs: one.plan for fs, one in plans if one.steps}
    name = next(iter(due.values())) if len(due) == 1 else ""
    if args.plan is not None and args.plan != name:
        raise UsageError(
            f"the plan is {name or 'another for each filesystem'}, not {args.plan}",
            hint="--plan goes with one filesystem: look at its plan again",
        )
    if due and args.yes:
        done = dict(_of_each(args, list(due), lambda fs: repair.execute(db, store, fs, due[fs])))
        plans = [(fs, done[fs] if fs in due else one) for fs, one in plans if fs in done or fs not in due]
    steps = [{"file_system_id": fs.name, **step._asdict()} for fs, one in plans for step in one.steps]
    left = _lost(args, db) + [
        {"file_system_id": fs.name, **found._asdict()}
        for fs, one in plans
        for found in [*one.left, *audit_store(db, store, fs, read_data=args.read_data, rng=SystemRandom())[0]]
    ]
    value = {
        "ok": not left and (args.yes or not steps),
        "file_systems": len(plans),
        "repaired": bool(args.yes and steps),
        "plan": name or None,
        "steps": steps,
        "findings": left,
    }
    error = _error(left, KEEP)
    if error is None and steps and not args.yes:
        error = IntegrityError(
            f"{len(steps)} repairs are due; nothing was changed", hint=KEEP + "; --yes carries them out"
        )
    return Document(value, text=_repair_text, error=error)


def _of_each(
    args: SimpleNamespace, wanted: list[FsRef], do: Callable[[FsRef], Repair]
) -> list[tuple[FsRef, Repair]]:
    """What `do` answers for each filesystem but those that were deleted since the list was read."""
    found = []
    for fs in wanted:
        try:
            found.append((fs, do(fs)))
        except NotFound:
            if args.file_system_id is not None:
                raise
    return found


def _error(findings: list[dict[str, Any]], hint: str) -> FsdError | None:
    if not findings:
        return None
    first = findings[0]
    return IntegrityError(
        f"{counted(len(findings), 'finding')}; the first, in {first['file_system_id']}: {first['rule']}: "
        f"{first['where']}: {first['what']}",
        hint=hint,
    )


def _text(value: Any) -> str:
    lines = ""
    if value["unknown_file_systems"]:
        lines = f"objects of filesystems not known here: {', '.join(value['unknown_file_systems'])}\n"
    if value["ok"]:
        looked = f", {counted(value['packs'], 'pack')} ({value['packs_read']} read)" if value["packs"] else ""
        return f"{lines}{counted(value['file_systems'], 'filesystem')}{looked}, every invariant holds\n"
    return lines + table(value["findings"], ("file_system_id", "rule", "where", "what"))


def _repair_text(value: Any) -> str:
    shown = ("file_system_id", "rule", "where", "what")
    if not value["steps"] and not value["findings"]:
        return f"{counted(value['file_systems'], 'filesystem')}, every invariant holds\n"
    text = ""
    if value["steps"]:
        text = "repaired:\n" if value["repaired"] else f"plan {value['plan'] or ''}".rstrip() + ":\n"
        text += table(value["steps"], shown)
    if value["findings"]:
        text += "cannot be repaired:\n" + table(value["findings"], shown)
    return text
