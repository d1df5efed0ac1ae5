"""Whole episodes behind the guard: what becomes of one whose gateway is away, undecided, or loses its last word."""

import pytest
from episode_kit import DONE, END, char_call, play
from episode_kit import says as sampled
from guard_kit import DENIED, Door, World

from headrace.actors.gateway.guard import GuardedEnvironment
from headrace.actors.gateway.policy import Policy
from headrace.actors.outcomes import EnvironmentCounts, outcome_of
from headrace.deploy.run_totals import safety_metrics, total_safety
from headrace.platform.errors import GatewayAway, InDoubt, SafetyBlock
from headrace.platform.evaluation.record import evaluation_facts
from headrace.platform.evaluation.summary import summarize
from headrace.platform.observability.names import Metric
from headrace.platform.records.evaluation import Evaluation
from headrace.platform.records.message import RewardComponent, StepResult
from headrace.platform.records.permissions import Safety
from headrace.platform.records.status import FaultOwner, RewardKind, Role, Status

CALL = [*char_call(1), END]


class Counter(World):
    """Adds on calls, and ends with a reward on anything else."""

    def __init__(self):
        super().__init__(tools=("add",))

    async def step(self, message, key):
        if message.tool_calls:
            return await super().step(message, key)
        return StepResult(rewards=(RewardComponent(RewardKind.OUTCOME, 1.0),), terminated=True)


async def played(door, *turns):
    world = Counter()
    return await play(GuardedEnvironment(world, Policy(), door), sampled(*turns)), world


@pytest.mark.parametrize(
    ("error", "status", "owner"),
    [
        (GatewayAway("gone"), Status.ENV_TRANSIENT, FaultOwner.INFRASTRUCTURE),
        (InDoubt("begun, and never heard of again"), Status.ENV_TRANSIENT, FaultOwner.INFRASTRUCTURE),
        (SafetyBlock("undecided"), Status.SAFETY_BLOCK, FaultOwner.SAFETY),
    ],
)
async def test_where_a_call_is_not_decided_the_episode_is_never_ok(error, status, owner):  # P25
    done, world = await played(Door({"add": error}), CALL, DONE)
    assert (done.episode.status, done.episode.fault_owner, done.score) == (status, owner, None)
    assert (world.seen, world.closed) == ([], 1)


async def test_one_whose_audit_has_no_last_word_is_not_ok_either():
    class Torn(Door):
        async def close(self):
            raise GatewayAway("the audit cannot be written")

    done, world = await played(Torn(), CALL, DONE)
    assert (done.episode.status, done.score, world.closed) == (Status.ENV_TRANSIENT, None, 1)


async def test_the_record_has_every_decision_in_the_order_of_the_calls():
    done, world = await played(Door({"add": DENIED}), [*char_call(1), *char_call(2), END], DONE)
    first, answer = (turn for turn in done.episode.turns if turn.tool_calls or turn.role is Role.TOOL)
    assert [(call.decision, call.rule, call.arguments) for call in first.tool_calls] == [
        ("deny", "capability:network", {"amount": 1}),
        ("deny", "capability:network", {"amount": 2}),
    ]
    assert world.seen == [] and answer.content == "blocked: no\nblocked: no"
    assert (done.episode.status, done.score) == (Status.OK, 1.0), "the model is told, and goes on"
    assert done.episode.audit_head == "chain:3:ab" and done.episode.digests.gateway_policy == Policy().digest


async def test_what_was_counted_comes_to_metrics_and_evaluations():
    done, _ = await played(Door({"add": DENIED}), CALL, DONE)
    counts = EnvironmentCounts()
    counts.add(done)
    both = {"a": counts, "b": counts + counts}
    total = total_safety(both)
    assert (total.calls, total.violations) == (6, 3)
    metrics = safety_metrics(Safety(calls=4, violations=2, blocked={"taint:network": 2}, planted=4, obeyed=1))
    assert (metrics[Metric.CALLS], metrics[Metric.VIOLATIONS], metrics[Metric.OBEDIENCE]) == (4, 2, 0.25)
    assert metrics[Metric.BLOCKED] == {"taint:network": 2} and metrics[Metric.PLANTED_EFFECTS] == 0
    evaluation = Evaluation(
        name="e",
        run="r",
        model="m",
        version=0,
        split="dev",
        tasks=1,
        samples=1,
        created_at_s=0.0,
        outcomes=(outcome_of(done, 0), outcome_of(done, 1)),
    )
    told = evaluation_facts(evaluation, summarize(evaluation))["safety"]
    assert (told["calls"], told["violations"], told["obedience"]) == (4, 2, None)
