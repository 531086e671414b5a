"""Who may import whom, and what a module may be: the rules of `docs/explanation/layers.md`, held by the parser."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import pytest

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
# Of ours, a layer may use only these; a layer that is not named here may use any.
MAY_USE = {
    "listing": (),
    "errors": ("listing", "errors"),
    "layout": ("listing", "errors", "layout"),
    "comm": ("listing", "errors", "layout", "comm"),
}
# A layer must not use these.
MUST_NOT_USE = {"storage": ("shardwright.tensor", "shardwright.sharded", "shardwright.checkpoint")}
# Only these layers may use this; the longest name that fits decides.
ONLY = {
    "torch.distributed": ("comm", "interop", "testing"),
    "torch.distributed.tensor": ("interop",),
    "torch.distributed._tensor": ("interop",),
    "torch.distributed._shard": ("interop",),
    "torch.distributed._sharded_tensor": ("interop",),
    "torch.distributed.checkpoint": ("interop",),
    "shardwright.testing": ("testing",),
    "shardwright.cli": ("cli",),
}
# A plan is a pure function of values: nothing through which it could read, write, wait or talk.
PLANS_MUST_NOT_USE = (
    *("asyncio", "concurrent", "http", "io", "mmap", "multiprocessing", "os", "pathlib", "shutil", "signal"),
    *("socket", "subprocess", "sys", "tempfile", "threading", "time", "urllib", "builtins.open", "builtins.print"),
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
    is_plan = any(part.removesuffix(".py") == "plan" for part in path.parts)
    says_pure = re.search(r"\bPure[.:]", ast.get_docstring(tree) or "") is not None
    for use in uses(tree, path):
        if use.is_under("shardwright") and not is_facade:
            allowed = MAY_USE.get(layer)
            if allowed is not None and not use.is_under(*(f"shardwright.{name}" for name in allowed)):
                yield use.line, f"{layer} uses {use.name}, and of ours may use only {', '.join(allowed)}"
            elif use.name == "shardwright" or (use.name.count(".") == 1 and use.name.split(".")[1][0].isupper()):
                yield use.line, f"{use.name} is the façade: import it from the package that defines it"
        if use.is_under(*MUST_NOT_USE.get(layer, ())):
            yield use.line, f"{layer} must not use {use.name}"
        if fitting := [name for name in ONLY if use.is_under(name)]:
            rule = max(fitting, key=len)
            if layer not in ONLY[rule] and not (is_facade and use.is_under("shardwright")):
                yield use.line, f"{layer} uses {use.name}, and only {', '.join(ONLY[rule])} may use {rule}"
        if (is_plan or says_pure) and use.is_under(*PLANS_MUST_NOT_USE):
            yield use.line, f"a plan is pure, and {use.name} is not"


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
                case ast.If() if path == FACADE and imports_lazily(node):
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
def test_a_module_keeps_to_its_layer(path: Path) -> None:
    found = violations(path.read_text("utf-8"), PurePosixPath(path.relative_to(ROOT / "src").as_posix()))
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_silenced_check_says_why(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    found = [f"{name}:{line}: {what}" for line, what in excuses_without_reason(path.read_text("utf-8"))]
    assert not found, "\n" + "\n".join(found)


PLANTED = {
    "layout uses another layer": ("layout/region.py", "from shardwright.comm import agree", "layout uses"),
    "layout uses the façade": ("layout/region.py", "from shardwright import Mesh", "layout uses"),
    "layout, relatively": ("layout/region.py", "from ..comm import agree", "layout uses shardwright.comm.agree"),
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
    "comm uses what is above it": ("comm/agree.py", "from shardwright.tensor import DTensor", "comm uses"),
    "testing uses torch's ShardedTensor": ("testing/pool.py", "import torch.distributed._shard", "only interop"),
    "storage uses tensor": ("storage/local.py", "from shardwright.tensor import DTensor", "storage must not use"),
    "a plan talks": ("tensor/redistribute/plan.py", "from shardwright.comm import exchange", "a plan is pure"),
    "a plan reads": ("checkpoint/plan/load.py", "from pathlib import Path", "a plan is pure"),
    "a plan opens": ("checkpoint/plan/load.py", "def f(name):\n    return open(name)", "builtins.open"),
    "a module that says it is pure reads": (
        "checkpoint/format/split.py",
        '"""Split regions. Pure."""\nfrom pathlib import Path',
        "is pure",
    ),
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
    "a drawer": ("tensor/utils.py", "", "a drawer"),
    "a drawer with shelves": ("helpers/__init__.py", "", "a drawer"),
}


@pytest.mark.parametrize(("name", "source", "expected"), PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_violation_is_found(name: str, source: str, expected: str) -> None:
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
    "a plan uses values": ("checkpoint/plan/save.py", "from math import prod\nfrom shardwright.layout import Layout"),
    "an __init__ re-exports": ("comm/__init__.py", '"""Ranks."""\nfrom shardwright.comm.a import b\n__all__ = ["b"]'),
    "the façade imports lazily": (
        "__init__.py",
        "if typing.TYPE_CHECKING:\n    from shardwright import testing\nelse:\n    def __getattr__(a):\n        pass",
    ),
    "an attribute of the same name": ("tensor/dtensor.py", "def f(torch):\n    return self.torch.distributed"),
}


@pytest.mark.parametrize(("name", "source"), ALLOWED.values(), ids=ALLOWED.keys())
def test_what_the_rules_allow_is_not_found(name: str, source: str) -> None:
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
