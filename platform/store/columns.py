"""The columns of a stored episode: what people query, and beside it the exact bytes that machines read.

`payload` is the episode as it was put, byte for byte; every other column is derived from it and may be left unread.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from headrace.platform.records.episode import Episode
from headrace.platform.records.message import Message, ToolCall
from headrace.platform.records.turn import Turn

# The number of the policy version is not called `version`, because that is the folder's partition key.
SCHEMA = pa.schema(
    [
        ("episode_id", pa.string()),
        ("run", pa.string()),
        ("purpose", pa.string()),
        ("group", pa.int64()),
        ("sample", pa.int32()),
        ("attempt", pa.int32()),
        ("task_id", pa.string()),
        ("environment", pa.string()),
        ("environment_version", pa.string()),
        ("seed", pa.int64()),
        ("policy_version", pa.int64()),
        ("status", pa.string()),
        ("stop_reason", pa.string()),
        ("terminated", pa.bool_()),
        ("truncated", pa.bool_()),
        ("fault_owner", pa.string()),
        ("turns", pa.int32()),
        ("action_tokens", pa.int32()),
        ("duration_s", pa.float64()),
        ("final_state_hash", pa.string()),
        ("messages", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("action_mask", pa.list_(pa.uint8())),
        ("behaviour_logprobs", pa.list_(pa.float32())),
        ("payload", pa.binary()),
    ]
)

_EMPTY_ARRAYS = {"token_ids": np.int32, "action_mask": np.uint8, "behaviour_logprobs": np.float32}


def to_table(episodes: Sequence[tuple[Episode, bytes]]) -> pa.Table:
    """One row an episode. Token columns run over the whole episode, turn after turn; `messages` is JSON."""
    return pa.Table.from_pylist([_row(episode, payload) for episode, payload in episodes], schema=SCHEMA)


def _row(episode: Episode, payload: bytes) -> dict[str, Any]:
    attempt = episode.attempt_id
    return {
        "episode_id": episode.episode_id,
        "run": attempt.run,
        "purpose": attempt.purpose.value,
        "group": attempt.group,
        "sample": attempt.sample,
        "attempt": attempt.attempt,
        "task_id": episode.task.task_id,
        "environment": episode.environment,
        "environment_version": episode.environment_version,
        "seed": episode.seed,
        "policy_version": episode.version.number,
        "status": episode.status.value,
        "stop_reason": episode.stop_reason.value,
        "terminated": episode.terminated,
        "truncated": episode.truncated,
        "fault_owner": episode.fault_owner.value,
        "turns": len(episode.turns),
        "action_tokens": episode.action_tokens,
        "duration_s": episode.duration_s,
        "final_state_hash": episode.final_state_hash,
        "messages": msgspec.json.encode([_message(turn) for turn in episode.turns]).decode(),
        **{name: _joined(episode, name) for name in _EMPTY_ARRAYS},
        "payload": payload,
    }


def _message(turn: Turn) -> Message:
    calls = tuple(ToolCall(call.name, call.arguments, call.call_id) for call in turn.tool_calls)
    return msgspec.structs.replace(turn.as_message(), tool_calls=calls)


def _joined(episode: Episode, name: str) -> np.ndarray[Any, Any]:
    empty = np.empty(0, dtype=_EMPTY_ARRAYS[name])
    return np.concatenate([empty, *(getattr(turn, name) for turn in episode.turns)])
