"""What supervisors read of one another: cut in half, of other types, huge; and what they write always fits."""

import dataclasses
import json
import random

import pytest

from meshtrain.survive.records import (
    Node,
    ProcessEnd,
    Rank,
    RestartPlan,
    decode,
    encode,
)

RANK = Rank(1, 8, "S", 0.5, 0.1, step=4, pace=0.2)
NODE = Node(
    "n0",
    "ab",
    "host",
    "boot",
    7,
    "10.0.0.1",
    4711,
    9,
    1e9,
    "running",
    3,
    3,
    False,
    RANK,
)
PLAN = RestartPlan(
    4,
    2,
    "running",
    "n0",
    1e9,
    "start",
    "it begins",
    "run",
    ["n0", "n1"],
    ["a", "b"],
    "h:1",
    {"data": 2},
    1,
    quarantined={"n2": 5},
)


def test_what_is_written_is_read():
    assert decode(Node, encode(NODE, 4096)) == NODE
    assert decode(RestartPlan, encode(PLAN)) == PLAN
    ended = dataclasses.replace(
        NODE, rank=None, end=ProcessEnd(-9, "signal", "was ended", 4, [1, 2])
    )
    assert decode(Node, encode(ended, 4096)) == ended


def test_a_record_cut_anywhere_is_none_or_whole():
    text = encode(NODE, 4096)
    whole = len(text.rstrip())
    assert [decode(Node, text[:end]) for end in range(whole)] == [None] * whole
    assert decode(Node, text[:whole]) == NODE


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("name", 5),
        ("name", None),
        ("sequence", "9"),
        ("sequence", 1.5),
        ("sequence", True),
        ("wall", "now"),
        ("leaving", 1),
        ("rank", []),
        ("rank", {}),
        ("rank", {"number": "1", "pid": 2}),
        ("end", {"exit": 1}),
        ("port", "22; reboot"),
        ("rank", {"number": 1, "pid": 2, "matmul": {"seconds": "1"}}),
        ("rank", {"number": 1, "pid": 2, "pace": "x"}),
        ("end", {"exit": 1, "kind": "error", "sentence": "x", "ranks": ["0"]}),
        ("wall", float("inf")),
        ("wall", float("nan")),
        ("wall", 10**400),
        ("sequence", 10**400),
        ("rank", {"number": 1, "pid": 2, "pace": float("nan")}),
        ("port", True),
        ("leaving", 0),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_field_of_another_type_makes_no_record(field, wrong):
    assert (
        decode(Node, json.dumps(dataclasses.asdict(NODE) | {field: wrong}).encode())
        is None
    )


def test_fields_of_a_later_version_are_left_out():
    assert (
        decode(Node, json.dumps(dataclasses.asdict(NODE) | {"moon": 1}).encode())
        == NODE
    )
    assert decode(Node, b'{"name": "n0"}') == Node("n0")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"3",
        b'"n0"',
        b"[" * 100_000,
        b'{"name":' * 5000,
        b"\xff",
        b"1" * 5000,
    ],
)
def test_what_is_no_record_is_none(text):
    assert decode(Node, text) is None and decode(RestartPlan, text) is None


def test_whatever_is_said_fits_and_is_read():
    dice = random.Random(0)
    for letter in ("x", "ä", "\U0001f600", "\x1b", "\\"):
        for length in (10, 300, 2000, 20_000):
            text = letter * length
            rank = Rank(
                1,
                2,
                stack=text,
                collectives=text,
                phase=text,
                matmul={"seconds": 1.0, "bits": 0},
            )
            ranks = [dice.randrange(60_000) for _ in range(length)]
            node = Node(
                "n" * 64,
                "a" * 32,
                text,
                text,
                1,
                text,
                rank=rank,
                end=ProcessEnd(71, "sick", text, 5, ranks),
            )
            written = encode(node, 4096)
            found = decode(Node, written)
            assert len(written) == 4096 and found is not None and found.end is not None
            assert (found.name, found.incarnation, found.end.exit) == (
                node.name,
                node.incarnation,
                71,
            )
            assert set(found.end.ranks) <= set(ranks)
