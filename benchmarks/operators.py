"""Every operator of torch's database on 4 ranks: shardwright beside torch.distributed.tensor.

    python benchmarks/operators.py [--cases 8] [--mesh 4] [--limit 15] [--op NAME ...] [--json FILE]

Both get the same operators, samples, placements and ranks, values and gradients (`--no-gradients` for values alone),
and the same time limit for an operator; one that exceeds it, or of which a rank died, is tried once more with twice the
time, and then hung. `right` is an operator all of whose
cases gave what torch gives on whole tensors; `some` gave that for some and refused others; `wrong` gave something else
without an error at least once.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed.tensor as dt
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from shardwright.layout import Partial, Placement, Shard
from shardwright.testing.operators import Ours, System, entries
from shardwright.testing.operators.survey import Surveyed, survey

VERDICTS = ("right", "some", "refused", "wrong", "hung", "none")


class Theirs:
    """torch.distributed.tensor."""

    reproducible_random = False
    meshes: ClassVar[dict[Any, Any]] = {}

    def begin(self, mesh: tuple[int, ...]) -> Any:
        """One mesh for each world: it has groups of its own, with threads."""
        key = (mesh, torch.distributed.group.WORLD)
        if key not in self.meshes:
            self.meshes.clear()
            self.meshes[key] = init_device_mesh("cpu", mesh)
        return self.meshes[key]

    def distribute(self, local: Tensor, full: Tensor, mesh: Any, placements: Sequence[Placement]) -> Tensor:
        theirs = [_theirs(placement) for placement in placements]
        return dt.DTensor.from_local(
            local, mesh, theirs, run_check=False, shape=full.shape, stride=full.contiguous().stride()
        )

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, dt.DTensor) else tensor

    @contextmanager
    def watch(self) -> Iterator[Callable[[], bool]]:
        yield lambda: False


def _theirs(placement: Placement) -> dt.Placement:
    if isinstance(placement, Shard):
        return dt.Shard(placement.dim)
    return dt.Partial(placement.op) if isinstance(placement, Partial) else dt.Replicate()


def measure(
    name: str, system: Callable[[], System], operators: Sequence[str], given: argparse.Namespace
) -> list[Surveyed]:
    mesh = tuple(int(size) for size in given.mesh.split("x"))

    def run(names: Sequence[str], limit: float, what: str) -> list[Surveyed]:
        found = survey(
            names,
            mesh,
            system=system,
            least=given.cases,
            most=given.cases,
            timeout=limit,
            gradients=not given.no_gradients,
        )
        return list(track(found, description=what, total=len(names), console=Console(stderr=True), transient=True))

    first = {one.operator: one for one in run(operators, given.limit, name)}
    hung = [one.operator for one in first.values() if one.hung]
    second = {one.operator: one for one in run(hung, 2 * given.limit, f"{name}, again")}
    return list({**first, **second}.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=8)
    parser.add_argument("--mesh", default="4")
    parser.add_argument("--limit", type=float, default=15.0, help="seconds an operator has")
    parser.add_argument("--op", action="append")
    parser.add_argument("--no-gradients", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    operators = given.op or list(dict.fromkeys(entry.name for entry in entries()))
    results: dict[str, Any] = {}
    print(f"{len(operators)} operators, {given.cases} cases each, mesh {given.mesh}, torch {torch.__version__}")
    for name, system in (("shardwright", Ours), ("torch.distributed.tensor", Theirs)):
        found = measure(name, system, operators, given)
        counts = Counter(one.verdict for one in found)
        cases = Counter(outcome.kind for one in found for _, outcome in one.outcomes)
        results[name] = {
            "operators": {verdict: counts[verdict] for verdict in VERDICTS},
            "cases": dict(cases),
            **{verdict: [one.operator for one in found if one.verdict == verdict] for verdict in VERDICTS[1:]},
        }
        words = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
        print(f"{name}: {words}; cases: {cases['right']} right, {cases['refused']} refused, {cases['wrong']} wrong")
        for verdict in ("wrong", "hung"):
            listed = [one.operator for one in found if one.verdict == verdict]
            if listed:
                print(f"  {verdict}: {', '.join(listed)}")
        if given.json:  # after each of the two: either takes minutes
            about = {"date": str(date.today()), "torch": torch.__version__, "python": platform.python_version()}
            given.json.write_text(json.dumps({**about, **vars(given), "json": None, **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
