"""`fsd completion SHELL`: a script made from the table of commands."""

from __future__ import annotations

from types import SimpleNamespace

from fsd.cli.context import Context
from fsd.cli.output import Raw
from fsd.cli.table import Table


def words(table: Table) -> dict[str, list[str]]:
    """What may follow each beginning: "" the commands, "cp" its flags, "token" its second words."""
    found: dict[str, list[str]] = {"": []}
    for row in table.rows:
        if not row.short or row.refuse:
            continue
        first = row.short[0]
        if first not in found[""]:
            found[""].append(first)
        if len(row.short) == 2:
            found.setdefault(first, []).append(row.short[1])
        hidden = {"help", "version", "debug"}
        flags = [
            name
            for flag in row.all_flags(False)
            for name in flag.names
            if name.startswith("--") and not flag.refuse and flag.dest not in hidden
        ]
        found[" ".join(row.short)] = flags
    return found


BASH = """\
_fsd() {
    local cur=${COMP_WORDS[COMP_CWORD]} key words
    key="${COMP_WORDS[1]}"
    [ "$COMP_CWORD" -le 1 ] && key=""
    case "$key" in
@GROUPS@    esac
    case "$key" in
@CASES@    *) words="" ;;
    esac
    if [[ $cur == -* || -z $key || $key == "$group" ]]; then
        COMPREPLY=($(compgen -W "$words" -- "$cur"))
    else
        COMPREPLY=($(compgen -f -- "$cur"))
    fi
}
complete -o filenames -F _fsd fsd
"""


def bash(table: Table) -> str:
    found = words(table)
    groups = [key for key, after in found.items() if key and not after[0].startswith("-")]
    lines = ""
    for name in groups:
        lines += f'    {name}) [ "$COMP_CWORD" -gt 2 ] && key="{name} ${{COMP_WORDS[2]}}" ;;\n'
    cases = "".join(f'    "{key}") words="{" ".join(after)}" ;;\n' for key, after in found.items())
    text = BASH.replace("@GROUPS@", lines).replace("@CASES@", cases)
    inner = " || ".join(f'$key == "{g}"' for g in groups)
    return text.replace('$key == "$group"', inner)


def zsh(table: Table) -> str:
    return "#compdef fsd\nautoload -U +X bashcompinit && bashcompinit\n" + bash(table)


def fish(table: Table) -> str:
    lines = ["complete -c fsd -f -n __fish_use_subcommand -a '" + " ".join(words(table)[""]) + "'"]
    for key, after in words(table).items():
        if not key:
            continue
        seen = " and ".join(f"__fish_seen_subcommand_from {part}" for part in key.split())
        if after and not after[0].startswith("-"):
            lines.append(f"complete -c fsd -f -n '{seen}' -a '{' '.join(after)}'")
        else:
            lines += [f"complete -c fsd -n '{seen}' -l {flag[2:]}" for flag in after]
    return "\n".join(lines) + "\n"


def completion(context: Context, args: SimpleNamespace) -> Raw:
    made = {"bash": bash, "zsh": zsh, "fish": fish}[args.shell](context.table)
    context.streams.stdout.write(made.encode())
    return Raw()
