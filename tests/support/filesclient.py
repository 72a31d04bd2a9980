"""A client of the tree by path, as `fsd cp` has one, and a network between it and the shared server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fsd.client.files import Files
from fsd.client.http import Http, HttpOptions
from fsd.client.identity import Claim, data_identity
from fsd.host.seam import Host
from support.proxy import FaultProxy
from support.server import Server, TestFs


def connect(fs: TestFs, endpoint: str | None = None, **options: float) -> Files:
    """`options` are those of `HttpOptions`."""
    identity = data_identity(Claim(token=fs.token, endpoint=endpoint))
    return Files(Http(identity, Host(), HttpOptions(**options)))


@pytest.fixture
def files(shared_fs: TestFs) -> Files:
    """Of an empty filesystem of the test's own."""
    return connect(shared_fs)


@pytest.fixture
def proxy(shared_server: Server) -> Iterator[FaultProxy]:
    """Before the shared server; passes everything until told otherwise."""
    with FaultProxy(shared_server.url) as made:
        yield made
