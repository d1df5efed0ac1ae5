"""Environments by name: headrace's own, files, modules, entry points; and classes of one's own."""

import importlib
import sys

import pytest

import headrace
from headrace.actors.environments.registry import ENVIRONMENTS, environment_kind
from headrace.actors.worlds import Worlds
from headrace.platform.config.environments import EnvironmentConfig
from headrace.platform.config.tasks import TasksConfig
from headrace.platform.errors import ConfigError, EnvironmentFault, NotFound
from headrace.platform.records import Message, Role, Task
from headrace.platform.testing.conformance.environment import ENVIRONMENT_SUITE, EnvironmentContext
from headrace.platform.testing.conformance.support import run_suite
from headrace.platform.testing.conformance.tasks import TASK_SUITE, TaskContext

WALK = """\
import headrace

class Walk(headrace.ReplayedEnvironment):
    name = "walk"
    version = "1"

    def __init__(self, size, start=0):
        self.size, self.start = size, start

    @staticmethod
    def tasks(split, seed, size, low=0):
        first = {"train": 0, "dev": 100, "hidden": 200}[split]
        for goal in range(first + low, first + size):
            yield {"goal": goal, "seed": goal + 1}

    def tools(self):
        return ()

    def _reset(self, task, seed):
        self.at, self.goal = self.start, task.data["goal"]
        return headrace.Observation((headrace.Message("user", "walk"),), self._hash())

    def _step(self, message):
        if message.tool_calls:
            answer = headrace.Message("tool", "there are no tools")
            return headrace.StepResult((answer,), status=headrace.Status.MODEL_INVALID_ACTION, state_hash=self._hash())
        self.at += len(message.content)
        ended = self.at >= self.size
        told = () if ended else (headrace.Message("user", str(self.at)),)
        return headrace.StepResult(told, terminated=ended, state_hash=self._hash())

    def _hash(self):
        return headrace.hash_value([self.at, self.goal])

kind = headrace.EnvironmentKind(environment=lambda args: Walk(3))
walk = Walk(3)
"""


@pytest.fixture(autouse=True)
def _clean_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def walk(tmp_path):
    (tmp_path / "walk.py").write_text(WALK)
    return f"{tmp_path}/walk.py:Walk"


def loaded(folder, text, name="Mine"):
    (folder / "mine.py").write_text(f"import headrace\n{text}\n")
    return environment_kind(f"{folder}/mine.py:{name}")


def say(text):
    return Message(Role.ASSISTANT, text)


# --- names ------------------------------------------------------------------------------------------------------------


def test_own_environments_come_first():
    assert environment_kind("lookup") is ENVIRONMENTS["lookup"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lokup", "no environment 'lokup'; did you mean 'lookup'"),
        ("zzz", "no environment 'zzz'; known: lookup, guess"),
    ],
)
def test_unknown_names_are_explained(name, message):
    with pytest.raises(NotFound, match=message):
        environment_kind(name)


def test_a_file_alone_names_what_could_be_meant(walk, tmp_path):
    file = walk.removesuffix(":Walk")
    with pytest.raises(NotFound, match=rf"say which object in it is the environment: {file}:Walk or {file}:kind$"):
        environment_kind(file)
    (tmp_path / "door.py").write_text("import headrace\nD = headrace.SingleTurn([], reward=lambda completion: 0)\n")
    with pytest.raises(NotFound, match=r"is the environment: .*door\.py:D$"):
        environment_kind(f"{tmp_path}/door.py")
    (tmp_path / "none.py").write_text("from headrace import ReplayedEnvironment\n")
    with pytest.raises(NotFound, match=r"none\.py:NAME \(it holds none\)"):
        environment_kind(f"{tmp_path}/none.py")
    with pytest.raises(ConfigError, match=r"there is no file .*sums"):
        environment_kind("sums.py")


