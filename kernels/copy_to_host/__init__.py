# SPDX-License-Identifier: Apache-2.0
"""Copies between HBM and pinned host memory; see `api.py`."""

from kvferry.kernels.copy_to_host.api import copy_to_device as copy_to_device
from kvferry.kernels.copy_to_host.api import copy_to_host as copy_to_host
from kvferry.kernels.copy_to_host.api import gather_to_host as gather_to_host
