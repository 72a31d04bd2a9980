"""Rows: mounts, and `run` where mounting is impossible."""

from __future__ import annotations

from typing import Final

from fsd.cli import values
from fsd.cli.rows_files import LAYERS
from fsd.cli.table import YES, Command, Flag, flag, operand, switch

GROUP: Final = "Mounts"
LEFT: Final = "give up after this, 0: never (default 5m, long spelling 30s); what is left stays here"
PACK: Final = "nothing is kept local, so there is nothing to pack or unpack"
STATE: Final = flag("--state-dir", "root of the mounts' state (default: $XDG_STATE_HOME/fsd)", metavar="DIR")


def mount_path(required: bool = True) -> Flag:
    return flag("--mount-path", "the mount point", metavar="MOUNTPOINT", position=0, required=required)


def timeout(default: float | None, help: str) -> Flag:
    return flag("--timeout", help, values.duration, metavar="DURATION", default=default)


ROWS: Final = (
    Command(
        ("mount",), ("fs", "mount-file-system"), GROUP, "mount the filesystem on a directory",
        "fsd mount /mnt/work --remote-path /tasks/task-42", "do_mount:mount", aliases=(("fs", "mount"),),
        changes=True, plan=("POST", "/v1/file-systems/{fs}/sessions", "mount {remote_path} on {mount_path}"),
        flags=(
            mount_path(), STATE,
            flag("--remote-path", "subtree to show (default /)", metavar="PATH", default="/"),
            switch("--read-only", "refuse changes through this mount"),
            flag("--durability", "what close(2) means: fsync, or close (on the server when close returns)",
                 values.one_of("fsync", "close"), metavar="MODE", default="fsync"),
            flag("--consistency", "feed: others' changes within a second; open: ask the server at each open",
                 values.one_of("feed", "open"), metavar="MODE", default="feed"),
            switch("--foreground", "stay in the foreground"),
            switch("--no-supervisor", "run the daemon alone: nothing mounts again after a crash"),
            flag("--ready-timeout", "how long to wait for the mount (default 60s)", values.positive_duration,
                 metavar="DURATION", default=60.0),
            flag("--stop-timeout", "how long a stop by signal may flush (default 8s)",
                 values.positive_duration, metavar="DURATION", default=8.0),
            flag("--io-timeout", "how long a call waits for the server before EIO (default 5m, 0: for ever)",
                 values.duration, metavar="DURATION", default=300.0),
            flag("--buffer-size", "bound of what waits to be sent (default: half the free disk, at most 16G)",
                 values.positive_size, metavar="SIZE"),
            flag("--cache-size", "bound of the read cache", values.positive_size, metavar="SIZE"),
            flag("--loop", "scheduler of the FUSE thread: mini (default), or trio",
                 values.one_of("mini", "trio"), metavar="NAME", default="mini"),
            switch("--no-xattr", "no extended attributes"),
            switch("--acl", "POSIX ACLs (setfacl): kept, inherited and enforced"),
            switch("--exclusive", "be the only writer of the subtree: others are told EROFS, or exit 7"),
            flag("--wait", "with --exclusive: how long to wait while another holds it (default 0s)",
                 values.duration, metavar="DURATION", default=0.0),
            flag("--lease-time", "with --exclusive: how soon others may write after this sandbox is lost "
                 "(default 30s)", values.positive_duration, metavar="DURATION", default=30.0),
            switch("--writeback", "the kernel's write-back cache",
                   refuse="the kernel's write-back cache comes with a later release"),
            flag("--checkpoint --checkpoint-id", "show this checkpoint, read-only", metavar="ID"),
            flag("--at-journal", "show what was committed when this journal entry was made, read-only",
                 values.journal_at, metavar="JOURNAL:SEQ"),
            switch("--restore-head", "with --thread: first put the thread's newest checkpoint into the "
                   "subtree, which is empty or --exclusive"),
            switch("--if-empty", "with --restore-head: go on with what is there, if anything is"),
            flag("--thread", "the thread of --restore-head", metavar="THREAD"),
            flag("--auto-checkpoint", "make a checkpoint so often, where something changed",
                 values.positive_duration, metavar="DURATION"),
            flag("--keep", "thin automatic checkpoints by this rule (hourly=24,daily=7)", metavar="RULE"),
            flag("--driver", "auto or fuse", metavar="NAME", only="long",
                 refuse="there is no WebDAV driver", accept=("auto", "fuse")),
            flag("--layer-ref", "", metavar="REF", only="long", refuse=LAYERS),
            flag("--mount-profile", "none", metavar="NAME", only="long", accept=("none",),
                 refuse="profiles keep things local; everything here is remote (until --local-only exists)"),
            flag("--local-root", "", metavar="DIR", only="long",
                 refuse="there is no local overlay; --state-dir is where the mount keeps its state"),
            flag("--cache-dir", "the same as --state-dir", metavar="DIR", only="long"),
            flag("--read-cache-size-mb", "size of the read cache", values.integer(1), metavar="MB",
                 only="long"),
            flag("--read-cache-max-file-mb", "", metavar="MB", only="long",
                 refuse="blocks are cached, not files: there is no largest file"),
            flag("--read-cache-ttl", "accepted: the change feed keeps the cache fresher than any such time",
                 values.duration, metavar="DURATION", only="long"),
            flag("--write-back-cache", "true (default), or false: the same as --durability close",
                 values.boolean, metavar="BOOL", only="long"),
            flag("--pack-path", "", metavar="PATH", many=True, only="long", refuse=PACK),
            flag("--unpack-archive-path", "", metavar="PATH", only="long", refuse=PACK),
            switch("--no-auto-unpack", "accepted: nothing is unpacked", only="long"),
        ),
    ),
    Command(
        ("drain",), ("fs", "drain-file-system"), GROUP, "send everything written so far; the mount stays",
        "fsd drain /mnt/work --timeout 60s", "do_mount:drain", aliases=(("fs", "drain"),), identity="",
        changes=True,
        plan=("-", "control socket of {mount_path}", "send everything written so far"),
        flags=(mount_path(), timeout(None, LEFT)),
    ),
    Command(
        ("unmount",), ("fs", "unmount-file-system"), GROUP, "drain, detach, wait until the daemon has ended",
        "fsd unmount /mnt/work", "do_mount:unmount", aliases=(("fs", "umount"), ("umount",)), identity="",
        changes=True, plan=("-", "control socket of {mount_path}", "drain and unmount"),
        flags=(
            mount_path(), timeout(None, LEFT),
            switch("--lazy --force", "detach even while files are open"),
            switch("--ignore-absent", "no error when nothing is mounted there"),
            flag("--pack-archive-path", "", metavar="PATH", only="long", refuse=PACK),
            switch("--no-auto-pack", "accepted: nothing is packed", only="long"),
        ),
    ),
    Command(
        ("wait",), (), GROUP, "wait until a mount shows a state", "fsd wait /mnt/work --seq 17",
        "do_mount:wait", identity="token",
        flags=(
            mount_path(),
            flag("--seq", "commit number", values.integer(), metavar="N"),
            flag("--journal", "what was committed when this entry was made", values.journal_at,
                 metavar="JOURNAL:SEQ"),
            timeout(60.0, "give up after this, 0: never (default 60s)"),
        ),
    ),
    Command(
        ("wait-exit",), (), GROUP, "wait until the daemon of an unmounted place has sent all and ended",
        "umount /mnt/work; fsd wait-exit /mnt/work", "do_mount:wait_exit", identity="",
        flags=(mount_path(), timeout(None, "give up after this, 0: never (default 5m, long spelling 30s)")),
    ),
    Command(
        ("status",), (), GROUP, "show a mount: what is pending, conflicts, cache, server",
        "fsd status /mnt/work", "do_mount:status", identity="", flags=(mount_path(),),
    ),
    Command(
        ("recover",), (), GROUP, "send what an ended mount left behind; or look after refused changes",
        "fsd recover /mnt/work", "do_recover:recover", changes=True,
        plan=("POST", "/v1/file-systems/{fs}/commits", "send what the mount at {mount_path} left behind"),
        flags=(
            mount_path(), STATE,
            flag("--remote-path", "the subtree that was mounted (default /)", metavar="PATH", default="/"),
            switch("--retry", "try refused changes again; beside what others changed since"),
            flag("--export", "write the files of refused changes, or of what can never be sent, here",
                 metavar="DIR"),
            switch("--discard", "drop refused changes, or what can never be sent, for good"),
            switch("--as-conflicts", "send what a lost --exclusive mount had: what clashes goes beside"),
            YES,
        ),
    ),
    Command(
        ("mounts",), (), GROUP, "list the mounts here, or with --all every session of the filesystem",
        "fsd mounts --all", "do_mount:mounts",
        flags=(switch("--all -a", "every mount session the server knows"),),
    ),
    Command(
        ("conflicts",), (), GROUP, "list conflict copies and lost-and-found of a filesystem",
        "fsd conflicts", "do_mount:conflicts",
        flags=(flag("--path", "where to look (default /)", metavar="PATH", position=0, default="/"),),
    ),
    Command(
        ("lock",), (), GROUP, "run a command while a lock on the server is held; needs no mount",
        "fsd lock /tasks/task-42/db -- make deploy", "do_lock:lock", raw=True, changes=True,
        plan=("POST", "/v1/file-systems/{fs}/leases", "take the lock {path} and run the command under it"),
        flags=(
            flag("--path", "the lock's name, a path that need not exist", metavar="PATH", position=0,
                 required=True),
            flag("--timeout", "give up after this with exit 7, 0: at once (default: wait)", values.duration,
                 metavar="DURATION"),
            flag("--lease-time", "how long it is held on when this sandbox is lost (default 30s)",
                 values.positive_duration, metavar="DURATION", default=30.0),
            operand("command", "the command and its arguments", position=1, rest=True),
        ),
    ),
    Command(
        ("run",), (), GROUP, "pull a subtree, run a command in it, push what changed; needs no /dev/fuse",
        "fsd run --path /tasks/task-42 -- make test", "do_run:run", raw=True, changes=True,
        plan=("PUT", "/v1/file-systems/{fs}/files/…", "pull {path}, run the command, push what it changed"),
        flags=(
            flag("--path --remote-path", "remote subtree (default /); one that does not exist begins empty",
                 metavar="PATH", default="/"),
            flag("--work-dir", "directory to work in (default: a temporary one)", metavar="DIR"),
            flag("--push-left", "send what an earlier run left in this directory", metavar="DIR"),
            operand("command", "the command and its arguments", position=0, rest=True),
        ),
    ),
)  # fmt: skip
