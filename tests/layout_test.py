# SPDX-License-Identifier: Apache-2.0
"""Checks of the repository itself: licence lines, what a room may import, CI, the package list."""

import ast
import os
import pathlib
import re
import tomllib
from typing import Any

import pytest

from kvferry.tools.build_files import ROOT, imported_modules, module_of, python_files

_LICENCE_LINE = "# SPDX-License-Identifier: Apache-2.0"
# What holds no part of the package.
_OUTSIDE = ("bench", "examples", "tests", "tools", "docs")
_ROOMS = ("kernels", "control", "engine", "server", "demo")
# Where disaggregation meets scheduling, and the programs: these may import everything.
_EVERYWHERE = re.compile(
    r"kvferry\.control\.(prefill|decode|\w+_main|flags|launch|launch_service)$"
)
_MAY_IMPORT = {
    "kernels": set[str](),
    "control": {"kernels"},
    "engine": {"kernels"},
    "server": {"engine"},
    "demo": set[str](),
}


@pytest.fixture(name="project", scope="module")
def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_file_starts_with_the_licence() -> None:
    wrong = []
    for path in python_files():
        with (ROOT / path).open(encoding="utf-8") as file:
            if file.readline().rstrip("\n") != _LICENCE_LINE:
                wrong.append(path)
    assert wrong == []


def test_licence_is_apache() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "Version 2.0" in text


def test_packages_are_the_folders(project: dict[str, Any]) -> None:
    folders = {pathlib.PurePosixPath(path).parent for path in python_files()}
    inside = {folder for folder in folders if not folder.parts or folder.parts[0] not in _OUTSIDE}
    packages = {".".join(("kvferry", *folder.parts)) for folder in inside}
    assert sorted(packages) == project["tool"]["setuptools"]["packages"]
    missing = [str(folder) for folder in inside if not (ROOT / folder / "__init__.py").is_file()]
    assert missing == [], "folders without __init__.py"


def test_version_is_stated_once_more_only_in_the_package(project: dict[str, Any]) -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    (version,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
    )
    assert version == project["project"]["version"]


def test_rooms_import_only_what_they_may() -> None:
    known = frozenset(module_of(path) for path in python_files())
    wrong = []
    for path in python_files():
        module = module_of(path)
        room = path.split("/")[0]
        if room not in _ROOMS or _EVERYWHERE.match(module):
            continue
        for other in imported_modules(path, known, strings=False):
            other_room = other.split(".")[1] if "." in other else ""
            if other_room not in {room, ""} | _MAY_IMPORT[room]:
                wrong.append(f"{module} imports {other}")
    assert wrong == []


def test_ci_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = script.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in lines
    assert "make test" in [line.strip() for line in lines]


def test_every_make_target_has_a_line_of_help() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY:([^\\\n]*(?:\\\n[^\\\n]*)*)$", text, re.MULTILINE)
    helped = set(re.findall(r"^([a-z-]+):.*##", text, re.MULTILINE))
    assert set(phony.replace("\\\n", " ").split()) == helped


def test_test_files_mirror_the_rooms() -> None:
    folders = {path.split("/")[1] for path in python_files() if re.match(r"tests/\w+/", path)}
    assert folders <= {"kernels", "control", "engine", "server", "e2e"}
