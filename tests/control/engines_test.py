# SPDX-License-Identifier: Apache-2.0
"""What every transfer engine must do; each test runs on each engine."""

import socket
import threading
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvferry.control.engines.base import (
    EngineOptions,
    EngineStartError,
    Pull,
    Spec,
    TransferEngine,
    TransferError,
    TransferTimeoutError,
)
from kvferry.control.engines.canary import (
    canary_specs,
    check_canary,
    make_canary,
    self_test,
)
from kvferry.control.engines.fake_engine import FakeEngine, FakeNetwork
from kvferry.control.engines.registry import create_engine
from kvferry.control.ids import IdSource
from kvferry.tests.control.pairs import wait_until

IDS = IdSource()


class Ends:
    """A publishing and a pulling engine."""

    def __init__(self, name: str) -> None:
        options = EngineOptions(channels=2, chunk_bytes=1 << 20)
        if name == "fake":
            network = FakeNetwork()
            self.source: TransferEngine = FakeEngine(options, network)
            self.target: TransferEngine = FakeEngine(options, network)
        else:
            self.source, self.target = create_engine(name, options), create_engine(name, options)
        self.address = self.source.start()
        self.target.start()

    def pull(self, key: int, specs: Sequence[Spec], seconds: float = 10.0) -> Pull:
        return self.target.pull(self.address, key, specs, seconds)

    def move(self, arrays: Sequence[jax.Array], specs: Sequence[Spec] | None = None) -> list:  # type: ignore[type-arg]
        key = IDS.next_id()
        self.source.publish(key, arrays, 30.0)
        made = specs or [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in arrays]
        pull = self.pull(key, made)
        assert pull.wait(20.0)
        result = pull.result()
        self.source.release(key, delivered=True)
        return result


@pytest.fixture(name="ends", scope="module", params=["fake", "jax", "tcp"])
def _ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    ends = Ends(request.param)
    yield ends
    ends.source.close()
    ends.target.close()
    ends.target.close()  # Idempotent.


@pytest.fixture(autouse=True)
def _baseline(ends: Ends) -> Iterator[None]:
    yield
    wait_until(lambda: ends.source.counters()["published_keys"] == 0)


DTYPES = [
    "bfloat16",
    "float32",
    "float16",
    "uint16",
    "int8",
    "uint8",
    "float8_e4m3fn",
    "float8_e5m2",
]


def random_array(shape: tuple[int, ...], dtype: str, seed: int = 0) -> jax.Array:
    size = int(np.prod(shape)) * jnp.dtype(dtype).itemsize
    raw = np.random.default_rng(seed).bytes(size)
    return jax.device_put(np.frombuffer(raw, np.uint8).view(jnp.dtype(dtype)).reshape(shape))


def same_bytes(left: jax.Array, right: jax.Array) -> None:
    assert (left.shape, left.dtype) == (right.shape, right.dtype)
    ours, theirs = (np.asarray(each).reshape(-1).view(np.uint8) for each in (left, right))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (3, 5, 7), (16, 16, 6, 64), (2, 1 << 19)])
def test_bytes_arrive(ends: Ends, dtype: str, shape: tuple[int, ...]) -> None:
    array = random_array(shape, dtype)
    same_bytes(ends.move([array])[0], array)


@pytest.mark.parametrize("count", [2, 30, 64, 100])
def test_many_arrays_arrive_in_order(ends: Ends, count: int) -> None:
    arrays = [random_array((8, 3 + index % 5), "bfloat16", index) for index in range(count)]
    for left, right in zip(ends.move(arrays), arrays, strict=True):
        same_bytes(left, right)


def test_arrays_without_elements(ends: Ends) -> None:
    arrays = [jnp.ones((2,)), jnp.zeros((0, 4)), jnp.ones((3,)), jnp.zeros((5, 0), jnp.int8)]
    for left, right in zip(ends.move(arrays), arrays, strict=True):
        same_bytes(left, right)
    assert [each.shape for each in ends.move([jnp.zeros((0,))])] == [(0,)]


def test_arrays_that_are_still_computed(ends: Ends) -> None:
    big = jnp.ones((700, 700))
    product = jax.jit(lambda x: x @ x @ x @ x)(big)
    same_bytes(ends.move([product])[0], product)


@pytest.mark.parametrize("kind", ["pinned_host", "unpinned_host", "device"])
def test_host_memory_on_either_side(ends: Ends, kind: str) -> None:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind)
    array = random_array((64, 33), "bfloat16")
    moved = jax.device_put(array, sharding)
    same_bytes(ends.move([moved])[0], array)
    spec = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
    (arrived,) = ends.move([array], [spec])
    assert arrived.sharding.memory_kind == kind
    same_bytes(arrived, array)


@pytest.mark.parametrize("parts", [("x", None), (None, "x"), (None, None)])
def test_arrays_on_several_devices(ends: Ends, parts: tuple[str | None, str | None]) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*parts))
    arrays = [jax.device_put(random_array((8, 12), "uint16", seed), sharding) for seed in range(3)]
    specs = [jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=sharding) for each in arrays]
    for left, right in zip(ends.move(arrays, specs), arrays, strict=True):
        assert left.sharding == sharding
        same_bytes(left, right)


