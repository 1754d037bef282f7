# SPDX-License-Identifier: Apache-2.0
"""Every error that multi_layer_copy and its two forms document."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kvferry.kernels.multi_layer_copy import (
    gather_pages,
    multi_layer_copy,
    scatter_pages,
    small_page_ids,
)


def _pool(pages: int, page: tuple[int, ...] = (4, 128), dtype: Any = "float32") -> jax.Array:
    return jnp.zeros((pages, *page), dtype)


def _copy(**changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "src_array": [_pool(8), _pool(6)],
        "dest_array": [_pool(20), _pool(16)],
        "src_offsets": [0, 2, 4],
        "dest_offsets": [5, 10, 0],
        "chunk_sizes": [2, 2, 1],
    }
    return multi_layer_copy(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param(
            {"src_offsets": [0, -2, 4]},
            r"src_offsets\[1\] = -2 is negative",
            id="negative_source",
        ),
        pytest.param(
            {"src_offsets": [0, 2, 6]},
            r"src_offsets\[2\] = 6 with chunk size 1 ends at page 7, but layer 1 has 6 pages",
            id="source_out_of_the_smallest_layer",
        ),
        pytest.param(
            {"dest_offsets": [5, -10, 0]},
            r"dest_offsets\[1\] = -10 is negative",
            id="negative_destination",
        ),
        pytest.param(
            {"dest_offsets": [5, 15, 0]},
            r"dest_offsets\[1\] = 15 with chunk size 2 ends at page 17, but layer 1 has 16 pages",
            id="destination_out_of_range",
        ),
        pytest.param(
            {"chunk_sizes": [2, 0, 1]}, r"chunk_sizes\[1\] = 0 must be at least 1", id="zero_size"
        ),
        pytest.param(
            {"chunk_sizes": [2, 2, -1]},
            r"chunk_sizes\[2\] = -1 must be at least 1",
            id="negative_size",
        ),
        pytest.param(
            {"dest_offsets": [5, 6, 0]},
            r"chunk 0 writes pages 5..6 and chunk 1 writes pages 6..7",
            id="overlapping_destinations",
        ),
        pytest.param(
            {"num_chunks": 4}, r"num_chunks = 4 is not within 0..3", id="num_chunks_over_the_list"
        ),
        pytest.param(
            {"num_chunks": -1}, r"num_chunks = -1 is not within 0..3", id="negative_num_chunks"
        ),
        pytest.param(
            {"num_chunks": [1, 2]},
            r"num_chunks must be a scalar or of shape \(1,\), got shape \(2,\)",
            id="num_chunks_shape",
        ),
        pytest.param(
            {"dest_offsets": [5, 10]},
            r"dest_offsets has 2 entries, src_offsets has 3",
            id="list_lengths",
        ),
        pytest.param(
            {"src_offsets": [[0, 2, 4]]},
            r"src_offsets must be 1-D, got shape \(1, 3\)",
            id="list_rank",
        ),
        pytest.param(
            {"chunk_sizes": [1.0, 1.0, 1.0]},
            r"chunk_sizes must hold integers, got dtype float64",
            id="list_dtype",
        ),
        pytest.param(
            {"src_offsets": [0, 2**40, 0]},
            r"src_offsets\[1\] = 1099511627776 does not fit int32",
            id="list_value_too_large",
        ),
        pytest.param(
            {"src_offsets": [], "dest_offsets": [], "chunk_sizes": []},
            "chunk list is empty",
            id="empty_list",
        ),
        pytest.param(
            {"src_array": [_pool(8)]},
            "src_array has 1 layers, dest_array has 2",
            id="layer_counts",
        ),
        pytest.param({"src_array": [], "dest_array": []}, "hold 0 layers", id="no_layers"),
        pytest.param(
            {"src_array": [_pool(8), _pool(6, (4, 64))]},
            r"src_array\[1\] has pages of shape \(4, 64\), dest_array\[1\] of shape \(4, 128\)",
            id="page_shapes",
        ),
        pytest.param(
            {"dest_array": [_pool(20), _pool(16, dtype="bfloat16")]},
            r"src_array\[1\] has dtype float32, dest_array\[1\] has bfloat16",
            id="dtypes",
        ),
        pytest.param({"window": 0}, "window = 0 must be at least 1", id="window"),
        pytest.param({"checks": "maybe"}, "checks = 'maybe' is unknown", id="checks"),
        pytest.param(
            {"implementation": "cuda"}, "implementation = 'cuda' is unknown", id="implementation"
        ),
        pytest.param(
            {"implementation": "xla", "interpret": True},
            "interpret is for implementation='mosaic_tpu'",
            id="interpret_xla",
        ),
        pytest.param(
            {"replicated_sharding_spec": P("x")},
            "replicated_sharding_spec = .* must not shard",
            id="replicated_spec",
        ),
        pytest.param(
            {"src_sharding_spec": P("x")},
            r"shards the page axis \(dimension 0\) of src_array\[0\]",
            id="page_axis_sharded",
        ),
        pytest.param(
            {"dest_sharding_spec": P(None, None, None, "x")},
            r"has 4 entries, but dest_array\[0\] has shape \(20, 4, 128\)",
            id="spec_too_long",
        ),
        pytest.param(
            {"dest_sharding_spec": [P()]},
            "dest_sharding_spec has 1 specs for 2 layers",
            id="spec_count",
        ),
    ],
)
def test_bad_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _copy(**changes)


def test_refusal_leaves_the_destination_alone() -> None:
    dest = [_pool(4)]
    with pytest.raises(ValueError, match="ends at page 5"):
        scatter_pages([_pool(1)], dest, [4])
    assert not dest[0].is_deleted()


def test_unchecked_tail_of_the_list() -> None:
    copied = _copy(src_offsets=[0, 2, 999], chunk_sizes=[2, 2, -7], num_chunks=2)
    assert len(copied) == 2


def test_kernel_needs_a_tpu() -> None:
    with pytest.raises(NotImplementedError, match="needs a TPU, the arrays are on 'cpu'"):
        _copy(implementation="mosaic_tpu")


def test_scatter_pages_of_the_wrong_length() -> None:
    with pytest.raises(ValueError, match=r"pages_array\[0\] has 3 pages, page_ids has 2 entries"):
        scatter_pages([_pool(3)], [_pool(8)], [1, 2])


def test_scatter_pages_twice_to_one_page() -> None:
    with pytest.raises(ValueError, match="chunk 0 writes pages 2..2 and chunk 1 writes pages 2..2"):
        scatter_pages([_pool(2)], [_pool(8)], [2, 2])


@pytest.mark.parametrize("page_ids", [[0, 8], [-1, 0]])
def test_gather_pages_out_of_range(page_ids: list[int]) -> None:
    with pytest.raises(ValueError, match=r"page_ids\[\d\] = "):
        gather_pages([_pool(8)], page_ids)


def test_gather_pages_of_a_scalar() -> None:
    with pytest.raises(ValueError, match=r"page_ids must be 1-D, got shape \(\)"):
        gather_pages([_pool(8)], 3)


def test_small_page_ids_factor() -> None:
    with pytest.raises(ValueError, match="factor = 0 must be at least 1"):
        small_page_ids([1], 0)


class TestRepage:
    def test_no_integer_factor(self) -> None:
        with pytest.raises(ValueError, match="a multiple of the other's"):
            multi_layer_copy(
                src_array=[_pool(4, (6, 128))],
                dest_array=[_pool(4, (4, 128))],
                src_offsets=[0],
                dest_offsets=[0],
                chunk_sizes=[1],
                repage=True,
            )

    def test_layers_disagree(self) -> None:
        with pytest.raises(ValueError, match="layer 1 re-pages 1 to 1, layer 0 1 to 2"):
            multi_layer_copy(
                src_array=[_pool(4, (4, 128)), _pool(4, (4, 128))],
                dest_array=[_pool(4, (8, 128)), _pool(4, (4, 128))],
                src_offsets=[0],
                dest_offsets=[0],
                chunk_sizes=[1],
                repage=True,
            )

    def test_not_asked_for(self) -> None:
        with pytest.raises(ValueError, match="they must be equal"):
            _copy(src_array=[_pool(8, (8, 128)), _pool(6)])

    def test_offsets_count_small_pages(self) -> None:
        with pytest.raises(ValueError, match="ends at page 9, but layer 0 has 8 pages"):
            multi_layer_copy(
                src_array=[_pool(4, (4, 128))],
                dest_array=[_pool(4, (8, 128))],
                src_offsets=[0],
                dest_offsets=[8],
                chunk_sizes=[1],
                repage=True,
            )


class TestMeshes:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    other = Mesh(np.array(jax.devices()[:4]).reshape(4, 1), ("x", "y"))

    def _on(self, mesh: Mesh, spec: P, pages: int = 8) -> jax.Array:
        return jax.device_put(_pool(pages), NamedSharding(mesh, spec))

    def test_two_meshes(self) -> None:
        with pytest.raises(ValueError, match=r"dest_array\[0\] is on .* but src_array\[0\] is on"):
            scatter_pages(
                [self._on(self.mesh, P(None, "x"))], [self._on(self.other, P(None, "x"))], range(8)
            )

    def test_another_mesh_given(self) -> None:
        with pytest.raises(ValueError, match=r"src_array\[0\] is on .* but mesh is on"):
            scatter_pages(
                [self._on(self.mesh, P(None, "x"))],
                [self._on(self.mesh, P(None, "x"))],
                range(8),
                mesh=self.other,
            )

    def test_spec_contradicts_the_array(self) -> None:
        with pytest.raises(ValueError, match=r"contradicts pool_array\[0\], which is sharded as"):
            gather_pages([self._on(self.mesh, P(None, "x"))], [0], sharding_spec=P(None, "y"))

    def test_pages_cut_differently(self) -> None:
        with pytest.raises(ValueError, match="have different pages on a device"):
            scatter_pages([self._on(self.mesh, P(None, "x"))], [self._on(self.mesh, P())], range(8))

    def test_array_sharded_over_pages(self) -> None:
        with pytest.raises(ValueError, match="shards the page axis"):
            gather_pages([self._on(self.mesh, P("x"))], [0])

    def test_repage_along_a_sharded_dimension(self) -> None:
        src = jax.device_put(_pool(4, (4, 128)), NamedSharding(self.mesh, P(None, "x")))
        dest = jax.device_put(_pool(4, (8, 128)), NamedSharding(self.mesh, P(None, "x")))
        with pytest.raises(ValueError, match="repage cuts pages along dimension 1"):
            multi_layer_copy(
                src_array=[src],
                dest_array=[dest],
                src_offsets=[0],
                dest_offsets=[0],
                chunk_sizes=[1],
                repage=True,
            )
