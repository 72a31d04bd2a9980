"""Rows: files by path, without a mount."""

from __future__ import annotations

from typing import Final

from fsd.cli import modes, values
from fsd.cli.several import more, others
from fsd.cli.table import YES, Command, Flag, flag, operand, switch

GROUP: Final = "Files"
LAYERS: Final = "a layer is a fork with a token of its own, which create-layer and fork-layer print: use that"
LAYER: Final = flag("--layer-id", "", metavar="ID", refuse=LAYERS, only="long")


STATE: Final = (
    flag("--checkpoint --checkpoint-id", "as it was in this checkpoint", metavar="ID"),
    flag("--at-journal", "as it was at this entry of a journal", values.journal_at, metavar="JOURNAL:SEQ"),
)


def path(help: str, **more: object) -> Flag:
    return flag("--path", help, metavar="PATH", position=0, **more)  # type: ignore[arg-type]


def ends(*names: str) -> tuple[Flag, ...]:
    """The named ends of a copy."""
    helps = {
        "--from-local": "local file or directory", "--from-remote": "remote path",
        "--to-local": "local path", "--to-remote": "remote path",
    }  # fmt: skip
    return tuple(
        flag(n, helps[n], metavar="PATH") if n in helps else switch(n, n[2:].replace("-", " ")) for n in names
    )


