"""What a command is: the one table both spellings come from.

A `Command` has a short spelling (`fsd cp`), a long one (`fsd fs copy-file`), aliases of the long one
(`fsd fs cp`), and one list of flags. A flag with a `position` is an operand of the short spelling and a named
flag of the long one; the short spelling takes the name as well. Rows that cannot be done carry the reason in
`refuse` and end with exit 2; so do single flags. Declarations are pure data: importing them is cheap, the
handler (`"module:function"`) is imported when the command runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from fsd.cli import values
from fsd.model.plain import dataclass, field

Words = tuple[str, ...]
LONG_GROUPS: Final = ("fs", "fs-journal")  # what a long spelling begins with


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag or operand.

    `convert` turns the text into the value and raises `UsageError`; None makes it a switch. `many` collects
    a list. `position` is the place among the operands of the short spelling; `many` and `rest` take all
    operands from there, `rest` with what looks like flags. `only` limits it to the "short" or the "long"
    spelling. `refuse` is the reason it is refused for; `accept` the values that pass nevertheless, because
    they ask for what happens anyway.
    """

    names: Words
    dest: str
    help: str
    convert: Callable[[str], Any] | None
    metavar: str = ""
    default: Any = None
    many: bool = False
    required: bool = False
    position: int | None = None
    rest: bool = False
    only: str = ""
    refuse: str = ""
    accept: Words = ()

    @property
    def operand(self) -> str:
        """How the operand is written in a usage line."""
        return self.metavar or self.dest.upper().replace("_", "-")


@dataclass(frozen=True, slots=True)
class Command:
    """One row. `raw` commands write bytes, so `--query` is refused there; `changes` ones have `--dry-run`.

    `plan` names the request a dry run would send, as `(method, path, description)` with `{dest}` fields.
    `identity` says what the command needs: "token", "admin", "either", "origin" (as either, but the
    filesystem that is named may be a fork of the token's) or "" (nothing).
    """

    short: Words
    long: Words
    group: str
    help: str
    example: str
    handler: str = ""
    flags: tuple[Flag, ...] = ()
    aliases: tuple[Words, ...] = ()
    identity: str = "token"
    changes: bool = False
    raw: bool = False
    plan: tuple[str, str, str] = ("", "", "")
    refuse: str = ""
    long_example: str = ""

    @property
    def name(self) -> str:
        """The spelling used in messages where none was typed."""
        return " ".join(self.short or self.long)

    def words_of_operation(self) -> str:
        """The operation's name in documents: the long verb where there is one."""
        return self.long[-1] if self.long else "-".join(self.short)

    def spellings(self) -> Iterator[Words]:
        if self.short:
            yield self.short
        if self.long:
            yield self.long
        yield from self.aliases

    def all_flags(self, long: bool) -> tuple[Flag, ...]:
        """The command's own flags and the common ones that apply to it, for one spelling."""
        found = [*self.flags, *COMMON]
        if self.identity in ("token", "either", "origin"):
            found += [f for f in TOKEN_FLAGS if all(f.dest != own.dest for own in self.flags)]
        if self.identity in ("admin", "either", "origin"):
            found += ADMIN_FLAGS
        if self.changes:
            found.append(DRY_RUN)
        else:
            found.append(NO_DRY_RUN)
        unwanted = "short" if long else "long"
        return tuple(f for f in found if f.only != unwanted)


def flag(names: str, help: str, convert: Callable[[str], Any] = values.text, **more: Any) -> Flag:
    """A flag with a value. `names` are separated by blanks; the destination comes from the first long one."""
    words = tuple(names.split())
    dest = more.pop("dest", "") or next(w for w in words if w.startswith("--"))[2:].replace("-", "_")
    return Flag(words, dest, help, convert, **more)


def switch(names: str, help: str, **more: Any) -> Flag:
    """A flag without a value."""
    words = tuple(names.split())
    dest = more.pop("dest", "") or next(w for w in words if w.startswith("--"))[2:].replace("-", "_")
    return Flag(words, dest, help, None, default=False, **more)


def operand(dest: str, help: str, convert: Callable[[str], Any] = values.text, **more: Any) -> Flag:
    """An operand without a flag name: the short spelling only."""
    return Flag((), dest, help, convert, only="short", **more)


COMMON: Final = (
    flag("--output", "text or json (default: text on a terminal, else json)", values.output,
         metavar="FORMAT"),
    flag("--query", "JMESPath expression applied to the result", metavar="EXPR"),
    flag("--region", "region code; else FSD_REGION_CODE", metavar="CODE"),
    flag("--endpoint", "URL of the server; else FSD_ENDPOINT, else the token's", metavar="URL"),
    switch("--insecure", "allow sending a token over plain http to another machine"),
    switch("--debug", "show the traceback of an error (redacted)"),
    flag("--profile", "only `default`: nothing is stored on disk, so there are no profiles",
         only="long",
         refuse="there are no profiles: fsd stores no credentials; set FSD_TOKEN and FSD_REGION_CODE",
         accept=("default",)),
    switch("--help -h", "this text"),
    switch("--version", "the version"),
)  # fmt: skip

TOKEN_FLAGS: Final = (
    flag("--file-system-id", "assert which filesystem the token is for", metavar="FS"),
    flag("--fs-token", "the token itself (other users can see it in ps: prefer FSD_TOKEN)", metavar="TOKEN"),
    flag("--token-file", "file with the token, readable by its owner only; - is stdin", metavar="FILE"),
)
ADMIN_FLAGS: Final = (
    flag("--admin-key-file", "file with the admin key; - is stdin; else FSD_ADMIN_KEY", metavar="FILE"),
)
DRY_RUN: Final = switch("--dry-run", "say what would be done and do nothing")
NO_DRY_RUN: Final = switch(
    "--dry-run", "", refuse="this command changes nothing: it has no --dry-run", dest="dry_run"
)
YES: Final = switch("--yes -y", "do not ask")
NO_BARRIER: Final = switch("--no-barrier", "do not send first what mounts here have not sent yet")


@dataclass(frozen=True, slots=True)
class Table:
    """All rows, by every spelling."""

    rows: tuple[Command, ...]
    by_words: dict[Words, tuple[Command, bool]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for row in self.rows:
            for words in row.spellings():
                if words in self.by_words:
                    raise ValueError(f"two rows are spelled {' '.join(words)}")
                self.by_words[words] = (row, words[0] in LONG_GROUPS)

    def find(self, argv: list[str]) -> tuple[Command, bool, Words, list[str]] | None:
        """The row `argv` begins with (longest spelling first), whether it is the long one, its words, the
        rest."""
        for count in (2, 1):
            words = tuple(argv[:count])
            if len(words) == count and words in self.by_words:
                row, long = self.by_words[words]
                return row, long, words, argv[count:]
        return None

    def groups(self, first: str) -> list[Command]:
        """The rows any spelling of which has two words and begins with `first`."""
        return [row for row in self.rows if any(len(w) == 2 and w[0] == first for w in row.spellings())]


def load() -> Table:
    """The whole table, from the modules of rows."""
    from fsd.cli import (
        rows_checkpoint,
        rows_control,
        rows_cut,
        rows_files,
        rows_fork,
        rows_journal,
        rows_later,
        rows_mount,
    )

    return Table(
        (
            *rows_control.ROWS,
            *rows_files.ROWS,
            *rows_mount.ROWS,
            *rows_cut.ROWS,
            *rows_checkpoint.ROWS,
            *rows_fork.ROWS,
            *rows_journal.ROWS,
            *rows_later.ROWS,
        )
    )
