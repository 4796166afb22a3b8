"""Chat templates as published models write them."""

from __future__ import annotations

import pytest

from spec_server.api.templates import ChatTemplate
from spec_server.engine.errors import InvalidRequest, NotSupported

USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages: list[dict[str, object]] | None = None, **kwargs: object) -> str:
    template = ChatTemplate(source, "<s>", "</s>")
    return template.render(messages or USER, add_generation_prompt=True, kwargs=kwargs)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}", "hi\n"),
        ("{{ {'a': '<b>ü&'} | tojson }}", '{"a": "<b>ü&"}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hi"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ eos_token }}{{ bos_token }}", "</s><s>"),
        ("{{ 'a\nb'.split('\n')[-1].lstrip('x') }}", "b"),
        ("{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}", "2"),
        ("{{ enable_thinking is defined }}", "False"),
        ("{{ messages[0].tool_calls is defined }}", "False"),
    ],
)
def test_what_templates_use(source: str, text: str) -> None:
    assert render(source) == text


def test_kwargs_are_variables() -> None:
    assert render("{{ enable_thinking }}{{ n }}", enable_thinking=False, n=3) == "False3"


def test_messages_cannot_be_displaced_by_kwargs() -> None:
    template = ChatTemplate("{{ messages[0].content }}", "", "")
    assert template.render(USER, add_generation_prompt=True, kwargs={"messages": []}) == "hi"


def test_model_without_a_template_speaks_chatml() -> None:
    assert render("") == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no such role') }}",
        "{{ messages[0].content + 5 }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ range(10000000) | list }}",
    ],
)
def test_failing_template_refuses_the_request(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template"):
        render(source)


def test_template_that_does_not_compile() -> None:
    with pytest.raises(NotSupported, match="cannot be compiled"):
        ChatTemplate("{% for %}", "", "")
