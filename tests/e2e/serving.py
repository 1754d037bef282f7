# SPDX-License-Identifier: Apache-2.0
"""What the end-to-end tests share: requests to servers, and waiting for them to come to rest."""

import http.client
import json
import pathlib
import shutil
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

from kvferry.demo.stack import Server, get_json
from kvferry.tests.engine.checkpoints import tiny_folder

# One set of sizes for all servers of a model, so that each compiled step is compiled once.
SMOLLM2_FLAGS = ("--max_context=2048", "--num_pages=768", "--max_running_requests=16")
TINY_FLAGS = (
    "--max_context=512",
    "--num_pages=64",
    "--max_running_requests=4",
    "--chunk_tokens=64",
    "--peer_timeout_seconds=1.5",
)
_TIMEOUT_SECONDS = 120.0
_SETTLE_SECONDS = 10.0
_CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def by_role(flags: tuple[str, ...]) -> Mapping[str, tuple[str, ...]]:
    """Returns the same flags for each role, as `Stack` takes them."""
    return {role: flags for role in ("prefill", "decode", "null")}


def tiny_chat_model(folder: pathlib.Path) -> pathlib.Path:
    """Copies a small random checkpoint and gives it a chat template."""
    path = pathlib.Path(shutil.copytree(tiny_folder("llama3"), folder / "tiny"))
    (path / "chat_template.jinja").write_text(_CHAT_TEMPLATE, encoding="utf-8")
    return path


def post(url: str, path: str, body: Any, *, timeout: float = _TIMEOUT_SECONDS) -> tuple[int, Any]:
    """Posts a body (bytes as they are, anything else as JSON); returns status and JSON answer."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=timeout)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def generate(url: str, prompt_ids: list[int], max_new_tokens: int, **fields: Any) -> Any:
    """Asks for greedy tokens through /generate; returns the answer, which must be a 200."""
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    body = {"input_ids": prompt_ids, "sampling_params": sampling, **fields}
    status, answer = post(url, "/generate", body)
    assert status == 200, (status, answer)
    return answer


def state(server: Server) -> dict[str, Any]:
    """Returns a server's counters."""
    return dict(get_json(f"{server.url}/server_info")["internal_states"][0])


def wait_for(condition: Callable[[], bool], what: str, seconds: float = _SETTLE_SECONDS) -> None:
    """Waits until something is so, at most `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)


def at_rest(server: Server) -> bool:
    """Whether a server holds nothing: no pages, rooms, publications or pulls."""
    now = state(server)
    control = now.get("control", {})
    held = ("open_rooms", "early_rooms", "published_bytes", "published_chunks", "published_keys")
    return (
        now["kv_pages_used"] == now["num_running_reqs"] == now["num_waiting_reqs"] == 0
        and not any(control.get(name) for name in held)
        and not control.get("pending_pulls")
    )


def wait_at_rest(*servers: Server) -> None:
    """Waits until no server holds anything any more."""
    for server in servers:
        wait_for(lambda server=server: at_rest(server), f"{server.url} at rest")  # type: ignore[misc]
