"""Chat templates that would take hours or all memory are refused by counting, at load and for each conversation."""

import os
import shutil

import pytest
from jinja2.exceptions import TemplateRuntimeError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from posttrain.data import templates
from posttrain.data.rendering import Renderer
from posttrain.data.templates import LimitedEnvironment
from posttrain.errors import InputError
from posttrain.models.load import load_tokenizer
from posttrain.recipe.model import ModelRecipe
from tests.adversary.templates import ENDLESS

NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}"


def rendered(template, **variables):
    return LimitedEnvironment().from_string(template).render(**variables)


@pytest.mark.parametrize("template", ENDLESS)
def test_an_endless_template_is_refused(template, monkeypatch):
    monkeypatch.setattr(templates, "BUDGET", 300_000)
    with pytest.raises(Exception, match=r"operations or longer texts|too large|recursion|undefined"):
        rendered(template, messages=[{"role": "user", "content": "x"}])


def test_every_rendering_has_a_full_budget(monkeypatch):
    monkeypatch.setattr(templates, "BUDGET", 1_000)
    template = LimitedEnvironment().from_string("{% for i in range(n) %}{{ i }}{% endfor %}")
    assert len({template.render(n=100) for _ in range(60)}) == 1
    with pytest.raises(TemplateRuntimeError):
        template.render(n=1_000)


def test_what_templates_use_is_rendered_as_by_jinja():
    template = (
        "{% for m in messages %}{{ '<' + m.role ~ '>' + m['content']|trim }}{% if not loop.last %},{% endif %}"
        "{% if m.content is string and 'b' in m.content %}{{ m.content.split('b')[-1].replace('c', 'dd') }}{% endif %}"
        "{% endfor %}{{ messages[1:]|length }} {{ messages[::-1][0].role }} {{ messages|tojson }} {{ absent is defined }}"
        "{{ '%s-%5d' % ('a', 3) }}{{ '{:>5}'.format('a') }}{{ absent == 1 }}{{ messages|map(attribute='role')|join('-') }}"
        "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 2*3 %}"
        "{{ ns.n }}{{ {'a': 1, 'b': [2]}.items()|list }}{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f('y') }}{{ 7 // 2 ** 2 }}"
        "{% for x in [1, [2, [3]]] recursive %}{{ x if x is number else loop(x) }}{% endfor %}{{ 'a b'.title()|upper }}"
        "{% set t %}{{ 'x' * 3 }}{% endset %}{{ t }}{% for k in {'z': 1} %}{{ k }}{% endfor %}{{ 10**9|default(5) }}"
    )
    messages = [{"role": "user", "content": " abc "}, {"role": "assistant", "content": "bcc"}]
    expected = ImmutableSandboxedEnvironment().from_string(template).render(messages=messages)
    assert rendered(template, messages=messages) == expected


def test_long_conversations_are_within_the_budget_and_templates_have_a_length():
    messages = [{"role": "user", "content": "word " * 400}] * 2_000
    text = rendered(
        "{% for m in messages %}{{ '<s>' + m.role + m.content|trim + '</s>' }}{% endfor %}", messages=messages
    )
    assert len(text) == 2_000 * (len("<s>user</s>") + 1_999)
    with pytest.raises(TemplateRuntimeError, match="more than 131,072 characters"):
        LimitedEnvironment().from_string("x" * 131_073)


SECOND = "{% if messages|length == 1 %}{{ messages[0].content }}{% else %}" + NESTED + "{% endif %}"


@pytest.mark.parametrize("template", [NESTED, SECOND])
def test_a_model_with_an_endless_template_is_refused(tiny_model, tmp_path, template, monkeypatch):
    monkeypatch.setattr(templates, "BUDGET", 300_000)
    model = shutil.copytree(tiny_model, tmp_path / "copy")
    (model / "chat_template.jinja").write_text(template)
    with pytest.raises(InputError, match="operations or longer texts than a chat template needs"):
        Renderer(load_tokenizer(ModelRecipe(path=str(model))), frozenset({2})).prompt(
            [{"role": "user", "content": "x"}] * 3
        )


@pytest.mark.parametrize("thinking", ["on", "off"])
def test_an_endless_template_with_a_switch_is_one_sentence(tiny_model, tmp_path, thinking, monkeypatch):
    monkeypatch.setattr(templates, "BUDGET", 300_000)
    (tmp_path / "own.jinja").write_text("{{ enable_thinking }}" + NESTED)
    with pytest.raises(InputError, match="cannot render a prompt"):
        load_tokenizer(ModelRecipe(path=str(tiny_model), chat_template=str(tmp_path / "own.jinja"), thinking=thinking))


@pytest.mark.parametrize("content", [b"\xff", b"", None])
def test_a_template_file_that_is_no_text_is_refused(tiny_model, tmp_path, content):
    file = tmp_path / "own.jinja"
    file.write_bytes(content or b"")
    if content is None:
        os.truncate(file, 8 << 30)
    with pytest.raises(InputError, match=r"cannot be read as UTF-8|no chat template|more than 131,072 characters"):
        Renderer(load_tokenizer(ModelRecipe(path=str(tiny_model), chat_template=str(file))), frozenset({2}))
