# SPDX-License-Identifier: Apache-2.0
import datetime
from typing import Any

import pytest

from kvferry.engine.chat_template import ChatTemplate
from kvferry.tests.engine.checkpoints import read_data

_CASES: list[dict[str, Any]] = read_data("chat_templates.json")["cases"]


@pytest.mark.parametrize("case", _CASES, ids=lambda case: case["name"])
def test_renders_or_refuses_as_transformers_does(case: dict[str, Any]) -> None:
    variables = dict(case["variables"])
    special = {key: variables.pop(key) for key in list(variables) if key.endswith("_token")}
    template = ChatTemplate(case["template"], special)
    if case["fails"]:
        with pytest.raises(ValueError, match="the model's chat template failed: "):
            template.render(case["messages"], case["add_generation_prompt"], **variables)
        return
    text = template.render(case["messages"], case["add_generation_prompt"], **variables)
    assert text == case["expected"]


def test_the_data_has_both_kinds() -> None:
    assert sum(case["fails"] for case in _CASES) >= 4
    assert sum(not case["fails"] for case in _CASES) >= 5


def test_refusal_carries_the_words_of_the_template() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(ValueError, match="template failed: roles must alternate"):
        template.render([], True)


def test_current_date() -> None:
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", {})
    before = datetime.date.today().isoformat()
    text = template.render([], True)
    assert before <= text <= datetime.date.today().isoformat()


def test_variables_of_a_request_do_not_replace_the_conversation() -> None:
    template = ChatTemplate("{{ bos_token }}{{ messages | length }}", {"bos_token": "<s>"})
    assert template.render([{}], True, bos_token="x") == "x1"


def test_invalid_template() -> None:
    with pytest.raises(ValueError, match="chat template is not valid Jinja: "):
        ChatTemplate("{% for %}", {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / 0 }}",
        "{{ messages[3].role }}",
        "{{ 'x' + 1 }}",
        "{{ messages.nothing.more }}",
        "{{ range(100000000) | list }}",
        "{{ ''.__class__ }}{{ ''.__class__.__mro__ }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include 'x' %}",
    ],
)
def test_whatever_goes_wrong_is_a_value_error(source: str) -> None:
    template = ChatTemplate(source, {})
    with pytest.raises(ValueError, match="the model's chat template failed: "):
        template.render([], True)
