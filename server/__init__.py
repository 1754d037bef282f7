# SPDX-License-Identifier: Apache-2.0
"""HTTP in front of a scheduler: the OpenAI and SGLang routes, health and metrics.

A router that pairs prefill and decode servers (`sglang_router`) posts the same body to both and
expects the same form of answer from both; what this room does beyond plain serving follows from
that. It gets the scheduler, the tokenizer and the names handed in and knows nothing of transfers.
"""
