"""`MountOptions`: everything a mount is told, built once in the command line and passed down. No I/O.

Imports neither pyfuse3 nor trio: the supervisor and every command that only talks to a mount use it too.
"""

from __future__ import annotations

import marshal
import os
from pathlib import Path

from fsd.host.seam import Host
from fsd.model.limits import (
    BUFFER_MAX,
    FLUSH_AGE,
    IO_TIMEOUT,
    LEASE_TTL,
    READY_TIMEOUT,
    STOP_TIMEOUT,
)
from fsd.model.plain import dataclass, field
from fsd.model.token import Token, parse

try:
    # As `random` does: hashlib brings OpenSSL, 3.6 MiB that the supervisor would keep for one hash.
    from _sha256 import sha256  # type: ignore[import-not-found]
except ImportError:
    from hashlib import sha256

CACHE_BYTES = 2 * 1024**3


@dataclass(frozen=True, slots=True)
class MountOptions:
    """What `fsd mount` was asked for.

    `mountpoint` is as the user wrote it; the kernel layer resolves it. `state_dir` is the root under which
    `cache/` and `mounts/<id>/` are made. `runtime_dir` is where `<mount id>.json` and the control socket
    live. `remote_path` is the subtree, b"/" for the whole.
    `exclusive` takes the writer lease of the subtree, which lasts `lease_ttl` unrenewed; `lease_wait` is how
    long to wait while another holds it. Times are seconds; `io_timeout` 0 means for ever. `buffer_size` 0
    means half of the free disk, at most BUFFER_MAX. `host_label` names this mount in conflict copies and in
    `fsd mounts`. `notify_socket` is sd_notify's address or None.
    """

    mountpoint: Path
    token: Token
    endpoint: str
    state_dir: Path
    runtime_dir: Path
    remote_path: bytes = b"/"
    read_only: bool = False
    exclusive: bool = False
    lease_ttl: float = LEASE_TTL
    lease_wait: float = 0.0
    durability: str = "fsync"  # or "close"
    consistency: str = "feed"  # or "open": the server is asked at each open
    xattr: bool = True
    acl: bool = False
    allow_other: bool | None = None  # None: when root
    loop: str = "mini"  # or "trio"
    foreground: bool = False
    supervised: bool = True
    io_timeout: float = IO_TIMEOUT
    stop_timeout: float = STOP_TIMEOUT
    ready_timeout: float = READY_TIMEOUT
    flush_age: float = FLUSH_AGE
    buffer_size: int = 0
    buffer_max: int = BUFFER_MAX
    cache_size: int = CACHE_BYTES
    insecure: bool = False
    host_label: str = ""
    notify_socket: str | None = None
    verbose: bool = False
    auto_checkpoint: float = 0.0  # seconds between automatic checkpoints; 0: none
    restore_thread: str = ""  # restore this thread's head before the mount is ready
    restore_if_empty: bool = False  # or go on with what is there
    keep: str = ""  # the rule they are thinned by; empty: they stay
    state: str = ""  # the retained state to show, as in a query string; empty: the live one. Read-only
    host: Host = field(default_factory=Host)

    @property
    def mount_id(self) -> str:
        """The same for every mount of the same filesystem and subtree at the same place."""
        return mount_id(self.token.file_system_id, self.remote_path, self.mountpoint, self.state)

    @property
    def source(self) -> str:
        """The mount source the kernel lists."""
        return f"fsd:{self.token.file_system_id}:{self.mount_id}"


def mount_id(file_system_id: str, remote_path: bytes, mountpoint: Path, state: str = "") -> str:
    """16 hex digits; `mountpoint` must be absolute and resolved. A mount of a retained state is another one
    than that of the live tree: what the one left must not be sent by the other."""
    parts = b"/".join(p for p in remote_path.split(b"/") if p)
    known = [file_system_id.encode(), parts, bytes(mountpoint), *([state.encode()] if state else [])]
    text = b"\0".join(known)
    digest: str = sha256(text).hexdigest()
    return digest[:16]


def packed(options: MountOptions) -> bytes:
    """All but the host, for another process of the same program."""
    values = {name: getattr(options, name) for name in options.__match_args__ if name != "host"}
    values["token"] = options.token.text()
    return marshal.dumps({n: bytes(v) if isinstance(v, Path) else v for n, v in values.items()})


def unpacked(raw: bytes) -> MountOptions:
    """What was packed, on the machine's own host."""
    values = marshal.loads(raw)
    paths = {name: Path(os.fsdecode(values[name])) for name in ("mountpoint", "state_dir", "runtime_dir")}
    return MountOptions(**{**values, **paths, "token": parse(values["token"])})
