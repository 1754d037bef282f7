# SPDX-License-Identifier: Apache-2.0
"""Writes the Bazel BUILD files from the tree: `make build-files`.

One target per module, one `py_test` per test, the dependencies those of the imports. The files use
only what Bazel has by itself, so they parse offline (and with Python's own parser).
"""

import argparse
import collections
import pathlib
import sys
from collections.abc import Mapping, Sequence

from kvferry.tools.build_files import ROOT, imported_modules, module_of, python_files

_CONFTEST = "conftest.py"


def room_of(path: str) -> str:
    """Names the folder whose BUILD file covers a source: a room, or a room's tests.

    Args:
      path: the source, relative to the root.

    Returns:
      The folder, relative to the root; "" for the root itself.
    """
    parts = pathlib.PurePosixPath(path).parts[:-1]
    return "/".join(parts[: 2 if parts and parts[0] == "tests" else 1])


def name_of(path: str) -> str:
    """Names the target of a source.

    Args:
      path: the source, relative to the root.

    Returns:
      Its path inside its room, without ".py".
    """
    return pathlib.PurePosixPath(path).relative_to(room_of(path)).with_suffix("").as_posix()


def label_of(path: str, room: str) -> str:
    """Writes the label of a source's target as a room's BUILD file would.

    Args:
      path: the source, relative to the root.
      room: where the label stands.

    Returns:
      ":name" inside the room, "//room:name" elsewhere.
    """
    own = room_of(path)
    return f":{name_of(path)}" if own == room else f"//{own}:{name_of(path)}"


def _rule(rule: str, fields: Mapping[str, str | bool | Sequence[str]]) -> str:
    lines = [f"{rule}("]
    for key, value in fields.items():
        if isinstance(value, bool):
            lines.append(f"    {key} = {value},")
        elif isinstance(value, str):
            lines.append(f'    {key} = "{value}",')
        elif len(value) == 1:
            lines.append(f'    {key} = ["{value[0]}"],')
        elif value:
            lines += [f"    {key} = [", *(f'        "{item}",' for item in value), "    ],"]
    return "\n".join([*lines, ")"])


def _conftests(path: str, sources: Sequence[str]) -> list[str]:
    """The conftest.py files that pytest loads for a test, itself aside."""
    folders = {str(parent) for parent in pathlib.PurePosixPath(path).parents}
    return [
        other
        for other in sources
        if pathlib.PurePosixPath(other).name == _CONFTEST
        and str(pathlib.PurePosixPath(other).parent) in folders
        and other != path
    ]


def _target(path: str, room: str, owners: Mapping[str, str], sources: Sequence[str]) -> str:
    needs = {owners[module] for module in imported_modules(path, frozenset(owners))} - {path}
    is_test = path.endswith("_test.py")
    if is_test:
        needs.update(_conftests(path, sources))
    needs.discard("__init__.py")  # Bazel itself makes the root of the runfiles a package
    deps = sorted(label_of(need, room) for need in needs)
    inside = pathlib.PurePosixPath(path).relative_to(room or ".").as_posix()
    fields: dict[str, str | bool | Sequence[str]] = {"name": name_of(path), "srcs": [inside]}
    if is_test:
        # Run as a program, a pytest file would pass without running a test.
        fields["srcs"] = [inside, "//tests:run_pytest.py"]
        fields["main"] = "//tests:run_pytest.py"
        fields["args"] = [path]
        has_data = (ROOT / room / "data").is_dir()
        fields["data"] = ["//:pyproject.toml", *([":data"] if has_data else [])]
    elif path.startswith("tests/"):
        fields["testonly"] = True
    if path == "__init__.py":
        fields["data"] = ["py.typed"]
    fields["deps"] = deps
    return _rule("py_test" if is_test else "py_library", fields)


def build_files() -> dict[str, str]:
    """Writes every BUILD file in memory.

    Returns:
      Folder, relative to the root, to the file's text.
    """
    sources = list(python_files())
    owners = {module_of(path): path for path in sources}
    rooms = collections.defaultdict(list)
    for path in sources:
        rooms[room_of(path)].append(path)
    files = {}
    for room, paths in rooms.items():
        parts = ['package(default_visibility = ["//visibility:public"])']
        if room == "":
            parts.append('exports_files(["pyproject.toml"])')
        if room == "tests":
            parts.append('exports_files(["run_pytest.py"])')
        if (ROOT / room / "data").is_dir():
            parts.append('filegroup(\n    name = "data",\n    srcs = glob(["data/**"]),\n)')
        parts += [_target(path, room, owners, sources) for path in sorted(paths)]
        files[room] = "\n\n".join(parts) + "\n"
    return files


def main() -> int:
    """Writes the files, or with --check only compares them.

    Returns:
      The exit status: 1 when --check finds a difference.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail on a difference")
    check = parser.parse_args().check
    stale = []
    for room, text in build_files().items():
        path = ROOT / room / "BUILD"
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(path.relative_to(ROOT).as_posix())
            if not check:
                path.write_text(text, encoding="utf-8")
    print("\n".join(stale) or "Every BUILD file is up to date.")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
