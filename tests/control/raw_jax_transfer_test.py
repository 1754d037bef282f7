# SPDX-License-Identifier: Apache-2.0
"""What `jax.experimental.transfer` does when it is used a little wrong, and what our engine does.

Each line is one finding about the library: S silent wrong data, A abort or crash, W a wedge until a
restart, H a hang. `test_the_library` shows it on the library, in processes of its own, and fails
once upstream has mended it; `test_ours` shows what comes of the same situation here.
"""

import ast
import dataclasses
import functools
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import transfer
from jax.experimental.layout import Format, Layout

import kvferry
from kvferry.control.engines.base import (
    EngineOptions,
    EngineStartError,
    Pull,
    Spec,
    TransferError,
    TransferTimeoutError,
    shard_plan,
)
from kvferry.control.engines.jax_engine import JaxEngine
from kvferry.control.ids import IdSource, new_generation, new_instance_id
from kvferry.control.kv_layout import LayoutMismatchError
from kvferry.control.messages import EngineInfo, Instance
from kvferry.control.peer import check_fit
from kvferry.control.security import PortInUseError
from kvferry.tests.control.jax_engine_peer import COPIES, OPTIONS, PIECES, SMALL
from kvferry.tests.control.pairs import LAYOUT, Pair, fails, metadata, pair, wait_until
from kvferry.tests.control.raw_jax_findings import RAW

IDS = IdSource()


@pytest.fixture(name="seen", scope="module")
def _seen() -> dict[str, dict[str, Any]]:
    """What the library did in each scenario."""
    command = [sys.executable, "-m", "kvferry.tests.control.raw_jax_transfer"]
    lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=200, check=True)
    return {each["name"]: each for each in map(json.loads, lines.stdout.splitlines())}


@pytest.mark.parametrize("line", RAW)
def test_the_library(line: str, seen: dict[str, dict[str, Any]]) -> None:
    raw, found = RAW[line], seen[line]
    # A frozen publisher lives until it is killed.
    ends = (found["puller"], found["publisher"].replace("lives", "ends"))
    as_known = found["saw"] == list(raw.saw) and ends == (raw.puller, raw.publisher)
    # Now and then a crash comes in the place of what is noted, which is no better.
    if not (as_known or "crashes" in ends):
        pytest.fail(
            f"upstream has changed: {line} ({raw.shows}) is now {found}; the guard for {line}"
            f" may go: {raw.guard}"
        )


