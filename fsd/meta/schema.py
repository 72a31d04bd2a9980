"""The tables, as one numbered list of migrations for both engines.

Written once; `{…}` is filled in by the engine: `{KEY}` a numbered primary key whose numbers are never used
again, `{BLOB}` bytes, `{TEXT}` text ordered by code point, `{KEYED}` clusters a table by its primary key
(SQLite), `{HOT}` room and vacuum settings for rows that are updated all the time (PostgreSQL).

Rules that hold over all tables: times are ns since 1970 in BIGINT unless said otherwise; there are no NULLs
except where a column says so; `fs` is always `fs.id`. `died` is 140737488355327 (2^47-1, `sql.MAX`) while a
row lives; versions of a key are the disjoint ranges [born, died). A row is changed in place, with `born` set
to the new seq, when born > fs.pinned; else it dies and another is born.
"""

from __future__ import annotations

from typing import Final

from fsd.meta.database import Tx
from fsd.model.errors import FormatTooNew

_TABLES: Final = """
CREATE TABLE fs (                      -- a filesystem
    id {KEY},
    name {TEXT} NOT NULL UNIQUE,       -- 'fs_' and 20 characters, what the outside sees
    display_name {TEXT} NOT NULL,
    labels {TEXT} NOT NULL,            -- JSON object
    status {TEXT} NOT NULL,            -- active | deleting | kept (gone, but for packs forks read)
    created BIGINT NOT NULL,
    seq BIGINT NOT NULL,               -- commit number; moves only by commit
    pinned BIGINT NOT NULL,            -- newest pinned seq, -1: none
    storage_bytes BIGINT NOT NULL,     -- allocated bytes of the live tree
    file_count BIGINT NOT NULL,        -- inodes of the live tree
    origin_fs BIGINT,                  -- NULL unless a fork
    origin_seq BIGINT,
    copied BIGINT NOT NULL             -- 0 while a fork is still an alias of its origin
);
CREATE TABLE pin (                     -- keeps a seq readable; several may share one
    id {KEY},
    fs BIGINT NOT NULL,
    seq BIGINT NOT NULL,
    kind {TEXT} NOT NULL,              -- checkpoint | fork | journal | mount
    ref {TEXT} NOT NULL,               -- whose
    expires BIGINT                     -- NULL: until removed
);
CREATE INDEX pin_seq ON pin (fs, seq);
CREATE TABLE inode (
    fs BIGINT NOT NULL,
    ino BIGINT NOT NULL,
    mode BIGINT NOT NULL,              -- whole st_mode
    nlink BIGINT NOT NULL,
    uid BIGINT NOT NULL,
    gid BIGINT NOT NULL,
    size BIGINT NOT NULL,
    atime BIGINT NOT NULL,
    mtime BIGINT NOT NULL,
    ctime BIGINT NOT NULL,
    rdev BIGINT NOT NULL,
    target {BLOB},                     -- symlinks only
    parent BIGINT NOT NULL,            -- directories only, else 0
    parts {BLOB},                      -- first block (model.blocks), NULL: a hole
    xattrs {BLOB},                     -- msgpack map, NULL: none
    cseq BIGINT NOT NULL,              -- seq at which the content last changed
    writer BIGINT NOT NULL,            -- session that did that
    grown BIGINT NOT NULL,             -- seq of the last content change that was no append
    born BIGINT NOT NULL,
    died BIGINT NOT NULL,
    PRIMARY KEY (fs, ino, died)
) {KEYED} {HOT};
CREATE INDEX inode_born ON inode (fs, born);
CREATE INDEX inode_died ON inode (fs, died) WHERE died < 140737488355327;
CREATE TABLE dentry (
    fs BIGINT NOT NULL,
    parent BIGINT NOT NULL,
    name {BLOB} NOT NULL,
    ino BIGINT NOT NULL,
    writer BIGINT NOT NULL,            -- session that made this version
    born BIGINT NOT NULL,
    died BIGINT NOT NULL,
    PRIMARY KEY (fs, parent, name, died)
) {KEYED};
CREATE INDEX dentry_ino ON dentry (fs, ino);
CREATE INDEX dentry_born ON dentry (fs, born);
CREATE INDEX dentry_died ON dentry (fs, died) WHERE died < 140737488355327;
CREATE TABLE block (                   -- blocks from the second on; no row is a hole
    fs BIGINT NOT NULL,
    ino BIGINT NOT NULL,
    idx BIGINT NOT NULL,               -- 1 is the block at 1 MiB
    parts {BLOB} NOT NULL,
    born BIGINT NOT NULL,
    died BIGINT NOT NULL,
    PRIMARY KEY (fs, ino, idx, died)
) {KEYED};
CREATE INDEX block_born ON block (fs, born);
CREATE INDEX block_died ON block (fs, died) WHERE died < 140737488355327;
CREATE TABLE blob (                    -- where immutable bytes are
    fs BIGINT NOT NULL,
    hash {BLOB} NOT NULL,              -- SHA-256 of the raw bytes
    pack BIGINT NOT NULL,
    off BIGINT NOT NULL,               -- in the pack's bytes
    raw_len BIGINT NOT NULL,
    stored_len BIGINT NOT NULL,
    codec BIGINT NOT NULL,             -- wire.frame
    refs BIGINT NOT NULL,              -- row versions (inode.parts, block.parts) that name it, once each
    fresh BIGINT NOT NULL,             -- last upload, reuse or change of refs, for the sweep
    PRIMARY KEY (fs, hash)
) {KEYED} {HOT};
CREATE INDEX blob_pack ON blob (pack);
CREATE TABLE pack (                    -- the blobs of one upload
    id BIGINT PRIMARY KEY,             -- from counter 'pack'; never used again, since it names an object
    fs BIGINT NOT NULL,                -- which filesystem wrote it
    size BIGINT NOT NULL,
    data {BLOB},                       -- the whole pack while it is inline, NULL: it is an object
    created BIGINT NOT NULL
);
CREATE INDEX pack_fs ON pack (fs);
CREATE TABLE change (                  -- the change feed, one row a commit
    fs BIGINT NOT NULL,
    seq BIGINT NOT NULL,
    session BIGINT NOT NULL,           -- 0: a direct command or the server
    at BIGINT NOT NULL,
    what {BLOB} NOT NULL,              -- msgpack [inodes, names]
    PRIMARY KEY (fs, seq)
) {KEYED};
CREATE TABLE session (                 -- one mount as the server knows it
    id {KEY},                          -- also the high bits of the inode numbers it makes
    fs BIGINT NOT NULL,
    mount_id {TEXT} NOT NULL,
    host {TEXT} NOT NULL,
    path {TEXT} NOT NULL,
    remote_path {TEXT} NOT NULL,
    read_only BIGINT NOT NULL,
    version {TEXT} NOT NULL,
    started BIGINT NOT NULL,
    last_seen BIGINT NOT NULL,
    last_commit BIGINT NOT NULL,
    pending {TEXT} NOT NULL,           -- JSON, what it last said it still holds
    ended {TEXT} NOT NULL,             -- '' while it lives, else how it ended
    next_op BIGINT NOT NULL,
    ticket {BLOB} NOT NULL,            -- what its next commit must carry
    prev_ticket {BLOB} NOT NULL,       -- what its last commit carried: a repeat is answered again
    prev_digest {BLOB} NOT NULL,
    prev_answer {BLOB} NOT NULL
) {HOT};
CREATE INDEX session_fs ON session (fs);
CREATE TABLE applied (                 -- outcomes kept for repeats, one row a commit
    session BIGINT NOT NULL,
    last_op BIGINT NOT NULL,
    first_op BIGINT NOT NULL,
    seq BIGINT NOT NULL,
    digests {BLOB} NOT NULL,
    outcomes {BLOB} NOT NULL,
    PRIMARY KEY (session, last_op)
) {KEYED};
CREATE TABLE redirect (                -- a session's inode that became another one
    session BIGINT NOT NULL,
    ino BIGINT NOT NULL,
    to_ino BIGINT NOT NULL,
    PRIMARY KEY (session, ino)
) {KEYED};
CREATE TABLE moved (                   -- where a session's name for an inode went when another's came first
    session BIGINT NOT NULL,
    parent BIGINT NOT NULL,
    name {BLOB} NOT NULL,
    ino BIGINT NOT NULL,
    to_parent BIGINT NOT NULL,
    to_name {BLOB} NOT NULL,
    PRIMARY KEY (session, parent, name, ino)
) {KEYED};
CREATE TABLE gone (                    -- where a removed file was: content committed later comes back there
    fs BIGINT NOT NULL,
    ino BIGINT NOT NULL,
    seq BIGINT NOT NULL,               -- at which it went; pruned with the change feed
    parent BIGINT NOT NULL,
    name {BLOB} NOT NULL,
    mode BIGINT NOT NULL,
    uid BIGINT NOT NULL,
    gid BIGINT NOT NULL,
    xattrs {BLOB},
    PRIMARY KEY (fs, ino)
) {KEYED};
CREATE INDEX gone_seq ON gone (fs, seq);
CREATE TABLE counter (                 -- numbers given out in ranges, never used again
    name {TEXT} NOT NULL PRIMARY KEY,
    value BIGINT NOT NULL              -- the last one given out
);
CREATE TABLE token (
    id {TEXT} NOT NULL PRIMARY KEY,
    fs BIGINT NOT NULL,
    name {TEXT} NOT NULL,
    kind {TEXT} NOT NULL,              -- owner
    secret {BLOB} NOT NULL UNIQUE,     -- SHA-256 of the secret
    status {TEXT} NOT NULL,            -- active | disabled
    issued BIGINT NOT NULL,
    expires BIGINT,                    -- NULL: never
    scopes {TEXT} NOT NULL             -- JSON
);
CREATE INDEX token_fs ON token (fs);
CREATE TABLE journal (
    fs BIGINT NOT NULL,
    id {TEXT} NOT NULL,
    kind {TEXT} NOT NULL,
    title {TEXT} NOT NULL,
    actor {TEXT} NOT NULL,             -- type:id or empty
    labels {TEXT} NOT NULL,            -- JSON list of objects key, value
    created BIGINT NOT NULL,
    updated BIGINT NOT NULL,
    next_seq BIGINT NOT NULL,          -- the next entry's number, 1 in an empty journal
    genesis {BLOB} NOT NULL,
    head {BLOB} NOT NULL,              -- hash of the last entry, or genesis
    PRIMARY KEY (fs, id)
);
CREATE TABLE journal_entry (
    fs BIGINT NOT NULL,
    journal {TEXT} NOT NULL,
    seq BIGINT NOT NULL,
    entry_id {TEXT} NOT NULL,
    append_id {TEXT} NOT NULL,
    type {TEXT} NOT NULL,
    status {TEXT} NOT NULL,
    actor {TEXT} NOT NULL,
    observed BIGINT NOT NULL,
    fs_seq BIGINT NOT NULL,
    barrier BIGINT NOT NULL,           -- 1: a mount's barrier was taken first
    body {TEXT} NOT NULL,              -- the entry as it is given back, all but entry_hash
    prev_hash {BLOB} NOT NULL,
    entry_hash {BLOB} NOT NULL,
    PRIMARY KEY (fs, journal, seq)
) {KEYED};
CREATE INDEX journal_entry_time ON journal_entry (fs, observed, journal, seq);
CREATE TABLE journal_append (          -- idempotency of appends: kept as long as the journal
    fs BIGINT NOT NULL,
    journal {TEXT} NOT NULL,
    key {TEXT} NOT NULL,
    digest {BLOB} NOT NULL,
    answer {BLOB} NOT NULL,
    PRIMARY KEY (fs, journal, key)
) {KEYED};
CREATE TABLE idempotency (             -- answers to requests with an Idempotency-Key
    scope {TEXT} NOT NULL,
    key {TEXT} NOT NULL,
    digest {BLOB} NOT NULL,
    status BIGINT NOT NULL,
    answer {BLOB} NOT NULL,
    expires BIGINT NOT NULL,
    PRIMARY KEY (scope, key)
) {KEYED};
CREATE INDEX idempotency_expires ON idempotency (expires);
INSERT INTO counter (name, value) VALUES ('pack', 0);
"""

