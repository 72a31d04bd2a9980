"""`fsd audit`: the named invariants of stored filesystems, read from the database. Changes nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fsd.cli.context import Context
from fsd.cli.env import DATABASE, store_url
from fsd.cli.output import Document, table
from fsd.model.errors import FsdError, IntegrityError, NotFound, UsageError


def audit(context: Context, args: SimpleNamespace) -> Document:
    from fsd.meta.database import check_url, open_database
    from fsd.service.access import FsRef
    from fsd.service.audit import audit as check

    database: str | None = None
    if args.data_dir is None:
        database = store_url(context.env, args.database, DATABASE, "--database", context.say)
    if args.data_dir is not None and args.database is not None:
        raise UsageError("--data-dir and --database name two databases", hint="give one of them")
    if args.data_dir is None and database is None:
        raise UsageError("--data-dir or --database (else FSD_DATABASE_URL) is needed")
    if args.data_dir is not None and not Path(args.data_dir).is_dir():
        raise NotFound(f"there is no data directory {args.data_dir}")
    db = open_database(check_url(database) if database else Path(args.data_dir), context.host)
    try:
        rows = db.read(lambda tx: tx.all("SELECT id, name FROM fs WHERE status='active' ORDER BY id"))
        wanted = [FsRef(*row) for row in rows if args.file_system_id in (None, row[1])]
        if args.file_system_id is not None and not wanted:
            raise NotFound(f"no filesystem {args.file_system_id} there")
        findings: list[dict[str, Any]] = []
        for fs in wanted:
            findings += [{"file_system_id": fs.name, **found._asdict()} for found in check(db, fs)]
    finally:
        db.close()
    value = {"ok": not findings, "file_systems": len(wanted), "findings": findings}
    error: FsdError | None = None
    if findings:
        first = findings[0]
        error = IntegrityError(
            f"{len(findings)} findings; the first, in {first['file_system_id']}: {first['rule']}: "
            f"{first['where']}: {first['what']}",
            hint="keep a copy of the data directory before anything else",
        )
    return Document(value, text=_text, error=error)


def _text(value: Any) -> str:
    if value["ok"]:
        return f"{value['file_systems']} filesystems, every invariant holds\n"
    return table(value["findings"], ("file_system_id", "rule", "where", "what"))
