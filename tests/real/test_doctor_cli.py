"""`headrace doctor` on the machine that the tests run on."""

import tempfile
import time
from pathlib import Path

import psutil
from command_line import environment, last_json, run

LONGEST_S = 30.0  # ten on an idle machine


def test_this_machine_can_run_lookup(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    env = environment(TMPDIR=str(scratch))
    began = time.monotonic()
    code, out, err = run(tmp_path, "doctor", "--json", timeout_s=LONGEST_S, env=env)
    report = last_json(out)
    assert code == 0 and report["ok"], (out, err)
    assert err == "" and time.monotonic() - began < LONGEST_S
    status = {(check["group"], check["name"]): check["status"] for check in report["checks"]}
    for name in ("python", "runs folder", "cache folder"):
        assert status["machine", name] in ("ok", "warn")
    assert status["servers", "embedded valkey"] == status["engines", "ray"] == status["engines", "torch"] == "ok"
    assert status["sandboxes", "unsafe-process"] == "ok"
    assert all(set(check) == {"group", "name", "status", "detail", "fix"} for check in report["checks"])
    left = [p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get("TMPDIR") == str(scratch)]
    assert left == [] and list(scratch.iterdir()) == [] and not (tmp_path / "runs").exists()


def test_a_given_server_is_asked(valkey_url: str, tmp_path: Path) -> None:
    code, out, _ = run(tmp_path, "doctor", "--redis-url", valkey_url, "--json", timeout_s=LONGEST_S)
    assert code == 0
    (check,) = [check for check in last_json(out)["checks"] if check["name"] == "queue.redis_url"]
    assert check["status"] == "ok" and "version" in check["detail"]


def test_no_secret_of_a_given_server_is_shown(tmp_path: Path) -> None:
    with tempfile.NamedTemporaryFile("w", dir=tmp_path) as file:
        file.write("hunter2")
        file.flush()
        url = f"redis://:${{file:{file.name}}}@127.0.0.1:1/0"
        code, out, err = run(tmp_path, "doctor", "--redis-url", url, timeout_s=LONGEST_S)
    assert code == 1
    assert "queue.redis_url" in out and "127.0.0.1:1/0" in out
    assert "hunter2" not in out + err
