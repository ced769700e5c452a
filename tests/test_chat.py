# SPDX-License-Identifier: Apache-2.0

"""Chat templates: their files, their sandbox, and the variables they receive."""

import json
from pathlib import Path

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("msgspec")
pytest.importorskip("prometheus_client")

from specops.server.chat import ChatFormat

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% generation %}{{ m.content }}{% endgeneration %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HI = [{"role": "user", "content": "hi"}]


def test_conversation_is_rendered() -> None:
    chat = ChatFormat(TEMPLATE, {"eos_token": "<|im_end|>"})
    assert chat.render(HI) == "<|user|>hi<|im_end|><|assistant|>"
    assert chat.render(HI, add_generation_prompt=False) == "<|user|>hi<|im_end|>"
    assert ChatFormat("{{ messages | tojson }}").render([{"é": "<"}]) == '[{"é": "<"}]'
    sorted_ascii = "{{ messages[0] | tojson(True, None, (',', ':'), sort_keys=True) }}"
    assert ChatFormat(sorted_ascii).render([{"é": 1, "a": 2}]) == '{"a":2,"\\u00e9":1}'
    assert ChatFormat("{{ messages | tojson(ensure_ascii=False) }}").render([]) == "[]"


def test_template_is_read_from_the_model_directory(tmp_path: Path) -> None:
    specials = {"eos_token": "</s>"}
    with pytest.raises(ValueError, match="no chat template"):
        ChatFormat.from_dir(tmp_path, specials).render(HI)
    config = tmp_path / "tokenizer_config.json"

    def rendered(template: object) -> str:
        config.write_text(json.dumps({"chat_template": template}), encoding="utf-8")
        return ChatFormat.from_dir(tmp_path, specials).render(HI)

    assert rendered("one{{ eos_token }}") == "one</s>"
    named = [{"name": "tool_use", "template": ""}, {"name": "default", "template": TEMPLATE}]
    assert rendered(named) == "<|user|>hi</s><|assistant|>"
    with pytest.raises(ValueError, match="no chat template"):
        rendered(named[:1])
    named[0]["template"] = "<tool_call>name arguments{{ tools }}"
    assert rendered(named) == "<|user|>hi</s><|assistant|>"
    tools = [{"type": "function"}]
    chat = ChatFormat.from_dir(tmp_path, specials)
    chat.require_tools()
    assert chat.render(HI, tools=tools).endswith("[{'type': 'function'}]")
    additional = tmp_path / "additional_chat_templates"
    additional.mkdir()
    (additional / "tool_use.jinja").write_text("{{ tools[0].type }}", encoding="utf-8")
    assert ChatFormat.from_dir(tmp_path, specials).render(HI, tools=tools) == "function"
    (additional / "tool_use.jinja").unlink()
    for wrong in ([{"name": "default"}], ["x"]):
        with pytest.raises(ValueError, match="chat_template must hold names and templates"):
            rendered(wrong)
    (tmp_path / "chat_template.json").write_text('{"chat_template": "json"}')
    assert rendered(None) == "json" and rendered("one") == "one"
    # A separate template file takes precedence over the config.
    (tmp_path / "chat_template.jinja").write_text("é{{ messages[0].role }}", encoding="utf-8")
    assert rendered("one") == "éuser"
    (tmp_path / "chat_template.jinja").unlink()
    config.write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object, got list"):
        ChatFormat.from_dir(tmp_path, specials)


@pytest.mark.parametrize(
    "template,message",
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.missing.more }}", "refused the messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_templates_are_sandboxed_and_can_raise_errors(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatFormat(template).render([{"role": "user", "content": "x"}])


def test_broken_template_is_refused() -> None:
    with pytest.raises(ValueError, match="chat template is not valid Jinja"):
        ChatFormat("{% if %}")
