# SPDX-License-Identifier: Apache-2.0
"""POST /v1/completions."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvferry.server.answer import CallAnswer
from kvferry.server.call import COMPLETION_PREFIX
from kvferry.server.completion_form import CompletionForm
from kvferry.server.errors import ApiError
from kvferry.server.fields import at_least, whole
from kvferry.server.openai_common import Envelope, openai_sampling, top_count, wants_usage
from kvferry.server.plan import SequencePlan
from kvferry.server.prompts import read_ids
from kvferry.server.refuse import refuse_openai
from kvferry.server.request_body import decode, read_body
from kvferry.server.schemas import CompletionBody
from kvferry.server.service import Service

DEFAULT_MAX_TOKENS = 16

_DECODER = msgspec.json.Decoder(CompletionBody)


async def completions(service: Service, request: Request) -> Response:
    """Answers POST /v1/completions.

    Args:
      service: the service.
      request: the HTTP request.

    Returns:
      The answer, not yet sent.

    Raises:
      ApiError: the request is refused.
    """
    body = decode(_DECODER, await read_body(request, service.options.max_body_bytes))
    refuse_openai(body)
    _refuse_combinations(service, body)
    prompts, texts = await _prompts(service, body)
    answer_id = f"{COMPLETION_PREFIX}{body.rid or service.new_id()}"
    plans = service.expand(_plans(service, body, prompts, answer_id), body.n, body)
    samples = len(plans) // len(prompts)
    envelope = Envelope(answer_id, "text_completion", service.options.model_name, samples)
    echoes = [texts[i // samples] if body.echo else "" for i in range(len(plans))]
    form = CompletionForm(envelope, plans, service.tokenizer, wants_usage(body), echoes)
    return CallAnswer(service.start(plans), form, bool(body.stream))


def _refuse_combinations(service: Service, body: CompletionBody) -> None:
    best_of = whole("best_of", body.best_of)
    if best_of is not None and best_of != (body.n or 1):
        raise ApiError(f"best_of {best_of} is not supported: it must equal n, here {body.n or 1}")
    if body.echo and body.logprobs is not None and service.options.role != "null":
        raise ApiError(
            "echo with logprobs is not supported by a prefill/decode pair; POST /generate with"
            " return_logprob and logprob_start_len 0 gives the prompt's log-probabilities"
        )


async def _prompts(
    service: Service, body: CompletionBody
) -> tuple[list[tuple[int, ...]], list[str]]:
    """Returns the prompts as token ids, and as text for `echo`."""
    if body.prompt is None or body.prompt == []:
        raise ApiError("prompt is missing; give a text, token ids, or a list of either")
    given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    texts = [item for item in given if isinstance(item, str)]
    if texts:
        if len(texts) != len(given):
            raise ApiError("prompt mixes texts and token ids; give one or the other")
        return await service.prompts.from_texts(texts), texts
    prompts, _ = read_ids("prompt", [item for item in given if not isinstance(item, str)])
    return prompts, service.prompts.texts_of(prompts) if body.echo else []


def _plans(
    service: Service, body: CompletionBody, prompts: list[tuple[int, ...]], answer_id: str
) -> list[SequencePlan]:
    most = at_least("max_tokens", body.max_tokens, 0)
    wanted = body.logprobs is not None
    plans = []
    for index, prompt in enumerate(prompts):
        length = service.default_length(DEFAULT_MAX_TOKENS, len(prompt)) if most is None else most
        plan = SequencePlan(
            public_id=answer_id if len(prompts) == 1 else f"{answer_id}_{index}",
            prompt_ids=prompt,
            params=openai_sampling(body, length),
            return_logprob=wanted,
            top_logprobs_num=top_count("logprobs", body.logprobs),
            logprob_start_len=0 if wanted and body.echo else -1,
        )
        plans.append(plan)
    return plans
