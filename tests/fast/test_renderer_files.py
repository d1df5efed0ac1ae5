"""Files of a model folder that hold something else than they should: each is named, none is met later."""

import pytest
from rendering_kit import CHATML, USER, write_folder

from headrace.actors.rendering import load_renderer
from headrace.platform.errors import ConfigError

PLAIN = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
END = {"eos_token": "<|im_end|>"}


@pytest.mark.parametrize(
    ("file", "content", "cause"),
    [
        ("chat_template.jinja", b"\xff\xfe{{ messages }}", "is not UTF-8 text"),
        ("tokenizer_config.json", b"\xff", "is not UTF-8 text"),
        ("tokenizer_config.json", b"{", "is not a JSON object: "),
        ("tokenizer_config.json", b"[1]", "is not a JSON object but a list"),
        ("tokenizer_config.json", b'[["a", 1]]', "is not a JSON object but a list"),
        ("tokenizer_config.json", b"null", "is not a JSON object but a NoneType"),
        ("special_tokens_map.json", b"[]", "is not a JSON object but a list"),
        ("generation_config.json", b"[[1, 2, 3]]", "is not a JSON object but a list"),
        ("generation_config.json", b"[" * 100_000, "is not a JSON object: "),
        ("generation_config.json", b'{"eos_token_id": "<|im_end|>"}', "eos_token_id must be a token's id .* not '<"),
        ("generation_config.json", b'{"eos_token_id": [-1]}', "eos_token_id must be .* not -1"),
        ("config.json", b'"llama"', "is not a JSON object but a str"),
        ("renderer.json", b"[]", "its keys are family"),
        ("renderer.json", b"{", "its keys are family"),
        ("renderer.json", b"\xff", "its keys are family"),
        ("renderer.json", b'{"template_args": ' + b"[" * 100_000, "its keys are family"),
    ],
)
def test_a_file_that_holds_something_else_is_named(tmp_path, file, content, cause):
    write_folder(tmp_path, CHATML, PLAIN, tokenizer_config=END)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ConfigError, match=f"{tmp_path / file}.*{cause}"):
        load_renderer(tmp_path)


@pytest.mark.parametrize(
    ("template", "cause"),
    [
        (1, "must be text or a list, not int"),
        ({"default": PLAIN}, "must be text or a list, not dict"),
        ([{"name": "a"}], "must be a list of"),
        (["a"], "must be a list of"),
        ([{"name": [], "template": PLAIN}], "must be a list of"),
        ([{"name": "a", "template": PLAIN}, {"name": "a", "template": ""}], "must be a list .*, each name once"),
    ],
)
def test_a_template_in_another_shape_is_refused(tmp_path, template, cause):
    write_folder(tmp_path, CHATML, tokenizer_config={**END, "chat_template": template})
    with pytest.raises(ConfigError, match=f"tokenizer_config.json: chat_template {cause}"):
        load_renderer(tmp_path)


def test_a_template_is_utf_8_whatever_the_machine_is_set_to(tmp_path):
    write_folder(tmp_path, CHATML, tokenizer_config=END)
    (tmp_path / "chat_template.jinja").write_bytes(f"é{PLAIN}".encode())
    renderer = load_renderer(tmp_path)
    assert renderer.decode(renderer.render([USER], ())).startswith("é<|im_start|>")