ROWS: Final = (
    Command(
        ("cp",), ("fs", "copy-file"), GROUP, "copy between here and there: files, trees, stdin, stdout",
        "fsd cp plan.md :/tasks/task-42/plan.md\n"
        "fsd cp -r :/tasks/task-42 ./task-42\n"
        "fsd cp *.md :/tasks/task-42/\n"
        "printf hi | fsd cp - :/hi",
        "do_copy:copy", aliases=(("fs", "cp"),), changes=True,
        long_example="fsd fs copy-file --from-local plan.md --to-remote /tasks/task-42/plan.md",
        plan=("PUT", "/v1/file-systems/{fs}/files/…", "copy {source} to {destination}"),
        flags=(
            operand("source", "local path, :/remote/path or -", position=0),
            operand("destination", "local path, :/remote/path or -", position=1),
            more(2),
            *ends("--from-local", "--from-stdin", "--from-remote",
                  "--to-remote", "--to-local", "--to-stdout"),
            switch("--recursive -r -R --archive -a", "a whole tree, in parallel (-a: modes and times are kept"
                   " always)"),
            switch("--resume", "skip files that are there with the same size and time"),
            switch("--overwrite", "replace what is there (also the default, as cp does)"),
            switch("--no-overwrite -n", "fail when the target exists"),
            switch("--create-parents", "make missing local directories (remote ones always are)"),
            switch("--append", "add to the end of a remote file (from local or stdin)"),
            flag("--if-match", "replace only this revision", metavar="INO:VERSION"),
            flag("--mode", "permission bits of a new remote file", values.mode, metavar="OCTAL"),
            flag("--tag", "tag for the remote file (user.tag.* xattr)", values.pair, metavar="K=V",
                 many=True),
            flag("--description", "kept as the tag `description`", metavar="TEXT", only="long"),
            *STATE,
            LAYER,
        ),
    ),
    Command(
        ("cat",), ("fs", "read-file"), GROUP, "write a file's bytes to stdout",
        "fsd cat /tasks/task-42/plan.md", "do_files:cat", aliases=(("fs", "cat"),), raw=True,
        flags=(
            path("remote file", required=True),
            others(1),
            flag("--offset", "first byte", values.integer(), metavar="N"),
            flag("--length", "how many bytes", values.integer(), metavar="N"),
            *STATE,
            LAYER,
        ),
    ),
    Command(
        ("ls",), ("fs", "list-files"), GROUP, "list a directory",
        "fsd ls /tasks", "do_files:ls", aliases=(("fs", "ls"),),
        flags=(
            path("remote directory (default /)", default="/"),
            others(1),
            switch("--recursive -r -R", "with everything below, as paths"),
            switch("-l --details", "with mode, owner, size and time"),
            switch("--all -a", "accepted: names that begin with a dot are always shown"),
            flag("--limit", "at most so many entries", values.integer(1), metavar="N"),
            flag("--after", "go on at the `next_after` of the page before", values.cursor, metavar="CURSOR"),
            *STATE,
        ),
    ),
    Command(
        ("stat",), ("fs", "describe-file"), GROUP, "show revision, mode, links, times and tags of a path",
        "fsd stat /tasks/task-42/plan.md", "do_files:stat", aliases=(("fs", "stat"),),
        flags=(
            path("remote path", required=True),
            others(1),
            switch("--follow -L", "what a symlink leads to, not the symlink itself"),
            *STATE,
        ),
    ),
    Command(
        ("mv",), ("fs", "move-file"), GROUP, "rename a file or directory, or move it into another",
        "fsd mv /tasks/draft.md /tasks/plan.md", "do_files:mv", aliases=(("fs", "mv"),), changes=True,
        plan=("POST", "/v1/file-systems/{fs}/actions", "rename {from_remote} to {to_remote}"),
        flags=(
            flag("--from-remote", "remote path", metavar="FROM", required=True, position=0),
            flag("--to-remote", "remote path, or a directory to move into", metavar="TO", required=True,
                 position=1),
            more(2),
            switch("--overwrite", "replace what is at the target"),
        ),
    ),
    Command(
        ("rm",), ("fs", "delete-file"), GROUP, "remove a file, or a tree with -r; checkpoints still have it",
        "fsd rm -r /tasks/task-41", "do_files:rm", aliases=(("fs", "rm"),), changes=True,
        plan=("POST", "/v1/file-systems/{fs}/actions", "remove {path}"),
        flags=(
            path("remote path", required=True),
            others(1),
            switch("--recursive -r -R", "with everything below"),
            switch("--force -f", "do not ask, and no error when it is not there"),
            YES,
        ),
    ),
    Command(
        ("mkdir",), ("fs", "create-directory"), GROUP, "make a directory",
        "fsd mkdir -p /tasks/task-42/out", "do_files:mkdir", aliases=(("fs", "mkdir"),), changes=True,
        plan=("POST", "/v1/file-systems/{fs}/actions", "make the directory {path}"),
        flags=(
            path("remote path", required=True),
            others(1),
            flag("--mode -m", "permission bits", values.mode, metavar="OCTAL"),
            switch("--parents -p", "make missing parents; no error when it exists"),
        ),
    ),
    Command(
        ("chmod",), ("fs", "chmod-file"), GROUP, "change permission bits",
        "fsd chmod 600 /tasks/task-42/plan.md", "do_files:chmod", aliases=(("fs", "chmod"),), changes=True,
        plan=("POST", "/v1/file-systems/{fs}/actions", "change the mode of {path} to {mode}"),
        flags=(
            flag("--mode", "permission bits, octal, or a change: u+x, go-w, a=rX", modes.change,
                 metavar="MODE", required=True, position=0),
            flag("--path", "remote path", metavar="PATH", required=True, position=1),
            others(2),
            switch("--recursive -R", "with everything below, symlinks apart"),
        ),
    ),
    Command(
        ("ln",), (), GROUP, "make a hard link, or a symlink with -s",
        "fsd ln -s plan.md /tasks/task-42/latest", "do_files:ln", changes=True,
        plan=("POST", "/v1/file-systems/{fs}/actions", "link {link_path} to {target}"),
        flags=(
            flag("--target", "what the link leads to", metavar="TARGET", required=True, position=0),
            flag("--link-path", "remote path of the link", metavar="LINK", required=True, position=1),
            switch("--symbolic -s", "a symlink: TARGET is kept as written"),
            switch("--force -f", "in the place of a file or symlink of that name"),
            switch("--no-dereference -n", "accepted: LINK is never followed"),
        ),
    ),
    Command(
        (), ("fs", "create-symlink"), GROUP, "make a symlink (short: fsd ln -s)",
        "fsd ln -s plan.md /tasks/task-42/latest", "do_files:symlink", aliases=(("fs", "symlink"),),
        changes=True,
        plan=("POST", "/v1/file-systems/{fs}/actions", "make the symlink {link_path} to {target}"),
        flags=(
            flag("--target", "what the link leads to", metavar="TARGET", required=True),
            flag("--link-path", "remote path of the link", metavar="PATH", required=True),
        ),
    ),
    Command(
        (), ("fs", "create-hardlink"), GROUP, "make a hard link (short: fsd ln)",
        "fsd ln /tasks/a /tasks/b", "do_files:hardlink", aliases=(("fs", "hardlink"),),
        changes=True,
        plan=("POST", "/v1/file-systems/{fs}/actions", "link {link_path} to {source_path}"),
        flags=(
            flag("--source-path", "remote file", metavar="PATH", required=True),
            flag("--link-path", "remote path of the link", metavar="PATH", required=True),
        ),
    ),
    Command(
        ("find",), ("fs", "find-files"), GROUP, "find by name, type, size, time, tag",
        "fsd find /tasks --name '*.md' --newer 2026-01-31", "do_files:find", aliases=(("fs", "find"),),
        flags=(
            path("where to look (default /)", default="/"),
            flag("--file-name-pattern --name", "pattern with * and ?", metavar="PATTERN"),
            flag("--resource-type --type", "file, directory, symlink, …", values.kind, metavar="TYPE"),
            flag("--tag", "key, or key=value", metavar="K[=V]", many=True),
            flag("--newer", "changed at or after", values.date_ns, metavar="DATE"),
            flag("--older", "changed before", values.date_ns, metavar="DATE"),
            flag("--min-size-bytes --min-size", "at least so big", values.size, metavar="SIZE"),
            flag("--max-size-bytes --max-size", "at most so big", values.size, metavar="SIZE"),
            flag("--limit", "at most so many", values.integer(1), metavar="N"),
            *STATE,
            LAYER,
        ),
    ),
    Command(
        ("grep",), ("fs", "search-file-content"), GROUP, "search in the content of files, no mount needed",
        "fsd grep 'TODO|FIXME' /tasks", "do_files:grep", aliases=(("fs", "grep"),),
        flags=(
            flag("--pattern", "regular expression, as Python writes them", metavar="PATTERN", position=0,
                 required=True),
            flag("--path", "file or directory (default /)", metavar="PATH", position=1, default="/"),
            switch("--ignore-case -i", "upper and lower case are the same"),
            switch("--recursive -r -R", "accepted: everything below is searched always", only="short"),
            switch("--line-number -n", "accepted: line numbers are shown always", only="short"),
            flag("--limit", "at most so many lines", values.integer(1), metavar="N"),
            *STATE,
            LAYER,
        ),
    ),
)  # fmt: skip
