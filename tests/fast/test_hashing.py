"""Content hashes, raw and canonical."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.platform import hashing
from headrace.platform.hashing import canonical_text, digest, digest_value, hash_text, hash_value
from headrace.platform.records import Message, Role


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("at 2026-01-02T03:04:05Z", "at 2025-12-31T23:59:59Z"),
        ("at 2026-01-02 03:04:05.123456+02:00", "at 2025-12-31 23:59:59,1-0530"),
        ("[03:04:05]", "[23:59:59.999]"),
        ("took 1.5 s", "took 12.25 s"),
        ("took 1.5ms", "took 99.0ms"),
        ("<object at 0x7f2980f56ad0>", "<object at 0x7F0000000000>"),
        ("wrote /tmp/abc123/out.txt", "wrote /tmp/x/y/z"),
        ("wrote '/var/tmp/abc'", "wrote '/var/tmp/q'"),
        ("pid 12 ended", "pid 45123 ended"),
        ("PID: 12", "PID: 7"),
        ("process=12", "process=13"),
        ('{"pid": 12, "a": 1}', '{"pid": 9001, "a": 1}'),
    ],
)
def test_what_is_accidental_is_raw_but_not_canonical(one, other):
    first, second = hash_text(one), hash_text(other)
    assert first.raw != second.raw
    assert first.canonical == second.canonical


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("k07=v31", "k07=v32"),
        ("exit code 1", "exit code 2"),
        ("2 of 3", "3 of 3"),
        ("1.5 apples", "1.6 apples"),
        ("0x12", "0x13"),
        ("/home/a", "/home/b"),
        ("version 1.2.3", "version 1.2.4"),
        ("12:30", "12:31"),
        ("at 03:04:05 it was a", "at 03:04:05 it was b"),
        ("", " "),
        ("a\nb", "a b"),
    ],
)
def test_what_is_not_accidental_is_canonical(one, other):
    assert hash_text(one).canonical != hash_text(other).canonical


@given(
    st.text(st.characters(codec="utf-8")), st.sampled_from(["", " 03:04:05", " pid 7", " /tmp/x", " 0xabcdef", " 1.5s"])
)
def test_the_quick_search_finds_whatever_the_long_one_would(text, accident):
    whole = text + accident
    assert canonical_text(whole) == hashing._ACCIDENTAL.sub(hashing._placeholder, whole)
    pair = hash_text(whole)
    assert pair.raw == digest(whole.encode())
    assert pair.canonical == digest(canonical_text(whole).encode())
    assert canonical_text(canonical_text(whole)) == canonical_text(whole)


def test_values_do_not_depend_on_the_order_of_their_keys():
    one, other = {"a": 1, "b": [1, {"c": 2, "d": 3}]}, {"b": [1, {"d": 3, "c": 2}], "a": 1}
    assert digest_value(one) == digest_value(other)
    assert hash_value(one) == hash_value(other)
    assert digest_value([1, 2]) != digest_value([2, 1])
    assert digest_value(Message(Role.USER, "a")) != digest_value(Message(Role.USER, "b"))


def test_a_state_with_accidents_in_it():
    one = hash_value({"pid": 12, "log": ["/tmp/a/b", "03:04:05 ready"], "count": 1})
    other = hash_value({"pid": 7, "log": ["/tmp/c", "23:00:00 ready"], "count": 1})
    assert one.canonical == other.canonical
    assert one.raw != other.raw
    assert hash_value({"pid": 12, "log": [], "count": 2}).canonical != one.canonical


# case X10
def test_a_text_that_is_none_has_a_hash():
    assert hash_text("a\ud800b") == hash_text("a?b")
    assert hash_text("\udfff at 03:04:05").canonical == hash_text("? at 03:04:06").canonical
