"""From words to values: one small parser for both spellings.

Own code rather than argparse: a flag is an operand in one spelling and named in the other, and starting
must be fast. `--flag value`, `--flag=value`, `-x value`, grouped switches (`-rf`), `--` ends the flags.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

from fsd.cli.table import Command, Flag, Words
from fsd.model.errors import Unsupported, UsageError

PLACES = ("DIR", "FILE")  # metavars of local places
# Metavars of what is bytes, as names of files are; all else is text.
BYTES = (*PLACES, "PATH", "FROM", "TO", "LINK", "TARGET", "MOUNTPOINT", "PATTERN", "")


def parse(command: Command, long: bool, words: Words, argv: list[str]) -> SimpleNamespace:
    """The values of every flag of `command`, by destination. Raises `UsageError` or `Unsupported`.

    `--help` and `--version` stop the checks: they work beside anything.
    """
    flags = command.all_flags(long)
    by_name = {name: f for f in flags for name in f.names}
    given: dict[str, list[str]] = {}
    operands: list[str] = []
    at = 0
    takes_rest = next((f.position for f in flags if f.rest and f.position is not None), None)
    while at < len(argv):
        word = argv[at]
        at += 1
        if word == "--":
            operands += argv[at:]
            break
        if takes_rest is not None and len(operands) > takes_rest:
            operands += argv[at - 1 :]  # everything behind the first word of a command to run is its own
            break
        if not word.startswith("-") or word == "-" or _is_mode(flags, by_name, given, operands, word):
            operands.append(word)
            continue
        at = _take(by_name, given, argv, at, word, words)
    if "help" in given or "version" in given:
        return SimpleNamespace(help="help" in given, version="version" in given)
    place_operands(flags, given, operands, long, words)
    found = SimpleNamespace(**{f.dest: _value(f, given, words, long) for f in flags})
    found.help = found.version = False
    return found


def _is_mode(
    flags: tuple[Flag, ...],
    by_name: dict[str, Flag],
    given: dict[str, list[str]],
    operands: list[str],
    word: str,
) -> bool:
    """Whether `word` is the mode expected next that begins like a flag: `-x` and `-w,o+r`, as of chmod(1)."""
    return (
        word not in by_name
        and set(word) <= set("-+=,ugoarwxXst")
        and any(f.metavar == "MODE" and f.position == len(operands) and f.dest not in given for f in flags)
    )


def _take(
    by_name: dict[str, Flag], given: dict[str, list[str]], argv: list[str], at: int, word: str, words: Words
) -> int:
    """Record the flag `word`; returns where to go on."""
    name, equals, value = word.partition("=")
    found = by_name.get(name)
    if found is None and not word.startswith("--") and len(word) > 2:
        # Grouped: every letter but the last is a switch.
        first, rest = word[:2], word[2:]
        found = by_name.get(first)
        if found is not None and found.convert is None:
            given.setdefault(found.dest, []).append("")
            return _take(by_name, given, argv, at, "-" + rest, words)
        name, equals, value = first, "=", rest
    if found is None:
        typed = name if word.startswith("--") else "-" + word.partition("=")[0]  # find's `-name`
        raise UsageError(f"unknown flag {name}", hint=_nearest(typed, by_name, words))
    if found.convert is None:
        if equals:
            raise UsageError(f"{name} takes no value")
        given.setdefault(found.dest, []).append("")
        return at
    if not equals:
        if at >= len(argv):
            raise UsageError(f"{name} needs a value")
        value = argv[at]
        at += 1
    given.setdefault(found.dest, []).append(value)
    return at


def _nearest(typed: str, names: Iterable[str], words: Words) -> str:
    """Which flag was meant by `typed`, if one is near, and where they all are."""
    import difflib

    everything = f"see `fsd {' '.join(words)} --help`"
    known = [n for n in names if n.startswith("--")]
    # `--path` where there are `--remote-path` and `--mount-path`.
    longer = [n for n in known if typed.startswith("--") and len(typed) > 4 and n.endswith(typed[1:])]
    near = longer if 0 < len(longer) < 3 else difflib.get_close_matches(typed, known, 1, 0.7)
    return f"did you mean {' or '.join(sorted(near))}? Else {everything}" if near else everything


def place_operands(
    flags: tuple[Flag, ...], given: dict[str, list[str]], operands: list[str], long: bool, words: Words
) -> None:
    """Give each operand to the flag of its position."""
    if long and operands and not any(f.rest for f in flags):
        raise UsageError(
            f"`fsd {' '.join(words)}` takes flags only, not {operands[0]!r}",
            hint=f"see `fsd {' '.join(words)} --help`",
        )
    places = sorted((f for f in flags if f.position is not None), key=lambda f: f.position or 0)
    # An operand whose flag was named is not expected among the operands any more.
    open_places = [f for f in places if f.dest not in given]
    for place in open_places:
        if place.rest or place.many:
            if operands:
                given[place.dest] = operands
            return
        if not operands:
            return
        given[place.dest] = [operands.pop(0)]
    if operands:
        raise UsageError(f"one operand too many: {operands[0]!r}", hint=f"see `fsd {' '.join(words)} --help`")


def _value(flag: Flag, given: dict[str, list[str]], words: Words, long: bool) -> object:
    """The converted value of one flag, or its default."""
    name = flag.names[0] if flag.names and (long or flag.position is None) else flag.operand
    if flag.dest not in given:
        if flag.required:
            raise UsageError(f"{name} is missing", hint=f"see `fsd {' '.join(words)} --help`")
        return [] if flag.many or flag.rest else flag.default
    texts = given[flag.dest]
    if flag.refuse and not all(t in flag.accept for t in texts):
        raise Unsupported(f"{name}: {flag.refuse}")
    if flag.convert is None:
        return True
    if len(texts) > 1 and not (flag.many or flag.rest):
        raise UsageError(f"{name} is given twice")
    if flag.metavar in PLACES and "" in texts:
        # The empty path would be the working directory: an unset variable of a script, never what was meant.
        raise UsageError(f"{name} is empty", hint=f"give a {flag.metavar}, or leave {name} out")
    try:
        made = [flag.convert(t) for t in texts]
    except UsageError as exc:
        raise UsageError(f"{name}: {exc.message}", hint=exc.hint) from exc
    if flag.metavar not in BYTES:
        for text in texts:
            # Arguments that are no UTF-8 come with half characters in the place of their bytes.
            if any("\ud800" <= letter <= "\udfff" for letter in text):
                raise UsageError(f"{name}: {text!a} is no UTF-8 text")
    return made if flag.many or flag.rest else made[0]
