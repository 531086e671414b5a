"""`explain`: what a load on a mesh of ranks would read and hold, computed without the ranks and without the data."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from shardwright.checkpoint import LazyTensor, StoredRange
from shardwright.cli.opening import open_checkpoint
from shardwright.cli.progress import progress_bar
from shardwright.cli.report import Report, new_table
from shardwright.cli.selection import select_all
from shardwright.cli.text import plural, printable, size
from shardwright.errors import UsageError
from shardwright.layout import Layout, Mesh, Placement, Replicate, Shard

if TYPE_CHECKING:
    from rich.console import RenderableType
    from torch import Tensor

__all__ = ["LoadExplanation", "PlanRule", "explain_load", "parse_mesh", "parse_plan"]

_MAX_SHOWN = 16
_SHARDED = ("dp", "fsdp", "dp_shard", "shard")
"""Mesh dimensions over which tensors without a rule are sharded, along dimension 0."""


@dataclass(frozen=True)
class PlanRule:
    """How tensors whose names match a pattern are laid out: the tensor dimension that each mesh dimension shards."""

    pattern: str
    placements: dict[str, int | None]


@dataclass(frozen=True)
class RankLoad:
    """What one rank would hold, read from files by itself (whole blocks), and the files it would open."""

    rank: int
    held_bytes: int
    read_bytes: int
    files: int


@dataclass(frozen=True)
class HostLoad:
    """What the ranks of a host would read together: every block once."""

    host: int
    ranks: int
    read_bytes: int


@dataclass(frozen=True)
class LayoutRow:
    """A layout, and the tensors that would have it."""

    layout: str
    tensors: int
    nbytes: int
    example: str


@dataclass(frozen=True)
class LoadExplanation(Report):
    """What a load would read and hold."""

    path: str
    mesh: dict[str, int]
    tensors: int
    nbytes: int
    ranks: tuple[RankLoad, ...]
    hosts: tuple[HostLoad, ...]
    layouts: tuple[LayoutRow, ...]

    def render(self) -> Iterator[RenderableType]:
        """Yield the layouts, the ranks and the hosts, or the extremes if there are many."""
        shape = ", ".join(f"{name}={extent}" for name, extent in self.mesh.items())
        ranks = plural(len(self.ranks), "rank")
        yield f"{printable(self.path)}: {plural(self.tensors, 'tensor')}, {size(self.nbytes)}, on {ranks} ({shape})"
        yield ""
        layouts = new_table("LAYOUT", "TENSORS", "SIZE", "SUCH AS", right=("TENSORS", "SIZE"))
        for row in self.layouts:
            layouts.add_row(row.layout, str(row.tensors), size(row.nbytes), printable(row.example))
        yield layouts
        yield ""
        shown = self.ranks if len(self.ranks) <= _MAX_SHOWN else self.ranks[:_MAX_SHOWN]
        table = new_table("RANK", "HOLDS", "READS", "FILES", right=("RANK", "HOLDS", "READS", "FILES"))
        for rank in shown:
            table.add_row(str(rank.rank), size(rank.held_bytes), size(rank.read_bytes), str(rank.files))
        yield table
        if len(shown) < len(self.ranks):
            yield f"… and {len(self.ranks) - len(shown)} more ranks (--json has them all)"
        held = [rank.held_bytes for rank in self.ranks]
        yield f"a rank holds {size(min(held))} to {size(max(held))}"
        wanted, read = sum(held), sum(host.read_bytes for host in self.hosts)
        each = size(max(host.read_bytes for host in self.hosts))
        yield f"all ranks hold {size(wanted)} together; each block is read once on a host: {size(read)}, at most {each}"


def explain_load(
    path: str, mesh: Mesh, rules: Sequence[PlanRule] = (), *, only: Sequence[str] = (), ranks_per_host: int = 8
) -> LoadExplanation:
    """Return what a load of a checkpoint on a mesh would read and hold on every rank and host.

    The first rule that matches a name decides. Mesh dimensions that it does not name, and all of tensors without a
    rule, are those of fully sharded data parallelism: `dp`, `fsdp`, `dp_shard` and `shard` shard dimension 0, others
    replicate.
    """
    if ranks_per_host < 1:
        raise UsageError(f"--ranks-per-host must be at least 1, got {ranks_per_host}")
    held = [0] * mesh.size
    ranges: list[set[StoredRange]] = [set() for _ in range(mesh.size)]
    layouts: dict[str, list[LazyTensor[Tensor]]] = defaultdict(list)
    with open_checkpoint(path) as opened:
        stored = {opened[name].stored_name: opened[name] for name in select_all(opened, only)}
        _check_used(rules, stored)
        with progress_bar("planning", sum(tensor.nbytes for tensor in stored.values())) as advance:
            for name, tensor in stored.items():
                layout = _layout(name, tensor, mesh, rules)
                layouts[str(layout).partition("] ")[2]].append(tensor)
                for region, ranks in layout.regions():
                    found = tensor.stored_ranges(region)
                    for rank in ranks:
                        held[rank] += region.volume * tensor.dtype.itemsize
                        ranges[rank].update(found)
                advance(tensor.nbytes)
        return LoadExplanation(
            path=path,
            mesh=dict(zip(mesh.names or (), mesh.shape, strict=True)),
            tensors=len(stored),
            nbytes=sum(tensor.nbytes for tensor in stored.values()),
            ranks=tuple(
                RankLoad(rank, held[rank], union_size(ranges[rank]), len({each.file for each in ranges[rank]}))
                for rank in range(mesh.size)
            ),
            hosts=tuple(_hosts(ranges, ranks_per_host)),
            layouts=tuple(
                LayoutRow(text, len(tensors), sum(tensor.nbytes for tensor in tensors), tensors[0].stored_name)
                for text, tensors in layouts.items()
            ),
        )


def parse_mesh(text: str) -> Mesh:
    """Parse `dp=8,tp=4`.

    >>> parse_mesh("dp=8,tp=4").shape
    (8, 4)
    """
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name.strip() and extent.strip().isdecimal() and int(extent) for name, _, extent in pairs):
        raise UsageError(f"--mesh must be like dp=8,tp=4, got {text!r}")
    return Mesh([int(extent) for *_, extent in pairs], [name.strip() for name, *_ in pairs])


def parse_plan(texts: Sequence[str], mesh: Mesh) -> list[PlanRule]:
    """Parse rules like `*.wq.weight=tp:0` or `*.norm.weight=dp:R,tp:R`; a file has one on each line."""
    lines = []
    for text in texts:
        if os.path.isfile(text):
            with open(text, encoding="utf-8") as file:
                lines += [line.strip() for line in file if line.strip() and not line.lstrip().startswith("#")]
        else:
            lines.append(text)
    return [_rule(line, mesh) for line in lines]


def _rule(text: str, mesh: Mesh) -> PlanRule:
    pattern, equals, right = text.rpartition("=")
    placements: dict[str, int | None] = {}
    for part in right.split(","):
        name, colon, dim = (piece.strip() for piece in part.partition(":"))
        if not (pattern and equals and colon and (dim == "R" or dim.isdecimal())):
            raise UsageError(f"--plan must be like '*.wq.weight=tp:0' or '*.norm.weight=dp:R,tp:R', got {text!r}")
        if name not in (mesh.names or ()):
            raise UsageError(f"--plan {text!r}: the mesh has no dimension {name!r}, only {', '.join(mesh.names or ())}")
        placements[name] = None if dim == "R" else int(dim)
    return PlanRule(pattern.strip(), placements)


def _check_used(rules: Sequence[PlanRule], names: dict[str, LazyTensor[Tensor]]) -> None:
    for rule in rules:
        if not any(fnmatchcase(name, rule.pattern) for name in names):
            raise UsageError(f"--plan: no tensor matches {rule.pattern!r}")


def _layout(name: str, tensor: LazyTensor[Tensor], mesh: Mesh, rules: Sequence[PlanRule]) -> Layout:
    rule = next((rule.placements for rule in rules if fnmatchcase(name, rule.pattern)), {})
    placements: list[Placement] = []
    for axis in mesh.names or ():
        dim = rule.get(axis, 0 if axis in _SHARDED and tensor.ndim else None)
        placements.append(Replicate() if dim is None else Shard(dim))
    return Layout(mesh, placements, tensor.shape)


def _hosts(ranges: Sequence[set[StoredRange]], ranks_per_host: int) -> Iterator[HostLoad]:
    for host, first in enumerate(range(0, len(ranges), ranks_per_host)):
        together = ranges[first : first + ranks_per_host]
        yield HostLoad(host, len(together), union_size(set().union(*together)))


def union_size(ranges: set[StoredRange]) -> int:
    """Return the number of bytes that are in any of these ranges.

    >>> union_size({StoredRange("a", 0, 10), StoredRange("a", 5, 20), StoredRange("b", 0, 1)})
    21
    """
    total, file, end = 0, "", 0
    for part in sorted(ranges):
        if part.file != file:
            file, end = part.file, 0
        total += max(0, part.end - max(part.first, end))
        end = max(end, part.end)
    return total
