"""Episodes to samples: which tokens are trained on, in which context, with what credit.

A sample is one context that the model really saw. As long as each context extends the one before, an episode is one
sample; a context that does not (a template that strips earlier thinking, a second agent) starts another, and every
action token is trained exactly once, in the context in which it was sampled (cases T17, T18). Nothing is encoded
again, padded or repaired here. The episode's own action mask is never changed: what stays out of the loss is stated
as spans with a reason, which the training receipt stores. Tensors are the business of `batch.py`.

Dimension: T, the tokens of one sample.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from headrace.platform.records.arrays import F32, I32, U8
from headrace.platform.records.episode import Episode
from headrace.platform.records.tables import LossMaskReason, MaskedSpan
from headrace.platform.records.turn import Turn
from headrace.trainer.credit import turn_advantages
from headrace.trainer.gap import Source
from headrace.trainer.observations import ContentSpan, observation_mask, observation_spans


@dataclass(frozen=True, slots=True)
class OwnTurn:
    """Tokens `[start, end)` of a sample are the policy's turn number `turn` of the episode."""

    turn: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticColumns:
    """What a critic is trained on, f32[T] each: `values` it gave to the states before tokens, and `targets` for them.
    They mean something where `mask` u8[T] is 1, a subset of the sample's loss mask."""

    values: F32
    targets: F32
    mask: U8


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One context of one agent. All arrays have shape [T]; fillers in brackets.

    `action_mask` is 1 where the policy sampled the token in this very context; `loss_mask` is a subset of it, and 0
    at position 0, which nothing predicts.
    `behaviour_logprobs` [0], `advantages` [0] and `temperatures` [1] mean something only where `action_mask` is 1.
    `lag` is in learner batches (P14). `sources` say who sampled the action tokens, `turns` in which turns, in order.
    `critic` is there for losses that have a critic, `observation_mask` for the environment-token loss: 1 on tokens that
    the environment sent.
    """

    episode_id: str
    agent_id: str
    segment: int
    lag: int
    token_ids: I32
    action_mask: U8
    loss_mask: U8
    behaviour_logprobs: F32
    advantages: F32
    temperatures: F32
    sources: tuple[Source, ...] = ()
    turns: tuple[OwnTurn, ...] = ()
    critic: CriticColumns | None = None
    observation_mask: U8 | None = None

    @property
    def length(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def loss_tokens(self) -> int:
        """How many tokens enter the loss."""
        return int(self.loss_mask.sum())


@dataclass(kw_only=True, slots=True)
class _Context:
    """Turn indices that the model saw in order, and those among them that it sampled here."""

    agent_id: str
    segment: int
    turns: list[int]
    own: set[int] = field(default_factory=set)


def build_samples(
    episode: Episode,
    advantages: Sequence[float],
    lag: int = 0,
    masked: Iterable[MaskedSpan] = (),
    content: ContentSpan | None = None,
) -> list[Sample]:
    """The samples of an episode, in the order in which their contexts began.

    Args:
        episode: one that passed the fidelity gate.
        advantages: one per policy turn.
        lag: learner batches between the episode's oldest action token and the weights about to be trained.
        masked: action tokens that do not enter the loss.
        content: tells an observation's content; without it no observation is marked.

    Raises:
        ValueError: when advantages and policy turns do not match.
    """
    credit = turn_advantages(episode, list(advantages))
    spans, contexts = tuple(masked), _contexts(episode)
    samples = [_sample(episode, context, credit, lag, spans) for context in contexts]
    if content is None:
        return samples
    observed = observation_spans(episode, content)
    for number, context in enumerate(contexts):
        if not samples[number].loss_tokens:  # no loss sees it
            continue
        mask = observation_mask(observed, context.turns, [len(episode.turns[i].token_ids) for i in context.turns])
        samples[number] = replace(samples[number], observation_mask=mask)
        observed = {index: span for index, span in observed.items() if index not in context.turns}
    return samples


def inherited_spans(episode: Episode) -> tuple[MaskedSpan, ...]:
    """The action tokens that an episode took over from the one it branches off: no sample of it trains on them."""
    return tuple(
        MaskedSpan(index, span.start, span.end, LossMaskReason.INHERITED)
        for index, turn in enumerate(episode.turns[: episode.inherited_turns])
        for span in turn.version_spans
    )


def _contexts(episode: Episode) -> list[_Context]:
    """Group policy turns by the context that they extend."""
    seen = {view.turn: [i for start, end in view.spans for i in range(start, end)] for view in episode.views}
    contexts: list[_Context] = []
    newest: dict[tuple[str, int], _Context] = {}
    inherited = episode.inherited_turns
    for index, turn in enumerate(episode.turns):
        key = (turn.agent_id, turn.segment)
        context = newest.get(key)
        if index < inherited:  # the parent's, which trains on them once; here they are context
            continue
        if not turn.is_action:
            # What follows the last action is part of what was said, though no loss reaches it.
            if context is not None:
                context.turns.append(index)
            continue
        shown = seen.get(index)
        if shown is None:
            shown = [i for i in range(index) if (episode.turns[i].agent_id, episode.turns[i].segment) == key]
        if context is None or not _extends(shown, context):
            context = newest[key] = _Context(agent_id=turn.agent_id, segment=turn.segment, turns=shown)
            contexts.append(context)
        context.turns = [*shown, index]
        context.own.add(index)
    return contexts


def _extends(shown: list[int], context: _Context) -> bool:
    """Whether `shown` continues the context after its last own action."""
    upto = context.turns.index(max(context.own)) + 1
    return shown[:upto] == context.turns[:upto]


def _sample(
    episode: Episode, context: _Context, credit: dict[int, float], lag: int, masked: tuple[MaskedSpan, ...]
) -> Sample:
    """Concatenate the turns of a context."""
    turns = [episode.turns[index] for index in context.turns]
    lengths = [len(turn.token_ids) for turn in turns]
    own = [index in context.own for index in context.turns]
    nothing = [np.zeros(length, np.uint8) for length in lengths]
    action_mask = np.concatenate([t.action_mask if o else z for t, o, z in zip(turns, own, nothing, strict=True)])
    loss = [t.action_mask.copy() if o else z for t, o, z in zip(turns, own, nothing, strict=True)]
    for span in masked:
        if span.turn in context.own:
            loss[context.turns.index(span.turn)][span.start : span.end] = 0
    loss_mask = np.concatenate(loss)
    loss_mask[:1] = 0
    temperatures = [t.sampling.temperature if t.sampling is not None else 1.0 for t in turns]
    values = [credit.get(index, 0.0) if o else 0.0 for index, o in zip(context.turns, own, strict=True)]
    return Sample(
        episode_id=episode.episode_id,
        agent_id=context.agent_id,
        segment=context.segment,
        lag=lag,
        token_ids=np.concatenate([turn.token_ids for turn in turns]),
        action_mask=action_mask,
        loss_mask=loss_mask,
        behaviour_logprobs=np.concatenate([turn.behaviour_logprobs for turn in turns]),
        advantages=np.where(action_mask == 1, np.repeat(np.array(values, np.float32), lengths), np.float32(0)),
        temperatures=np.repeat(np.array(temperatures, np.float32), lengths),
        sources=tuple(_sources(turns, own, lengths)),
        turns=tuple(_own_turns(context, lengths)),
    )


def _own_turns(context: _Context, lengths: Sequence[int]) -> Iterator[OwnTurn]:
    """Where the turns that were sampled in this context lie, in order."""
    begin = 0
    for index, length in zip(context.turns, lengths, strict=True):
        if index in context.own:
            yield OwnTurn(index, begin, begin + length)
        begin += length


def _sources(turns: Sequence[Turn], own: Sequence[bool], lengths: Sequence[int]) -> list[Source]:
    """Who sampled what, those that follow one another and are alike in one."""
    found: list[Source] = []
    begin = 0
    for turn, is_own, length in zip(turns, own, lengths, strict=True):
        for span in turn.version_spans if is_own else ():
            start, end, version = begin + span.start, begin + span.end, span.version.number
            if found and (found[-1].version, found[-1].replica) == (version, turn.replica):
                start = found.pop().start
            found.append(Source(start, end, version, turn.replica))
        begin += length
    return found
