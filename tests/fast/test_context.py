"""The context on its own, and episodes under templates that rewrite history."""

import numpy as np
import pytest
from episode_kit import FORGETFUL, UNTHINKING, World, chatml_renderer, ends, goes_on, make_plan, play, says, turn_of

from headrace.actors.context import Context
from headrace.platform.records import Message, Observation, Role, SamplingParams, StepResult
from headrace.platform.testing.fakes.engine import ScriptedEngine
from headrace.platform.testing.fakes.renderer import END, CharRenderer
from headrace.trainer.samples import build_samples


def opened(renderer):
    context = Context(renderer, ())
    return context, context.open([Message(Role.USER, "go")])


def test_the_context_only_grows_by_what_was_said_and_observed():
    context, prompt = opened(CharRenderer())
    context.said(Message(Role.ASSISTANT, "hi"), np.array([104, 105, END], np.int32))
    bridge = context.observed([Message(Role.TOOL, "ok")], ended=True, next_turn=2)
    assert context.token_ids().tolist() == [*prompt, 104, 105, END, *bridge]
    assert len(context) == len(context.token_ids())
    assert context.view(3).spans == ((0, 3),)


@pytest.mark.parametrize("dtype", [np.int64, np.int16, np.uint32])
def test_ids_of_another_width_are_the_same_ids(dtype):
    context, prompt = opened(CharRenderer())
    context.said(Message(Role.ASSISTANT, "hi"), np.array([104, 105, END], dtype))
    assert context.token_ids().tolist() == [*prompt, 104, 105, END]
    assert context.token_ids().dtype == np.int32


def test_a_request_does_not_change_when_the_context_goes_on():
    context, prompt = opened(CharRenderer())
    seen = context.token_ids()
    context.said(Message(Role.ASSISTANT, "hi"), np.array([104], np.int32))
    assert seen.tolist() == prompt.tolist()


# case T3
async def play_three(renderer, *said):
    """Three turns of `said`, each answered by the user; what the engine was asked, and the episode."""
    requests = []

    def replies(request):
        requests.append(request.token_ids.tolist())
        return said[turn_of(request)]

    answers = iter([goes_on_as_user("one"), goes_on_as_user("two"), ends(1.0)])
    plan = make_plan(sampling=SamplingParams(max_new_tokens=100, stop_token_ids=renderer.stop_token_ids))
    played = await play(World(lambda _: next(answers)), ScriptedEngine(replies), renderer, plan)
    return requests, played


def goes_on_as_user(text):
    return StepResult(messages=(Message(Role.USER, text),))


def sampled(renderer, text):
    return [*renderer._scaffold.encode(text, add_special_tokens=False).ids, *renderer.stop_token_ids]


async def test_a_template_that_only_appends_keeps_one_segment():
    renderer = chatml_renderer()
    said = [sampled(renderer, text) for text in ("a", "b", "c")]
    requests, played = await play_three(renderer, *said)
    messages = [Message(Role.USER, "go")]
    for request, text, answer in zip(requests, ("a", "b", "c"), ("one", "two", ""), strict=True):
        assert request == renderer.render(messages, ()), "the incremental ids are not those of the full render"
        messages += [Message(Role.ASSISTANT, text), Message(Role.USER, answer)]
    assert {turn.segment for turn in played.episode.turns} == {0}
    assert len(build_samples(played.episode, [1.0] * 3)) == 1


@pytest.mark.parametrize(
    ("template", "texts"),
    [(FORGETFUL, ("a", "b", "c")), (UNTHINKING, ("<think>\nhm\n</think>\n\na",) * 3)],
    ids=["rewrites", "strips thinking (case T17)"],
)
async def test_a_template_that_rewrites_history_opens_segments_and_counts_them(template, texts):
    renderer = chatml_renderer(template)
    said = [sampled(renderer, text) for text in texts]
    requests, played = await play_three(renderer, *said)
    episode = played.episode
    assert [turn.segment for turn in episode.turns] == [0, 0, 1, 1, 2, 2]
    assert [view.segment for view in episode.views] == [0, 1, 2]
    assert [view.spans for view in episode.views] == [((0, 1),), ((2, 3),), ((4, 5),)]
    for view, request, ids in zip(episode.views, requests, said, strict=True):
        shown = [token for start, end in view.spans for turn in episode.turns[start:end] for token in turn.token_ids]
        assert shown == request, "a segment is trained on what the model saw"
        assert episode.turns[view.turn].token_ids.tolist() == ids
    go, one, two = (Message(Role.USER, text) for text in ("go", "one", "two"))
    first, second = (Message(Role.ASSISTANT, text.split("</think>")[-1].strip()) for text in texts[:2])
    assert requests[2] == renderer.render([go, first, one, second, two], ())
    samples = build_samples(episode, [1.0] * 3)
    assert len(samples) == 3
    assert sum(sample.loss_tokens for sample in samples) == episode.action_tokens


async def test_several_opening_messages_are_one_prompt():
    renderer = chatml_renderer()
    opening = Observation((Message(Role.SYSTEM, "be brief"), Message(Role.USER, "go")))
    played = await play(World(reset=lambda: opening), says(sampled(renderer, "a")), renderer)
    assert played.episode.turns[0].token_ids.tolist() == renderer.render(opening.messages, ())


async def test_the_first_observation_after_a_cut_turn_opens_no_segment():
    renderer = chatml_renderer()
    answers = iter([goes_on("x"), ends(1.0)])
    played = await play(World(lambda _: next(answers)), says(sampled(renderer, "a")[:-1]), renderer)
    whole = [token for turn in played.episode.turns[:3] for token in turn.token_ids.tolist()]
    messages = [Message(Role.USER, "go"), Message(Role.ASSISTANT, "a"), Message(Role.TOOL, "x")]
    assert whole == renderer.render(messages, ())
