import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from headrace.platform.config import RunConfig
from headrace.platform.config.explain import keys_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def config_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("config_docs", ROOT / "scripts/config_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_names_every_key() -> None:
    page = (ROOT / "docs/configuration.md").read_text()
    missing = [key for key in keys_of(RunConfig) if f"| `{key}` |" not in page]
    assert not missing, f"run `python scripts/config_docs.py`; docs/configuration.md lacks {missing}"


def test_the_page_is_what_the_models_say(config_docs: ModuleType) -> None:
    assert (ROOT / "docs/configuration.md").read_text() == config_docs.render(), "run `python scripts/config_docs.py`"


def test_keys_are_found_in_nested_sections_and_lists() -> None:
    keys = set(keys_of(RunConfig))
    assert {"seed", "environments[].budgets.max_turns", "model.tiny_llama.heads", "sft.stages[].lr"} <= keys
    assert "learner.betas[]" not in keys
