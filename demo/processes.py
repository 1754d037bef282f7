# SPDX-License-Identifier: Apache-2.0
"""Child processes that never outlive their owner.

Each child leads a session of its own, so that a signal to it reaches its children too and Ctrl-C at
the terminal reaches only the owner, which then ends them in order. However the owner ends (return,
exception, Ctrl-C, SIGTERM with `exit_on_signals`, SIGKILL), the children end with it: `stop` does
it in the first four cases, the kernel in the last (guard.py).
"""

import atexit
import concurrent.futures
import http.client
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
import urllib.parse
from collections.abc import Callable, Iterable, Sequence
from typing import Self

from kvferry.demo import guard
from kvferry.demo.progress import Progress, describe

_POLL_SECONDS = 0.1
_PROBE_TIMEOUT_SECONDS = 2.0
_STOP_SECONDS = 10.0
_TAIL_BYTES = 8_192
_TAIL_LINES = 25


class ProcessError(RuntimeError):
    """A child ended or did not become ready; the message shows the end of its log."""


def answers_200(url: str) -> bool:
    """Asks a server once.

    Args:
      url: an http:// address.

    Returns:
      Whether it answered with status 200 within two seconds.
    """
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=_PROBE_TIMEOUT_SECONDS)
    try:
        connection.request("GET", parts.path or "/")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def exit_on_signals() -> None:
    """Makes SIGTERM and SIGHUP end this program like an exception does, so that clean-up runs."""

    def leave(number: int, frame: types.FrameType | None) -> None:
        del frame
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGHUP, leave)


