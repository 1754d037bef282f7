# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the bootstrap server runs, with few instances and for a short time."""

import re
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_it_prints_a_row_for_each_number_of_rooms() -> None:
    flags = ("--instances=5", "--lookups_per_second=100", "--seconds=1")
    done = subprocess.run(
        [sys.executable, "-m", "kvferry.bench.bootstrap_bench", *flags],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    rows = re.findall(r"^ +([\d,]+) +[\d.]+ us CPU +[\d.]+ ms", done.stdout, re.MULTILINE)
    assert rows == ["100", "1,000", "10,000"]
    assert re.search(r"cost per room, 10,000 rooms against 100: [\d.]+x", done.stdout)
