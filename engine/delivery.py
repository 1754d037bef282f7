# SPDX-License-Identifier: Apache-2.0
"""From the state of a sequence to what its client is told."""

from kvferry.engine.request import FinishReason, RequestOutput, SampledToken
from kvferry.engine.sequence import Sequence


def build_output(
    seq: Sequence, token: SampledToken | None, finish: FinishReason | None
) -> RequestOutput:
    """Builds the next output of a sequence and counts its text as sent.

    Args:
        seq: with the token already added.
        token: the new token; None if only the end is to be told.
        finish: why the sequence ended; None while it goes on.

    Returns:
        The output.
    """
    request = seq.request
    logprobs = None
    if request.return_logprob:
        logprobs = () if token is None or token.logprob is None else (token.logprob,)
    return RequestOutput(
        request_id=request.request_id,
        token_ids=() if token is None else (token.token_id,),
        text=seq.answer.take(),
        logprobs=logprobs,
        prompt_logprobs=seq.take_prompt_logprobs(),
        finish=finish,
        prompt_tokens=seq.prompt_len,
        completion_tokens=len(seq.output_ids),
        cached_tokens=seq.cached_tokens,
        marks=dict(seq.marks) if finish is not None else {},
    )
