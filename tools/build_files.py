# SPDX-License-Identifier: Apache-2.0
"""Reads the repository's Bazel BUILD files, which are written so that Python can parse them."""

import ast
import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = "kvferry"


@dataclasses.dataclass(frozen=True)
class Target:
    """One rule of a BUILD file.

    Attributes:
      rule: such as "py_library".
      folder: of the BUILD file, relative to the root ("" for the root).
      line: where it stands.
      fields: its arguments.
    """

    rule: str
    folder: str
    line: int
    fields: dict[str, Any]

    @property
    def label(self) -> str:
        """Its full name, "//folder:name"."""
        return f"//{self.folder}:{self.fields.get('name', '')}"

    @property
    def sources(self) -> list[str]:
        """Paths of its own sources relative to the root; files of another package are left out."""
        names = [source for source in self.fields.get("srcs", []) if not source.startswith("//")]
        return [f"{self.folder}/{name.removeprefix(':')}".lstrip("/") for name in names]

    @property
    def deps(self) -> list[str]:
        """Full labels of what it depends on."""
        return [_full_label(self.folder, label) for label in self.fields.get("deps", [])]


def _full_label(folder: str, label: str) -> str:
    if label.startswith(":"):
        return f"//{folder}{label}"
    if label.startswith("//") and ":" not in label:
        return f"{label}:{label.rsplit('/', 1)[-1]}"
    return label


def python_files() -> Iterator[str]:
    """Yields the path of every .py file, relative to the root, without hidden folders."""
    for path in sorted(ROOT.rglob("*.py")):
        relative = path.relative_to(ROOT)
        if not any(part.startswith(".") or part == "__pycache__" for part in relative.parts):
            yield relative.as_posix()


def targets() -> list[Target]:
    """Reads every BUILD file.

    Returns:
      Its rules, in order.

    Raises:
      ValueError: a statement that is not a rule with named, literal arguments.
    """
    found = []
    for path in sorted(ROOT.rglob("BUILD")):
        relative = path.relative_to(ROOT)
        if path.is_file() and not any(part.startswith(".") for part in relative.parts):
            folder = relative.parent.as_posix().removeprefix(".")
            found += parse(path.read_text(encoding="utf-8"), folder)
    return found


def parse(text: str, folder: str) -> list[Target]:
    """Reads one BUILD file.

    Args:
      text: its content.
      folder: where it lies, relative to the root.

    Returns:
      Its rules, in order.

    Raises:
      ValueError: a statement that is not a rule with named, literal arguments.
    """
    found = []
    for node in ast.parse(text).body:
        where = f"{folder or '.'}/BUILD:{node.lineno}"
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        call = node.value if isinstance(node, ast.Expr) else None
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError(f"{where}: only rules can stand here")
        if call.args and call.func.id != "exports_files":
            raise ValueError(f"{where}: the arguments of {call.func.id} must be named")
        fields = {word.arg or "**": _value(word.value, folder) for word in call.keywords}
        found.append(Target(call.func.id, folder, node.lineno, fields))
    return found


def _value(node: ast.expr, folder: str) -> Any:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "glob":
        base = ROOT / folder
        patterns = ast.literal_eval(node.args[0])
        return sorted(p.relative_to(base).as_posix() for g in patterns for p in base.glob(g))
    return ast.literal_eval(node)


def module_of(path: str) -> str:
    """Turns "engine/model.py" into "kvferry.engine.model"."""
    parts = pathlib.PurePosixPath(path).with_suffix("").parts
    return ".".join((PACKAGE, *(part for part in parts if part != "__init__")))


def imported_modules(path: str, known: frozenset[str], *, strings: bool = True) -> set[str]:
    """Finds which of the repository's modules a file imports, also inside functions, or runs.

    Args:
      path: the file, relative to the root.
      known: all modules of the repository.
      strings: whether a string with a module's name counts (what `python -m` is to run).

    Returns:
      The modules that it names. The packages above them, which are imported too, are left out.
    """
    named: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & known
            named |= inner
            if len(inner) < len(node.names):
                named.add(node.module)
        elif strings and isinstance(node, ast.Constant) and isinstance(node.value, str):
            named.add(node.value)
    return named & known
