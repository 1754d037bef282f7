# SPDX-License-Identifier: Apache-2.0
"""Puts a server together from its options, runs it, and takes it apart again.

The order of the start: look at every port (a taken one is reported at once), load the model,
compile, open the control ports and test the transfer engine, then serve. The end is the reverse.
"""

import contextlib
import os
import socket
import sys
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from absl import app, logging

from kvferry.control.bootstrap import ZmqBootstrapServer
from kvferry.control.connection import KVManager, KVPages
from kvferry.control.control_loop import ControlLoop
from kvferry.control.decode import DecodeScheduler
from kvferry.control.engines.base import EngineOptions, EngineStartError
from kvferry.control.engines.ports import claim_port
from kvferry.control.engines.registry import create_engine
from kvferry.control.engines.staging import StagingEngine
from kvferry.control.flags import Mode, ServerOptions, read_options
from kvferry.control.keys import read_keys
from kvferry.control.kv_layout import KVLayout
from kvferry.control.launch_service import Pair, make_service
from kvferry.control.prefill import PrefillScheduler
from kvferry.control.progress import CompileProgress
from kvferry.control.security import (
    CurveKeys,
    PortInUseError,
    check_advertise,
    check_bind,
    host_port,
)
from kvferry.control.side_channel import ChannelOptions
from kvferry.control.verified_pages import VerifiedPages
from kvferry.control.zmq_connection import ControlOptions, create_manager
from kvferry.engine.attention_plan import Family
from kvferry.engine.errors import ModelError
from kvferry.engine.kv_pool import CopyKind
from kvferry.engine.loader import LoadedModel, load_model
from kvferry.engine.runner import ModelRunner
from kvferry.engine.runner_options import RunnerOptions
from kvferry.engine.scheduler import Scheduler
from kvferry.engine.scheduler_limits import SchedulerLimits
from kvferry.engine.sharding import TP_AXIS
from kvferry.server.app import create_app
from kvferry.server.service import Service
from kvferry.server.serving import listen, serve
from kvferry.server.starting import StartingAnswers

_DEFAULT_DTYPE = {"cpu": "float32"}
# What each role steps and copies, so that it compiles nothing else. Decode prefills too: sequences
# that lost their pages are computed again there.
_FAMILIES: Mapping[Mode, tuple[Family, ...]] = {
    Mode.NULL: ("prefill", "decode"),
    Mode.PREFILL: ("prefill",),
    Mode.DECODE: ("prefill", "decode"),
}
_COPIES: Mapping[Mode, tuple[CopyKind, ...]] = {
    Mode.NULL: (),
    Mode.PREFILL: ("gather",),
    Mode.DECODE: ("scatter",),
}
# The other half of a request is posted by the router at the same moment; a decode server mentions
# its room before it queues.
_ORPHAN_SECONDS = 10.0
_PROGRESS_SECONDS = 60.0
# Gathered copies held at a time (half of it for one decode server), and the most that is gathered
# as one piece: device memory beside the pool.
_PUBLISHED_BYTES = 1 << 30
_CHUNK_BYTES = 256 << 20
# Host slots for staged pages: their largest size, and how many of each size.
_STAGED_PAGES = 32
_STAGING_SLOTS = 4
_START_ERRORS = (ModelError, EngineStartError, ValueError, OSError)


def serve_from_flags(argv: Sequence[str], default_mode: Mode, default_port: int) -> None:
    """Serves as the command line says, then exits.

    Args:
      argv: the command line without its flags.
      default_mode: the mode when the command line names none.
      default_port: the HTTP port when the command line names none.

    Raises:
      app.UsageError: there are arguments that are not flags.
    """
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    sys.exit(run_server(read_options(default_mode, default_port)))


