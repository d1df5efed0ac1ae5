import pytest

from headrace.actors.sandboxes.output import Output

BEGINS = b"\0token "


def fed(data, size, limit=1 << 16, names=("c1", "-s1")):
    output = Output(BEGINS, names, limit)
    for start in range(0, len(data), size):
        output.feed(data[start : start + size])
    return output


@pytest.mark.parametrize("size", range(1, 24))
def test_a_mark_is_found_however_it_is_cut(size):
    output = fed(b"one\0two \0toke " + BEGINS + b"c1\0rest", size)
    assert output.ended
    assert output.text() == "one\0two \0toke "
    assert output.rest == b""


@pytest.mark.parametrize("size", [1, 5, 100])
def test_marks_of_others_are_left_out(size):
    output = fed(b"a" + BEGINS + b"c0\0" + b"b" + BEGINS + b"-s1\0", size)
    assert output.ended
    assert output.text() == "b", "what was printed before another's mark was another's"


@pytest.mark.parametrize("size", [1, 5, 100])
def test_what_comes_after_the_end_is_never_the_next_ones(size):
    output = fed(b"a" + BEGINS + b"c1\0" + b"y\n" * 5000 + b"\0", size)
    assert (output.ended, output.text()) == (True, "a")
    assert len(output.rest) <= 1
    for count in range(40):
        output.feed(BEGINS + b"-s%d\0" % count + b"y" * 100)
    assert output.rest.endswith(BEGINS + b"-s39\0") and len(output.rest) < 200, "its marks are kept, bounded"
    later = Output(BEGINS, ("c2", "-s39"), 100)
    later.feed(output.rest)
    assert later.ended and later.text() == ""


def test_a_mark_without_an_end_does_not_hold_back_for_ever():
    output = fed(BEGINS + b"x" * 200, 7)
    assert not output.ended
    assert output.text() == "x" * 200


@pytest.mark.parametrize("size", [1, 3, 64])
def test_head_and_tail_are_kept(size):  # case X9
    output = fed(b"0123456789" * 10 + BEGINS + b"c1\0", size, limit=20)
    assert output.left_out == 80
    assert output.text() == "0123456789\n[... 80 bytes left out ...]\n0123456789"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_characters_are_decoded_whole_and_invalid_bytes_replaced(size):  # case X10
    assert fed("é語😀".encode() + b"\xff\xc3", size).text() == "é語😀\ufffd\ufffd"
