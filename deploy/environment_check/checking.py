"""Runs every check that an environment can be given without a model, each under a deadline.

Owns the order of the checks and what their outcomes mean. `failed` is a rule that is broken; `not shown` is one that
could not be looked at, because an earlier one failed or because no script led there. The rules are those of the
conformance suites in platform/testing.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

from headrace.actors.environments.kind import EnvironmentKind
from headrace.actors.environments.registry import environment_kind
from headrace.actors.frames import described, own_frame
from headrace.deploy.environment_check.explanations import ABOUT
from headrace.deploy.environment_check.patience import within
from headrace.deploy.environment_check.scoring import NotShown, is_scored
from headrace.deploy.environment_check.scripts import MOST_TURNS, Script, script_for
from headrace.platform.contracts import Environment, TaskSource
from headrace.platform.errors import ConfigError, DeadlineExceeded, EnvironmentFault, NotFound
from headrace.platform.records.message import Message, Task
from headrace.platform.testing.conformance.environment import ENVIRONMENT_SUITE, EnvironmentContext
from headrace.platform.testing.conformance.support import settled
from headrace.platform.testing.conformance.tasks import TASK_SUITE, TaskContext

_SPLITS = ("train", "dev", "hidden")
_NEEDS_AN_END = "the_script_ends_once"
_NO_END = f"no script ended the episode within {MOST_TURNS} turns; give the environment demonstrate(task)"
_LONGEST = 400


class Outcome(StrEnum):
    """What a check came to."""

    OK = "ok"
    FAILED = "failed"
    NOT_SHOWN = "not shown"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One check: its name and title, its outcome, what was found, and how to mend it (of failures only)."""

    name: str
    title: str
    outcome: Outcome
    explanation: str = ""
    mend: str = ""


@dataclass(kw_only=True, slots=True)
class Report:
    """All findings, in the order in which they were made."""

    target: str
    findings: list[Finding] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return not self.count(Outcome.FAILED)

    def count(self, outcome: Outcome) -> int:
        """How many checks came to `outcome`."""
        return sum(finding.outcome is outcome for finding in self.findings)


def check_environment(
    target: str, args: Mapping[str, Any] | None = None, tasks: int = 3, deadline_s: float = 20.0
) -> Report:
    """Check the environment that `target` names.

    Args:
        target: as `EnvironmentConfig.name`: a registered name, `./file.py:Name`, `package.module:Name`.
        args: the recipe's arguments of it.
        tasks: how many training tasks are played.
        deadline_s: how long one check may take.

    Raises:
        NotFound: nothing is registered under that name.
    """
    checker = _Checker(target, dict(args or {}), tasks, deadline_s)
    checker.run()
    return checker.report


