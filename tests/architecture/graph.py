"""The import graph of a source tree: which module uses which, at import time, lazily, or for types only.

A package's `__init__` is a module like any other: `from shardwright.comm import agree` is an edge to
`shardwright.comm`, and from there to what it re-exports. The edges that Python adds by itself, from a module to the
`__init__` of its parent packages, do not count: they cannot be avoided.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Module:
    """A module of the tree: its dotted name, its source, and whether it is a package's `__init__`."""

    name: str
    source: str
    is_package: bool = False

    @property
    def folder(self) -> str:
        """The package that holds the module; for an `__init__`, that package itself.

        A module of the top level, such as `shardwright.errors`, is a folder of its own.
        """
        package = self.name.rpartition(".")[0]
        return self.name if self.is_package or "." not in package else package


def read_modules(root: Path) -> dict[str, Module]:
    """Return every module below `root` by its dotted name."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        found[name] = Module(name, path.read_text("utf-8"), is_package)
    return found


@cache
def imported_names(module: Module) -> tuple[str, ...]:
    """Return the dotted name of everything that the module imports, wherever in it the import statement is."""
    return tuple(_imported_names(module))


def _imported_names(module: Module) -> Iterator[str]:
    package = (module.name if module.is_package else module.name.rpartition(".")[0]).split(".")
    for node in ast.walk(ast.parse(module.source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parents, *((node.module or "").split(".") if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (str(arg.value) for arg in node.args if isinstance(arg, ast.Constant))


def module_edges(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """Return the modules of the tree that each module imports, lazy imports and imports for types included."""
    edges: dict[str, set[str]] = {name: set() for name in modules}
    for name, module in modules.items():
        for imported in imported_names(module):
            target = imported if imported in modules else imported.rpartition(".")[0]
            if target in modules and target != name:
                edges[name].add(target)
    return edges


def folder_edges(modules: Mapping[str, Module], edges: Mapping[str, Iterable[str]]) -> dict[str, dict[str, list[str]]]:
    """Return the folders that each folder uses, and for each of them the imports that do, as `a -> b`."""
    found: dict[str, dict[str, list[str]]] = {module.folder: {} for module in modules.values()}
    for name, targets in edges.items():
        for target in sorted(targets):
            user, used = modules[name].folder, modules[target].folder
            if user != used:
                found[user].setdefault(used, []).append(f"{name} -> {target}")
    return found


def cycles(edges: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one node, each sorted."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in edges.get(node, ()):
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in edges:
        if node not in index:
            visit(node)
    return found


def reachable(edges: Mapping[str, Iterable[str]], start: str) -> dict[str, str]:
    """Return every node reachable from `start`, the nearest first, with the node it was reached from."""
    via: dict[str, str] = {start: ""}
    waiting = [start]
    while waiting:
        node = waiting.pop(0)
        for other in edges.get(node, ()):
            if other not in via:
                via[other] = node
                waiting.append(other)
    return via
