"""A version of a run as a Hugging Face folder that anything loads: weights as they are stored, or converted.

The registry's files are checked by hash before they are copied, and the folder appears whole or not at all. A version
that is an adapter over a base (LoRA) is exported as an adapter folder, or merged into its base on request. The model
card (model_card.py) says where the weights come from.
"""

import asyncio
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from headrace.deploy.model_card import ADAPTER, lineage, model_card, stored_manifests
from headrace.deploy.new_folder import check_new_folder, new_folder
from headrace.deploy.stored_version import open_version
from headrace.platform.errors import ConfigError
from headrace.platform.records.versions import VersionManifest
from headrace.platform.store.run_root import RunRoot

DTYPES = ("float32", "bfloat16", "float16")
_CONFIG, _ADAPTER_CONFIG = "config.json", "adapter_config.json"
# Parts of a checkpoint that are the learner's own.
_NOT_A_MODEL = (".pt",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """What was written: `files` by name, `merged` when an adapter was merged into its base."""

    path: Path
    version: int
    content_hash: str
    files: tuple[str, ...]
    merged: bool = False


def export_version(root: RunRoot, wanted: str, out: Path, *, merge: bool = False, dtype: str = "") -> Export:
    """Write a version of a run to the new folder `out`.

    Args:
        root: the run.
        wanted: a number, `latest` or `best`.
        out: must not exist yet.
        merge: merge an adapter into its base.
        dtype: one of `DTYPES` for the floating-point tensors; empty keeps them as they are stored.

    Raises:
        ConfigError: `out` exists or cannot be made, the version is no adapter to merge, its base is not there, peft is
            not installed, or an unknown dtype.
        NotFound: there is no such version; names those that are there.
        RegistryError: its files are torn or altered, or its lineage does not hold together.
        RunFailed: `out` appeared meanwhile; says where the result is.
    """
    check_new_folder(out)
    if dtype and dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: known are {', '.join(DTYPES)}")
    manifest, folder = asyncio.run(open_version(root, wanted, as_stored=True))
    if merge and manifest.kind != ADAPTER:
        raise ConfigError(f"version {manifest.ref.number} holds whole weights; there is no adapter to merge")
    ancestors = lineage(root, manifest)
    with new_folder(out) as working:
        if merge:
            _merge(root, manifest, folder, working)
        else:
            for name in manifest.files:
                if not name.endswith(_NOT_A_MODEL):
                    shutil.copyfile(folder / name, working / name)
        if dtype:
            _convert(working, dtype)
        (working / "README.md").write_text(model_card(root, manifest, ancestors, merged=merge))
        files = tuple(sorted(path.name for path in working.iterdir()))
    return Export(path=out, version=manifest.ref.number, content_hash=manifest.content_hash, files=files, merged=merge)


# --- adapters ---------------------------------------------------------------------------------------------------------


def _merge(root: RunRoot, manifest: VersionManifest, folder: Path, working: Path) -> None:
    """Write base and adapter as one model."""
    import transformers

    from headrace.trainer.model import load_folder, save_folder
    from headrace.trainer.weights import tokenizer_files

    try:
        from peft import PeftModel
    except ImportError:
        raise ConfigError("merging an adapter needs peft: pip install 'headrace[lora]'") from None
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    base = _base_folder(root, manifest, folder)
    merged = PeftModel.from_pretrained(load_folder(base), folder, local_files_only=True).merge_and_unload()
    own = {name: data for name, data in tokenizer_files(folder).items() if name != _ADAPTER_CONFIG}
    save_folder(merged, working, {**tokenizer_files(base), **own})


def _base_folder(root: RunRoot, manifest: VersionManifest, folder: Path) -> Path:
    """The folder of the adapter's base: the version of this run with the base's hash, or what the adapter names."""
    if manifest.ref.base_hash:
        alike = [each.ref.number for each in stored_manifests(root) if each.content_hash == manifest.ref.base_hash]
        if alike:
            return asyncio.run(open_version(root, str(max(alike))))[1]
    named = str(json.loads((folder / _ADAPTER_CONFIG).read_text()).get("base_model_name_or_path") or "")
    if not named or not (Path(named) / _CONFIG).is_file():
        raise ConfigError(
            f"the base of the adapter, {named or 'which it does not name'}, is no model folder here; export without"
            " --merge, and merge where it is"
        )
    return Path(named)


# --- conversion -------------------------------------------------------------------------------------------------------


def _convert(folder: Path, dtype: str) -> None:
    """Write every floating-point tensor in `folder` anew, and say so in its configuration."""
    import torch
    from safetensors.torch import load_file, save_file

    wanted = getattr(torch, dtype)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        converted = {name: t.to(wanted) if t.is_floating_point() else t for name, t in tensors.items()}
        save_file(converted, file, metadata={"format": "pt"})
    config = folder / _CONFIG
    if config.is_file():
        settings = json.loads(config.read_text())
        settings.pop("torch_dtype", None)
        config.write_text(json.dumps({**settings, "dtype": dtype}, indent=2) + "\n")
