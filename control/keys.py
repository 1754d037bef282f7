# SPDX-License-Identifier: Apache-2.0
"""Makes and reads the key file of a deployment.

    python -m kvferry.keys DIR

One key pair serves a whole deployment: prefill, decode and bootstrap servers read the same file and
talk only to processes that have it. So there is one thing to copy and one thing to keep secret. To
replace it, run this again with --force, copy the file, and restart all processes.
"""

import argparse
import os
import pathlib
import stat
import sys
import tempfile
import tomllib

import zmq
from absl import logging

from kvferry.control.security import CurveKeys

KEY_FILE_NAME = "kvferry.key"
CURVE_KEY_FILE_HELP = (
    "File with the deployment's CURVE keys, the same for all its processes; `python -m kvferry.keys"
    " DIR` makes it. With it the ZMQ sockets are encrypted, take only peers that have it, and may"
    " leave loopback. Nobody but this user may be able to read it."
)

_MAX_FILE_BYTES = 4096
_TEXT = """\
# Whoever has this file can take part in the deployment. Keep it secret.
public_key = "{public_key}"
secret_key = "{secret_key}"
"""


class KeyFileError(ValueError):
    """A key file cannot be used. The message says which, why, and what to do."""


def make_keys() -> CurveKeys:
    """Returns a new key pair."""
    public_key, secret_key = zmq.curve_keypair()
    return CurveKeys(public_key=public_key, secret_key=secret_key)


def read_keys(path: str | pathlib.Path) -> CurveKeys:
    """Reads a key file.

    Args:
        path: A file that `write_keys` wrote.

    Returns:
        Its keys.

    Raises:
        KeyFileError: If there is none, others may read or change it, or it holds something else.
    """
    try:
        # Non-blocking, so that a named pipe is found out instead of waited for.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            _check_access(path, status)
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise KeyFileError(f"key file {path} cannot be read: {error.strerror}") from error
    return _parse(path, data)


def write_keys(folder: str | pathlib.Path, keys: CurveKeys, *, force: bool = False) -> pathlib.Path:
    """Writes a key file that only this user can read.

    Args:
        folder: Where to; made, for this user only, if it is not there.
        keys: What to write.
        force: Whether to replace a file that is there.

    Returns:
        The file.

    Raises:
        KeyFileError: If there is one already and `force` is not set.
        OSError: If it cannot be written.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / KEY_FILE_NAME
    text = _TEXT.format(
        public_key=keys.public_key.decode(), secret_key=keys.secret_key.decode()
    ).encode()
    # Complete before it has its name, and with mode 0600 from the start.
    descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=f".{KEY_FILE_NAME}-")
    try:
        with open(descriptor, "wb") as file:
            file.write(text)
        if force:
            os.replace(temporary, path)
        else:
            os.link(temporary, path)
    except FileExistsError as error:
        raise KeyFileError(
            f"{path} exists; processes that use it would be cut off from those that get a new one."
            " Give --force to replace it"
        ) from error
    finally:
        pathlib.Path(temporary).unlink(missing_ok=True)
    return path


def _check_access(path: str | pathlib.Path, status: os.stat_result) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode):
        raise KeyFileError(f"key file {path} is not a file")
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise KeyFileError(
            f"key file {path} has mode {mode:04o}: other users can read or change it, so it may be"
            f" known to them. Make new keys, or run chmod 600 {path} if nobody can have seen it"
        )
    if mode & stat.S_IRGRP:
        # Not refused: secrets that an orchestrator mounts often look like this.
        logging.warning("key file %s has mode %04o: its group can read it", path, mode)


def _parse(path: str | pathlib.Path, data: bytes) -> CurveKeys:
    what = f"key file {path} was not made by `python -m kvferry.keys`"
    if len(data) > _MAX_FILE_BYTES:
        raise KeyFileError(f"{what}: it has more than {_MAX_FILE_BYTES} bytes")
    try:
        values = tomllib.loads(data.decode())
    except ValueError as error:  # Not UTF-8, or not TOML.
        raise KeyFileError(f"{what}: {error}") from error
    public_key, secret_key = values.get("public_key"), values.get("secret_key")
    if not isinstance(public_key, str) or not isinstance(secret_key, str):
        raise KeyFileError(f"{what}: public_key or secret_key is missing")
    try:
        fits = zmq.curve_public(secret_key.encode()) == public_key.encode()
    except (ValueError, zmq.ZMQError):
        fits = False
    if not fits:
        raise KeyFileError(f"{what}: its two keys do not belong together")
    keys = CurveKeys(public_key=public_key.encode(), secret_key=secret_key.encode())
    logging.info("CURVE keys %s from %s", keys.label, path)
    return keys


def main(arguments: list[str] | None = None) -> int:
    """Makes a key file.

    Args:
        arguments: The command line; by default that of the process.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(
        prog="python -m kvferry.keys",
        description="Makes the key file that all processes of a deployment share.",
    )
    parser.add_argument("folder", metavar="DIR", help=f"where to put {KEY_FILE_NAME}")
    parser.add_argument("--force", action="store_true", help="replace a key file that is there")
    options = parser.parse_args(arguments)
    keys = make_keys()
    try:
        path = write_keys(options.folder, keys, force=options.force)
    except (KeyFileError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"Wrote {path}, keys {keys.label}, readable by this user only.\n")
    print("Copy it to each host of the deployment, as secretly as a password, and start every")
    print("prefill_main, decode_main and bootstrap_main with")
    print(f"\n  --curve_key_file={path.resolve()}\n")
    print("Whoever has the file can take part: keep it out of images and repositories.")
    return 0


def run() -> None:
    """Entry point of the console script."""
    sys.exit(main())
