# SPDX-License-Identifier: Apache-2.0
"""Chat templates: the Jinja programs that model authors ship, run in a sandbox.

The environment offers what Hugging Face's does (whitespace trimming, loop controls, `tojson`
without HTML escapes, `raise_exception`, `strftime_now`, the `generation` block), because the
templates are written against it.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# What a template can raise on messages it was not written for.
_RENDER_ERRORS = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError),
    *(ArithmeticError, RecursionError),
)


class ChatTemplate:
    """One compiled chat template with the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compiles a template.

        Args:
            source: Jinja source.
            special_tokens: Variables such as `bos_token` and `eos_token`.

        Raises:
            ValueError: The template is not valid Jinja.
        """
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the model's chat template is not valid Jinja: {error}") from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, **variables: Any
    ) -> str:
        """Renders a conversation.

        Args:
            messages: The conversation, oldest first; usually `role` and `content` keys.
            add_generation_prompt: Whether the text ends with the header of an answer.
            **variables: Further template variables (`tools`, `enable_thinking`, ...).

        Returns:
            The prompt. It contains its special tokens, so it is encoded without adding any.

        Raises:
            ValueError: The template refuses the conversation or fails on it.
        """
        scope = {"tools": None, "documents": None, **self._special_tokens, **variables}
        scope["messages"] = messages
        scope["add_generation_prompt"] = add_generation_prompt
        try:
            return self._template.render(scope)
        except _RENDER_ERRORS as error:
            detail = str(error) or type(error).__name__
            raise ValueError(f"the model's chat template failed: {detail}") from error


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}`: marks answers for training; text as usual here."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which would change the prompt.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)