def test_pulled_arrays_may_be_donated(ends: Ends) -> None:
    (arrived,) = ends.move([jnp.arange(1000.0)])
    doubled = jax.jit(lambda x: x * 2, donate_argnums=0)(arrived)
    np.testing.assert_array_equal(doubled, np.arange(1000.0) * 2)


def test_a_key_is_published_once(ends: Ends) -> None:
    key = IDS.next_id()
    ends.source.publish(key, [jnp.ones(3)], 30.0)
    with pytest.raises(ValueError, match=f"{key} is published already"):
        ends.source.publish(key, [jnp.zeros(3)], 30.0)
    ends.source.release(key, delivered=False)
    ends.source.release(key, delivered=False)  # Unknown by now: ignored.
    ends.source.release(IDS.next_id(), delivered=True)


def test_a_deleted_array_is_refused(ends: Ends) -> None:
    array = jnp.ones(3) + 1
    array.delete()
    with pytest.raises(ValueError, match="deleted"):
        ends.source.publish(IDS.next_id(), [jnp.ones(2), array], 30.0)


@pytest.fixture(name="mute", scope="module")
def _mute() -> Iterator[str]:
    """The address of something that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_peer_that_never_answers_times_out(ends: Ends, mute: str) -> None:
    key = IDS.next_id()
    pull = ends.target.pull(mute, key, [jax.ShapeDtypeStruct((3,), jnp.float32)], 0.3)
    assert not pull.wait(0.0)
    start = time.monotonic()
    assert pull.wait(5.0)
    assert 0.2 < time.monotonic() - start < 2.0
    with pytest.raises(TransferTimeoutError, match=rf"pull {key}.*not done in 0\.3 s"):
        pull.result()
    ends.move([jnp.ones(3)])


def test_what_is_never_published_ends_without_data(ends: Ends) -> None:
    pull = ends.pull(IDS.next_id(), [jax.ShapeDtypeStruct((3,), jnp.float32)], 0.3)
    assert pull.wait(5.0)
    with pytest.raises(TransferError):
        pull.result()


def test_an_unfinished_pull_has_no_result(ends: Ends, mute: str) -> None:
    specs = [jax.ShapeDtypeStruct((3,), jnp.float32)]
    pull = ends.target.pull(mute, IDS.next_id(), specs, 5.0)
    with pytest.raises(TransferError, match="has not ended"):
        pull.result()
    pull.cancel()
    assert pull.wait(0.0)
    with pytest.raises(TransferError, match="cancelled"):
        pull.result()
    ends.move([jnp.ones(3)])


def test_the_second_pull_of_a_key_ends_without_data(ends: Ends) -> None:
    key = IDS.next_id()
    specs = [jax.ShapeDtypeStruct((3,), jnp.float32)]
    ends.source.publish(key, [jnp.ones(3)], 30.0)
    first = ends.pull(key, specs)
    assert first.wait(5.0) and first.result()
    second = ends.pull(key, specs, 0.3)
    assert second.wait(5.0)
    with pytest.raises(TransferError):
        second.result()
    ends.source.release(key, delivered=True)


def test_pulls_in_parallel(ends: Ends) -> None:
    arrays = {IDS.next_id(): random_array((40, 100), "uint16", seed) for seed in range(60)}
    for key, array in arrays.items():
        ends.source.publish(key, [array], 30.0)
    wrong: list[object] = []

    def work(keys: list[int]) -> None:
        for key in keys:
            pull = ends.pull(key, [jax.ShapeDtypeStruct((40, 100), jnp.uint16)])
            if (
                not pull.wait(10.0)
                or np.asarray(pull.result()[0]).tobytes() != np.asarray(arrays[key]).tobytes()
            ):
                wrong.append(key)

    everything = list(arrays)
    threads = [threading.Thread(target=work, args=(everything[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for key in arrays:
        ends.source.release(key, delivered=True)


def test_canary_differs_by_seed_and_array() -> None:
    specs = canary_specs()
    assert [str(spec.dtype) for spec in specs] == ["bfloat16", "float32", "uint16"]
    first = make_canary("one", specs)
    check_canary("one", first)
    with pytest.raises(TransferError, match=r"test array 0 \(bfloat16\[2, 3, 64\]\) arrived with"):
        check_canary("two", first)
    with pytest.raises(TransferError, match="test array 2"):
        check_canary("one", [*first[:2], make_canary("two", specs)[2]])


def test_self_test_passes(ends: Ends) -> None:
    self_test(ends.source, ends.address, [jax.ShapeDtypeStruct((4, 4), jnp.int8)])


def test_self_test_names_engine_address_and_way_out() -> None:
    network = FakeNetwork()
    engine = FakeEngine(EngineOptions(), network)
    address = engine.start()
    network.set(error="no device memory")
    with pytest.raises(EngineStartError, match="'fake' at fake:1 failed: no device memory.*choose"):
        self_test(engine, address, [])
    assert engine.counters()["published_keys"] == 0


@pytest.mark.parametrize(
    ("field", "value"), [("port", -1), ("channels", 0), ("chunk_bytes", 10), ("parallel_copies", 0)]
)
def test_options_are_checked(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"EngineOptions.{field} must be .*, got {value}"):
        EngineOptions(**{field: value})  # type: ignore[arg-type]
