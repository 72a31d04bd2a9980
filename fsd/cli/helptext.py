"""Help of the program, of a group, of a command.

Short spellings are what people see; the long ones are listed by `fsd help long` and in docs/commands.md.
"""

from __future__ import annotations

from fsd.cli.table import Command, Flag, Table, Words

GROUPS = ("Server and filesystems", "Files", "Mounts", "Checkpoints", "Forks", "Journals", "Other", "Later")


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
        "Exit codes: 0 ok, 1 failed or conflict, 2 usage, 3 not authenticated, 4 not permitted, 5 not found,",
        "6 not drained (data still only here), 7 busy, 130 interrupted.",
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
            name = f.operand + ("..." if f.rest or f.many else "")
            parts.append(name if f.required else f"[{name}]")
    for f in row.flags:
        if f in flags and f.names and (long or f.position is None) and f.required:
            parts.append(f"{f.names[0]} {f.operand}")
    parts.append("[FLAGS]")
    return " ".join(parts)


def _flag_line(f: Flag) -> str:
    import textwrap

    names = ", ".join(sorted(f.names, key=len))
    if f.convert is not None:
        names += f" {f.operand}"
    more = " (repeatable)" if f.many else ""
    text = f"refused: {f.refuse}" if f.refuse and not f.accept else f.help + more
    first, rest = f"  {names:<30} ", " " * 33
    if not text:
        return first.rstrip()
    if len(first) > len(rest):  # no room beside the names
        return f"{first.rstrip()}\n{textwrap.fill(text, 100, initial_indent=rest, subsequent_indent=rest)}"
    return textwrap.fill(text, 100, initial_indent=first, subsequent_indent=rest)


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
    example = row.example if not long else row.long_example or long_example(row, words)
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
    "pattern": "error",
}
