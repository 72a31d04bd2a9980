"""`fsd sweep`: the server removes what nothing shows any more, some seconds a request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

from fsd.cli.context import Context
from fsd.cli.do_control import control
from fsd.cli.output import Document
from fsd.model.words import counted

_UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB")


def sweep(context: Context, args: SimpleNamespace) -> Document:
    """With `--dry-run` (called by `fsd.cli.dryrun`) the server counts and removes nothing."""
    api = control(context, context.admin())
    total: dict[str, Any] = {}
    for page in api.sweep(args.only, args.older_than, dry_run=args.dry_run, vacuum=args.vacuum):
        for name, value in page.items():
            counts = isinstance(value, int) and not isinstance(value, bool)
            total[name] = total.get(name, 0) + value if counts else value
        context.progress(f"{total['file_systems']} filesystems, {total['blobs']} blobs")
    del total["next_cursor"]
    return Document(total, text=text)


def shown_size(size: int) -> str:
    """For people, in powers of 1024."""
    value, unit = float(size), 0
    while value >= 1024 and unit + 1 < len(_UNITS):
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def text(value: Any) -> str:
    removed = "would be removed" if value["dry_run"] else "removed"
    database = value["database"]
    return (
        f"{counted(value['file_systems'], 'filesystem')}\n"
        f"{removed}: {counted(value['blobs'], 'blob')} ({shown_size(value['blob_bytes'])}),"
        f" {counted(value['packs'], 'pack')}, {counted(value['objects'] + value['strays'], 'object')}"
        f" ({shown_size(value['object_bytes'] + value['stray_bytes'])}), {counted(value['pins'], 'pin')},"
        f" {counted(value['rows'], 'old row')}\n"
        f"packs rewritten: {value['packs_rewritten']}, gathered: {value['packs_gathered']}"
        f" ({shown_size(value['bytes_rewritten'])} written)\n"
        + (f"DAMAGED packs left as they are: {value['packs_damaged']}\n" if value["packs_damaged"] else "")
        + f"database: {shown_size(database['bytes'])}, {shown_size(database['free_bytes'])} of it free\n"
    )
