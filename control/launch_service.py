# SPDX-License-Identifier: Apache-2.0
"""What the HTTP side of a server knows of its model and of its half of a pair."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable

from kvferry.control.bootstrap import ZmqBootstrapServer
from kvferry.control.connection import KVManager
from kvferry.control.decode import DecodeScheduler
from kvferry.control.flags import Mode, ServerOptions
from kvferry.control.prefill import PrefillScheduler
from kvferry.engine.loader import LoadedModel
from kvferry.engine.request import BootstrapInfo
from kvferry.engine.runner import ModelRunner
from kvferry.engine.scheduler import Scheduler
from kvferry.server.interfaces import ServiceOptions
from kvferry.server.metrics import MetricSample
from kvferry.server.service import Service, ServiceHooks

_State = dict[str, object]


@dataclasses.dataclass(frozen=True)
class Pair:
    """What a disaggregated server has beside its scheduler.

    Attributes:
        manager: Of its rooms.
        scheduler: Its scheduler.
        bootstrap: The bootstrap server in this process, if there is one.
    """

    manager: KVManager
    scheduler: PrefillScheduler | DecodeScheduler
    bootstrap: ZmqBootstrapServer | None = None


def make_service(
    options: ServerOptions,
    model: LoadedModel,
    runner: ModelRunner,
    scheduler: Scheduler,
    pair: Pair | None,
) -> Service:
    """Makes the service that answers HTTP requests.

    Args:
        options: What is served and how.
        model: The model.
        runner: What computes it.
        scheduler: What the requests go to.
        pair: The server's half of a pair, or None for a server that does both.

    Returns:
        The service, not yet ready.
    """

    def engine_state() -> _State:
        return {"num_traces": runner.num_traces + scheduler.sampler.num_traces}

    hooks = ServiceHooks(state=engine_state)
    if pair is not None:
        hooks = _PairHooks(pair, options, engine_state).hooks()
    return Service(scheduler, model.tokenizer, _service_options(options, model, runner), hooks)


def _service_options(
    options: ServerOptions, model: LoadedModel, runner: ModelRunner
) -> ServiceOptions:
    is_half = options.mode is not Mode.NULL
    names = {
        "dp_size": 1,
        "tp_size": options.tensor_parallel_size,
        "dtype": str(model.params["embed"].dtype),
        "page_size": runner.pool.page_size,
        "num_pages": runner.pool.num_pages,
        "bootstrap_port": options.bootstrap_port,
        "transfer_engine": options.transfer_engine if is_half else None,
    }
    # A router looks a model_path that is not a local folder up on a hub.
    if os.path.isdir(options.model_path):
        names["model_path"] = os.path.abspath(options.model_path)
    return ServiceOptions(
        model_name=options.served_model_name or model.name,
        role=options.mode.value,
        max_context=runner.sizes.max_context,
        max_body_bytes=options.max_body_bytes,
        server_info=names,
        model_info={
            "model_type": model.config.model_type,
            "architectures": [model.config.architecture],
        },
    )


class _PairHooks:
    """What the service asks a half of a pair, and tells it."""

    def __init__(
        self, pair: Pair, options: ServerOptions, engine_state: Callable[[], _State]
    ) -> None:
        self._manager = pair.manager
        self._bootstrap = pair.bootstrap
        self._handovers = pair.scheduler.handovers
        self._options = options
        self._engine_state = engine_state

    def hooks(self) -> ServiceHooks:
        return ServiceHooks(
            fault_checks=[lambda: self._manager.failure],
            ready_checks=[lambda: self._manager.not_ready],
            collect=self._collect,
            refused=self._refused,
            state=self._state,
        )

    def _collect(self) -> Iterable[MetricSample]:
        counters = self._manager.counters()
        if self._bootstrap is not None:
            counters |= self._bootstrap.counters()
        return [MetricSample(name, value) for name, value in counters.items()]

    def _state(self) -> _State:
        handovers = self._handovers
        return {
            **self._engine_state(),
            "transfers_ok": handovers.count,
            "kv_bytes_moved": handovers.num_bytes,
            "last_handover_seconds": handovers.last_seconds,
            "last_handover_bytes": handovers.last_bytes,
            "last_pull_seconds": handovers.last_pull_seconds,
            "last_handover_stages": handovers.last_stages,
            "control": self._manager.counters(),
        }

    def _refused(self, bootstrap: BootstrapInfo, reason: str) -> None:
        with contextlib.suppress(ValueError):  # the room is open already: its owner will end it
            if self._options.mode is Mode.PREFILL:
                self._manager.open_sender(bootstrap.room).abort(reason)
            else:
                port = bootstrap.port or self._options.bootstrap_port
                self._manager.open_receiver(bootstrap.host, port, bootstrap.room).abort(reason)
