"""A user's objects by file and module; what goes wrong names the file and line."""

import sys

import pytest

from headrace.actors.frames import defined_at, described, own_frame
from headrace.actors.siblings import _SiblingFinder
from headrace.actors.targets import is_target, load_target, target_digest, target_label, user_frame
from headrace.platform.errors import ConfigError


@pytest.fixture(autouse=True)
def _clean_path(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", list(sys.path))
    others = [finder for finder in sys.meta_path if not isinstance(finder, _SiblingFinder)]
    monkeypatch.setattr(sys, "meta_path", others)  # whatever other tests have claimed in this process
    yield
    for name in [name for name, module in sys.modules.items() if str(tmp_path) in repr(module)]:
        del sys.modules[name]


def written(folder, name, text):
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(text)
    return file


def test_a_file_is_loaded_once_by_whatever_path(tmp_path, monkeypatch):
    file = written(tmp_path, "sums.py", "made = []\nclass Sums:\n    inner = 7\n")
    monkeypatch.chdir(tmp_path)
    value, origin = load_target(f"{file}:made")
    assert load_target("./sums.py:made")[0] is load_target("sums.py:made")[0] is value
    assert (origin.target, origin.file) == (f"{file}:made", file)
    assert load_target("./sums.py:Sums.inner")[0] == 7


def test_two_files_of_one_name_stay_apart(tmp_path):
    one = written(tmp_path / "one", "sums.py", "value = 1\n")
    two = written(tmp_path / "two", "sums.py", "value = 2\n")
    assert [load_target(f"{file}:value")[0] for file in (one, two, one)] == [1, 2, 1]


def test_classes_of_a_file_know_their_module(tmp_path):
    file = written(
        tmp_path,
        "data.py",
        "from __future__ import annotations\n"
        "from dataclasses import dataclass, field\n"
        "@dataclass\nclass Row:\n    names: list[str] = field(default_factory=list)\n",
    )
    row, _ = load_target(f"{file}:Row")
    assert sys.modules[row.__module__].Row is row


def test_siblings_can_be_imported_at_once_and_later(tmp_path):
    written(tmp_path, "first_sibling_of_test.py", "value = 1\n")
    written(tmp_path, "later_sibling_of_test.py", "value = 2\n")
    file = written(
        tmp_path,
        "sums.py",
        "from first_sibling_of_test import value\n"
        "def later():\n    import later_sibling_of_test\n    return later_sibling_of_test.value\n",
    )
    before = list(sys.path)
    later, _ = load_target(f"{file}:later")
    assert later() == 2
    assert sys.path == [*before, str(tmp_path)], "what is installed comes first"


def maze(folder, text="import sibling_of_test\ndef f():\n    return sibling_of_test.value\n", **siblings):
    for name, source in siblings.items():
        written(folder, f"{name}.py", source)
    return written(folder, "maze.py", text)


LATER = "def f():\n    import sibling_of_test\n    return sibling_of_test.value\n"


@pytest.mark.parametrize("text", ["import sibling_of_test\ndef f():\n    return sibling_of_test.value\n", LATER])
@pytest.mark.parametrize("first", ["import sibling_of_test\nf = 1\n", LATER])
def test_the_sibling_of_another_folder_is_never_taken_for_ones_own(tmp_path, first, text):
    one = maze(tmp_path / "one", first, sibling_of_test="value = 1\n")
    two = maze(tmp_path / "two", text, sibling_of_test="value = 2\n")
    load_target(f"{one}:f")
    with pytest.raises(ConfigError) as caught:
        load_target(f"{two}:f")
    message = str(caught.value)
    assert f"{two} imports sibling_of_test, which means {tmp_path}/two/sibling_of_test.py" in message
    assert f"belongs to {tmp_path}/one/sibling_of_test.py: rename one of the two" in message
    assert "package.maze:NAME" in message


def test_a_sibling_that_nobody_asked_for_is_in_nobodys_way(tmp_path):
    one = maze(tmp_path / "one", "f = 1\n", sibling_of_test="value = 1\n")
    two = maze(tmp_path / "two", LATER, sibling_of_test="value = 2\n")
    load_target(f"{one}:f")
    assert load_target(f"{two}:f")[0]() == 2


def test_siblings_of_siblings_and_packages_are_seen(tmp_path):
    one = maze(tmp_path / "one", sibling_of_test="value = 1\n")
    two = maze(tmp_path / "two", "import between\nf = 1\n", sibling_of_test="value = 2\n", between="import package\n")
    written(tmp_path / "two" / "package", "__init__.py", "from package.part import value\n")
    written(tmp_path / "two" / "package", "part.py", "from sibling_of_test import value\n")
    load_target(f"{one}:f")
    with pytest.raises(ConfigError, match=r"two/maze\.py imports sibling_of_test"):
        load_target(f"{two}:f")


def test_a_folder_of_modules_is_a_sibling_too(tmp_path):
    files = []
    for number, name in enumerate(("one", "two")):
        files.append(maze(tmp_path / name, "from lib_of_test.part import value\n"))
        written(tmp_path / name / "lib_of_test", "part.py", f"value = {number}\n")
    assert load_target(f"{files[0]}:value")[0] == 0
    with pytest.raises(ConfigError, match=r"means .*two/lib_of_test, but .* belongs to .*one/lib_of_test"):
        load_target(f"{files[1]}:value")


@pytest.mark.parametrize(("name", "owner"), [("queue", "the standard library"), ("msgspec", ".*msgspec/__init__")])
def test_a_sibling_that_is_called_like_an_installed_module_is_refused(tmp_path, name, owner):
    file = maze(tmp_path, f"def f():\n    import {name}\n", **{name: ""})
    with pytest.raises(ConfigError, match=rf"imports {name}, .* belongs to {owner}"):
        load_target(f"{file}:f")
    assert load_target(f"{written(tmp_path, 'other.py', 'f = 1')}:f")[0] == 1, "it is nobody's unless it is imported"


def test_a_folder_of_data_hides_no_module(tmp_path):
    written(tmp_path / "msgspec", "make.py", "")
    value, _ = load_target(f"{written(tmp_path, 'sums.py', 'import msgspec')}:msgspec.json")
    assert value is sys.modules["msgspec.json"]


def test_a_module_is_found_by_its_name():
    value, origin = load_target("headrace.platform.errors:ConfigError")
    assert value is ConfigError
    assert origin.file.name == "errors.py"
    assert origin.target == "headrace.platform.errors:ConfigError"


@pytest.mark.parametrize(
    ("text", "target", "message"),
    [
        ("x = 1", "nothing.py:x", r"there is no file .*nothing\.py$"),
        ("x = 1", "sumz.py:x", r"there is no file .*sumz\.py; did you mean sums\.py"),
        ("Sums = 1", "sums.py:Sumz", r"sums\.py has no 'Sumz'; did you mean 'Sums'"),
        ("", "sums.py:Sums", r"sums\.py has no 'Sums'$"),
        ("a = 1\n\nSums = b\n", "sums.py:Sums", r"^sums\.py:3: NameError: name 'b' is not defined"),
        ("def f():\n    return {}['k']\nSums = f()\n", "sums.py:Sums", r"^sums\.py:2 in f: KeyError: 'k'"),
        ("a = (\n", "sums.py:Sums", r"^sums\.py:1: SyntaxError: '\(' was never closed"),
        ("import sys\nsys.exit(2)\n", "sums.py:Sums", r"^sums\.py:2: SystemExit: 2"),
        ("import no_such_package\n", "sums.py:Sums", r"^sums\.py:1: ModuleNotFoundError: No module named"),
        ("import json\njson.loads('{')\n", "sums.py:Sums", r"^sums\.py:2: JSONDecodeError"),
        ("import headrace\nSums = headrace.SingleTurn([], reward=3)\n", "sums.py:Sums", r"^sums\.py:2: reward must be"),
        ("import broken_sibling\n", "sums.py:Sums", r"^broken_sibling\.py:2: ZeroDivisionError"),
    ],
)
def test_what_goes_wrong_names_file_and_line(tmp_path, text, target, message):
    written(tmp_path, "sums.py", text)
    written(tmp_path, "broken_sibling.py", "\n1 / 0\n")
    with pytest.raises(ConfigError, match=message):
        load_target(f"{tmp_path}/{target}")


def test_a_file_that_was_mended_loads(tmp_path):
    file = written(tmp_path, "sums.py", "value = 1 / 0\n")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        load_target(f"{file}:value")
    file.write_text("value = 1 / 2  # mended\n")
    assert load_target(f"{file}:value")[0] == 0.5


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_such_module.x:Y", "there is no module 'no_such_module'"),
        ("headrace.no_such:Y", "there is no module 'headrace.no_such'"),
        ("headrace.platform.errors:ConfigErrors", "headrace.platform.errors has no 'ConfigErrors'; did you mean"),
        ("./sums:Sums", "neither a file that ends in .py nor the name of a module"),
        ("sums.py", "write ./file.py:Name"),
        (":Sums", "write ./file.py:Name"),
        ("sums.py:a-b", "write ./file.py:Name"),
    ],
)
def test_what_names_nothing_is_explained(target, message):
    with pytest.raises(ConfigError, match=message):
        load_target(target)