class Ours:
    """The situations of the lines."""

    def __init__(self) -> None:
        self.source, self.target = JaxEngine(OPTIONS), JaxEngine(OPTIONS)
        self.address = self.source.start()
        self.target.start()

    def publish(self, *arrays: jax.Array) -> int:
        key = IDS.next_id()
        self.source.publish(key, arrays, 60.0)
        return key

    def pull(self, key: int, *specs: Spec, seconds: float = 10.0) -> list[jax.Array]:
        pull = self.target.pull(self.address, key, specs, seconds)
        assert wait_until(lambda: pull.wait(0.01), 15.0) < seconds + 1.0
        return pull.result()

    def works(self) -> None:
        key = self.publish(jnp.arange(1024.0))
        np.testing.assert_array_equal(self.pull(key, SMALL)[0], np.arange(1024.0))
        self.source.release(key, delivered=True)
        assert self.source.failure is None and self.target.failure is None

    def settings_are_compared(self) -> None:
        for other in ({"chunk_bytes": 4 << 20}, {"channels": 3}):
            with pytest.raises(LayoutMismatchError, match=f"setting {next(iter(other))}: .*"):
                meet(
                    self.source.settings(),
                    JaxEngine(dataclasses.replace(OPTIONS, **other)).settings(),  # type: ignore[arg-type]
                )
        meet(self.source.settings(), self.target.settings())

    def shards_are_compared(self) -> None:
        devices = np.array(jax.devices()[:4])

        def settings(shape: tuple[int, ...], *parts: str | None) -> dict[str, str | int]:
            mesh = jax.sharding.Mesh(devices.reshape(shape), ("x", "y")[: len(shape)])
            place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*parts))
            return {
                "shards": shard_plan([jax.ShapeDtypeStruct((4, 4), np.float32, sharding=place)])
            }

        ours = settings((4,), "x", None)
        for theirs in (settings((4,), None, "x"), settings((2, 2), "x", None)):
            with pytest.raises(LayoutMismatchError, match="setting shards"):
                meet(ours, theirs)
        with pytest.raises(LayoutMismatchError, match="setting shards"):
            meet(settings((2, 2), "x", "y"), settings((2, 2), "y", "x"))

    def leaves_are_compared(self) -> None:
        with pair("jax") as both:
            real = both.prefill.pool.gather
            changes: list[Callable[[list[jax.Array]], list[jax.Array]]] = [
                lambda each: [a.view(jnp.int16) for a in each],
                lambda each: [a.reshape(-1) for a in each],
                lambda each: [jnp.concatenate([a] * 2) for a in each],
                lambda each: [a[:1] for a in each],
                lambda each: each[:-1],
            ]
            for change in changes:
                changed = functools.partial(_gather_changed, real, change)
                both.prefill.pool.gather = changed  # type: ignore[method-assign]
                self.refused(both)
            both.prefill.pool.gather = real  # type: ignore[method-assign]
            both.transfer()

    def refused(self, both: Pair) -> None:
        sender, receiver = both.ready(4)
        assert sender.send(range(4), last=True, metadata=metadata())
        assert "this server's pages are" in fails(receiver)
        wait_until(both.at_baseline)

    def layouts_are_refused(self) -> None:
        place = Format(Layout((1, 0)), jax.sharding.SingleDeviceSharding(jax.devices()[0]))
        with pytest.raises(ValueError, match="only row-major arrays can travel"):
            self.publish(jax.device_put(jnp.ones((4, 8)), place))

    def donated_arrays_do_not_arrive(self) -> None:
        array = jnp.arange(1024.0) + 0
        array.block_until_ready()
        key = self.publish(array)
        jax.jit(lambda x: x + 5, donate_argnums=0)(array).block_until_ready()
        with pytest.raises(TransferError):
            self.pull(key, SMALL)
        self.source.release(key, delivered=False)

    def keys_are_for_one_use(self) -> None:
        key = self.publish(jnp.arange(1024.0))
        with pytest.raises(ValueError, match="is published already"):
            self.source.publish(key, [jnp.ones(1024)], 10.0)
        np.testing.assert_array_equal(self.pull(key, SMALL)[0], np.arange(1024.0))
        self.source.release(key, delivered=True)

    def ports_are_taken_once(self) -> None:
        port = int(self.address.split(":")[1])
        with pytest.raises(PortInUseError, match=f"{port} is taken"):
            JaxEngine(EngineOptions(port=port)).start()

    def names_are_refused(self) -> None:
        for host in ("localhost", "256.1.1.1"):
            with pytest.raises(EngineStartError, match=host):
                JaxEngine(EngineOptions(host=host)).start()

    def nothing_is_pulled_into_place(self) -> None:
        assert users_of("_pull_into_flat") == []

    def there_are_always_transports(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert users_of("start_transfer_server") == ["jax_engine.py"]
        with pytest.raises(ValueError, match="channels must be between 1 and 64, got 0"):
            EngineOptions(channels=0)
        calls: list[Any] = []

        def start(*args: Any, **options: Any) -> Any:
            calls.append((args, options))
            return real(*args, **options)

        real = transfer.start_transfer_server
        monkeypatch.setattr(transfer, "start_transfer_server", start)
        engine = JaxEngine(EngineOptions(channels=3))
        engine.start()
        engine.close()
        ((_, address, transports), options) = calls[0]
        assert (address, transports) == ("127.0.0.1:0", ["127.0.0.1:0"] * 3)
        assert options["use_raw_buffers"] is False

    def open_ports_are_warned_of(self) -> None:
        # Nothing can close them; keyed_pair_test.py shows that this text is told at the start.
        assert "whoever reaches the ports can end this process" in JaxEngine.exposure

    def deleted_arrays_are_refused(self) -> None:
        array = jnp.ones(1024) + 1
        array.delete()
        with pytest.raises(ValueError, match="deleted or donated"):
            self.publish(array)

    def lost_buffers_turn_health_red(self) -> None:
        # Only a peer that names other leaves than it published gets that far.
        self.leaves_are_compared()
        keys = [self.publish(jnp.ones(1024)) for _ in range(COPIES)]
        with child("wedge", self.address, *map(str, keys)) as process:
            assert process.stdout is not None
            lines = process.stdout.read().splitlines()
        assert len(lines) == COPIES + 1 and "Invalid slicing" in lines[0]
        assert "nothing arrives any more, not even from this process itself" in lines[-1]
        for key in keys:
            self.source.release(key, delivered=False)

    def cancelled_pulls_drain(self) -> None:
        held = [jnp.full(spec.shape, 3.0) for spec in PIECES]
        for _ in range(4 * COPIES):
            key = self.publish(*held)
            pull = self.target.pull(self.address, key, PIECES, 20.0)
            wait_until(functools.partial(_has_begun, pull))
            pull.cancel()
            with pytest.raises(TransferError, match="cancelled"):
                pull.result()
            wait_until(lambda: not self.target.counters()["draining_pulls"])
            self.source.release(key, delivered=False)

    def a_frozen_puller_costs_others_their_deadline(self) -> None:
        held = [jnp.full(spec.shape, 3.0) for spec in PIECES]
        first, second = self.publish(*held), self.publish(*held)
        with child("freeze", self.address, str(first)) as process:
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            with pytest.raises(TransferTimeoutError, match=r"not done in 0\.5 s, . of 16 arrays"):
                self.pull(second, *PIECES, seconds=0.5)
            process.kill()
        wait_until(lambda: not self.target.counters()["draining_pulls"])
        self.source.release(first, delivered=False)
        self.source.release(second, delivered=False)

    def pullers_may_die(self) -> None:
        with pytest.raises(EngineStartError, match="at least 8 parallel copies for 4 channels"):
            JaxEngine(EngineOptions(channels=4, parallel_copies=7)).start()
        held = [jnp.full(spec.shape, 3.0) for spec in PIECES]
        for _ in range(3):
            key = self.publish(*held)
            with child("die", self.address, str(key)) as process:
                assert process.wait() == -signal.SIGKILL
            self.source.release(key, delivered=False)
            self.works()

    def programs_end_with_pulls_that_have_not(self) -> None:
        unknown = [str(IDS.next_id()) for _ in range(3)]
        with child("leave", self.address, *unknown) as process:
            assert process.communicate(timeout=30)[0] == "waiting: [False, False]\n"
            assert process.returncode == 0

    def deadlines_end_what_never_comes(self) -> None:
        self.pull(key := self.publish(jnp.ones(1024)), SMALL)
        for again in (key, IDS.next_id()):
            with pytest.raises(TransferTimeoutError, match=r"not done in 0\.3 s, 0 of 1"):
                self.pull(again, SMALL, seconds=0.3)
        self.source.release(key, delivered=True)

    def dead_ports_are_refused(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        with pytest.raises(TransferError, match="refused"):
            self.target.pull(f"127.0.0.1:{port}", 1, [SMALL], 5.0)

    def empty_arrays_do_not_travel(self) -> None:
        key = self.publish(jnp.ones(1024), jnp.zeros((0, 3)))
        found = self.pull(key, SMALL, jax.ShapeDtypeStruct((0, 3), jnp.float32))
        assert [each.shape for each in found] == [(1024,), (0, 3)]
        self.source.release(key, delivered=True)

    def extra_arrays_end_with_the_deadline(self) -> None:
        self.leaves_are_compared()
        key = self.publish(*[jnp.ones(1024)] * 65)
        with pytest.raises(TransferError):
            self.pull(key, *[SMALL] * 70, seconds=0.5)
        self.source.release(key, delivered=False)

    def a_frozen_publisher_is_noticed(self) -> None:
        with child("publish") as process:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            pull = self.target.pull(address, 1, [SMALL], 0.5)
            assert wait_until(lambda: pull.wait(0.01)) < 1.5
            with pytest.raises(TransferTimeoutError, match=r"not done in 0\.5 s"):
                pull.result()


@pytest.fixture(name="ours", scope="module")
def _ours() -> Iterator[Ours]:
    ours = Ours()
    yield ours
    ours.source.close()
    ours.target.close()


OURS: Mapping[str, Callable[..., None]] = {
    "S1": Ours.settings_are_compared,
    "S2": Ours.leaves_are_compared,
    "S3": Ours.shards_are_compared,
    "S4": Ours.shards_are_compared,
    "S5": Ours.leaves_are_compared,
    "S6": Ours.layouts_are_refused,
    "S7": Ours.donated_arrays_do_not_arrive,
    "S8": Ours.keys_are_for_one_use,
    "S9": Ours.ports_are_taken_once,
    "S10": Ours.names_are_refused,
    "S11": Ours.nothing_is_pulled_into_place,
    "A1": Ours.there_are_always_transports,
    "A2": Ours.settings_are_compared,
    "A3": Ours.open_ports_are_warned_of,
    "A4": Ours.deleted_arrays_are_refused,
    "A5": Ours.nothing_is_pulled_into_place,
    "A5_DELETED": Ours.nothing_is_pulled_into_place,
    "A6": Ours.programs_end_with_pulls_that_have_not,
    "W1": Ours.lost_buffers_turn_health_red,
    "W2": Ours.cancelled_pulls_drain,
    "W3": Ours.a_frozen_puller_costs_others_their_deadline,
    "W4": Ours.pullers_may_die,
    "H1": Ours.deadlines_end_what_never_comes,
    "H2": Ours.dead_ports_are_refused,
    "H3": Ours.empty_arrays_do_not_travel,
    "H4": Ours.extra_arrays_end_with_the_deadline,
    "H5": Ours.a_frozen_publisher_is_noticed,
    "H6": Ours.there_are_always_transports,
}


def test_every_line_has_both() -> None:
    assert set(RAW) == set(OURS)


@pytest.mark.parametrize("line", OURS)
def test_ours(line: str, ours: Ours, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_patch = "monkeypatch" in OURS[line].__annotations__
    OURS[line](ours, *([monkeypatch] if needs_patch else []))
    ours.works()


def meet(prefill: Mapping[str, int | str], decode: Mapping[str, int | str]) -> None:
    """Compares engine settings as a decode server does at the meeting."""
    first, second = (
        Instance(
            instance_id=new_instance_id(),
            generation=new_generation(),
            role="prefill" if number == 0 else "decode",
            host="127.0.0.1",
            side_channel_port=1,
            layout=LAYOUT,
            engine=EngineInfo(name="jax", address="127.0.0.1:1", settings=dict(settings)),
        )
        for number, settings in enumerate((prefill, decode))
    )
    check_fit(first, second)


def _gather_changed(
    gather: Callable[[Sequence[int]], list[jax.Array]],
    change: Callable[[list[jax.Array]], list[jax.Array]],
    page_ids: Sequence[int],
) -> list[jax.Array]:
    return change(gather(page_ids))


def _has_begun(pull: Pull) -> bool:
    return pull.wait(0.001) or pull.progress > 0


def users_of(name: str) -> list[str]:
    """Returns the modules of the package, tests and benchmarks aside, that use an attribute."""
    assert kvferry.__file__ is not None
    root = pathlib.Path(kvferry.__file__).parent
    found = []
    for room in ("control", "engine", "kernels", "server"):
        for path in sorted((root / room).rglob("*.py")):
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if any(isinstance(node, ast.Attribute) and node.attr == name for node in nodes):
                found.append(path.name)
    return found


class child(subprocess.Popen[str]):  # noqa: N801 (used as a function)
    """Runs jax_engine_peer.py; killed at the end."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "kvferry.tests.control.jax_engine_peer", *arguments]
        super().__init__(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __exit__(self, *error: Any) -> None:
        self.kill()
        self.communicate()
