# SPDX-License-Identifier: Apache-2.0
"""Checks the BUILD files without Bazel: what its analysis would find, and what it would not.

`make build-files` writes them from the imports.
"""

import collections
import graphlib

import pytest

from kvferry.tools.build_files import (
    ROOT,
    Target,
    imported_modules,
    module_of,
    parse,
    python_files,
    targets,
)
from kvferry.tools.update_build import build_files

# Rules that Bazel has by itself: anything else would need a `load`, and a `load` the network.
_RULES = {"py_library", "py_binary", "py_test"}
_OTHERS = {"package", "exports_files", "filegroup", "test_suite"}


@pytest.fixture(name="rules", scope="module")
def _rules() -> list[Target]:
    return [target for target in targets() if target.rule in _RULES]


def test_files_are_those_of_make_build_files() -> None:
    stale = [
        room for room, text in build_files().items() if (ROOT / room / "BUILD").read_text() != text
    ]
    assert stale == [], "run: make build-files"


def test_only_native_rules() -> None:
    unknown = [f"{t.folder}/BUILD:{t.line}: {t.rule}" for t in targets()]
    assert [line for line in unknown if line.split(": ")[1] not in _RULES | _OTHERS] == []


def test_names_are_unique() -> None:
    named = collections.Counter(
        t.label for t in targets() if t.rule not in {"package", "exports_files"}
    )
    assert [label for label, count in named.items() if count > 1] == []
    assert not [label for label in named if label.endswith(":")], "a rule without a name"


def test_every_python_file_is_in_exactly_one_target(rules: list[Target]) -> None:
    count = collections.Counter(source for rule in rules for source in rule.sources)
    wrong = {path: count[path] for path in python_files() if count[path] != 1}
    assert wrong == {}, "file: number of targets"


def test_every_source_exists_in_its_own_package(rules: list[Target]) -> None:
    wrong = []
    for rule in rules:
        for source in rule.sources:
            path = ROOT / source
            package = next(p for p in path.parents if (p / "BUILD").is_file())
            if not path.is_file() or package != ROOT / rule.folder:
                wrong.append(f"{rule.label}: {source}")
    assert wrong == []


def test_every_dependency_is_a_target(rules: list[Target]) -> None:
    labels = {rule.label for rule in targets()}
    wrong = [f"{rule.label}: {dep}" for rule in rules for dep in rule.deps if dep not in labels]
    assert wrong == []


def test_dependencies_are_those_of_the_imports(rules: list[Target]) -> None:
    owner = {module_of(source): rule.label for rule in rules for source in rule.sources}
    modules = frozenset(owner)
    missing = []
    for rule in rules:
        imported = set().union(*(imported_modules(source, modules) for source in rule.sources))
        needed = {owner[module] for module in imported} - {rule.label, owner.get("kvferry")}
        missing += [f"{rule.label}: {label}" for label in sorted(needed - set(rule.deps))]
    assert missing == [], "target: the dependency that it lacks"


def test_dependencies_have_no_cycle(rules: list[Target]) -> None:
    graphlib.TopologicalSorter({rule.label: rule.deps for rule in rules}).prepare()


def test_every_test_file_has_its_py_test(rules: list[Target]) -> None:
    tests = {source for rule in rules if rule.rule == "py_test" for source in rule.sources}
    assert [
        path for path in python_files() if path.endswith("_test.py") and path not in tests
    ] == []


def test_workspace_has_the_import_name() -> None:
    (workspace,) = parse((ROOT / "WORKSPACE").read_text(encoding="utf-8"), "")
    # Bazel's runfiles lie under this name, which makes `import kvferry...` work there.
    assert (workspace.rule, workspace.fields) == ("workspace", {"name": "kvferry"})


class TestParse:
    def test_labels(self) -> None:
        text = 'py_test(name = "a_test", srcs = ["b/a_test.py"], deps = [":c", "//d", "//e:f"])'
        (target,) = parse(text, "tests")
        assert target.label == "//tests:a_test"
        assert target.sources == ["tests/b/a_test.py"]
        assert target.deps == ["//tests:c", "//d:d", "//e:f"]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("x = 1", "room/BUILD:1: only rules can stand here"),
            ("[f(name = x) for x in []]", "room/BUILD:1: only rules can stand here"),
            ('py_library("a")', "room/BUILD:1: the arguments of py_library must be named"),
        ],
    )
    def test_what_is_no_rule(self, text: str, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            parse(text, "room")
