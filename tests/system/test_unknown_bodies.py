"""A large body of somebody unknown is read on no route: its sender is told so while it still sends."""

from __future__ import annotations

import http.client

import pytest
from support.server import TestFs

from fsd.model.limits import MIB
from fsd.server.app import all_routes

_VALUES = {"id": "fs_" + "a" * 20, "path": "a", "key": "b", "cid": "cp_c", "n": "1", "jid": "j", "fork": "f"}
_VALUES |= {"tid": "tok_t", "fence": "1"}
# The route of each method and path that may have a body.
ROUTES = [
    (one.method, one.template.format_map(_VALUES))
    for one in all_routes()
    if one.method in ("POST", "PUT", "DELETE")
]


@pytest.mark.parametrize("how", ["declared", "chunked"])
def test_a_large_body_waits_for_its_token(shared_fs: TestFs, how: str) -> None:
    """The last character of the secret is another: the token is unknown, as whoever guesses has it."""
    secret = shared_fs.token[:-1] + ("A" if shared_fs.token[-1] != "A" else "B")
    answers: dict[str, int] = {}
    for method, path in ROUTES:
        connection = http.client.HTTPConnection("127.0.0.1", shared_fs.server.port, timeout=30)
        try:
            connection.putrequest(method, path)
            connection.putheader("Authorization", f"Bearer {secret}")
            if how == "declared":
                connection.putheader("Content-Length", str(MIB))
            else:
                connection.putheader("Transfer-Encoding", "chunked")
            connection.endheaders()  # and not a byte of the body
            try:
                answers[f"{method} {path}"] = connection.getresponse().status
            except TimeoutError:
                answers[f"{method} {path}"] = 0
        finally:
            connection.close()
    wrong = {route: status for route, status in answers.items() if status not in (401, 413)}
    assert wrong == {}
    assert list(answers.values()).count(401) > len(ROUTES) / 2
