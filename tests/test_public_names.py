"""Public names: every one exists, is listed, has a docstring and an example."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import shardwright

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src/shardwright"
FACADES = [
    "shardwright",
    "shardwright.errors",
    *(
        f"shardwright.{init.parent.relative_to(PACKAGE).as_posix().replace('/', '.')}"
        for init in sorted(PACKAGE.rglob("*/__init__.py"))
        if not any(part.startswith("_") for part in init.parent.relative_to(PACKAGE).parts)
    ),
]
# Names without an example of their own, each with the reason.
WITHOUT_EXAMPLE = {
    "shardwright.comm.mesh_group": "needs a DeviceMesh, and so a process group: tested on ranks",
}

facades = pytest.mark.parametrize("facade", FACADES)


def listed(module: ModuleType) -> list[str]:
    return list(getattr(module, "__all__", ()))  # a package that offers nothing lists nothing


def place_in_list(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions, each in alphabetical order: as ruff sorts them."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


def needs_example(value: object) -> bool:
    """Classes and functions do; aliases of types, constants and submodules do not."""
    return inspect.isclass(value) or inspect.isroutine(value)


def leaks(module: ModuleType) -> list[str]:
    """Public names that are not in `__all__`; in a plain module, only those that are defined in it."""
    is_package = hasattr(module, "__path__")
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and name not in listed(module)
        and not inspect.ismodule(value)
        and (is_package or getattr(value, "__module__", None) == module.__name__)
    )


def lacks_example(value: object) -> bool:
    return needs_example(value) and ">>> " not in (inspect.getdoc(value) or "")


def test_the_package_exports_exactly_these_names() -> None:
    assert shardwright.__all__ == [
        "ColwiseParallel",
        "CommunicationWarning",
        "ContextParallel",
        "DTensor",
        "DeviceMesh",
        "ExpertParallel",
        "FSDPModule",
        "Ignored",
        "Layout",
        "Mapping",
        "Mesh",
        "MixedPrecisionPolicy",
        "OffsetBasedRNGTracker",
        "Partial",
        "Placement",
        "Plan",
        "Prediction",
        "PrepareModuleInput",
        "PrepareModuleInputOutput",
        "PrepareModuleOutput",
        "Ragged",
        "Region",
        "Replicate",
        "Replicated",
        "RowwiseParallel",
        "SequenceParallel",
        "Shard",
        "TensorMeta",
        "Trace",
        "auto_plan",
        "checkpoint",
        "communication",
        "compile",
        "defer_gradient_reduction",
        "distribute_module",
        "distribute_tensor",
        "empty",
        "errors",
        "explain",
        "full",
        "fully_shard",
        "implicit_replication",
        "init_device_mesh",
        "local_map",
        "loss_parallel",
        "manual_seed",
        "normal",
        "ones",
        "parallelize",
        "parallelize_module",
        "predict",
        "rand",
        "randint",
        "randn",
        "randperm",
        "register_fsdp_forward_method",
        "register_rule",
        "rules",
        "shard_batch",
        "sharded",
        "storage",
        "trace",
        "verify_ranks",
        "visualize",
        "zeros",
    ]


def in_a_new_process(program: str) -> list[str]:
    """Return what a program prints, line by line."""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    return result.stdout.splitlines()


def test_importing_the_package_makes_its_submodules_available() -> None:
    program = """
import shardwright as sw
print(sw.errors.ShardwrightError.__name__, sw.storage.MemoryStorage.__name__)
print(sw.interop.to_torch_dtensor.__name__, sw.testing.run_ranks.__name__)
"""
    assert in_a_new_process(program) == ["ShardwrightError MemoryStorage", "to_torch_dtensor run_ranks"]


def test_importing_the_package_does_not_import_testing_or_the_tensors_of_torch() -> None:
    program = """
import sys
import shardwright
ours = "shardwright.interop.tensors", "shardwright.testing"
heavy = *ours, "torch.distributed.tensor", "pytest", "hypothesis", "cloudpickle"
print([name for name in heavy if name in sys.modules], {"interop", "testing"} <= set(dir(shardwright)))
print(hasattr(shardwright, "intorep"), [name for name in heavy if name in sys.modules])
"""
    assert in_a_new_process(program) == ["[] True", "False []"]


def test_importing_a_part_of_interop_imports_no_other_part() -> None:
    program = """
import sys
from shardwright import interop
print("shardwright.interop.tensors" in sys.modules, "to_torch_spec" in dir(interop), hasattr(interop, "to_torch_spek"))
from shardwright.interop import *
print("shardwright.interop.tensors" in sys.modules, to_torch_spec is interop.to_torch_spec)
"""
    assert in_a_new_process(program) == ["False True False", "True True"]


def test_a_star_import_works_without_the_testing_extra() -> None:
    program = """
import sys
sys.modules["cloudpickle"] = sys.modules["hypothesis"] = sys.modules["pytest"] = None
from shardwright import *
print(DTensor.__name__)
"""
    assert in_a_new_process(program) == ["DTensor"]


def test_testing_is_a_missing_attribute_without_the_testing_extra() -> None:
    program = """
import inspect
import sys
sys.modules["cloudpickle"] = None
import shardwright as sw
print(hasattr(sw, "testing"), "testing" in dict(inspect.getmembers(sw)), "DTensor" in dict(inspect.getmembers(sw)))
try:
    sw.testing
except AttributeError as error:
    print(error)
try:
    from shardwright import testing
except sw.errors.MissingExtraError as error:
    print(error)
"""
    remedy = "shardwright.testing needs cloudpickle: pip install 'shardwright[testing]'"
    expected = ["False False True", f"cannot import shardwright.testing: {remedy}", remedy]
    assert in_a_new_process(program) == expected


@facades
def test_every_listed_name_exists(facade: str) -> None:
    module = importlib.import_module(facade)
    assert [name for name in listed(module) if not hasattr(module, name)] == []


@facades
def test_listed_names_are_sorted_and_unique(facade: str) -> None:
    names = listed(importlib.import_module(facade))
    assert names == sorted(set(names), key=place_in_list)


@facades
def test_no_public_name_is_unlisted(facade: str) -> None:
    assert leaks(importlib.import_module(facade)) == []


@facades
def test_every_listed_name_has_a_docstring(facade: str) -> None:
    module = importlib.import_module(facade)
    assert module.__doc__
    silent = [n for n in listed(module) if needs_example(getattr(module, n)) and not inspect.getdoc(getattr(module, n))]
    assert silent == []


@facades
def test_every_listed_class_and_function_has_an_example(facade: str) -> None:
    module = importlib.import_module(facade)
    lacking = {f"{facade}.{name}" for name in listed(module) if lacks_example(getattr(module, name))}
    assert lacking - WITHOUT_EXAMPLE.keys() == set()


@pytest.mark.parametrize("name", WITHOUT_EXAMPLE)
def test_every_listed_exception_is_still_needed(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    assert lacks_example(getattr(importlib.import_module(module), attribute)), "take it off the list"


def test_the_checks_detect_planted_violations() -> None:
    package = ModuleType("package", "A package.")
    package.__path__ = []  # type: ignore[attr-defined]  # what makes a module a package
    package.__all__ = ["shown"]  # type: ignore[attr-defined]  # modules may have any attribute

    def shown() -> None:
        """Without an example."""

    package.shown = package.unlisted = shown  # type: ignore[attr-defined]  # likewise
    assert leaks(package) == ["unlisted"]
    assert lacks_example(shown)
    assert not lacks_example(shardwright.Region)
