# SPDX-License-Identifier: Apache-2.0
"""Finds transfer engines by name: those of this package, and those of others.

Another distribution adds an engine by decorating the class with `@transfer_engine("name")` and
listing it in its entry points:

    [project.entry-points."kvferry.transfer_engines"]
    name = "its_package.its_module:ItsEngine"

An engine in a module that the application imports itself needs the decorator only.
"""

import importlib
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from kvferry.control.engines.base import EngineOptions, TransferEngine

ENTRY_POINT_GROUP = "kvferry.transfer_engines"

_BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        "jax": "kvferry.control.engines.jax_engine:JaxEngine",
        "tcp": "kvferry.control.engines.tcp_engine:TcpEngine",
        "shm": "kvferry.control.engines.shm_engine:ShmEngine",
        "zmq": "kvferry.control.engines.zmq_engine:ZmqEngine",
        "auto": "kvferry.control.engines.auto_engine:AutoEngine",
        "fake": "kvferry.control.engines.fake_engine:FakeEngine",
    }
)

EngineClass = TypeVar("EngineClass", bound=type[TransferEngine])


class UnknownEngineError(ValueError):
    """No transfer engine has the name that was asked for."""


def transfer_engine(name: str) -> Callable[[EngineClass], EngineClass]:
    """Names a transfer engine class.

    Args:
        name: What users write to choose it: lower-case letters, digits and underscores.

    Returns:
        A class decorator.

    Raises:
        ValueError: If the name has other characters.
    """
    if not name.replace("_", "a").isalnum() or name != name.lower():
        raise ValueError(
            f"transfer engine name {name!r} may only have lower-case letters, digits and _"
        )

    def decorate(engine_class: EngineClass) -> EngineClass:
        engine_class.engine_name = name
        return engine_class

    return decorate


def engine_names() -> list[str]:
    """Returns the names that `create_engine` knows, sorted."""
    names = {*_BUILT_IN, *_entry_points()}
    names.update(each.engine_name for each in _subclasses(TransferEngine) if each.engine_name)
    return sorted(names)


def create_engine(name: str, options: EngineOptions) -> TransferEngine:
    """Makes a transfer engine; opens nothing yet.

    Args:
        name: Registered name. Entry points come before classes that are merely imported, and the
            engines of this package before both.
        options: Its options.

    Returns:
        The engine.

    Raises:
        UnknownEngineError: If no engine has that name; lists those that there are.
        ValueError: If an entry point leads to something that is not an engine of that name.
    """
    path = _BUILT_IN.get(name) or _entry_points().get(name)
    if path is not None:
        return _load(name, path)(options)
    for engine_class in _subclasses(TransferEngine):
        if engine_class.engine_name == name:
            return engine_class(options)
    raise UnknownEngineError(
        f"no transfer engine is called {name!r}; there are {', '.join(engine_names())}"
    )


def _entry_points() -> dict[str, str]:
    found = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    return {entry.name: entry.value for entry in found}


def _load(name: str, path: str) -> type[TransferEngine]:
    module_name, _, attribute = path.partition(":")
    found = getattr(importlib.import_module(module_name), attribute)
    if not (isinstance(found, type) and issubclass(found, TransferEngine)):
        raise ValueError(f"transfer engine {name!r}: {path} is not a TransferEngine")
    if found.engine_name != name:
        raise ValueError(
            f"transfer engine {name!r}: {path} is decorated as {found.engine_name!r}; use the same"
            " name in the entry point"
        )
    return found


def _subclasses(parent: Any) -> Iterator[type[TransferEngine]]:
    for child in parent.__subclasses__():
        yield child
        yield from _subclasses(child)
