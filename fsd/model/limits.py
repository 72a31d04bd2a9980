"""Every bound of the product, in one place.

Sizes are bytes, times seconds, unless the name says otherwise. Each has a behaviour at the bound and a
test there; the docs give the same numbers (design section 9). What bounds nothing (paces, sizes from which
another way is faster, the largest number of a field) stands with its reason in the module that uses it.
"""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

# Names and attributes.
NAME_MAX: Final = 255
SYMLINK_MAX: Final = 4095
XATTR_NAME_MAX: Final = 255
XATTR_VALUE_MAX: Final = 64 * KIB
XATTRS_TOTAL_MAX: Final = 68 * KIB  # of names and values: the largest value, beside what ext4 has room for
LINK_MAX: Final = 65_000

# Content.
BLOCK: Final = MIB
FILE_MAX: Final = 16 * 1024 * GIB
PATCHES_MAX: Final = 16  # per block, beside its base; folded at this number
UNMADE_MAX: Final = 20.0  # seconds for what a block is made of to come back; then it is put aside without
UNMADE_AGAIN: Final = 2.0  # seconds between looks for it
FULL_LIST_BLOCKS: Final = 64  # a content operation of at most so many blocks names all of them

# Commits and uploads.
COMMIT_OPS_MAX: Final = 4096
COMMIT_HEADER_MAX: Final = 16 * MIB
COMMIT_BLOBS_MAX: Final = 4 * MIB  # blob bytes that travel in the commit itself
UPLOAD_MAX: Final = 16 * MIB  # one pack upload
UPLOAD_BLOBS_MAX: Final = 4096
PACK_INLINE_MAX: Final = 64 * KIB  # a pack this small lives in its database row
DIRECT_LEAST: Final = MIB  # of an object that is written past the page cache, and of
DIRECT_PIECE: Final = 256 * KIB  # each of its blobs, on average
DIRECT_BUFFER: Final = 2 * MIB  # what is written so at a time
DIRECT_BUFFERS: Final = 4  # in memory; who finds none free waits
APPLIED_KEEP: Final = 65_536  # operations of a session whose outcomes are kept

# The server's database.
DB_GROUP_MAX: Final = 64  # write requests gathered into one transaction
DB_GROUP_TIME: Final = (
    0.02  # after so long a transaction takes no further ones: its first must not wait for them
)
DB_QUEUE_MAX: Final = 1024  # write requests that wait; more are told to come again
DB_READERS_MAX: Final = 16  # connections that read at the same time
DISK_RESERVE: Final = 16 * MIB  # of SQLite's disk, kept back for what makes room when it is full
DB_WRITERS_MAX: Final = 8  # PostgreSQL: transactions that write at the same time
DB_WAIT: Final = 30.0  # for a free connection, or for a lock somebody else holds
DB_RETRIES: Final = 4  # of a transaction PostgreSQL gave up (deadlock, lost connection before COMMIT)

# Reads.
LIST_PAGE_MAX: Final = 1000  # entries of a JSON page
DIR_INLINE_MAX: Final = 10_000  # entries that travel with a lookup
BLOBS_GET_MAX: Final = 256
BLOBS_GET_BYTES: Final = 16 * MIB
NS_BATCH_MAX: Final = 256  # questions in one namespace request
NS_ENTRIES_MAX: Final = 4 * DIR_INLINE_MAX  # of one request in all; past that directories are left out
NS_BYTES_MAX: Final = 64 * MIB  # of one answer to them, about: listings are cut there, the rest is refused
LIST_PAGE_BYTES: Final = 4 * MIB  # of tags in a JSON page; it ends there
LIST_SCAN_MAX: Final = 20_000  # rows one request with filters looks at; the answer says where to go on
WALKS_MAX: Final = 2  # whole journals verified at the same time; more wait
FEED_PAGE_MAX: Final = 1000
FEED_WAIT_MAX: Final = 30.0