_CHECKPOINTS: Final = """
-- Ids of threads, checkpoints and instances are any text of any length: `key` columns are the SHA-256 of
-- their UTF-8, `id` columns the UTF-8 itself (PostgreSQL's text holds no NUL). `name` is a blob's name by
-- contract in 33 bytes: 0 (sandbox-artifacts) or 1 (sandbox-files), then the SHA-256; it sorts as the key's
-- text does. Times of the contract are ms since 1970 as a double, as its numbers are. JSON texts are written
-- with ASCII escapes and compressed (zstd) where the column says packed.
CREATE TABLE thread (                  -- a line of checkpoints and who may add to it
    fs BIGINT NOT NULL,
    key {BLOB} NOT NULL,
    id {BLOB} NOT NULL,
    head {BLOB},                       -- key of its newest checkpoint, NULL: empty
    fence BIGINT NOT NULL,             -- the highest ever given out; kept for ever
    owner {BLOB} NOT NULL,             -- SHA-256 of the lease's owner token, empty: no lease
    expires DOUBLE PRECISION NOT NULL, -- ms at which the lease is over
    PRIMARY KEY (fs, key)
) {KEYED} {HOT};
CREATE TABLE checkpoint (              -- an immutable record
    num {KEY},
    fs BIGINT NOT NULL,
    key {BLOB} NOT NULL,
    id {BLOB} NOT NULL,
    thread {BLOB} NOT NULL,            -- key of its thread
    parent {BLOB},                     -- key of its parent's id, which may be gone; NULL: a root
    created DOUBLE PRECISION NOT NULL, -- ms, as its maker says
    stored BIGINT NOT NULL,            -- ns, as the server says
    reason {TEXT} NOT NULL,            -- as a JSON string (ASCII)
    label {TEXT},                      -- as a JSON string (ASCII), NULL: none
    kind {TEXT} NOT NULL,              -- manifest | native
    fs_seq BIGINT,                     -- native: the state it shows
    pin BIGINT,                        -- native: the pin that keeps that state
    entries BIGINT NOT NULL,           -- of its files
    expires BIGINT,                    -- ns after which it may be thinned away, NULL: never
    body {BLOB} NOT NULL               -- the whole record (service.records). A native one in the
                                       -- filesystem's own thread has no files in it and names no blobs
);
CREATE UNIQUE INDEX checkpoint_key ON checkpoint (fs, key);
CREATE INDEX checkpoint_thread ON checkpoint (fs, thread);
CREATE TABLE named (                   -- which checkpoints use a blob's name, once each
    fs BIGINT NOT NULL,
    name {BLOB} NOT NULL,
    checkpoint BIGINT NOT NULL,        -- checkpoint.num
    PRIMARY KEY (fs, name, checkpoint)
) {KEYED};
CREATE INDEX named_checkpoint ON named (checkpoint);
CREATE TABLE blob_name (               -- bytes that are stored under a name
    fs BIGINT NOT NULL,
    name {BLOB} NOT NULL,
    size BIGINT NOT NULL,
    parts {BLOB} NOT NULL,             -- msgpack list: each 1 MiB block as model.blocks stores it, nil a
                                       -- hole. The distinct blobs of it count one reference each
    fresh BIGINT NOT NULL,             -- ns of the last upload or reuse, for the sweep
    PRIMARY KEY (fs, name)
) {KEYED} {HOT};
CREATE TABLE transcript (              -- the conversation of a thread as last saved
    fs BIGINT NOT NULL,
    thread {BLOB} NOT NULL,            -- key of the thread
    messages {BLOB} NOT NULL,          -- packed JSON
    PRIMARY KEY (fs, thread)
) {KEYED};
CREATE TABLE instance (                -- which provider sandbox a host resumes for a key
    fs BIGINT NOT NULL,
    key {BLOB} NOT NULL,
    record {BLOB} NOT NULL,            -- packed JSON
    PRIMARY KEY (fs, key)
) {KEYED};
CREATE TABLE lease_terms (             -- of a filesystem's threads; no row: the defaults
    fs BIGINT NOT NULL PRIMARY KEY,
    duration DOUBLE PRECISION NOT NULL, -- ms
    renew_after DOUBLE PRECISION NOT NULL -- ms
);
"""

