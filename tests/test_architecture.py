"""Which folder may import which, and what a module may contain: the rules of `docs/explanation/layers.md`."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import pytest

from tests.architecture.folders import MAY_USE
from tests.architecture.graph import Module, cycles, folder_edges, module_edges, reachable, read_modules

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))
WRITTEN = [
    ROOT / "conftest.py",
    *SOURCES,
    *(path for folder in ("tests", "benchmarks", "examples") for path in sorted((ROOT / folder).rglob("*.py"))),
]


class Use(NamedTuple):
    """A dotted name that a module imports or reaches through what it imported."""

    name: str
    line: int

    def is_under(self, *packages: str) -> bool:
        return any(f"{self.name}.".startswith(f"{package}.") for package in packages)


FACADE = PurePosixPath("shardwright/__init__.py")
LAZY = (FACADE, PurePosixPath("shardwright/interop/__init__.py"))  # these import their names when they are first used
# Only these layers may use this; the longest name that fits decides.
ONLY = {
    "torch.distributed": ("comm", "interop", "testing"),
    "torch.distributed.tensor": ("interop",),
    "torch.distributed._tensor": ("interop",),
    "torch.distributed._shard": ("interop",),
    "torch.distributed._sharded_tensor": ("interop",),
    "torch.distributed.checkpoint": ("interop",),
    "shardwright.testing": ("testing",),
    "shardwright.cli": ("cli", "__main__"),
}
# A pure module computes values from values: it imports nothing that reads, writes, waits or communicates.
IMPURE = (
    *("asyncio", "concurrent", "http", "io", "mmap", "multiprocessing", "os", "pathlib", "shutil", "signal"),
    *(
        "socket",
        "subprocess",
        "sys",
        "tempfile",
        "threading.Event",
        "threading.Thread",
        "threading.Timer",
        "time",
        "urllib",
        "builtins.open",
        "builtins.print",
    ),
    *("torch.distributed", "shardwright.comm", "shardwright.storage"),
)
DRAWERS = {"common", "helper", "helpers", "misc", "util", "utils"}
EXCUSE = re.compile(r"#\s*(?:noqa\b(?::\s*[A-Z]+\d+(?:,\s*[A-Z]+\d+)*)?|type:\s*ignore\b(?:\[[^]]*\])?)")
BLANKET = re.compile(r"#\s*(?:noqa\b(?!:)|type:\s*ignore\b(?!\[))")


def uses(tree: ast.Module, path: PurePosixPath) -> Iterator[Use]:
    """Everything a module imports, and every dotted name it reaches through an import.

    `path` is relative to `src`. `if TYPE_CHECKING` and imports within functions count like the others.
    """
    package = path.parent.parts
    known: dict[str, str] = {"open": "builtins.open", "print": "builtins.print"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                known[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
                yield Use(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*parents, *(node.module or "").split("."))).rstrip(".")
            for alias in node.names:
                known[alias.asname or alias.name] = f"{base}.{alias.name}"
                yield Use(f"{base}.{alias.name}", node.lineno)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and (name := dotted(node, known)):
            yield Use(name, node.lineno)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (Use(str(arg.value), node.lineno) for arg in node.args if isinstance(arg, ast.Constant))


def dotted(node: ast.expr, known: dict[str, str]) -> str | None:
    """`dist.tensor.DTensor` as `torch.distributed.tensor.DTensor`, where `dist` is known to be that."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute) and (base := dotted(node.value, known)):
        return f"{base}.{node.attr}"
    return None


def broken_import_rules(tree: ast.Module, path: PurePosixPath) -> Iterator[tuple[int, str]]:
    layer = path.parts[1].removesuffix(".py")
    is_facade = path == FACADE
    for use in uses(tree, path):
        of_facade = use.name == "shardwright" or re.fullmatch(r"shardwright\.[A-Z]\w*", use.name)
        if of_facade and not is_facade:
            yield use.line, f"{use.name} is the façade: import it from the package that defines it"
        if fitting := [name for name in ONLY if use.is_under(name)]:
            rule = max(fitting, key=len)
            if layer not in ONLY[rule] and not (is_facade and use.is_under("shardwright")):
                yield use.line, f"{layer} uses {use.name}, and only {', '.join(ONLY[rule])} may use {rule}"


def imports_lazily(node: ast.If) -> bool:
    """True for `if typing.TYPE_CHECKING: imports; else: __getattr__ and __dir__`, as PEP 562 has them."""
    return (
        ast.unparse(node.test) == "typing.TYPE_CHECKING"
        and all(isinstance(each, ast.ImportFrom) for each in node.body)
        and all(isinstance(each, ast.FunctionDef) and each.name in ("__getattr__", "__dir__") for each in node.orelse)
    )


