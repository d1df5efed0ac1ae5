"""What the shell answers: found among anything else, and bounded."""

import pytest

from headrace.actors.sandboxes import answers
from headrace.actors.sandboxes.answers import DEAD, ENDED, READY, Answer, Answers

NAMES = (b"s1", b"c2")
EXPORTS = b'declare -x A="1"\n'
WHOLE = EXPORTS + b"\0E c2 3 /proc/1\0/work\0"
FOUND = Answer(ENDED, 3, b"/proc/1", b"/work", EXPORTS)


def test_an_answer_in_pieces_is_found_once_it_is_whole():
    for cut in range(1, len(WHOLE)):
        found = Answers()
        assert found.next(WHOLE[:cut], ENDED, NAMES) is None
        assert found.next(WHOLE[cut:], ENDED, NAMES) == FOUND
        assert not found


def test_what_a_kill_cuts_off_does_not_hide_the_death():
    """A write of few bytes is whole or not there: what is cut is the exports."""
    for cut in range(len(EXPORTS) + 1):
        found = Answers()
        assert found.next(WHOLE[:cut] + b"\0D s1 137 1\0", ENDED + DEAD, NAMES) == Answer(DEAD, 137, b"1")


def test_answers_to_something_else_are_passed_over():
    stale = b"x\0E c1 0 \0/old\0" + b"\0D s0 0 \0" + b"y\0R s1 0 \0/old\0" + b"E c2 999 \0/\0E c2 0\0"
    found = Answers()
    assert found.next(stale, ENDED, NAMES) is None
    assert found.next(b"\0" + WHOLE, ENDED, NAMES) == FOUND


def test_the_next_answer_is_kept_for_the_next_question():
    found = Answers()
    assert found.next(WHOLE + b"\0D s1 0 \0", ENDED, NAMES) == FOUND
    assert found
    assert found.next(b"", READY + DEAD, NAMES) == Answer(DEAD, 0, b"")


@pytest.mark.parametrize("flood", [b"\0", b"x\0", b"E c1 0 \0/\0", b"x" * 1000, b"E c2 0 \0" + b"x" * 5000])
def test_who_says_only_what_was_not_asked_is_not_listened_to_for_ever(flood):
    found = Answers()
    with pytest.raises(ValueError, match="answer"):
        for _ in range(100_000):
            found.next(flood * 20, ENDED, NAMES)


def test_a_command_is_one_line_or_counted_lines():
    assert answers.run("c1", b" a | b ") == b"c1|0| a | b \n"
    assert answers.run("c1", b"a\nb") == b"c1|2|\na\nb\n"
    assert answers.run("c1", b"echo a \\|") == b"c1|1|\necho a \\|\n"
    assert answers.start("t", "s1", b"host", b"cd /\n") == b"start t s1 2 host\ncd /\n\n"
