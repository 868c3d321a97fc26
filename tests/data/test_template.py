"""Chat templates: where one is found, and that none reaches files or Python's insides."""

import json

import pytest

from meshtrain.data.chat import Unfit
from meshtrain.data.template import ChatTemplate, TemplateText, find_template
from meshtrain.errors import ConfigError

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def render(text: str, now: float = 0.0) -> str:
    template = ChatTemplate(TemplateText("mine.jinja", text, {"bos_token": "<s>"}), now)
    return template.render(MESSAGES, None, [(2, False)], "chats.jsonl#7")[0][0]


def test_a_template_has_what_templates_expect():
    text = """{%- for m in messages %}
    {% if loop.last %}{% break %}{% endif %}
{{ bos_token ~ m | tojson ~ strftime_now('%d %B %Y') ~ add_generation_prompt }}
{% endfor %}"""
    assert render(text, now=86400.0) == '<s>{"role": "user", "content": "hi"}02 January 1970False\n'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{{ 10 ** 5000 }}", "cannot be compiled (Exceeds the limit (4300 digits)"),
        ("{% include '/etc/hostname' %}", "asks for what no template may have (the file /etc/hostname) (conversation chats.jsonl#7)"),
        ("{{ ''.__class__.__mro__ }}", "no template may have (access to attribute '__class__'"),
        ("{{ namespace(__class__=1) }}", "asks for what no template may have (the name __class__"),
        ("{% for %}", "is not Jinja (line 1: "),
    ],
)  # fmt: skip
def test_a_template_that_does_harm_ends_in_a_sentence(text, reason):
    with pytest.raises(ConfigError) as caught:
        render(text)
    assert str(caught.value).startswith("the chat template mine.jinja ") and reason in str(caught.value)


def test_messages_that_a_template_does_not_take_are_the_record_s_fault():
    with pytest.raises(Unfit, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_a_template_is_found_beside_its_tokenizer(tmp_path):
    tokenizer = str(tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"there is neither chat_template\.jinja nor"):
        find_template(None, tokenizer)
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "of the list"}]
    config = {"chat_template": several, "bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = find_template(None, tokenizer)
    assert found.text == "of the list" and found.special == {"bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "chat_template.jinja").write_text("of the file")
    assert find_template(None, tokenizer).text == "of the file"
    (tmp_path / "mine.jinja").write_text("mine")
    given = find_template(str(tmp_path / "mine.jinja"), tokenizer)
    assert given.text == "mine" and given.special == found.special


def test_bytes_have_no_template():
    with pytest.raises(ConfigError, match=r"the tokenizer byte has none; give one with data\.template"):
        find_template(None, "byte")