def broken_shape_rules(tree: ast.Module, path: PurePosixPath) -> Iterator[tuple[int, str]]:
    for part in path.parts:
        if part.removesuffix(".py") in DRAWERS:
            yield 1, f"{part} is a drawer: name a module after its idea"
    if path.name == "__init__.py":
        for number, node in enumerate(tree.body):
            match node:
                case ast.Import() | ast.ImportFrom():
                    continue
                case ast.Expr(value=ast.Constant(value=str())) if number == 0:
                    continue
                case ast.Assign(targets=[ast.Name(id="__all__" | "__version__")]):
                    continue
                case ast.If() if path in LAZY and imports_lazily(node):
                    continue
                case _:
                    yield node.lineno, "an __init__.py only re-exports: a docstring, imports, __all__, __version__"


def excuses_without_reason(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or not EXCUSE.search(token.string):
            continue
        if BLANKET.search(token.string):
            yield token.start[0], f"{token.string!r} silences everything: name the rule"
        if not EXCUSE.sub("", token.string).strip("# "):
            yield token.start[0], f"{token.string!r} has no reason: write it behind"


def violations(source: str, path: PurePosixPath) -> list[str]:
    """What a module of the package does that it may not: `file:line: what`."""
    tree = ast.parse(source)
    broken = {*broken_import_rules(tree, path), *broken_shape_rules(tree, path)}
    return [f"src/{path}:{line}: {what}" for line, what in sorted(broken)]


def test_there_are_modules_to_check() -> None:
    assert ROOT / "src/shardwright/layout/layout.py" in SOURCES


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_module_imports_only_what_its_layer_may_use(path: Path) -> None:
    found = violations(path.read_text("utf-8"), PurePosixPath(path.relative_to(ROOT / "src").as_posix()))
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_silenced_check_has_a_reason(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    found = [f"{name}:{line}: {what}" for line, what in excuses_without_reason(path.read_text("utf-8"))]
    assert not found, "\n" + "\n".join(found)


def allowed_folders(folder: str) -> set[str]:
    return {f"shardwright.{name}" if name else "shardwright" for name in MAY_USE[folder]}


def short(folder: str) -> str:
    """A folder as `MAY_USE` lists it: `tensor.rules` for `shardwright.tensor.rules`."""
    return folder.removeprefix("shardwright").removeprefix(".")


def graph_violations(modules: dict[str, Module]) -> list[str]:
    """Return what is wrong with the import graph: unlisted folders, imports that are not allowed, and cycles."""
    edges = module_edges(modules)
    folders = folder_edges(modules, edges)
    found = []
    for folder, used in folders.items():
        if short(folder) not in MAY_USE:
            found.append(f"{folder} is not listed in tests/architecture/folders.py")
            continue
        forbidden = used.keys() - allowed_folders(short(folder))
        found += [f"{folder} may not use {other}: {', '.join(used[other])}" for other in sorted(forbidden)]
    found += [f"folders form a cycle: {' '.join(names)}" for names in cycles(folders)]
    found += [f"modules form a cycle: {' '.join(names)}" for names in cycles(edges)]
    return found


@cache
def says_it_is_pure(module: Module) -> bool:
    """Return whether the first paragraph of the module's docstring says "pure", or its whole folder is pure."""
    docstring = ast.get_docstring(ast.parse(module.source)) or ""
    in_pure_folder = short(module.folder) == "layout"
    return in_pure_folder or bool(re.search(r"\bpure\b", docstring.partition("\n\n")[0], re.IGNORECASE))


@cache
def impure_uses(module: Module) -> tuple[str, ...]:
    path = PurePosixPath(*module.name.split("."), *(["__init__"] if module.is_package else [])).with_suffix(".py")
    return tuple(sorted({use.name for use in uses(ast.parse(module.source), path) if use.is_under(*IMPURE)}))


def purity_violations(modules: dict[str, Module]) -> list[str]:
    """Return which modules that say they are pure import something impure, themselves or through others of ours."""
    edges = module_edges(modules)
    impure = {name: used for name, module in modules.items() if (used := impure_uses(module))}
    found = []
    for name, module in modules.items():
        if not says_it_is_pure(module):
            continue
        via = reachable(edges, name)
        nearest = next((other for other in via if other in impure), None)  # `via` has the nearest first
        if nearest is not None:
            chain = [nearest]
            while chain[-1] != name:
                chain.append(via[chain[-1]])
            found.append(f"{' -> '.join(reversed(chain))} uses {', '.join(impure[nearest])}, so {name} is not pure")
    return found


def test_folders_use_only_the_folders_listed_for_them_and_nothing_forms_a_cycle() -> None:
    found = graph_violations(read_modules(ROOT / "src"))
    assert not found, "\n" + "\n".join(found)


def test_every_listed_folder_exists_and_every_listed_use_is_made() -> None:
    modules = read_modules(ROOT / "src")
    folders = folder_edges(modules, module_edges(modules))
    assert {short(folder) for folder in folders} == MAY_USE.keys()
    unused = {
        name: sorted(
            short(other) for other in allowed_folders(name) - folders[f"shardwright.{name}".rstrip(".")].keys()
        )
        for name in MAY_USE
    }
    assert not {name: others for name, others in unused.items() if others}


def test_modules_that_say_they_are_pure_import_nothing_impure() -> None:
    modules = read_modules(ROOT / "src")
    assert sum(map(says_it_is_pure, modules.values())) > 20
    found = purity_violations(modules)
    assert not found, "\n" + "\n".join(found)


def planted(**sources: str) -> dict[str, Module]:
    """Return the modules of the package with these in place of, or beside, their own. `__` stands for a dot."""
    modules = read_modules(ROOT / "src")
    for key, source in sources.items():
        name = "shardwright." + key.replace("__", ".")
        modules[name] = Module(name, source, name in modules and modules[name].is_package)
    return modules


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({"layout__region": "from shardwright.comm import agree"}, "shardwright.layout may not use shardwright.comm"),
        ({"layout__region": "from ..comm import agree"}, "shardwright.layout may not use shardwright.comm"),
        (
            {"comm__agree": "def f():\n    from shardwright.tensor import DTensor"},
            "comm may not use shardwright.tensor",
        ),
        (
            {"comm__agree": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import shardwright.checkpoint"},
            "comm may not use shardwright.checkpoint",
        ),
        (
            {"comm__agree": "import importlib\nimportlib.import_module('shardwright.tensor')"},
            "comm may not use shardwright.tensor",
        ),
        ({"storage__local": "from shardwright.tensor import DTensor"}, "storage may not use shardwright.tensor"),
        (
            {
                "layout__one": "import shardwright.layout.two",
                "layout__two": "def f():\n    import shardwright.layout.one",
            },
            "modules form a cycle: shardwright.layout.one shardwright.layout.two",
        ),
        ({"layout__mesh": "from shardwright.layout import Layout"}, "modules form a cycle: shardwright.layout "),
        ({"attic__old": ""}, "shardwright.attic is not listed"),
    ],
    ids=[
        "an import of a higher layer",
        "a relative import",
        "a lazy import",
        "an import for types",
        "an import by name",
        "storage that sees tensors",
        "a cycle of two modules, one import lazy",
        "a cycle through a package's __init__",
        "a folder that is not listed",
    ],
)
def test_a_planted_violation_of_the_import_graph_is_detected(sources: dict[str, str], expected: str) -> None:
    found = graph_violations(planted(**sources))
    assert any(expected in each for each in found), found


def test_a_planted_cycle_of_folders_is_detected() -> None:
    found = graph_violations(planted(errors="import shardwright.comm.agree"))
    assert any(each.startswith("folders form a cycle") for each in found), found


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({"layout__extra": "from pathlib import Path"}, "uses pathlib.Path"),
        ({"layout__extra": "def f(name):\n    return open(name)"}, "uses builtins.open"),
        ({"sharded__extra": '"""Plans. Pure."""\nfrom shardwright.comm import agree'}, "sharded.extra is not pure"),
        (
            {"sharded__extra": '"""Plans. Pure."""\nimport shardwright.sharded.other', "sharded__other": "import time"},
            "shardwright.sharded.other uses time, so shardwright.sharded.extra is not pure",
        ),
    ],
    ids=[
        "a pure module that uses pathlib",
        "a pure module that opens a file",
        "a pure module that communicates",
        "a pure module that is impure through another",
    ],
)
def test_a_planted_impurity_is_detected(sources: dict[str, str], expected: str) -> None:
    found = purity_violations(planted(**sources))
    assert any(expected in each for each in found), found


