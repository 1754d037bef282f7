# SPDX-License-Identifier: Apache-2.0
"""Runs a model: owns weights, KV pool and compiled steps.

Every step is compiled ahead of time for one of a few shapes, and the compiled executable is what
serving calls: a shape that was forgotten is an explicit compilation, counted in `num_traces`,
never a silent one.

The runner belongs to the step thread. It dispatches and returns; nothing here waits for a result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from kvferry.engine.attention_plan import Family
from kvferry.engine.kv_pool import CopyKind, KVPool, first_device, pool_sharding
from kvferry.engine.kv_pool_layout import KVPoolLayout
from kvferry.engine.loader import LoadedModel
from kvferry.engine.runner_options import RunnerOptions, default_page_size, resolve_sizes
from kvferry.engine.sampling_params import MAX_TOP_LOGPROBS
from kvferry.engine.sharding import TP_AXIS, shard_params
from kvferry.engine.step import StepBuilder
from kvferry.engine.step_inputs import Chunk, StepShape, pack

FAMILIES: tuple[Family, ...] = ("prefill", "decode")
# XLA compiles one module mostly on one thread; more than two at once costs memory.
_COMPILE_THREADS = 2

Progress = Callable[[int, int, str], None]


class StepResult(NamedTuple):
    """What a step leaves on the device; not yet computed when `run` returns.

    Attributes:
        hidden: Normalised final hidden states, [tokens, hidden_size]; chunks packed in order,
            padding rows unspecified.
        logits: [sequences, vocab_size], float32; row i belongs to chunk i, rows beyond the
            chunks are unspecified.
    """

    hidden: jax.Array
    logits: jax.Array


class PromptLogprobs(NamedTuple):
    """Log-probabilities of prompt tokens; on the device, not yet computed.

    Attributes:
        target: Of each row's target token, [tokens], float32.
        top: Highest ones of each row, descending, [tokens, MAX_TOP_LOGPROBS]; None if not
            asked for.
        top_ids: Their tokens, int32, same shape; None if not asked for.
    """

    target: jax.Array
    top: jax.Array | None
    top_ids: jax.Array | None


class ModelRunner:
    """A model on its device or devices, ready to step.

    Attributes:
        config: The model.
        pool: Its KV pool.
        sizes: Context limit and compiled shapes.
    """

    def __init__(self, model: LoadedModel, options: RunnerOptions) -> None:
        """Places the weights and allocates the pool.

        Args:
            model: Configuration and weights.
            options: What the operator chose.

        Raises:
            ValueError: The options do not fit the model or the memory; the message says which
                and what to change.
        """
        self.config = model.config
        mesh = options.mesh
        device = first_device(mesh, options.device)
        self._dtype = model.params["embed"].dtype
        layout = KVPoolLayout.for_model(
            model.config,
            page_size=options.page_size or default_page_size(device.platform),
            dtype=options.kv_dtype or str(self._dtype),
            platform=device.platform,
            shards=mesh.shape[TP_AXIS] if mesh else 1,
        )
        self._builder = StepBuilder(
            config=model.config,
            layout=layout,
            platform=device.platform,
            mesh=mesh,
            device=None if mesh else device,
        )
        if mesh is not None:
            self._params = shard_params(model.params, model.config, mesh)
        else:
            self._params = jax.device_put(model.params, device)
        self.sizes = resolve_sizes(options, model.config, layout, device)
        sharding = pool_sharding(mesh, device)
        self.pool = KVPool(layout, self.sizes.num_pages, sharding, self.sizes.max_pages)
        self._families: Collection[Family] = FAMILIES
        self._steps: dict[StepShape, Any] = {}
        self._logprobs: dict[tuple[int, int], Callable[..., Any]] = {}

    @property
    def num_traces(self) -> int:
        """Functions traced so far; serving after `warm_up` must not change it."""
        return self._builder.counter.count + self.pool.num_traces

    def warm_up(
        self,
        progress: Progress,
        *,
        families: Collection[Family] = FAMILIES,
        copies: Sequence[CopyKind] = (),
        on_logits: Callable[[jax.Array], None] | None = None,
    ) -> None:
        """Compiles everything that serving may need, and runs every step once on no sequences.

        Args:
            progress: Called on this thread with parts done, parts in all, and what was done.
            families: Kinds of step that this server runs. Without `decode`, steps of one token
                per sequence run as prefill.
            copies: Kinds of page copy that this server runs.
            on_logits: Called with the logits of each shape (all zero sequences, so of no
                meaning), to compile what consumes them.
        """
        self._families = families
        shapes = [shape for family in families for shape in self._shapes(family)]
        tasks: list[tuple[str, Callable[[], None]]] = [
            (shape.label, partial(self._compile_step, shape)) for shape in shapes
        ]
        if "prefill" in families:
            tasks += [
                (f"logprobs {tokens} top {top}", partial(self._compile_logprobs, tokens, top))
                for tokens in self.sizes.prefill_tokens
                for top in (0, MAX_TOP_LOGPROBS)
            ]
        tasks += self.pool.warm_up_tasks(copies)
        total = len(tasks) + len(shapes)
        progress(0, total, "compiling")
        with ThreadPoolExecutor(_COMPILE_THREADS, thread_name_prefix="compile") as threads:
            futures = {threads.submit(task): label for label, task in tasks}
            for done, future in enumerate(as_completed(futures), start=1):
                future.result()
                progress(done, total, futures[future])
        for done, shape in enumerate(shapes, start=len(tasks) + 1):
            logits = self._run(shape, []).logits
            if on_logits is not None:
                on_logits(logits)
            jax.block_until_ready(logits)
            progress(done, total, f"first {shape.label}")

    def run(
        self,
        chunks: Sequence[Chunk],
        *,
        token_ids: jax.Array | None = None,
        keep_hidden: bool = False,
    ) -> StepResult:
        """Runs one step. Dispatches and returns.

        If every chunk is one token, the step is a decode step, else a prefill step.

        Args:
            chunks: The step's work: at most `sizes.prefill_sequences` chunks of at most
                `sizes.prefill_tokens[-1]` tokens together, or at most
                `sizes.decode_batches[-1]` chunks of one token.
            token_ids: Token ids on the device, int32, of the shape that the step compiles to;
                they replace those of the chunks. For a step whose tokens are not yet read.
            keep_hidden: The hidden states are for `prompt_logprobs`: run as prefill.

        Returns:
            Hidden states and logits.

        Raises:
            ValueError: No chunks, more than the largest shape takes, or a malformed chunk; see
                `step_inputs.pack`.
        """
        return self._run(self._choose_shape(chunks, keep_hidden), chunks, token_ids)

    def prompt_logprobs(
        self, hidden: jax.Array, targets: npt.NDArray[np.int32], top_n: int = 0
    ) -> PromptLogprobs:
        """Computes log-probabilities of given tokens from the hidden states before them.

        Args:
            hidden: Of a step run with `keep_hidden`, [tokens, hidden_size].
            targets: The token that follows each row, at most [tokens], int32.
            top_n: How many of the highest to return as well; more may be returned.

        Returns:
            Log-probabilities; rows beyond `targets` are unspecified.

        Raises:
            ValueError: `top_n` is more than MAX_TOP_LOGPROBS, or there are more targets than
                rows.
        """
        tokens = hidden.shape[0]
        if not 0 <= top_n <= MAX_TOP_LOGPROBS:
            raise ValueError(f"top_n must be in [0, {MAX_TOP_LOGPROBS}], got {top_n}")
        if len(targets) > tokens:
            raise ValueError(f"{len(targets)} targets for {tokens} rows of hidden states")
        key = (tokens, MAX_TOP_LOGPROBS if top_n else 0)
        if key not in self._logprobs:
            self._compile_logprobs(*key)
        padded = np.zeros(tokens, np.int32)
        padded[: len(targets)] = targets
        return PromptLogprobs(*self._logprobs[key](self._params, hidden, padded))

    def compiled_steps(self) -> list[Any]:
        """Returns the compiled steps, for those who want to know what XLA made of them.

        Returns:
            Objects of type jax.stages.Compiled.
        """
        return list(self._steps.values())

    def _shapes(self, family: Family) -> list[StepShape]:
        sizes = self.sizes
        if family == "decode":
            return [StepShape("decode", b, b, sizes.max_pages) for b in sizes.decode_batches]
        return [
            StepShape("prefill", t, sizes.prefill_sequences, sizes.max_pages)
            for t in sizes.prefill_tokens
        ]

    def _choose_shape(self, chunks: Sequence[Chunk], keep_hidden: bool) -> StepShape:
        if not chunks:
            raise ValueError("a step needs at least one chunk")
        tokens = sum(len(chunk.token_ids) for chunk in chunks)
        decode = tokens == len(chunks) and not keep_hidden and "decode" in self._families
        for shape in self._shapes("decode") if decode else ():
            if shape.tokens >= tokens:
                return shape
        for shape in self._shapes("prefill"):
            if shape.tokens >= tokens and shape.sequences >= len(chunks):
                return shape
        raise ValueError(
            f"{len(chunks)} chunks of {tokens} tokens together exceed the largest step: "
            f"{self.sizes.prefill_sequences} chunks of {self.sizes.prefill_tokens[-1]} tokens, "
            f"or {self.sizes.decode_batches[-1]} chunks of one token"
        )

    def _run(
        self, shape: StepShape, chunks: Sequence[Chunk], token_ids: jax.Array | None = None
    ) -> StepResult:
        host_ids, packed = pack(shape, chunks, self.pool.page_size, self.pool.num_pages)
        if shape not in self._steps:
            self._compile_step(shape)
        hidden, logits, self.pool.arrays = self._steps[shape](
            self._params,
            self.pool.arrays,
            host_ids if token_ids is None else token_ids,
            packed,
        )
        return StepResult(hidden, logits)

    def _compile_step(self, shape: StepShape) -> None:
        traced = self._builder.trace_step(shape, self.pool.num_pages, self._dtype)
        self._steps[shape] = traced.lower().compile()

    def _compile_logprobs(self, tokens: int, top: int) -> None:
        traced = self._builder.trace_logprobs(tokens, top, self._dtype)
        self._logprobs[tokens, top] = traced.lower().compile()