class _Checker:
    def __init__(self, target: str, args: dict[str, Any], tasks: int, deadline_s: float) -> None:
        self.report = Report(target=target)
        self._args, self._count, self._deadline_s = args, tasks, deadline_s
        self._kind: EnvironmentKind
        self._tasks: list[Task] = []
        self._scripts: list[Script] = []

    def run(self) -> None:
        """Every check, in order."""
        if self._check("it_loads", self._load):
            self._check_tasks()
            self._check_sessions()

    # --- the parts ----------------------------------------------------------------------------------------------------

    async def _load(self) -> None:
        self._kind = environment_kind(self.report.target)
        await settled(self._make().close())

    def _make(self) -> Environment:
        return self._kind.environment(self._args)

    def _source(self, split: str) -> TaskSource:
        if self._kind.tasks is None:
            raise NotShown("it brings no tasks; a recipe names them with `tasks`")
        return self._kind.tasks(split, 0, self._args)

    def _check_tasks(self) -> None:
        splits: list[str] = []

        async def find() -> None:
            missing = []
            for split in _SPLITS:
                try:
                    self._source(split).next(1)
                    splits.append(split)
                except ConfigError as error:
                    missing.append(f"{split}: {error}")
            if missing:
                raise EnvironmentFault("; ".join(missing))

        self._check("splits_have_tasks", find)
        context = TaskContext(make=self._source, splits=splits)
        for name, rule in TASK_SUITE.items():
            self._check(name, partial(rule, context), "" if splits else "there are no tasks")
        if "train" in splits:

            async def take() -> None:
                self._tasks = list(self._source("train").next(self._count))

            within(self._deadline_s, take)

    def _check_sessions(self) -> None:
        without = "" if self._tasks else "there is no task to play"
        can_play = self._check("it_plays", self._play, without)
        without = without or ("" if can_play else "no episode can be played")
        self._check("states_are_hashed", self._hashed, without)
        contexts = [] if without else within(self._deadline_s, self._contexts)
        for name, rule in ENVIRONMENT_SUITE.items():
            unseen = without
            if name == _NEEDS_AN_END and not unseen and not all(script.ends for script in self._scripts):
                unseen = _NO_END
            if name == "a_new_key_is_a_new_effect" and not unseen and contexts[0].effect is None:
                unseen = "no message changes the state each time that it is said"
            self._check(name, partial(self._for_each_task, rule, contexts), unseen)
        self._check("it_is_scored", self._scored, without)

    async def _play(self) -> None:
        for task in self._tasks:
            self._scripts.append(await script_for(self._make, task, task.seed))

    async def _hashed(self) -> None:
        if not all(script.hashed for script in self._scripts):
            raise NotShown("some state_hash is empty, so a replay can only compare what was said")

    async def _contexts(self) -> list[EnvironmentContext]:
        contexts = []
        for task, script in zip(self._tasks, self._scripts, strict=True):
            effect = await self._effect(task, script.messages[0])
            context = EnvironmentContext(
                make=self._make, task=task, script=script.messages, seed=task.seed, effect=effect
            )
            contexts.append(context)
        return contexts

    async def _effect(self, task: Task, message: Message) -> Message | None:
        """`message`, if saying it twice changes the state twice."""
        session = self._make()
        try:
            hashes = [(await settled(session.reset(task, task.seed))).state_hash]
            for key in ("one", "two"):
                hashes.append((await settled(session.step(message, key))).state_hash)
        except Exception:  # one step may be all that an episode has
            return None
        finally:
            await settled(session.close())
        return message if len(set(hashes)) == len(hashes) else None

    @staticmethod
    async def _for_each_task(
        rule: Callable[[EnvironmentContext], Awaitable[None]], contexts: Sequence[EnvironmentContext]
    ) -> None:
        for context in contexts:
            try:
                await rule(context)
            except AssertionError as error:
                raise AssertionError(f"task {context.task.task_id}: {error}") from error

    async def _scored(self) -> None:
        await is_scored(self._kind, self._make, self._tasks[0], self._scripts[0], self._deadline_s)

    # --- one check ----------------------------------------------------------------------------------------------------

    def _check(self, name: str, rule: Callable[[], Awaitable[None]], not_shown: str = "") -> bool:
        """Note how `rule` went; whether it holds."""
        about = ABOUT[name]
        outcome, explanation, mend = Outcome.OK, "", ""
        if not_shown:
            outcome, explanation = Outcome.NOT_SHOWN, not_shown
        else:
            try:
                within(self._deadline_s, rule)
            except NotFound:
                raise
            except NotShown as reason:
                outcome, explanation = Outcome.NOT_SHOWN, str(reason)
            except (Exception, SystemExit) as error:  # foreign code: whatever it raises is what is reported
                outcome, explanation, mend = Outcome.FAILED, _explained(error), about.mend
        finding = Finding(name=name, title=about.title, outcome=outcome, explanation=explanation, mend=mend)
        self.report.findings.append(finding)
        return outcome is Outcome.OK


def _explained(error: BaseException) -> str:
    """What went wrong, on one line; errors of the environment's own code name their file and line."""
    is_told = isinstance(error, AssertionError | ConfigError | DeadlineExceeded | EnvironmentFault)
    text = str(error) if is_told and str(error) and not own_frame(error) else described(error)
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