# The tree by path.
PATH_BYTES_MAX: Final = 64 * KIB
LINK_HOPS_MAX: Final = 40
REMOVE_CHUNK: Final = 500  # entries one step of a recursive removal takes
FIND_SCAN_MAX: Final = 10_000  # entries one find request looks at
COPY_CALL_PIECES: Final = 1024  # of a file, up to a block each, that one copy_file_range shares
COPY_CALL_SPAN: Final = GIB  # the answer has 32 bits, and kernels before 6.17 ask for more than fits them
COPY_CALL_BYTES: Final = 4 * MIB  # that it writes again, about; it tells how far it got
COPY_STEP: Final = 500  # entries one step of a tree's copy on the server takes, and
COPY_STEP_OPS: Final = 1500  # operations, about
COPY_BLOCKS_MAX: Final = 262_144  # 256 GiB: the block list of a copy travels in one operation
UPLOAD_PACK: Final = 8 * MIB  # of a streamed body in memory before it is stored
READ_SNAPSHOT_BLOCKS: Final = 16_384  # of a file's block list in memory while it is sent: 16 GiB
READ_BLOCKS: Final = 4  # fetched at a time while a file is sent
SPANS_MAX: Final = 100  # of data in a sparse file that is sent without its holes

# Journals.
JOURNAL_ENTRY_MAX: Final = 64 * KIB
JOURNAL_BATCH_MAX: Final = 500
JOURNAL_BATCH_BYTES: Final = 4 * MIB
JOURNAL_PAGE_MAX: Final = 1000
JOURNAL_ID_MAX: Final = 128
LABELS_MAX: Final = 64
SUBJECTS_MAX: Final = 64
IDEMPOTENCY_KEY_MAX: Final = 128
IDEMPOTENCY_KEEP: Final = 24 * 3600.0

# Checkpoints by contract.
MANIFEST_BODY_MAX: Final = 64 * MIB  # an append: some 400,000 entries, or a long conversation
MANIFESTS_MAX: Final = 2  # bodies over JSON_BODY_MAX held in memory at the same time; more wait unread
MANIFEST_PAGE: Final = 8 * MIB  # of packed records one step of a list reads
CONTRACT_ID_MAX: Final = 64 * KIB  # bytes of an id
LISTED_MAX: Final = 1024  # characters of a host's label or reason in the filesystem's own lists
CONTRACT_BLOB_MAX: Final = 16 * GIB
LEASE_MS: Final = 120_000.0  # of a thread's writer
LEASE_RENEW_MS: Final = 45_000.0
LEASE_MS_MAX: Final = 7 * 24 * 3600 * 1000.0
SWEEP_NAMES: Final = 500  # names one step of a contract sweep removes
SWEEP_OLDER_MS: Final = 24 * 3600 * 1000.0

# Tokens.
TOKEN_MAX: Final = 8 * KIB
TOKEN_LABEL_MAX: Final = 64
TOKEN_REGIONS_MAX: Final = 16
TOKEN_RECALL: Final = 1.0  # seconds a commit need not look its token up before its transaction does
TOKENS_RECALLED_MAX: Final = 1024

# HTTP.
JSON_BODY_MAX: Final = 8 * MIB
FAILED_PUTS_MAX: Final = 64 * MIB  # of objects a bucket did not take, until their memory is collected
HEAD_MAX: Final = 64 * KIB  # of a request: its line and headers
HEAD_TIMEOUT: Final = 20.0  # for all of a head
BODY_IDLE: Final = 60.0  # without a byte of a body, or of an answer taken, before a request is given up
BODY_RATE: Final = 4 * KIB  # bytes a second that a body held in memory has to come with, BODY_IDLE apart
REQUESTS_MAX: Final = 1024  # served at the same time, waiting long polls apart; more are told to come again
LANES_MAX: Final = 64  # connections with a thread of their own, for one small request after the other
LANE_IDLE: Final = 30.0  # without one the thread ends; the next few commits go the common way again
LANE_IDLE_FULL: Final = 2.0  # the same while more than half of the lanes are in use, and after content
UPLOADS_MAX: Final = (
    32  # files over 1 MiB received at the same time, some 17 MiB of memory each; more wait unread
)
LARGE_BODIES_MAX: Final = 32  # bodies over 256 KiB held in memory at the same time; more wait unread
POLLS_MAX: Final = 10_000  # waiting long polls
ERROR_BODY_MAX: Final = 64 * KIB  # what a client reads of an answer that is no answer

