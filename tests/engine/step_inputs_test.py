# SPDX-License-Identifier: Apache-2.0
import re

import numpy as np
import pytest

from kvferry.engine.step_inputs import Chunk, StepShape, pack, unpack

SHAPE = StepShape("prefill", 8, 3, 4)
PAGE_SIZE, NUM_PAGES = 4, 10


def test_chunks_are_packed_in_order() -> None:
    chunks = [Chunk([7, 8, 9], 3, [5, 2, 8]), Chunk([11], 0, [4])]
    fields = unpack(SHAPE, *pack(SHAPE, chunks, PAGE_SIZE, NUM_PAGES))
    nowhere = NUM_PAGES * PAGE_SIZE
    np.testing.assert_array_equal(fields.token_ids, [7, 8, 9, 11, 0, 0, 0, 0])
    np.testing.assert_array_equal(fields.positions, [3, 4, 5, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(fields.slots, [23, 8, 9, 16, *[nowhere] * 4])
    np.testing.assert_array_equal(fields.kv_lens, [6, 1, 0])
    # Pages that the tokens do not reach yet are left out.
    np.testing.assert_array_equal(fields.page_tables, [[5, 2, 0, 0], [4, 0, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(fields.cu_q_lens, [0, 3, 4, 4])
    np.testing.assert_array_equal(fields.num_seqs, [2])


def test_no_chunks_are_all_padding() -> None:
    fields = unpack(SHAPE, *pack(SHAPE, [], PAGE_SIZE, NUM_PAGES))
    assert (fields.slots == NUM_PAGES * PAGE_SIZE).all()
    assert not fields.kv_lens.any()
    assert fields.num_seqs[0] == 0


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (Chunk([], 0, [1]), "a chunk needs tokens and start >= 0, got 0 tokens at 0"),
        (Chunk([1], -1, [1]), "got 1 tokens at -1"),
        (Chunk([1, 2], 3, [1]), "tokens up to 5 need 2 pages of 4, got 1"),
        (Chunk([1], 16, [1, 2, 3, 4, 5]), "5 pages exceed the longest sequence, 4 pages"),
        (Chunk([1], 0, [10]), "pages must be in [0, 10), got [10]"),
        (Chunk([1], 0, [-1]), "pages must be in [0, 10), got [-1]"),
    ],
)
def test_malformed_chunks_are_refused(chunk: Chunk, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        pack(SHAPE, [chunk], PAGE_SIZE, NUM_PAGES)