def run_server(options: ServerOptions) -> int:
    """Serves until SIGTERM or SIGINT.

    Args:
      options: what to serve and how.

    Returns:
      The exit status: 0 after an orderly end, 1 if the server could not start (the reason is on
      stderr).
    """
    with contextlib.ExitStack() as stack:
        try:
            service, listener = _start(options, stack)
        except _START_ERRORS as error:
            logging.debug("start failed", exc_info=True)
            print(f"error: {error}", file=sys.stderr, flush=True)
            return 1
        where = host_port(options.host, options.port)
        logging.info("%s ready on http://%s", options.mode.value, where)
        serve(create_app(service), service, listener, drain_seconds=options.drain_seconds)
    return 0


def _start(options: ServerOptions, stack: contextlib.ExitStack) -> tuple[Service, socket.socket]:
    keys = None
    if options.mode is not Mode.NULL:
        keys = read_keys(options.curve_key_file) if options.curve_key_file else None
        check_bind(options.host, keys)
        check_advertise(options.host)
    listener = stack.enter_context(listen(options.host, options.port))
    answers = StartingAnswers(listener, "loading the model")
    stack.callback(answers.close)
    _check_ports(options)
    loop = bootstrap = None
    if options.mode is not Mode.NULL:
        loop = ControlLoop("kv-control")
        stack.callback(loop.stop)
    if options.mode is Mode.PREFILL and options.bootstrap_host is None:
        assert loop is not None
        channels = ChannelOptions(peer_timeout_seconds=options.peer_timeout_seconds, keys=keys)
        bootstrap = ZmqBootstrapServer(
            options.host, options.bootstrap_port, options=channels, loop=loop
        )
        bootstrap.start()
        stack.callback(bootstrap.stop)
    model, runner = _load(options)
    limits = SchedulerLimits(max_queued_requests=options.max_queued_requests)
    scheduler_class = {
        Mode.NULL: Scheduler,
        Mode.PREFILL: PrefillScheduler,
        Mode.DECODE: DecodeScheduler,
    }[options.mode]
    scheduler = scheduler_class(runner, model.tokenizer, limits)
    show = CompileProgress()

    def progress(done: int, total: int, label: str) -> None:
        answers.reason = f"compiling {done}/{total}"
        show(done, total, label)

    copies = _COPIES[options.mode]
    if options.verify_kv and options.mode is Mode.DECODE:
        copies = (*copies, "gather")  # Pages are read back to be checked.
    runner.warm_up(
        progress,
        families=_FAMILIES[options.mode],
        copies=copies,
        on_logits=scheduler.sampler.warm_up,
    )
    pair = None
    if isinstance(scheduler, PrefillScheduler | DecodeScheduler):
        assert loop is not None
        manager = _connect(options, keys, model, runner, scheduler, loop)
        stack.callback(manager.stop)
        pair = Pair(manager, scheduler, bootstrap)
    scheduler.start()
    stack.callback(scheduler.stop)
    service = make_service(options, model, runner, scheduler, pair)
    stack.callback(service.close)
    answers.close()
    service.set_ready()
    return service, listener


def _check_ports(options: ServerOptions) -> None:
    """Reports a taken port before minutes are spent on compiling, and by the flag that moves it."""
    names = {
        Mode.NULL: (),
        Mode.PREFILL: ("side_channel_port", "kv_transfer_port"),
        Mode.DECODE: ("kv_transfer_port",),
    }[options.mode]
    if options.mode is Mode.PREFILL and options.bootstrap_host is None:
        names = ("bootstrap_port", *names)
    for name in names:
        try:
            claim_port(options.host, getattr(options, name)).close()
        except PortInUseError as error:
            raise PortInUseError(f"{error} with --{name}") from error


