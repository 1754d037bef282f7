# SPDX-License-Identifier: Apache-2.0

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from kvferry.engine.model_config import ModelConfig
from kvferry.engine.sharding import TP_AXIS, param_shapes, param_specs, shard_params
from kvferry.engine.weights import Params
from kvferry.tests.engine.tiny import tiny_config, tiny_params


def _mesh(shards: int, replicas: int = 1) -> Mesh:
    devices = np.array(jax.devices()[: shards * replicas]).reshape(replicas, shards)
    return Mesh(devices, ("dp", TP_AXIS))


def _config(**changes: object) -> ModelConfig:
    return tiny_config(
        **{
            **{"num_q_heads": 8, "num_kv_heads": 4, "qkv_bias": True, "o_bias": True},
            **{"mlp_bias": True, "qk_norm": True, "vocab_size": 290},
        }
        | changes
    )


def _local(array: jax.Array, shard: int) -> np.ndarray:
    """Returns what the device at this place on the TP axis holds."""
    mesh = array.sharding.mesh  # type: ignore[attr-defined]
    device = mesh.devices[0, shard]
    (piece,) = [piece for piece in array.addressable_shards if piece.device == device]
    return np.asarray(piece.data)


@pytest.mark.parametrize(("shards", "replicas"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_every_device_gets_whole_heads_and_its_slice(shards: int, replicas: int) -> None:
    config = _config()
    params = tiny_params(config)
    placed = shard_params(params, config, _mesh(shards, replicas))
    for i in range(shards):
        for layer, found in zip(params["layers"], placed["layers"], strict=True):
            _check_layer(config, layer, found, i, shards)
        for name in ("embed", "lm_head"):
            rows = -(-config.vocab_size // shards)
            expected = params[name][i * rows : (i + 1) * rows]
            local = _local(placed[name], i)
            assert local.shape == (rows, config.hidden_size)
            np.testing.assert_array_equal(local[: len(expected)], expected)
            assert not local[len(expected) :].any()
        np.testing.assert_array_equal(_local(placed["final_norm"], i), params["final_norm"])


def _check_layer(
    config: ModelConfig, layer: Params, found: Params, shard: int, shards: int
) -> None:
    dim = config.head_dim
    q_end, k_end = config.q_size, config.q_size + config.kv_size
    q_heads, kv_heads = config.num_q_heads // shards, config.num_kv_heads // shards
    inner = config.intermediate_size // shards
    q = slice(shard * q_heads * dim, (shard + 1) * q_heads * dim)
    k = slice(q_end + shard * kv_heads * dim, q_end + (shard + 1) * kv_heads * dim)
    v = slice(k_end + shard * kv_heads * dim, k_end + (shard + 1) * kv_heads * dim)
    gate = slice(shard * inner, (shard + 1) * inner)
    up = slice(config.intermediate_size + gate.start, config.intermediate_size + gate.stop)
    columns = {"wqkv": (q, k, v), "bqkv": (q, k, v), "w_gate_up": (gate, up)}
    columns["b_gate_up"] = (gate, up)
    for name, slices in columns.items():
        expected = np.concatenate([layer[name][..., part] for part in slices], axis=-1)
        np.testing.assert_array_equal(_local(found[name], shard), expected)
    np.testing.assert_array_equal(_local(found["wo"], shard), layer["wo"][q])
    np.testing.assert_array_equal(_local(found["w_down"], shard), layer["w_down"][gate])
    for name in ("bo", "b_down", "attn_norm", "mlp_norm", "q_norm", "k_norm"):
        np.testing.assert_array_equal(_local(found[name], shard), layer[name])


@pytest.mark.parametrize("shards", [1, 4])
def test_shapes_and_specs_describe_what_is_placed(shards: int) -> None:
    config = _config()
    placed = shard_params(tiny_params(config), config, _mesh(shards))
    shapes = param_shapes(config, np.float32, shards)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), placed) == jax.tree.map(
        lambda x: (x.shape, x.dtype), shapes
    )
    specs = jax.tree.map(lambda x: x.sharding.spec, placed)
    assert specs == param_specs(config)
    assert all(isinstance(spec, PartitionSpec) for spec in jax.tree.leaves(specs))


def test_tied_model_has_one_table() -> None:
    config = _config(tie_embeddings=True)
    assert "lm_head" not in param_shapes(config, np.float32)
    assert "lm_head" not in param_specs(config)
    assert "lm_head" not in shard_params(tiny_params(config), config, _mesh(2))


@pytest.mark.parametrize(
    ("shards", "changes", "message"),
    [
        (8, {}, "cannot split num_kv_heads 4 over 8 devices"),
        (3, {}, "cannot split num_q_heads 8 over 3 devices"),
        (4, {"intermediate_size": 50}, "cannot split intermediate_size 50 over 4 devices"),
    ],
)
def test_sizes_that_cannot_be_split(shards: int, changes: dict[str, int], message: str) -> None:
    config = _config(**changes)
    with pytest.raises(ValueError, match=message):
        shard_params(tiny_params(config), config, _mesh(shards))
