"""The table of commands: every row works or is refused with its reason; both spellings; the page.

`TI` lists the commands and flags that scripts written for `ti` use. Each must be spelled here, and each of
its flags must be taken or refused with a reason.
"""

from __future__ import annotations

import importlib
import string
import tomllib
from pathlib import Path

import pytest
from support.cli import TOKEN, inside

import fsd
from fsd.cli import helptext, page, table
from fsd.cli.fields import FIELDS
from fsd.cli.table import Command

ROWS = table.load()
ROOT = Path(__file__).parents[2]
ENV = {"FSD_TOKEN": TOKEN, "FSD_ADMIN_KEY": "an-admin-key-for-tests"}

DATA = "--file-system-id --fs-token"
LAYERS = {
    "create-layer": "--base-root-path --layer-id --layer-name --tag --durability-mode --actor-id",
    "list-layers": "",
    "describe-layer": "--layer-id",
    "diff-layer": "--layer-id --max-seq",
    "create-layer-checkpoint": "--layer-id --checkpoint-id --label",
    "fork-layer": "--parent-layer-ref --checkpoint-id --layer-id --layer-name --actor-id",
    "list-layer-chain": "--layer-ref",
    "rollback-layer": "--layer-id",
    "commit-layer": "--layer-id",
    "delete-layer": "--layer-ref --cascade",
}
TI = {
    "fs create-file-system": "--display-name --label --wait",
    "fs list-file-systems": "--display-name --label",
    "fs describe-file-system": "--file-system-id",
    "fs check-file-system": "",
    "fs delete-file-system": "--file-system-id",
    "fs import-file-system-token": None,
    "fs generate-file-system-token": "--file-system-id --token-name --ttl --no-expiration --store-locally"
    + " --replace",
    "fs generate-file-system-scoped-token": None,
    "fs list-file-system-tokens": "--file-system-id --include-expired --offset --limit",
    "fs enable-file-system-token": "--token-id --file-system-id",
    "fs disable-file-system-token": "--token-id --file-system-id",
    "fs delete-file-system-token": "--token-id --file-system-id",
    "fs refresh-file-system-token": None,
    "fs copy-file": DATA
    + " --from-local --from-stdin --from-remote --to-remote --to-local --to-stdout --recursive --overwrite"
    + " --create-parents --append --resume --layer-id --tag --description",
    "fs read-file": DATA + " --path --offset --length --layer-id",
    "fs list-files": DATA + " --path",
    "fs describe-file": DATA + " --path",
    "fs move-file": DATA + " --from-remote --to-remote --overwrite",
    "fs delete-file": DATA + " --path --recursive",
    "fs create-directory": DATA + " --path --mode",
    "fs chmod-file": DATA + " --path --mode",
    "fs create-symlink": DATA + " --target --link-path",
    "fs create-hardlink": DATA + " --source-path --link-path",
    "fs search-file-content": DATA + " --pattern --path --limit --layer-id",
    "fs find-files": DATA
    + " --path --file-name-pattern --resource-type --tag --newer --older --min-size-bytes --max-size-bytes"
    + " --limit --layer-id",
    "fs pack-file-system": "",
    "fs unpack-file-system": "",
    "fs mount-file-system": DATA
    + " --mount-path --remote-path --driver --read-only --layer-ref --checkpoint-id --mount-profile"
    + " --local-root --cache-dir --read-cache-size-mb --read-cache-max-file-mb --read-cache-ttl"
    + " --write-back-cache --pack-path --unpack-archive-path --no-auto-unpack --ready-timeout --foreground",
    "fs drain-file-system": "--mount-path --timeout",
    "fs unmount-file-system": "--mount-path --timeout --force --ignore-absent --pack-archive-path"
    + " --no-auto-pack",
    "fs-journal create-journal": DATA + " --journal-id --journal-kind --title --actor --label",
    "fs-journal append-journal-entries": DATA
    + " --journal-id --entry-json --json-array --entry-type --source --subject --idempotency-key",
    "fs-journal read-journal-entries": DATA + " --journal-id --after-seq --limit",
    "fs-journal search-journal-entries": DATA
    + " --entry-type --status --journal-kind --actor --subject --label --since --until --limit --cursor"
    + " --include-entries",
    "fs-journal verify-journal": DATA + " --journal-id",
    **{f"fs {name}": flags for name, flags in LAYERS.items()},
}
TI_ALIASES = "cp cat ls stat mv rm mkdir chmod symlink hardlink grep find mount drain umount"
GLOBALS = "--output --query --profile --region --debug --help --version"

SHORT = (
    "serve create list describe check delete cp cat ls stat mv rm mkdir chmod ln find grep mount drain"
    " unmount wait wait-exit mounts status recover conflicts run lock fork merge history undelete audit"
    " doctor stats bench completion"
)
SHORT_PAIRS = {
    "token": "create list disable enable delete rotate",
    "journal": "create append read follow list search verify export",
    "checkpoint": "create list show diff mount restore export cat delete prune sweep capture",
}


PAIRS = [f"{first} {second}" for first, seconds in SHORT_PAIRS.items() for second in seconds.split()]
STARTS = ("fsd ", "export ", "eval ", "printf ", "umount ")


def spelled(words: str) -> Command:
    found = ROWS.by_words.get(tuple(words.split()))
    assert found is not None, f"fsd {words} is not in the table"
    return found[0]


