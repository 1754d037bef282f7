# SPDX-License-Identifier: Apache-2.0
"""The sending process of transfer_bench.py."""

import jax

from kvferry.bench.child import serve
from kvferry.bench.handover import PrefillSide
from kvferry.bench.transfer_methods import Payload, Source, make_source


class Sender:
    """What the measuring process can tell this one to do."""

    def __init__(self) -> None:
        self._sources: dict[str, Source] = {}
        self._arrays: list[jax.Array] = []
        self._prefill: PrefillSide | None = None

    def start(self, method: str) -> str:
        """Starts the sending half of a method; returns its address."""
        source = make_source(method)
        address = source.start()
        self._sources[method] = source
        return address

    def load(self, num_bytes: int, count: int) -> None:
        """Makes the arrays that are offered from now on."""
        self._arrays = []  # Not both at a time.
        payload = Payload(num_bytes, count)
        host = [payload.content(index) for index in range(count)]
        self._arrays = jax.block_until_ready(
            [
                jax.device_put(each.view(spec.dtype).reshape(spec.shape), spec.sharding)
                for each, spec in zip(host, payload.specs(), strict=True)
            ]
        )

    def offer(self, method: str, key: int) -> None:
        """Makes the arrays available by one method."""
        self._sources[method].offer(key, self._arrays)

    def release(self, method: str, key: int) -> None:
        """Lets go of what was offered."""
        self._sources[method].release(key)

    def start_prefill(self, engine: str) -> int:
        """Starts a prefill manager in place of the one before; returns its bootstrap port."""
        self.stop_prefill()
        self._prefill = PrefillSide(engine)
        return self._prefill.bootstrap.port

    def hand_over(self, room: int) -> None:
        """Hands a page over."""
        assert self._prefill is not None
        self._prefill.hand_over(room)

    def stop_prefill(self) -> None:
        """Ends the prefill manager."""
        if self._prefill is not None:
            self._prefill.close()
            self._prefill = None


if __name__ == "__main__":
    serve(Sender())
