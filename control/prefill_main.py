# SPDX-License-Identifier: Apache-2.0
"""Prefill server: computes prompts and hands their KV cache to decode servers.

    python -m kvferry.control.prefill_main --model_path MODEL --port 30000

MODEL is a Hugging Face folder or a .gguf file. Start a decode server of the same model beside it
and put sglang_router in front of both; with --disaggregation_mode=null this one process does both
halves and needs neither. Compiled steps are kept, so only the first start takes long.
"""

from absl import app, flags

from kvferry.control import flags as kvferry_flags
from kvferry.control.launch import serve_from_flags

# Makes --help show them.
flags.adopt_module_key_flags(kvferry_flags)

_DEFAULT_PORT = 30000


def run() -> None:
    """Serves until SIGTERM or SIGINT; entry point of the console script."""
    app.run(lambda argv: serve_from_flags(argv, kvferry_flags.Mode.PREFILL, _DEFAULT_PORT))


if __name__ == "__main__":
    run()
