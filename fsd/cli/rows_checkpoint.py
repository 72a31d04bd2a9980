"""Rows: checkpoints as they are listed, compared, read, restored, exported, deleted and thinned."""

from __future__ import annotations

from typing import Final

from fsd.cli import values
from fsd.cli.table import NO_BARRIER, YES, Command, Flag, flag, switch

GROUP: Final = "Checkpoints"
ROUTE: Final = "/v1/file-systems/{fs}/checkpoints"


def checkpoint(help: str = "id of the checkpoint, or how it begins (8 characters)", **more: object) -> Flag:
    return flag("--checkpoint --checkpoint-id", help, metavar="ID", position=0, **more)  # type: ignore[arg-type]


ROWS: Final = (
    Command(
        ("checkpoint", "list"), (), GROUP, "list checkpoints, newest first",
        "fsd checkpoint list --limit 20", "do_checkpoint:list_all",
        flags=(
            flag("--thread", "only of this thread (default: all)", metavar="THREAD"),
            flag("--limit", "at most so many", values.integer(1), metavar="N"),
        ),
    ),
    Command(
        ("checkpoint", "show"), (), GROUP, "show one checkpoint, with --files the paths and contents in it",
        "fsd checkpoint show cp_0123456789abcdefghjk", "do_checkpoint:show",
        flags=(checkpoint(required=True), switch("--files", "with every file, as the contract lists them")),
    ),
    Command(
        ("checkpoint", "diff"), (), GROUP, "what changed between a checkpoint and another, or now",
        "fsd checkpoint diff cp_0123456789abcdefghjk", "do_checkpoint:diff",
        flags=(
            flag("--from", "the earlier one: an id, seq:N or journal:JOURNAL:SEQ", metavar="A", position=0,
                 required=True, dest="first"),
            flag("--to", "the later one (default: the files as they are now)", metavar="B", position=1,
                 dest="last"),
        ),
    ),
    Command(
        ("checkpoint", "cat"), (), GROUP, "write a file of a checkpoint to stdout",
        "fsd checkpoint cat cp_0123456789abcdefghjk /tasks/plan.md", "do_checkpoint:cat", raw=True,
        flags=(
            checkpoint(required=True),
            flag("--path", "the file", metavar="PATH", position=1, required=True),
        ),
    ),
    Command(
        ("checkpoint", "export"), (), GROUP, "write a checkpoint, or a path of it, as a tar stream to stdout",
        "fsd checkpoint export cp_0123456789abcdefghjk > tree.tar", "do_checkpoint:export", raw=True,
        flags=(
            checkpoint(required=True),
            flag("--path", "only this file or directory (default: everything)", metavar="PATH", position=1,
                 default="/"),
        ),
    ),
    Command(
        ("checkpoint", "restore"), (), GROUP, "go back to a checkpoint; what is replaced is kept",
        "fsd checkpoint restore cp_0123456789abcdefghjk /tasks/plan.md\n"
        "fsd checkpoint restore cp_0123456789abcdefghjk --to ./copy",
        "do_checkpoint:restore", changes=True,
        plan=("POST", "/v1/file-systems/{fs}/restore", "go back to an earlier state; keep what is replaced"),
        flags=(
            checkpoint(),
            flag("--path", "only this file or directory (default: the whole tree)", metavar="PATH",
                 position=1),
            flag("--at-journal", "to the files as of this journal entry; the path is the only operand then",
                 values.journal_at, metavar="JOURNAL:SEQ"),
            flag("--to", "into this local directory instead, without a mount", metavar="DIR"),
            switch("--force", "although others have it mounted for writing; --to: replace what is there"),
            YES,
        ),
    ),
    Command(
        ("checkpoint", "delete"), (), GROUP, "delete a checkpoint and what only it holds",
        "fsd checkpoint delete cp_0123456789abcdefghjk --yes", "do_checkpoint:delete", changes=True,
        plan=("DELETE", ROUTE + "/{checkpoint}", "delete the checkpoint {checkpoint}"),
        flags=(checkpoint(required=True), YES),
    ),
    Command(
        ("checkpoint", "prune"), (), GROUP, "delete checkpoints that a number or a rule does not keep",
        "fsd checkpoint prune --keep 10 --yes", "do_checkpoint:prune", changes=True,
        plan=("POST", ROUTE + "/prune", "keep {keep}"),
        flags=(
            flag("--keep", "N: the newest N of all; last=, hourly=, daily=, weekly=, monthly=, yearly=: of"
                 " automatic ones", metavar="RULE", required=True),
            switch("--named", "all, also undo ones of the last hour"),
            switch("--automatic", "automatic ones alone, also with a number"),
            YES,
        ),
    ),
    Command(
        ("history",), (), GROUP, "versions of a file that checkpoints and journals hold, over renames",
        "fsd history /tasks/task-42/plan.md", "do_checkpoint:history",
        flags=(
            flag("--path", "remote path", metavar="PATH", position=0, required=True),
            flag("--limit", "at most so many versions (default 50)", values.integer(1), metavar="N",
                 default=50),
            switch("--no-follow", "by the name alone, not under the names the file had before"),
        ),
    ),
    Command(
        ("undelete",), (), GROUP, "bring back a path that is gone, from the newest state that has it",
        "fsd undelete /tasks/task-42/plan.md", "do_checkpoint:undelete", changes=True,
        plan=("POST", "/v1/file-systems/{fs}/undelete", "bring back {path}"),
        flags=(flag("--path", "remote path", metavar="PATH", position=0, required=True), NO_BARRIER),
    ),
)  # fmt: skip
