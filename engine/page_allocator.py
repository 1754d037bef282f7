# SPDX-License-Identifier: Apache-2.0
"""Which pages of the KV pool are in use. Ids only: the arrays are the pool's."""

from collections.abc import Iterable


class OutOfPagesError(RuntimeError):
    """More pages were asked for than are free."""


class PageAllocator:
    """Hands out page ids and takes each back exactly once.

    The page freed last is handed out first, so the same calls always give the same ids, and a
    small load keeps to few pages. Not thread-safe: the step thread owns it.
    """

    def __init__(self, num_pages: int) -> None:
        """Makes an allocator over the ids 0 .. num_pages - 1, all free.

        Args:
            num_pages: size of the pool, at least 1.

        Raises:
            ValueError: `num_pages` is less than 1.
        """
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}; a pool needs at least 1 page")
        self._free = list(range(num_pages - 1, -1, -1))
        self._in_use = bytearray(num_pages)

    @property
    def num_pages(self) -> int:
        """Size of the pool."""
        return len(self._in_use)

    @property
    def free_pages(self) -> int:
        """How many pages can be handed out now."""
        return len(self._free)

    @property
    def used_pages(self) -> int:
        """How many pages are handed out."""
        return len(self._in_use) - len(self._free)

    def alloc(self, count: int) -> list[int]:
        """Takes pages out of the pool, all or none.

        Args:
            count: how many, at least 0.

        Returns:
            That many page ids.

        Raises:
            ValueError: `count` is negative.
            OutOfPagesError: fewer pages are free.
        """
        if count < 0:
            raise ValueError(f"cannot allocate {count} pages; the count must be at least 0")
        if count > len(self._free):
            raise OutOfPagesError(
                f"{count} pages were asked for, {len(self._free)} of {self.num_pages} are free"
            )
        split = len(self._free) - count
        pages = self._free[split:][::-1]
        del self._free[split:]
        for page in pages:
            self._in_use[page] = 1
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Gives pages back. Nothing is freed when any of them may not be.

        Args:
            pages: ids from `alloc` that were not given back since.

        Raises:
            ValueError: an id is not of this pool, is already free, or is named twice.
        """
        returned = list(pages)
        for page in returned:
            if not 0 <= page < self.num_pages:
                raise ValueError(f"page {page} is not in the pool [0, {self.num_pages})")
            if not self._in_use[page]:
                raise ValueError(f"page {page} is freed twice: it is free already")
        if len(set(returned)) != len(returned):
            raise ValueError(f"a page is freed twice in one call: {returned}")
        for page in reversed(returned):
            self._in_use[page] = 0
            self._free.append(page)

    def check(self, used: int | None = None) -> None:
        """Checks that every page is either free, once, or in use.

        Args:
            used: how many have to be in use, if that is known.

        Raises:
            AssertionError: the bookkeeping is broken; the message says how.
        """
        free = set(self._free)
        if len(free) != len(self._free):
            raise AssertionError("a page is in the free list twice")
        marked = {page for page, used in enumerate(self._in_use) if used}
        if free & marked or len(free) + len(marked) != self.num_pages:
            raise AssertionError(
                f"{len(free)} free and {len(marked)} used pages do not add up to "
                f"{self.num_pages}; both: {sorted(free & marked)}"
            )
        if used is not None and len(marked) != used:
            raise AssertionError(f"{len(marked)} pages are in use, {used} have an owner")
