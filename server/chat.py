# SPDX-License-Identifier: Apache-2.0
"""POST /v1/chat/completions."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvferry.server.answer import CallAnswer
from kvferry.server.call import CHAT_PREFIX
from kvferry.server.chat_form import ChatForm
from kvferry.server.errors import ApiError
from kvferry.server.fields import at_least
from kvferry.server.openai_common import Envelope, openai_sampling, top_count, wants_usage
from kvferry.server.plan import SequencePlan
from kvferry.server.refuse import refuse_chat
from kvferry.server.request_body import decode, read_body
from kvferry.server.schemas import ChatBody
from kvferry.server.service import Service

_DECODER = msgspec.json.Decoder(ChatBody)


async def chat_completions(service: Service, request: Request) -> Response:
    """Answers POST /v1/chat/completions.

    Args:
      service: the service.
      request: the HTTP request.

    Returns:
      The answer, not yet sent.

    Raises:
      ApiError: the request is refused.
    """
    body = decode(_DECODER, await read_body(request, service.options.max_body_bytes))
    refuse_chat(body)
    plan = await _plan(service, body)
    plans = service.expand([plan], body.n, body)
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    envelope = Envelope(plan.public_id, kind, service.options.model_name, len(plans))
    form = ChatForm(envelope, plans, service.tokenizer, wants_usage(body))
    return CallAnswer(service.start(plans), form, bool(body.stream))


async def _plan(service: Service, body: ChatBody) -> SequencePlan:
    # A router may have renamed one of the two to the other.
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    most = at_least(name, getattr(body, name), 1)
    tops = top_count("top_logprobs", body.top_logprobs)
    if tops and not body.logprobs:
        raise ApiError("top_logprobs needs logprobs to be true")
    return SequencePlan(
        public_id=f"{CHAT_PREFIX}{body.rid or service.new_id()}",
        prompt_ids=await service.prompts.from_messages(body),
        params=openai_sampling(body, most),
        return_logprob=bool(body.logprobs),
        top_logprobs_num=tops,
    )