def test_a_kind_is_taken_as_it_is(walk):
    kind = environment_kind(walk.replace(":Walk", ":kind"))
    assert kind.environment({}).size == 3
    assert kind.digest == environment_kind(walk).digest != ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Mine = 5", "is 5, which is no environment; expected a headrace.SingleTurn"),
        ("def Mine(): ...", "which is no environment; expected"),
        (
            "class Door:\n    def environment_kind(self, origin): 1 / 0\nMine = Door()",
            r"^mine\.py:3 in environment_kind",
        ),
    ],
)
def test_what_is_no_environment_is_explained(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        loaded(tmp_path, text)


# --- entry points -----------------------------------------------------------------------------------------------------


def install(folder, package, **offered):
    """A distribution as pip leaves it; `sys.path` finds it."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {target}" for name, target in offered.items()]
    (info / "entry_points.txt").write_text("\n".join(["[headrace.environments]", *lines, ""]))
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()


def test_an_installed_package_offers_environments_by_name(tmp_path):
    (tmp_path / "walk_of_a_package.py").write_text(WALK)
    install(tmp_path, "walks", walk="walk_of_a_package:Walk")
    assert "walk_of_a_package" not in sys.modules
    with pytest.raises(NotFound, match="did you mean 'walk'"):
        environment_kind("wallk")
    assert "walk_of_a_package" not in sys.modules, "nothing is loaded before it is asked for"
    assert environment_kind("walk").environment({"size": 3}).size == 3


def test_an_entry_point_that_does_not_load_names_its_package(tmp_path):
    (tmp_path / "breaks_in_a_package.py").write_text("\nWalk = wlak\n")
    install(tmp_path, "walks", walk="breaks_in_a_package:Walk", run="not_there_at_all:Run")
    with pytest.raises(ConfigError, match=r"'walk' of the package walks: breaks_in_a_package\.py:2: NameError"):
        environment_kind("walk")
    with pytest.raises(ConfigError, match="'run' of the package walks: there is no module 'not_there_at_all'"):
        environment_kind("run")


def test_two_packages_with_one_name_are_named(tmp_path):
    install(tmp_path / "one", "walks", walk="a:Walk")
    install(tmp_path / "two", "strolls", walk="b:Walk")
    with pytest.raises(ConfigError, match=r"(walks and strolls|strolls and walks) both offer an environment 'walk'"):
        environment_kind("walk")


# --- classes ----------------------------------------------------------------------------------------------------------


async def test_a_class_conforms_with_its_tasks(walk):
    kind = environment_kind(walk)
    context = EnvironmentContext(
        make=lambda: kind.environment({"size": 3}),
        task=Task("t", "walk", {"goal": 3}),
        script=[say("a"), say("b"), say("c")],
        effect=say("a"),
    )
    await run_suite(ENVIRONMENT_SUITE, context)
    await run_suite(TASK_SUITE, TaskContext(make=lambda split: kind.tasks(split, 0, {"size": 60})))


def test_args_are_divided_by_name(walk):
    worlds = Worlds([EnvironmentConfig(name=walk, args={"size": 9, "start": 2, "low": 8})], "train", 0)
    setting = worlds.setting(0)
    assert (setting.task.data["goal"], setting.task.environment, setting.task.split) == (8, "Walk", "train")
    assert worlds.environment(setting.config).start == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"size": 3, "strat": 2}, r"environments\.Walk\.args has no key 'strat'; did you mean 'start'"),
        ({"size": 3, "zzz": 2}, "has no key 'zzz'; known: size, "),
        ({}, "lacks size, which Walk needs"),
    ],
)
def test_wrong_args_are_found_before_anything_starts(walk, args, message):
    with pytest.raises(ConfigError, match=message):
        Worlds([EnvironmentConfig(name=walk, args=args)], "train", 0)


WHOLE = """\
class Mine:
    name, version = "mine", "1"
    def tools(self): ...
    def reset(self, task, seed): ...
    def step(self, message, key): ...
    def snapshot(self): ...
    def restore(self, snapshot_id): ...
    def clone(self): ...
    def close(self): ...
"""
REPLAYED = """\
class Mine(headrace.ReplayedEnvironment):
    name, version = "mine", "1"
    def tools(self): ...
    def _reset(self, task, seed): ...
    def _step(self, message): ...
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "class Mine:\n    def step(self, message): ...\n    def tools(self): ...",
            r"^mine\.py:2: Mine is no environment: it lacks reset\(task, seed\), snapshot\(\), restore\(snapshot_id\),"
            r" clone\(\), close\(\), name, version; step\(self, message\) must be step\(message, key\);"
            r" headrace\.ReplayedEnvironment brings",
        ),
        (WHOLE.replace("name, version", "name, versoin"), r"it lacks version;"),
        (WHOLE.replace("reset(self, task, seed)", "reset(self)"), r"reset\(self\) must be reset\(task, seed\)"),
        (WHOLE.replace("close(self)", "close(self, now)"), r"close\(self, now\) must be close\(\)"),
        (REPLAYED.replace("_step", "step_"), r"it lacks _step\(message\)$"),
        (
            REPLAYED.replace("_step(self, message)", "_step(self, a, b)"),
            r"_step\(self, a, b\) must be _step\(message\)",
        ),
        (REPLAYED.replace("    name, version", "    naem, version"), r"it lacks name$"),
        (f"{REPLAYED}    def tasks(self, split, seed): ...", r"tasks must be a static or class method tasks\(split"),
        (f"{REPLAYED}    @staticmethod\n    def tasks(split): ...", r"tasks must be a static or class method"),
    ],
)
def test_what_a_class_lacks_is_said_when_it_is_loaded(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        loaded(tmp_path, text)


def test_whole_classes_load(tmp_path):
    assert loaded(tmp_path, WHOLE).tasks is None
    extra = WHOLE.replace("step(self, message, key)", "step(self, message, key, verbose=False)")
    (tmp_path / "more").mkdir()
    assert loaded(tmp_path / "more", extra).environment({}).name == "mine"


def test_a_constructor_may_set_the_name(tmp_path):
    text = REPLAYED.replace('    name, version = "mine", "1"\n', "    def __init__(self, name): self.name = name\n")
    with pytest.raises(ConfigError, match=r"^mine\.py:2: Mine has no text as version"):
        loaded(tmp_path, text).environment({"name": "x"})


def test_a_constructor_that_breaks_names_its_line(tmp_path):
    kind = loaded(tmp_path, f"{REPLAYED}    def __init__(self, size=2):\n        assert size > 2, 'too small'\n")
    with pytest.raises(EnvironmentFault, match=r"^mine\.py:8 in __init__: AssertionError: too small") as caught:
        kind.environment({})
    assert not caught.value.transient
    assert kind.environment({"size": 3}).name == "mine"


def test_keyword_arguments_take_the_rest(tmp_path):
    text = f"{REPLAYED}    def __init__(self, **more): self.more = more\n"
    text += "    @classmethod\n    def tasks(cls, split, seed, count):\n"
    text += "        return [{'n': n, 'of': split} for n in range(count)]\n"
    kind = loaded(tmp_path, text)
    assert kind.environment({"count": 3, "a": 1}).more == {"a": 1}
    assert len({task.task_id for task in kind.tasks("dev", 0, {"count": 3, "a": 1}).next(3)}) == 3


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return None", r"Mine\.tasks returned None; expected a TaskSource, or a list of rows"),
        ("return 5", "returned int; expected a TaskSource"),
        ("return [1]", r"Mine\.tasks: rows:1: not a JSON object"),
        ("return []", r"Mine\.tasks gave no rows for the split 'train'"),
        (
            "import pandas; return pandas.DataFrame({'a': [1]})",
            r'Mine\.tasks: the rows are a DataFrame; give a list of dicts, such as df\.to_dict\("records"\)',
        ),
        ("yield {}['goal']", r"^mine\.py:9 in tasks: KeyError: 'goal'"),
        ("return [headrace.Task('a', 'mine', split='dev')]", "none of the 1 tasks"),
    ],
)
def test_wrong_tasks_are_explained(tmp_path, body, message):
    kind = loaded(tmp_path, f"{REPLAYED}    @staticmethod\n    def tasks(split, seed):\n        {body}\n")
    with pytest.raises(ConfigError, match=message):
        kind.tasks("train", 0, {}).next(1)


