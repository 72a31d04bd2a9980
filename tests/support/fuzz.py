"""Requests made of good ones by breaking one or more of their parts, for every route of the OpenAPI document.

Everything comes from one seeded generator, so that a failure can be played again.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, quote_from_bytes, urlencode

import msgpack

from fsd.model import blocks, ops
from fsd.model.attrs import ROOT_INO, make_ino
from fsd.wire import messages
from fsd.wire.frame import make_blob, pack_pieces

HUGE: Final = "9" * 5000
INTS: Final[tuple[Any, ...]] = (
    *(0, 1, -1, 2, 31, 2**15, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1),
    *(-(2**31), -(2**63)),
)
TEXTS: Final = (
    *(
        "",
        " ",
        "a",
        "..",
        ".",
        "/",
        "//",
        "/a/../b",
        "/a",
        "/a/b",
        "a=b",
        "=",
        "a\x00b",
        "\n",
        "%",
        "é" * 130,
    ),
    *("x" * 255, "x" * 256, "x" * 70000, "1" * 4301, HUGE, "-1", "--5", "-", "1e5", "1e999", "nan", "inf"),
    *("٣", "0x10", "1_000", "true", "null", "[]", "{}", "fs_" + "a" * 20, "\u2028", "\U0001f4a9", "7777"),
    *("1:1", "*", '"1:1"', "99999999999999999999:1", "2026-01-01T00:00:00Z", "1h", "-1h", "9999999999d"),
)
VALUES: Final[tuple[Any, ...]] = (
    *INTS,
    *TEXTS,
    *(None, True, False, 1.5, -0.0, 1e308, [], {}, [[]], [None], {"b64": "/w=="}, {"b64": "!"}, {"b64": 1}),
    *([1, 2, 3], [-1, -1, -1], [2**70] * 3, {"k": "v"}, {"k": 1}, ["a"] * 600, [{}] * 3, [[[[[[[[]]]]]]]]),
    [{"key": "k", "value": "v"}],
)
RAW_JSON: Final = (
    *(
        b"",
        b" ",
        b"null",
        b"[]",
        b"{",
        b'{"a":',
        b"\xff\xfe",
        b"\x00" * 10,
        b"NaN",
        b'{"a":NaN}',
        b"1",
        b'"s"',
    ),
    *(
        b'{"a":1,"a":2}',
        b'{"\\ud800":1}',
        b'{"action":"\\udfff"}',
        b"[" * 100000,
        b'{"a":' * 5000,
        b"{" * 70000,
    ),
    *(
        b'{"action":"mkdir","path":"/\\u0000"}',
        b'{"n":' + HUGE.encode() + b"}",
        b'{"n":1e99999}',
        b"\xef\xbb\xbf{}",
    ),
)
PATHS: Final = (
    *(
        b"",
        b"/",
        b"a",
        b"keep/one",
        b"keep",
        b"..",
        b"a/../b",
        b".",
        b"%00",
        b"\xff\xfe",
        b"a\nb",
        b"x" * 255,
    ),
    *(b"x" * 256, b"d/" * 300, b"keep/one/below", b"loop", b"new\x00", b"/" * 50, b"\xc3", b" ", b"a//b"),
)
GOOD: Final = {
    **dict.fromkeys(
        ("limit", "offset", "after_seq", "session", "size", "uid", "gid", "min_size"), ("1", "5", "0")
    ),
    **dict.fromkeys(("follow", "recursive", "parents", "overwrite", "append", "include_expired"), ("0", "1")),
    **dict.fromkeys(("newer_ns", "older_ns", "mtime_ns"), ("0", "1", str(10**18), str(2**63 - 1), "-5")),
    **dict.fromkeys(("label", "tag"), ("k=v", "=", "k=", "k")),
    **dict.fromkeys(("since", "until"), ("1h", "2026-01-01T00:00:00Z", "1969-12-31T23:59:59Z")),
    **dict.fromkeys(("cursor", "after"), ("", "YQ", "a", "fs_" + "a" * 20, "2", "0")),
    "wait": ("0", "0.01"),
    "mode": ("644", "7777", "0"),
    "type": ("file", "directory", "t"),
    "name": ("*", "[", "[!", "a*" * 30, "?"),
    "head_hash": ("0" * 64,),
}
HEADERS: Final = (
    *({"Range": "bytes=0-0"}, {"Range": "bytes=" + "9" * 30 + "-"}, {"Range": "bytes=-"}, {"Range": "x"}),
    *({"Range": "bytes=5-1"}, {"Range": "bytes=0-1,3-4"}, {"If-Match": "*"}, {"If-Match": '"1:1"'}),
    *(
        {"If-Match": "x"},
        {"If-None-Match": "*"},
        {"If-None-Match": "x"},
        {"If-Match": '"' + "9" * 30 + ':1"'},
    ),
    *({"Idempotency-Key": "k"}, {"Idempotency-Key": ""}, {"Idempotency-Key": "x" * 129}),
    *({"Idempotency-Key": "\xff"}, {"X-Fsd-Call": "zz\x7f"}, {"X-Fsd-Call": "a" * 65}),
    *({"Content-Type": "text/html"}, {"Content-Encoding": "gzip"}, {"Expect": "100-continue"}),
    *({"Accept": "\xff" * 100}, {"Authorization": "Basic eA=="}, {"Authorization": "Bearer"}),
    *({"Authorization": "Bearer \xff"}, {"Authorization": "Bearer fsd1.e30.x"}, {"X-Forwarded-For": "x"}),
    *({"X-Fsd-Test-Clock": "x"}, {"Host": ""}, {"Connection": "upgrade", "Upgrade": "websocket"}),
)


@dataclass(frozen=True)
class Made:
    """One request. `token`: which secret goes with it."""

    method: str
    path: str
    body: bytes | None
    headers: dict[str, str]
    admin: bool


class Fuzz:
    """Requests against filesystem `fs` with session number `session`, journal `journal` and token id `tid`.

    `ticket` is the session's; a commit that the server applies makes it stale, and then says so.
    """

    def __init__(self, seed: int, document: dict[str, Any], known: dict[str, str]) -> None:
        self.rng = random.Random(seed)
        self.known = known
        self.session = int(known["n"])
        self.ticket = base64.b64decode(known["ticket"])
        self.next = 1
        self.routes: list[tuple[str, str, dict[str, Any]]] = [
            (method.upper(), template, operation)
            for template, methods in document["paths"].items()
            for method, operation in methods.items()
        ]

    def request(self, route: tuple[str, str, dict[str, Any]]) -> Made:
        method, template, operation = route
        rng = self.rng
        path = template
        for name in ("id", "tid", "jid", "n"):
            if "{" + name + "}" in path:
                good = rng.random() < 0.93
                text = self.known[name] if good else rng.choice(TEXTS)[:3000]
                path = path.replace("{" + name + "}", quote(text, safe=""))
        if "{path}" in path:
            path = path.replace(
                "{path}", quote_from_bytes(rng.choice(PATHS), safe="/%" if rng.random() < 0.2 else "/")
            )
        query = [p["name"] for p in operation["parameters"] if p["in"] == "query"]
        wait = {"wait"}  # a long poll is right to take its time
        seldom = {"data"}  # right only together with others: next to no body would get through
        pairs = [
            (name, "0.01" if name in wait and rng.random() < 0.8 else self._query(name))
            for name in query
            if rng.random() < (0.05 if name in seldom else 0.4)
        ]
        if rng.random() < 0.03:
            pairs.append((rng.choice(TEXTS)[:100], rng.choice(TEXTS)[:100]))
        if pairs:
            path += "?" + urlencode(pairs, errors="replace")
        headers = dict(rng.choice(HEADERS)) if rng.random() < 0.25 else {}
        body = self._body(template, operation) if method != "GET" or rng.random() < 0.05 else None
        admin = operation["security"] == [{"admin": []}]
        if rng.random() < 0.02:
            admin = not admin
        return Made(method, path, body, headers, admin)

    def _query(self, name: str) -> str:
        text = self.rng.choice(TEXTS)[:6000]
        # A wait that is a big number is honoured up to its bound: that is no hang.
        if self.rng.random() < 0.6:
            return self.rng.choice(GOOD.get(name, ("a", "1", "k=v")))
        return "-1" if name == "wait" and _positive(text) else text

    # Bodies.

    def _body(self, template: str, operation: dict[str, Any]) -> bytes:
        rng = self.rng
        if template.endswith("/commits"):
            return self._frame(self._commit())
        if template.endswith("/packs"):
            return self._frame(b"".join(pack_pieces({}, [make_blob(b"abc" * rng.randrange(1, 900))])))
        if template.endswith("/ns"):
            return self._raw(messages.packb([self._question() for _ in range(rng.randrange(4))]))
        if template.endswith("/blobs"):
            return self._raw(
                messages.packb(rng.choice([[b"x" * 32], [b"x"], {}, 5, [b"x" * 32] * 300, ["x" * 32]]))
            )
        if "requestBody" not in operation and rng.random() < 0.8:
            return b""
        content = operation.get("requestBody", {"content": {}})["content"]
        if "application/json" not in content:
            return rng.randbytes(rng.choice([0, 1, 100, 70_000]))
        if rng.random() < 0.1:
            return rng.choice(RAW_JSON)
        fields = list(content["application/json"]["schema"]["properties"])
        if template.endswith("/actions"):
            made = self._action()
        elif template.endswith("/entries"):
            made = self._entries()
        else:
            made = {name: rng.choice(VALUES) for name in fields if rng.random() < 0.5}
        if template.endswith("/sessions") and rng.random() < 0.7:
            made["mount_id"] = "m"
        if made and rng.random() < 0.25:
            made[rng.choice(list(made))] = rng.choice(VALUES)
        return self._cut(json.dumps(made, ensure_ascii=rng.random() < 0.5).encode("utf-8", "replace"))

    def _action(self) -> dict[str, Any]:
        rng = self.rng
        fields = {
            "mkdir": ("path", "mode", "parents", "uid", "gid"),
            "remove": ("path", "recursive", "if_match"),
            "rename": ("from", "to", "overwrite"),
            "copy": ("from", "to", "overwrite"),
            "symlink": ("target", "path", "overwrite", "if_match"),
            "hardlink": ("source", "path"),
            "chmod": ("path", "mode", "follow"),
            "chown": ("path", "uid", "gid", "follow"),
            "utimens": ("path", "mtime_ns", "atime_ns", "follow"),
            "setxattr": ("path", "name", "value_b64", "follow"),
            "removexattr": ("path", "name", "follow"),
        }
        name = rng.choice(list(fields))
        made: dict[str, Any] = {"action": name}
        for field in fields[name]:
            kind = rng.random()
            if field in ("path", "from", "to", "source", "target") and kind < 0.8:
                raw = b"/" + rng.choice(PATHS)
                made[field] = {"b64": base64.b64encode(raw).decode()}
            elif field in ("mtime_ns", "atime_ns", "uid", "gid"):
                made[field] = rng.choice(INTS)
            elif field == "value_b64":
                made[field] = base64.b64encode(b"v" * rng.choice([0, 1, 65535, 65536, 65537])).decode()
            elif field in ("parents", "recursive", "overwrite", "follow"):
                made[field] = kind < 0.5
            elif kind < 0.6:
                made[field] = rng.choice(VALUES)
        if name == "remove" and made.get("path") in ("/", "//"):
            made["recursive"] = False
        return made

    def _entries(self) -> dict[str, Any]:
        rng = self.rng
        entry: Any = {"type": "t", "step": "s"}
        for name in ("type", "status", "actor", "subjects", "labels", "summary", "payload", "at", "id", "x"):
            if rng.random() < 0.15:
                entry[name] = rng.choice(VALUES)
        made: dict[str, Any] = {"entries": [entry] * rng.choice([0, 1, 1, 1, 2, 501])}
        if rng.random() < 0.2:
            made["idempotency_key"] = rng.choice(VALUES)
        if rng.random() < 0.2:
            made["expected_seq"] = rng.choice(VALUES)
        return made

    def _question(self) -> Any:
        rng = self.rng
        form = rng.choice(
            [
                (messages.LOOKUP, ROOT_INO, b"keep", 100),
                (messages.LIST, ROOT_INO, b"", 10),
                (messages.ATTRS, (ROOT_INO, 5)),
                (messages.BLOCKS, 2, 0, 4),
                (messages.TREE, ROOT_INO, 100),
                (messages.PATH, (b"keep", b"one")),
            ]
        )
        return self._mutated(form)

    def _commit(self) -> bytes:
        rng = self.rng
        self.next += rng.choice([1, 5, 5, 5, 100])
        first = rng.choice([self.next] * 8 + [1, 2, 2**40])
        made: list[Any] = [self._mutated(self._operation(first + at)) for at in range(rng.randrange(1, 5))]
        if rng.random() < 0.7:
            made = [
                (first + at, *row[1:]) if isinstance(row, tuple) and row else row
                for at, row in enumerate(made)
            ]
        try:
            raw = msgpack.packb(made, use_bin_type=True)
        except (OverflowError, ValueError):
            raw = b"\xc1"
        header: dict[str, Any] = {
            "v": messages.PROTOCOL,
            "session": self.session,
            "ticket": self.ticket,
            "ops": raw,
            "digest": hashlib.sha256(raw).digest(),
            "pending": (0, 0, 0),
        }
        if rng.random() < 0.25:
            header[rng.choice(list(header))] = rng.choice(
                [
                    0,
                    -1,
                    2**63,
                    2**64 - 1,
                    b"",
                    b"x" * 40,
                    "x",
                    None,
                    (),
                    (0,) * 5,
                    1.5,
                    float("inf"),
                    {},
                    (-1, 0, 0),
                    (2**64 - 1,) * 3,
                    (float("inf"),) * 3,
                    ("1", "2", "3"),
                    (None,) * 3,
                ]
            )
        sent = [make_blob(b"data")] if rng.random() < 0.7 else []
        return b"".join(pack_pieces(header, sent))

    def _operation(self, opno: int) -> tuple[Any, ...]:
        rng = self.rng
        ino = make_ino(self.session, rng.randrange(1, 50))
        name = rng.choice([b"f%d" % rng.randrange(20), *(p.replace(b"/", b"") for p in PATHS)])
        digest = hashlib.sha256(b"data").digest()
        parts = blocks.encode((blocks.Part(0, 4, 0, digest),))
        parent = rng.choice([ROOT_INO, make_ino(self.session, rng.randrange(1, 50))])
        other = make_ino(self.session, rng.randrange(1, 50))
        mode = rng.choice([0o100644, 0o40755, 0o120777, 0o10644, 0o20644, 0, 0o170000, 2**40])
        return rng.choice(
            [
                ops.Create(opno, ops.CREATE, parent, name, ino, mode, 0, 0, 0, rng.choice([None, b"t"]), 1),
                ops.Create(opno, ops.CREATE, ROOT_INO, name, ino, 0o100644, 0, 0, 0, None, 1),
                ops.Link(opno, ops.LINK, ino, parent, name, 1),
                ops.Unlink(opno, ops.UNLINK, parent, name, ino, 0, 1),
                ops.Rmdir(opno, ops.RMDIR, parent, name, ino, 1),
                ops.Rename(
                    opno, ops.RENAME, parent, name, ino, ROOT_INO, b"n", rng.randrange(5), other, 0, 1
                ),
                ops.Setattr(opno, ops.SETATTR, ino, 0o600, 1, 1, 1, 1, 1),
                ops.Setxattr(opno, ops.SETXATTR, ino, b"user.a", b"v", 1),
                ops.Content(opno, ops.CONTENT, ino, 0, 4, ((0, parts),), rng.random() < 0.5, None, 2, 2),
                ops.Content(opno, ops.CONTENT, ino, 0, 2**41, ((2**21, parts),), True, 0, 2, 2),
            ]
        )

    def _mutated(self, row: tuple[Any, ...], good: float = 0.5) -> Any:
        rng = self.rng
        if rng.random() < good:
            return tuple(row)
        changed = list(row)
        for _ in range(rng.randrange(1, 3)):
            if not changed:
                break
            at = rng.randrange(len(changed))
            act = rng.random()
            if act < 0.08:
                del changed[at]
            elif act < 0.12:
                changed.append(rng.choice(INTS))
            else:
                changed[at] = rng.choice(
                    [
                        *INTS,
                        None,
                        True,
                        b"",
                        b"/",
                        b"..",
                        b"\x00",
                        b"n" * 256,
                        b"b" * 5000,
                        "text",
                        1.5,
                        (),
                        ((0, b""),),
                        ((0, None),),
                        ((-1, None),),
                        ((0, b"x"), (0, b"x")),
                        ((2**62, None),),
                        {},
                        ((1, None), (0, None)),
                        (b"k",),
                        ((),),
                        (None,),
                        ((0, b"\x00" * 100),),
                        [[]] * 3,
                    ]
                )
        return tuple(changed)

    def _frame(self, good: bytes) -> bytes:
        rng = self.rng
        kind = rng.random()
        if kind < 0.75:
            return good
        if kind < 0.85:
            table = rng.choice(
                [
                    5,
                    [[1]],
                    [[b"x" * 32, 0, 1, 2**40]],
                    [[b"x" * 32, 0, 1, -5]],
                    [[2**33, 0, 1, 0]],
                    [[b"", 0, 1, 0]],
                    [[b"x" * 32, float("inf"), 1, 0]],
                    [["x", 0, 1, 0]],
                    [[b"x" * 32, 9, 4, 0]],
                    {},
                    [[None] * 4],
                    [[b"x" * 32, 1, 2**20, 0]] * 5000,
                    [[b"x" * 32, 0, 1, 0]],
                ]
            )
            raw: bytes = msgpack.packb({"v": 1, "blobs": table}, use_bin_type=True)
            return b"FSD1" + len(raw).to_bytes(4, "big") + raw
        return self._raw(good)

    def _raw(self, good: bytes) -> bytes:
        """`good`, or it with bytes flipped, cut, doubled, or something else."""
        rng = self.rng
        kind = rng.random()
        if kind < 0.5:
            return good
        if kind < 0.75 and good:
            broken = bytearray(good)
            for _ in range(rng.randrange(1, 6)):
                broken[rng.randrange(len(broken))] = rng.randrange(256)
            return bytes(broken)
        if kind < 0.9:
            return self._cut(good)
        other: bytes = rng.choice(
            [
                b"\x91" * 60000,
                b"\xdd\xff\xff\xff\xff",
                b"\xc6\xff\xff\xff\xff",
                b"\x81\x90\xc0",
                b"\xd9\x01\xff",
                b"FSD1\xff\xff\xff\xff",
                b"FSD1\x00\x00\x00\x00",
                b"FSD1",
                rng.randbytes(200),
                b"{}",
                good + good,
                b"\x91\x81\x81\x01\x02\x03",
                b"\xc1",
                b"\xd4\x05x",
                b"\xd7\xff" + b"\xff" * 8,
                b"\xc0",
            ]
        )
        return other

    def _cut(self, good: bytes) -> bytes:
        rng = self.rng
        if rng.random() < 0.85:
            return good
        return good[: rng.randrange(len(good) + 1)]


def _positive(text: str) -> bool:
    try:
        return float(text) > 0.5
    except ValueError:
        return False
