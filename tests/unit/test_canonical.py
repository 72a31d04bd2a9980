"""Strict JSON, the canonical form, the chain, and times."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsd.model.errors import UsageError
from fsd.model.times import parse_rfc3339, parse_when, rfc3339
from fsd.wire import strictjson
from fsd.wire.canonical import canonical, entry_hash, genesis_hash
from fsd.wire.chain import Chain, verify_lines
from fsd.wire.strictjson import DEPTH_MAX, Number, dumps, loads, loads_object

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


@given(JSON)
def test_exact_values_are_written_as_they_came(value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    assert dumps(loads(text, "x", exact=True)) == text


@given(JSON)
def test_the_canonical_form_means_the_same_and_is_stable(value: Any) -> None:
    once = canonical(loads(json.dumps(value), "x", exact=True))
    assert canonical(loads(once, "x", exact=True)) == once
    as_double = {"parse_int": float, "parse_float": float}
    assert json.loads(once, **as_double) == json.loads(json.dumps(value), **as_double)


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ('{"b":1,"a":2}', '{"a":2,"b":1}'),
        ("[1.0,1e0,100e-2,-0,-0.0,0.0]", "[1,1,1,0,0,0]"),
        ("9007199254740991", "9007199254740991"),
        ("9007199254740992", "9007199254740992"),
        ("-9007199254740993", "-9007199254740993"),
        ("9007199254740993.0", "9007199254740992"),
        ("123456789012345678901234567890", "123456789012345678901234567890"),
        ("1e21", "1e+21"),
        ("0.000001", "0.000001"),
        ("0.0000001", "1e-7"),
        ("333333333.33333329", "333333333.3333333"),
        ('"\\u20ac$\\u000f\\nA\'B\\u0042\\u0022\\u005c\\\\\\"\\/"', '"€$\\u000f\\nA\'BB\\"\\\\\\\\\\"/"'),
        (
            '{"\\u20ac":1,"\\r":2,"\\ufb33":3,"1":4,"\\ud83d\\ude00":5}',
            '{"\\r":2,"1":4,"€":1,"😀":5,"\ufb33":3}',
        ),
    ],
)
def test_canonical_forms(text: str, form: str) -> None:
    assert canonical(loads(text, "x", exact=True)).decode() == form


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a":1,"a":1}', "'a' twice"),
        ('{"x":{"a":1,"a":1}}', "'a' twice"),
        ('{"a":"\\ud800"}', "body.a holds a lone surrogate"),
        ('{"a":[0,{"b":"\\udc00x"}]}', "body.a[1].b holds"),
        ('{"\\ud800":1}', "a field name in body"),
        ("NaN", "NaN"),
        ("[-Infinity]", "-Infinity"),
        ("[" * (DEPTH_MAX + 1) + "]" * (DEPTH_MAX + 1), "deeper"),
        ("[" * 200_000, "deeper"),
        ("{", "not JSON"),
        ("", "not JSON"),
        ("1" * 5000, "not JSON"),
    ],
)
def test_what_strict_json_refuses(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says.replace("[", "\\[").replace("]", "\\]")):
        loads(text, "body")


def test_bounds_and_shapes_that_pass() -> None:
    assert loads("[" * DEPTH_MAX + "]" * DEPTH_MAX, "body") is not None
    assert loads('"\\ud83d\\ude00"', "body") == "\U0001f600"
    assert loads_object(b" ", "body") == {}
    assert loads("1" * 5000, "body", exact=True) == Number("1" * 5000)
    with pytest.raises(UsageError, match="object"):
        loads_object(b"[]", "body")
    with pytest.raises(UsageError, match="UTF-8"):
        loads(b'"\xff"', "body")
    with pytest.raises(UsageError, match=r"entry\.n cannot"):
        canonical(loads('{"n":1e999}', "x", exact=True), "entry")


@pytest.mark.parametrize("exact", [False, True])
def test_a_long_key_above_a_long_list_costs_no_more_than_both(exact: bool) -> None:
    """A text for the place of each value cost their product: a body of 250 KB took gigabytes, and anybody
    could send it."""
    body = json.dumps({"a" * 20_000: {"b" * 20_000: [0, "x"] * 5_000}})
    tracemalloc.start()
    try:
        value = loads(body, "the body", exact=exact)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        strictjson.check(value, "the body")
        canonical(value, "the body")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - held < 4_000_000


def test_a_place_is_shown_with_the_beginning_of_a_long_key() -> None:
    with pytest.raises(UsageError, match=r"^body\.b\[1\]\.a{100}…\[0\]\.c holds"):
        loads('{"b":[0,{"%s":[{"c":"\\ud800"}]}]}' % ("a" * 500), "body")
    with pytest.raises(UsageError, match=r"^body\.b\[1\]\.a{100}…\[0\]\.c cannot be written"):
        canonical(loads('{"b":[0,{"%s":[{"c":1e999}]}]}' % ("a" * 500), "x", exact=True), "body")


def chain_of(count: int) -> tuple[dict[str, Any], list[str]]:
    journal: dict[str, Any] = {
        "file_system_id": "fs_x",
        "journal_id": "j",
        "kind": "agent",
        "title": "",
        "actor": None,
        "labels": [],
        "created_at": "2026-01-01T00:00:00.000Z",
    }
    head = genesis_hash(journal)
    journal["genesis_hash"] = head
    lines = []
    for seq in range(1, count + 1):
        entry: dict[str, Any] = {"type": "a", "n": Number("1.50"), "seq": seq, "prev_hash": head}
        head = entry_hash(loads(dumps(entry), "x", exact=True))
        lines.append(dumps({**entry, "entry_hash": head}))
    journal["head_hash"] = head
    return journal, lines


def test_an_export_verifies_offline() -> None:
    journal, lines = chain_of(4)
    export = [json.dumps({"journal": journal}), *lines, ""]
    result = verify_lines(export, journal["head_hash"])
    assert result["ok"] and result["entries"] == 4 and result["first_bad_seq"] is None
    assert not verify_lines(export, "0" * 64)["ok"]
    for at in range(1, 5):
        cut = export[:at] + export[at + 1 :]
        found = verify_lines(cut)
        assert not found["ok"] and found["first_bad_seq"] == at
        changed = [*export]
        changed[at] = changed[at].replace("1.50", "1.51")
        assert verify_lines(changed)["first_bad_seq"] == at
        same = [*export]
        same[at] = same[at].replace("1.50", "1.5")
        assert verify_lines(same)["ok"], "another spelling of the same double has the same hash"
    with pytest.raises(UsageError, match="empty"):
        verify_lines([])
    with pytest.raises(UsageError, match="begins"):
        verify_lines(lines)
    broken = verify_lines([export[0], "{", *lines[1:]])
    assert not broken["ok"] and broken["first_bad_seq"] == 1 and broken["entries"] == 4


def test_a_chain_of_a_changed_journal_is_bad_from_the_start() -> None:
    journal, lines = chain_of(1)
    chain = Chain({**journal, "title": "x"})
    chain.follow(lines[0])
    assert chain.finish()["first_bad_seq"] == 0
    with pytest.raises(UsageError, match="lacks"):
        Chain({})


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("1970-01-01T00:00:00Z", 0),
        ("1970-01-01T00:00:00.000000001Z", 1),
        ("1970-01-01t01:00:00.5+01:00", 500_000_000),
        ("1969-12-31T23:59:59.25-00:00", -750_000_000),
        ("2016-12-31T23:59:60Z", 1_483_228_800 * 10**9),
        ("2026-11-29T18:00:00.1234567899Z", 1_795_975_200_123_456_789),
    ],
)
def test_times(text: str, ns: int) -> None:
    assert parse_rfc3339(text, "t") == ns
    assert parse_rfc3339(rfc3339(ns, 9), "t") == ns


def test_times_that_are_none_and_durations() -> None:
    for bad in ("", "2026-13-01T00:00:00Z", "2026-02-29T00:00:00Z", "2026-01-01T24:00:00Z", "now\n"):
        with pytest.raises(UsageError):
            parse_rfc3339(bad, "t")
    for bad in ("2026-01-01T00:00:00", "2026-01-01", "2026-01-01T00:00:61Z", "2026-01-01T00:00:00+25:00"):
        with pytest.raises(UsageError):
            parse_rfc3339(bad, "t")
    assert parse_when("90s", 100 * 10**9, "since") == 10 * 10**9
    assert parse_when("1970-01-01T00:00:01Z", 5, "since") == 10**9
    assert rfc3339(0) == "1970-01-01T00:00:00.000Z" and rfc3339(1_999_999, 3).endswith(".001Z")
    assert rfc3339(-1, 0) == "1969-12-31T23:59:59Z"
