# SPDX-License-Identifier: Apache-2.0
"""Servers that cannot start: exit status 1 and one line that says what is wrong and what to do."""

import pathlib
import re
import socket
import subprocess
import sys
import time

import pytest

from kvferry.control.keys import make_keys, write_keys
from kvferry.demo.ports import LOOPBACK, PortPicker
from kvferry.tests.engine.checkpoints import copy_tiny, smollm2_path, tiny_folder

_TIMEOUT_SECONDS = 60.0


def _start(main: str, *flags: str) -> str:
    """Runs a main that must fail; returns what it says after "error: "."""
    ports = PortPicker()
    names: tuple[str, ...] = ("bootstrap_port",)
    if main != "bootstrap_main":
        names += ("port", "side_channel_port", "kv_transfer_port")
    chosen = [f"--{name}={ports.pick()}" for name in names if f"--{name}=" not in " ".join(flags)]
    found = subprocess.run(
        [sys.executable, "-m", f"kvferry.control.{main}", *chosen, *flags],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_SECONDS,
        check=False,
    )
    assert found.returncode == 1, found.stderr
    assert "Traceback" not in found.stderr
    match = re.search(r"^error: (.*)", found.stderr, re.MULTILINE)
    assert match, found.stderr
    return match[1]


@pytest.mark.parametrize("main", ["prefill_main", "decode_main"])
def test_unknown_model_path(main: str) -> None:
    message = _start(main, "--model_path=/nowhere/model")
    assert "/nowhere/model" in message


def test_truncated_gguf(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(smollm2_path().read_bytes()[:20_000_000])
    message = _start("prefill_main", f"--model_path={path}")
    assert "short.gguf" in message
    assert "truncated" in message


def test_truncated_safetensors(tmp_path: pathlib.Path) -> None:
    folder = copy_tiny("qwen2", tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "model.safetensors" in _start("prefill_main", f"--model_path={folder}")


def test_missing_tokenizer(tmp_path: pathlib.Path) -> None:
    folder = copy_tiny("qwen2", tmp_path)
    (folder / "tokenizer.json").unlink()
    assert "tokenizer.json" in _start("prefill_main", f"--model_path={folder}")


@pytest.mark.parametrize(
    "flag", ["port", "bootstrap_port", "side_channel_port", "kv_transfer_port"]
)
def test_port_taken(flag: str) -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        message = _start("prefill_main", f"--model_path={tiny_folder('qwen2')}", f"--{flag}={port}")
    assert str(port) in message
    assert f"--{flag}" in message


@pytest.mark.parametrize("main", ["prefill_main", "bootstrap_main"])
def test_beyond_loopback_without_keys(main: str) -> None:
    model = () if main == "bootstrap_main" else (f"--model_path={tiny_folder('qwen2')}",)
    message = _start(main, *model, "--host=0.0.0.0")
    assert "0.0.0.0" in message
    assert "python -m kvferry.keys" in message and "--curve_key_file" in message


@pytest.mark.parametrize("main", ["decode_main", "bootstrap_main"])
def test_a_key_file_that_others_can_read(main: str, tmp_path: pathlib.Path) -> None:
    path = write_keys(tmp_path, make_keys())
    path.chmod(0o644)
    model = () if main == "bootstrap_main" else ("--model_path=/nowhere",)
    message = _start(main, *model, f"--curve_key_file={path}")
    assert str(path) in message and "0644" in message


def test_a_wildcard_is_refused_although_there_are_keys(tmp_path: pathlib.Path) -> None:
    keys = f"--curve_key_file={write_keys(tmp_path, make_keys())}"
    message = _start("prefill_main", "--model_path=/nowhere", "--host=0.0.0.0", keys)
    assert "cannot connect to the wildcard 0.0.0.0" in message


def test_an_address_of_another_machine(tmp_path: pathlib.Path) -> None:
    keys = f"--curve_key_file={write_keys(tmp_path, make_keys())}"
    assert "192.0.2.1" in _start("bootstrap_main", "--host=192.0.2.1", keys)


def test_pool_too_small_for_one_request() -> None:
    flags = ("--num_pages=4", "--max_context=512")
    message = _start("decode_main", f"--model_path={tiny_folder('qwen2')}", *flags)
    assert "4 pages" in message


def test_a_taken_port_is_reported_before_the_model_is_loaded() -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        started = time.monotonic()
        _start("prefill_main", "--model_path=/nowhere", f"--port={taken.getsockname()[1]}")
    # Nearly all of it is the import of JAX.
    assert time.monotonic() - started < _TIMEOUT_SECONDS / 2


@pytest.mark.parametrize("main", ["prefill_main", "decode_main", "bootstrap_main"])
def test_help_teaches(main: str) -> None:
    found = subprocess.run(
        [sys.executable, "-m", f"kvferry.control.{main}", "--help"],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_SECONDS,
        check=False,
    )
    text = found.stdout + found.stderr
    assert f"python -m kvferry.control.{main}" in text
    for flag in ("--host", "--bootstrap_port"):
        assert flag in text
