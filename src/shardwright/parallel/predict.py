"""`predict`: what a training step on a mesh would hold and communicate, computed without ranks and without data.

The model is parallelized and trained for two steps on meta tensors, as one rank of a simulated world. Everything that
decides on layouts and communication is the code that the ranks run, so the counts are theirs; those of the second step
are reported, which every later step repeats.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from shardwright import comm
from shardwright.errors import ArgumentTypeError, MeshError
from shardwright.layout import Layout, Mesh
from shardwright.parallel.batch import shard_batch
from shardwright.parallel.parallelize import parallelize
from shardwright.parallel.running import running_model
from shardwright.tensor import DTensor

__all__ = ["PredictedParameter", "PredictedUnit", "Prediction", "predict"]


@dataclass(frozen=True, slots=True)
class PredictedParameter:
    """A parameter on the predicted rank: its layout (None if it stays a plain tensor) and the bytes of its shard.

    >>> import torch, shardwright as sw
    >>> prediction = sw.predict(torch.nn.Linear(4, 8), {"dp": 2})
    >>> print(prediction.parameters[0].name, prediction.parameters[0].layout, prediction.parameters[0].nbytes)
    weight [8, 4] (dp: S(0)) 64
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout | None
    nbytes: int


@dataclass(frozen=True, slots=True)
class PredictedUnit:
    """A set of parameters that are gathered together, and the bytes of the gathered parameters.

    >>> import torch, shardwright as sw
    >>> sw.predict(torch.nn.Linear(4, 8), {"dp": 2}).units[0].gathered_bytes
    160
    """

    parameters: tuple[str, ...]
    gathered_bytes: int


@final
@dataclass(frozen=True, slots=True)
class Prediction:
    """What one rank holds and receives in a training step; `print` it for a table.

    `forward` and `backward` are the collectives in order; `traffic` adds them up by kind, as `comm.count` counts a real
    step. Without a batch they are empty.

    >>> import torch, shardwright as sw
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    >>> prediction = sw.predict(model, {"dp": 4}, batch=torch.ones(8, 4))
    >>> prediction.traffic.calls["all_gather"], prediction.traffic.calls["reduce_scatter"]
    (2, 2)
    """

    mesh: Mesh
    rank: int
    parameters: tuple[PredictedParameter, ...]
    units: tuple[PredictedUnit, ...]
    forward: tuple[comm.Transfer, ...]
    backward: tuple[comm.Transfer, ...]
    peak_gathered_bytes: int  # the most bytes of gathered parameters at a time

    @property
    def traffic(self) -> comm.Traffic:
        """The collectives of a step, and the bytes received, by kind."""
        total = comm.Traffic()
        for transfer in (*self.forward, *self.backward):
            total.add(transfer)
        return total

    @property
    def parameter_bytes(self) -> int:
        """The bytes of this rank's shards of the parameters; gradients take as many, and Adam's states twice that."""
        return sum(parameter.nbytes for parameter in self.parameters)

    def table(self) -> Table:
        """Return a rich table of the collectives of a step, by pass, kind and mesh dimensions."""
        table = Table(box=box.SIMPLE_HEAD)
        for name, justify in (("pass", "left"), ("collective", "left"), ("over", "left"), ("calls", "right")):
            table.add_column(name, justify=justify)  # type: ignore[arg-type]  # rich's own literals
        table.add_column("received", justify="right")
        for name, transfers in (("forward", self.forward), ("backward", self.backward)):
            groups: dict[tuple[str, str], list[int]] = {}
            for transfer in transfers:
                groups.setdefault((transfer.kind, self._over(transfer.ranks)), []).append(transfer.received)
            for (kind, over), received in groups.items():
                table.add_row(name, kind.replace("_", "-"), over, f"{len(received):,}", _size(sum(received)))
        return table

    def _over(self, ranks: tuple[int, ...]) -> str:
        """Return the names of the mesh dimensions along which ranks differ."""
        coordinates = [self.mesh.coordinate(rank) for rank in ranks]
        varying = [dim for dim in range(self.mesh.ndim) if len({coordinate[dim] for coordinate in coordinates}) > 1]
        return ", ".join(self.mesh.label(dim) for dim in varying)

    def __str__(self) -> str:
        count = sum(torch.Size(parameter.shape).numel() for parameter in self.parameters)
        lines = [
            f"{self.mesh!r}, rank {self.rank}: {count:,} parameters, {_size(self.parameter_bytes)} of them here",
            f"{len(self.units)} units, at most {_size(self.peak_gathered_bytes)} gathered at a time",
        ]
        if not (self.forward or self.backward):
            return "\n".join(lines)
        console = Console(width=100, force_terminal=False, no_color=True)
        with console.capture() as capture:
            console.print(self.table())
        text = "\n".join(line.rstrip() for line in capture.get().splitlines() if line.strip())
        return "\n".join([*lines, text, f"a step receives {_size(self.traffic.bytes)}"])


