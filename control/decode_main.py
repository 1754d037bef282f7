# SPDX-License-Identifier: Apache-2.0
"""Decode server: takes KV caches over from prefill servers and generates the answers.

    python -m kvferry.control.decode_main --model_path MODEL --port 30001

MODEL is a Hugging Face folder or a .gguf file. Start a prefill server of the same model beside it
and put sglang_router in front of both; with --disaggregation_mode=null this one process does both
halves and needs neither. Compiled steps are kept, so only the first start takes long.
"""

import sys
from collections.abc import Sequence

from absl import app
from absl import flags as absl_flags

from kvferry.control import flags
from kvferry.control.launch import run_server

# Makes --help show them.
absl_flags.adopt_module_key_flags(flags)

_DEFAULT_PORT = 30001


def main(argv: Sequence[str]) -> None:
    """Serves until SIGTERM or SIGINT.

    Args:
      argv: the command line without its flags.

    Raises:
      app.UsageError: there are arguments that are not flags.
    """
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    sys.exit(run_server(flags.read_options(flags.Mode.DECODE, _DEFAULT_PORT)))


def run() -> None:
    """Entry point of the console script."""
    app.run(main)


if __name__ == "__main__":
    run()
