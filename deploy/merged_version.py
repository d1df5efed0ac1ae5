"""A version that is an adapter, and its base, as one model folder: for everything that loads a model.

The folder lies in the node's cache under the adapter's content hash, and is made once.
"""

import shutil
from pathlib import Path

from headrace.deploy.new_folder import cached_folder
from headrace.platform.errors import EngineError, RegistryError


def merged_folder(base: Path, adapter: Path, target: Path) -> Path:
    """`target`, holding the base's files with the adapter added to its weights.

    Args:
        base: a folder with `model.safetensors`, as learners publish it.
        adapter: a folder of the same run with the adapter's files.
        target: may be there already; its name says what it holds.

    Raises:
        RegistryError: the two do not fit together.
    """
    if target.is_dir():
        return target
    from safetensors.torch import load_file

    from headrace.serving.adapters import add_adapter
    from headrace.trainer.weights import WEIGHT_FILE, tensor_file

    with cached_folder(target) as working:
        tensors = load_file(base / WEIGHT_FILE)
        try:
            add_adapter(tensors, str(adapter))
        except EngineError as error:
            raise RegistryError(str(error)) from error
        for file in base.iterdir():
            if file.is_file() and file.name != WEIGHT_FILE:
                shutil.copyfile(file, working / file.name)
        (working / WEIGHT_FILE).write_bytes(tensor_file(tensors))
    return target