# What a mount takes as one answer; in memory it can be up to 28 times as much, where a server wants that.
NS_ANSWER_MAX: Final = 2 * NS_BYTES_MAX  # its own answers are about half of that
FEED_ANSWER_MAX: Final = 16 * MIB  # 4 MiB of commits, or one that tells FEED_TOLD_MAX names
SENT_AT_ONCE_MAX: Final = 64 * KIB  # of a commit the FUSE thread sends itself: a socket takes as much
CONNECT_TIMEOUT: Final = 5.0
# How long a server may say nothing at all before a request that may come twice is sent again: twice as long
# after each silence, longer where it is known to be slow and for what the way up takes.
PATIENCE_FIRST: Final = 5.0
PATIENCE_OF_TOOK: Final = 4.0  # times what such requests lately took
PATIENCE_BYTES: Final = 512 * KIB  # so many bytes of a body are given a second
CONTROL_TIMEOUT: Final = 30.0  # a client's small calls: session start, end, report
FEED_SLACK: Final = 10.0  # what a feed page may take beyond its wait, and where other answers are slow
FEED_SLACK_MAX: Final = 60.0

# Direct commands.
JSON_ANSWER_MAX: Final = 64 * MIB
COPY_PARALLEL: Final = 8
STREAM_SPOOL: Final = 8 * MIB  # a stream this short is kept, so that a failed upload can be repeated
RETRY_FOR: Final = 8.0
CALL_TIMEOUT: Final = 60.0
ASYNC_CALLS: Final = 16  # of one AsyncFileSystem at the same time; more wait
CALL_PATIENCE: Final = 8.0

# The client's log and buffer.
SEGMENT: Final = 64 * MIB
BUFFER_MAX: Final = 16 * GIB
SMALL_FILE: Final = 64 * KIB  # content kept in memory as well until it is flushed
LISTING_MAX: Final = 50_000  # names of a directory that are all loaded to list it; of more, page by page
# Operations and changed files that a mount has unsent, whatever their bytes; then changes wait as for a full
# log. A new small file is two, and takes 3.6 KB, or 5.4 KB when its log is read back.
UNSENT_MAX: Final = 500_000
INODES_MAX: Final = 150_000  # a mount keeps in memory; above it cold directories are forgotten
SIBLING_SIZE: Final = 128 * KIB  # a file that is fetched together with its neighbours
SIBLINGS_MAX: Final = 64  # of them at once
SIBLINGS_BYTES: Final = 2 * MIB
BLOB_MEMORY: Final = 10 * MIB  # bytes of blobs a mount keeps decoded
RECENT_SOURCES: Final = 8192  # of committed blobs it can make again from its log
LOG_KEPT: Final = 2  # so many segments' worth of the log stays readable after it was deleted
LOG_LAZY: Final = 6  # segments' worth of the log, or half its bound, is freed only while nothing is under way
FLUSH_AGE: Final = 2.0
HOLD_MAX: Final = 300.0  # seconds a truncated file that is still being written is kept from being sent
FLUSH_BYTES: Final = 8 * MIB  # so much of one file, or of closed ones, is flushed without waiting for its age
FLUSH_FILES: Final = 500  # so many closed files likewise
IO_TIMEOUT: Final = 300.0
STOP_TIMEOUT: Final = 8.0
READY_TIMEOUT: Final = 60.0
PARKED_MAX: Final = 1000
BLOCK_LISTS_MAX: Final = 65_536  # blocks of closed files whose places are kept in memory
HIDDEN_REFS_MAX: Final = 1000  # holes and copies that newer changes of a file hide, beyond those shown
RECORDS_KEPT: Final = 86_400.0  # seconds for which the record of an ended mount tells how it ended
RECORDS_MAX: Final = 100  # of ended mounts
CACHE_RESERVE: Final = 256 * MIB  # left free on the cache's disk, or a tenth of a smaller one
CACHE_BEHIND: Final = 4 * MIB  # of blobs that wait to be stored there
CACHE_PAUSE: Final = 30.0  # after a full or broken disk the cache stores nothing for so long
CACHE_TOUCH: Final = 60.0  # how exact a cached file's time of last use is

# Tries while others change things meanwhile, or a server is not itself.
BESIDE_TRIES: Final = 100  # names a client tries for what it puts beside
BESIDE_NAMES_MAX: Final = 10_000  # and the server, within one commit
CHANGED_TRIES: Final = 3  # a local file that changes while copied is begun again so often
GREP_TRIES: Final = 5  # a remote file that changes while it is read
PUSHES_MAX: Final = 3  # of `fsd run`, while processes that outlive the command change what was pushed
APPEND_FOLDS_MAX: Final = 8  # times an append plans again because its last block had to be folded
COMMIT_FOLDS_MAX: Final = 64  # blocks folded for one commit; after that an append becomes a copy
PACK_MOVES_MAX: Final = 4  # times a blob is looked up again because its pack has gone
SERVER_FAULT_TRIES: Final = 3  # an answer that says "internal error" is asked for so often
INTERIM_MAX: Final = 8  # 1xx answers before the real one
IDLE_CONNECTIONS_MAX: Final = 16  # a client of direct commands keeps open

