# SPDX-License-Identifier: Apache-2.0
"""What a request may ask of a model and its pool. Checked before it is queued."""

import dataclasses

from kvferry.engine.request import Request


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """The limits that every server of a pair must share, so that both refuse the same requests.

    Attributes:
        max_context: most tokens of a sequence, prompt and answer together.
        vocab_size: token ids are below this.
    """

    max_context: int
    vocab_size: int

    def check(self, request: Request) -> None:
        """Checks a request against the limits; safe from any thread.

        Args:
            request: well formed in itself.

        Raises:
            ValueError: a token id is outside the vocabulary, or prompt and answer together are
                longer than the context; the message names the values.
        """
        request.params.check_vocabulary(self.vocab_size)
        for position, token in enumerate(request.prompt_ids):
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"prompt token {position} has id {token}, outside the vocabulary "
                    f"[0, {self.vocab_size})"
                )
        prompt_len, params = len(request.prompt_ids), request.params
        wanted = 1 if params.max_new_tokens is None else params.max_new_tokens
        if prompt_len + min(wanted, 1) > self.max_context:
            raise ValueError(
                f"the prompt has {prompt_len} tokens; with {min(wanted, 1)} to generate that is "
                f"more than the context limit of {self.max_context} tokens; shorten it"
            )
        wanted = max(wanted, params.min_new_tokens)
        if prompt_len + wanted > self.max_context:
            raise ValueError(
                f"the prompt has {prompt_len} tokens and {wanted} more are asked for, together "
                f"more than the context limit of {self.max_context} tokens; lower max_new_tokens "
                f"to at most {self.max_context - prompt_len}"
            )

    def answer_limit(self, request: Request) -> int:
        """Returns the most tokens the answer may have.

        Args:
            request: one that passed `check`.
        """
        left = self.max_context - len(request.prompt_ids)
        wanted = request.params.max_new_tokens
        return left if wanted is None else min(wanted, left)
