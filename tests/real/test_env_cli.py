"""`headrace env` as people run it: a process with an exit code, which also ends when the environment never does."""

import time

from command_line import last_json, run

HANGS = """\
import threading
import headrace

class World(headrace.ReplayedEnvironment):
    name, version = "world", "1"

    @staticmethod
    def tasks(split, seed):
        first = {"train": 0, "dev": 50, "hidden": 60}[split]
        return [{"n": first + n} for n in range(10)]

    def tools(self):
        return ()

    def _reset(self, task, seed):
        return headrace.Observation((headrace.Message(headrace.Role.USER, "go"),))

    def _step(self, message):
        threading.Event().wait()
"""


def test_a_new_environment_passes_its_check(tmp_path):
    code, out, err = run(tmp_path, "env", "new", "word_game", "--door", "tools", timeout_s=60)
    assert code == 0, err
    assert "headrace env check ./word_game.py:WordGame" in out
    assert "headrace train ./word_game.py:WordGame model.path=FOLDER" in out
    code, out, err = run(tmp_path, "env", "check", "./word_game.py:WordGame", timeout_s=60)
    assert code == 0, out + err
    assert "29 ok, 0 failed" in out
    assert "not shown an" not in out
    code, _, err = run(tmp_path, "env", "new", "word_game", timeout_s=60)
    assert (code, "is there already" in err) == (2, True)


def test_a_hanging_environment_is_found_and_the_command_ends(tmp_path):
    (tmp_path / "world.py").write_text(HANGS)
    began = time.monotonic()
    code, out, err = run(tmp_path, "env", "check", "world.py:World", "--deadline", "1", "--json", timeout_s=60)
    assert code == 1, err
    assert time.monotonic() - began < 40
    report = last_json(out)
    assert (report["passed"], report["counts"]["failed"]) == (False, 1)
    (failed,) = [check for check in report["checks"] if check["outcome"] == "failed"]
    assert (failed["name"], failed["explanation"]) == ("it_plays", "step gave no answer within 1 s")
    assert failed["mend"]


def test_failures_are_told_with_their_line_and_how_to_mend_them(tmp_path):
    (tmp_path / "world.py").write_text(HANGS.replace("threading.Event().wait()", "return self.board"))
    code, out, _ = run(tmp_path, "env", "check", "./world.py:World", timeout_s=60)
    assert code == 1
    assert "world.py:19 in _step: AttributeError" in out
    assert "1 failed" in out


def test_wrong_usage_is_told_apart_from_a_failed_check(tmp_path):
    for args, said in (
        (("env", "check", "lokup"), "did you mean 'lookup'"),
        (("env", "check", "lookup", "--args", "[1]"), "must be a JSON object"),
        (("env", "check", "lookup", "--args", "{"), "is no JSON"),
    ):
        code, _, err = run(tmp_path, *args, timeout_s=60)
        assert (code, said in err) == (2, True), err