PLANTED = {
    "layout uses torch.distributed": ("layout/mesh.py", "import torch.distributed as dist", "only comm, interop"),
    "torch.distributed by from": ("tensor/dtensor.py", "from torch import distributed", "only comm, interop"),
    "torch.distributed by attribute": (
        "tensor/dtensor.py",
        "import torch\ntorch.distributed.barrier()",
        "torch.distributed.barrier",
    ),
    "torch.distributed by name": (
        "tensor/dtensor.py",
        "import importlib\nimportlib.import_module('torch.distributed')",
        "only comm, interop",
    ),
    "torch.distributed for types": (
        "sharded/spec.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch.distributed import ProcessGroup",
        "torch.distributed.ProcessGroup",
    ),
    "torch.distributed in a function": ("cli/main.py", "def f():\n    import torch.distributed", "only comm, interop"),
    "comm uses torch's DTensor": ("comm/group.py", "from torch.distributed.tensor import DTensor", "only interop"),
    "comm, by attribute": (
        "comm/group.py",
        "import torch.distributed as dist\ndist.checkpoint.save()",
        "only interop",
    ),
    "testing uses torch's ShardedTensor": ("testing/pool.py", "import torch.distributed._shard", "only interop"),
    "the product uses testing": ("checkpoint/api.py", "import shardwright.testing", "only testing may use"),
    "the façade, from inside": ("tensor/dtensor.py", "from shardwright import Layout", "is the façade"),
    "an __init__ with a function": ("comm/__init__.py", "def f():\n    pass", "only re-exports"),
    "an __init__ with a constant": ("comm/__init__.py", "TIMEOUT = 60", "only re-exports"),
    "an __init__ with a __getattr__": (
        "comm/__init__.py",
        "if typing.TYPE_CHECKING:\n    from a import b\nelse:\n    def __getattr__(name):\n        pass",
        "only re-exports",
    ),
    "a façade with a function": ("__init__.py", "def f():\n    pass", "only re-exports"),
    "a façade with a function beside its __getattr__": (
        "__init__.py",
        "if typing.TYPE_CHECKING:\n    from a import b\nelse:\n    def f():\n        pass",
        "only re-exports",
    ),
    "a module named utils": ("tensor/utils.py", "", "a drawer"),
    "a package named helpers": ("helpers/__init__.py", "", "a drawer"),
}


