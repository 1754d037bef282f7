# SPDX-License-Identifier: Apache-2.0
"""What hand-overs cost, for `/server_info`, `/metrics` and the benchmarks."""

import dataclasses
from collections.abc import Mapping

from kvferry.control.connection import TransferTiming


@dataclasses.dataclass
class HandoverStats:
    """Totals since the start, and the split of the last hand-over.

    Attributes:
        count: hand-overs that succeeded.
        num_bytes: bytes they moved.
        seconds: time from the first published page to the end, summed.
        last_seconds: the last one's time.
        last_bytes: the last one's bytes.
        last_pull_seconds: of the last one's time, what the wire took (decode side).
        last_stages: seconds from the request's arrival at which the last one reached each stage.
    """

    count: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    last_seconds: float = 0.0
    last_bytes: int = 0
    last_pull_seconds: float = 0.0
    last_stages: dict[str, float] = dataclasses.field(default_factory=dict)

    def record(self, timing: TransferTiming, marks: Mapping[str, float], now: float) -> None:
        """Adds one successful hand-over.

        Args:
            timing: of its leg.
            marks: stages of its request, in seconds of the same clock.
            now: the current time on it.
        """
        start = timing.opened if timing.first_chunk is None else timing.first_chunk
        end = now if timing.finished is None else timing.finished
        self.count += 1
        self.num_bytes += timing.num_bytes
        self.last_bytes = timing.num_bytes
        self.last_pull_seconds = timing.pull_seconds
        self.last_seconds = end - start
        self.seconds += self.last_seconds
        arrival = marks["arrival"]
        legs = {"met": timing.ready, "transfer_start": timing.first_chunk, "transfer_end": end}
        stages = {**marks, **{name: at for name, at in legs.items() if at is not None}}
        self.last_stages = {
            name: at - arrival for name, at in sorted(stages.items(), key=lambda item: item[1])
        }
