"""`headrace inspect`: what a run, or one of its episodes, is made of."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.deploy.cli.options import Json, RunName, RunsDir, answer_json

if TYPE_CHECKING:
    from rich.console import Console

    from headrace.platform.store.run_root import RunRoot


def inspect(
    run: RunName,
    episode: Annotated[str, typer.Argument(help="An episode id, or any unique prefix of it.")] = "",
    runs_dir: RunsDir = "runs",
    as_json: Json = False,
) -> None:
    """Show a run's summary and episodes, or one episode token by token.

    Without EPISODE: the summary and some episodes to look at. With EPISODE: every turn, with prompt, trained and masked
    tokens told apart, versions, rewards, hashes and status, and its training receipt: what the loss made of it, or why
    it was not trained.
    """
    from headrace.deploy.inspection import episode_facts, run_facts
    from headrace.platform.store.run_root import RunRoot

    root = RunRoot.find(runs_dir, run)
    if not episode:
        facts = run_facts(root)
        if as_json:
            answer_json(facts)
        else:
            _print_run(root, facts)
        return
    facts = episode_facts(root, episode)
    if as_json:
        answer_json(facts)
    else:
        _print_episode(facts)


def _console() -> "Console":
    """What a tool or a model said is shown as it is: brackets are no markup."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


def _print_run(root: "RunRoot", facts: dict[str, Any]) -> None:
    from rich.table import Column, Table
    from rich.text import Text

    console = _console()
    console.print(Text.assemble((root.name, "bold"), f"  {root.url}"))
    for key, value in facts["summary"].items():
        if key not in ("run", "root", "sft"):
            console.print(f"  {key:18} {value}")
    columns = ("episode_id", "purpose", "version", "status", "turns", "score", "fate")
    table = Table(*(Column(column, no_wrap=True) for column in columns), box=None, padding=(0, 1))
    for row in facts["episodes"]:
        table.add_row(*(str(row[column]) for column in columns))
    console.print(table)
    console.print(f"{facts['episode_count']} episodes are stored. One of them:  headrace inspect {root.name} EPISODE")


def _print_episode(facts: dict[str, Any]) -> None:
    from rich.text import Text

    console = _console()
    styles = {"prompt": "dim", "trained": "bold green", "masked": "yellow", "action": "cyan"}
    console.print(Text.assemble((facts["episode_id"], "bold"), f"  {facts['purpose']}  {facts['environment']}"))
    for key in ("task", "seed", "version", "status", "stop_reason", "fault", "fate", "duration_s", "final_state_hash"):
        console.print(f"  {key:18} {facts[key]}")
    if facts["parent_episode"]:
        console.print(f"  {'branched off':18} {facts['parent_episode']} after its step {facts['branch_step']}")
    _print_training(console, facts["training"])
    legend = Text("  tokens: ")
    for name, style in styles.items():
        legend.append(f" {name} ", style=style)
    console.print(legend)
    for turn in facts["turns"]:
        credit = f"  advantage {turn['advantage']:+.4f}" if turn["advantage"] is not None else ""
        sampled = f"  versions {turn['versions']}{credit}" if turn["versions"] else ""
        console.print(Text.assemble((f"\nturn {turn['turn']}", "bold"), f" {turn['role']}  {turn['status']}{sampled}"))
        line = Text("  ")
        for token in turn["tokens"]:
            line.append(token["text"], style=styles[token["kind"]])
        console.print(line)
        hashes = {"observation": turn["observation_hash"], "state": turn["state_hash"]}
        console.print("  " + "  ".join(f"{name} {value[:12]}" for name, value in hashes.items() if value), style="dim")
    for reward in facts["rewards"]:
        console.print(
            f"\nreward {reward['kind']}: {reward['value'] if reward['valid'] else 'invalid'}  {reward['evidence']}"
        )


def _print_training(console: "Console", facts: dict[str, Any]) -> None:
    """The receipt, or why there is none."""
    if not facts["trained"]:
        console.print(f"  {'not trained':18} {facts['why']}")
        return
    step = f"learner step {facts['step']}, " if facts["step"] is not None else ""
    again = f", before that by {', '.join(f'v{version}' for version in facts['before'])}" if facts["before"] else ""
    console.print(f"  {'trained':18} {step}version {facts['version']}{again}, lag {facts['lag']}")
    console.print(
        f"  {'loss':18} {facts['loss_tokens']} of {facts['action_tokens']} sampled tokens,"
        f" ratio mean {facts['ratio_mean']:.4f}, clip share {facts['clip_share']:.4f}"
    )
    told = ", ".join(f"{value:+.4f}" for value in facts["advantages"])
    console.print(f"  {'advantages':18} {told}")
    for span in facts["masked"]:
        where = f"turn {span['turn']} tokens [{span['start']}, {span['end']})"
        console.print(f"  {'masked':18} {where}: {span['reason']}, {span['why']}")
    if facts["unaccounted"]:
        console.print(f"  {'unaccounted':18} {facts['unaccounted']} sampled tokens are neither in the loss nor masked")
