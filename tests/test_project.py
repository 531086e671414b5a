"""The project can be built, installed, pinned and cited: its metadata files say the same thing, and say it once."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import shardwright

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src/shardwright"
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PROJECT: dict[str, Any] = PYPROJECT["project"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PIN = re.compile(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.]+)")


def normal(name: str) -> str:
    """Return the name of a distribution as the packaging specification normalizes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    """Return the pinned distributions of constraints.txt by normalized name."""
    lines = [line for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if line[:1] not in ("", "#")]
    found = [PIN.fullmatch(line) for line in lines]
    bad = [line for line, match in zip(lines, found, strict=True) if match is None]
    assert bad == [], "only `name==version` may stand in constraints.txt"
    return {normal(match[1]): match[2] for match in found if match}


def requirements() -> set[str]:
    """Return the normalized names of all direct requirements, of the extras and of the build as well."""
    extras = PROJECT["optional-dependencies"].values()
    every = [
        *PROJECT["dependencies"],
        *PYPROJECT["build-system"]["requires"],
        *(line for some in extras for line in some),
    ]
    return {normal(re.match(r"[A-Za-z0-9._-]+", line)[0]) for line in every}  # type: ignore[index]  # each has a name


def matrix(name: str) -> dict[str, list[str]]:
    jobs = yaml.safe_load((ROOT / ".github/workflows" / name).read_text("utf-8"))["jobs"]
    (found,) = [job["strategy"]["matrix"] for job in jobs.values() if "strategy" in job]
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [*(sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps")]
    command += ["--no-build-isolation", "--no-index", "--wheel-dir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.iterdir()
    return built


def test_a_wheel_contains_every_module_and_py_typed(wheel: Path) -> None:
    written = {path.relative_to(ROOT / "src").as_posix() for path in PACKAGE.rglob("*.py")}
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert len(written) > 100
    assert packed == written | {"shardwright/py.typed"}


def test_a_wheel_installs_and_imports_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    """`-I` leaves out the current folder and PYTHONPATH; the folder of the installation comes first on the path."""
    target = tmp_path / "installed"
    install = [*(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps")]
    done = subprocess.run(
        [*install, "--no-index", "--target", str(target), str(wheel)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    program = f"""
import sys
sys.path.insert(0, {str(target)!r})
import shardwright as sw
from importlib.metadata import distribution
assert sw.__file__.startswith({str(target)!r}), sw.__file__
ours = {{name: module.__file__ for name, module in sys.modules.items() if name.startswith("shardwright")}}
assert len(ours) > 100
assert all(file.startswith({str(target)!r}) for file in ours.values()), ours
(found,) = [d for d in [distribution("shardwright")] if str(d.locate_file("")).startswith({str(target)!r})]
x = sw.ones(2, 3, mesh=sw.init_device_mesh("cpu", (1,)))
print(sw.__version__, found.version, (x @ x.T).sum().item())
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [shardwright.__version__, shardwright.__version__, "12.0"]


def test_the_version_is_written_in_one_place() -> None:
    assert "version" in PROJECT["dynamic"]
    assert PYPROJECT["tool"]["hatch"]["version"]["path"] == "src/shardwright/__init__.py"
    text = (PACKAGE / "__init__.py").read_text("utf-8")
    assert re.findall(r'^__version__ = "(\d+\.\d+\.\d+)"$', text, re.MULTILINE) == [shardwright.__version__]
    assert "version:" not in (ROOT / "CITATION.cff").read_text("utf-8").replace("cff-version:", "")


def test_constraints_pin_every_requirement_but_torch() -> None:
    assert requirements() - pins().keys() == {"torch", "shardwright"}


def test_the_makefile_installs_with_the_constraints() -> None:
    text = (ROOT / "Makefile").read_text("utf-8")
    installs = re.findall(r"pip install.*", text)
    assert installs
    assert all("--constraint constraints.txt" in line for line in installs)


def test_continuous_integration_covers_the_pythons_and_torches_that_are_supported() -> None:
    listed = [found[1] for line in PROJECT["classifiers"] if (found := re.search(r":: (3\.\d+)$", line))]
    assert matrix("ci.yml")["python"] == listed
    assert PROJECT["requires-python"] == f">={listed[0]}"
    developed = re.search(r"^TORCH \?= torch==(\S+)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    (oldest,) = [line.removeprefix("torch>=") for line in PROJECT["dependencies"] if line.startswith("torch")]
    assert developed
    for name in ("ci.yml", "nightly.yml"):
        assert matrix(name)["torch"] == [f"{oldest}.0", developed[1]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_only_targets_that_exist_and_asks_for_few_rights(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text("utf-8"))
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    run = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert {found for line in run for found in re.findall(r"\bmake ([a-z-]+)", line)} <= targets
    assert workflow["permissions"] == {"contents": "read"}


def test_there_are_workflows_for_changes_nightly_runs_and_releases() -> None:
    assert [path.stem for path in WORKFLOWS] == ["ci", "nightly", "release"]


def test_the_citation_names_this_project_and_its_licence() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["license"] == PROJECT["license"]
    assert citation["repository-code"] == PROJECT["urls"]["Repository"]
