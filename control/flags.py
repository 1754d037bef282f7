# SPDX-License-Identifier: Apache-2.0
"""Command-line flags of prefill_main and decode_main, and the plain options made from them.

This is the only module that reads flags: the mains call `read_options()` once and hand the frozen
`ServerOptions` on, so everything below them is configured by ordinary arguments.
"""

import dataclasses
import enum
import os

from absl import flags

from kvferry.control.keys import CURVE_KEY_FILE_HELP

_MAX_PORT = 65535


class Mode(enum.Enum):
    """What a server does: both halves, only prefill, or only decode."""

    NULL = "null"
    PREFILL = "prefill"
    DECODE = "decode"


_MODEL_PATH = flags.DEFINE_string(
    "model_path",
    None,
    "The model: a Hugging Face folder (config.json, *.safetensors, tokenizer.json) or a .gguf file."
    " Required.",
    required=True,
)
_SERVED_MODEL_NAME = flags.DEFINE_string(
    "served_model_name", None, "Name that clients see in /v1/models; default: the model's own name."
)
_HOST = flags.DEFINE_string(
    "host",
    "127.0.0.1",
    "Address to listen on, also the one peers are told to come to. Numeric, and never a wildcard:"
    " a peer cannot connect to 0.0.0.0. Other than loopback it needs --curve_key_file.",
)
_CURVE_KEY_FILE = flags.DEFINE_string("curve_key_file", None, CURVE_KEY_FILE_HELP)
_PORT = flags.DEFINE_integer(
    "port",
    None,
    "HTTP port; default 30000 for prefill_main, 30001 for decode_main.",
    lower_bound=1,
    upper_bound=_MAX_PORT,
)
_MODE = flags.DEFINE_enum_class(
    "disaggregation_mode",
    None,
    Mode,
    "prefill: compute prompts and hand their KV cache over. decode: take KV caches over and"
    " generate. null: do both in this one process, without a peer. Default: what the binary's name"
    " says.",
)
_BOOTSTRAP_HOST = flags.DEFINE_string(
    "bootstrap_host",
    None,
    "prefill: name or address of a separate bootstrap server (bootstrap_main) to register at; a"
    " name is looked up again whenever the server was lost. Default: this process runs its own on"
    " --host. decode: not used, the router names it in each request.",
)
_BOOTSTRAP_PORT = flags.DEFINE_integer(
    "bootstrap_port",
    8998,
    "Port of the bootstrap server. decode: used when a request names no port.",
    lower_bound=1,
    upper_bound=_MAX_PORT,
)
_SIDE_CHANNEL_PORT = flags.DEFINE_integer(
    "side_channel_port",
    9600,
    "prefill: ZMQ port for requests, hand-over notices and aborts; 0: any free one.",
    lower_bound=0,
    upper_bound=_MAX_PORT,
)
_KV_TRANSFER_PORT = flags.DEFINE_integer(
    "kv_transfer_port",
    None,
    "Port of the transfer engine; 0: any free one. Default: 9100 for prefill, 0 for decode.",
    lower_bound=0,
    upper_bound=_MAX_PORT,
)
_KV_TRANSFER_CHANNELS = flags.DEFINE_integer(
    "kv_transfer_channels",
    8,
    "Parallel connections per peer of the transfer engine; the same on both sides.",
    lower_bound=1,
    upper_bound=64,
)
_TRANSFER_ENGINE = flags.DEFINE_string(
    "transfer_engine",
    "auto",
    "How KV pages travel; the same on both sides. jax: jax.experimental.transfer. tcp: plain"
    " streams. zmq: ZMQ, the one that --curve_key_file encrypts. shm: shared memory, within one"
    " host. auto: shm for peers on this host, else jax on an accelerator and tcp on CPU. Or the"
    " name of an engine that an installed package brings (control/engines/base.py,"
    " examples/filedrop).",
)
_TRANSFER_CHUNK_BYTES = flags.DEFINE_integer(
    "transfer_chunk_bytes",
    512 << 10,
    "jax engine: bytes sent as one piece; the same on both sides.",
    lower_bound=4096,
)
_MAX_PARALLEL_COPIES = flags.DEFINE_integer(
    "max_parallel_copies",
    16,
    "jax engine: pieces staged at once; at least twice --kv_transfer_channels.",
    lower_bound=2,
)
_ENABLE_D2H_STAGING = flags.DEFINE_bool(
    "enable_d2h_staging",
    False,
    "prefill: copy pages into pre-allocated pinned-host slots before they travel, which frees"
    " device memory early. Pages then travel in pieces of at most 32; there are four slots of each"
    " size.",
)
_VERIFY_KV = flags.DEFINE_bool(
    "verify_kv",
    False,
    "Checksum KV pages from the prefill server's gather to the decode server's pool; a request"
    " whose pages differ fails with 500. The same on both sides. Costs two more passes over the"
    " pages.",
)
_PULL_TIMEOUT_SECONDS = flags.DEFINE_float(
    "pull_timeout_seconds",
    30.0,
    "A pull of KV pages fails when it brings nothing for this long, and a hand-over after twice"
    " this long (at least 60 s) without any progress.",
    lower_bound=0.1,
)
_PEER_TIMEOUT_SECONDS = flags.DEFINE_float(
    "peer_timeout_seconds",
    3.0,
    "A peer that is silent for this long counts as dead. Servers may differ: each is sent signs of"
    " life as often as it needs them. Also the time for which the bootstrap server in a prefill"
    " server keeps one that is silent.",
    lower_bound=0.5,
    upper_bound=3600.0,
)
_DTYPE = flags.DEFINE_enum(
    "dtype",
    "auto",
    ["auto", "float32", "bfloat16", "float16"],
    "Type of weights and activations. auto: float32 on CPU, bfloat16 on TPU.",
)
_KV_CACHE_DTYPE = flags.DEFINE_enum(
    "kv_cache_dtype",
    "auto",
    ["auto", "float32", "bfloat16", "float16"],
    "Type of the KV cache; auto: the same as --dtype.",
)
_PAGE_SIZE = flags.DEFINE_integer(
    "page_size", 0, "Tokens per KV page; 0: 16 on CPU, 64 on TPU.", lower_bound=0
)
_NUM_PAGES = flags.DEFINE_integer(
    "num_pages",
    0,
    "Pages in the KV pool; 0: what 1 GiB holds on CPU (more if the longest request needs it), what"
    " 85 % of the free device memory holds on TPU.",
    lower_bound=0,
)
_MAX_RUNNING_REQUESTS = flags.DEFINE_integer(
    "max_running_requests", 16, "Sequences that decode together at most.", lower_bound=1
)
_MAX_QUEUED_REQUESTS = flags.DEFINE_integer(
    "max_queued_requests",
    256,
    "Requests that may wait; a further one is answered 503.",
    lower_bound=1,
)
_CHUNK_TOKENS = flags.DEFINE_integer(
    "chunk_tokens", 512, "Prompt tokens computed per prefill step.", lower_bound=16
)
_MAX_CONTEXT = flags.DEFINE_integer(
    "max_context", 0, "Longest prompt plus answer in tokens; 0: the model's own limit."
)
_TENSOR_PARALLEL_SIZE = flags.DEFINE_integer(
    "tensor_parallel_size", 1, "Devices that share each layer (KV heads are split over them)."
)
_MAX_BODY_BYTES = flags.DEFINE_integer(
    "max_body_bytes", 4 << 20, "Longest HTTP request body; a longer one is answered 400."
)
_DRAIN_SECONDS = flags.DEFINE_float(
    "drain_seconds", 30.0, "After SIGTERM, running requests get this long to finish."
)
_COMPILATION_CACHE_DIR = flags.DEFINE_string(
    "compilation_cache_dir",
    os.path.join(os.path.expanduser("~"), ".cache", "kvferry", "xla"),
    "Folder where compiled steps are kept, so that the next start is fast. Empty: keep none.",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Everything a server is started with; one field per flag, defaults resolved."""

    mode: Mode
    model_path: str
    served_model_name: str | None
    host: str
    curve_key_file: str | None
    port: int
    bootstrap_host: str | None
    bootstrap_port: int
    side_channel_port: int
    kv_transfer_port: int
    kv_transfer_channels: int
    transfer_engine: str
    transfer_chunk_bytes: int
    max_parallel_copies: int
    enable_d2h_staging: bool
    verify_kv: bool
    pull_timeout_seconds: float
    peer_timeout_seconds: float
    dtype: str
    kv_cache_dtype: str
    page_size: int
    num_pages: int
    max_running_requests: int
    max_queued_requests: int
    chunk_tokens: int
    max_context: int
    tensor_parallel_size: int
    max_body_bytes: int
    drain_seconds: float
    compilation_cache_dir: str


def read_options(default_mode: Mode, default_port: int) -> ServerOptions:
    """Reads the parsed flags.

    Args:
      default_mode: the mode when `--disaggregation_mode` is not given.
      default_port: the HTTP port when `--port` is not given.

    Returns:
      The options, every default resolved.
    """
    mode = _MODE.value or default_mode
    transfer_port = _KV_TRANSFER_PORT.value
    if transfer_port is None:
        transfer_port = 9100 if mode is Mode.PREFILL else 0
    return ServerOptions(
        mode=mode,
        model_path=_MODEL_PATH.value,
        served_model_name=_SERVED_MODEL_NAME.value,
        host=_HOST.value,
        curve_key_file=_CURVE_KEY_FILE.value,
        port=_PORT.value or default_port,
        bootstrap_host=_BOOTSTRAP_HOST.value,
        bootstrap_port=_BOOTSTRAP_PORT.value,
        side_channel_port=_SIDE_CHANNEL_PORT.value,
        kv_transfer_port=transfer_port,
        kv_transfer_channels=_KV_TRANSFER_CHANNELS.value,
        transfer_engine=_TRANSFER_ENGINE.value,
        transfer_chunk_bytes=_TRANSFER_CHUNK_BYTES.value,
        max_parallel_copies=_MAX_PARALLEL_COPIES.value,
        enable_d2h_staging=_ENABLE_D2H_STAGING.value,
        verify_kv=_VERIFY_KV.value,
        pull_timeout_seconds=_PULL_TIMEOUT_SECONDS.value,
        peer_timeout_seconds=_PEER_TIMEOUT_SECONDS.value,
        dtype=_DTYPE.value,
        kv_cache_dtype=_KV_CACHE_DTYPE.value,
        page_size=_PAGE_SIZE.value,
        num_pages=_NUM_PAGES.value,
        max_running_requests=_MAX_RUNNING_REQUESTS.value,
        max_queued_requests=_MAX_QUEUED_REQUESTS.value,
        chunk_tokens=_CHUNK_TOKENS.value,
        max_context=_MAX_CONTEXT.value,
        tensor_parallel_size=_TENSOR_PARALLEL_SIZE.value,
        max_body_bytes=_MAX_BODY_BYTES.value,
        drain_seconds=_DRAIN_SECONDS.value,
        compilation_cache_dir=_COMPILATION_CACHE_DIR.value,
    )
