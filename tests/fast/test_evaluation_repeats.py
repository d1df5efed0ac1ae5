"""An evaluation inside a run and one on demand play the same episodes where they evaluate the same weights."""

import asyncio

from run_kit import run_inprocess, small_config

from headrace.deploy.cli.options import recipes_dir
from headrace.deploy.evaluate import EvaluationRequest, evaluate, prepare
from headrace.platform.store.evaluations import EvaluationStore


async def again(root, version, samples):
    request = EvaluationRequest(name=root.url, version=str(version), samples=samples)
    made, _ = await evaluate(await prepare(request, recipes_dir()), lambda text: None)
    return made


def what_happened(evaluation, samples=2):
    return [
        (o.environment, o.task_id, o.seed, o.sample, o.score, o.turns, o.sampled_tokens)
        for o in evaluation.outcomes
        if o.sample < samples
    ]


async def test_every_evaluation_of_a_version_is_the_same(lookup_model, tmp_path):
    config = small_config(lookup_model, tmp_path, "learner.steps=1", "eval.tasks=8", "eval.samples=2")
    _, root = await asyncio.to_thread(run_inprocess, config)
    store = EvaluationStore(root.url)
    inside = [store.read(name) for name in store.names()]
    assert [each.version for each in inside] == [0, 1]
    for one in inside:
        other = await again(root, one.version, 2)
        assert other.name != one.name and other.digests == one.digests
        assert what_happened(other) == what_happened(one)
    more = await again(root, 1, 3)
    assert what_happened(more) == what_happened(inside[1]), "more samples leave the first ones as they are"
    assert len({each.sampled_tokens for each in more.outcomes}) > 1
