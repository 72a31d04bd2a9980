"""`python -m fsd.cli.page > docs/commands.md`: the page of all commands, from the table."""

from __future__ import annotations

import sys
from typing import Final

from fsd.cli import table
from fsd.cli.fields import ENTRY, FIELDS
from fsd.cli.helptext import GROUPS
from fsd.cli.table import COMMON, Command, Table

INTRODUCTION: Final = """\
# Commands

Made from the command table by `python -m fsd.cli.page`. Every command in both spellings; the long one takes
the flags and prints the fields that scripts written for `ti` expect. `fsd COMMAND --help` lists the flags
with an example.

## Output

- `--output text|json`. Short spellings print text on a terminal and JSON into a pipe; long spellings print
  JSON unless told otherwise. There is one JSON document on stdout, indented by two blanks; everything else
  goes to stderr. Exceptions: commands that give bytes (`cat`, `cp … -`, `journal export`, `run`) and
  `journal follow`, which prints one JSON object a line.
- `--query EXPR` applies JMESPath to the result with both formats. With text: a scalar is printed bare, a list
  of scalars one a line, a list of objects as a table with sorted columns, an object as key and value, null
  as `null`.
- Errors: `fsd [ERROR]: what failed` and what to do, on stderr; with JSON also a last line
  `{"error": {"code", "message", "hint", "retryable", "request_id"}}` there.

## Exit codes

0 ok · 1 failed or conflict · 2 usage · 3 not authenticated · 4 not permitted · 5 not found · 6 not drained:
data still only here · 7 busy · 130 interrupted. `fsd run` ends with the exit code of its command where
everything was brought back.

## Remote and local names

In `fsd cp` a leading `:` marks a remote path (`fsd cp plan.md :/tasks/plan.md`); `-` is stdin or stdout. In
all other file commands paths are remote always and the colon may be left out. A local file whose name begins
with `:` or is `-` is written `./:name`. Names are bytes: whatever the shell passes is what is stored.

`cp` into a directory that exists, or to a name that ends with `/`, puts a file inside it under its own name.
`cp -r A B` makes B what A is, merged into what B holds already, so an interrupted copy can be repeated;
`cp -r A B/` makes B/A, and `cp -r A/. B/` (or `cp -r . B/`) puts what is in A into B. Modes and times are
kept, those of symlinks too, and between here and the server the names of one file (hard links) are names of
one file again; a copy within the server gives each of them a file of its own, which shares the content. Holes
of sparse files are neither sent nor written.

Uploads replace what is at the target, in both spellings (`--overwrite` says so, `--no-overwrite` forbids
it). The long spelling's downloads need `--overwrite` to replace a local file.

`cat`, `ls`, `stat`, `rm`, `mkdir` and `chmod` take several paths, each for itself: one that fails is told and
keeps none of the others from being done, and the exit code is the first failure's. `cp` and `mv` take several
sources before a directory that is there, and put each into it under its own name. The document of several is
`results[]`, what each alone would print, and `failed[]` of `path`, `code` and `message`.

## Environment

| variable | use |
| --- | --- |
| `FSD_TOKEN` (or `TI_FS_TOKEN`) | the token of a filesystem |
| `FSD_REGION_CODE` (or `TI_REGION_CODE`) | which endpoint of the token to use |
| `FSD_FILE_SYSTEM_ID` (or `TI_FS_FILE_SYSTEM_ID`) | which filesystem; with a token it is only checked |
| `FSD_ENDPOINT` | URL of the server, overrides the token's |
| `FSD_ADMIN_KEY` | admin key, for the control plane |
| `FSD_DATABASE_URL`, `FSD_BLOBS_URL` | `serve`, `audit`: URLs with a password, which `ps` shows in flags |
| `HTTPS_PROXY`, `ALL_PROXY`, `NO_PROXY` | the forward proxy to https endpoints, and what goes past it |
| `SSL_CERT_FILE` | certificates to trust for https endpoints, instead of the system's |
| `XDG_STATE_HOME`, `XDG_RUNTIME_DIR`, `HOME`, `TMPDIR` | where mounts keep their state |
| `FSD_CRASH=POINT[:COUNT]` | for tests: the process ends as by SIGKILL at that durable step's COUNT-th time |
| `FSD_BOOT_ID=TEXT` | for tests: the machine says that it was started anew |

A variable of ours that is set and not empty wins over `TI_*`; a flag wins over both.

## Questions

What cannot be undone, or replaces everything, asks on a terminal and needs `--yes` elsewhere: deleting a
filesystem, a layer or checkpoints, restoring a whole tree, dropping what a mount had not sent. `rm -r`,
`token delete` and `token rotate` ask on a terminal only. Long spellings never ask, as the scripts
they are for expect.
"""


FIELD_INTRODUCTION: Final = f"""\
## JSON fields

The fields of each command's document. `?`: may be absent, `[]`: a list, `{{}}`: an object. Entries of
`ls` and `find` are what `stat` prints; entries of a journal hold {ENTRY}.

| command | fields |
| --- | --- |"""


def _fields(text: str) -> str:
    words = text.split()
    tail = " and more" if words[-2:] == ["and", "more"] else ""
    return ", ".join(f"`{word}`" for word in (words[:-2] if tail else words)) + tail


def _spelled(words: tuple[tuple[str, ...], ...]) -> str:
    return ", ".join(f"`fsd {' '.join(w)}`" for w in words if w) or "-"


def _group(name: str, rows: list[Command]) -> list[str]:
    lines = ["", f"## {name}", "", "| short | long | what it does |", "| --- | --- | --- |"]
    for row in rows:
        lines.append(f"| {_spelled((row.short,))} | {_spelled((row.long, *row.aliases))} | {row.help} |")
    return lines


def page(rows: Table) -> str:
    """docs/commands.md, whole. A test compares the file with this."""
    lines = INTRODUCTION.splitlines()
    for name in GROUPS:
        available = [r for r in rows.rows if r.group == name and not r.refuse]
        if available:
            lines += _group(name, available)
    lines += ["", *FIELD_INTRODUCTION.splitlines()]
    for name, text in FIELDS.items():
        plain, _, more = text.partition(" long: ")
        added = f"; the long spelling adds {_fields(more)}" if more else ""
        lines.append(f"| `fsd {name}` | {_fields(plain)}{added} |")
    lines += ["", "## Refused commands", "", "These end with exit 2 and the reason.", ""]
    lines += ["| command | reason |", "| --- | --- |"]
    lines += [f"| {_spelled(tuple(r.spellings()))} | {r.refuse} |" for r in rows.rows if r.refuse]
    lines += ["", "## Refused flags", "", "| command | flag | reason |", "| --- | --- | --- |"]
    for row in rows.rows:
        for flag in row.flags:
            if flag.refuse and not row.refuse:
                but = f" (accepted: {', '.join(flag.accept)})" if flag.accept else ""
                lines.append(f"| `{row.name}` | `{flag.names[0]}` | {flag.refuse}{but} |")
    profile = next(f for f in COMMON if f.dest == "profile")
    lines.append(f"| all long spellings | `--profile` | {profile.refuse} (accepted: default) |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page(table.load()))
