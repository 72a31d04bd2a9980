"""S3 with a bad network: a reply that is lost, cut, or of somebody else is never taken for an answer."""

from __future__ import annotations

import gc
import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
from botocore.awsrequest import AWSPreparedRequest
from support.proxy import (
    CUT_REQUEST,
    DOUBLE_REQUEST,
    EMPTY_200,
    HTML_502,
    LOSE_REPLY,
    FaultProxy,
    Request,
    truncate,
)
from support.seaweed import SeaweedServer

from fsd.blobs import s3
from fsd.blobs.s3 import S3Options, S3Store
from fsd.host.seam import Host
from fsd.model.errors import Unavailable


@pytest.fixture(scope="module")
def proxy(seaweed_server: SeaweedServer) -> Iterator[FaultProxy]:
    with FaultProxy(seaweed_server.endpoint) as made:
        yield made


@pytest.fixture
def store(proxy: FaultProxy, seaweed_bucket: S3Options) -> Iterator[S3Store]:
    prefix = f"{secrets.token_hex(6)}/"
    yield S3Store(replace(seaweed_bucket, endpoint=proxy.url, prefix=prefix), Host())
    proxy.clear()


def of(method: str) -> object:
    def match(request: Request) -> bool:
        return request.method == method

    return match


@pytest.mark.parametrize("fault", [LOSE_REPLY, CUT_REQUEST, HTML_502, DOUBLE_REQUEST], ids=lambda f: f.kind)
def test_one_bad_put_is_tried_again(store: S3Store, proxy: FaultProxy, fault: object) -> None:
    data = secrets.token_bytes(70_000)
    proxy.next(fault, of("PUT"))  # type: ignore[arg-type]
    store.put("packs/a", [data])
    assert not proxy.pending(), "the fault did not happen"
    assert store.get("packs/a", 0, len(data)) == data


@pytest.mark.parametrize("fault", [LOSE_REPLY, CUT_REQUEST, HTML_502], ids=lambda f: f.kind)
def test_puts_that_never_succeed_are_told(store: S3Store, proxy: FaultProxy, fault: object) -> None:
    proxy.always(fault, of("PUT"))  # type: ignore[arg-type]
    with pytest.raises(Unavailable):
        store.put("packs/a", [b"x"])


@pytest.mark.parametrize("fault", [LOSE_REPLY, HTML_502, EMPTY_200, truncate(400)], ids=lambda f: f.kind)
def test_a_bad_get_is_an_error_or_the_bytes(store: S3Store, proxy: FaultProxy, fault: object) -> None:
    data = secrets.token_bytes(70_000)
    store.put("packs/a", [data])
    proxy.next(fault, of("GET"))  # type: ignore[arg-type]
    with suppress(Unavailable):
        assert store.get("packs/a", 100, 60_000) == data[100:60_100]
    assert not proxy.pending()
    assert store.get("packs/a", 100, 60_000) == data[100:60_100]


def test_a_store_that_is_gone_is_told_in_time(store: S3Store, proxy: FaultProxy) -> None:
    proxy.refuse()
    try:
        for call in (
            lambda: store.put("packs/a", [b"x"]),
            lambda: store.get("packs/a", 0, 1),
            lambda: store.head("packs/a"),
            lambda: list(store.list("packs/")),
            lambda: store.delete("packs/a"),
        ):
            with pytest.raises(Unavailable):
                call()
    finally:
        proxy.accept()
    assert store.head("packs/a") is None


@pytest.mark.long
def test_puts_that_fail_leave_no_objects_in_memory(
    seaweed_server: SeaweedServer, seaweed_bucket: S3Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """botocore's circles of errors hold what was to be put; the collector comes seldom to a server."""
    monkeypatch.setattr(s3, "FAILED_PUTS_MAX", 1)
    with FaultProxy(seaweed_server.endpoint) as gone:
        store = S3Store(replace(seaweed_bucket, endpoint=gone.url), Host())
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            with pytest.raises(Unavailable):
                store.put("packs/a", [secrets.token_bytes(70_000)])
        kept = [one for one in gc.get_objects() if isinstance(one, AWSPreparedRequest)]
        assert len(kept) <= 1  # the last one's
    finally:
        gc.enable()
