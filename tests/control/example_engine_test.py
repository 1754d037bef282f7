# SPDX-License-Identifier: Apache-2.0
"""The engine of another distribution in examples/, built, installed and used as its README says."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from kvferry.tools.build_files import ROOT

_USE = """
import jax, numpy
from kvferry.control.engines.base import EngineOptions
from kvferry.control.engines.canary import self_test
from kvferry.control.engines.registry import create_engine, engine_names

assert "filedrop" in engine_names()
engines = [create_engine("filedrop", EngineOptions()) for _ in range(2)]
source, target = engines
address = source.start()
target.start()
self_test(source, address, [])
array = jax.numpy.arange(1000, dtype="bfloat16")
source.publish(7, [array], 30.0)
pull = target.pull(address, 7, [jax.ShapeDtypeStruct(array.shape, array.dtype)], 10.0)
assert pull.wait(10.0)
assert numpy.asarray(pull.result()[0]).tobytes() == numpy.asarray(array).tobytes()
source.release(7, delivered=True)
for engine in engines:
    assert not any(engine.counters().values())
    engine.close()
print(type(source).__module__)
"""


@pytest.fixture(name="installed", scope="module")
def _installed(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Builds from a copy, as a build in the repository leaves folders behind."""
    source = tmp_path_factory.mktemp("example") / "filedrop"
    shutil.copytree(ROOT / "examples" / "filedrop", source)
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    done = subprocess.run(
        [*command, *offline, str(source)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def _run(installed: pathlib.Path, *arguments: str, **more: str) -> str:
    paths = [str(installed), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **more, "PYTHONPATH": os.pathsep.join(paths)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_example_is_found_by_its_name_and_moves_arrays(installed: pathlib.Path) -> None:
    assert _run(installed, "-c", _USE).strip() == "kvferry_filedrop"


@pytest.mark.slow
def test_the_example_passes_the_tests_of_all_engines(installed: pathlib.Path) -> None:
    files = [f"tests/control/{name}_test.py" for name in ("engines", "engines_misuse")]
    options = ("-m", "pytest", "-q", "-x", "-m", "not slow")
    told = _run(installed, *options, *files, KVFERRY_TEST_ENGINES="filedrop")
    assert " passed" in told
