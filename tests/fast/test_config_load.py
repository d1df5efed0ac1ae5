from pathlib import Path

import pytest

from headrace.platform.config import GrpoConfig, RunConfig
from headrace.platform.config.explain import keys_of
from headrace.platform.config.load import dump_yaml, known_recipes, load_recipe
from headrace.platform.errors import ConfigError

TINY = """
name: tiny
seed: 3
environments:
  - name: lookup
    weight: 1
    args: {hops: [1, 2]}
  - name: counter
model:
  tiny_llama: {hidden: 96, heads: 3}
learner:
  lr: 1e-3
  algorithm: {group_size: 4}
"""


@pytest.fixture
def recipes(tmp_path: Path) -> Path:
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "tiny.yaml").write_text(TINY)
    (folder / "tiny-slow.yaml").write_text("extends: tiny\nname: tiny-slow\nlearner: {steps: 200}\n")
    return folder


def refused(recipes: Path, *overrides: str, name: str = "tiny") -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(name, overrides, recipes)
    return str(caught.value)


def test_a_named_recipe_and_its_path_give_the_same_run(recipes: Path) -> None:
    by_name = load_recipe("tiny", [], recipes)
    assert by_name.seed == 3
    assert by_name.learner.lr == 0.001
    assert load_recipe(str(recipes / "tiny.yaml"), [], recipes) == by_name


def test_extends_merges_sections_key_by_key(recipes: Path) -> None:
    config = load_recipe("tiny-slow", [], recipes)
    assert (config.name, config.seed) == ("tiny-slow", 3)
    assert (config.learner.steps, config.learner.lr, config.learner.algorithm.group_size) == (200, 0.001, 4)