@pytest.mark.parametrize("words", TI)
def test_every_row_of_ti_works_or_is_refused_with_its_reason(words: str) -> None:
    flags, row = TI[words], spelled(words)
    told = inside(*words.split(), "--help")
    assert told.code == 0
    assert f"fsd {words}" in told.text
    if flags is None:
        assert row.refuse, f"{words} is refused in this test but not in the table"
        found = inside(*words.split(), "--anything", env=ENV)
        assert found.code == 2
        assert row.refuse in found.err
        return
    assert not row.refuse
    names = {name: f for f in row.all_flags(True) for name in f.names}
    for name in (flags + " " + GLOBALS).split():
        assert name in names, f"{words} does not know {name}"
        if names[name].refuse:
            assert len(names[name].refuse) > 10, f"{words} refuses {name} without a reason"


def test_every_alias_of_ti_means_a_long_spelling() -> None:
    for alias in TI_ALIASES.split():
        row, long = ROWS.by_words["fs", alias]
        assert long
        assert row.long, alias


@pytest.mark.parametrize("words", [*SHORT.split(), *PAIRS])
def test_every_short_spelling_of_the_documentation_exists(words: str) -> None:
    row = spelled(words)
    assert row.short == tuple(words.split())
    if row.refuse:
        found = inside(*words.split())
        assert found.code == 2
        assert row.refuse in found.err


ALL = pytest.mark.parametrize("row", ROWS.rows, ids=lambda row: row.name)


@ALL
def test_a_row_is_whole(row: Command) -> None:
    assert row.help
    assert row.group
    if row.refuse:
        return
    module, _, name = row.handler.partition(":")
    assert callable(getattr(importlib.import_module(f"fsd.cli.{module}"), name))
    dests = [f.dest for f in row.all_flags(True)]
    assert len(dests) == len(set(dests)), f"a destination twice: {dests}"
    for long in (False, True):
        names = [n for f in row.all_flags(long) for n in f.names]
        assert len(names) == len(set(names)), f"a name twice: {names}"
    if row.changes:
        method, path, description = row.plan
        assert method
        assert description
        known = {*dests, "fs"} | {f.dest for f in row.all_flags(False)}
        for text in (path, description):
            assert {f for _, f, _, _ in string.Formatter().parse(text) if f} <= known


@ALL
def test_help_of_every_spelling_ends_with_an_example(row: Command) -> None:
    for words in row.spellings():
        for asked in ("--help", "-h", "help"):
            found = inside(*words, asked)
            assert found.code == 0
            assert found.err == ""
        lines = found.text.splitlines()
        if row.refuse:
            assert lines[-1] == f"Refused: {row.refuse}"
        else:
            assert any(line.lstrip().startswith(STARTS) for line in lines[-3:])
            assert inside("help", *words).text == found.text
        assert max(map(len, lines)) <= 120


@ALL
def test_the_example_of_a_row_parses(row: Command) -> None:
    """The words of the example, up to a pipe, are ones the parser takes."""
    import re
    import shlex

    from fsd.cli import parse

    if row.refuse or (row.group == "Files" and "pack" in row.name):
        return
    seen = 0
    for line in row.example.splitlines():
        text = re.sub(r'^(export|eval).*\$\((.*)\)"$', r"\2", line)
        for part in re.split(r"\s*[|;>]\s+", text):
            words = shlex.split(part)
            if not words or words[0] != "fsd":
                continue
            found = ROWS.find(words[1:])
            assert found is not None, part
            parse.parse(found[0], found[1], found[2], found[3])
            seen += 1
    assert seen


def test_the_page_of_commands_is_the_tables() -> None:
    written = (ROOT / "docs" / "commands.md").read_text()
    assert written == page.page(ROWS), "run: python -m fsd.cli.page > docs/commands.md"


def test_the_help_and_the_page_list_every_command() -> None:
    help_text, written = helptext.program(ROWS), page.page(ROWS)
    for row in ROWS.rows:
        if row.refuse:
            continue
        if row.short:
            assert f"  {' '.join(row.short)} " in help_text, row.name
        assert f"`fsd {row.name}`" in written, row.name


def test_every_document_has_its_fields_documented() -> None:
    documents = {row.name for row in ROWS.rows if not row.refuse and not row.raw and row.name != "serve"}
    assert set(FIELDS) == documents


def test_the_version_everywhere() -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert fsd.__version__ == known
    for argv in (["--version"], ["fs", "--version"], ["cat", "--version"], ["fs", "read-file", "--version"]):
        found = inside(*argv)
        assert (found.code, found.text) == (0, f"fsd {known}\n")


def test_no_command_is_a_usage_error_with_help() -> None:
    for argv in ([], ["fs"], ["journal"]):
        found = inside(*argv)
        assert found.code == 2
        assert "usage: fsd" in found.err
        assert found.out == b""


def test_names_of_flags_stand_apart_from_what_they_do() -> None:
    lines = inside("mount", "--help").text.splitlines()
    at = lines.index("  --checkpoint, --checkpoint-id ID")
    assert lines[at + 1] == " " * 33 + "show this checkpoint, read-only"
    for row in ROWS.rows:
        for line in inside(*next(row.spellings()), "--help").text.splitlines():
            assert not line.startswith("  -") or line[31:33].isspace() or len(line.rstrip()) <= 40, line


def test_help_of_groups_and_the_hidden_long_spellings() -> None:
    program = inside("--help").text
    assert "copy-file" not in program.replace("`fsd fs copy-file`", "")
    assert "cp " in program
    listed = inside("help", "long").text
    for words in TI:
        assert f"fsd {words}" in listed
    for group in ("fs", "fs-journal", "journal", "token"):
        for asked in (["help"], ["--help"]):
            found = inside(group, *asked)
            assert found.code == 0
            assert f"usage: fsd {group} COMMAND" in found.text


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_every_command(shell: str) -> None:
    found = inside("completion", shell)
    assert found.code == 0
    for row in ROWS.rows:
        if row.short and not row.refuse:
            assert row.short[0] in found.text
    assert inside("completion", "tcsh").code == 2
