# SPDX-License-Identifier: Apache-2.0
"""Where `serve` says that it runs, so that `chat` finds it."""

import json
import os
import pathlib


def state_path() -> pathlib.Path:
    """Names the file.

    Returns:
      A path in the user's own cache folder.
    """
    return pathlib.Path.home() / ".cache" / "kvferry" / "serve.json"


def publish(url: str, path: pathlib.Path) -> None:
    """Says that this process serves.

    Args:
      url: the router's address.
      path: the file to write, usually `state_path()`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps({"url": url, "pid": os.getpid()}), encoding="utf-8")
    new.replace(path)  # a reader sees the old file or the new one, never half


def withdraw(path: pathlib.Path) -> None:
    """Takes the word back, unless another process has published since.

    Args:
      path: the file that `publish` wrote.
    """
    found = _read(path)
    if found is not None and found[1] == os.getpid():
        path.unlink(missing_ok=True)


def find(path: pathlib.Path) -> str | None:
    """Looks for a running `serve`.

    Args:
      path: the file to read, usually `state_path()`.

    Returns:
      The router's address, or None when no `serve` runs.
    """
    found = _read(path)
    if found is None:
        return None
    url, pid = found
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None  # it was killed and could not take its word back
    except PermissionError:
        pass  # it runs, as someone else
    return url


def _read(path: pathlib.Path) -> tuple[str, int] | None:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        return str(state["url"]), int(state["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
