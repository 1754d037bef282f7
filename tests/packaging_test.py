# SPDX-License-Identifier: Apache-2.0
"""Builds the wheel, installs it away from the repository, and runs its programs there."""

import os
import pathlib
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest

from kvferry.tools.build_files import ROOT, python_files

_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
_PROGRAMS = sorted(_PROJECT["project"]["scripts"])
_NOT_SHIPPED = ("bench/", "examples/", "tests/", "tools/", "docs/")


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(name="wheel", scope="module")
def _wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Builds from a copy, as a build in the repository leaves folders behind."""
    source = tmp_path_factory.mktemp("source")
    for name in (*python_files(), "pyproject.toml", "README.md", "LICENSE", "py.typed"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    _pip("wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", str(out), str(source))
    (wheel,) = out.iterdir()
    return wheel


@pytest.fixture(name="installed", scope="module")
def _installed(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    target = tmp_path_factory.mktemp("installed")
    _pip("install", "--no-deps", "--no-index", "--target", str(target), str(wheel))
    return target


def test_wheel_holds_the_package_and_nothing_else(wheel: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    shipped = [path for path in python_files() if not path.startswith(_NOT_SHIPPED)]
    assert names == {f"kvferry/{path}" for path in (*shipped, "py.typed")}


@pytest.mark.parametrize("program", _PROGRAMS)
def test_programs_run_from_any_folder(
    installed: pathlib.Path, tmp_path: pathlib.Path, program: str
) -> None:
    module, _, function = _PROJECT["project"]["scripts"][program].partition(":")
    assert function == "run"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    for command in ([str(installed / "bin" / program)], [sys.executable, "-m", module]):
        done = subprocess.run(
            [*command, "--help"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        # absl's --help ends with status 1.
        assert done.returncode in (0, 1), done.stderr
        known = (f"{installed}/", "--port", "--force")  # In the help of absl's and argparse's.
        assert any(each in done.stdout + done.stderr for each in known)
        assert "Traceback" not in done.stderr


def test_module_is_the_installed_one(installed: pathlib.Path, tmp_path: pathlib.Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import kvferry; print(kvferry.__version__, kvferry.__file__)"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [
        _PROJECT["project"]["version"],
        str(installed / "kvferry" / "__init__.py"),
    ]
