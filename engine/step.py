# SPDX-License-Identifier: Apache-2.0
"""Traces the model for one device or one mesh: the functions that the runner compiles.

Nothing here holds data, so the same code that a server runs can be compiled ahead of time for
devices that the machine does not have.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from kvferry.engine.attention_plan import AttentionPlan, Implementation
from kvferry.engine.kv_pool import first_device, pool_sharding
from kvferry.engine.kv_pool_layout import KVPoolLayout
from kvferry.engine.model import ForwardPlan, Params, forward, project_logits
from kvferry.engine.model_config import ModelConfig
from kvferry.engine.sharding import TP_AXIS, param_shapes, param_specs
from kvferry.engine.step_inputs import StepShape, unpack
from kvferry.engine.trace_counter import TraceCounter

_LOGPROB_ROWS = 32  # rows projected at a time, so that [rows, vocab_size] floats stay small


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepBuilder:
    """Traces the steps of one model on one device or mesh.

    Attributes:
        config: The model.
        layout: Layout of its KV pool.
        platform: Platform of the devices.
        mesh: Devices, with an axis TP_AXIS; None for one device.
        device: The one device, without a mesh.
        counter: Counts traces.
    """

    config: ModelConfig
    layout: KVPoolLayout
    platform: str
    mesh: Mesh | None = None
    device: jax.Device | None = None
    counter: TraceCounter = dataclasses.field(default_factory=TraceCounter)

    @property
    def implementation(self) -> Implementation:
        """Which attention the platform runs."""
        return "tpu" if self.platform == "tpu" else "xla"

    @property
    def replicated(self) -> Sharding:
        """Sharding of what every device holds in full."""
        if self.mesh is not None:
            return NamedSharding(self.mesh, PartitionSpec())
        return SingleDeviceSharding(first_device(self.mesh, self.device))

    def trace_step(self, shape: StepShape, num_pages: int, dtype: Any) -> Any:
        """Traces one step: (params, kv_pages, token_ids, packed) -> (hidden, logits, kv_pages).

        Args:
            shape: The step's shape.
            num_pages: Pages in the pool.
            dtype: Dtype of the parameters.

        Returns:
            The traced function; `.lower().compile()` makes it callable. The pool is donated.
        """
        plan = ForwardPlan(
            attention=AttentionPlan(
                sm_scale=self.config.head_dim**-0.5,
                layout=self.layout,
                family=shape.family,
                implementation=self.implementation,
            ),
            axis_name=None if self.mesh is None else TP_AXIS,
        )

        def step(
            params: Params, kv_pages: list[jax.Array], token_ids: jax.Array, packed: jax.Array
        ) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
            self.counter.add()
            inputs = unpack(shape, token_ids, packed)
            return forward(params, self.config, kv_pages, inputs, plan=plan)

        pool_spec = PartitionSpec(None, None, TP_AXIS, None)
        in_specs = (param_specs(self.config), pool_spec, PartitionSpec(), PartitionSpec())
        out_specs = (PartitionSpec(), PartitionSpec(), pool_spec)
        return jax.jit(self._sharded(step, in_specs, out_specs), donate_argnums=1).trace(
            self.param_structs(dtype),
            self.pool_structs(num_pages),
            self._ints(shape.tokens),
            self._ints(shape.packed_size),
        )

    def trace_logprobs(self, tokens: int, top: int, dtype: Any) -> Any:
        """Traces (params, hidden, targets) -> (logprobs [tokens], top values and ids).

        Args:
            tokens: Rows.
            top: How many of the highest log-probabilities per row to return; 0 for none, then
                the values and ids are None.
            dtype: Dtype of the parameters.

        Returns:
            The traced function.
        """
        axis_name = None if self.mesh is None else TP_AXIS

        def logprobs(
            params: Params, hidden: jax.Array, targets: jax.Array
        ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
            self.counter.add()

            def block(rows: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
                logits = project_logits(params, self.config, rows[0], axis_name)
                values = jax.nn.log_softmax(logits, axis=-1)
                target = jnp.take_along_axis(values, rows[1][:, None], axis=-1)[:, 0]
                return (target, *lax.top_k(values, top)) if top else (target,)

            width = min(_LOGPROB_ROWS, tokens)
            padded = -(-tokens // width) * width
            hidden = jnp.pad(hidden, ((0, padded - tokens), (0, 0)))
            targets = jnp.pad(targets, (0, padded - tokens))
            results = lax.map(
                block, (hidden.reshape(-1, width, hidden.shape[1]), targets.reshape(-1, width))
            )
            flat = [x.reshape(padded, *x.shape[2:])[:tokens] for x in results]
            return (flat[0], flat[1], flat[2]) if top else (flat[0], None, None)

        in_specs = (param_specs(self.config), PartitionSpec(), PartitionSpec())
        hidden = jax.ShapeDtypeStruct(
            (tokens, self.config.hidden_size), dtype, sharding=self.replicated
        )
        return jax.jit(self._sharded(logprobs, in_specs, PartitionSpec())).trace(
            self.param_structs(dtype), hidden, self._ints(tokens)
        )

    def param_structs(self, dtype: Any) -> Any:
        """Describes the parameter tree.

        Args:
            dtype: Dtype of the parameters.

        Returns:
            A tree of ShapeDtypeStruct with shardings.
        """
        shapes = param_shapes(self.config, dtype, self.layout.shards)
        mesh = self.mesh
        if mesh is None:
            shardings = jax.tree.map(lambda _: self.replicated, shapes)
        else:
            shardings = jax.tree.map(
                lambda spec: NamedSharding(mesh, spec),
                param_specs(self.config),
                is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
            )
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
        )

    def pool_structs(self, num_pages: int) -> list[jax.ShapeDtypeStruct]:
        """Describes the pool's arrays.

        Args:
            num_pages: Pages in the pool.

        Returns:
            One spec per layer, with its sharding.
        """
        spec = jax.ShapeDtypeStruct(
            (num_pages, *self.layout.page_shape),
            jnp.dtype(self.layout.storage_dtype),
            sharding=pool_sharding(self.mesh, self.device),
        )
        return [spec] * self.layout.num_layers

    def _ints(self, size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size,), np.int32, sharding=self.replicated)

    def _sharded(self, function: Any, in_specs: Any, out_specs: Any) -> Any:
        if self.mesh is None:
            return function
        # Replication of the outputs cannot be inferred through a Pallas call.
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
