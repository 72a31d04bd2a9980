"""Help of the program, of a group, of a command; and the page of all spellings.

Short spellings are what people see; the long ones are listed by `fsd help long` and in docs/commands.md.
"""

from __future__ import annotations

import textwrap

from fsd.cli.table import COMMON, Command, Flag, Table, Words

GROUPS = ("Server and filesystems", "Files", "Mounts", "Journals", "Other", "Later")


def program(table: Table) -> str:
    """`fsd --help`."""
    lines = [
        "fsd: a directory that survives disposable sandboxes.",
        "",
        "usage: fsd COMMAND [OPERANDS] [FLAGS]",
    ]
    for group in GROUPS[:-1]:
        rows = [r for r in table.rows if r.group == group and r.short and not r.refuse]
        lines += ["", f"{group}:"]
        lines += [f"  {' '.join(r.short):<18} {r.help}" for r in rows]
    lines += [
        "",
        "A sandbox needs two values: FSD_TOKEN and FSD_REGION_CODE. The machine that makes filesystems needs",
        "FSD_ENDPOINT and FSD_ADMIN_KEY (or --admin-key-file).",
        "",
        "fsd COMMAND --help   help of one command, with an example",
        "fsd help long        the long spellings (`fsd fs copy-file`, …) for scripts written for ti",
    ]
    return "\n".join(lines) + "\n"


def long_page(table: Table) -> str:
    """`fsd help long`: every long spelling beside its short one."""
    lines = []
    for row in table.rows:
        if not row.long:
            continue
        note = "  (refused: see its --help)" if row.refuse else ""
        short = f"fsd {' '.join(row.short)}" if row.short else "-"
        lines.append(f"fsd {' '.join(row.long):<52} {short}{note}")
    return "\n".join(lines) + "\n"


def group(table: Table, first: str) -> str:
    """`fsd fs --help`, `fsd journal help`."""
    lines = [f"usage: fsd {first} COMMAND [FLAGS]", ""]
    for row in table.groups(first):
        for words in row.spellings():
            if len(words) == 2 and words[0] == first:
                lines.append(f"  {words[1]:<36} {row.help if not row.refuse else 'refused: ' + row.refuse}")
                break
    return "\n".join(lines) + "\n"


def usage_line(row: Command, long: bool, words: Words) -> str:
    flags = row.all_flags(long)
    parts = [f"fsd {' '.join(words)}"]
    if not long:
        for f in sorted((f for f in flags if f.position is not None), key=lambda f: f.position or 0):
            name = f.operand + ("..." if f.rest else "")
            parts.append(name if f.required else f"[{name}]")
    for f in row.flags:
        if f in flags and f.names and (long or f.position is None) and f.required:
            parts.append(f"{f.names[0]} {f.operand}")
    parts.append("[FLAGS]")
    return " ".join(parts)


def _flag_line(f: Flag) -> str:
    names = ", ".join(sorted(f.names, key=len))
    if f.convert is not None:
        names += f" {f.operand}"
    more = " (repeatable)" if f.many else ""
    text = f"refused: {f.refuse}" if f.refuse and not f.accept else f.help + more
    first = f"  {names:<30} "
    return textwrap.fill(text, 100, initial_indent=first, subsequent_indent=" " * 33) if text else first


def command(row: Command, long: bool, words: Words) -> str:
    """`fsd X --help`: usage, flags, an example that works."""
    lines = [f"usage: {usage_line(row, long, words)}", "", row.help]
    if row.refuse:
        return "\n".join([*lines, "", f"Refused: {row.refuse}"]) + "\n"
    flags = row.all_flags(long)
    if not long:
        operands = sorted((f for f in flags if f.position is not None), key=lambda f: f.position or 0)
        if operands:
            lines += ["", "Operands:", *(f"  {f.operand:<30} {f.help}" for f in operands)]
    shown = [f for f in row.flags if f in flags and f.names and (long or f.position is None)]
    if shown:
        lines += ["", "Flags:", *map(_flag_line, shown)]
    own = set(row.flags)
    common = [f for f in flags if f not in own and not (f.dest == "dry_run" and f.refuse)]
    lines += ["", "Common flags:", *map(_flag_line, common)]
    example = row.example if not long else long_example(row, words)
    lines += ["", "Example:", *(f"  {line}" for line in example.splitlines())]
    return "\n".join(lines) + "\n"


def long_example(row: Command, words: Words) -> str:
    """An example of a long spelling, made of its required flags."""
    parts = [f"fsd {' '.join(words)}"]
    for f in row.flags:
        if f.names and (f.required or f.position is not None) and not f.refuse and f.only != "short":
            name = next(n for n in f.names if n.startswith("--"))
            parts.append(f"{name} {SAMPLES.get(f.dest, f.operand)}")
    return " ".join(parts)


