from pathlib import Path

import pytest

from headrace.platform.config.load import load_recipe
from headrace.platform.config.secret_references import (
    SecretValues,
    literal_password,
    resolve,
    without_password,
)
from headrace.platform.errors import ConfigError

ENV = {"NAME": "swordfish", "ODD": "p@ss/w:rd", "EMPTY": ""}


def test_references_are_replaced_wherever_they_stand(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("from file\n")
    assert resolve("a ${env:NAME} b ${file:" + str(file) + "}!", env=ENV) == "a swordfish b from file!"
    assert resolve("nothing here $NAME ${NAME}", env=ENV) == "nothing here $NAME ${NAME}"


def test_a_password_inside_a_url_is_percent_encoded_and_the_rest_is_not() -> None:
    assert resolve("redis://:${env:ODD}@host:1/0", env=ENV) == "redis://:p%40ss%2Fw%3Ard@host:1/0"
    assert resolve("redis://${env:WHERE}/0", env={"WHERE": "host:6379"}) == "redis://host:6379/0"


@pytest.mark.parametrize("reference", ["${env:ABSENT}", "${env:EMPTY}", "${file:/no/such/file}"])
def test_a_missing_secret_is_named_by_its_reference(reference: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(f"redis://:${{env:NAME}}{reference}@host", env=ENV)
    assert reference in str(caught.value)
    assert "swordfish" not in str(caught.value)


def test_an_empty_or_binary_secret_file_is_refused_without_its_content(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    for content in (b"\n", b"\xff\xfe"):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match="secret"):
            resolve("${file:" + str(file) + "}")


def test_resolved_values_are_redacted_in_both_spellings_and_never_shown() -> None:
    secrets = SecretValues()
    url = resolve("redis://:${env:ODD}@host", secrets, env=ENV)
    resolve("${env:NAME}", secrets, env=ENV)
    assert secrets.redact(f"connecting to {url} with p@ss/w:rd") == "connecting to redis://:[secret]@host with [secret]"
    assert "swordfish" not in repr(secrets)
    assert set(secrets) == {"p@ss/w:rd", "p%40ss%2Fw%3Ard", "swordfish"}


def test_the_longest_value_is_redacted_first() -> None:
    secrets = SecretValues()
    secrets.add("fish")
    secrets.add("swordfish")
    assert secrets.redact("swordfish") == "[secret]"


@pytest.mark.parametrize(
    ("url", "literal"),
    [
        ("redis://:hunter2@host:6379/0", True),
        ("rediss://user:hunter2@host", True),
        ("redis://:hunter2${env:NAME}@host", True),
        ("redis://:hun/ter@host", True),
        ("redis://host/0?password=hunter2", True),
        ("unix:///run/x.sock?db=1&password=hunter2", True),
        ("redis://:${env:NAME}@host:6379/0", False),
        ("redis://user:${file:/run/secrets/redis}@host", False),
        ("redis://host/0?password=${env:NAME}", False),
        ("redis://user@host:6379", False),
        ("redis://host:6379/0", False),
        ("unix:///run/x.sock", False),
        ("${env:REDIS_URL}", False),
        ("", False),
    ],
)
def test_literal_passwords_are_told_from_references(url: str, literal: bool) -> None:
    assert literal_password(url) is literal
    assert ("hunter2" in without_password(url) or "hun/ter" in without_password(url)) is False
    if not literal:
        assert without_password(url) == url


@pytest.mark.parametrize("key", ["queue.redis_url", "environments.0.args.store"])
def test_a_recipe_with_a_literal_password_is_refused_with_the_fix(tmp_path: Path, key: str) -> None:
    (tmp_path / "r.yaml").write_text("name: r\nenvironments: [{name: a}]\nmodel: {path: /m}\n")
    with pytest.raises(ConfigError) as caught:
        load_recipe("r", [f"{key}=redis://:hunter2@host", "queue.redis_urls=redis://:hunter2@host"], tmp_path)
    assert f"{key}: a password is spelled out" in str(caught.value)
    assert "${env:NAME} or ${file:PATH}" in str(caught.value)
    assert "hunter2" not in str(caught.value)
