"""`open_volume`: lock the mount's state, send what an earlier run left, start a new session."""

from __future__ import annotations

from fsd.host.seam import Host
from fsd.remote.api import Remote
from fsd.vfs.types import Cache, VolumeOptions
from fsd.vfs.volume import Volume


def open_volume(options: VolumeOptions, host: Host, remote: Remote, cache: Cache) -> Volume:
    """Blocks (network, disk). Raises `Busy` when the state is in use, `NotDrained` or what the server said
    when an earlier run's changes cannot be sent; they stay."""
    raise NotImplementedError
