"""What is kept of a learner step that was not finite, for whoever looks for the reason.

::

    RUN/bad_steps/NNNNNN/
      step.json               step, version, error, configuration; for each member: score, lag, advantage per turn, and
                              for each sample its action and loss masks as spans of tokens
      episodes/EPISODE.msgpack   the episode as it was trained (`episode_codec`)
      weights/...             the weights about to be trained, as a Hugging Face folder

NNNNNN is the learner step. JSON has no word for a number that is not finite: it is null there. Nothing is written over:
a resumed run that fails at the same step again writes NNNNNN-2. `step.json` is written last, so where it is, all is.
Owns names and content; why the step failed is the backend's to say.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np

from headrace.platform.config.learner import LearnerConfig
from headrace.platform.records.arrays import U8
from headrace.platform.records.codec import episode_codec
from headrace.platform.store.files import open_url, write_atomic
from headrace.trainer.intake import OpenedGroup, OpenedMember
from headrace.trainer.samples import Sample

_log = logging.getLogger(__name__)
Weights: TypeAlias = Callable[[], Mapping[str, bytes]]
FOLDER = "bad_steps"
SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class BadStep:
    """A step that changed nothing: its number, the newest published version, learner batches trained since, what the
    backend said, its groups, and the files of the weights that it was to train."""

    step: int
    version: int
    ahead: int
    error: str
    config: LearnerConfig
    groups: Sequence[OpenedGroup]
    weights: Mapping[str, bytes]


class BadSteps:
    """Keeps them under `root_url`, the run root."""

    def __init__(self, root_url: str) -> None:
        self._fs, root = open_url(root_url)
        self._root = f"{root}/{FOLDER}"

    def keep(self, bad: BadStep) -> str:
        """Write it; returns the folder. Blocks.

        Raises:
            OSError: it cannot be written; DiskFull is one.
        """
        folder = self._free(bad.step)
        for group in bad.groups:
            for member in group.members:
                payload = episode_codec.encode(member.episode)
                write_atomic(self._fs, f"{folder}/episodes/{member.episode.episode_id}.msgpack", payload)
        for name, data in bad.weights.items():
            write_atomic(self._fs, f"{folder}/weights/{name}", data)
        write_atomic(self._fs, f"{folder}/step.json", msgspec.json.format(msgspec.json.encode(described(bad))))
        return str(self._fs.unstrip_protocol(folder)).removeprefix("file://")

    def _free(self, step: int) -> str:
        folder, count = f"{self._root}/{step:06d}", 1
        while self._fs.exists(folder):
            count += 1
            folder = f"{self._root}/{step:06d}-{count}"
        return folder


def keep_bad(keep: Callable[[BadStep], str] | None, facts: Mapping[str, Any], weights: Weights) -> str:
    """Have `keep` keep a step; what the message of its error says of that. Raises nothing: the step's own error is the
    one to raise.

    Args:
        keep: returns where; None keeps nothing.
        facts: the step's, but for its weights.
        weights: gives their files.
    """
    if keep is None:
        return ""
    try:
        return f". Batch and weights are kept in {keep(BadStep(**facts, weights=weights()))}"
    except Exception as failure:  # whatever it is, it must not hide why the run ends
        _log.exception("a step that was not finite could not be kept")
        return f". They could not be kept for study: {type(failure).__name__}: {failure}"


def described(bad: BadStep) -> dict[str, Any]:
    """`step.json`; see the module."""
    return {
        "schema_version": SCHEMA_VERSION,
        "step": bad.step,
        "version": bad.version,
        "ahead": bad.ahead,
        "error": bad.error,
        "config": bad.config.model_dump(mode="json"),
        "groups": [
            {"group": group.leased.group, "members": [_member(member) for member in group.members]}
            for group in bad.groups
        ],
    }


def _member(member: OpenedMember) -> dict[str, Any]:
    return {
        "episode_id": member.episode.episode_id,
        "score": member.score,
        "lag": member.lag,
        "live": member.live,
        "advantages": list(member.advantages),
        "masked": [msgspec.to_builtins(span) for span in member.masked],
        "samples": [_sample(sample) for sample in member.samples],
    }


def _sample(sample: Sample) -> dict[str, Any]:
    return {
        "agent_id": sample.agent_id,
        "segment": sample.segment,
        "tokens": sample.length,
        "action_mask": list(_spans(sample.action_mask)),
        "loss_mask": list(_spans(sample.loss_mask)),
    }


def _spans(mask: U8) -> Iterator[tuple[int, int]]:
    """Half-open spans of ones."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]]).astype(np.int8)))
    return zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
