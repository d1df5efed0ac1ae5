"""How one stored episode was trained on, or why it was not, in facts and sentences.

The training receipt says how (the newest one: after a rollback an episode is trained again), the fate table says
whether (P3). Whatever the policy sampled and the loss did not see has a reason here; tokens that neither the loss nor a
reason accounts for are counted, so that a gap in the books shows.
"""

from collections.abc import Sequence
from typing import Any

from headrace.platform.records.episode import Episode
from headrace.platform.records.status import CancelReason, DropReason, Fate, FaultOwner, Purpose
from headrace.platform.records.tables import FateRow, LossMaskReason, Receipt

_MASKED = {
    LossMaskReason.LAG: "sampled by weights over the lag limit at train start (P15)",
    LossMaskReason.AGENT: "sampled by an agent that is not trained",
    LossMaskReason.OVERLONG: "of an episode that was cut off for its length",
    LossMaskReason.INHERITED: "sampled in the episode that it branches off, which is trained on them",
}
_DROPPED = {
    DropReason.LAG: "it was over the lag limit (queue.max_lag, P15)",
    DropReason.AGE: "it was too old (queue.max_age_s, P17)",
    DropReason.ENVIRONMENT: "it was played in a version of its environment that the run no longer allows (P17)",
    DropReason.ZERO_VARIANCE: "all members of its group had the same score, so the group teaches nothing",
    DropReason.TOO_FEW: "too few members of its group could be used (queue.min_group)",
    DropReason.FIDELITY: "its record did not hold together; the learner's log names what",
    DropReason.NAN: "its numbers were not finite",
    DropReason.POISON: "its group was delivered queue.max_deliveries times and no commit came of it",
    DropReason.SPARE: "its group was full without it",
    DropReason.STOPPED: "the run ended before its turn came",
}
_CANCELLED = {
    CancelReason.STOPPED: "the run ended while it was played",
    CancelReason.ROLLED_BACK: "the version that played it was rolled back (P6)",
    CancelReason.LAG: "it could no longer arrive within the lag limit (P18)",
    CancelReason.SUPERSEDED: "another worker played its group",
}
_FAILED = {
    FaultOwner.MODEL: "the model broke it",
    FaultOwner.ENVIRONMENT: "its environment broke",
    FaultOwner.INFRASTRUCTURE: "a part that played it was lost",
    FaultOwner.SAFETY: "it was stopped for safety",
}


def newest(receipts: Sequence[Receipt]) -> Receipt | None:
    """The receipt that counts: version numbers are never used again (P6), so the largest is the last."""
    return max(receipts, key=lambda row: row.version, default=None)


def training_facts(episode: Episode, fate: FateRow | None, receipts: Sequence[Receipt]) -> dict[str, Any]:
    """What the loss made of an episode.

    Returns:
        `trained` and `why`; for a trained one also `version`, `step` (None where the receipt is older than that
        column), `lag` in learner batches, `advantages` by policy turn, `action_tokens`, `loss_tokens`, `masked` spans
        with reasons, `unaccounted` tokens, `ratio_mean`, `clip_share`, and the versions that trained it `before`.
    """
    receipt = newest(receipts)
    trained = receipt is not None and (fate is None or fate.fate is Fate.TRAINED)
    if receipt is None or not trained:
        return {"trained": False, "why": _why_not(episode, fate, receipt)}
    action_tokens = sum(int(turn.action_mask.sum()) for turn in episode.turns)
    masked: list[dict[str, Any]] = [
        {
            "turn": span.turn,
            "start": span.start,
            "end": span.end,
            "tokens": _sampled(episode, span.turn, span.start, span.end),
            "reason": str(span.reason),
            "why": _MASKED[span.reason],
        }
        for span in receipt.masked
    ]
    return {
        "trained": True,
        "why": "",
        "version": receipt.version,
        "step": receipt.step or None,
        "lag": receipt.lag,
        "advantages": list(receipt.advantages),
        "action_tokens": action_tokens,
        "loss_tokens": receipt.loss_tokens,
        "masked": masked,
        "unaccounted": action_tokens - receipt.loss_tokens - sum(span["tokens"] for span in masked),
        "ratio_mean": receipt.ratio_mean,
        "clip_share": receipt.clip_share,
        "before": sorted(row.version for row in receipts if row is not receipt),
    }


def _sampled(episode: Episode, turn: int, start: int, end: int) -> int:
    return int(episode.turns[turn].action_mask[start:end].sum())


def _why_not(episode: Episode, fate: FateRow | None, receipt: Receipt | None) -> str:
    if episode.purpose is not Purpose.TRAIN:
        return f"it was played for {episode.purpose}, and only purpose train is ever trained"
    if fate is None:
        return "its end is not known: the run goes on, or was killed"
    undone = f"version {receipt.version} was trained on it and rolled back (P6); " if receipt is not None else ""
    if fate.fate is Fate.IN_FLIGHT:
        return f"{undone}it waits in the queue, or did when the run ended"
    return undone + _told(fate)


def _told(fate: FateRow) -> str:
    reasons: dict[Fate, dict[Any, str]] = {
        Fate.DROPPED: _DROPPED,
        Fate.CANCELLED: _CANCELLED,
        Fate.FAILED: _FAILED,
        Fate.TRAINED: {},
    }
    told = reasons[fate.fate].get(fate.reason)
    if fate.fate is Fate.TRAINED:
        return "it was trained, but its receipt is missing"
    return f"{fate.fate}: {told or fate.reason}"
