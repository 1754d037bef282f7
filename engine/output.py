# SPDX-License-Identifier: Apache-2.0
"""From token ids to the text a client may see: detokenizing, stops, holding back.

A stop string may begin in one token and end several tokens later, and must not be shown when it
completes. So text is held back for as long as its end could be the beginning of a stop string.
Where an answer ends does not depend on how its text is cut into tokens: the stop string that
completes first wins, and of several that complete at the same character the longest.
"""

from collections.abc import Sequence
from typing import Protocol

from kvferry.engine.request import FinishReason
from kvferry.engine.sampling_params import SamplingParams


class Detokenizer(Protocol):
    """Turns a growing list of token ids into text; keeps half characters to itself."""

    def push(self, ids: Sequence[int]) -> str:
        """Adds tokens and returns the text that became certain."""
        ...

    def flush(self) -> str:
        """Returns what is left, with replacement characters where a character is unfinished."""
        ...


class StopMatcher:
    """Finds one string in a text that arrives in pieces (Knuth, Morris and Pratt's automaton).

    The work per character is constant on average, however long and repetitive the string is.

    Attributes:
        stop: the string looked for.
        matched: how many of its characters the end of the text seen so far equals.
    """

    def __init__(self, stop: str) -> None:
        """Prepares the search for a non-empty string."""
        self.stop = stop
        self.matched = 0
        # _borders[n]: length of the longest proper prefix of stop[:n] that is also its suffix.
        self._borders = [0, 0]
        for char in stop[1:]:
            self._borders.append(self._follow(self._borders[-1], char))

    @property
    def pending(self) -> int:
        """Length of the end of the text seen that may yet become the string."""
        return self._borders[self.matched] if self.matched == len(self.stop) else self.matched

    def feed(self, char: str) -> bool:
        """Adds one character.

        Args:
            char: the next character of the text.

        Returns:
            Whether the text now ends with the string.
        """
        self.matched = self._follow(self.pending, char)
        return self.matched == len(self.stop)

    def _follow(self, matched: int, char: str) -> int:
        while matched and self.stop[matched] != char:
            matched = self._borders[matched]
        return matched + 1 if self.stop[matched] == char else 0


class AnswerText:
    """The text of one answer as it grows, and the search for what ends it."""

    def __init__(self, detokenizer: Detokenizer, params: SamplingParams, eos_ids: frozenset[int]):
        """Starts an empty answer.

        Args:
            detokenizer: fresh, used by this answer only.
            params: stopping rules of the request.
            eos_ids: tokens with which the model ends an answer.
        """
        self._detokenizer = detokenizer
        self._matchers = [StopMatcher(stop) for stop in params.stop]
        self._keep_stop = params.no_stop_trim
        self._min_new_tokens = params.min_new_tokens
        self._stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            self._stop_ids |= eos_ids
        self._text = ""
        self._sent = 0
        self._num_tokens = 0
        self._closed = False

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end this answer."""
        return self._stop_ids

    def push(self, token_id: int) -> FinishReason | None:
        """Adds a token.

        Args:
            token_id: the next token of the answer.

        Returns:
            The reason, when this token ends the answer; None when it goes on.
        """
        self._num_tokens += 1
        if token_id in self._stop_ids and self._num_tokens > self._min_new_tokens:
            if self._keep_stop:
                self._add(self._detokenizer.push([token_id]))
            self.close()
            return FinishReason("stop", matched=token_id)
        return self._add(self._detokenizer.push([token_id]))

    def take(self) -> str:
        """Returns the text that may be shown and was not returned before."""
        end = len(self._text)
        if not self._closed and not self._keep_stop:
            end -= max((matcher.pending for matcher in self._matchers), default=0)
        piece = self._text[self._sent : end]
        self._sent += len(piece)
        return piece

    def close(self) -> FinishReason | None:
        """Ends the answer: nothing is held back any more.

        Returns:
            The reason, when the characters held back until now complete a stop string.
        """
        reason = None
        if not self._closed:
            reason = self._add(self._detokenizer.flush())
            self._closed = True
        return reason

    def _add(self, piece: str) -> FinishReason | None:
        """Adds text up to the end of the first stop string in it."""
        may_stop = self._num_tokens >= self._min_new_tokens
        for index, char in enumerate(piece if self._matchers else ""):
            # Every matcher sees every character, or its state would be wrong afterwards.
            hits = [matcher.stop for matcher in self._matchers if matcher.feed(char)]
            if hits and may_stop:
                stop = max(hits, key=len)
                self._text += piece[: index + 1]
                if not self._keep_stop:
                    self._text = self._text[: -len(stop)]
                self._closed = True
                return FinishReason("stop", matched=stop)
        self._text += piece
        return None
