# SPDX-License-Identifier: Apache-2.0
import importlib
import pathlib
import sys
from collections.abc import Mapping

import pytest

from kvferry.control.engines.base import EngineOptions
from kvferry.control.engines.fake_engine import FakeEngine
from kvferry.control.engines.jax_engine import JaxEngine
from kvferry.control.engines.registry import (
    UnknownEngineError,
    create_engine,
    engine_names,
    transfer_engine,
)

_MODULE = """
from kvferry.control.engines.fake_engine import FakeEngine
from kvferry.control.engines.registry import transfer_engine

@transfer_engine("{name}")
class Carrier(FakeEngine):
    pass

not_an_engine = 5
"""


@pytest.fixture(name="install")
def _install(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Puts a distribution with an engine on the path, as pip would."""

    def install(entry: str, name: str) -> None:
        module = f"carrier_{name}"
        (tmp_path / f"{module}.py").write_text(_MODULE.format(name=name))
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        lines = f"[kvferry.transfer_engines]\n{entry.format(module=module)}\n"
        (info / "entry_points.txt").write_text(lines)
        importlib.invalidate_caches()

    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield install
    for name in set(sys.modules) - before:
        if name.startswith("carrier_"):
            del sys.modules[name]


def test_built_in_engines() -> None:
    assert {"auto", "fake", "jax", "shm", "tcp", "zmq"} <= set(engine_names())
    assert isinstance(create_engine("jax", EngineOptions()), JaxEngine)
    assert isinstance(create_engine("fake", EngineOptions()), FakeEngine)


def test_an_engine_of_another_distribution(install) -> None:  # type: ignore[no-untyped-def]
    install("pigeon = {module}:Carrier", "pigeon")
    assert "pigeon" in engine_names()
    engine = create_engine("pigeon", EngineOptions(port=5))
    assert type(engine).__module__ == "carrier_pigeon" and engine.engine_name == "pigeon"


def test_an_engine_that_the_application_has_imported() -> None:
    @transfer_engine("by_hand")
    class ByHand(FakeEngine):
        def settings(self) -> Mapping[str, int | str]:
            return {"hands": 2}

    assert type(create_engine("by_hand", EngineOptions())) is ByHand


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(
        UnknownEngineError, match="no transfer engine is called 'rdma'; .*fake.*jax"
    ):
        create_engine("rdma", EngineOptions())


def test_a_wrong_entry_point_is_named(install) -> None:  # type: ignore[no-untyped-def]
    install("number = {module}:not_an_engine", "number")
    with pytest.raises(ValueError, match="carrier_number:not_an_engine is not a TransferEngine"):
        create_engine("number", EngineOptions())


def test_an_entry_point_of_another_name_is_named(install) -> None:  # type: ignore[no-untyped-def]
    install("alias = {module}:Carrier", "real")
    with pytest.raises(ValueError, match="decorated as 'real'; use the same name"):
        create_engine("alias", EngineOptions())


@pytest.mark.parametrize("name", ["", "Upper", "with space", "dash-ed"])
def test_names_are_plain(name: str) -> None:
    with pytest.raises(ValueError, match="lower-case letters, digits and _"):
        transfer_engine(name)
