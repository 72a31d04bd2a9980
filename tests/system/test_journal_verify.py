"""A third party verifies an export with docs/journals.md alone: this file imports nothing of fsd's hashing.

The canonical form here is written from RFC 8785 and the page: numbers through `repr` of a double, keys by
UTF-16 code units, integers outside ±(2^53−1) as they came.
"""

from __future__ import annotations

import hashlib
import json
import random
import sqlite3
from decimal import Decimal
from typing import Any

import pytest
from support.server import Server, TestFs

SAFE = 2**53 - 1
ESCAPES = {
    '"': '\\"',
    "\\": "\\\\",
    "\b": "\\b",
    "\f": "\\f",
    "\n": "\\n",
    "\r": "\\r",
    "\t": "\\t",
}


def text_of(value: str) -> str:
    return '"' + "".join(ESCAPES.get(c) or (f"\\u{ord(c):04x}" if c < " " else c) for c in value) + '"'


def double(value: float) -> str:
    """ECMAScript's Number::toString, from the shortest digits that read back as the same double."""
    if value == 0:
        return "0"
    sign, digits, exponent = Decimal(repr(value)).as_tuple()
    assert isinstance(exponent, int)
    text = "".join(map(str, digits)).lstrip("0")
    stripped = text.rstrip("0")
    exponent += len(text) - len(stripped)
    text, count = stripped, len(stripped)
    point = count + exponent  # value = 0.text × 10^point
    if count <= point <= 21:
        made = text + "0" * (point - count)
    elif 0 < point <= 21:
        made = text[:point] + "." + text[point:]
    elif -6 < point <= 0:
        made = "0." + "0" * -point + text
    else:
        power = point - 1
        mantissa = text if count == 1 else text[0] + "." + text[1:]
        made = f"{mantissa}e{'+' if power > 0 else '-'}{abs(power)}"
    return ("-" if sign else "") + made


def canonical(value: Any) -> str:
    if value is None:
        return "null"
    if value is True or value is False:
        return "true" if value else "false"
    if isinstance(value, str):
        return text_of(value)
    if isinstance(value, int):
        return str(value) if abs(value) > SAFE else double(float(value))
    if isinstance(value, float):
        return double(value)
    if isinstance(value, list):
        return "[" + ",".join(map(canonical, value)) + "]"
    ordered = sorted(value, key=lambda k: k.encode("utf-16-be"))
    return "{" + ",".join(f"{text_of(k)}:{canonical(value[k])}" for k in ordered) + "}"


def digest(value: Any) -> str:
    return hashlib.sha256(canonical(value).encode()).hexdigest()


GENESIS = ("file_system_id", "journal_id", "kind", "title", "actor", "labels", "created_at")


def verify(journal: dict[str, Any], entries: list[dict[str, Any]]) -> str:
    """The head hash; raises AssertionError where the chain breaks."""
    head = digest({name: journal[name] for name in GENESIS})
    assert head == journal["genesis_hash"], "genesis"
    for at, entry in enumerate(entries, 1):
        assert entry["seq"] == at, f"seq {at}"
        assert entry["prev_hash"] == head, f"prev {at}"
        head = digest({k: v for k, v in entry.items() if k != "entry_hash"})
        assert entry["entry_hash"] == head, f"hash {at}"
    assert head == journal["head_hash"], "head"
    return head


def random_text(rng: random.Random) -> str:
    pool = ['"', "\\", "\n", "\x00", "\x1f", "\x7f", "é", "☃", "\U0001f600", "～", "a", "Z", "/"]
    return "".join(rng.choice(pool) for _ in range(rng.randrange(6)))


def random_number(rng: random.Random) -> str:
    """The text of a JSON number, of every kind."""
    kind = rng.randrange(7)
    if kind == 0:
        return str(rng.randrange(-(10**30), 10**30))
    if kind == 1:
        return str(rng.choice([0, -0, SAFE, SAFE + 1, -SAFE, -SAFE - 1, 2**63, 10**21, 10**22]))
    if kind == 2:
        return rng.choice(["-0", "-0.0", "1.0", "1e0", "0.000001", "1e-7", "1E21", "1e+20", "5e-324", "1e23"])
    if kind == 3:
        return repr(rng.uniform(-1, 1) * 10 ** rng.randrange(-300, 300))
    if kind == 4:
        return f"{rng.randrange(10**6)}.{rng.randrange(10**25)}"
    if kind == 5:
        return f"{rng.randrange(1, 10)}e{rng.randrange(-30, 30)}"
    return str(rng.randrange(-1000, 1000))


