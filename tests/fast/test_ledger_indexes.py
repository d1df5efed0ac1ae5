"""The ledger's indexes: order, keys, and timers that are renewed."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.platform.ledger.indexes import Buckets, Ordered, Timers


def test_numbers_stay_in_order() -> None:
    numbers = Ordered()
    for number in (5, 1, 9, 3):
        numbers.add(number)
    numbers.remove(5)
    assert (list(numbers), numbers.first(2), numbers.first(9), len(numbers)) == ([1, 3, 9], [1, 3], [1, 3, 9], 3)
    for number in numbers:
        numbers.remove(number)
    assert len(numbers) == 0, "a loop may take out what it meets"


def test_numbers_are_found_by_key() -> None:
    buckets: Buckets[int] = Buckets()
    for key, number in ((7, 2), (7, 1), (8, 2), (9, 4)):
        buckets.add(key, number)
    assert (buckets.under(7), buckets.under(99)) == ([1, 2], [])
    assert buckets.where(lambda key: key < 9) == [1, 2]
    buckets.remove(9, 4)
    assert buckets.where(lambda key: key == 9) == []
    assert len(buckets) == 3


@given(
    st.lists(st.tuples(st.sampled_from(["set", "stop", "over"]), st.integers(0, 4), st.integers(0, 20)), max_size=60)
)
def test_timers_do_as_a_table_of_times_would(steps: list[tuple[str, int, int]]) -> None:
    timers, table, now_s = Timers(), {}, 0.0
    for what, number, seconds in steps:
        if what == "set":
            timers.set(number, now_s + seconds)
            table[number] = now_s + seconds
        elif what == "stop":
            timers.stop(number)
            table.pop(number, None)
        else:
            now_s += seconds
            over = sorted(number for number, due_s in table.items() if due_s <= now_s)
            assert timers.over(now_s) == over
            table = {number: due_s for number, due_s in table.items() if due_s > now_s}
