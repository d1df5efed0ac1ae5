"""The fidelity gate: refuses an episode whose parts do not hold together.

Owns the rules that every episode must satisfy before it may be stored, queued or trained on. It never pads, clips or
repairs (case T16): what fails here is a fault of the side that played the episode. Whether a reward may be used, and
how stale the episode is, are judged elsewhere.

A message of FidelityError reads "RULE: turn N: figures", so that a count by rule is a count by the text before the
first colon.
"""

from typing import NoReturn

import msgspec
import numpy as np

from headrace.platform.errors import FidelityError
from headrace.platform.records.arrays import enc_hook
from headrace.platform.records.episode import Episode
from headrace.platform.records.status import FaultOwner, Role, Status, StopReason, UpdateMode
from headrace.platform.records.turn import Turn

_I32, _U8, _F32 = np.dtype("<i4"), np.dtype("u1"), np.dtype("<f4")
_STICKY = UpdateMode.STICKY
# Arrays without axes: numpy compares with them in half the time that a Python number takes.
_ZERO_ID, _SAMPLED, _HIGHEST_LOGPROB = np.array(0, _I32), np.array(1, _U8), np.array(1e-6, _F32)

_OWNERS: dict[Status, frozenset[FaultOwner]] = {
    Status.OK: frozenset({FaultOwner.NONE}),
    Status.BUDGET_EXHAUSTED: frozenset({FaultOwner.NONE}),
    Status.MODEL_INVALID_ACTION: frozenset({FaultOwner.NONE, FaultOwner.MODEL}),
    Status.MODEL_BAD_PLAN: frozenset({FaultOwner.NONE, FaultOwner.MODEL}),
    Status.ENV_TRANSIENT: frozenset({FaultOwner.ENVIRONMENT, FaultOwner.INFRASTRUCTURE}),
    Status.ENV_BUG: frozenset({FaultOwner.ENVIRONMENT}),
    Status.SAFETY_BLOCK: frozenset({FaultOwner.SAFETY}),
}
_TRUNCATING = frozenset({StopReason.ENV_TRUNCATED, StopReason.MAX_TURNS, StopReason.MAX_TOKENS, StopReason.MAX_SECONDS})


def check_episode(episode: Episode, *, from_wire: bool = False) -> None:
    """Check every rule; cheap enough to run on each episode (some 4 µs a turn).

    Args:
        episode: what was played.
        from_wire: the codec has just decoded it, so its texts and values are known to have a stored form.

    Raises:
        FidelityError: the first rule that does not hold, with the turn and the figures.
    """
    _check_end(episode)
    action_tokens = 0
    for index, turn in enumerate(episode.turns):
        _check_lengths(index, turn)
        sampled = _check_mask(index, turn)
        _check_logprobs(index, turn, sampled)
        _check_spans(index, turn, sampled, episode)
        action_tokens += sampled
    if episode.update_mode is not _STICKY:
        _check_order(episode)
    if episode.status is Status.OK and action_tokens == 0:
        raise FidelityError("actions: status OK, but the policy sampled no token in any turn")
    _check_views(episode)
    if not from_wire:
        _check_text(episode)


def _fail(rule: str, turn: int, detail: str) -> NoReturn:
    raise FidelityError(f"{rule}: turn {turn}: {detail}")


def _check_end(episode: Episode) -> None:
    stop = episode.stop_reason
    if episode.terminated and episode.truncated:
        raise FidelityError("end: both terminated and truncated; an episode ends in one way")
    if episode.terminated != (stop is StopReason.TERMINATED) or episode.truncated != (stop in _TRUNCATING):
        raise FidelityError(
            f"end: stop reason {stop} with terminated={episode.terminated}, truncated={episode.truncated}"
        )
    if episode.status.is_truncated and not episode.truncated:
        raise FidelityError(f"end: status {episode.status}, but the episode is not truncated")
    if episode.fault_owner not in _OWNERS[episode.status]:
        allowed = ", ".join(sorted(_OWNERS[episode.status]))
        raise FidelityError(
            f"owner: status {episode.status} with fault owner {episode.fault_owner}; allowed: {allowed}"
        )


def _check_lengths(index: int, turn: Turn) -> None:
    ids, mask, logprobs = turn.token_ids, turn.action_mask, turn.behaviour_logprobs
    if ids.dtype != _I32 or mask.dtype != _U8 or logprobs.dtype != _F32:
        _fail("dtype", index, f"ids {ids.dtype}, mask {mask.dtype}, logprobs {logprobs.dtype}; want i32, u8, f32")
    if not ids.ndim == mask.ndim == logprobs.ndim == 1:
        _fail("shape", index, f"ids {ids.shape}, mask {mask.shape}, logprobs {logprobs.shape}; want one axis each")
    if not ids.size == mask.size == logprobs.size:
        _fail("lengths", index, f"{ids.size} ids, {mask.size} mask values, {logprobs.size} logprobs")
    for name, column in turn.token_columns.items():
        if column.values.shape != ids.shape:
            _fail("columns", index, f"column {name!r} has shape {column.values.shape} for {ids.size} tokens")
        if column.values.dtype not in (_I32, _F32):
            _fail("columns", index, f"column {name!r} is {column.values.dtype}; want i32 or f32")
    if np.count_nonzero(ids < _ZERO_ID):
        _fail("ids", index, f"negative token id {int(ids.min())}")


