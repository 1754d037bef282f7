# SPDX-License-Identifier: Apache-2.0
"""A pair that stages pages in host slots, and checks their digests, answers like any other."""

import concurrent.futures
import pathlib

from kvferry.demo.stack import Stack
from kvferry.tests.e2e.serving import TINY_FLAGS, by_role, generate, state, wait_at_rest


def test_staged_and_verified_answers_are_the_same(pair: Stack, tiny_model: pathlib.Path) -> None:
    prompts = [[n + 1] * (29 * n % 480 + 1) for n in range(24)]
    wanted = [generate(pair.router_url, ids, 4)["output_ids"] for ids in prompts]
    common = (*TINY_FLAGS, "--verify_kv")
    flags = {**by_role(common), "prefill": (*common, "--enable_d2h_staging")}
    with Stack(tiny_model, flags=flags) as staged:
        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda ids: generate(staged.router_url, ids, 4), prompts))
        assert [answer["output_ids"] for answer in answers] == wanted
        wait_at_rest(*staged.prefills, *staged.decodes)
        control = state(staged.prefills[0])["control"]
        assert control["host_slots"] > 0
        assert control["host_slots_leased"] == 0