_SHARING: Final = """
ALTER TABLE fs ADD COLUMN fence BIGINT NOT NULL DEFAULT 0;   -- the highest ever given out
ALTER TABLE fs ADD COLUMN writers BIGINT NOT NULL DEFAULT 0; -- writer leases with ended='': while it is 0,
                                       -- commits ask no further
CREATE TABLE lease (                   -- a timed right: to write a subtree, or `fsd lock`
    fs BIGINT NOT NULL,
    fence BIGINT NOT NULL,             -- its number; a later lease has a higher one
    kind {TEXT} NOT NULL,              -- writer | lock
    ino BIGINT NOT NULL,               -- writer: top of the subtree, lock: 0
    path {BLOB} NOT NULL,              -- lock: what is locked; writer: where the top was, for people
    session BIGINT NOT NULL,           -- writer: the mount session it belongs to, lock: 0
    host {TEXT} NOT NULL,              -- of the holder, for people
    place {TEXT} NOT NULL,             -- its mount point, or its command
    since BIGINT NOT NULL,
    expires BIGINT NOT NULL,           -- after that anybody may take it
    ended {TEXT} NOT NULL,             -- '' while nobody took it, else who did: told to who comes late
    PRIMARY KEY (fs, fence)
) {KEYED};
CREATE TABLE conflict (                -- what a conflict put beside, until it is removed or renamed
    fs BIGINT NOT NULL,
    parent BIGINT NOT NULL,            -- the entry it was given
    name {BLOB} NOT NULL,
    ino BIGINT NOT NULL,
    seq BIGINT NOT NULL,               -- commit that did it
    at BIGINT NOT NULL,
    session BIGINT NOT NULL,           -- whose change it is
    host {TEXT} NOT NULL,
    place {TEXT} NOT NULL,             -- that session's mount point
    original {BLOB} NOT NULL,          -- path it was meant for, as it was then
    reason {TEXT} NOT NULL,
    PRIMARY KEY (fs, parent, name)
) {KEYED};
CREATE INDEX conflict_seq ON conflict (fs, seq);
"""

