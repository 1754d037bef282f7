# SPDX-License-Identifier: Apache-2.0
"""Settings of every test: JAX on eight CPU devices, no network, the same random cases each time."""

import ipaddress
import os
import pathlib
import socket
import sys

import hypothesis

_CACHE = pathlib.Path(__file__).resolve().parent.parent / ".cache" / "jax"

# For this process and the servers that tests start. Set before anything imports JAX, which reads
# them once.
os.environ.update(
    {
        "JAX_PLATFORMS": "cpu",
        # Compiled programs are kept from run to run, so that starting a server a second time takes
        # seconds.
        "JAX_COMPILATION_CACHE_DIR": str(_CACHE),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        # Nothing may come from a model hub.
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # libtpu compiles without a TPU, and must not look for one.
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
)
# A proxy would get the requests that tests send to their own servers.
for _name in ("http_proxy", "https_proxy", "all_proxy"):
    os.environ.pop(_name, None)
    os.environ.pop(_name.upper(), None)

import jax  # noqa: E402

# Set here and not in XLA_FLAGS, which the servers would inherit.
jax.config.update("jax_num_cpu_devices", 8)

hypothesis.settings.register_profile(
    "repeatable", derandomize=True, database=None, deadline=None, print_blob=True
)
hypothesis.settings.load_profile("repeatable")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"  # any other name would ask a name server


def _refuse_network(event: str, args: tuple[object, ...]) -> None:
    """Makes an attempt to leave this machine an error where it is made (not a 30 s time-out)."""
    if event != "socket.connect":
        return
    connecting, address = args
    assert isinstance(connecting, socket.socket)
    is_internet = connecting.family in (socket.AF_INET, socket.AF_INET6)
    if is_internet and isinstance(address, tuple) and not _is_loopback(str(address[0])):
        raise RuntimeError(f"A test tried to connect to {address}; only loopback is allowed.")


sys.addaudithook(_refuse_network)
