"""`headrace approvals`: the calls of a run that wait for somebody's word, and that word."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.deploy.cli.options import Json, RunName, RunsDir, answer_json

if TYPE_CHECKING:
    from headrace.actors.gateway.decisions.approval_queue import Question

_SHOWN_CHARS = 400


def approvals(
    run: RunName,
    grant: Annotated[str, typer.Option("--grant", help="Say yes to the call with this id, or a unique prefix.")] = "",
    deny: Annotated[str, typer.Option("--deny", help="Say no to it.")] = "",
    runs_dir: RunsDir = "runs",
    as_json: Json = False,
) -> None:
    """Show the calls that cannot be undone and wait to be approved, or answer one.

    Works on the node on which the run's gateway is, for recipes with `permissions.approvals: queue`. An answer counts
    once, for that very call.
    """
    from headrace.actors.gateway.decisions.approval_queue import questions, reply
    from headrace.actors.gateway.decisions.approvals import FOLDER
    from headrace.platform.errors import ConfigError
    from headrace.platform.store.run_root import RunRoot

    if grant and deny:
        raise ConfigError("give --grant or --deny, not both")
    folder = RunRoot.find(runs_dir, run).local("gateway") / FOLDER
    now_s = time.time()
    if grant or deny:
        answered = reply(folder, grant or deny, bool(grant), now_s)
        said = "granted" if grant else "denied"
        if as_json:
            answer_json({"answer": said, **_facts(answered, now_s)})
        else:
            typer.echo(f"{said}: {_call(answered)}")
        return
    waiting = questions(folder, now_s)
    if as_json:
        answer_json({"waiting": [_facts(question, now_s) for question in waiting]})
    elif waiting:
        typer.echo("\n".join(_shown(question, now_s) for question in waiting))
    else:
        typer.echo("no call waits to be approved")


def _facts(question: "Question", now_s: float) -> dict[str, Any]:
    return {
        "id": question.question_id,
        "tool": question.tool,
        "arguments": question.arguments,
        "arguments_hash": question.arguments_hash,
        "episode": question.scope.partition("#")[0],
        "key": question.key,
        "taint": list(question.taint),
        "left_s": round(question.deadline_s - now_s, 1),
    }


def _call(question: "Question") -> str:
    """The call on one line; escaped, for a model wrote it."""
    import json

    text = json.dumps(question.arguments)
    left_out = f"… ({len(text)} characters; --json shows all)" if len(text) > _SHOWN_CHARS else ""
    return f"{json.dumps(question.tool)[1:-1]} {text[:_SHOWN_CHARS]}{left_out}"


def _shown(question: "Question", now_s: float) -> str:
    facts = _facts(question, now_s)
    derived = f", arguments derived from {', '.join(question.taint)}" if question.taint else ""
    return (
        f"{facts['id']}  {_call(question)}\n"
        f"  episode {facts['episode']}, {facts['left_s']:.0f} s left to answer{ascii(derived)[1:-1]}"
    )