def _load(options: ServerOptions) -> tuple[LoadedModel, ModelRunner]:
    # A cache that JAX was told of (JAX_COMPILATION_CACHE_DIR) is the operator's choice. JAX makes
    # its settings attributes at run time.
    told = getattr(jax.config, "jax_compilation_cache_dir")  # noqa: B009
    if options.compilation_cache_dir and not told:
        try:
            os.makedirs(options.compilation_cache_dir, exist_ok=True)
        except OSError as error:
            logging.warning("compiled steps are not kept for the next start: %s", error)
        else:
            jax.config.update("jax_compilation_cache_dir", options.compilation_cache_dir)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    dtype = options.dtype
    if dtype == "auto":
        dtype = _DEFAULT_DTYPE.get(jax.default_backend(), "bfloat16")
    logging.info("loading %s as %s", options.model_path, dtype)
    model = load_model(options.model_path, dtype)
    runner_options = RunnerOptions(
        max_running_requests=options.max_running_requests,
        chunk_tokens=options.chunk_tokens,
        max_context=options.max_context or None,
        page_size=options.page_size or None,
        num_pages=options.num_pages or None,
        kv_dtype=None if options.kv_cache_dtype == "auto" else options.kv_cache_dtype,
        mesh=_mesh(options.tensor_parallel_size),
    )
    return model, ModelRunner(model, runner_options)


def _mesh(size: int) -> jax.sharding.Mesh | None:
    if size <= 1:
        return None
    devices = jax.local_devices()
    if size > len(devices):
        raise ValueError(
            f"--tensor_parallel_size={size}, but this process has {len(devices)} devices"
        )
    return jax.sharding.Mesh(np.asarray(devices[:size]), (TP_AXIS,))


def _connect(
    options: ServerOptions,
    keys: CurveKeys | None,
    model: LoadedModel,
    runner: ModelRunner,
    scheduler: PrefillScheduler | DecodeScheduler,
    loop: ControlLoop,
) -> KVManager:
    engine = create_engine(
        options.transfer_engine,
        EngineOptions(
            host=options.host,
            port=options.kv_transfer_port,
            channels=options.kv_transfer_channels,
            chunk_bytes=options.transfer_chunk_bytes,
            parallel_copies=options.max_parallel_copies,
            keys=keys,
        ),
    )
    most = max(1, _CHUNK_BYTES // runner.pool.page_bytes)
    if options.enable_d2h_staging:
        most = min(most, _STAGED_PAGES)
    sizes = [size for size in runner.pool.buckets if size <= most]
    pages: KVPages = runner.pool
    if options.verify_kv:
        pages = VerifiedPages(runner.pool)
        pages.warm_up(sizes)
    if options.enable_d2h_staging and options.mode is Mode.PREFILL:
        page_specs = [pages.specs(size) for size in sizes]
        engine = StagingEngine(engine, page_specs, _STAGING_SLOTS)
    control = ControlOptions(
        host=options.host,
        side_channel_port=options.side_channel_port,
        bootstrap_host=options.bootstrap_host or options.host,
        bootstrap_port=options.bootstrap_port,
        peer_timeout_seconds=options.peer_timeout_seconds,
        pull_timeout_seconds=options.pull_timeout_seconds,
        orphan_timeout_seconds=_ORPHAN_SECONDS,
        # Longer than a pull may take, or a slow link would look like no progress.
        progress_timeout_seconds=max(_PROGRESS_SECONDS, 2 * options.pull_timeout_seconds),
        max_published_bytes=_PUBLISHED_BYTES,
        keys=keys,
    )
    manager = create_manager(
        "prefill" if options.mode is Mode.PREFILL else "decode",
        options=control,
        layout=_layout(model, runner),
        pages=pages,
        engine=engine,
        on_event=scheduler.wake,
        loop=loop,
    )
    manager.start()
    if isinstance(scheduler, PrefillScheduler):
        scheduler.connect(manager, sizes[-1])
    else:
        scheduler.connect(manager, options.bootstrap_port)
    return manager


def _layout(model: LoadedModel, runner: ModelRunner) -> KVLayout:
    pool = runner.pool
    spec = pool.specs(1)[0]
    return KVLayout(
        num_layers=model.config.num_layers,
        page_size=pool.page_size,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        dtype=pool.layout.dtype,
        storage_dtype=str(spec.dtype),
        page_shape=spec.shape[1:],
        page_buckets=pool.buckets,
        model_fingerprint=model.fingerprint,
        max_context=runner.sizes.max_context,
        tp_size=pool.layout.shards,
    )
