"""Rows: the server, filesystems, tokens, and what belongs to no other group."""

from __future__ import annotations

from typing import Final

from fsd.cli import values
from fsd.cli.table import YES, Command, flag, operand, switch
from fsd.model import limits

STORED: Final = "fsd stores no credentials on disk; keep the token in FSD_TOKEN or a secret manager"
FS_OPERAND: Final = flag("--file-system-id", "id of the filesystem", metavar="FS", position=0)
FS_NAMED: Final = flag("--file-system-id", "id of the filesystem; else FSD_FILE_SYSTEM_ID, else the token's")
TOKEN_ID: Final = flag("--token-id", "id of the token", metavar="TOKEN-ID", required=True, position=0)
STORE: Final = (
    switch("--store-locally", "", refuse=STORED, only="long"),
    switch("--replace", "", refuse=STORED, only="long"),
)
GROUP = "Server and filesystems"

ROWS: Final = (
    Command(
        ("serve",), (), GROUP, "run the server",
        "fsd serve --data-dir /var/lib/fsd --listen 127.0.0.1:8420",
        "do_serve:serve", identity="",
        flags=(
            flag("--data-dir", "where everything is kept; made if absent", metavar="DIR", required=True),
            flag("--listen", "address (default 127.0.0.1:8420); port 0 picks a free one", values.listen,
                 metavar="HOST:PORT", default=("127.0.0.1", 8420)),
            flag("--public-url", "URL the tokens name (default: http:// + the listen address)",
                 metavar="URL"),
            flag("--database", "postgresql://… instead of SQLite in DIR; else FSD_DATABASE_URL",
                 metavar="URL"),
            flag("--blobs", "s3://BUCKET/PREFIX instead of packs in DIR; else FSD_BLOBS_URL",
                 metavar="URL"),
            flag("--admin-key-file", "file with the admin key (default: DIR/admin.key, made at first start)",
                 metavar="FILE"),
            flag("--tls-cert", "certificate chain (PEM)", metavar="FILE"),
            flag("--tls-key", "private key (PEM)", metavar="FILE"),
            switch("--behind-proxy", "a proxy in front does TLS: allow another address than loopback"),
            flag("--grace", "content nothing refers to any more is kept so long (default 1d; at least 5m)",
                 values.duration, metavar="DURATION", default=limits.GRACE),
            flag("--history", "the state at a journal entry is kept so long (default 7d)",
                 values.duration, metavar="DURATION", default=limits.HISTORY),
            flag("--keep-changes", "the change feed reaches back so far at most (default 30d)",
                 values.duration, metavar="DURATION", default=limits.FEED_KEEP),
            flag("--keep-sessions", "a mount that was away so long comes back as a new one (default 30d)",
                 values.duration, metavar="DURATION", default=limits.SESSION_KEEP),
            flag("--sweep-every", "pause between sweeps of a filesystem (default 10m; 0s: only `fsd sweep`)",
                 values.duration, metavar="DURATION", default=limits.SWEEP_EVERY),
            switch("--test-clock", "for tests: the clock can be moved over HTTP; nothing is swept by itself"),
            switch("--metrics", "accepted: /metrics is always there"),
        ),
    ),
    Command(
        ("create",), ("fs", "create-file-system"), GROUP, "make a filesystem; prints its token once",
        'export FSD_TOKEN="$(fsd create --wait --query fs_token --output text)"',
        "do_control:create", identity="admin", changes=True,
        plan=("POST", "/v1/file-systems", "make a filesystem and its first owner token"),
        flags=(
            flag("--display-name", "a name for people", metavar="NAME"),
            flag("--label", "label", values.pair, metavar="K=V", many=True),
            switch("--wait", "also wait for a starting server, and until the root can be read"),
            flag("--lease-duration", "of a thread's writer, for hosts that keep checkpoints (default 120s)",
                 values.positive_duration, metavar="DURATION"),
            flag("--renew-after", "when its holder should renew it (default 45s)",
                 values.positive_duration, metavar="DURATION"),
            flag("--quota", "", metavar="SIZE", refuse="quotas come with a later release"),
        ),
    ),
    Command(
        ("list",), ("fs", "list-file-systems"), GROUP,
        "list filesystems; with a token its own and the forks of it",
        "fsd list --label team=a", "do_control:list_all", identity="origin",
        flags=(
            flag("--display-name", "only those whose name holds this", metavar="TEXT"),
            flag("--label", "only those with this label", values.pair, metavar="K=V"),
        ),
    ),
    Command(
        ("describe",), ("fs", "describe-file-system"), GROUP, "show one filesystem",
        "fsd describe fs_aaaaaaaaaaaaaaaaaaaa", "do_control:describe", identity="either",
        flags=(FS_OPERAND, switch("--chain", "of a fork: also what it was made from, all the way up")),
    ),
    Command(
        ("check",), ("fs", "check-file-system"), GROUP,
        "check configuration, token, server and root of a filesystem",
        "fsd check", "do_control:check", identity="either", flags=(FS_OPERAND,),
    ),
    Command(
        ("delete",), ("fs", "delete-file-system"), GROUP,
        "delete a filesystem with all its files and journals",
        "fsd delete fs_aaaaaaaaaaaaaaaaaaaa --yes", "do_control:delete", identity="origin", changes=True,
        plan=("DELETE", "/v1/file-systems/{file_system_id}", "delete the filesystem"),
        flags=(
            flag("--file-system-id", "id of the filesystem", metavar="FS", position=0, required=True),
            switch("--detach", "first copy forks of it that still read its files"),
            switch("--cascade", "delete forks of it that still read its files too"),
            YES,
        ),
    ),
    Command(
        ("token", "create"), ("fs", "generate-file-system-token"), GROUP, "make a further owner token",
        "fsd token create fs_aaaaaaaaaaaaaaaaaaaa --token-name ci --ttl 30d",
        "do_control:token_create", identity="admin", changes=True,
        plan=("POST", "/v1/file-systems/{file_system_id}/tokens", "make an owner token"),
        flags=(
            FS_OPERAND,
            flag("--token-name", "label of the token", metavar="NAME"),
            flag("--ttl", "how long it holds", values.positive_duration, metavar="DURATION"),
            switch("--no-expiration", "it holds until it is deleted (the default of the short spelling)"),
            *STORE,
        ),
    ),
    Command(
        ("token", "list"), ("fs", "list-file-system-tokens"), GROUP, "list tokens (never their secrets)",
        "fsd token list fs_aaaaaaaaaaaaaaaaaaaa", "do_control:token_list", identity="admin",
        flags=(
            FS_OPERAND,
            switch("--include-expired", "expired ones too"),
            flag("--offset", "skip so many", values.integer(), metavar="N", default=0),
            flag("--limit", "at most so many", values.integer(1, 200), metavar="N"),
        ),
    ),
    *(
        Command(
            ("token", verb), ("fs", f"{verb}-file-system-token"), GROUP, f"{verb} a token; holds at once",
            f"fsd token {verb} TOKEN-ID --file-system-id fs_aaaaaaaaaaaaaaaaaaaa",
            f"do_control:token_{verb}", identity="admin", changes=True,
            plan=(method, "/v1/file-systems/{file_system_id}/tokens/{token_id}" + tail, f"{verb} the token"),
            flags=(TOKEN_ID, FS_NAMED, *more),
        )
        for verb, method, tail, more in (
            ("disable", "POST", "/disable", ()),
            ("enable", "POST", "/enable", ()),
            ("delete", "DELETE", "", (YES,)),
        )
    ),
    Command(
        ("token", "rotate"), (), GROUP, "make a new owner token, then delete the old one",
        "fsd token rotate TOKEN-ID --file-system-id fs_aaaaaaaaaaaaaaaaaaaa --ttl 30d",
        "do_control:token_rotate", identity="admin", changes=True,
        plan=("POST", "/v1/file-systems/{file_system_id}/tokens", "make a token, delete {token_id}"),
        flags=(
            TOKEN_ID, FS_NAMED,
            flag("--ttl", "how long the new one holds", values.positive_duration, metavar="DURATION"),
            YES,
        ),
    ),
    *(
        Command(
            words, (), group, text,
            f"fsd {' '.join(words)} --older-than 1d --dry-run", "do_sweep:sweep", identity="admin",
            changes=True, plan=("POST", "/v1/sweep", "remove what nothing has used for the grace"),
            flags=(
                flag("--file-system-id", "only this filesystem", metavar="FS", position=0, dest="only"),
                flag("--older-than", "what nothing has used for so long (default: the server's --grace)",
                     values.duration, metavar="DURATION"),
                switch("--vacuum", "afterwards give the database's free room back to its disk"),
            ),
        )
        for words, group, text in (
            (("sweep",), GROUP, "give back the room of what nothing shows any more"),
            (("checkpoint", "sweep"), "Checkpoints", "the same as fsd sweep"),
        )
    ),
    Command(
        ("audit",), (), "Other", "check the invariants of what a stopped server stored; plan repairs",
        "fsd audit --data-dir /var/lib/fsd", "do_audit:audit", identity="",
        flags=(
            flag("--data-dir", "the server's data directory (SQLite)", metavar="DIR"),
            flag("--database", "postgresql://… (the server may run); else FSD_DATABASE_URL", metavar="URL"),
            flag("--blobs", "where the packs are: s3://… or a directory; else FSD_BLOBS_URL, else in DIR",
                 metavar="URL"),
            switch("--read-data", "read and hash every pack, not only some"),
            switch("--repair", "print what can be put right, as a plan; with --yes do it"),
            flag("--plan", "with --repair --yes: only if the plan is still this one", metavar="PLAN"),
            YES,
            flag("--file-system-id", "only this filesystem", metavar="FS", position=0),
        ),
    ),
    Command(
        ("doctor",), (), "Other", "say what works here: mounting, server, token, clock, left-overs",
        "fsd doctor", "do_doctor:doctor", identity="token",
        flags=(flag("--state-dir", "root of the mounts' state", metavar="DIR"),),
    ),
    Command(
        ("bench",), (), "Other", "measure a directory for some seconds: small files, fsync, one large file",
        "fsd bench ./work", "do_bench:bench", identity="", changes=True,
        plan=("-", "{path}", "write, read and remove files in a new directory below {path}"),
        flags=(
            operand("path", "the directory, mounted or not (default: this one)", position=0, default="."),
            flag("--files", "small files of 4 KiB (default 500)", values.integer(1, 100_000), default=500,
                 metavar="N"),
            flag("--size", "of the large file (default 64M)", values.size, default=64 * limits.MIB,
                 metavar="SIZE"),
        ),
    ),
    Command(
        ("completion",), (), "Other", "print a completion script for a shell",
        'eval "$(fsd completion bash)"', "do_completion:completion", identity="", raw=True,
        flags=(operand("shell", "bash, zsh or fish", values.one_of("bash", "zsh", "fish"), required=True,
                       position=0),),
    ),
)  # fmt: skip