def _check_mask(index: int, turn: Turn) -> int:
    """The number of action tokens. Only the policy's own turns may have any (cases T5 to T7)."""
    mask = turn.action_mask
    sampled = int(np.count_nonzero(mask))
    if sampled == 0:
        return 0
    if turn.role is not Role.ASSISTANT:
        _fail("mask", index, f"{sampled} tokens of a {turn.role} turn are marked as sampled by the policy")
    if np.count_nonzero(mask == _SAMPLED) != sampled:
        _fail("mask", index, f"mask value {int(mask.max())}; want 0 or 1")
    return sampled


def _check_logprobs(index: int, turn: Turn, sampled: int) -> None:
    logprobs = turn.behaviour_logprobs
    if sampled == 0:
        if np.count_nonzero(logprobs):
            _fail("logprobs", index, "a logprob that is not 0 in a turn that the policy did not sample")
        return
    chosen = logprobs
    if sampled != logprobs.size:
        is_action = turn.action_mask.view(np.bool_)
        if np.count_nonzero(logprobs[~is_action]):
            _fail("logprobs", index, "a logprob that is not 0 where the mask is 0")
        chosen = logprobs[is_action]
    if np.count_nonzero(np.isfinite(chosen)) != sampled:
        _fail("logprobs", index, f"{sampled - np.count_nonzero(np.isfinite(chosen))} of {sampled} are not finite")
    if np.count_nonzero(chosen <= _HIGHEST_LOGPROB) != sampled:
        _fail("logprobs", index, f"logprob {float(chosen.max())}; a probability is at most 1")


def _check_spans(index: int, turn: Turn, sampled: int, episode: Episode) -> None:
    """Version spans cover the action tokens and nothing else: a prompt token has no version (case T20)."""
    covered, end = 0, 0
    sticky = episode.update_mode is _STICKY
    for span in turn.version_spans:
        if not end <= span.start < span.end <= turn.action_mask.size:
            _fail("spans", index, f"span [{span.start}, {span.end}) is out of order or outside {turn.action_mask.size}")
        if np.count_nonzero(turn.action_mask[span.start : span.end]) != span.end - span.start:
            _fail("spans", index, f"span [{span.start}, {span.end}) has tokens that the policy did not sample")
        if sticky and span.version.number != episode.version.number:
            _fail("versions", index, f"{span.version} in a sticky episode of {episode.version}")
        covered, end = covered + span.end - span.start, span.end
    if covered != sampled:
        _fail("spans", index, f"spans cover {covered} of {sampled} action tokens")


def _check_order(episode: Episode) -> None:
    """What the modes that move promise (P22): TURN changes between turns only, and neither ever goes back.

    A context goes on under no older version than it had, and none is older than the planned one. Contexts that are
    apart (agents, segments) may have been sampled at once. A branch goes on with the version that it was told to,
    whatever its parent's turns have.
    """
    if episode.branch_step is not None:
        return
    newest: dict[tuple[str, int], int] = {}
    for index, turn in enumerate(episode.turns):
        if not turn.version_spans:
            continue
        context = turn.agent_id, turn.segment
        numbers = [newest.get(context, episode.version.number), *(span.version.number for span in turn.version_spans)]
        if numbers != sorted(numbers):
            _fail("versions", index, f"versions go back: {numbers}")
        if episode.update_mode is UpdateMode.TURN and numbers[1] != numbers[-1]:
            _fail("versions", index, f"{numbers[1:]} in one turn of an episode of mode {episode.update_mode}")
        newest[context] = numbers[-1]


def _check_views(episode: Episode) -> None:
    for view in episode.views:
        if not 0 <= view.turn < len(episode.turns) or episode.turns[view.turn].role is not Role.ASSISTANT:
            raise FidelityError(f"views: a view of turn {view.turn}, which is not a turn of the policy")
        for start, end in view.spans:
            if not 0 <= start <= end <= view.turn:
                _fail("views", view.turn, f"shows turns [{start}, {end}), which were not all there yet")


def _check_text(episode: Episode) -> None:
    """Every string must be valid UTF-8 once encoded (a lone surrogate is not), and every value one that codecs know."""
    error = _storage_error(episode)
    if not error:
        return
    for index, turn in enumerate(episode.turns):
        if turn_error := _storage_error(turn):
            _fail("text", index, turn_error)
    raise FidelityError(f"text: {error}")


def _storage_error(record: Episode | Turn) -> str:
    try:
        msgspec.msgpack.encode(record, enc_hook=enc_hook)
    except UnicodeEncodeError as error:
        return f"a string is not valid UTF-8: {error}"
    except (TypeError, NotImplementedError) as error:
        return f"a value cannot be stored: {error}"
    return ""