_SWEEP: Final = """
CREATE TABLE sweep (                   -- one row a filesystem that was ever swept: whose turn it is
    fs BIGINT NOT NULL PRIMARY KEY,
    holder {TEXT} NOT NULL,            -- who sweeps it now, '' nobody. Saves work; nothing depends on it
    until BIGINT NOT NULL,             -- the holder's lease ends by itself
    due BIGINT NOT NULL,               -- not in the background before
    listed BIGINT NOT NULL             -- when its objects were last compared with its packs, 0 never
);
CREATE TABLE dropped (                 -- objects that no row needs any more: they go after the grace
    fs BIGINT NOT NULL,                -- in whose name they lie
    pack BIGINT NOT NULL,
    size BIGINT NOT NULL,
    since BIGINT NOT NULL,             -- nothing has needed it since
    PRIMARY KEY (fs, pack)
) {KEYED};
DROP INDEX pack_fs;
CREATE INDEX pack_fs ON pack (fs, id);
"""

_FORKS: Final = """
-- A fork is an alias of its origin at the seq it was made from until it is copied (fs.copied): nothing but
-- the copy writes rows of its tree, its seq stays. Pins: of kind `fork` on the origin until then (ref: the
-- fork's name), of kind `base` on the fork itself.
CREATE TABLE fork (
    fs BIGINT NOT NULL PRIMARY KEY,    -- the fork
    origin BIGINT NOT NULL,            -- fs.origin_fs, which may be gone once the fork is copied
    origin_name {TEXT} NOT NULL,
    origin_checkpoint {TEXT},          -- id of the checkpoint it was made from, NULL: the head
    origin_pin BIGINT,                 -- the pin on the origin, NULL once copied
    base BIGINT NOT NULL,              -- its own seq that its changes are counted from; a merge moves it
    base_pin BIGINT NOT NULL,          -- the pin that keeps it
    layer {TEXT} NOT NULL,             -- JSON of what a layer says of itself, empty: no layer
    stage BIGINT NOT NULL,             -- the table being copied: 0 inode, 1 block, 2 dentry, 3 none
    key_a BIGINT NOT NULL,             -- the last key copied of it: ino or parent
    key_b {BLOB} NOT NULL,             -- name, or idx in 8 bytes
    rows_copied BIGINT NOT NULL,
    storage_bytes BIGINT NOT NULL,     -- of the rows copied, and
    file_count BIGINT NOT NULL,        -- inodes
    copier {TEXT} NOT NULL,            -- which process copies, empty: none
    until BIGINT NOT NULL              -- ns after which another may
);
CREATE INDEX fork_origin ON fork (origin);
CREATE INDEX fork_copy ON fork (fs) WHERE origin_pin IS NOT NULL;
"""