# Sessions.
SESSION_BITS: Final = 23
INO_COUNTER_BITS: Final = 40

# What the server keeps although nothing shows it (defaults of `fsd serve`), and the sweep.
GRACE: Final = 24 * 3600.0  # blobs without a reference, and objects whose content moved
GRACE_LEAST: Final = 300.0  # longer than a mount that still counts as active can be silent (LOST_AFTER)
HISTORY: Final = 7 * 24 * 3600.0  # soft pins of journal entries
FEED_KEEP: Final = 30 * 24 * 3600.0  # change rows and where removed files were, also of a quiet filesystem
SESSION_KEEP: Final = 30 * 24 * 3600.0  # what a session's repeats need, after its last sign of life
SESSION_ROWS_KEEP: Final = 3  # the row of a session itself, times SESSION_KEEP
UNDO_KEEP: Final = 3600.0  # no rule thins out what a restore or merge replaced before it is so old
SWEEP_EVERY: Final = 600.0  # between two rounds over a filesystem
SWEEP_LEASE: Final = 60.0
SWEEP_LIST_EVERY: Final = 24 * 3600.0  # between two comparisons of a filesystem's objects with its packs
SWEEP_BLOBS: Final = 2000  # rows one step looks at; it deletes at most as many in one transaction
SWEEP_PACKS: Final = 512  # packs one step looks at
SWEEP_ROWS: Final = 1000  # other rows one step removes
SWEEP_OBJECTS: Final = 64  # objects one step deletes
SWEEP_LIST: Final = 10_000  # objects one step lists
SWEEP_CALL: Final = 5.0  # one request for a sweep works about so long, then says where to go on
STRAY_LEAST: Final = 3600.0  # an object without a row is an upload under way for so long
REPACK_BYTES: Final = 8 * MIB  # live bytes written into one new pack
REPACK_INLINE: Final = 64  # so many inline packs are gathered although they are small
REPACK_WORTH: Final = MIB  # or so many bytes in inline packs
VACUUM_PAGES: Final = 2000  # pages one step of a vacuum gives back

# Leases, and the record of conflicts.
LEASE_TTL: Final = 30.0  # of a lease that is not renewed any more
LEASE_TTL_MIN: Final = 1.0
LEASE_TTL_MAX: Final = 24 * 3600.0
LEASES_MAX: Final = 1000  # of a filesystem at the same time
LEASES_PAST_MAX: Final = 1000  # remembered of those that expired or were taken
LEASE_KEEP: Final = 30 * 24 * 3600.0  # how long it is remembered who took a lost one
LOCK_PATH_MAX: Final = 4096
CONFLICTS_MAX: Final = 100_000  # remembered of a filesystem; then the oldest are forgotten, their copies stay

# Forks and merges.
FORK_CHUNK: Final = 2000  # rows copied in one transaction
FORK_STEP: Final = 0.2  # seconds one round of the background copies
FORK_WAIT: Final = 20.0  # a write to a fork waits so long for its copy, then is told to come again
FORK_WAITERS_MAX: Final = 8  # requests of one server that wait so; more are told at once
FORK_LEASE: Final = 2.0  # after so long without a chunk another process goes on; it saves work, no more
FORK_ALIASES_MAX: Final = 16  # forks of forks none of which is copied yet
FORK_CHAIN_MAX: Final = 1000  # origins shown, and forks taken along by a deletion
MERGE_BLOCKS_MAX: Final = 2_000_000  # blocks of the files that one merge compares
MERGE_SHOWN_MAX: Final = 1000  # changes and conflicts of a merge in its answer
MERGE_PATTERNS_MAX: Final = 100

