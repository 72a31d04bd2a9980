"""Rows that are refused, with the reason, and the two that have nothing to do."""

from __future__ import annotations

from typing import Final

from fsd.cli.rows_control import STORED
from fsd.cli.table import Command, Words, flag

GROUP: Final = "Later"
SCOPES: Final = "scoped tokens come with a later release; `fsd token create` makes owner tokens"


def _row(reason: str, short: str = "", long: str = "", alias: str = "") -> Command:
    aliases: tuple[Words, ...] = (tuple(alias.split()),) if alias else ()
    return Command(
        tuple(short.split()), tuple(long.split()), GROUP, "not available", "fsd --help", identity="",
        refuse=reason, aliases=aliases,
    )  # fmt: skip


def _nothing(long: str, word: str) -> Command:
    return Command(
        (), ("fs", long), "Files", f"answers that there is nothing to {word}: everything is remote",
        "fsd --help", f"do_files:nothing_to_{word}", changes=True,
        plan=("-", "-", f"nothing to {word}"),
        flags=(
            flag("--mount-path", "accepted", metavar="DIR"),
            flag("--archive-path", "accepted", metavar="PATH"),
            flag("--pack-path", "accepted", metavar="PATH", many=True),
        ),
    )  # fmt: skip


ROWS: Final = (
    _nothing("pack-file-system", "pack"),
    _nothing("unpack-file-system", "unpack"),
    _row("statistics come with a later release; the server has /metrics", "stats"),
    _row(SCOPES, "", "fs generate-file-system-scoped-token"),
    _row("refreshing belongs to scoped tokens, a later release; `fsd token rotate` replaces an owner token",
         "", "fs refresh-file-system-token"),
    _row(STORED, "", "fs import-file-system-token"),
)  # fmt: skip