def test_tasks_and_sources_are_taken_as_they_are(tmp_path):
    text = (
        f"{REPLAYED}    @staticmethod\n    def tasks(split, seed, n=2):\n"
        "        return [headrace.Task(f'{split}{i}', 'mine', {'i': split + str(i)}, split=split) for i in range(n)]\n"
        "class Other(Mine):\n    @staticmethod\n    def tasks(split, seed): return environment_tasks(split)\n"
        "def environment_tasks(split):\n"
        "    from headrace.platform.testing.fakes.tasks import ListTasks\n"
        "    return ListTasks([headrace.Task(f'x-{split}', 'mine', split=split)], split)\n"
    )
    ids = {task.task_id for task in loaded(tmp_path, text).tasks("dev", 0, {}).next(4)}
    assert ids == {"dev0", "dev1"}
    assert loaded(tmp_path, text, "Other").tasks("dev", 0, {}).next(1)[0].task_id == "x-dev"


SOURCE = """\
    @staticmethod
    def tasks(split, seed):
        from headrace.platform.testing.fakes.tasks import ListTasks
        return ListTasks([headrace.Task({id}, "mine", {{"n": n}}, split=split, seed={seed}) for n in range(9)], split)
"""


# case V2
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [{'n': n} for n in range(9)]", r"rows:1 of \w+ is the same task as rows:1 of \w+ \(\{'n': 0\}\)"),
        ("return [{'id': f'{split}{n}', 'n': n} for n in range(9)]", r"is the same task as .*'n': 0\}"),
        ("yield {'n': {'train': 1, 'dev': 2, 'hidden': 1}[split]}", "of (hidden|train) is the same task as .* of"),
        ("return [{'n': split, 'seed': 7}]", "have the same seed 7"),
        ("return [headrace.Task('a', 'mine', {'n': split}, split=split)]", "has the id of task 'a' of"),
        ("return [headrace.Task(split, 'mine', {'n': 5}, split=split)]", r"has the data of .*\{'n': 5\}, seed 0"),
        ("return [headrace.Task(split, 'mine', {}, split=split, seed=5)]", "has the seed of task .*seed 5"),
    ],
)
@pytest.mark.parametrize("split", ["train", "dev", "hidden"])
def test_a_class_that_ignores_the_split_is_refused(tmp_path, body, message, split):
    kind = loaded(tmp_path, f"{REPLAYED}    @staticmethod\n    def tasks(split, seed):\n        {body}\n")
    with pytest.raises(
        ConfigError, match=rf"^mine\.py:2: Mine\.tasks: .*({message}).*Does tasks\(split, seed\) use"
    ) as e:
        kind.tasks(split, 0, {})
    assert "give each row a `seed`" in str(e.value)