class Child:
    """One process: started, watched and ended by `Processes`.

    Attributes:
      name: what messages call it.
      command: the command and its arguments.
      log_path: where its output goes; a restart appends.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log_path: pathlib.Path,
        is_ready: Callable[[], bool],
    ) -> None:
        """Remembers what to run.

        Args:
          name: what messages call it.
          command: the command and its arguments.
          log_path: where its output goes.
          is_ready: tells whether it does its work; called often, must return within seconds.
        """
        self.name = name
        self.command = tuple(command)
        self.log_path = log_path
        self.is_ready = is_ready
        self._process: subprocess.Popen[bytes] | None = None
        self._swept = True

    @property
    def pid(self) -> int:
        """Process id, also the id of its process group."""
        return self._started().pid

    @property
    def returncode(self) -> int | None:
        """Its exit status (negative: the signal that ended it), or None while it runs."""
        process = self._started()
        if process.poll() is not None:
            self._sweep()
        return process.returncode

    @property
    def running(self) -> bool:
        """Whether the process is there; a stopped one (SIGSTOP) is."""
        return self._process is not None and self.returncode is None

    def launch(self) -> None:
        """Starts the process; `Processes` calls this on its launcher thread."""
        guarded = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), *self.command]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                guarded,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._swept = False

    def signal(self, number: int) -> None:
        """Sends a signal to the process and its children.

        Args:
          number: the signal; nothing happens when the process is gone.
        """
        if self.running:
            os.killpg(self.pid, number)

    def kill(self) -> int:
        """Ends it at once.

        Returns:
          Its exit status.
        """
        self.signal(signal.SIGKILL)
        return self.wait(_STOP_SECONDS)

    def wait(self, timeout_seconds: float) -> int:
        """Waits for its end.

        Args:
          timeout_seconds: how long.

        Returns:
          Its exit status (negative: the signal that ended it).

        Raises:
          TimeoutError: it still runs.
        """
        process = self._started()
        try:
            process.wait(timeout_seconds)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(
                f"{self.name} (pid {process.pid}) still runs after {timeout_seconds:g} s."
            ) from error
        self._sweep()
        return process.returncode

    def log_tail(self, max_bytes: int = _TAIL_BYTES) -> str:
        """Reads the end of its log.

        Args:
          max_bytes: how much at most.

        Returns:
          Text; bytes that are not UTF-8 are replaced.
        """
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - max_bytes))
                return log.read().decode("utf-8", "replace")
        except FileNotFoundError:
            return ""

    def failure(self, what: str) -> ProcessError:
        """Makes the error that tells what happened to it.

        Args:
          what: the event, such as "exited with status 1".

        Returns:
          The error, with the name and the last lines of the log.
        """
        lines = self.log_tail().splitlines()[-_TAIL_LINES:]
        tail = "\n".join(f"  | {line}" for line in lines) or "  | (empty)"
        return ProcessError(f"{self.name} {what}. The end of its log, {self.log_path}:\n{tail}")

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ProcessError(f"{self.name} was never started.")
        return self._process

    def _sweep(self) -> None:
        """Ends what the process left behind; once, while its group id cannot be anyone else's."""
        if not self._swept:
            self._swept = True
            try:
                os.killpg(self._started().pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


class Processes:
    """Starts children, waits until they are ready, and ends them all.

    A context manager; on the way out every child is gone. The logs are removed with it unless a
    folder was given or something failed.
    """

    def __init__(
        self, log_dir: pathlib.Path | None = None, progress: Progress | None = None
    ) -> None:
        """Makes the folder for the logs.

        Args:
          log_dir: where the logs go and stay; None: a temporary folder.
          progress: where to show what is going on; None: nowhere.
        """
        self.progress = progress or Progress(None)
        self._keep_logs = log_dir is not None
        self.log_dir = log_dir or pathlib.Path(tempfile.mkdtemp(prefix="kvferry-"))
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._children: list[Child] = []
        # The kernel ties a child to the *thread* that started it, so one that lives as long as
        # this object starts them all, whoever calls `start`.
        self._launcher = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="launcher")
        atexit.register(self.stop)

    def start(self, name: str, command: Sequence[str], ready: str | Callable[[], bool]) -> Child:
        """Starts a child; does not wait for it.

        Args:
          name: what messages and its log file are called.
          command: the command and its arguments.
          ready: a URL that answers 200 when the child is ready, or a function that tells.

        Returns:
          The child.
        """

        def probe() -> bool:
            return answers_200(ready) if isinstance(ready, str) else ready()

        child = Child(name, command, self.log_dir / f"{name}.log", probe)
        self._children.append(child)
        self._launcher.submit(child.launch).result()
        return child

    def restart(self, child: Child) -> None:
        """Starts a child that has ended once more, with the same command.

        Args:
          child: one that `start` returned.

        Raises:
          ProcessError: it still runs.
        """
        if child.running:
            raise ProcessError(f"{child.name} (pid {child.pid}) still runs: end it first.")
        self._launcher.submit(child.launch).result()

    def wait_ready(self, children: Iterable[Child], timeout_seconds: float) -> None:
        """Waits until each child is ready, and shows what they do meanwhile.

        Args:
          children: the children to wait for.
          timeout_seconds: how long, for all of them together.

        Raises:
          ProcessError: any child ended, or one is not ready in time.
        """
        waited_for = tuple(children)
        waiting = list(waited_for)
        states = {child.name: "starting" for child in waited_for}
        deadline = time.monotonic() + timeout_seconds
        self.progress.begin()
        while waiting:
            self.check(waited_for)
            for child in tuple(waiting):
                if child.is_ready():
                    waiting.remove(child)
                    states[child.name] = "ready"
                else:
                    states[child.name] = describe(child.log_tail())
            self.progress.update(states)
            if waiting and time.monotonic() > deadline:
                self._keep_logs = True
                raise waiting[0].failure(f"is not ready after {timeout_seconds:g} s")
            if waiting:
                time.sleep(_POLL_SECONDS)

    def check(self, children: Iterable[Child] | None = None) -> None:
        """Looks whether children still run.

        Args:
          children: which; None: all.

        Raises:
          ProcessError: one has ended.
        """
        for child in self._children if children is None else children:
            status = child.returncode
            if status is not None:
                self._keep_logs = True
                how = f"status {status}" if status >= 0 else signal.Signals(-status).name
                raise child.failure(f"ended with {how}")

    def stop(self, seconds: float = _STOP_SECONDS) -> None:
        """Ends every child: asks, waits, then forces. May be called twice.

        Args:
          seconds: how long they may take; Ctrl-C meanwhile shortens it.
        """
        try:
            deadline = time.monotonic() + seconds
            for child in reversed(self._children):
                child.signal(signal.SIGCONT)  # a stopped process would not see the next signal
                child.signal(signal.SIGTERM)
            self.progress.begin()
            while time.monotonic() < deadline:
                running = [child.name for child in self._children if child.running]
                if not running:
                    break
                self.progress.update(dict.fromkeys(running, "ending"))
                time.sleep(_POLL_SECONDS)
        finally:
            for child in self._children:
                if child.running:
                    child.kill()
            self._children.clear()
            self._launcher.shutdown()
            atexit.unregister(self.stop)
            if not self._keep_logs:
                shutil.rmtree(self.log_dir, ignore_errors=True)

    def __enter__(self) -> Self:
        """Returns this object."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        """Ends every child; after an error the logs stay."""
        del kind, trace
        if isinstance(error, Exception):
            self._keep_logs = True
        self.stop()
