# SPDX-License-Identifier: Apache-2.0
"""One step of the model for some sequences: from token ids to sampled tokens."""

import dataclasses
import math
from collections.abc import Sequence as Sequence_

import jax
import numpy as np

from kvferry.engine.logit_adjustment import LogitAdjustment
from kvferry.engine.request import SampledToken, TokenLogprob
from kvferry.engine.runner import ModelRunner
from kvferry.engine.sampler import Sampler, SamplingRow
from kvferry.engine.sampling_ops import Samples
from kvferry.engine.sequence import Sequence
from kvferry.engine.step_inputs import Chunk


@dataclasses.dataclass(frozen=True)
class StepWork:
    """What one sequence does in a step.

    Attributes:
        seq: the sequence; its pages hold all tokens up to `end`.
        count: how many of its tokens, from `seq.num_computed` on, are computed.
    """

    seq: Sequence
    count: int

    @property
    def end(self) -> int:
        """Position behind the last token computed."""
        return self.seq.num_computed + self.count

    @property
    def prompt_rows(self) -> range:
        """Prompt positions whose log-probability this step gives and the sequence still lacks."""
        seq = self.seq
        start, end = seq.num_computed + 1, min(self.end + 1, seq.prompt_len)
        return range(max(start, seq.next_prompt_logprob), max(start, end))


@dataclasses.dataclass(frozen=True)
class StepOutcome:
    """What a step brought to one sequence.

    Attributes:
        seq: the sequence.
        token: its next token; None while tokens of it are still to be computed.
        failure: why it has no token though it should; empty if all is well.
    """

    seq: Sequence
    token: SampledToken | None
    failure: str = ""


class StepExecutor:
    """Runs steps on a runner and samples from them."""

    def __init__(self, runner: ModelRunner, sampler: Sampler) -> None:
        """Makes an executor.

        Args:
            runner: runs the model.
            sampler: chooses the tokens.
        """
        self._runner = runner
        self._sampler = sampler

    def execute(self, work: Sequence_[StepWork]) -> list[StepOutcome]:
        """Computes tokens of some sequences, advances `num_computed`, and waits for the result.

        A token is sampled for each sequence whose last token was among those computed.
        Prompt log-probabilities that are wanted are added to the sequences.

        Args:
            work: at most as many sequences and tokens as the runner takes in a step.

        Returns:
            One outcome per piece of work, in the same order.
        """
        chunks = [
            Chunk(seq.tokens(seq.num_computed, item.end), seq.num_computed, seq.pages)
            for item in work
            for seq in (item.seq,)
        ]
        keep_hidden = any(item.prompt_rows for item in work)
        result = self._runner.run(chunks, keep_hidden=keep_hidden)
        rows = [self._row(item) for item in work]
        samples = None
        if any(row is not None for row in rows):
            samples = self._sampler.sample(result.logits, rows)
        if keep_hidden:
            self._collect_prompt_logprobs(work, result.hidden)
        for item in work:
            item.seq.num_computed = item.end
        if samples is None:
            # Nobody reads this step's result, but the next turn must not start before it is
            # there: aborts and messages would have to wait for several steps then.
            jax.block_until_ready(result.logits)
            return [StepOutcome(item.seq, None) for item in work]
        fetched = jax.device_get(samples)
        return [
            StepOutcome(item.seq, None) if row is None else _outcome(item.seq, fetched, index)
            for index, (item, row) in enumerate(zip(work, rows, strict=True))
        ]

    def _row(self, item: StepWork) -> SamplingRow | None:
        seq = item.seq
        if item.end < seq.num_tokens:
            return None
        request = seq.request
        if seq.adjustment is None and request.params.changes_logits:
            seq.adjustment = LogitAdjustment(
                request.params,
                request.prompt_ids,
                seq.output_ids,
                seq.answer.stop_ids,
                self._runner.config.vocab_size,
            )
        return SamplingRow(
            request.params,
            seq.seed,
            position=seq.num_tokens,
            adjustment=seq.adjustment,
            top_logprobs=request.num_top_logprobs > 0,
        )

    def _collect_prompt_logprobs(self, work: Sequence_[StepWork], hidden: jax.Array) -> None:
        """Adds the entries that this step's rows give; row p predicts position p + 1."""
        targets: list[int] = []
        for item in work:
            seq = item.seq
            following = seq.tokens(seq.num_computed + 1, item.end + 1)
            # After the last token comes one that is not known yet; its row is not read.
            targets += following + [0] * (item.count - len(following))
        top_n = max(item.seq.request.num_top_logprobs for item in work if item.prompt_rows)
        found = jax.device_get(
            self._runner.prompt_logprobs(hidden, np.asarray(targets, np.int32), top_n)
        )
        first_row = 0
        for item in work:
            for position in item.prompt_rows:
                row = first_row + position - 1 - item.seq.num_computed
                top = _top(found.top, found.top_ids, row, item.seq.request.num_top_logprobs)
                token = item.seq.request.prompt_ids[position]
                item.seq.add_prompt_logprob(TokenLogprob(float(found.target[row]), token, top))
            first_row += item.count


def _outcome(seq: Sequence, samples: Samples, index: int) -> StepOutcome:
    token, logprob = int(samples.token_ids[index]), float(samples.logprobs[index])
    if not math.isfinite(logprob):
        return StepOutcome(
            seq, None, f"the model gave no usable logits: token {token} has logprob {logprob}"
        )
    if not seq.request.return_logprob:
        return StepOutcome(seq, SampledToken(token))
    top = _top(samples.top_logprobs, samples.top_ids, index, seq.request.num_top_logprobs)
    return StepOutcome(seq, SampledToken(token, TokenLogprob(logprob, token, top)))


def _top(
    logprobs: jax.Array | None, ids: jax.Array | None, row: int, count: int
) -> tuple[tuple[float, int], ...]:
    if not count or logprobs is None or ids is None:
        return ()
    pairs = zip(logprobs[row, :count], ids[row, :count], strict=True)
    return tuple((float(logprob), int(token)) for logprob, token in pairs)
