# SPDX-License-Identifier: Apache-2.0
"""The clients of the soak test: requests with known answers, some of which are given up.

A request that met no kill must be answered 200 with the right tokens, unless its client aborted
it. One that did meet a kill must end all the same: with an error, a broken connection, or the right
tokens.
"""

import collections
import dataclasses
import http.client
import json
import random
import socket
import threading
import time
import urllib.parse
from collections.abc import Sequence
from typing import Any, Literal

from kvferry.demo.stack import Stack
from kvferry.tests.e2e.serving import generate, post

BOUND_SECONDS = 60.0

_TIE_MARGIN = 1e-3
_MAX_PROMPT, _MAX_ANSWER = 150, 40
_VOCABULARY = 250
_ABORT_AFTER_SECONDS = 0.4


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt and its greedy answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def questions(colocated_url: str, count: int, rng: random.Random) -> list[Question]:
    """Makes up prompts and has one server answer them alone.

    Those in whose answer two tokens are nearly equally likely are left out: batching changes the
    order of sums, and then the other one may be chosen.

    Args:
        colocated_url: A server that prefills and decodes.
        count: How many are wanted.
        rng: Source of chance.
    """
    found: list[Question] = []
    while len(found) < count:
        prompt = [rng.randrange(3, _VOCABULARY) for _ in range(rng.randint(1, _MAX_PROMPT))]
        length = rng.randint(1, _MAX_ANSWER)
        answer = generate(colocated_url, prompt, length, return_logprob=True, top_logprobs_num=2)
        tops = answer["meta_info"]["output_top_logprobs"]
        if all(first[0] - second[0] > _TIE_MARGIN for first, second in tops):
            found.append(Question(tuple(prompt), tuple(answer["output_ids"])))
    return found


class Weather:
    """Whether the servers are up, and how often that has changed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open = True
        self.epoch = 0
        self._lost_since_kill = 0

    def kill(self) -> None:
        """A server is about to be killed; requests go on for the moment."""
        with self._changed:
            self.epoch += 1
            self._lost_since_kill = 0

    def hold(self) -> None:
        """Nobody starts another request until `mend`: they would all fail."""
        with self._changed:
            self._open = False

    def mend(self) -> None:
        """The servers are up again."""
        with self._changed:
            self.epoch += 1
            self._open = True
            self._changed.notify_all()

    def wait_until_open(self) -> int:
        """Waits; returns the epoch."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._open, 300.0), "servers do not come back"
            return self.epoch

    def note_loss(self) -> None:
        """Counts a request that a kill has ended."""
        with self._changed:
            self._lost_since_kill += 1
            self._changed.notify_all()

    def wait_for_losses(self, count: int, seconds: float) -> None:
        """Waits until a kill has ended so many requests, but not for ever."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost_since_kill >= count, seconds)


class Clients:
    """Threads that ask until there were enough requests.

    Args:
        stack: Whom.
        asked: What.
        weather: When.
        seed: Of all chance.
    """

    def __init__(
        self, stack: Stack, asked: Sequence[Question], weather: Weather, seed: int
    ) -> None:
        self._stack = stack
        self._questions = asked
        self._weather = weather
        self._seed = seed
        self._lock = threading.Lock()
        self._left = 0
        self._threads: list[threading.Thread] = []
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.problems: list[str] = []
        self.longest_seconds = 0.0

    @property
    def done(self) -> int:
        """Requests that have ended."""
        return self.outcomes.total()

    def run(self, count: int, threads: int) -> None:
        """Starts threads that ask `count` times in all; `join` waits for them."""
        self._left = count
        self._threads = [
            threading.Thread(target=self._work, args=(f"{self._seed}-{self.done}-{number}",))
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Waits until all have ended."""
        for thread in self._threads:
            thread.join()

    @property
    def busy(self) -> bool:
        """Whether any thread still asks."""
        return any(thread.is_alive() for thread in self._threads)

    def _work(self, name: str) -> None:
        rng = random.Random(name)
        while True:
            with self._lock:
                if not self._left or self.problems:
                    return
                self._left -= 1
            epoch = self._weather.wait_until_open()
            began = time.monotonic()
            outcome, detail = self._ask(rng, f"{name}-{self._left}")
            seconds = time.monotonic() - began
            calm = epoch == self._weather.epoch and not epoch % 2
            with self._lock:
                self.outcomes[outcome] += 1
                self.longest_seconds = max(self.longest_seconds, seconds)
                if outcome == "wrong" or (calm and outcome == "lost") or seconds > BOUND_SECONDS:
                    self.problems.append(f"{outcome} after {seconds:.2f} s: {detail}")
            if outcome == "lost":
                self._weather.note_loss()

    def _ask(
        self, rng: random.Random, rid: str
    ) -> tuple[Literal["right", "wrong", "lost", "left", "aborted"], str]:
        question = rng.choice(self._questions)
        chance = rng.random()
        body = {
            "input_ids": question.prompt,
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": len(question.answer),
                "ignore_eos": True,
            },
            "stream": rng.random() < 0.3,
            "rid": rid,
        }
        if chance < 0.05:
            self._leave(body, rng.random() * _ABORT_AFTER_SECONDS)
            return "left", ""
        timer = threading.Timer(rng.random() * _ABORT_AFTER_SECONDS, self._abort, [rid])
        if chance < 0.1:
            timer.start()
        try:
            status, tokens = self._post(body)
        except (OSError, http.client.HTTPException, ValueError) as error:
            return "lost", repr(error)
        finally:
            timer.cancel()
            if chance < 0.1:
                timer.join()
        if status != 200:
            return ("aborted" if chance < 0.1 else "lost"), f"{status} {tokens}"
        if tuple(tokens) != question.answer:
            return "wrong", f"{tokens} instead of {question.answer}"
        return "right", ""

    def _post(self, body: dict[str, Any]) -> tuple[int, Any]:
        """Returns the status and the tokens, or what the error says."""
        parts = urllib.parse.urlsplit(self._stack.router_url)
        connection = http.client.HTTPConnection(parts.netloc, timeout=BOUND_SECONDS)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/generate", json.dumps(body), headers)
            answer = connection.getresponse()
            data = answer.read()
            if answer.status != 200:
                assert data, f"status {answer.status} without a word"
                return answer.status, data
            if not body["stream"]:
                return 200, json.loads(data)["output_ids"]
            blocks = data.decode().strip().split("\n\n")
            if blocks[-1] != "data: [DONE]":
                raise ConnectionError(f"a stream that breaks off: {blocks[-1][-200:]}")
            last = json.loads(blocks[-2].removeprefix("data: "))
            if "error" in last:
                return 503, last
            reason = last["meta_info"]["finish_reason"]
            if reason["type"] == "abort":
                return 503, reason
            return 200, last["output_ids"]
        finally:
            connection.close()

    def _leave(self, body: dict[str, Any], seconds: float) -> None:
        """Asks, and is gone after a while."""
        parts = urllib.parse.urlsplit(self._stack.router_url)
        data = json.dumps(body).encode()
        head = (
            "POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        with socket.create_connection((parts.hostname, parts.port), timeout=5.0) as connection:
            connection.sendall(head.encode() + data)
            connection.settimeout(max(seconds, 0.001))
            try:
                connection.recv(100)
            except (TimeoutError, ConnectionResetError):
                return

    def _abort(self, rid: str) -> None:
        for url in (*self._stack.prefill_urls, *self._stack.decode_urls):
            try:
                post(url, "/abort_request", {"rid": rid}, timeout=5.0)
            except (OSError, http.client.HTTPException, ValueError):
                continue  # It was killed just now.