_NATIVE: Final = """
CREATE INDEX checkpoint_order ON checkpoint (fs, num);
CREATE INDEX checkpoint_expires ON checkpoint (expires) WHERE expires IS NOT NULL;
CREATE INDEX pin_kind ON pin (fs, kind, seq);
CREATE TABLE barrier (                 -- a mount is asked to place a barrier for a checkpoint from outside
    id {KEY},
    fs BIGINT NOT NULL,
    session BIGINT NOT NULL,           -- which mount
    asked BIGINT NOT NULL,             -- ns
    expires BIGINT NOT NULL,           -- ns: nobody waits for the answer any more
    answer {TEXT} NOT NULL             -- JSON object of what the mount said, empty: nothing yet
);
CREATE INDEX barrier_session ON barrier (fs, session);
"""

# `to_ino` first: what has `session` and not `to_ino` must never take this index for the primary key.
_REDIRECTS: Final = """
CREATE INDEX redirect_to ON redirect (to_ino, session);
"""

# Migration number i is MIGRATIONS[i-1].
MIGRATIONS: Final[tuple[str, ...]] = (
    _TABLES,
    _CHECKPOINTS,
    _SHARING,
    _SWEEP,
    _FORKS,
    _NATIVE,
    _REDIRECTS,
)
FORMAT: Final = len(MIGRATIONS)  # what this code writes


