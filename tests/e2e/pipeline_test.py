# SPDX-License-Identifier: Apache-2.0
"""Pages of a long prompt travel while the rest of it is computed."""

from kvferry.demo.stack import Stack
from kvferry.tests.e2e.serving import generate, state, wait_at_rest


def test_a_long_prompt_leaves_in_pieces(pair: Stack) -> None:
    (prefill,), (decode,) = pair.prefills, pair.decodes
    for length, pieces in ((60, 1), (129, 3), (480, 8)):
        prompt = [7 * n % 200 + 3 for n in range(length)]
        before = state(decode)["control"]["chunks_received"]
        generate(pair.router_url, prompt, 6)
        wait_at_rest(prefill, decode)
        stages = state(prefill)["last_handover_stages"]
        assert (stages["transfer_start"] < stages["prefill_done"]) == (pieces > 1)
        assert state(decode)["control"]["chunks_received"] - before == pieces
