# SPDX-License-Identifier: Apache-2.0
"""A pair of servers of a small random model, shared by the tests that do not harm it."""

import pathlib
from collections.abc import Iterator

import pytest

from kvferry.demo.stack import Stack
from kvferry.tests.e2e.serving import TINY_FLAGS, by_role, tiny_chat_model, wait_at_rest


@pytest.fixture(name="tiny_model", scope="session")
def _tiny_model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiny_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(name="shared_pair", scope="session")
def _shared_pair(tiny_model: pathlib.Path) -> Iterator[Stack]:
    with Stack(tiny_model, flags=by_role(TINY_FLAGS)) as stack:
        yield stack


@pytest.fixture(name="pair")
def _pair(shared_pair: Stack) -> Iterator[Stack]:
    """The shared pair, behind the Rust router; it must be at rest afterwards."""
    yield shared_pair
    wait_at_rest(*shared_pair.prefills, *shared_pair.decodes)
