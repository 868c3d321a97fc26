"""Chat templates: where one is found, and that none reaches files or Python's insides."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import jinja2
import pytest
from refusals import tells

from meshtrain.data.messages import Unfit
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
    assert (
        render(text, now=86400.0)
        == '<s>{"role": "user", "content": "hi"}02 January 1970False\n'
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "{{ 10 ** 5000000 }}",
            "no template may have ... (a power)",
        ),
        (
            "{% include '/etc/hostname' %}",
            "(the file /etc/hostname) ... chats.jsonl#7",
        ),
        ("{{ ''.__class__.__mro__ }}", "may have (access to attribute '__class__'"),
        ("{{ namespace(__class__=1) }}", "template may have (the name __class__"),
        ("{% for %}", "is not Jinja (line 1: "),
    ],
)
def test_a_template_that_does_harm_ends_in_a_sentence(text, reason):
    with pytest.raises(ConfigError) as caught:
        render(text)
    assert str(caught.value).startswith("the chat template mine.jinja ") and tells(
        str(caught.value), reason
    )


def test_messages_that_a_template_does_not_take_are_the_record_s_fault():
    with pytest.raises(Unfit, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_a_template_is_found_beside_its_tokenizer(tmp_path):
    tokenizer = str(tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"neither chat_template\.jinja nor"):
        find_template(None, tokenizer)
    several = [
        {"name": "tool_use", "template": "no"},
        {"name": "default", "template": "of the list"},
    ]
    config = {
        "chat_template": several,
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "pad_token": None,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = find_template(None, tokenizer)
    assert (found.text, found.of_tools) == ("of the list", "no")
    assert found.special == {"bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "chat_template.jinja").write_text("of the file")
    assert find_template(None, tokenizer).text == "of the file"
    (tmp_path / "mine.jinja").write_text("mine")
    given = find_template(str(tmp_path / "mine.jinja"), tokenizer)
    assert given.text == "mine" and given.special == found.special


@pytest.mark.parametrize("name", ["bos_token", "eos_token", "pad_token", "unk_token"])
@pytest.mark.parametrize(
    "given", ["<|mine|>", {"content": "<|mine|>", "lstrip": False}]
)
def test_a_special_token_may_stand_in_special_tokens_map_alone(name, given, tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ " + name + " }}")
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({name: given, "additional_special_tokens": ["<x>"]})
    )
    assert find_template(None, str(tmp_path / "tokenizer.json")).special == {
        name: "<|mine|>"
    }
    # tokenizer_config.json goes first, but for what it leaves open
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({name: None}))
    assert find_template(None, str(tmp_path / "tokenizer.json")).special == {
        name: "<|mine|>"
    }
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({name: "<s>", "sep_token": "<sep>"})
    )
    found = find_template(
        str(tmp_path / "chat_template.jinja"), str(tmp_path / "tokenizer.json")
    )
    assert found.special == {name: "<s>", "sep_token": "<sep>"}


def test_a_special_tokens_map_that_is_damaged_is_named(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("x")
    (tmp_path / "special_tokens_map.json").write_text("[1]")
    with pytest.raises(
        ConfigError, match=r"special_tokens_map\.json .*damaged: .*not a JSON"
    ):
        find_template(None, str(tmp_path / "tokenizer.json"))


def test_bytes_have_no_template():
    with pytest.raises(
        ConfigError, match=r"tokenizer byte has none; .* data\.template"
    ):
        find_template(None, "byte")


# --- several templates


def test_a_conversation_with_tools_has_the_template_of_tools(tmp_path):
    several = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools[0].name }}"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": several})
    )
    tokenizer = str(tmp_path / "tokenizer.json")
    for found in (
        find_template(None, tokenizer),
        find_template(str(tmp_path / "tokenizer_config.json"), "byte"),
    ):
        template = ChatTemplate(found)
        written = [
            template.render(MESSAGES, tools, [(2, False)], "")[0]
            for tools in (None, [{"name": "add"}])
        ]
        assert written == [["plain"], ["add"]]


def test_additional_templates_stand_in_a_folder_beside_the_template(tmp_path):
    tokenizer = str(tmp_path / "tokenizer.json")
    (tmp_path / "chat_template.jinja").write_text("plain")
    alone = find_template(None, tokenizer)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("rag")
    found = find_template(None, tokenizer)
    assert (found.text, found.of_tools) == ("plain", "tools") and alone.of_tools is None
    assert (
        found.digest != alone.digest
        and find_template(str(tmp_path / "chat_template.jinja"), "byte").digest
        == found.digest
    )


def test_several_without_a_default_are_refused(tmp_path):
    for several in (
        [{"name": "tool_use", "template": "x"}],
        [{"name": ["default"], "template": "x"}],
        [],
        {},
        3,
    ):
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps({"chat_template": several})
        )
        with pytest.raises(ConfigError, match=r"called default|is neither"):
            find_template(None, str(tmp_path / "tokenizer.json"))


# --- what a rendering may take


HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "nested loops that skip": "{% set r = range(99999) %}{% for a in r %}{% for b in r if false %}{% endfor %}{% "
    "endfor %}",
    "nested loops of one range": "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
    "a loop in a filter of one range": "{% set r = range(99999) %}{% for a in r %}{% set x = r | "
    "map(attribute='real') | sum %}{% endfor %}",
    "a recursive loop": "{% for a in range(9) recursive %}{{ loop(range(9)) if loop.depth < 12 }}{% endfor %}",
    "macros that call each other": "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(60) }}",
    "a loop in a filter": "{% for a in range(99999) %}{{ range(99999) | map('abs') | sum }}{% endfor %}",
    "a selection": "{% for a in range(99999) %}{{ range(99999) | select('odd') | list | length }}{% endfor %}",
    "attributes": "{% for a in range(99999) %}{{ range(99999) | map(attribute='real') | sum }}{% endfor %}",
    "a wide filter": "{{ 'a' | center(2000000000) }}",
    "a wide method": "{{ 'a'.center(2000000000) }}{{ 'a'.ljust(2000000000) }}",
    "zeros": "{{ '1'.zfill(2000000000) }}",
    "zeros to the left": "{{ 'a'.rjust(2000000000) }}",
    "a product": "{{ 'a' * 10 ** 10 }}",
    "a product of lists": "{{ [0] * 10 ** 10 }}",
    "a product on the left": "{{ 10 ** 10 * 'a' }}",
    "a power": "{{ 10 ** (10 ** 10) }}",
    "squares": "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "doubled": "{% set n = namespace(x='aa') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "added": "{% set n = namespace(x='aa') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "lists added": "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "lists of lists": "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ "
    "n.x }}",
    "lists of lists as JSON": "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}{% "
    "endfor %}{{ n.x | tojson }}",
    "lists of lists compared": "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] "
    "%}{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}",
    "captured": "{% set n = namespace(x='aa') %}{% for i in range(99) %}{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% "
    "set n.x = y %}{% endfor %}",
    "a replacement": "{% set x = 'a' * 99999 %}{{ x | replace('a', x) }}",
    "a replacement by a method": "{% set x = 'a' * 99999 %}{{ x.replace('a', x) }}",
    "a join": "{% set x = 'a' * 99999 %}{{ x | join(x) }}",
    "a join by a method": "{% set x = 'a' * 99999 %}{{ x.join(x) }}",
    "a join of a generator": "{% set x = 'a' * 99999 %}{{ range(99999) | map('string') | join(x) }}",
    "a format": "{{ '%2000000000d' | format(1) }}",
    "a format by an operator": "{{ '%2000000000d' % 1 }}",
    "a format of a given width": "{{ '%*d' % (2000000000, 1) }}",
    "a format by a method": "{{ '{:2000000000}'.format(1) }}",
    "a format within a format": "{{ '{:{}}'.format(1, 2000000000) }}",
    "an indent": "{{ ('a\n' * 9999) | indent(2000000000) }}",
    "an indent of JSON": "{{ [1] | tojson(indent=2000000000) }}",
    "tabs": "{{ ('\t' * 9999).expandtabs(99999999) }}",
    "bytes of a number": "{{ (1).to_bytes(10000000000, 'big') }}",
    "many dictionaries": "{% for i in range(99999) %}{{ {}.fromkeys(range(99999)) }}{% endfor %}",
    "a rounding": "{{ 1.5 | round(2000000000, 'ceil') }}",
    "a search of a long text": "{% set x = 'a' * 900000 %}{% for i in range(99999) %}{{ 'b' in x }}{% endfor %}",
    "cuts of a long text": "{% set x = 'a' * 900000 %}{% for i in range(99999) %}{% set y = x[1:] %}{% endfor %}",
    "methods on a long text": "{% set x = 'a' * 900000 %}{% for i in range(99999) %}{% set y = x.split('b') %}{% "
    "endfor %}",
    "text in a loop": "{% for i in range(99999) %}" + "a" * 9999 + "{% endfor %}",
    "text from a variable": "{% set x = 'a' * 900000 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    "a sum of lists": "{{ [[1]] * 99999 | sum(start=[]) }}{{ ([[1]] * 99999) | sum(start=[]) }}",
    "links": "{{ ('http://a.b ' * 99999) | urlize(rel='a' * 9999) }}",
    "a date": "{{ strftime_now('%99999999d') }}",
    "batches": "{{ [1] | batch(2000000000, 0) | list }}",
}


@pytest.mark.parametrize("harm", HOSTILE)
def test_what_takes_for_ever_ends_in_a_sentence_at_once(harm):
    began = time.thread_time()
    with pytest.raises(ConfigError, match="no template may have"):
        render(HOSTILE[harm])
    assert time.thread_time() - began < 2


def test_the_bound_holds_in_threads_too():
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(render, HOSTILE["nested loops"]) for _ in range(2)]
        assert all("more work than" in str(each.exception()) for each in found)


def test_what_a_rendering_may_take_grows_with_the_conversation():
    text = (
        "{% for m in messages %}{% for n in messages %}{{ '' if n.role == m.role }}{% endfor %}{% endfor %}{{ "
        "messages | tojson }}"
    )
    template = ChatTemplate(TemplateText("t", text))
    messages = [{"role": "user", "content": "word " * 20}] * 200
    assert len(template.render(messages, None, [(200, False)], "")[0][0]) > 20_000
    template.render(
        [{"role": "user", "content": "word " * 400_000}], None, [(1, False)], ""
    )


@pytest.mark.parametrize("text", ["{{ messages | random }}", "{{ lipsum() }}"])
def test_nothing_is_left_to_chance(text):
    with pytest.raises((ConfigError, Unfit), match=r"random|lipsum"):
        render(text)


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages[0].items }}",
        "{{ range }}",
        "{{ messages | map('length') }}",
        "{{ 'a' ~ messages[0].get }}",
        "{{ messages[0].get | string }}",
        "{{ joiner }}",
    ],
)
def test_a_function_is_not_written_since_its_spelling_differs_from_run_to_run(text):
    with pytest.raises(ConfigError, match="differs from run to run"):
        render(text)


def test_a_template_of_a_huge_text_is_refused_before_it_is_compiled(tmp_path):
    (tmp_path / "t.jinja").write_text("{{ a }}" * 100_000)
    with pytest.raises(ConfigError, match="700,000 characters, but at most"):
        find_template(str(tmp_path / "t.jinja"), "byte")


def test_what_templates_do_is_as_in_jinja_itself():
    text = """{%- set n = namespace(x='') -%}{%- for m in messages if m.role != 'system' -%}{%- set n.x = n.x ~ m.content + '|' -%}
{{- loop.index ~ '/' ~ loop.length ~ ('' if loop.last else ',') -}}{%- endfor -%}
{%- macro f(a, b=2) -%}{{ a ~ b }}{%- endmacro -%}{{ f(1) }}{{ n.x[:-1] }}{{ 'yo' in n.x }}{{ messages[::-1][0].content }}
{{- 'a-b'.replace('-', '+') ~ ', '.join(['a', 'b']) ~ '%s!' % 'c' ~ '{}?'.format('d') ~ 'x' * 3 ~ 2 ** 3 ~ 'e' | center(3) ~ missing -}}
{{- messages | map(attribute='role') | join(' ') }}{{ [1, 2] == [1, 2] }}{{ 'a\nb' | indent(2) }}{{ [[1], [2]] | sum(start=[]) | length if false }}"""
    theirs = (
        jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        .from_string(text)
        .render(messages=MESSAGES)
    )
    assert render(text) == theirs
