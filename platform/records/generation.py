"""What goes into an inference engine and what comes out: token ids both ways."""

import msgspec

from headrace.platform.records.arrays import F32, I32
from headrace.platform.records.status import FinishReason, UpdateMode
from headrace.platform.records.versions import VersionSpan


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """How to sample.

    Training episodes use temperature alone: top-p, top-k and min-p change the distribution without leaving a trace,
    so they are refused unless the kept set is recorded (docs/design.md section 6.6).
    """

    max_new_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()


class GenerationRequest(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One request: continue `token_ids` with weights `version`.

    `key` names the request across retries (P24); `session` is the episode, which lets an engine keep the keys and
    values of earlier turns. `seed` alone decides the random numbers, whatever else is in the batch.

    `update_mode` says what may become of `version`. `STICKY`: exactly this one. `TURN`: the newest that the engine
    holds when it begins with the request, this one or a newer, for all tokens. `INFLIGHT`: the same, and tokens that
    are sampled after the engine has taken up a newer one come from that; the spans say where.
    """

    key: str
    session: str
    token_ids: I32
    version: int
    seed: int
    sampling: SamplingParams = SamplingParams()
    deadline_s: float = 60.0
    update_mode: UpdateMode = UpdateMode.STICKY


class Generation(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What was sampled: ids i32[L], logprobs f32[L] of the distribution sampled from, and who sampled which token."""

    token_ids: I32
    logprobs: F32
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...]
    replica: str = ""
    engine_build: str = ""
