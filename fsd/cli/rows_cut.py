"""Rows: checkpoints made from a sandbox, through its mount or from a directory without one."""

from __future__ import annotations

from typing import Final

from fsd.cli import values
from fsd.cli.rows_mount import ROWS as MOUNT_ROWS
from fsd.cli.table import Command, flag, switch

GROUP: Final = "Checkpoints"
_MOUNT: Final = next(row for row in MOUNT_ROWS if row.short == ("mount",))
POLICY: Final = (
    flag("--include", "only what matches (`*.py`, `/docs/**`); default: everything", metavar="PATTERN",
         many=True),
    flag("--exclude", "not what matches; replaces the default (.git, node_modules, .env*, …)",
         metavar="PATTERN", many=True),
)  # fmt: skip

ROWS: Final = (
    Command(
        ("checkpoint", "create"), (), GROUP, "freeze what a mount here shows now, else what the server has",
        'fsd checkpoint create --label "before the refactoring"', "do_cut:create", changes=True,
        plan=("POST", "/v1/file-systems/{fs}/checkpoints", "make a checkpoint"),
        flags=(
            flag("--label", "a name for people", metavar="TEXT"),
            flag("--mount", "through this mount (default: the one of the filesystem here)", metavar="DIR"),
            flag("--thread", "put it into this thread of a host, under its writer's lease", metavar="THREAD"),
            flag("--keep-for", "it may be thinned away after this (default: it stays)",
                 values.positive_duration, metavar="DURATION"),
            flag("--timeout", "give up after this, 0: never (default 5m); then no checkpoint is made",
                 values.duration, metavar="DURATION", default=300.0),
            switch("--partial", "also when the server refused changes; they are named and not in it"),
            switch("--remote", "ask the server, which asks each mount to send what it has first"),
            flag("--drain", "with --remote: how long mounts may take (default 10s; 0: do not ask them)",
                 values.duration, metavar="DURATION", default=10.0),
            switch("--require-all", "with --remote: no checkpoint unless every mount could be asked"),
        ),
    ),
    Command(
        ("checkpoint", "mount"), (), GROUP, "mount a checkpoint, read-only",
        "fsd checkpoint mount cp_0123456789abcdefghjk /mnt/before", "do_mount:mount", changes=True,
        plan=("POST", "/v1/file-systems/{fs}/sessions", "mount {checkpoint} on {mount_path}"),
        flags=(
            flag("--checkpoint --checkpoint-id", "the checkpoint", metavar="ID", position=0, required=True),
            flag("--mount-path", "the mount point", metavar="MOUNTPOINT", position=1, required=True),
            *(one for one in _MOUNT.flags if one.dest not in ("checkpoint", "mount_path") and not one.only),
        ),
    ),
    Command(
        ("checkpoint", "capture"), (), GROUP, "put a local directory into a thread's checkpoint, no mount",
        "fsd checkpoint capture ./work --thread chat-17 --label draft", "do_cut:capture", changes=True,
        plan=("POST", "/v1/checkpoints/append", "capture {directory} into the thread {thread}"),
        flags=(
            flag("--directory", "the directory", metavar="DIR", position=0, required=True),
            flag("--thread", "the thread it is appended to", metavar="THREAD", required=True),
            flag("--label", "a name for people", metavar="TEXT"),
            *POLICY,
            flag("--secret-env", "zero the value of this variable wherever it stands", metavar="NAME",
                 many=True),
            flag("--secret-file", "zero the content of this file wherever it stands", metavar="FILE",
                 many=True),
            switch("--skip-links", "leave out links that lead out of the directory"),
            flag("--max-file-size", "refuse larger files (default 16G)", values.size, metavar="SIZE"),
            flag("--run-id", "the run it is made by", metavar="ID"),
        ),
    ),
)  # fmt: skip
