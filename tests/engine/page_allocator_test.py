# SPDX-License-Identifier: Apache-2.0
"""Tests of the page bookkeeping: nothing lost, nothing handed out or freed twice."""

import hypothesis
import pytest
from hypothesis import strategies

from kvferry.engine.page_allocator import OutOfPagesError, PageAllocator


def test_hands_out_each_page_once() -> None:
    allocator = PageAllocator(8)
    pages = allocator.alloc(3) + allocator.alloc(5)
    assert sorted(pages) == list(range(8))
    assert (allocator.free_pages, allocator.used_pages, allocator.num_pages) == (0, 8, 8)


def test_all_or_nothing() -> None:
    allocator = PageAllocator(4)
    allocator.alloc(2)
    with pytest.raises(OutOfPagesError, match="3 pages were asked for, 2 of 4 are free"):
        allocator.alloc(3)
    assert allocator.free_pages == 2
    assert allocator.alloc(0) == []


def test_order_is_reproducible() -> None:
    first, second = PageAllocator(6), PageAllocator(6)
    for allocator in (first, second):
        a, b = allocator.alloc(2), allocator.alloc(2)
        allocator.free(a)
        allocator.free(b)
    assert first.alloc(6) == second.alloc(6)


def test_freed_pages_are_used_again_first() -> None:
    allocator = PageAllocator(6)
    pages = allocator.alloc(3)
    allocator.free(pages)
    assert allocator.alloc(3) == pages


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([3], "page 3 is freed twice: it is free already"),
        ([0, 0], "freed twice in one call"),
        ([4], r"page 4 is not in the pool \[0, 4\)"),
        ([-1], "page -1 is not in the pool"),
    ],
)
def test_refuses_to_free(pages: list[int], message: str) -> None:
    allocator = PageAllocator(4)
    held = allocator.alloc(2)
    with pytest.raises(ValueError, match=message):
        allocator.free(pages)
    assert allocator.used_pages == 2, "a refused call frees nothing"
    allocator.free(held)
    with pytest.raises(ValueError, match="free already"):
        allocator.free(held)
    allocator.check()


@pytest.mark.parametrize("count", [0, -3])
def test_needs_pages(count: int) -> None:
    with pytest.raises(ValueError, match=f"num_pages is {count}"):
        PageAllocator(count)


def test_negative_count() -> None:
    with pytest.raises(ValueError, match="cannot allocate -1 pages"):
        PageAllocator(2).alloc(-1)


@hypothesis.given(strategies.lists(strategies.integers(0, 9), max_size=60))
def test_any_history_keeps_the_books(actions: list[int]) -> None:
    allocator = PageAllocator(16)
    held: list[list[int]] = []
    for action in actions:
        if action < 6 and allocator.free_pages >= action:
            held.append(allocator.alloc(action))
        elif held:
            allocator.free(held.pop(action % len(held)))
        used = [page for pages in held for page in pages]
        assert len(set(used)) == len(used) == allocator.used_pages
        allocator.check()
    for pages in held:
        allocator.free(pages)
    assert allocator.free_pages == 16
