"""The pins of a replica, on a clock that a test turns (P12, case Q17)."""

import asyncio

import pytest

from headrace.platform.errors import DeadlineExceeded, LedgerAway, LedgerRewound, NotFound
from headrace.serving.version_pins import VersionPins


class Registry:
    """Pins as the server has them; it can be away, and versions can be gone."""

    def __init__(self, clock):
        self.clock = clock
        self.until = {}
        self.error = None
        self.gone = set()
        self.asked = asyncio.Event()
        self.answer = asyncio.Event()
        self.answer.set()

    async def pin(self, version, holder, ttl_s):
        self.asked.set()
        await self.answer.wait()
        if self.error is not None:
            raise self.error
        if version in self.gone:
            raise NotFound(f"the files of version {version} were removed")
        self.until[version, holder] = self.clock.now_s + ttl_s

    async def unpin(self, version, holder):
        if self.error is not None:
            raise self.error
        self.until.pop((version, holder), None)


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
async def registry(clock):
    return Registry(clock)


@pytest.fixture
async def pins(registry, clock):
    pins = VersionPins(registry, "r0-1", 30.0, clock)
    await pins.take(1)
    await pins.take(2)
    return pins


async def test_pins_are_renewed_three_times_in_their_time(pins, registry, clock):
    assert pins.renew_in_s == 10.0
    clock.now_s += 10.0
    assert await pins.renew() == []
    assert registry.until == {(1, "r0-1"): 140.0, (2, "r0-1"): 140.0}


async def test_one_that_was_removed_has_lapsed(pins, registry):  # case Q17
    registry.gone.add(1)
    assert await pins.renew() == [1]
    assert 1 not in pins
    assert 2 in pins
    assert await pins.renew() == []


@pytest.mark.parametrize("error", [LedgerAway("refused"), LedgerRewound("suspect"), DeadlineExceeded("no answer")])
async def test_a_server_that_is_away_is_no_lapse_until_the_time_is_over(pins, registry, clock, error):  # P12
    registry.error = error
    waited = []
    while 1 in pins:
        waited.append(pins.renew_in_s)
        clock.now_s += pins.renew_in_s
        lapsed = await pins.renew()
    assert waited == [10.0, 10.0, 10.0]
    assert lapsed == [1, 2]


async def test_time_is_counted_from_before_the_question(pins, registry, clock):  # P12
    """The answer comes 8 s late; the pin is not believed in for longer than the server may keep it."""
    registry.answer.clear()
    registry.asked.clear()
    clock.now_s += 10.0
    renewing = asyncio.create_task(pins.renew())
    await registry.asked.wait()
    clock.now_s += 8.0
    registry.answer.set()
    assert await renewing == []
    registry.error = LedgerAway("refused")
    clock.now_s += 21.0
    assert await pins.renew() == []
    clock.now_s += 1.0
    assert await pins.renew() == [1, 2]


async def test_whoever_was_stopped_goes_on_with_what_is_still_there(pins, registry, clock):
    """SIGSTOP for longer than a pin: version 1 was removed meanwhile, version 2 was not."""
    clock.now_s += 300.0
    registry.gone.add(1)
    assert pins.renew_in_s == 0.0
    assert await pins.renew() == [1]
    assert registry.until[2, "r0-1"] == 430.0


async def test_what_is_given_back_during_a_renewal_stays_given_back(pins, registry):
    registry.answer.clear()
    registry.asked.clear()
    renewing = asyncio.create_task(pins.renew())
    await registry.asked.wait()
    await pins.give_back(1)
    registry.answer.set()
    assert await renewing == []
    assert list(registry.until) == [(2, "r0-1")]
    assert 1 not in pins


async def test_giving_back_needs_no_server(pins, registry):
    registry.error = LedgerAway("refused")
    await pins.give_back(1)
    await pins.give_back(1)
    assert 1 not in pins


async def test_a_pin_that_was_refused_is_none(pins, registry):
    registry.gone.add(3)
    with pytest.raises(NotFound):
        await pins.take(3)
    assert 3 not in pins
