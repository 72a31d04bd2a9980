"""What a replay knows of each file is found without a look at all others."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

from fsd.vfs.records import Reserved
from fsd.vfs.replay import Replay

FILES = 20_000


def test_the_contents_of_many_files() -> None:
    """Once a file: by looks through all of them 400 million steps, and hours for five times as many."""
    replay = Replay(cast(Any, None), cast(Any, None), lambda: None)
    for number in range(1, 2 * FILES, 2):
        for opno in (number + 1, number):
            values = dict.fromkeys(Reserved._fields, 0) | {"opno": opno, "ino": number}
            replay._number(opno, Reserved(**cast(Any, values)), cast(Any, SimpleNamespace(pos=opno)))
    del replay.ops[2]
    began = time.process_time()
    found = [replay.contents(ino) for ino in range(1, 2 * FILES, 2)]
    assert time.process_time() - began < 10.0
    assert [item.opno for item in cast(Any, found[0])] == [1]
    assert [item.opno for item in cast(Any, found[1])] == [3, 4]
    assert sum(map(len, found)) == 2 * FILES - 1
    assert replay.contents(2) == []
