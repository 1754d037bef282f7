# SPDX-License-Identifier: Apache-2.0
"""Makes the tokenizer reference data of tests/engine/data with llama.cpp and SentencePiece.

A GGUF file only names its pre-tokenizer, so the reference for the ids is llama.cpp, the program
that the format comes from; for SentencePiece vocabularies it is SentencePiece. Run this in an
environment of its own, from the repository root:

    python -m venv .venv-oracle
    .venv-oracle/bin/pip install sentencepiece
    .venv-oracle/bin/pip install --no-deps llama-cpp-cffi cffi
    make .cache/src/kvferry
    PYTHONPATH=.cache/src .venv-oracle/bin/python tools/make_tokenizer_oracle.py --gguf FILE.gguf

The data in the tree was made with llama-cpp-cffi 0.4.42 and sentencepiece 0.2.3. That build of
llama.cpp expects GCC 13's libstdc++; with an older one, preload any library that defines
`__cxa_call_terminate`.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import io
import json
import random
import sysconfig
from pathlib import Path
from typing import Any

import sentencepiece  # type: ignore[import-not-found]

from kvferry.tools.oracle_inputs import long_text

DATA = Path(__file__).resolve().parent.parent / "tests" / "engine" / "data"
SPM_VOCAB = 700
_FIXED = [
    *("", " ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", " \n \n", "a", " a", "a ", "  a  b   c"),
    *("Hello world", "don't they'll WE'VE I'm", "1234567890 12 3.14159 1,000,000", "x=1;y=2\n\n\n"),
    *(
        "naïve café ﬁ ﬀ Å Å",
        "e\u0301 é",
        "a\u00a0b\u2003c\u200bd",
        "\ufeffBOM",
        "\ufffd",
        "\x00\x01",
    ),
    *("你好，世界！今天天气很好。", "こんにちは世界 안녕하세요", "مرحبا بالعالم", "नमस्ते दुनिया"),
    *("😀👍🏽👨‍👩‍👧‍👦 🇺🇸 ✈️", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "٣٤٥ ½ ² Ⅷ", "ß ẞ İ ı", "Ġhello Ċ \u2581x"),
    *("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "<|endoftext|><|endoftext|>"),
    *("<s>hi</s> <unk>", "<0x41><0x0A>", "<tool> <tool>x<tool>", "[INST] hello [/INST]"),
    *("def f(a, b):\n\treturn a+b  # comment\n", "https://example.com/a?b=c&d=%20", "$100 + 50%"),
    *("snake_case camelCase kebab-case", "if (x<y && !z) { return a[i]->b; }", "a" * 40, "-" * 30),
]
_RANGES = [
    *((0x20, 0x7E), (0xA0, 0x17F), (0x300, 0x36F), (0x400, 0x4FF), (0x600, 0x6FF), (9, 13)),
    *((0x2000, 0x206F), (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x1F300, 0x1F6FF)),
]


def texts() -> list[str]:
    """Returns texts of every kind, some of them random characters."""
    rng = random.Random(5)
    result = list(_FIXED)
    log = long_text(seed=2)
    for _ in range(15):
        start = rng.randrange(len(log) - 200)
        result.append(log[start : start + rng.randint(1, 200)])
    for _ in range(60):
        parts = []
        for _ in range(rng.randint(1, 25)):
            parts.append(chr(rng.randint(*rng.choice(_RANGES))))
            if rng.random() < 0.3:
                parts.append(rng.choice([" ", "  ", "\n", "1", "a"]))
        result.append("".join(parts))
    return result


def make_byte_level(gguf: Path) -> None:
    """Writes smollm2_tokens.json: llama.cpp's ids of each text.

    Args:
        gguf: SmolLM2-135M-Instruct.Q4_1.gguf.
    """
    llama = _load_llama()
    lib, ffi = llama.lib, llama.ffi
    lib.llama_backend_init()
    parameters = lib.llama_model_default_params()
    parameters.vocab_only = True
    model = lib.llama_model_load_from_file(str(gguf).encode(), parameters)
    vocab = lib.llama_model_get_vocab(model)
    cases = []
    for text in texts():
        raw = text.encode()
        room = len(raw) + 16
        buffer = ffi.new("int32_t[]", room)
        count = lib.llama_tokenize(vocab, raw, len(raw), buffer, room, True, True)
        cases.append({"text": text, "ids": list(buffer[0:count])})
    _write(DATA / "smollm2_tokens.json", {"cases": cases})


def _load_llama() -> Any:
    # Loaded by path: the package around the extension module imports much that is not needed.
    site = Path(sysconfig.get_paths()["platlib"]) / "llama"
    (file,) = site.glob("_llama_cpp_cpu*.so")
    loader = importlib.machinery.ExtensionFileLoader("_llama_cpp_cpu", str(file))
    spec = importlib.util.spec_from_file_location("_llama_cpp_cpu", file, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def make_sentence_piece() -> None:
    """Writes sentencepiece.json: a small Llama-2 style vocabulary and the ids of each text."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*long_text(seed=1).splitlines(), *texts()]),
        model_writer=model,
        model_type="bpe",
        vocab_size=SPM_VOCAB,
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=0.99,
        user_defined_symbols=["<tool>"],
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    size = processor.get_piece_size()
    kinds = []
    for i in range(size):
        if processor.is_byte(i):
            kinds.append(6)
        elif processor.is_unknown(i):
            kinds.append(2)
        elif processor.is_control(i):
            kinds.append(3)
        else:
            kinds.append(4 if processor.id_to_piece(i) == "<tool>" else 1)
    # SentencePiece does not look for control tokens inside a text, and treats what follows a
    # user-defined symbol unlike the tokenizer.json files of such models; no reference for those.
    plain = [text for text in texts() if not any(t in text for t in ("<s>", "<unk>", "<tool>"))]
    value = {
        "tokens": [processor.id_to_piece(i) for i in range(size)],
        "scores": [processor.get_score(i) for i in range(size)],
        "token_types": kinds,
        "cases": [{"text": text, "ids": processor.encode(text, add_bos=True)} for text in plain],
    }
    _write(DATA / "sentencepiece.json", value)


def _write(path: Path, value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    path.write_text(text + "\n", encoding="utf-8")
    print(f"wrote {path} ({path.stat().st_size} bytes)")


def main() -> None:
    """Parses the command line and writes the files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gguf", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf", required=True)
    arguments = parser.parse_args()
    DATA.mkdir(parents=True, exist_ok=True)
    make_sentence_piece()
    make_byte_level(arguments.gguf)


if __name__ == "__main__":
    main()