# Native checkpoints.
CHECKPOINT_LABEL_MAX: Final = 256
NOT_FLUSHED_MAX: Final = 1000  # paths a mount names that are not in its checkpoint
NOT_FLUSHED_BYTES: Final = 512 * KIB  # of them as JSON: an answer of a daemon is a line of at most 1 MiB
DRAIN_MAX: Final = 300.0  # a checkpoint made from outside waits at most so long for the mounts
DRAIN_SESSIONS_MAX: Final = 1000
COMPARES_MAX: Final = 4  # differences, restores and histories at the same time; more wait
DIFF_ROWS_MAX: Final = 500_000  # changed rows of one difference; more are refused
DIFF_PAGE_MAX: Final = 10_000  # changes of one answer
HISTORY_GONE_MAX: Final = 10_000  # removed files looked through for one that had a name
HISTORY_PAGES_MAX: Final = 40  # of so many states looked through for a file that was removed
HISTORY_STATES_MAX: Final = 500  # retained states one request for a file's history looks at
RESTORE_OPS_MAX: Final = 500_000  # of one path; a whole tree is restored by its rows
FEED_TOLD_MAX: Final = 20_000  # names and inodes one commit tells the feed; after more, readers start over
PRUNE_STEP: Final = 50  # checkpoints one request deletes at least, and pins one step of housekeeping
PRUNE_CALL: Final = 5.0  # seconds one request deletes checkpoints, then it says that there are more
EXPORT_PAGE: Final = 500  # entries an export reads at a time
MOUNT_PIN: Final = 900.0  # a mounted state stays so long after the mount last asked for it
EXPORT_PIN: Final = 24 * 3600.0  # an export that was cut off keeps its state so long

# Capture and restore of a local directory.
CAPTURE_ENTRIES_MAX: Final = 400_000  # an append's body holds about so many
CAPTURE_DEPTH_MAX: Final = 200  # directories inside one another; each is open while it is walked
CAPTURE_TRIES: Final = 3  # of reading a file that changes meanwhile
CAPTURE_SPOOL: Final = 8 * MIB  # of one file in memory, the rest in a temporary file
PATTERNS_MAX: Final = 1000
PATTERN_BYTES_MAX: Final = 4096
SECRETS_MAX: Final = 1000
SECRET_LEAST: Final = 4  # bytes: a shorter one would zero what is none
SECRET_BYTES_MAX: Final = 64 * KIB
RENDER_NAMES: Final = 500  # contents named in one transaction
RENDER_HOLES_MAX: Final = 64 * GIB  # bytes of holes in the files of one rendering: all are hashed
RENDER_HASHES: Final = 100_000  # remembered hashes of files that are more than one blob
AUDIT_PACKS: Final = 64  # of a filesystem, taken at random, that an audit without --read-data reads
KEEP_BLOBS_MAX: Final = 65_536  # of deleted files still open, 64 GiB: what is beyond goes after the grace
GREP_LINE_MAX: Final = MIB  # of a line that is searched whole
GREP_LINE_SHOWN: Final = 4 * KIB
GREP_MATCHES: Final = 10_000  # lines of one answer, unless asked for another number

# A mount's daemon.
ABSENT_MAX: Final = 10_000  # absent names the kernel may hold; of more it forgets the oldest
DIRECT_WAITING_MAX: Final = 4  # direct writes that wait for pages; the kernel has 12 requests of that kind
THINNING_STEPS: Final = 100  # of thinning in one turn; what is left goes in the next
PATH_TRIES: Final = 3  # of looking up the path of a file that is being renamed
CUT_FILES_MAX: Final = 500  # changed files above which a checkpoint first sends what there is
BARRIERS_MAX: Final = 64  # barriers asked for from outside and not begun
CONTROL_REQUEST_MAX: Final = 64 * KIB  # of a command to a mount's daemon
CONTROL_CLIENTS_MAX: Final = 64  # commands at one mount at once; more wait in the listen queue
CALLS_MAX: Final = 2 * CONTROL_CLIENTS_MAX  # threads for calls of a daemon's tasks that block
CONTROL_LINE_MAX: Final = MIB  # of a daemon's answer to a command
DAEMON_LOG_MAX: Final = 400 * KIB  # of a daemon's log, and as much of the one before
LOG_REPEATS_MAX: Final = 20  # lines of one kind in a minute; the next begins with how many were left out
LOG_TEMPLATES_MAX: Final = 500  # kinds of lines whose repeats are counted
WORKER_DEATHS_MAX: Final = 100  # of the FUSE thread's workers; beyond it a fresh process is better
UNMOUNT_TRIES: Final = 6  # while a mount is busy with what ends by itself
RESTARTS_MAX: Final = 5  # of a mount's daemon within RESTART_WINDOW
RESTART_WINDOW: Final = 600.0

# What a command line may say: more is a slip, and no clock or file system counts so far.
DURATION_MAX: Final = 100 * 365 * 86400  # seconds
SIZE_MAX: Final = 1 << 60  # bytes
