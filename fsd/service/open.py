"""`Service`: all parts of the server's rules over one database and one object store; how it is opened."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from fsd.blobs.open import open_store
from fsd.blobs.store import BlobStore
from fsd.host.seam import Host
from fsd.meta.database import Database, check_url, open_database
from fsd.meta.sqlite import FILE
from fsd.model.errors import IntegrityError, UsageError
from fsd.model.plain import dataclass, field
from fsd.service.barriers import Barriers
from fsd.service.commit import Commits, Numbers
from fsd.service.conflicts import Conflicts
from fsd.service.feed import Feed
from fsd.service.filesystems import FileSystems
from fsd.service.forks import Forks
from fsd.service.idempotency import Idempotency
from fsd.service.instances import Instances
from fsd.service.inthread import InThread
from fsd.service.journals import Journals
from fsd.service.leases import Leases
from fsd.service.manifests import Manifests
from fsd.service.merge import Merges
from fsd.service.names import Names
from fsd.service.namespace import Namespace
from fsd.service.native import Checkpoints
from fsd.service.packs import Packs
from fsd.service.paths import Paths
from fsd.service.restore import Restores
from fsd.service.retention import Retention
from fsd.service.sessions import SessionInfo, Sessions, insert_session
from fsd.service.sweep import Sweep
from fsd.service.threads import Threads
from fsd.service.tokens import Tokens

if TYPE_CHECKING:
    from fsd.blobs.s3 import S3Options

_OWN: Final = SessionInfo("service", "server", "", "", False, "")


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """`database` is a PostgreSQL URL, None: SQLite in `data_dir`. `blobs` is a directory or
    `s3://BUCKET/PREFIX?endpoint=URL&region=CODE` (keys as user and password, or from where boto3 looks),
    None: packs in `data_dir`/blobs. `retention`: how long what nothing shows is kept."""

    data_dir: Path
    database: str | None = field(default=None, repr=False)
    blobs: str | None = field(default=None, repr=False)
    retention: Retention = field(default_factory=Retention)


@dataclass(frozen=True, slots=True)
class Service:
    """The parts, each usable from any thread. `close` once, after the last call."""

    db: Database
    store: BlobStore
    packs: Packs
    commits: Commits
    namespace: Namespace
    sessions: Sessions
    feed: Feed
    filesystems: FileSystems
    forks: Forks
    tokens: Tokens
    journals: Journals
    leases: Leases
    conflicts: Conflicts
    idempotency: Idempotency
    paths: Paths
    threads: Threads
    manifests: Manifests
    names: Names
    instances: Instances
    checkpoints: Checkpoints
    in_thread: InThread
    restores: Restores
    barriers: Barriers
    merges: Merges
    retention: Retention
    sweep: Sweep

    def close(self) -> None:
        self.db.close()


def open_service(options: ServiceOptions, host: Host) -> Service:
    """Open or make everything. Raises `Busy` (another server uses the data directory), `FormatTooNew`,
    `NoSpace`, `Unavailable`, `UsageError` (a URL)."""
    url = options.database
    if url is None:
        _check_not_lost(options)
    db = open_database(options.data_dir if url is None else check_url(url), host)
    try:
        store = open_store(_place(options), host)
        return assemble(db, store, host, options.retention)
    except BaseException:
        db.close()
        raise


def assemble(db: Database, store: BlobStore, host: Host, retention: Retention) -> Service:
    """A service over parts that are open already."""
    # The server's own inode numbers (conflict copies, direct commands) need a session number like any other.
    # On a full disk, too: what would make room could not be asked for else.
    own = db.write(lambda tx: insert_session(tx, 0, _OWN, b"", host.wall_ns()), frees=True)
    packs, sessions, feed = Packs(db, store, host), Sessions(db, host), Feed(db, host)
    tokens = Tokens(db, host)
    commits = Commits(db, packs, sessions, feed, Numbers(own, host), host)
    forks = Forks(db, packs, tokens, host)
    commits.when_copied = forks.when_copied
    checkpoints = Checkpoints(db, packs, host)
    commits.make_checkpoint = checkpoints.from_commit
    threads = Threads(db, checkpoints, host)
    return Service(
        db=db,
        store=store,
        packs=packs,
        commits=commits,
        namespace=Namespace(db),
        sessions=sessions,
        feed=feed,
        filesystems=FileSystems(db, store, tokens, host, forks.release),
        forks=forks,
        tokens=tokens,
        journals=Journals(db, host, retention.history),
        leases=Leases(db, feed, host),
        conflicts=Conflicts(db),
        idempotency=Idempotency(db, host),
        paths=Paths(host, commits.direct, commits.new_ino),
        threads=threads,
        manifests=Manifests(db, threads, checkpoints, host),
        names=Names(db, packs, host),
        instances=Instances(db),
        checkpoints=checkpoints,
        in_thread=InThread(db, packs, checkpoints, host),
        restores=Restores(packs, commits, feed, checkpoints, host),
        barriers=Barriers(db, host),
        merges=Merges(db, packs, commits, checkpoints, host),
        retention=retention,
        sweep=Sweep(db, store, packs, retention, host),
    )


def store_of(options: ServiceOptions, host: Host) -> BlobStore:
    """The object store alone, beside a service or for a stopped database. Raises as `open_service`."""
    return open_store(_place(options), host)


def _check_not_lost(options: ServiceOptions) -> None:
    """Refuse to begin anew over the packs of a database that went away."""
    database, packs = options.data_dir / FILE, _place(options)
    if (database.exists() and database.stat().st_size) or not isinstance(packs, Path):
        return
    if any(path.is_file() for path in packs.glob("[!.]*/**/*")):
        raise IntegrityError(
            f"the database {database} is missing or empty, but {packs} holds what it described",
            hint=f"restore {database} from a copy; to begin anew, move {packs} away",
        )


def _place(options: ServiceOptions) -> Path | S3Options:
    if options.blobs is None:
        return options.data_dir / "blobs"
    if not options.blobs.startswith("s3://"):
        if "://" in options.blobs:
            raise UsageError(
                "the blobs are given as s3://… or as a directory", hint="leave it out for DIR/blobs"
            )
        return Path(options.blobs)
    from fsd.blobs.s3 import S3Options

    try:
        url = urlsplit(options.blobs)
        query = dict(parse_qsl(url.query))
    except ValueError:
        raise UsageError("what is given for the blobs is no URL") from None  # the text may hold a key
    if not url.hostname or set(query) - {"endpoint", "region"}:
        raise UsageError("a bucket is given as s3://BUCKET/PREFIX?endpoint=URL&region=CODE")
    prefix = url.path.strip("/")
    return S3Options(
        bucket=url.hostname,
        prefix=f"{prefix}/" if prefix else "",
        endpoint=query.get("endpoint"),
        region=query.get("region", "us-east-1"),
        access_key=unquote(url.username) if url.username else None,
        secret_key=unquote(url.password) if url.password else None,
    )
