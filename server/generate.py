# SPDX-License-Identifier: Apache-2.0
"""POST /generate in SGLang's shape."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvferry.server.answer import CallAnswer
from kvferry.server.errors import ApiError
from kvferry.server.fields import at_least, per_item, whole
from kvferry.server.generate_form import GenerateForm
from kvferry.server.plan import SequencePlan
from kvferry.server.prompts import read_ids
from kvferry.server.refuse import refuse_unsupported
from kvferry.server.request_body import decode, read_body
from kvferry.server.sampling import sampling_params
from kvferry.server.schemas import GenerateBody, GenerateSampling
from kvferry.server.service import Service

DEFAULT_MAX_NEW_TOKENS = 128

_DECODER = msgspec.json.Decoder(GenerateBody)


async def generate(service: Service, request: Request) -> Response:
    """Answers POST /generate.

    Args:
      service: the service.
      request: the HTTP request.

    Returns:
      The answer, not yet sent.

    Raises:
      ApiError: the request is refused.
    """
    body = decode(_DECODER, await read_body(request, service.options.max_body_bytes))
    refuse_unsupported(body)
    prompts, batch = await _prompts(service, body)
    samplings = _samplings(body, len(prompts))
    plans = service.expand(_plans(service, body, prompts, samplings), samplings[0].n, body)
    texts = service.tokenizer.token_text if body.return_text_in_logprobs else None
    form = GenerateForm(plans, batch or len(plans) > 1, texts)
    return CallAnswer(service.start(plans), form, bool(body.stream))


async def _prompts(service: Service, body: GenerateBody) -> tuple[list[tuple[int, ...]], bool]:
    if (body.text is None) == (body.input_ids is None):
        given = "neither" if body.text is None else "both"
        raise ApiError(f"{given} of `text` and `input_ids` given; exactly one is needed")
    if body.input_ids is not None:
        return read_ids("input_ids", body.input_ids)
    batch = isinstance(body.text, list)
    texts = body.text if isinstance(body.text, list) else [body.text or ""]
    if not texts:
        raise ApiError("text is an empty list; give at least one text")
    return await service.prompts.from_texts(texts), batch


def _samplings(body: GenerateBody, count: int) -> list[GenerateSampling]:
    samplings = per_item("sampling_params", body.sampling_params, count, GenerateSampling())
    for sampling in samplings:
        refuse_unsupported(sampling)
        if sampling.n != samplings[0].n:
            raise ApiError("sampling_params differ in n; all prompts of a request share one n")
    return samplings


def _plans(
    service: Service,
    body: GenerateBody,
    prompts: Sequence[tuple[int, ...]],
    samplings: Sequence[GenerateSampling],
) -> list[SequencePlan]:
    count = len(prompts)
    wanted = per_item("return_logprob", body.return_logprob, count, False)
    starts = per_item("logprob_start_len", body.logprob_start_len, count, -1)
    tops = per_item("top_logprobs_num", body.top_logprobs_num, count, 0)
    plans = []
    for i, (name, prompt) in enumerate(zip(_names(service, body, count), prompts, strict=True)):
        most = at_least("max_new_tokens", samplings[i].max_new_tokens, 0)
        if most is None:
            most = service.default_length(DEFAULT_MAX_NEW_TOKENS, len(prompt))
        seed = samplings[i].sampling_seed
        plan = SequencePlan(
            public_id=name,
            prompt_ids=prompt,
            params=sampling_params(
                samplings[i],
                max_new_tokens=most,
                min_new_tokens=samplings[i].min_new_tokens,
                seed=samplings[i].seed if seed is None else seed,
            ),
            return_logprob=wanted[i],
            top_logprobs_num=whole("top_logprobs_num", tops[i]) or 0,
            logprob_start_len=_start(whole("logprob_start_len", starts[i])),
        )
        plans.append(plan)
    return plans


def _start(start: int | None) -> int:
    return -1 if start is None else start


def _names(service: Service, body: GenerateBody, count: int) -> list[str]:
    if isinstance(body.rid, list):
        return per_item("rid", body.rid, count, "")
    name = body.rid or service.new_id()
    return [name] if count == 1 else [f"{name}_{i}" for i in range(count)]
