"""Chat templates: the model's own, in jinja2's sandbox, with what published templates expect there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from spec_server.engine.errors import InvalidRequest, NotSupported

# For a model that names none, as llama-server does.
CHATML = (
    "{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\\n' + message.content + "
    "'<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


class ChatTemplate:
    """One model's template, compiled once. NotSupported: it cannot be compiled at all."""

    def __init__(self, source: str, bos_token: str, eos_token: str) -> None:
        self.source = source or CHATML
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._knows_developer = "developer" in self.source
        try:
            self._template = _environment().from_string(self.source)
        except jinja2.TemplateError as error:
            raise NotSupported(f"the chat template cannot be compiled: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool,
        kwargs: Mapping[str, object],
    ) -> str:
        """InvalidRequest with the template's own words where it refuses the messages."""
        if not self._knows_developer:
            messages = [
                {**message, "role": "system"} if message["role"] == "developer" else message
                for message in messages
            ]
        context = {
            **self._tokens,
            **kwargs,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(context)
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
        ) as error:
            raise InvalidRequest(
                f"messages: the chat template refuses them: {error}", param="messages"
            ) from error


class _Generation(Extension):
    """{% generation %} marks the assistant's text for training and prints what it holds."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own escapes <, > and & for HTML, which no model was trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
