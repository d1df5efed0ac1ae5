"""The outbox on disk: what enters it is durable, what leaves it was confirmed, what is torn is passed over (P11)."""

import random
import threading

import pytest

from headrace.actors.outbox import Outbox
from headrace.platform.records import AttemptId
from headrace.platform.records.delivery import Outcome, Submission
from headrace.platform.records.status import CancelReason, FaultOwner

RUN = "kit-run"


def submission(number=0, run=RUN, **fields):
    values = {
        "outcome": Outcome.DONE,
        "payload_hash": f"h{number}",
        "store_file": "episodes/version=000001/w-1.parquet",
        "score": 0.1 + number,
        "oldest_version": 1,
        "newest_version": 2,
        "environment": "kit@1",
        "action_tokens": 7,
    }
    return Submission(attempt_id=AttemptId(run, number, 3, 2), **{**values, **fields})


def read(folder):
    return [entry.submission for entry in Outbox(folder, RUN).entries()]


def numbers(folder):
    return sorted(each.attempt_id.group for each in read(folder))


def answer(entries, at_s):
    for entry in entries:
        entry.answered_s = at_s


def test_what_was_added_is_found_by_the_next_process_without_its_payload(tmp_path):
    all_kinds = [
        submission(0),
        Submission(attempt_id=AttemptId(RUN, 1, 0), outcome=Outcome.CANCELLED, reason=CancelReason.LAG),
        Submission(
            attempt_id=AttemptId(RUN, 2, 0),
            outcome=Outcome.FAILED,
            owner=FaultOwner.ENVIRONMENT,
            retryable=True,
            reason='two\nlines, "quotes" and ünïcode',
        ),
    ]
    outbox = Outbox(tmp_path / "new" / "folder", RUN)
    assert len(outbox) == 0
    entries = outbox.add([submission(0, payload=b"x" * 1000), *all_kinds[1:]])
    assert [entry.submission for entry in entries] == all_kinds
    assert read(tmp_path / "new" / "folder") == all_kinds


def test_it_is_on_the_disk_before_add_returns(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("os.fsync", synced.append)
    outbox = Outbox(tmp_path, RUN)
    outbox.add([submission(0)])
    assert len(synced) == 2, "the file and, as it is new, its folder"
    outbox.add([submission(n) for n in range(1, 500)])
    assert len(synced) == 3, "one wait for the disk in a batch"
    assert numbers(tmp_path) == list(range(500))


def test_what_another_run_left_is_passed_over(tmp_path):
    Outbox(tmp_path, "other").add([submission(0, run="other")])
    outbox = Outbox(tmp_path, RUN)
    assert (len(outbox), outbox.torn) == (0, 0)


def test_a_torn_last_line_is_passed_over_and_counted(tmp_path):
    Outbox(tmp_path, RUN).add([submission(0), submission(1), submission(2)])
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    ends = [n + 1 for n, byte in enumerate(whole) if byte == ord("\n")]
    for cut in sorted({*range(0, len(whole), 9), *ends, *(end - 1 for end in ends), *(end + 1 for end in ends[:-1])}):
        file.write_bytes(whole[:cut])
        outbox = Outbox(tmp_path, RUN)
        lines = sum(end <= cut + 1 for end in ends)  # a line that lacks nothing but its end is whole
        assert len(outbox) == lines, cut
        assert outbox.torn == (cut not in (0, *ends, *(end - 1 for end in ends))), cut


@pytest.mark.parametrize("junk", [b"\0" * 64, b"\xff\xfe{}\n", b"[]\n", b'{"attempt_id": 1}\n', b"\n\n"])
def test_junk_does_not_hide_what_is_sound(tmp_path, junk):
    Outbox(tmp_path, RUN).add([submission(0)])
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes() + junk + (b"" if junk.endswith(b"\n") else b"\n") + file.read_bytes())
    outbox = Outbox(tmp_path, RUN)
    assert len(outbox) == 2
    assert outbox.torn == (0 if junk.isspace() else 1)


def test_a_process_never_writes_into_another_ones_file(tmp_path):
    """A torn line stays the end of its file, so that nothing is appended to it."""
    Outbox(tmp_path, RUN).add([submission(0)])
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    Outbox(tmp_path, RUN).add([submission(1)])
    assert numbers(tmp_path) == [1]


def test_what_was_not_answered_stays(tmp_path):
    outbox = Outbox(tmp_path, RUN)
    answer(outbox.add([submission(0)]), 10.0)
    outbox.add([submission(1)])
    outbox.forget(100.0)
    assert numbers(tmp_path) == [0, 1], "a file goes when all that it holds may go"
    answer(outbox.add([submission(2)]), 20.0)
    outbox.forget(19.9)
    assert numbers(tmp_path) == [0, 1, 2]
    outbox.forget(20.0)
    assert numbers(tmp_path) == [0, 1]
    answer(outbox.entries(), 30.0)
    outbox.forget(30.0)
    assert (len(outbox), list(tmp_path.iterdir())) == (0, [])
    outbox.add([submission(3)])
    assert numbers(tmp_path) == [3]


def test_what_an_earlier_process_left_goes_the_same_way(tmp_path):
    Outbox(tmp_path, RUN).add([submission(0)])
    outbox = Outbox(tmp_path, RUN)
    answer(outbox.add([submission(1)]), 5.0)
    outbox.forget(10.0)
    assert numbers(tmp_path) == [0]
    answer(outbox.entries(), 11.0)
    outbox.forget(12.0)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said_and_what_follows_is_not_joined_to_what_is_torn(tmp_path, monkeypatch):
    outbox = Outbox(tmp_path, RUN)
    outbox.add([submission(0)])

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("headrace.actors.outbox.write_all", full)
        with pytest.raises(OSError, match="No space"):
            outbox.add([submission(1)])
    outbox.add([submission(2)])
    assert numbers(tmp_path) == [0, 2]
    assert len(list(tmp_path.iterdir())) == 2


def test_whatever_happens_the_disk_holds_what_is_not_confirmed(tmp_path):
    """Random lives of several processes, each cut off without a word."""
    dice = random.Random(4)
    for life in range(20):
        folder = tmp_path / str(life)
        safe, added, number = set(), set(), 0
        for _ in range(4):
            outbox, now_s = Outbox(folder, RUN), 0.0
            assert {entry.submission.attempt_id.group for entry in outbox.entries()} >= added - safe
            for _ in range(dice.randrange(12)):
                now_s += 1.0
                match dice.randrange(3):
                    case 0:
                        count = dice.randrange(1, 4)
                        outbox.add([submission(number + n) for n in range(count)])
                        added.update(range(number, number + count))
                        number += count
                    case 1:
                        entries = outbox.entries()
                        answer(dice.sample(entries, dice.randrange(len(entries) + 1)), now_s)
                    case 2:
                        before_s = now_s - dice.randrange(3)
                        entries = outbox.entries()
                        old = [e for e in entries if e.answered_s is not None and e.answered_s <= before_s]
                        safe.update(entry.submission.attempt_id.group for entry in old)
                        outbox.forget(before_s)
                assert set(numbers(folder)) >= added - safe


def test_threads_may_add_while_another_forgets(tmp_path):
    outbox = Outbox(tmp_path, RUN)

    def add(start):
        for number in range(start, start + 20):
            outbox.add([submission(number)])

    threads = [threading.Thread(target=add, args=(start,)) for start in (0, 100, 200)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        outbox.forget(-1.0)
    for thread in threads:
        thread.join()
    assert numbers(tmp_path) == sorted([*range(20), *range(100, 120), *range(200, 220)])
    assert len(outbox) == 60