def statements(migration: str, types: dict[str, str]) -> list[str]:
    """The statements of `migration` for the engine that `types` describes."""
    lines = [line.split("--", 1)[0].rstrip() for line in migration.splitlines()]
    text = "\n".join(line for line in lines if line)
    for mark, meaning in types.items():
        text = text.replace("{" + mark + "}", meaning)
    return [one.strip() for one in text.split(";") if one.strip()]


def migrate(tx: Tx, types: dict[str, str], where: str) -> None:
    """Bring the tables to FORMAT in the transaction `tx`, which nobody else runs beside. Raises
    `FormatTooNew` naming `where`."""
    tx.execute("CREATE TABLE IF NOT EXISTS format (version BIGINT NOT NULL)")
    row = tx.one("SELECT max(version) FROM format")
    version = 0 if row is None or row[0] is None else int(row[0])
    if version > FORMAT:
        raise FormatTooNew(f"{where} has format {version}, this fsd knows formats up to {FORMAT}")
    if version == FORMAT:
        return
    for migration in MIGRATIONS[version:]:
        for statement in statements(migration, types):
            tx.execute(statement)
    tx.execute("DELETE FROM format")
    tx.execute("INSERT INTO format (version) VALUES (?)", (FORMAT,))


# SQLite's planner is told what the tables look like instead of measuring it (namespace.md section 4): many
# filesystems, each a small part, so that an index starting with `fs` is never chosen for `fs` alone. Index
# None is the primary key of a clustered table. The numbers are average rows per distinct prefix.
STATISTICS: Final[tuple[tuple[str, str, str], ...]] = (
    ("inode", "inode", "10000000 100000 2 1"),
    ("inode", "inode_born", "10000000 100000 20"),
    ("inode", "inode_died", "1000000 10000 20"),
    ("dentry", "dentry", "10000000 100000 20 2 1"),
    ("dentry", "dentry_ino", "10000000 100000 2"),
    ("dentry", "dentry_born", "10000000 100000 20"),
    ("dentry", "dentry_died", "1000000 10000 20"),
    ("block", "block", "10000000 100000 20 2 1"),
    ("block", "block_born", "10000000 100000 20"),
    ("block", "block_died", "1000000 10000 20"),
    ("blob", "blob", "10000000 100000 1"),
    ("blob", "blob_pack", "10000000 20"),
    ("change", "change", "10000000 100000 1"),
    ("gone", "gone", "1000000 10000 1"),
    ("gone", "gone_seq", "1000000 10000 2"),
    ("redirect", "redirect", "1000000 1000 1"),
    ("redirect", "redirect_to", "1000000 2 1"),
    ("moved", "moved", "1000000 1000 20 2 1"),
    ("pin", "pin_seq", "10000 100 1"),
    ("pin", "pin_kind", "10000 100 50 1"),
    ("thread", "thread", "1000000 10000 1"),
    ("checkpoint", "checkpoint_key", "1000000 10000 1"),
    ("checkpoint", "checkpoint_thread", "1000000 10000 100"),
    ("checkpoint", "checkpoint_order", "1000000 10000 1"),
    ("checkpoint", "checkpoint_expires", "1000 1"),
    ("barrier", "barrier_session", "1000 100 1"),
    ("named", "named", "10000000 1000000 20 1"),
    ("named", "named_checkpoint", "10000000 10000"),
    ("blob_name", "blob_name", "10000000 100000 1"),
    ("transcript", "transcript", "1000000 10000 1"),
    ("instance", "instance", "1000000 10000 1"),
    ("lease", "lease", "1000000 1000 1"),
    ("conflict", "conflict", "1000000 10000 10 1"),
    ("conflict", "conflict_seq", "1000000 10000 2"),
    ("pack", "pack_fs", "1000000 10000 1"),
    ("dropped", "dropped", "100000 1000 1"),
    ("fork", "fork_origin", "10000 10"),
    ("fork", "fork_copy", "100 1"),
)
