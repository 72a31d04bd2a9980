"""Picks the object store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fsd.blobs.directory import DirectoryStore
from fsd.blobs.store import BlobStore
from fsd.host.seam import Host

if TYPE_CHECKING:
    from fsd.blobs.s3 import S3Options


def open_store(place: Path | S3Options, host: Host) -> BlobStore:
    """The store in a directory, or in a bucket. boto3 is loaded only for the latter."""
    if isinstance(place, Path):
        return DirectoryStore(place, host)
    from fsd.blobs.s3 import S3Store

    return S3Store(place, host)