def test_a_module_that_breaks_names_its_line(tmp_path, monkeypatch):
    written(tmp_path, "breaks_when_imported.py", "\n\nx = 1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"^breaks_when_imported\.py:3: ZeroDivisionError"):
        load_target("breaks_when_imported:x")


def test_digests_follow_the_content_without_loading(tmp_path):
    one = written(tmp_path, "one.py", "raise SystemExit\n")
    two = written(tmp_path, "two.py", "raise SystemExit\n")
    assert target_digest(f"{one}:X") == target_digest(f"{two}:X") != target_digest("headrace.platform.errors:X")
    assert target_digest(f"{tmp_path}/three.py:X") == target_digest("no_such_module.x:X") == ""
    assert target_label(f"{one}:X") == "one.py:X"
    assert [is_target(name) for name in ("lookup", "a:b", "./f.py:X", ":x", "x:")] == [False, True, True, False, False]


# --- frames -----------------------------------------------------------------------------------------------------------


def raised(act):
    try:
        act()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def test_the_innermost_own_frame_is_named(tmp_path):
    file = written(tmp_path, "world.py", "import json\ndef step(text):\n    return json.loads(text)\n")
    step, _ = load_target(f"{file}:step")
    error = raised(lambda: step("{"))
    assert own_frame(error) == "world.py:3 in step", "frames of the standard library are nobody's own"
    assert described(error).startswith("world.py:3 in step: JSONDecodeError: Expecting")
    assert user_frame(error, file) == "world.py:3 in step"
    assert user_frame(error, tmp_path / "other.py") == ""


def test_an_error_of_headrace_alone_has_no_own_frame():
    error = ConfigError("x")
    assert (own_frame(error), described(error)) == ("", "ConfigError: x")


def test_an_installed_package_is_named_where_it_was_entered():
    import docstring_parser

    error = raised(lambda: docstring_parser.parse(5))
    error.__traceback__ = error.__traceback__.tb_next.tb_next  # as if headrace had called it
    assert own_frame(error).endswith(" in parse")


def test_an_error_that_cannot_be_read_is_still_described():
    class Unreadable(Exception):
        def __str__(self):
            raise RuntimeError

    assert described(Unreadable()) == "Unreadable: (its message cannot be read)"


def test_definitions_have_a_place():
    line = raised.__code__.co_firstlineno
    assert defined_at(raised) == f"test_targets.py:{line}"
    assert defined_at(len) == "len"
