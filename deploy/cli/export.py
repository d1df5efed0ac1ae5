"""`headrace export`: a version of a run as a Hugging Face folder."""

from pathlib import Path
from typing import Annotated

import typer

from headrace.deploy.cli.options import Json, RunName, RunsDir, answer_json


def export(
    run: RunName,
    out: Annotated[str, typer.Option(help="The folder to write; it must not exist yet.", show_default=False)],
    version: Annotated[str, typer.Option(help="A number, latest, or best.")] = "latest",
    merge: Annotated[bool, typer.Option("--merge", help="Merge an adapter (LoRA) into its base; needs peft.")] = False,
    dtype: Annotated[str, typer.Option(help="Convert to float32, bfloat16 or float16; as stored without it.")] = "",
    runs_dir: RunsDir = "runs",
    as_json: Json = False,
) -> None:
    """Write a version of a run as a Hugging Face folder. Try: headrace export lookup --out model

    Weights, configuration, tokenizer and chat template as they are stored, checked by hash, with a model card that says
    where they come from. transformers loads the folder as it is.
    """
    from headrace.deploy.export import export_version
    from headrace.platform.store.run_root import RunRoot

    done = export_version(RunRoot.find(runs_dir, run), version, Path(out).resolve(), merge=merge, dtype=dtype)
    if as_json:
        answer_json(
            {
                "path": str(done.path),
                "version": done.version,
                "content_hash": done.content_hash,
                "files": list(done.files),
                "merged": done.merged,
            }
        )
    else:
        typer.echo(f"version {done.version} is in {done.path}: {', '.join(done.files)}")
