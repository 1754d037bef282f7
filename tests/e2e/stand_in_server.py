# SPDX-License-Identifier: Apache-2.0
"""A server with the flags of the mains and none of their work, for tests of what starts them."""

import argparse
import http.server
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

_WORDS = ("A", " ferry", " floats", ".")


def _events(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    words = _WORDS[: body.get("max_tokens") or body.get("max_completion_tokens") or 16]
    for word in words:
        choice: dict[str, Any] = {"index": 0, "delta": {"content": word}, "finish_reason": None}
        if body.get("logprobs"):
            choice["logprobs"] = {"content": [{"token": word, "logprob": 0.0}]}
        yield {"choices": [choice]}
    reason = "stop" if len(words) == len(_WORDS) else "length"
    yield {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}
    yield {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": len(words)}}


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "_Server"

    def do_GET(self) -> None:
        ready = time.monotonic() >= self.server.ready_at
        if self.path == "/health":
            self._reply(200 if ready else 503, {})
        elif self.path == "/server_info":
            self._reply(200, {"internal_states": [self.server.counters]})
        else:
            self._reply(404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions":
            self._reply(404, {})
            return
        if "refuse" in json.dumps(body):
            self._reply(400, {"error": {"message": "refused"}})
            return
        if self.server.counters:
            self.server.counters["transfers_ok"] += 1
            self.server.counters["kv_bytes_moved"] += 1 << 20
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in _events(body):
            self._chunk(json.dumps(event))
        if "cut" not in json.dumps(body["messages"]):
            self._chunk("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: object) -> None:
        del format, args

    def _reply(self, status: int, document: object) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _chunk(self, data: str) -> None:
        event = f"data: {data}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
        self.wfile.flush()


class _Server(http.server.ThreadingHTTPServer):
    ready_at: float
    counters: dict[str, Any]


def main() -> None:
    """Serves until a signal ends it."""
    parser = argparse.ArgumentParser()
    for name in ("model_path", "host", "disaggregation_mode"):
        parser.add_argument(f"--{name}")
    for name in ("port", "bootstrap_port", "side_channel_port", "kv_transfer_port"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--ready_after_seconds", type=float, default=0.0)
    parser.add_argument("--fail", action="store_true", help="print a reason and exit with status 3")
    parser.add_argument("--stubborn", action="store_true", help="ignore SIGTERM")
    parser.add_argument("--family", action="store_true", help="have a child; print its pid")
    parser.add_argument("--silent", action="store_true", help="report no counters")
    args = parser.parse_args()
    if args.fail:
        print("no such model: the reason")
        sys.exit(3)
    if args.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if args.family:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("child", child.pid, flush=True)
    server = _Server((args.host, args.port), _Handler)
    server.ready_at = time.monotonic() + args.ready_after_seconds
    server.counters = {
        "kv_pages_used": 0,
        "transfers_ok": 0,
        "kv_bytes_moved": 0,
        "last_handover_seconds": 0.25,
        "last_handover_stages": {"arrival": 0.0, "transfer_end": 0.5},
    }
    if args.silent:
        server.counters = {}
    print("compiling: 1/3 prefill 32", flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    threading.Event().wait()


if __name__ == "__main__":
    main()
