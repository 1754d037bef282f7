# SPDX-License-Identifier: Apache-2.0
"""Host names for the control loop, which must not wait for a name service itself."""

from collections.abc import Callable

from kvferry.control.control_loop import ControlLoop, Timer
from kvferry.control.security import known_addresses, resolve
from kvferry.control.workers import WorkerPool

_RESOLVE_SECONDS = 5.0

OnAddresses = Callable[[list[str]], None]
OnUnknown = Callable[[str], None]


class Names:
    """Turns host names into addresses on worker threads. Control loop's thread only.

    Args:
        loop: The control loop.
        workers: The threads. One that hangs in a look-up is not available for others.
    """

    def __init__(self, loop: ControlLoop, workers: WorkerPool) -> None:
        self._loop = loop
        self._workers = workers

    def look_up(self, host: str, on_addresses: OnAddresses, on_unknown: OnUnknown) -> None:
        """Looks a host up; calls exactly one of the two, on the loop's thread, within 5 s.

        Args:
            host: Name or address; an address needs no look-up, and is told before this returns.
            on_addresses: Called with numeric addresses to try in this order, at least one.
            on_unknown: Called with the reason why there are none; maybe before this returns.
        """
        known = known_addresses(host)
        if known:
            on_addresses(known)
            return
        lookup = _Lookup(host, on_addresses, on_unknown)

        def job() -> None:
            if lookup.ended:
                return  # Waited too long for other names.
            try:
                addresses = resolve(host)
            except OSError as error:
                reason = str(error)
                self._loop.post(lambda: lookup.fail(reason))
                return
            self._loop.post(lambda: lookup.succeed(addresses))

        def on_error(error: BaseException) -> None:
            self._loop.post(lambda: lookup.fail(f"resolving {host!r} failed: {error!r}"))

        if self._workers.submit(job, on_error):
            lookup.timer = self._loop.call_later(_RESOLVE_SECONDS, lambda: self._give_up(lookup))
        else:
            lookup.fail("too many host names are being resolved")

    def _give_up(self, lookup: "_Lookup") -> None:
        others = max(0, self._workers.pending - 1)
        lookup.fail(
            f"host name {lookup.host!r} was not resolved in {_RESOLVE_SECONDS:g} s, with {others}"
            " others waiting; name the server by its address"
        )


class _Lookup:
    def __init__(self, host: str, on_addresses: OnAddresses, on_unknown: OnUnknown) -> None:
        self.host = host
        self.ended = False
        self.timer: Timer | None = None
        self._on_addresses = on_addresses
        self._on_unknown = on_unknown

    def succeed(self, addresses: list[str]) -> None:
        if self._end():
            self._on_addresses(addresses)

    def fail(self, reason: str) -> None:
        if self._end():
            self._on_unknown(reason)

    def _end(self) -> bool:
        if self.ended:
            return False
        self.ended = True
        if self.timer is not None:
            self.timer.cancel()
        return True