def predict(
    model: nn.Module,
    mesh: Any,
    plan: str | Mapping[str, object] = "auto",
    batch: Any = None,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    rank: int = 0,
    device: str = "cuda",
    **options: Any,
) -> Prediction:
    """Return what a training step of a model would hold and communicate on a mesh of any size, without its ranks.

    `mesh` maps the names of its dimensions to their sizes (`{"dp": 64, "tp": 8}`), or is a mesh. `plan` and `options`
    are those of `parallelize`. The model may be on any device, the meta device included, and is not changed. `batch` is
    a global batch, of which only shapes and dtypes matter: a tensor, or a mapping or sequence of arguments of the
    model. Without one there is no step, and so no communication.

    The step is a forward and a backward pass of the model's own `loss` (as models of `transformers` have it), of
    `loss(output)`, or of the sum of the output. Gradient clipping and the optimizer are not part of it. `rank` is the
    rank to look at: with uneven shards they differ. `device` is the type of device of the ranks; reductions on a CPU
    are counted as the two collectives of which they consist there.

    A model whose code reads values (`if mask.any():`) cannot be run without data; torch's error says where.

    >>> import torch, shardwright as sw
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    >>> plan = {"0": sw.ColwiseParallel(), "2": sw.RowwiseParallel()}
    >>> print(sw.predict(model, {"dp": 8, "tp": 4}, plan, torch.ones(128, 64)))
    Mesh(dp=8, tp=4), rank 0: 33,088 parameters, 4.1 KiB of them here
    2 units, at most 32.5 KiB gathered at a time
      pass       collective       over   calls   received
     ─────────────────────────────────────────────────────
      forward    all-gather       dp         2   28.4 KiB
      forward    all-reduce       tp         1    6.0 KiB
      backward   reduce-scatter   dp         2   28.4 KiB
    a step receives 62.9 KiB
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"predict: expected a module, got {type(model).__name__}")
    bound = _mesh(mesh)
    trained = _on_meta(model)
    with comm.simulate(bound.size, bound.ranks.index(rank) if rank in bound else rank, device=device):
        parallelize(trained, bound, plan, **options)
        running = running_model(trained)
        assert running is not None  # parallelize has installed it
        running.bind(dict(trained.named_parameters()))
        units = running.units
        forward: list[comm.Transfer] = []
        backward: list[comm.Transfer] = []
        if batch is not None:
            sharded = shard_batch(_map_tensors(batch), bound, check=False)
            for _ in range(2):
                forward, backward = _step(trained, sharded, loss)
        return Prediction(
            bound,
            rank,
            tuple(_parameter(name, parameter) for name, parameter in trained.named_parameters()),
            tuple(PredictedUnit(unit.names, unit.gathered_bytes) for unit in units),
            tuple(forward),
            tuple(backward),
            max((unit.schedule.peak_bytes for unit in units), default=0),
        )


def _mesh(mesh: Any) -> Mesh:
    if not isinstance(mesh, Mapping):
        return comm.bind(mesh)
    sizes = list(mesh.values())
    if not sizes or not all(type(size) is int and size > 0 for size in sizes):
        raise MeshError(f"predict: a mesh maps names to sizes of at least 1, got {dict(mesh)!r}")
    return Mesh(tuple(sizes), tuple(mesh))


def _on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose parameters and buffers are on the meta device; tied ones stay tied."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if isinstance(tensor, DTensor):
            raise ArgumentTypeError("predict: the model is distributed already: pass it as it was before parallelize")
        twin = tensor.detach().to("meta")
        if isinstance(tensor, nn.Parameter):
            twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = twin
    copied: nn.Module = copy.deepcopy(model, memo)
    return copied


def _map_tensors(value: Any) -> Any:
    """Return a batch with its tensors on the meta device."""
    if isinstance(value, Tensor):
        return value.detach().to("meta")
    if isinstance(value, Mapping):
        return {key: _map_tensors(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_tensors(item) for item in value]
    return value


def _step(
    model: nn.Module, batch: Any, loss: Callable[[Any], Tensor] | None
) -> tuple[list[comm.Transfer], list[comm.Transfer]]:
    forward: list[comm.Transfer] = []
    backward: list[comm.Transfer] = []
    with comm.listen(forward.append):
        if isinstance(batch, Mapping):
            output = model(**batch)
        else:
            output = model(*batch) if isinstance(batch, list) else model(batch)
        value = _loss(output, loss)
    with comm.listen(backward.append):
        value.backward()  # type: ignore[no-untyped-call]  # torch's is untyped
    model.zero_grad()
    return forward, backward


def _loss(output: Any, loss: Callable[[Any], Tensor] | None) -> Tensor:
    if loss is not None:
        return loss(output)
    value = getattr(output, "loss", None)
    if value is None:
        value = output[0] if isinstance(output, list | tuple) else output
    if not isinstance(value, Tensor):
        raise ArgumentTypeError(
            f"predict: the model returns {type(output).__name__}, which has no loss: pass loss=, a function of it"
        )
    return value if not value.ndim else value.sum()


def _parameter(name: str, parameter: nn.Parameter) -> PredictedParameter:
    layout = parameter.sharding if isinstance(parameter, DTensor) else None
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return PredictedParameter(name, tuple(parameter.shape), parameter.dtype, layout, local.nbytes)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
