"""An upload that is refused leaves no object: who tries again would leave one more each time."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.server import TestFs

from fsd.model.limits import KIB, PACK_INLINE_MAX


def objects(fs: TestFs) -> list[Path]:
    found = (fs.server.data_dir / "blobs" / "packs" / fs.id).glob("*")
    return sorted(found)


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/files/none/f", {}, 404),
        ("/files/dir", {}, 409),
        ("/files/file/f", {}, 409),
        ("/files/file", {"If-None-Match": "*"}, 409),
        ("/files/file", {"If-Match": "1:1"}, 409),
    ],
)
def test_a_refused_file_leaves_no_object(
    shared_fs: TestFs, path: str, headers: dict[str, str], status: int, seed: int
) -> None:
    assert shared_fs.ask("POST", "/actions", {"action": "mkdir", "path": "/dir"}).status == 200
    assert shared_fs.ask("PUT", "/files/file", b"small").status == 200
    assert objects(shared_fs) == []
    body = random.Random(seed).randbytes(PACK_INLINE_MAX + KIB)
    assert shared_fs.ask("PUT", path, body, headers=headers).status == status
    assert objects(shared_fs) == []
    assert shared_fs.ask("PUT", "/files/file", body).status == 200
    assert len(objects(shared_fs)) == 1
    assert shared_fs.ask("GET", "/files/file").body == body
