"""Small, valid turns and episodes to start a test from. Change one field and exactly that is wrong."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.platform.records.arrays import f32, i32
from headrace.platform.records.episode import Episode
from headrace.platform.records.ids import AttemptId
from headrace.platform.records.message import Task
from headrace.platform.records.status import Role, Status, StopReason
from headrace.platform.records.turn import Turn, View
from headrace.platform.records.versions import VersionRef, VersionSpan


def plain_turn(role: Role, content: str = "", token_ids: Sequence[int] = (1, 2, 3), **fields: Any) -> Turn:
    """A turn that the policy did not sample: mask and logprobs are 0. `fields` are further fields of Turn."""
    length = len(token_ids)
    return Turn(
        role=role,
        content=content,
        token_ids=i32(token_ids),
        action_mask=np.zeros(length, dtype=np.uint8),
        behaviour_logprobs=np.zeros(length, dtype=np.float32),
        **fields,
    )


def policy_turn(
    content: str = "",
    token_ids: Sequence[int] = (4, 5, 6),
    logprobs: Sequence[float] | None = None,
    version: int = 0,
    **fields: Any,
) -> Turn:
    """A turn that the policy sampled whole, under one version. Logprobs are -0.5 unless given."""
    length = len(token_ids)
    return Turn(
        role=Role.ASSISTANT,
        content=content,
        token_ids=i32(token_ids),
        action_mask=np.ones(length, dtype=np.uint8),
        behaviour_logprobs=f32(logprobs if logprobs is not None else [-0.5] * length),
        version_spans=(VersionSpan(VersionRef("policy", version), 0, length),) if length else (),
        **fields,
    )


def make_episode(turns: Sequence[Turn] | None = None, *, group: int = 0, version: int = 0, **fields: Any) -> Episode:
    """An episode that ended by itself: a user's turn and a policy's turn unless `turns` are given.

    `version` is that of the episode and, when `turns` are left out, of its policy turn.
    """
    if turns is None:
        turns = (plain_turn(Role.USER, "What is it?"), policy_turn("It is 1.", version=version))
    views = tuple(View(index, ((0, index),)) for index, turn in enumerate(turns) if turn.role is Role.ASSISTANT)
    values: dict[str, Any] = {
        "attempt_id": AttemptId("test-run", group, 0),
        "task": Task("task-1", "counter", {"answer": "1"}),
        "environment": "counter",
        "environment_version": "1",
        "seed": 0,
        "version": VersionRef("policy", version),
        "turns": tuple(turns),
        "views": views,
        "status": Status.OK,
        "stop_reason": StopReason.TERMINATED,
        "terminated": True,
        "truncated": False,
    }
    return Episode(**{**values, **fields})
