"""Supervised stages: the gate, the number of steps, and what the loss is averaged over."""

from itertools import cycle, repeat

import numpy as np
import pytest
import torch

from headrace.platform.config import SftStageConfig, TinyLlamaConfig
from headrace.platform.errors import RunFailed
from headrace.platform.records import i32
from headrace.trainer import sft
from headrace.trainer.model import build_tiny_llama
from headrace.trainer.sft import SftTrace, mean_loss, run_stage

TINY = TinyLlamaConfig(hidden=16, layers=1, heads=2, intermediate=16, max_positions=32)


def tiny():
    return build_tiny_llama(TINY, 12, 0, pad_token_id=0, eos_token_id=1)


def trace(ids, mask) -> SftTrace:
    return SftTrace(i32(ids), np.array(mask, np.uint8))


COPY = trace([3, 4, 5, 6, 1], [0, 0, 1, 1, 1])


def stage(**fields) -> SftStageConfig:
    return SftStageConfig(**{"name": "format", "batch": 4, "warmup": 0, "measure_every": 5, "max_steps": 20, **fields})


def test_the_gate_stops_as_soon_as_success_is_reached():
    measured = iter([0.2, 0.9, 0.99])
    progress = []
    result = run_stage(tiny(), stage(until_success=0.985), repeat(COPY), lambda: next(measured), progress.append)
    assert (result.steps, result.success) == (15, 0.99)
    assert [(p.step, p.success) for p in progress if p.success is not None] == [(5, 0.2), (10, 0.9), (15, 0.99)]


def test_a_gate_that_is_never_reached_fails_by_name():
    measured = iter([0.3, 0.5, 0.1, 0.2])
    with pytest.raises(RunFailed, match=r"'format'.*0\.985 in 20 steps.*best: 0\.500.*`seed`.*`max_steps`"):
        run_stage(tiny(), stage(until_success=0.985), repeat(COPY), lambda: next(measured))


def test_without_a_gate_the_number_of_steps_is_exact_and_success_is_measured_once():
    calls = []
    result = run_stage(tiny(), stage(max_steps=7), repeat(COPY), lambda: calls.append(1) or 0.4)
    assert (result.steps, result.success, len(calls)) == (7, 0.4, 1)


def test_the_loss_is_the_mean_over_action_tokens_alone():
    """Two traces of unequal length: three action tokens in all, each weighs a third."""
    model = tiny()
    traces = [trace([3, 4, 5], [0, 0, 1]), trace([6, 7, 8, 9, 2, 2], [0, 1, 0, 1, 0, 0])]
    expected = []
    for one in traces:
        ids = torch.from_numpy(one.token_ids.astype(np.int64))[None]
        with torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=ids).logits[0], -1)
        expected += [-float(logprobs[t - 1, ids[0, t]]) for t in np.flatnonzero(one.action_mask)]
    seen = []
    run_stage(model, stage(batch=2, max_steps=1), iter(traces), lambda: 0.0, lambda p: seen.append(p.loss))
    assert seen == pytest.approx([sum(expected) / 3], abs=1e-6)


def test_the_loss_falls_and_every_stage_starts_with_a_fresh_optimizer():
    model = tiny()
    losses = []
    run_stage(model, stage(max_steps=40), repeat(COPY), lambda: 1.0, lambda p: losses.append(p.loss))
    assert losses[-1] < 0.5 * losses[0]
    copy = tiny()
    copy.load_state_dict(model.state_dict())
    for each in (model, copy):
        run_stage(each, stage(max_steps=3), repeat(COPY), lambda: 1.0)
    assert torch.equal(model.lm_head.weight, copy.lm_head.weight)


def test_without_a_measure_there_is_no_success():
    progress = []
    result = run_stage(tiny(), stage(max_steps=3), repeat(COPY), None, progress.append)
    assert (result.steps, result.success) == (3, None)
    assert [p.success for p in progress] == [None] * 3


def test_a_gate_without_a_measure_is_refused():
    with pytest.raises(ValueError, match="nothing measures"):
        run_stage(tiny(), stage(until_success=0.9), repeat(COPY), None)


UNEQUAL = [
    trace([3, 4, 5], [0, 0, 1]),
    trace([6, 7, 8, 9, 2, 2], [0, 1, 0, 1, 0, 0]),
    trace([5] * 12, [0] * 6 + [1] * 6),
    trace([2, 3], [1, 1]),
]


@pytest.mark.parametrize("room", [1, 8, 13, 24])
def test_microbatches_add_up_to_the_same_step(room, monkeypatch):
    """The trace of twelve tokens is longer than some of these rooms: it gets a forward pass of its own."""
    whole, cut = tiny(), tiny()
    losses = []
    for model, tokens in ((whole, 10_000), (cut, room)):
        monkeypatch.setattr(sft, "MICROBATCH_TOKENS", tokens)
        run_stage(model, stage(max_steps=3), cycle(UNEQUAL), None, lambda p: losses.append(p.loss))
        losses.append(mean_loss(model, UNEQUAL))
    assert losses[:4] == pytest.approx(losses[4:], abs=1e-5)
    torch.testing.assert_close(whole.lm_head.weight, cut.lm_head.weight, atol=1e-4, rtol=0)


def test_no_microbatch_is_larger_than_its_room(monkeypatch):
    monkeypatch.setattr(sft, "MICROBATCH_TOKENS", 13)
    sizes = []

    class Spy(sft.TokenLogprobs):
        def __call__(self, token_ids, *rest):
            sizes.append(tuple(token_ids.shape))
            return super().__call__(token_ids, *rest)

    monkeypatch.setattr(sft, "TokenLogprobs", Spy)
    run_stage(tiny(), stage(max_steps=1), iter(UNEQUAL), None)
    assert sorted(sizes) == [(1, 6), (1, 12), (2, 3)]


def test_the_mean_loss_trains_nothing():
    model = tiny()
    before = model.lm_head.weight.clone()
    assert mean_loss(model, [COPY]) > 0
    assert torch.equal(model.lm_head.weight, before) and model.lm_head.weight.grad is None


def test_traces_that_run_out_are_an_error():
    with pytest.raises(ValueError, match="ran out"):
        run_stage(tiny(), stage(), iter([COPY] * 6), lambda: 0.0)


def test_a_loss_that_is_not_finite_is_an_error():
    model = tiny()
    with torch.no_grad():
        model.lm_head.weight[0] = float("nan")
    with pytest.raises(ArithmeticError, match=r"'format'.*step 1"):
        run_stage(model, stage(), repeat(COPY), lambda: 0.0)
