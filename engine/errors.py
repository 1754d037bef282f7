# SPDX-License-Identifier: Apache-2.0
"""Errors of model loading, in a module of their own so that every loader file can raise them."""

from __future__ import annotations


class ModelError(ValueError):
    """A model cannot be loaded. The message names the file, the value and what to do."""


class UnsupportedModelError(ModelError):
    """The model is well formed, but needs something that this engine does not implement."""


class ModelFileError(ModelError):
    """A file of the model is missing, truncated or malformed."""