SAMPLES = {
    "path": "/tasks/task-42/plan.md",
    "mount_path": "/mnt/work",
    "journal_id": "task-42",
    "file_system_id": "fs_aaaaaaaaaaaaaaaaaaaa",
    "token_id": "TOKEN-ID",
    "from_remote": "/tasks/a",
    "to_remote": "/tasks/b",
    "mode": "644",
    "target": "plan.md",
    "link_path": "/tasks/latest",
    "source_path": "/tasks/plan.md",
    "pattern": "TODO",
}


def page(table: Table) -> str:
    """docs/commands.md, whole. A test compares the file with this."""
    lines = [
        "# Commands",
        "",
        "Made from the command table by `python -m fsd.cli.page`. Every command in both spellings; the long one",
        "takes the flags and prints the fields that scripts written for `ti` expect. `fsd COMMAND --help` lists",
        "the flags with an example.",
        "",
        *INTRODUCTION,
    ]
    for name in GROUPS:
        rows = [r for r in table.rows if r.group == name and not r.refuse]
        if not rows:
            continue
        lines += ["", f"## {name}", "", "| short | long | what it does |", "| --- | --- | --- |"]
        for row in rows:
            spelled = ", ".join(f"`fsd {' '.join(w)}`" for w in (row.long, *row.aliases) if w) or "-"
            short = f"`fsd {' '.join(row.short)}`" if row.short else "-"
            lines.append(f"| {short} | {spelled} | {row.help} |")
    lines += ["", "## Refused rows", "", "These end with exit 2 and the reason.", ""]
    lines += ["| command | reason |", "| --- | --- |"]
    for row in table.rows:
        if row.refuse:
            spelled = ", ".join(f"`fsd {' '.join(w)}`" for w in row.spellings())
            lines.append(f"| {spelled} | {row.refuse} |")
    lines += ["", "## Refused flags", "", "| command | flag | reason |", "| --- | --- | --- |"]
    for row in table.rows:
        for f in row.flags:
            if f.refuse and not row.refuse:
                but = f" (accepted: {', '.join(f.accept)})" if f.accept else ""
                lines.append(f"| `{row.name}` | `{f.names[0]}` | {f.refuse}{but} |")
    profile = next(f for f in COMMON if f.dest == "profile")
    lines.append(f"| all long spellings | `--profile` | {profile.refuse} (accepted: default) |")
    return "\n".join(lines) + "\n"


INTRODUCTION = """\
## Output

- `--output text|json`. Short spellings print text on a terminal and JSON into a pipe; long spellings print JSON
  unless told otherwise. There is one JSON document on stdout, indented by two blanks; everything else goes to stderr.
  Exceptions: commands that give bytes (`cat`, `cp … -`, `journal export`) and `journal follow`, which prints one JSON object a line.
- `--query EXPR` applies JMESPath to the result with both formats. With text: a scalar is printed bare, a list of
  scalars one a line, a list of objects as a table with sorted columns, an object as key and value, null as `null`.
- Errors: `fsd [ERROR]: what failed` and what to do, on stderr; with JSON also a last line
  `{"error": {"code", "message", "hint", "retryable", "request_id"}}` there.

## Exit codes

0 ok · 1 failed or conflict · 2 usage · 3 not authenticated · 4 not permitted · 5 not found · 6 not drained: data
still only here · 7 busy · 130 interrupted. `fsd run` ends with the exit code of its command where all was brought back.

## Remote and local names

In `fsd cp` a leading `:` marks a remote path (`fsd cp plan.md :/tasks/plan.md`); `-` is stdin or stdout. In all
other file commands paths are remote always and the colon may be left out. A local file whose name begins with `:` or
is `-` is written `./:name`. Names are bytes: whatever the shell passes is what is stored.

## Environment

| variable | use |
| --- | --- |
| `FSD_TOKEN` (or `TI_FS_TOKEN`) | the token of a filesystem |
| `FSD_REGION_CODE` (or `TI_REGION_CODE`) | which endpoint of the token to use |
| `FSD_FILE_SYSTEM_ID` (or `TI_FS_FILE_SYSTEM_ID`) | which filesystem; with a token it is only checked |
| `FSD_ENDPOINT` | URL of the server, overrides the token's |
| `FSD_ADMIN_KEY` | admin key, for the control plane |
| `XDG_STATE_HOME`, `XDG_RUNTIME_DIR`, `HOME`, `TMPDIR` | where mounts keep their state |
| `FSD_CRASH=POINT[:COUNT]` | a seam for tests: the process ends as by SIGKILL when it passes that durable step for the COUNT-th time |

A variable of ours that is set and not empty wins over `TI_*`; a flag wins over both.

## Questions

Deleting a filesystem and discarding refused changes ask on a terminal and need `--yes` elsewhere. `rm -r` and `token delete` ask on a
terminal only. Long spellings never ask, as the scripts they are for expect.""".splitlines()
