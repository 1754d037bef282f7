# SPDX-License-Identifier: Apache-2.0
"""Routes that tell about the server or manage it: health, names, load, metrics, tokens."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvferry.engine.sampling_params import SamplingParams
from kvferry.server.errors import NOT_FOUND, UNAVAILABLE, ApiError
from kvferry.server.metrics import CONTENT_TYPE
from kvferry.server.plan import SequencePlan
from kvferry.server.prompts import read_ids
from kvferry.server.request_body import decode, read_body
from kvferry.server.schemas import AbortBody, DetokenizeBody, TokenizeBody
from kvferry.server.service import Service

PROBE_SECONDS = 20.0

_ABORT = msgspec.json.Decoder(AbortBody)
_TOKENIZE = msgspec.json.Decoder(TokenizeBody)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeBody)


def json_answer(value: Any) -> Response:
    """Returns a value as a JSON answer.

    Args:
      value: anything msgspec encodes.

    Returns:
      The answer, status 200.
    """
    return Response(msgspec.json.encode(value), media_type="application/json")


async def health(service: Service, request: Request) -> Response:
    """Answers GET /health: 200 when requests can be served, else 503 with the reason."""
    service.require_available()
    return json_answer({"status": "ok"})


async def livez(service: Service, request: Request) -> Response:
    """Answers GET /livez: 200 unless only a restart of the process helps, then 503 and why.

    For a supervisor that restarts; /health is for a router that chooses.
    """
    fault = service.fault()
    if fault is not None:
        raise ApiError(f"the server has to be restarted: {fault}", UNAVAILABLE)
    return json_answer({"status": "ok"})


async def health_generate(service: Service, request: Request) -> Response:
    """Answers GET /health_generate: like /health, and on an unpaired server a token is generated.

    Half of a pair cannot generate alone.
    """
    service.require_available()
    if service.options.role == "null":
        await _generate_one_token(service)
    return json_answer({"status": "ok"})


async def server_info(service: Service, request: Request) -> Response:
    """Answers GET /server_info and /get_server_info."""
    stats = service.scheduler.stats()
    state = {
        "last_gen_throughput": None,
        "avg_spec_accept_length": None,
        "num_running_reqs": stats.used_slots,
        "num_waiting_reqs": stats.queued,
        "kv_pages_used": stats.used_pages,
        "kv_pages": stats.num_pages,
        **service.hooks.state(),
    }
    fields = {
        "served_model_name": service.options.model_name,
        "disaggregation_mode": service.options.role,
        "max_context": service.options.max_context,
        **service.options.server_info,
        "internal_states": [state],
    }
    return json_answer(fields)


async def model_info(service: Service, request: Request) -> Response:
    """Answers GET /model_info and /get_model_info."""
    fields = {
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": "default",
        "served_model_name": service.options.model_name,
        **service.options.model_info,
    }
    return json_answer(fields)


async def models(service: Service, request: Request) -> Response:
    """Answers GET /v1/models."""
    return json_answer({"object": "list", "data": [_model(service)]})


async def model(service: Service, request: Request) -> Response:
    """Answers GET /v1/models/{name}."""
    name = request.path_params["name"]
    if name != service.options.model_name:
        raise ApiError(
            f"there is no model {name!r}; this server has {service.options.model_name!r}",
            NOT_FOUND,
        )
    return json_answer(_model(service))


async def get_load(service: Service, request: Request) -> Response:
    """Answers GET /get_load, which a router's power_of_two policy reads."""
    stats = service.scheduler.stats()
    load = {
        "dp_rank": 0,
        "num_reqs": stats.live,
        "num_waiting_reqs": stats.queued,
        "num_tokens": stats.num_tokens,
    }
    return json_answer([load])


async def flush_cache(service: Service, request: Request) -> Response:
    """Answers POST /flush_cache, which routers and benchmarks of SGLang send."""
    return json_answer({"message": "there is no prefix cache"})


async def abort_request(service: Service, request: Request) -> Response:
    """Answers POST /abort_request: ends requests by id, or all of them."""
    body = decode(_ABORT, await read_body(request, service.options.max_body_bytes))
    if body.abort_all:
        return json_answer({"aborted": service.abort_all("all requests were aborted", 400)})
    if not body.rid:
        raise ApiError("rid is missing; give the id of a request, or abort_all")
    return json_answer({"aborted": service.abort(body.rid)})


async def metrics(service: Service, request: Request) -> Response:
    """Answers GET /metrics in Prometheus' text format."""
    return Response(service.metrics.text(), media_type=CONTENT_TYPE)


async def tokenize(service: Service, request: Request) -> Response:
    """Answers POST /tokenize."""
    body = decode(_TOKENIZE, await read_body(request, service.options.max_body_bytes))
    if body.prompt is None:
        raise ApiError("prompt is missing; give a text or a list of texts")
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    lists = await service.prompts.tokenize(texts, body.add_special_tokens is not False)
    single = isinstance(body.prompt, str)
    counts = [len(ids) for ids in lists]
    fields = {
        "tokens": lists[0] if single else lists,
        "count": counts[0] if single else counts,
        "max_model_len": service.options.max_context,
    }
    return json_answer(fields)


async def detokenize(service: Service, request: Request) -> Response:
    """Answers POST /detokenize."""
    body = decode(_DETOKENIZE, await read_body(request, service.options.max_body_bytes))
    if body.tokens is None:
        raise ApiError("tokens is missing; give token ids, or lists of token ids")
    if not body.tokens:
        return json_answer({"text": ""})
    prompts, batch = read_ids("tokens", body.tokens)
    texts = [_decode(service, ids, body.skip_special_tokens is not False) for ids in prompts]
    return json_answer({"text": texts if batch else texts[0]})


def _decode(service: Service, ids: tuple[int, ...], skip_special_tokens: bool) -> str:
    size = service.tokenizer.vocab_size
    for token in ids:
        if not 0 <= token < size:
            raise ApiError(f"tokens has {token}, outside the vocabulary [0, {size})")
    return service.tokenizer.decode(ids, skip_special_tokens)


def _model(service: Service) -> dict[str, object]:
    name = service.options.model_name
    return {
        "id": name,
        "object": "model",
        "created": service.started_at,
        "owned_by": "kvferry",
        "root": name,
        "max_model_len": service.options.max_context,
    }


async def _generate_one_token(service: Service) -> None:
    params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    plan = SequencePlan(public_id=f"health-{service.new_id()}", prompt_ids=(0,), params=params)
    call = service.start([plan])
    failure = ApiError(f"no token came within {PROBE_SECONDS:g} s", UNAVAILABLE)
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            while not call.finished:
                await call.wait()
    except TimeoutError as error:
        raise failure from error
    finally:
        call.fail(failure)
