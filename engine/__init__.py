# SPDX-License-Identifier: Apache-2.0
"""A plain LLM engine: weights, tokenizer, forward pass, paged KV pool, sampler, scheduler."""
