# SPDX-License-Identifier: Apache-2.0
"""What every transfer engine must do; each test runs on each engine."""

import threading
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvferry.control.engines.base import EngineOptions, EngineStartError, TransferError
from kvferry.control.engines.canary import canary_specs, check_canary, make_canary, self_test
from kvferry.control.engines.fake_engine import FakeEngine, FakeNetwork
from kvferry.tests.control.engine_ends import (
    DTYPES,
    ENGINES,
    IDS,
    Ends,
    num_files,
    random_array,
    same_bytes,
)
from kvferry.tests.control.pairs import wait_until


@pytest.fixture(name="ends", scope="module", params=ENGINES)
def _ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    ends = Ends(request.param)
    yield ends
    ends.close()
    ends.close()  # Idempotent.


@pytest.fixture(autouse=True)
def _baseline(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "ends" in request.fixturenames:
        wait_until(request.getfixturevalue("ends").at_baseline)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (3, 5, 7), (16, 16, 6, 64), (2, 1 << 19)])
def test_bytes_arrive(ends: Ends, dtype: str, shape: tuple[int, ...]) -> None:
    array = random_array(shape, dtype)
    same_bytes(ends.move([array])[0], array)


@pytest.mark.parametrize(
    ("num_bytes", "count"), [(1, 1), (1 << 16, 1), (64 << 20, 1), (30 << 20, 30)]
)
def test_every_size_arrives(ends: Ends, num_bytes: int, count: int) -> None:
    arrays = [random_array((num_bytes // count,), "uint8", seed) for seed in range(count)]
    for left, right in zip(ends.move(arrays), arrays, strict=True):
        same_bytes(left, right)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 32])
def test_a_gigabyte_arrives(ends: Ends, count: int) -> None:
    arrays = [random_array(((1 << 29) // count,), "uint16", seed) for seed in range(count)]
    for left, right in zip(ends.move(arrays), arrays, strict=True):
        same_bytes(left, right)


@pytest.mark.parametrize("count", [2, 30, 64, 100, 256])
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["pinned_host", "unpinned_host", "device"])
def test_host_memory_on_either_side(ends: Ends, kind: str, dtype: str) -> None:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind)
    array = random_array((64, 33), dtype)
    moved = jax.device_put(array, sharding)
    same_bytes(ends.move([moved])[0], array)
    spec = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
    (arrived,) = ends.move([array], [spec])
    assert arrived.sharding.memory_kind == kind
    same_bytes(arrived, array)


@pytest.mark.parametrize("dtype", ["bfloat16", "uint16", "float32"])
@pytest.mark.parametrize(
    ("mesh_shape", "parts"),
    [
        ((4, 1), ("x", None)),
        ((4, 1), (None, "x")),
        ((4, 1), (None, None)),
        ((2, 2), ("x", "y")),
        ((2, 2), (None, "y")),
    ],
)
def test_arrays_on_several_devices(
    ends: Ends, mesh_shape: tuple[int, int], parts: tuple[str | None, str | None], dtype: str
) -> None:
    devices = np.array(jax.devices()[:4]).reshape(mesh_shape)
    mesh = jax.sharding.Mesh(devices, ("x", "y"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*parts))
    arrays = [jax.device_put(random_array((8, 12), dtype, seed), sharding) for seed in range(3)]
    specs = [jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=sharding) for each in arrays]
    for left, right in zip(ends.move(arrays, specs), arrays, strict=True):
        assert left.sharding == sharding
        same_bytes(left, right)


def test_pulled_arrays_keep_their_bytes(ends: Ends) -> None:
    """However long they are held, and whatever travels meanwhile."""
    held = []
    for seed in range(5):
        array = random_array((300, 400), "uint16", seed)
        held.append((ends.move([array])[0], np.asarray(array).copy()))
    views = [np.asarray(arrived) for arrived, _ in held[::2]]
    for seed in range(100, 130):
        ends.move([random_array((300, 400), "uint16", seed)])
    for arrived, expected in held:
        np.testing.assert_array_equal(arrived, expected)
    expected_views = [expected for _, expected in held[::2]]
    del held, arrived
    for seed in range(200, 210):
        ends.move([random_array((300, 400), "uint16", seed)])
    for view, expected in zip(views, expected_views, strict=True):
        np.testing.assert_array_equal(view, expected)


def test_what_was_published_may_go_on_living(ends: Ends) -> None:
    """Donating it after the release changes nothing at the other end."""
    if ends.name == "fake":
        pytest.skip("it hands over the very arrays")
    array = random_array((300, 400), "float32")
    before = np.asarray(array).copy()
    (arrived,) = ends.move([array])
    jax.block_until_ready(jax.jit(lambda x: x * 0, donate_argnums=0)(array))
    assert np.asarray(arrived).tobytes() == before.tobytes()


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


def test_transfers_leave_nothing_open(ends: Ends) -> None:
    arrays = [random_array((64, 64), "uint16", seed) for seed in range(3)]
    for _ in range(10):
        ends.move(arrays)
    files, threads = num_files(), threading.active_count()
    for _ in range(40):
        ends.move(arrays)
    assert num_files() <= files + 4 and threading.active_count() <= threads + 1


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
