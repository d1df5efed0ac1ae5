"""Runs every check that an environment can be given without a model, each under a deadline.

Owns the order of the checks and what their outcomes mean. `failed` is a rule that is broken; `not shown` is one that
could not be looked at, because an earlier one failed or because no script led there. The rules are those of the
conformance suites in platform/testing.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, TypeVar

from headrace.actors.environments.kind import EnvironmentKind
from headrace.actors.environments.registry import environment_kind
from headrace.actors.frames import described, own_frame
from headrace.deploy.environment_check.explanations import ABOUT
from headrace.deploy.environment_check.patience import within
from headrace.deploy.environment_check.scoring import NotShown, is_scored
from headrace.deploy.environment_check.scripts import MOST_TURNS, Script, script_for
from headrace.deploy.environment_check.sessions import Calls, Provide, TimedSession, sessions_of
from headrace.platform.config.sandbox import SandboxConfig
from headrace.platform.contracts import Environment, TaskSource
from headrace.platform.errors import ConfigError, DeadlineExceeded, EnvironmentFault, NotFound
from headrace.platform.records.message import HashPair, Message, Task
from headrace.platform.testing.conformance.environment import ENVIRONMENT_SUITE, EnvironmentContext
from headrace.platform.testing.conformance.support import settled
from headrace.platform.testing.conformance.tasks import TASK_SUITE, TaskContext

T = TypeVar("T")
_SPLITS = ("train", "dev", "hidden")
_NEEDS_AN_END = "the_script_ends_once"
_NO_END = f"no script ended the episode within {MOST_TURNS} turns; give the environment demonstrate(task)"
_LONGEST = 400
_CALLS = 20
"""A check may take so many times as long as one of its calls: it plays several sessions of several tasks."""


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
    target: str,
    args: Mapping[str, Any] | None = None,
    tasks: int = 3,
    deadline_s: float = 20.0,
    sandbox: SandboxConfig | None = None,
    provide: Provide | None = None,
) -> Report:
    """Check the environment that `target` names.

    Args:
        target: as `EnvironmentConfig.name`: a registered name, `./file.py:Name`, `package.module:Name`.
        args: the recipe's arguments of it.
        tasks: how many training tasks are played.
        deadline_s: how long one call of the environment, or of a source of tasks, may take.
        sandbox: the box that its tools run in, as in a recipe.
        provide: who makes boxes; None is as in a run.

    Raises:
        NotFound: nothing is registered under that name.
    """
    checker = _Checker(target, dict(args or {}), tasks, deadline_s, sandbox, provide)
    checker.run()
    return checker.report


class _Checker:
    def __init__(
        self,
        target: str,
        args: dict[str, Any],
        tasks: int,
        deadline_s: float,
        sandbox: SandboxConfig | None,
        provide: Provide | None,
    ) -> None:
        self.report = Report(target=target)
        self._args, self._count, self._deadline_s = args, tasks, deadline_s
        self._sandbox, self._provide = sandbox, provide
        self._kind: EnvironmentKind
        self._make_plain: Callable[[], Environment]
        self._calls = Calls(deadline_s)
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
        async with sessions_of(self._kind, self._args, self._sandbox, self._provide) as make:
            await settled(make().close())

    def _make(self) -> Environment:
        return TimedSession(self._make_plain(), self._calls)

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
        can_play = self._check_played("it_plays", self._play, without)
        without = without or ("" if can_play else "no episode can be played")
        self._check("states_are_hashed", self._hashed, without)
        contexts = [] if without else self._contexts()
        for name, rule in ENVIRONMENT_SUITE.items():
            unseen = without
            if name == _NEEDS_AN_END and not unseen and not all(script.ends for script in self._scripts):
                unseen = _NO_END
            if name == "a_new_key_is_a_new_effect" and not unseen and contexts[0].effect is None:
                unseen = "no message changes the state each time that it is said"
            self._check_played(name, partial(self._for_each_task, rule, contexts), unseen)
        self._check_played("it_is_scored", self._scored, without)

    def _check_played(self, name: str, rule: Callable[[], Awaitable[None]], not_shown: str) -> bool:
        """`_check` for a rule that makes sessions."""
        return self._check(name, partial(self._with_sessions, rule), not_shown, _CALLS * self._deadline_s)

    async def _with_sessions(self, rule: Callable[[], Awaitable[T]]) -> T:
        """Have what sessions need for as long as `rule` runs, on the event loop that it runs on."""
        async with sessions_of(self._kind, self._args, self._sandbox, self._provide) as make:
            self._make_plain = make
            return await rule()

    async def _play(self) -> None:
        for task in self._tasks:
            self._scripts.append(await script_for(self._make, task, task.seed))

    async def _hashed(self) -> None:
        if not all(script.hashed for script in self._scripts):
            raise NotShown("some state_hash is empty, so a replay can only compare what was said")

    def _contexts(self) -> list[EnvironmentContext]:
        return [
            EnvironmentContext(
                make=self._make,
                task=task,
                script=script.messages,
                seed=task.seed,
                effect=self._effect(task, script.messages[0]),
                deadline_s=self._deadline_s,
            )
            for task, script in zip(self._tasks, self._scripts, strict=True)
        ]

    def _effect(self, task: Task, message: Message) -> Message | None:
        """`message`, if saying it twice changes the state twice."""

        async def hashes() -> set[HashPair]:
            session = self._make()
            seen = [(await settled(session.reset(task, task.seed))).state_hash]
            for key in ("one", "two"):
                seen.append((await settled(session.step(message, key))).state_hash)
            await settled(session.close())
            return set(seen)

        try:
            found = within(_CALLS * self._deadline_s, partial(self._with_sessions, hashes))
        except (Exception, SystemExit):  # one step may be all that an episode has
            return None
        return message if len(found) == 3 else None

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
        await is_scored(self._kind, self._make_plain, self._tasks[0], self._scripts[0], self._deadline_s)

    # --- one check ----------------------------------------------------------------------------------------------------

    def _check(
        self, name: str, rule: Callable[[], Awaitable[None]], not_shown: str = "", deadline_s: float | None = None
    ) -> bool:
        """Note how `rule` went, and whether within `deadline_s` (one call's where None); whether it holds."""
        about = ABOUT[name]
        outcome, explanation, mend = Outcome.OK, "", ""
        if not_shown:
            outcome, explanation = Outcome.NOT_SHOWN, not_shown
        else:
            try:
                self._calls = Calls(self._deadline_s)
                within(deadline_s or self._deadline_s, rule, self._calls)
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
