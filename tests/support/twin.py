"""A copy of a client in one process, as a platform makes one of a running sandbox."""

from __future__ import annotations

import copy
import os
import shutil
from dataclasses import replace
from pathlib import Path

from fsd.vfs.log import Log
from fsd.vfs.segments import NAME
from support.client import Client


def clone(client: Client, directory: Path) -> Client:
    """A copy of the whole machine: the same session, the same memory, another state directory."""
    volume = client.volume
    client.call(lambda v: v.lookup(v.root_ino, b"nothing here"))  # no question open: closures are not copied
    shutil.copytree(client.options.state_dir, directory)
    made = Client(directory, client.bench, client.clock, client.rng, client.options.mount_id)
    made.options = replace(client.options, state_dir=directory)
    old = volume.core.log
    log = copy.copy(old)
    log._dir = directory
    log._fds = {n: os.open(directory / (NAME % n), os.O_RDWR) for n in old._fds}
    log._sizes = dict(old._sizes)
    log._kept, log._kept_sizes = {}, {}
    memo = {
        id(volume.core.host): client.host,
        id(old): log,
        id(client.options): made.options,
    }
    pairs = copy.deepcopy((volume, client.waiting, client.delayed), memo)
    made.volume, made.waiting, made.delayed = pairs
    made.volume.lock = None
    assert isinstance(made.volume.core.log, Log)
    return made
