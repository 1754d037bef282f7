# SPDX-License-Identifier: Apache-2.0
"""Copies pages of all layers between HBM arrays; see `api.py`."""

from kvferry.kernels.multi_layer_copy.api import gather_pages as gather_pages
from kvferry.kernels.multi_layer_copy.api import multi_layer_copy as multi_layer_copy
from kvferry.kernels.multi_layer_copy.api import scatter_pages as scatter_pages
from kvferry.kernels.multi_layer_copy.api import small_page_ids as small_page_ids
