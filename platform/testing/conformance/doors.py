"""What every `Conversations` must do. Run each function of `DOOR_SUITE` with a context of your own."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace

import numpy as np

from headrace.platform.contracts import Answered, Asked, AskedSampling, Conversations, RefusalCode
from headrace.platform.contracts.doors import REWARD_NAMES
from headrace.platform.errors import DoorRefused
from headrace.platform.records.message import Message
from headrace.platform.records.status import Role
from headrace.platform.testing.conformance.support import refusal

_REASONS = ("stop", "length", "tool_calls")
_WAIT_S = 10.0


@dataclass(kw_only=True, slots=True, frozen=True)
class DoorContext:
    """What the suite runs against. `make` opens conversations in which two episodes wait, and whose policy answers
    whatever it is asked with a text of two tokens or more; `user` is something to say to it."""

    make: Callable[[], AbstractAsyncContextManager[Conversations]]
    user: str = "go"

    def asked(self, *more: Message, **how: object) -> Asked:
        """A request that begins with `user`."""
        return replace(Asked(messages=(Message(Role.USER, self.user), *more)), **how)  # type: ignore[arg-type]


async def answers_are_whole(context: DoorContext) -> None:
    """Every sampled token has its id, its logprob and its text, and a version that can be sampled from."""
    async with context.make() as door:
        for answer in (await door.answer(context.asked()), await door.answer(context.asked(), await _opened(door))):
            length = len(answer.token_ids)
            assert length and len(answer.prompt_token_ids), "an answer without ids, or without those of its prompt"
            assert len(answer.logprobs) == length == len(answer.texts), "ids, logprobs and texts differ in length"
            assert np.isfinite(answer.logprobs).all(), "a logprob is not finite"
            assert (answer.logprobs <= 0).all(), "a logprob is above 0"
            assert answer.message.role is Role.ASSISTANT, f"{answer.message.role} has answered"
            assert answer.finish_reason in _REASONS, f"it ended by {answer.finish_reason!r}"
            assert answer.version.number in door.state().versions, f"{answer.version} cannot be sampled from"


async def wishes_are_kept(context: DoorContext) -> None:
    """`max_tokens` bounds what is sampled, and nothing from a stop text on is told."""
    async with context.make() as door:
        whole = await door.answer(context.asked())
        for episode in ("", await _opened(door)):
            short = await door.answer(context.asked(sampling=AskedSampling(max_tokens=1)), episode)
            assert (len(short.token_ids), short.finish_reason) == (1, "length"), "max_tokens is not kept"
            stop = whole.message.content[1:]
            cut = await door.answer(context.asked(sampling=AskedSampling(stop=(stop,))), episode)
            assert stop not in cut.message.content, f"the stop text {stop!r} is told"
            assert len(cut.token_ids) == len(cut.logprobs) == len(cut.texts), "what was sampled is cut as well"


async def unknown_episodes_are_refused(context: DoorContext) -> None:
    """An episode that nobody opened cannot be talked in, finished or given up."""
    async with context.make() as door:
        await _refused(lambda: door.answer(context.asked(), "nobody's"), RefusalCode.UNKNOWN, "an answer")
        await _refused(lambda: door.finish("nobody's", {}), RefusalCode.UNKNOWN, "finish")
        await _refused(lambda: door.abandon("nobody's", ""), RefusalCode.UNKNOWN, "abandon")


async def an_episode_is_taken_once(context: DoorContext) -> None:
    """Two clients get two episodes, and a third none."""
    async with context.make() as door:
        first, second = await _opened(door), await _opened(door)
        assert first != second, "two clients have one episode"
        await _refused(lambda: door.open(0.0), RefusalCode.FULL, "open where none waits")
        state = door.state()
        assert (state.open_episodes, state.waiting_episodes) == (2, 0), f"two are open, not {state}"
        await door.answer(context.asked(), first)
        done = [await door.finish(each, {}) for each in (first, second)]
        assert [each.turns for each in done] == [1, 0], "a turn is in another episode"


async def a_finished_episode_is_over(context: DoorContext) -> None:
    """Nothing is said after the end, and the end stays as it was."""
    async with context.make() as door:
        episode = await _opened(door)
        answer = await door.answer(context.asked(), episode)
        done = await door.finish(episode, {"note": "one"})
        assert (done.episode, done.turns, done.sampled_tokens) == (episode, 1, len(answer.token_ids)), f"wrong: {done}"
        assert await door.finish(episode, {"note": "two"}) == done, "the second finish says something else"
        await door.abandon(episode, "too late")
        assert await door.finish(episode, {}) == done, "abandon has changed an end"
        await _refused(lambda: door.answer(context.asked(), episode), RefusalCode.OVER, "an answer after the end")
        assert door.state().open_episodes == 0, "an episode that is over is counted as open"


async def an_abandoned_episode_is_over(context: DoorContext) -> None:
    """Giving up is an end, and safe to do twice."""
    async with context.make() as door:
        episode = await _opened(door)
        await door.answer(context.asked(), episode)
        for _ in range(2):
            await door.abandon(episode, "the box broke")
        await _refused(lambda: door.answer(context.asked(), episode), RefusalCode.OVER, "an answer after the end")


async def clients_give_no_rewards(context: DoorContext) -> None:
    """A number from whoever plays is refused, and ends nothing."""
    async with context.make() as door:
        episode = await _opened(door)
        await door.answer(context.asked(), episode)
        for name in REWARD_NAMES:
            await _refused(lambda name=name: door.finish(episode, {name: 1.0}), RefusalCode.INVALID, name)  # type: ignore[misc]
        await door.answer(context.asked(), episode)
        assert (await door.finish(episode, {"grade": "good"})).turns == 1, "a retry is a turn of its own"


async def the_same_is_not_sampled_twice(context: DoorContext) -> None:
    """P24: at the same time, one after the other, and by a client that had left."""
    async with context.make() as door:
        episode, asked = await _opened(door), context.asked()
        lost = asyncio.ensure_future(door.answer(asked, episode))
        await asyncio.sleep(0)
        lost.cancel()
        both = await asyncio.gather(door.answer(asked, episode), door.answer(asked, episode))
        again = await door.answer(replace(asked, is_retry=True), episode)
        _check_same([*both, again])
        gone_on = context.asked(both[0].message, Message(Role.USER, context.user))
        await door.answer(gone_on, episode)
        _check_same([both[0], await door.answer(replace(asked, is_retry=True), episode)])
        assert (await door.finish(episode, {})).turns == 2, "a retry was sampled"


async def keys_name_requests(context: DoorContext) -> None:
    """P24: a key is one request, whatever else was asked; two keys are two samples of one prompt."""
    async with context.make() as door:
        episode = await _opened(door)
        one, two = (context.asked(retry_key=key) for key in ("one", "two"))
        first = await door.answer(one, episode)
        await door.answer(two, episode)
        _check_same([first, await door.answer(one, episode)])
        other = context.asked(Message(Role.USER, context.user), retry_key="one")
        await _refused(lambda: door.answer(other, episode), RefusalCode.CONFLICT, "a key of another request")
        assert (await door.finish(episode, {})).turns == 2, "two keys are not two turns"


async def sampled_ids_are_gone_on_from(context: DoorContext) -> None:
    """The next prompt begins with what was sampled, exactly, or the episode counts a new segment (cases T1, T3)."""
    async with context.make() as door:
        episode = await _opened(door)
        first = await door.answer(context.asked(), episode)
        second = await door.answer(context.asked(first.message, Message(Role.USER, context.user)), episode)
        before = [*first.prompt_token_ids.tolist(), *first.token_ids.tolist()]
        is_exact = second.prompt_token_ids.tolist()[: len(before)] == before
        done = await door.finish(episode, {})
        assert is_exact or done.segments_opened == 1, "the sampled ids were encoded again, and it is not counted"


async def _opened(door: Conversations) -> str:
    return (await door.open(_WAIT_S)).episode


async def _refused(act: Callable[[], Awaitable[object]], code: RefusalCode, what: str) -> None:
    error = await refusal(act)
    assert isinstance(error, DoorRefused), f"{what} is not refused: {error!r}"
    assert error.code == code, f"{what} is refused as {error.code}, not as {code}"


def _check_same(answers: list[Answered]) -> None:
    first = answers[0]
    for answer in answers[1:]:
        same = np.array_equal(answer.token_ids, first.token_ids) and np.array_equal(answer.logprobs, first.logprobs)
        assert same and answer.message == first.message, "the same request got another answer"


DOOR_SUITE: dict[str, Callable[[DoorContext], Awaitable[None]]] = {
    check.__name__: check
    for check in (
        answers_are_whole,
        wishes_are_kept,
        unknown_episodes_are_refused,
        an_episode_is_taken_once,
        a_finished_episode_is_over,
        an_abandoned_episode_is_over,
        clients_give_no_rewards,
        the_same_is_not_sampled_twice,
        keys_name_requests,
        sampled_ids_are_gone_on_from,
    )
}
