"""What a part says of itself, how it is written down, and that a status which cannot be written stops nothing."""

import time

from headrace.platform.observability.parts import SILENT_AFTER_S, Part, read_parts


def test_a_part_says_what_it_waits_for_and_since_when(tmp_path):
    part = Part(str(tmp_path), "learner")
    part.set("training step 3")
    began = part.status().since_s
    with part.waiting("a batch of 16 groups"):
        waiting = part.status()
        assert (waiting.state, waiting.waiting_for) == ("training step 3", "a batch of 16 groups")
        part.set("training step 3", "a batch of 16 groups")
        assert part.status().since_s == waiting.since_s, "the same again does not restart the time"
    assert part.status().waiting_for == ""
    assert part.status().since_s >= began


def test_the_last_word_is_written_and_read(tmp_path):
    parts = [Part(str(tmp_path), name) for name in ("rollout-0", "learner")]
    for part in parts:
        part.start()
        part.note(step=7)
        part.set("working")
        part.close("done")
    found = read_parts(str(tmp_path))
    assert [(each.part, each.state, each.detail) for each in found] == [
        ("learner", "done", {"step": 7}),
        ("rollout-0", "done", {"step": 7}),
    ]
    assert not found[0].is_silent(time.time())
    assert found[0].is_silent(time.time() + SILENT_AFTER_S + 1)


def test_a_torn_status_is_left_out_and_one_that_cannot_be_written_stops_nothing(tmp_path, caplog):
    (tmp_path / "status").mkdir()
    (tmp_path / "status" / "learner.json").write_text('{"part": "lea')
    assert read_parts(str(tmp_path)) == []
    (tmp_path / "file").write_text("no folder")
    part = Part(str(tmp_path / "file"), "learner")
    part.start()
    part.close()
    assert "could not be written" in caplog.text
