# SPDX-License-Identifier: Apache-2.0
"""kvferry: carries the KV cache of a prompt from a prefill server to a decode server."""

__version__ = "0.1.0"
