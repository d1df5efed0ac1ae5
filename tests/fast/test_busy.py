import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.platform.observability.busy import BusyIntervals, duration, overlap, union


class ManualClock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_nested_work_is_one_interval():
    clock = ManualClock()
    busy = BusyIntervals(clock)
    clock.now = 1
    busy.begin()
    clock.now = 2
    with busy.running():
        clock.now = 3
    assert busy.intervals() == [(1, 3)]  # the present one, up to now
    clock.now = 5
    busy.end()
    clock.now = 9
    assert busy.intervals() == [(1, 5)]
    assert busy.intervals(since_s=5) == []


def test_end_without_begin_is_refused():
    with pytest.raises(RuntimeError, match="without begin"):
        BusyIntervals(ManualClock()).end()


def test_memory_is_bounded_and_small_gaps_close():
    clock = ManualClock()
    busy = BusyIntervals(clock, kept=3, merge_gap_s=0.1)
    for start in (0, 1, 2, 3, 4):
        clock.now = start
        busy.begin()
        clock.now = start + 0.5
        busy.end()
    assert busy.intervals() == [(2, 2.5), (3, 3.5), (4, 4.5)]
    assert busy.forgotten == 2
    clock.now = 4.55
    busy.begin()
    clock.now = 5
    busy.end()
    assert busy.intervals()[-1] == (4, 5)
    assert len(busy.intervals()) == 3


def test_union_and_overlap_worked_by_hand():
    assert union([(5, 6), (0, 2), (1, 3), (3, 4), (7, 7), (9, 8)]) == [(0, 4), (5, 6)]
    assert duration([(0, 2), (1, 3), (5, 6)]) == 4
    # busy 0-4 and 10-12; others 1-2, 1.5-3 (union 1-3), 3.5-11: 2 + 0.5 + 1
    assert overlap([(0, 4), (10, 12)], [(1, 2), (1.5, 3), (3.5, 11)]) == 3.5
    assert overlap([(0, 4), (0, 4)], [(0, 4)]) == 4
    assert overlap([], [(0, 1)]) == overlap([(0, 1)], []) == overlap([(0, 1)], [(1, 2)]) == 0


intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


@settings(deadline=None)
@given(intervals, intervals)
def test_overlap_counts_the_seconds_in_both(left, right):
    def seconds(parts):
        return {second for start, end in parts for second in range(start, end)}

    assert overlap(left, right) == len(seconds(left) & seconds(right))
    assert duration(left) == len(seconds(left))
