"""A password is given by reference and appears nowhere: not in the run root, logs, metrics or output."""

import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from command_line import environment, last_json, run

from headrace.platform.ledger.server import EmbeddedServer

pytestmark = pytest.mark.timeout(240)


def occurrences(folder: Path, secret: bytes) -> list[str]:
    """Files below `folder` that hold the secret, in their names or their bytes."""
    found = []
    for path in folder.rglob("*"):
        if secret.decode() in str(path) or (path.is_file() and secret in path.read_bytes()):
            found.append(str(path))
    return found


@pytest.fixture
def guarded(tmp_path):
    """A server behind a password: its port and the password."""
    with EmbeddedServer(tmp_path / "server", tcp=True) as server:
        url = urlsplit(server.url)
        yield url.port, url.password


@pytest.fixture
def ray_folder():
    with tempfile.TemporaryDirectory(prefix="hr-", dir="/tmp") as folder:
        yield Path(folder)


SMALL = ("model.tiny_llama=null", "sft=null", "learner.steps=2", "learner.batch_groups=4", "eval.tasks=16")


def test_a_marked_password_is_found_nowhere(guarded, lookup_model, tmp_path, ray_folder):
    port, password = guarded
    runs = tmp_path / "runs"
    env = environment(HEADRACE_TEST_PASSWORD=password, RAY_TMPDIR=str(ray_folder))
    reference = f"redis://:${{env:HEADRACE_TEST_PASSWORD}}@127.0.0.1:{port}/0"
    args = ["--redis-url", reference, f"model.path={lookup_model}", f"runs_dir={runs}", *SMALL, "--json"]
    code, out, err = run(tmp_path, "train", "lookup", *args, timeout_s=200, env=env)
    assert code == 0, err
    assert last_json(out)["equation_holds"]
    assert password not in out and password not in err
    (root,) = runs.iterdir()
    assert len(list(root.rglob("*"))) > 20
    assert occurrences(root, password.encode()) == []
    assert reference in (root / "config.yaml").read_text(), "what is stored is the reference"
    assert [file for file in occurrences(ray_folder, password.encode()) if Path(file).is_file()] == []


def test_a_wrong_password_is_refused_without_being_shown(guarded, lookup_model, tmp_path, ray_folder):
    port, password = guarded
    wrong = f"wrong-{password}"
    env = environment(HEADRACE_TEST_PASSWORD=wrong, RAY_TMPDIR=str(ray_folder))
    reference = f"redis://:${{env:HEADRACE_TEST_PASSWORD}}@127.0.0.1:{port}/0"
    args = ["--redis-url", reference, f"model.path={lookup_model}", f"runs_dir={tmp_path / 'runs'}", *SMALL]
    code, out, err = run(tmp_path, "train", "lookup", *args, timeout_s=120, env=env)
    assert code == 1
    assert "refused the password" in err and "Traceback" not in err
    assert password not in out + err
    assert occurrences(tmp_path / "runs", password.encode()) == []


def test_a_missing_password_is_named_before_anything_starts(lookup_model, tmp_path, ray_folder):
    env = environment(RAY_TMPDIR=str(ray_folder))
    args = ["--redis-url", "redis://:${env:HEADRACE_NO_SUCH_SECRET}@127.0.0.1:1/0", f"model.path={lookup_model}"]
    code, _, err = run(tmp_path, "train", "lookup", *args, *SMALL, timeout_s=120, env=env)
    assert code == 2
    assert "HEADRACE_NO_SUCH_SECRET" in err and "Traceback" not in err
    assert not (tmp_path / "runs").exists() and not list(ray_folder.iterdir())