def test_extends_takes_a_path_beside_the_recipe_and_lists_replace(recipes: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("extends: recipes/tiny.yaml\nenvironments: [{name: lookup}]\n")
    config = load_recipe(str(own), [], recipes)
    assert [environment.name for environment in config.environments] == ["lookup"]
    assert config.environments[0].args == {}


def test_a_circle_of_extends_is_named(recipes: Path) -> None:
    (recipes / "a.yaml").write_text("extends: b\n")
    (recipes / "b.yaml").write_text("extends: a\n")
    assert "circle: a.yaml -> b.yaml -> a.yaml" in refused(recipes, name="a")


@pytest.mark.parametrize("name", ["tinny", "nothing"])
def test_an_unknown_recipe_lists_the_known_ones_and_the_nearest(recipes: Path, name: str) -> None:
    message = refused(recipes, name=name)
    assert repr(name) in message
    assert "known: tiny, tiny-slow; nearest: tiny" in message


def test_a_missing_file_is_named(recipes: Path, tmp_path: Path) -> None:
    assert f"no recipe file {tmp_path}/no.yaml" in refused(recipes, name=f"{tmp_path}/no.yaml")


@pytest.mark.parametrize(
    ("override", "read", "expected"),
    [
        ("learner.lr=3e-4", lambda c: c.learner.lr, 3e-4),
        ("learner.betas=[0.8, 0.9]", lambda c: c.learner.betas, (0.8, 0.9)),
        ("queue.max_lag=0", lambda c: c.queue.max_lag, 0),
        ("environments.0.args.hops=[2]", lambda c: c.environments[0].args, {"hops": [2]}),
        ("environments.0.args.hops.1=3", lambda c: c.environments[0].args, {"hops": [1, 3]}),
        ("environments.0.args.delay_s=2e-3", lambda c: c.environments[0].args["delay_s"], 0.002),
        ("environments.counter.weight=2", lambda c: c.environments[1].weight, 2.0),
        ("environments.counter.budgets.max_turns=9", lambda c: c.environments[1].budgets.max_turns, 9),
        ("environments.1={name: other}", lambda c: c.environments[1].name, "other"),
        ("queue.redis_url=", lambda c: c.queue.redis_url, ""),
        ("queue.redis_url=unix:///tmp/a=b.sock", lambda c: c.queue.redis_url, "unix:///tmp/a=b.sock"),
        ("sft={stages: [{name: oracle}]}", lambda c: c.sft.stages[0].name, "oracle"),
        ("model={path: /models/a}", lambda c: c.model.path, "/models/a"),
    ],
)
def test_an_override_sets_one_key(recipes: Path, override: str, read, expected) -> None:
    assert read(load_recipe("tiny", [override], recipes)) == expected


def test_the_last_override_wins(recipes: Path) -> None:
    assert load_recipe("tiny", ["seed=1", "seed=2"], recipes).seed == 2


# case V3
@pytest.mark.parametrize(
    ("override", "path", "nearest"),
    [
        ("sead=1", "sead", "did you mean seed?"),
        ("learner.learning_rate=1", "learner.learning_rate", "known here: "),
        ("learner.stepz=1", "learner.stepz", "did you mean learner.steps?"),
        ("learner.algorithm.clip_hi=1", "learner.algorithm.clip_hi", "did you mean learner.algorithm.clip_high?"),
        ("environments.0.wieght=1", "environments.0.wieght", "did you mean environments.0.weight?"),
        ("environments.lookup.budgets.turns=1", "environments.0.budgets.turns", "environments.0.budgets.max_turns"),
        ("learner.max_lag=1", "learner.max_lag", "did you mean queue.max_lag?"),
        ("lr=1", "lr", "did you mean"),
        ("model.tiny_llama.hiden=64", "model.tiny_llama.hiden", "did you mean model.tiny_llama.hidden?"),
        ("sft.stages=[{name: a, util_success: 1}]", "sft.stages.0.util_success", "did you mean sft.stages.0.until_"),
        ("leaner.lr=1", "leaner", "did you mean learner?"),
        ("extend=lookup", "extend", "did you mean extends?"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one(
    recipes: Path, override: str, path: str, nearest: str
) -> None:
    message = refused(recipes, override)
    assert f"  - {path}: unknown key; " in message
    assert nearest in message


def test_every_section_refuses_unknown_keys(recipes: Path) -> None:  # case V3
    sections = sorted({key.rpartition(".")[0] for key in keys_of(RunConfig)} - {"", "environments[]", "sft.stages[]"})
    assert "loggers[]" in sections
    faults = "environments.0.faults=[{kind: timeout, rate: 0.1}]"
    tools = "environments.0.tools=[{kind: shell}]"
    grants = "environments.0.permissions={grants: [{capability: read}], tasks_may_grant: [{capability: read}]"
    rules = f"{grants}, rules: [{{name: a}}]}}"
    lists = ("sft={stages: [{name: a}]}", "loggers=[{kind: wandb}]", faults, tools, rules)
    plain = {f"learner.algorithm.{key}" for key in keys_of(GrpoConfig)}
    for section in sections:
        path = section.replace("[]", ".0")
        own = section.startswith("learner.algorithm.") and section not in plain
        named = ["learner.algorithm.name=ppo"] if own else []  # the one with sections of its own
        assert f"{path}.zzz: unknown key" in refused(recipes, *lists, *named, f"{path}.zzz=1")


def test_a_key_that_stands_twice_is_refused_not_ignored(recipes: Path) -> None:  # case V3
    (recipes / "twice.yaml").write_text("extends: tiny\nseed: 1\nqueue: {max_lag: 1}\nseed: 2\n")
    assert "line 4: the key 'seed' stands twice" in refused(recipes, name="twice")


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("learner.lr=fast", "learner.lr: expected a valid number, unable to parse string as a number; got 'fast'"),
        ("learner.steps=0", "learner.steps: expected greater than or equal to 1; got 0"),
        ("learner.steps=[1]", "learner.steps: expected a valid integer; got a list of 1"),
        ("queue.max_lag=1.5", "queue.max_lag: expected a valid integer, got a number with a fractional part; got 1.5"),
        ("seed=null", "seed: expected a valid integer; got None"),
        ("runtime.kind=slurm", "runtime.kind: expected 'ray' or 'inprocess'; got 'slurm'"),
        ("environments.0.sampling.top_p=0.9", "environments.0.sampling.top_p: top_p changes the distribution"),
        (
            "runtime.kind=inproces",
            "runtime.kind: expected 'ray' or 'inprocess'; got 'inproces'; did you mean inprocess?",
        ),
        ("environments.0.permissions.approvals=quue", "environments.0.permissions.approvals: 'quue' can approve of"),
        ("environments.0.permissions.addresses=[a]", "environments.0.permissions.addresses: 'a' does not appear"),
        (
            "environments.0.permissions={approvals: queue, approval_s: 30}",
            "environments.0: permissions.approval_s (30) must be less than step_deadline_s (30)",
        ),
        ("environments=[]", "environments: Tuple should have at least 1 item"),
        ("environments=[{weight: 1}]", "environments.0.name: required, but missing"),
        ("learner=fast", "learner: expected a section; got 'fast'"),
        ("model.path=/a", "model: give exactly one of model.path, model.gguf and model.tiny_llama"),
        ("learner.publish_every=9", "learner.publish_every=9 with queue.max_lag=4"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_expected(recipes: Path, override: str, line: str) -> None:
    assert f"  - {line}" in refused(recipes, override)


LOGGERS = "expected 'wandb', 'tensorboard' or 'mlflow'"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("[{kind: tensorbord}]", f"loggers.0.kind: {LOGGERS}; got 'tensorbord'; did you mean tensorboard?"),
        ("[{kind: mlflow}, {kind: 3}]", f"loggers.1.kind: {LOGGERS}; got 3"),
        ("[{project: x}]", f"loggers.0.kind: required, but missing; {LOGGERS}"),
        ("[tensorboard]", "loggers.0: expected a section; got 'tensorboard'"),
        ("[{kind: wandb, projct: x}]", "loggers.0.projct: unknown key; did you mean loggers.0.project?"),
    ],
)
def test_a_section_of_several_kinds_is_told_by_its_kind(recipes: Path, override: str, line: str) -> None:  # case V3
    assert refused(recipes, f"loggers={override}") == f"recipe tiny: 1 error\n  - {line}"


def test_a_wrong_item_does_not_make_its_list_wrong_too(recipes: Path) -> None:
    message = refused(recipes, "environments.0.sampling.temperature=0")
    assert message == "recipe tiny: 1 error\n  - environments.0.sampling.temperature: expected greater than 0; got 0"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("environments.².weight=1", "environments.²: environments has no item of that name"),
        ("learner.lr", "override 'learner.lr': write key=value"),
        ("=1", "override '=1': write key=value"),
        ("a..b=1", "override 'a..b=1': write key=value"),
        ("environments.2.weight=1", "environments.2: environments has 2 items, counted from 0"),
        ("environments.lokup.weight=1", "its items are named lookup, counter; nearest: lookup"),
        ("learner.betas.0=0.5", "learner.betas.0: the recipe has no list learner.betas; give all of it"),
        ("seed.low=1", "seed.low: seed is a value, so it has no key 'low'"),
        ("seed.low.er=1", "seed.low.er: seed is a value, so it has no key 'low'"),
        ("learner.betas=[1", "learner.betas: the value of the override is no YAML (line 1:"),
    ],
)
def test_an_override_that_leads_nowhere_says_why(recipes: Path, override: str, line: str) -> None:
    assert line in refused(recipes, override)


def test_all_errors_are_listed_at_once(recipes: Path) -> None:
    message = refused(recipes, "learner.lr=fast", "queue.lag=1", "serving.replicas=0", "nonsense")
    assert message.startswith("recipe tiny: 4 errors\n")
    assert [line.split(":")[0].strip(" -") for line in message.splitlines()[1:]] == [
        "override 'nonsense'",
        "queue.lag",
        "serving.replicas",
        "learner.lr",
    ]


@pytest.mark.parametrize("text", ["- a\n- b\n", "just text\n", "", "a: [1\n", "a: !!python/object:os.system {}\n"])
def test_a_file_that_is_no_recipe_is_refused_by_name(recipes: Path, text: str) -> None:
    (recipes / "broken.yaml").write_text(text)
    assert "broken.yaml" in refused(recipes, name="broken")


def test_the_dump_loads_to_an_equal_configuration(recipes: Path, tmp_path: Path) -> None:
    config = load_recipe(
        "tiny",
        ["queue.redis_url=redis://:${env:PW}@localhost/0", "learner.lr=1e-5", "environments.0.args.tag='1e5'"],
        recipes,
    )
    assert config.environments[0].args["tag"] == "1e5"
    dumped = tmp_path / "config.yaml"
    dumped.write_text(dump_yaml(config))
    assert "${env:PW}" in dumped.read_text()
    assert load_recipe(str(dumped), [], recipes) == config


def test_known_recipes_are_the_yaml_files(recipes: Path) -> None:
    (recipes / "notes.txt").write_text("")
    assert known_recipes(recipes) == ["tiny", "tiny-slow"]


class TestPaths:
    def test_what_begins_with_a_dot_is_relative_to_the_recipe(self, recipes: Path, tmp_path: Path, monkeypatch) -> None:
        folder = tmp_path / "project"
        folder.mkdir()
        (folder / "mine.yaml").write_text(
            "extends: tiny\nenvironments:\n  - {name: ./maze.py:Maze, tasks: {source: ../rows.jsonl}}\n"
        )
        monkeypatch.chdir(recipes)
        config = load_recipe(str(folder / "mine.yaml"), ["runs_dir=./out"], recipes)
        assert config.environments[0].name == f"{folder}/maze.py:Maze"
        assert config.environments[0].known_as == "Maze"
        assert config.environments[0].tasks.source == f"{tmp_path}/rows.jsonl"
        assert config.runs_dir == f"{recipes}/out"

    def test_paths_of_permissions_are_seen_from_the_workspace(self, recipes: Path, tmp_path: Path) -> None:
        mine = tmp_path / "mine.yaml"
        said = "approvals: ./yes.py:yes, paths: [./src, .], grants: [{capability: read, paths: ['./src/*']}]"
        mine.write_text(f"extends: tiny\nenvironments: [{{name: lookup, permissions: {{{said}}}}}]\n")
        permissions = load_recipe(str(mine), [], recipes).environments[0].permissions
        assert permissions.approvals == f"{tmp_path}/yes.py:yes"
        assert (permissions.paths, permissions.grants[0].paths) == (("./src", "."), ("./src/*",))
        mine.write_text("extends: tiny\nenvironments: [{name: lookup, permissions: {paths: [../x]}}]\n")
        assert "environments.0.permissions.paths: '../x' leads out of the workspace" in refused(recipes, name=str(mine))

    def test_files_of_the_current_folder_are_stored_with_their_place(
        self, recipes: Path, tmp_path, monkeypatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "maze.py").touch()
        (tmp_path / "rows").mkdir()
        overrides = ["environments=[{name: maze.py:Maze, tasks: {source: rows, dev: reasoning_gym:maze}}]"]
        (environment,) = load_recipe("tiny", overrides, recipes).environments
        assert environment.name == f"{tmp_path}/maze.py:Maze"
        assert (environment.tasks.source, environment.tasks.dev) == (f"{tmp_path}/rows", "reasoning_gym:maze")

    def test_folders_of_sandboxes_and_tools_are_stored_with_their_place(
        self, recipes: Path, tmp_path, monkeypatch
    ) -> None:
        """Every worker reads the same folder, wherever it was started."""
        monkeypatch.chdir(tmp_path)
        for name in ("files", "docs", "server"):
            (tmp_path / name).mkdir()
        tools = "[{kind: search, args: {corpus: docs}}, {kind: mcp, args: {command: [python3], cwd: server}}]"
        overrides = [f"environments=[{{name: lookup, sandbox: {{workspace: files}}, tools: {tools}}}]"]
        (environment,) = load_recipe("tiny", overrides, recipes).environments
        assert environment.sandbox.workspace == f"{tmp_path}/files"
        assert environment.tools[0].args["corpus"] == f"{tmp_path}/docs"
        assert environment.tools[1].args["cwd"] == f"{tmp_path}/server"

    def test_a_file_with_an_environment_is_a_recipe(self, recipes: Path, tmp_path, monkeypatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "maze.py").touch()
        config = load_recipe("./maze.py:BigMaze", ["model.path=folder", "environments.BigMaze.weight=2"], recipes)
        assert (config.name, config.environments[0].weight) == ("bigmaze", 2)
        assert config.environments[0].name == f"{tmp_path}/maze.py:BigMaze"
        with pytest.raises(ConfigError, match=r"there is no file nowhere\.py"):
            load_recipe("nowhere.py:Maze", [], recipes)
        with pytest.raises(ConfigError, match=r"give exactly one of model.path|model: required"):
            load_recipe("maze.py:BigMaze", [], recipes)

    def test_a_python_file_without_an_object_says_what_is_missing(self, recipes: Path, tmp_path, monkeypatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "maze.py").write_text("class Maze: ...\n")
        with pytest.raises(ConfigError, match=r"which object of maze.py is the environment\? Write maze.py:Name"):
            load_recipe("./maze.py", [], recipes)
