# SPDX-License-Identifier: Apache-2.0
"""Everything between processes: meeting, state machine, side channel and transfer engines."""
