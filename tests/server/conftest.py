# SPDX-License-Identifier: Apache-2.0
"""Servers that several tests of this room share; each test that needs its own starts one."""

from collections.abc import Iterator

import pytest

from kvferry.tests.server.running import Running, serving_script
from kvferry.tests.server.scripted import ScriptedScheduler


@pytest.fixture(scope="session", name="plain")
def _plain() -> Iterator[Running]:
    """An unpaired server with the default script."""
    with serving_script(ScriptedScheduler()) as running:
        yield running


@pytest.fixture(scope="session", name="decode_side")
def _decode_side() -> Iterator[Running]:
    """A decode server that makes up its first tokens, so that it needs no prefill server."""
    with serving_script(ScriptedScheduler(), role="decode") as running:
        yield running


@pytest.fixture(scope="session", name="prefill_side")
def _prefill_side() -> Iterator[Running]:
    """A prefill server."""
    with serving_script(ScriptedScheduler(), role="prefill") as running:
        yield running
