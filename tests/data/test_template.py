"""Chat templates: where one is found, and that none does harm, whatever it tries."""

import json
from pathlib import Path

import pytest

from meshtrain.data import template as module
from meshtrain.data.chat import Unfit
from meshtrain.data.template import ChatTemplate, TemplateText, find_template
from meshtrain.errors import ConfigError

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def render(text: str, now: float = 0.0) -> str:
    template = ChatTemplate(TemplateText("mine.jinja", text, {"bos_token": "<s>"}), now)
    try:
        return template.render(MESSAGES, None, [(2, False)], "chats.jsonl#7")[0][0]
    finally:
        template.close()


def test_a_template_has_what_templates_expect() -> None:
    text = """{%- for m in messages %}
    {% if loop.last %}{% break %}{% endif %}
{{ bos_token ~ m | tojson ~ strftime_now('%d %B %Y') ~ add_generation_prompt }}
{% endfor %}"""
    assert render(text, now=86400.0) == '<s>{"role": "user", "content": "hi"}02 January 1970False\n'


HARM = {
    "loops for ever": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "computes for more than 0.2 s (conversation chats.jsonl#7)",
    ),
    "computes in C for ever": ("{{ (messages | length + 8) ** (10 ** 8) }}", "computes for more than 0.2 s (conversation"),
    "computes for ever while it is compiled": ("{{ 9 ** (10 ** 8) }}", "computes for more than 0.2 s;"),
    "multiplies a text": ("{{ messages[0].content * 10 ** 10 }}", "needs more than 256 MiB of memory"),
    "doubles without end": (
        "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "needs more than 256 MiB of memory",
    ),
    "pads a text": ("{{ messages[0].content.ljust(2 ** 24) }}!", "makes more than 16,777,216 characters"),
    "calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself without end"),
    "reads a file": ("{% include '/etc/hostname' %}", "asks for what no template may have (the file /etc/hostname)"),
    "reaches for Python's insides": ("{{ ''.__class__.__mro__ }}", "no template may have (access to attribute '__class__'"),
    "does so through a namespace": ("{{ namespace(__class__=1) }}", "asks for what no template may have (the name __class__"),
    "is no Jinja": ("{% for %}", "is not Jinja (line 1: "),
}  # fmt: skip


# What is another way to the same limit is left to CI.
LATER = ("computes in C for ever", "doubles without end")


@pytest.mark.parametrize(
    "attempt", [pytest.param(each, marks=pytest.mark.thorough if each in LATER else ()) for each in HARM]
)
def test_a_template_that_does_harm_ends_in_a_sentence(attempt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS", 0.2)
    monkeypatch.setattr(module, "MEMORY", 1 << 28)
    text, reason = HARM[attempt]
    with pytest.raises(ConfigError) as caught:
        render(text)
    said = str(caught.value)
    assert said.startswith("the chat template mine.jinja ") and reason in said and "\n" not in said


def test_no_file_can_be_opened_even_from_outside_the_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel holds what Jinja's sandbox might let through: here it lets through `open`."""
    secret = tmp_path / "secret"
    secret.write_text("secret")
    source = module.RENDERING.read_text()
    holed = tmp_path / "rendering.py"
    holed.write_text(source.replace("namespace=Namespace,", "namespace=Namespace, open=open,"))
    assert holed.read_text() != source
    monkeypatch.setattr(module, "RENDERING", holed)
    with pytest.raises(Unfit, match="Too many open files"):
        render(f"{{{{ open('{secret}').read() }}}}")


def test_messages_that_a_template_does_not_take_are_the_record_s_fault() -> None:
    with pytest.raises(Unfit, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_a_template_is_found_beside_its_tokenizer(tmp_path: Path) -> None:
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


def test_bytes_have_no_template() -> None:
    with pytest.raises(ConfigError, match=r"the tokenizer byte has none; give one with data\.template"):
        find_template(None, "byte")