def random_json(rng: random.Random, depth: int = 0) -> str:
    kind = rng.randrange(6 if depth < 3 else 4)
    if kind == 0:
        return random_number(rng)
    if kind == 1:
        return json.dumps(random_text(rng), ensure_ascii=rng.random() < 0.5)
    if kind == 2:
        return rng.choice(["true", "false", "null"])
    if kind == 3:
        return random_number(rng)
    if kind == 4:
        return "[" + ",".join(random_json(rng, depth + 1) for _ in range(rng.randrange(4))) + "]"
    names = {random_text(rng) for _ in range(rng.randrange(5))}
    return "{" + ",".join(f"{json.dumps(n)}: {random_json(rng, depth + 1)}" for n in names) + "}"


def test_independent_code_verifies_an_export(shared_fs: TestFs) -> None:
    rng = random.Random(20_260_101)
    fs = shared_fs
    made = fs.ask(
        "POST",
        "/journals",
        {"journal_id": "j", "title": "t ☃ \U0001f600", "labels": [{"key": "k", "value": "v"}]},
    )
    assert made.status == 201
    heads = []
    for at in range(30):
        entries = ",".join(
            '{"type":"x","～":1,"\U0001f600":2,"v":' + random_json(rng) + ',"n":' + random_number(rng) + "}"
            for _ in range(10)
        )
        got = fs.ask("POST", "/journals/j/entries", ('{"entries":[' + entries + "]}").encode())
        assert got.status == 200, (at, got.body)
        heads.append(got.json["head_hash"])
    journal = fs.ask("GET", "/journals/j").json
    entries = fs.ask("GET", "/journals/j/entries?limit=1000").json["entries"]
    assert len(entries) == 300
    assert verify(journal, entries) == heads[-1]
    for trusted in (journal["genesis_hash"], heads[0], heads[-1]):
        assert fs.ask("GET", f"/journals/j/verify?head_hash={trusted}").json["ok"]
    got = fs.ask("GET", f"/journals/j/verify?head_hash={'0' * 64}").json
    assert not got["ok"] and got["hash_chain_ok"] and "trusted head" in got["reason"]
    changed = [dict(e) for e in entries]
    changed[41]["type"] = "y"
    with pytest.raises(AssertionError, match="hash 42"):
        verify(journal, changed)


@pytest.mark.parametrize(
    ("damage", "bad", "says"),
    [
        ("UPDATE journal_entry SET body = replace(body, 'first', 'other') WHERE seq = 3", 3, "its hash"),
        ("DELETE FROM journal_entry WHERE seq = 3", 3, "missing"),
        ("DELETE FROM journal_entry WHERE seq = 5", 5, "missing at the end"),
        ("UPDATE journal SET title = 'x'", 0, "genesis"),
        (
            "UPDATE journal_entry SET entry_hash = (SELECT entry_hash FROM journal_entry WHERE seq = 1) "
            "WHERE seq = 2",
            2,
            "its hash",
        ),
        (
            "UPDATE journal_entry SET body = replace(body, '\"seq\":4', '\"seq\":5') WHERE seq = 4",
            4,
            "number",
        ),
    ],
)
def test_verify_finds_what_was_changed_behind_its_back(
    server: Server, damage: str, bad: int, says: str
) -> None:
    fs = server.create()
    fs.ask("POST", "/journals", {"journal_id": "j"})
    fs.ask("POST", "/journals/j/entries", {"entries": [{"type": "a", "x": "first"}] * 5})
    assert fs.ask("GET", "/journals/j/verify").json["ok"]
    server.stop()
    with sqlite3.connect(server.data_dir / "fsd.db") as db:
        assert db.execute(damage).rowcount == 1
    db.close()
    server.restart()
    got = fs.ask("GET", "/journals/j/verify").json
    assert not got["ok"] and not got["hash_chain_ok"]
    assert got["first_bad_seq"] == bad and says in got["reason"]
