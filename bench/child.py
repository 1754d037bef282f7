# SPDX-License-Identifier: Apache-2.0
"""A second process for a benchmark, told what to do line by line over its standard input."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from typing import Any


class ChildError(RuntimeError):
    """The child could not do what it was told."""


class Child:
    """Runs a module of this package; it must call `serve`.

    Args:
        module: Its name.
    """

    def __init__(self, module: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, command: str, **values: Any) -> Any:
        """Tells it to do something and waits for the answer.

        Args:
            command: A method of the object that it serves.
            **values: Arguments, plain data.

        Returns:
            What the method returned.

        Raises:
            ChildError: If it raised, or the process has ended.
        """
        self.tell(command, **values)
        return self.answer()

    def tell(self, command: str, **values: Any) -> None:
        """As a call, but does not wait; `answer` must follow."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"command": command, **values}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """Waits for the answer to what it was told."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ChildError(f"the second process ended with {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise ChildError(answer["error"])
        return answer["result"]

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(served: object, lines: Iterable[str] = sys.stdin) -> None:
    """Answers a parent until it closes the input.

    Args:
        served: Has the methods.
        lines: The input.
    """
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Whatever a library prints must not get between the answers.
    for line in lines:
        request = json.loads(line)
        command = request.pop("command")
        try:
            answer = {"result": getattr(served, command)(**request)}
        except (RuntimeError, ValueError, OSError, ImportError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        output.write(json.dumps(answer) + "\n")
        output.flush()