@pytest.mark.parametrize(("name", "source", "expected"), PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_layer_violation_is_detected(name: str, source: str, expected: str) -> None:
    found = violations(source, PurePosixPath("shardwright", name))
    assert found, source
    assert expected in " ".join(found)
    assert found[0].startswith(f"src/shardwright/{name}:")


ALLOWED = {
    "layout uses itself and errors": (
        "layout/layout.py",
        "import torch\nfrom shardwright.errors import LayoutError\nfrom shardwright.layout.mesh import Mesh",
    ),
    "comm uses torch.distributed": ("comm/group.py", "import torch.distributed as dist\ndist.barrier()"),
    "interop uses everything": (
        "interop/dcp.py",
        "import torch.distributed.checkpoint\nfrom torch.distributed.tensor import DTensor",
    ),
    "an __init__ re-exports": ("comm/__init__.py", '"""Ranks."""\nfrom shardwright.comm.a import b\n__all__ = ["b"]'),
    "the façade imports lazily": (
        "__init__.py",
        "if typing.TYPE_CHECKING:\n    from shardwright import testing\nelse:\n    def __getattr__(a):\n        pass",
    ),
    "interop imports lazily": (
        "interop/__init__.py",
        "if typing.TYPE_CHECKING:\n    from a import b\nelse:\n    def __getattr__(a):\n        pass",
    ),
    "an attribute of the same name": ("tensor/dtensor.py", "def f(torch):\n    return self.torch.distributed"),
}


@pytest.mark.parametrize(("name", "source"), ALLOWED.values(), ids=ALLOWED.keys())
def test_allowed_imports_are_not_reported(name: str, source: str) -> None:
    assert violations(source, PurePosixPath("shardwright", name)) == []


@pytest.mark.parametrize(
    ("comment", "expected"),
    [
        ("# no" + "qa", "silences everything"),
        ("# no" + "qa: E501", "no reason"),
        ("# type: " + "ignore[arg-type]", "no reason"),
        ("# type: " + "ignore[arg-type]  #", "no reason"),
        ("# type: " + "ignore  # torch has no types here", "silences everything"),
        ("# type: " + "ignore[arg-type]  # torch says so", None),
        ("# no" + "qa: BLE001  # any error is reported to all ranks", None),
        ("# no" + "qa: BLE001, E501  any error is reported to all ranks", None),
        ("# type: " + "ignore[misc]  # no" + "qa: E501", "no reason"),
        ("# an ordinary comment", None),
    ],
)
def test_a_silenced_check_needs_a_rule_and_a_reason(comment: str, expected: str | None) -> None:
    found = [what for _, what in excuses_without_reason(f"x = 1  {comment}\n")]
    if expected is None:
        assert not found
    else:
        assert expected in " ".join(found)
