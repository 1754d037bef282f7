# SPDX-License-Identifier: Apache-2.0
"""Who may hold pages and running slots, and how much stays free for answers that still grow.

A sequence is admitted with the pages of all the tokens it has, when afterwards a reserve stays
free: a fraction of the pages that the admitted sequences may yet need. How far answers really grow
is not known beforehand, so the fraction adapts: it falls slowly while all goes well, and jumps when
a sequence had to be preempted. One sequence alone is always admitted, reserve or not: the limits on
a request guarantee that it can run to its end by itself.
"""

from collections.abc import Iterable

from kvferry.engine.page_allocator import PageAllocator
from kvferry.engine.sequence import Sequence

_GROWTH_CLIP_TOKENS = 4096
"""An answer is not expected to grow further than this, whatever its limit says."""
_INITIAL_RESERVE = 0.4
_MIN_RESERVE = 0.1
_RESERVE_DECAY = 0.995
"""Per decode step: from the initial to the least reserve in about 280 steps."""
_PREEMPTION_RAISE = 0.2


class Admission:
    """Pages and running slots.

    Attributes:
        allocator: bookkeeping of the pool's pages.
        page_size: tokens per page.
        max_slots: most sequences admitted at a time.
        reserve_fraction: part of the expected growth that admission keeps free.
    """

    def __init__(self, num_pages: int, page_size: int, max_slots: int) -> None:
        """Starts with everything free.

        Args:
            num_pages: pages in the pool.
            page_size: tokens per page.
            max_slots: most sequences admitted at a time.
        """
        self.allocator = PageAllocator(num_pages)
        self.page_size = page_size
        self.max_slots = max_slots
        self.used_slots = 0
        self.reserve_fraction = _INITIAL_RESERVE

    def pages_for(self, num_tokens: int) -> int:
        """Returns the number of pages that hold this many tokens.

        Args:
            num_tokens: at least 0.
        """
        return -(-num_tokens // self.page_size)

    def try_admit(self, seq: Sequence, admitted: Iterable[Sequence]) -> bool:
        """Gives a sequence a slot and the pages of all its tokens, if there is room.

        Args:
            seq: not admitted.
            admitted: the sequences that are.

        Returns:
            Whether it was admitted.
        """
        others = list(admitted)
        if self.used_slots >= self.max_slots:
            return False
        # One token more than it has: what cannot make its first step is not worth admitting.
        needed = self.pages_for(min(seq.num_tokens + 1, seq.max_tokens))
        reserve = 0
        if others:
            growth = sum(self._expected_growth(other, len(other.pages)) for other in others)
            growth += self._expected_growth(seq, needed)
            reserve = int(self.reserve_fraction * growth)
        if needed + reserve > self.allocator.free_pages:
            return False
        seq.pages = self.allocator.alloc(self.pages_for(seq.num_tokens))
        seq.admitted = True
        self.used_slots += 1
        return True

    def try_grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Gives an admitted sequence the pages it lacks for this many tokens, if they are free.

        Args:
            seq: an admitted sequence.
            num_tokens: tokens its pages must hold.

        Returns:
            Whether it has them now.
        """
        missing = self.pages_for(num_tokens) - len(seq.pages)
        if missing > self.allocator.free_pages:
            return False
        if missing > 0:
            seq.pages += self.allocator.alloc(missing)
        return True

    def release(self, seq: Sequence) -> None:
        """Takes slot and pages back from a sequence, if it has any.

        Args:
            seq: any sequence.
        """
        self.allocator.free(self.take_pages(seq))

    def take_pages(self, seq: Sequence) -> list[int]:
        """Takes the slot back, but leaves the pages in use, with the caller.

        Args:
            seq: any sequence.

        Returns:
            The pages it had; the caller owes them to `allocator.free`.
        """
        pages, seq.pages = seq.pages, []
        seq.num_computed = 0
        if seq.admitted:
            seq.admitted = False
            self.used_slots -= 1
        return pages

    def note_decode_step(self) -> None:
        """Lets the reserve shrink a little: a step found all the pages it needed."""
        self.reserve_fraction = max(_MIN_RESERVE, self.reserve_fraction * _RESERVE_DECAY)

    def note_preemption(self) -> None:
        """Raises the reserve: it was too small."""
        self.reserve_fraction = min(1.0, self.reserve_fraction + _PREEMPTION_RAISE)

    def _expected_growth(self, seq: Sequence, num_pages: int) -> int:
        end = min(seq.max_tokens, seq.num_tokens + _GROWTH_CLIP_TOKENS)
        return max(0, self.pages_for(end) - num_pages)