@pytest.mark.parametrize(("id", "seed", "shared"), [("n", "0", "id"), ("split + str(n)", "n + 1", "seed")])
def test_sources_are_compared_by_their_first_tasks(tmp_path, id, seed, shared):
    kind = loaded(tmp_path, REPLAYED + SOURCE.format(id=f"str({id})", seed=seed))
    with pytest.raises(ConfigError, match=rf"task '\w+' of \w+ has the {shared} of task '\w+' of \w+ \(\{{'n': \d\}}"):
        kind.tasks("dev", 0, {})


def test_worlds_that_differ_by_seed_alone_are_apart_and_sources_stay_where_they_are(tmp_path):
    text = REPLAYED + SOURCE.format(id="split + str(n)", seed="{'train': 10, 'dev': 20, 'hidden': 30}[split] + n")
    source = loaded(tmp_path, text).tasks("dev", 0, {})
    assert source.state == 0
    assert sorted(task.seed for task in source.next(9)) == list(range(20, 29))


def test_a_split_that_cannot_be_had_matters_to_who_asks_for_it(tmp_path):
    body = "        if split == 'hidden': raise KeyError(split)\n"
    body += "        return [{'n': split}] if split == 'train' else []\n"
    kind = loaded(tmp_path, f"{REPLAYED}    @staticmethod\n    def tasks(split, seed):\n{body}")
    assert kind.tasks("train", 0, {}).next(1)[0].data == {"n": "train"}
    with pytest.raises(ConfigError, match=r"^mine\.py:2: Mine\.tasks gave no rows for the split 'dev'$"):
        kind.tasks("dev", 0, {})
    with pytest.raises(ConfigError, match=r"^mine\.py:9 in tasks: KeyError: 'hidden'"):
        kind.tasks("hidden", 0, {})


def test_args_that_only_its_own_tasks_take_are_refused_beside_others(walk, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"goal": {n}}}\n' for n in range(50)))
    tasks = TasksConfig(source=f"{tmp_path}/rows.jsonl")
    config = EnvironmentConfig(name=walk, args={"size": 9, "low": 8}, tasks=tasks)
    with pytest.raises(ConfigError, match=r"Walk\.args: low would not be used.* tasks\.args, and args may have size"):
        Worlds([config], "train", 0)
    config = EnvironmentConfig(name=walk, args={"size": 9}, tasks=tasks)
    assert Worlds([config], "train", 0).setting(0).task.data["goal"] < 50


def test_an_endless_generator_is_refused_not_awaited(tmp_path, monkeypatch):
    monkeypatch.setattr("headrace.actors.environments.doors.class_tasks._MOST_ROWS", 50)
    body = "    @staticmethod\n    def tasks(split, seed):\n        while True: yield {'n': 1}\n"
    with pytest.raises(ConfigError, match="gave more than 50 rows for 'train'; return a TaskSource"):
        loaded(tmp_path, REPLAYED + body).tasks("train", 0, {})


def test_the_public_names_are_the_real_ones():
    from headrace.actors.environments.kind import EnvironmentKind

    assert headrace.EnvironmentKind is EnvironmentKind
