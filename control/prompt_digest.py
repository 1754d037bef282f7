# SPDX-License-Identifier: Apache-2.0
"""How the two schedulers of a room make sure that they mean the same prompt."""

import hashlib
from collections.abc import Sequence

import numpy as np

PROMPT_DIGEST = "prompt_digest"
"""Key of the digest among the extra values of a request for pages."""


def prompt_digest(prompt_ids: Sequence[int]) -> str:
    """Digests a prompt.

    Equal fingerprints of the model do not make equal prompts: tokenizers and chat templates may
    differ, and so may the bodies that two servers were sent under one room.

    Args:
      prompt_ids: token ids.

    Returns:
      32 hexadecimal digits, equal for equal ids on every machine.
    """
    ids = np.asarray(prompt_ids, dtype="<i4")
    return hashlib.blake2b(ids.tobytes(), digest_size=16).hexdigest()
