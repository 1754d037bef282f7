# SPDX-License-Identifier: Apache-2.0
"""Tests how the Makefile finds a Python for its environments."""

import pathlib
import subprocess
import sys

import pytest

from kvferry.tools.build_files import ROOT

_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
# What pyenv puts on the PATH for a version that is installed but not chosen.
_SHIM = "echo 'pyenv: python3: command not found' >&2; exit 127"
_OLD = "echo 'is 3.8'; exit 1"


def _find(folder: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/usr/bin/env", "-i", f"PATH={folder}", f"HOME={folder}", "/bin/bash"]
        + [str(ROOT / "tools" / "find_python"), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


def _program(path: pathlib.Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="ascii")
    path.chmod(0o755)


@pytest.fixture(name="good")
def _good() -> str:
    return f'exec {sys.executable} "$@"'


def _is_usable(found: subprocess.CompletedProcess[str]) -> bool:
    return found.returncode == 0 and pathlib.Path(found.stdout.strip()).is_file()


def test_takes_the_first_that_works(tmp_path: pathlib.Path, good: str) -> None:
    _program(tmp_path / "python3", _SHIM)
    _program(tmp_path / "python3.12", _OLD)
    _program(tmp_path / "python3.13", good)
    assert _is_usable(_find(tmp_path, "3.11"))


def test_looks_where_pyenv_keeps_them(tmp_path: pathlib.Path, good: str) -> None:
    _program(tmp_path / "python3", _SHIM)
    _program(tmp_path / ".pyenv" / "versions" / "3.12.1" / "bin" / "python3", good)
    assert _is_usable(_find(tmp_path, "3.11"))


def test_says_what_it_looked_at(tmp_path: pathlib.Path, good: str) -> None:
    _program(tmp_path / "python3", _SHIM)
    _program(tmp_path / "python3.12", good)
    found = _find(tmp_path, "3.13-3.13" if _VERSION != "3.13" else "3.12-3.12")
    assert found.returncode == 1
    assert found.stdout == ""
    assert "python3 pyenv: python3: command not found" in found.stderr
    assert f"python3.12 is {_VERSION}" in found.stderr
    assert "make PYTHON=/path/to/python3" in found.stderr


def test_named_one_is_not_replaced_by_another(tmp_path: pathlib.Path, good: str) -> None:
    _program(tmp_path / "python3", good)
    found = _find(tmp_path, "3.11", "python3.14")
    assert found.returncode == 1
    assert "none of python3.14 is there" in found.stderr
