"""The model's tokenizer and chat template, as read from its directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from cluster.front.tokenizer import ChatTemplateError, ChatTurn, TextTokenizer

TURNS = [ChatTurn(role="user", content="<b>&")]


def _write(path: Path, *, config: object = None, template: str | None = None) -> Path:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "hello": 1, "world": 2, "<s>": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.enable_truncation(2)
    tokenizer.save(str(path / "tokenizer.json"))
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


def test_a_directory_without_a_template(tmp_path: Path) -> None:
    tokenizer = TextTokenizer.from_directory(_write(tmp_path))
    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.render_chat(TURNS)


def test_prompts_are_not_cut(tmp_path: Path) -> None:
    """tokenizer.json may ask for truncation, which would silently drop the end of a prompt."""
    tokenizer = TextTokenizer.from_directory(_write(tmp_path))
    assert tokenizer.encode("hello world hello world") == [1, 2, 1, 2]
    assert tokenizer.can_fit("hello world", 4) and not tokenizer.can_fit("x" * 100, 4)


@pytest.mark.parametrize(
    "config",
    [
        {"chat_template": "{{ bos_token }}{{ messages[0].content }}", "bos_token": "<s>"},
        {
            "chat_template": [
                {"name": "tool_use", "template": "no"},
                {"name": "default", "template": "<s>{{ messages[0].content }}"},
            ]
        },
        {"chat_template": "{{ bos_token }}{{ messages[0]['content'] }}", "bos_token": {"content": "<s>"}},
    ],
)
def test_templates_in_the_configuration(tmp_path: Path, config: object) -> None:
    tokenizer = TextTokenizer.from_directory(_write(tmp_path, config=config))
    assert tokenizer.render_chat(TURNS) == "<s><b>&"


def test_a_template_file_wins_and_may_use_what_templates_use(tmp_path: Path) -> None:
    template = (
        "{%- for message in messages %}\n"
        "    {%- if loop.index > 1 %}{% break %}{% endif %}\n"
        "    {{- message | tojson }}\n"
        "{%- endfor %}\n"
        "{%- if add_generation_prompt %}>{{ strftime_now('%%') }}{% endif %}"
    )
    config = {"chat_template": "other"}
    tokenizer = TextTokenizer.from_directory(_write(tmp_path, config=config, template=template))
    assert tokenizer.render_chat([*TURNS, *TURNS]) == '{"role": "user", "content": "<b>&"}>%'


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no such turn') }}", "no such turn"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ messages.append(1) }}", "unsafe|immutable|not safely"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_templates_may_refuse_and_may_not_reach_out(tmp_path: Path, template: str, message: str) -> None:
    tokenizer = TextTokenizer.from_directory(_write(tmp_path, template=template))
    with pytest.raises(ChatTemplateError, match=message):
        tokenizer.render_chat(TURNS)


def test_broken_directories(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json does not exist"):
        TextTokenizer.from_directory(tmp_path)
    _write(tmp_path, template="{% for %}")
    with pytest.raises(ValueError, match=r"chat_template\.jinja is malformed"):
        TextTokenizer.from_directory(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not valid JSON"):
        TextTokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        TextTokenizer.from_directory(tmp_path)
