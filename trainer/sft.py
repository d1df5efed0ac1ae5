"""Supervised stages: imitate traces, until a success is measured or for a number of steps.

Owns the optimizer of one stage, which is fresh, and the gate. Cross entropy is averaged over the action tokens of a
step alone; a step that is large is cut into microbatches, which add up to the same mean. How traces are made and how
success is measured belongs to the caller. A stage with a gate goes by measured success, not by steps: small models
sometimes fail to form the copying skill at all, and reinforcement learning cannot start without it, so a gate that is
never reached fails the run by name.

Dimensions: B traces, T tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.platform.config.sft import SftStageConfig
from headrace.platform.errors import ConfigError, RunFailed
from headrace.platform.records.arrays import I32, U8
from headrace.trainer.forward import TokenLogprobs

BETAS = (0.9, 0.98)
CLIP_GRAD = 1.0
MICROBATCH_TOKENS = 2048
"""Padded tokens of one forward pass at most. They bound a step's memory: with 135M parameters and 49,152 words 3 to
4 GB, besides 2 GB for weights, gradients and moments."""


@dataclass(frozen=True, slots=True)
class SftTrace:
    """A demonstration: token_ids i32[T] and action_mask u8[T], 1 on the tokens to imitate."""

    token_ids: I32
    action_mask: U8


@dataclass(frozen=True, slots=True)
class SftProgress:
    """After one step: the loss of that step, and the success where it was measured."""

    stage: str
    step: int
    max_steps: int
    loss: float
    success: float | None


@dataclass(frozen=True, slots=True)
class SftResult:
    """How a stage ended: optimizer steps, last loss, last measured success (None where nothing measures it)."""

    stage: str
    steps: int
    loss: float
    success: float | None


def run_stage(
    model: Any,
    stage: SftStageConfig,
    traces: Iterator[SftTrace],
    measure: Callable[[], float] | None,
    on_progress: Callable[[SftProgress], None] = lambda progress: None,
) -> SftResult:
    """Train `model` in place.

    Args:
        model: a Hugging Face causal language model in fp32; it is left in evaluation mode.
        stage: hyper-parameters and gate.
        traces: `stage.batch` are taken for each step; endless.
        measure: sampled success of the model as it is, between 0 and 1; None for a stage without a gate that nothing
            is to be measured of.
        on_progress: called after every step.

    Raises:
        RunFailed: the gate was not reached within `stage.max_steps`.
        ConfigError: a trace has a token that the model has no embedding for.
        ArithmeticError: the loss is not finite.
        ValueError: there is a gate and no `measure`.
    """
    if measure is None and stage.until_success is not None:
        raise ValueError(f"supervised stage {stage.name!r} waits for a success that nothing measures")
    forward = TokenLogprobs(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=stage.lr, betas=BETAS, weight_decay=0.0)
    best, success, loss = 0.0, None, float("nan")
    for step in range(1, stage.max_steps + 1):
        loss = _train(model, forward, optimizer, stage, step, list(islice(traces, stage.batch)))
        due = step == stage.max_steps or (stage.until_success is not None and step % stage.measure_every == 0)
        success = measure() if due and measure is not None else None
        on_progress(SftProgress(stage.name, step, stage.max_steps, loss, success))
        if stage.until_success is not None and success is not None:
            best = max(best, success)
            if success >= stage.until_success:
                return SftResult(stage.name, step, loss, success)
    if stage.until_success is None:
        return SftResult(stage.name, stage.max_steps, loss, success)
    raise RunFailed(
        f"supervised stage {stage.name!r} did not reach a success of {stage.until_success} in {stage.max_steps} steps"
        f" (best: {best:.3f}, last loss: {loss:.3f}). Small models sometimes never form the skill: try another `seed`,"
        " or give the stage more `max_steps`."
    )


def mean_loss(model: Any, traces: Sequence[SftTrace]) -> float:
    """Cross entropy of the model as it is, averaged over the action tokens of `traces`; nothing is trained.
    Raises ConfigError as `run_stage` does."""
    _check_tokens(model, traces)
    forward = TokenLogprobs(model)
    with torch.no_grad():
        return sum(float(_loss(forward, rows, _action_tokens(traces))) for rows in _microbatches(traces))


def _train(
    model: Any,
    forward: TokenLogprobs,
    optimizer: torch.optim.Optimizer,
    stage: SftStageConfig,
    step: int,
    traces: Sequence[SftTrace],
) -> float:
    """One optimizer step; returns its loss."""
    if not traces:
        raise ValueError("the traces ran out before the stage was over")
    _check_tokens(model, traces)
    optimizer.zero_grad(set_to_none=True)
    total, count = 0.0, _action_tokens(traces)
    for rows in _microbatches(traces):
        loss = _loss(forward, rows, count)
        if not bool(torch.isfinite(loss)):
            raise ArithmeticError(f"supervised stage {stage.name!r}: the loss is not finite at step {step}")
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    for group in optimizer.param_groups:
        group["lr"] = stage.lr * min(1.0, step / max(stage.warmup, 1))
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD)
    optimizer.step()
    return total


def _check_tokens(model: Any, traces: Sequence[SftTrace]) -> None:
    most, words = max(int(trace.token_ids.max()) for trace in traces), model.get_input_embeddings().num_embeddings
    if most >= words:
        raise ConfigError(
            f"a trace has the token {most}, but the model embeds {words} tokens: its tokenizer and its weights do not"
            " belong together"
        )


def _action_tokens(traces: Sequence[SftTrace]) -> int:
    """How many tokens enter the loss: the first token of a trace never does, as nothing predicts it."""
    return sum(int(trace.action_mask[1:].sum()) for trace in traces)


def _loss(forward: TokenLogprobs, traces: Sequence[SftTrace], count: int) -> Tensor:
    """The share that `traces` have in the mean over `count` action tokens."""
    token_ids_BT, is_token_BT, chosen_BT = _padded(traces)
    logprobs_N = forward(token_ids_BT, is_token_BT, chosen_BT, torch.ones(chosen_BT.shape))
    return -logprobs_N.sum() / count


def _microbatches(traces: Sequence[SftTrace]) -> list[Sequence[SftTrace]]:
    """`traces` as they are where they fit into one forward pass, else in order of length. A trace that is longer than
    a microbatch gets one of its own: it is never cut."""
    if len(traces) * max(len(trace.token_ids) for trace in traces) <= MICROBATCH_TOKENS:
        return [traces]
    batches: list[list[SftTrace]] = [[]]
    for trace in sorted(traces, key=lambda trace: len(trace.token_ids)):
        if batches[-1] and len(trace.token_ids) * (len(batches[-1]) + 1) > MICROBATCH_TOKENS:
            batches.append([])
        batches[-1].append(trace)
    return list(batches)


def _padded(traces: Sequence[SftTrace]) -> tuple[Tensor, Tensor, Tensor]:
    """token_ids i64[B, T], is_token bool[B, T] and chosen bool[B, T]."""
    B, T = len(traces), max(len(trace.token_ids) for trace in traces)
    token_ids = np.zeros((B, T), np.int64)
    is_token, chosen = np.zeros((B, T), np.bool_), np.zeros((B, T), np.bool_)
    for b, trace in enumerate(traces):
        upto = len(trace.token_ids)
        token_ids[b, :upto], is_token[b, :upto] = trace.token_ids, True
        chosen[b, 1:upto] = trace.action_mask[1:]
    return torch.from_numpy(token_ids), torch.from_numpy(is_token), torch.from_numpy(chosen)
