"""`merge`: the weighted average of checkpoints, or a LoRA adapter added to its base, as a new checkpoint."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardwright import checkpoint
from shardwright.checkpoint import Checkpoint, LazyTensor
from shardwright.cli.blocks import boxes, read_box
from shardwright.cli.opening import open_checkpoint
from shardwright.cli.progress import progress_bar, progress_callback
from shardwright.cli.report import Report
from shardwright.cli.scratch import check_output, new_checkpoint, scratch_tensors, with_tensors
from shardwright.cli.text import plural, printable, shape_text, size
from shardwright.errors import CorruptionError, UsageError
from shardwright.layout import Region
from shardwright.listing import join_first

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["MergeReport", "add_lora", "average"]

_BLOCK = 4 << 20
_MAX_LISTED = 5
_PREFIX = "base_model.model."

Fill = Callable[[LazyTensor[Tensor], Region], Tensor]
"""Returns the merged values of a region of a tensor."""


@dataclass(frozen=True)
class MergeReport(Report):
    """A checkpoint that was merged."""

    output: str
    inputs: tuple[str, ...]
    weights: tuple[float, ...]
    tensors: int
    changed: int
    nbytes: int

    def render(self) -> Iterator[RenderableType]:
        """Yield what was written."""
        merged = f"{plural(self.tensors, 'tensor')}, {size(self.nbytes)}, of which {self.changed} were merged"
        yield f"wrote {printable(self.output)}: {merged}"


def average(paths: Sequence[str], output: str, weights: Sequence[float] = ()) -> MergeReport:
    """Write the average of checkpoints. Weights are divided by their sum; without any, all count the same.

    Names, shapes and dtypes must be those of the first. Floating-point tensors are averaged in float64; others must be
    equal. Plain values are those of the first.
    """
    if len(paths) < 2:
        raise UsageError("merge needs at least two checkpoints, or one and --lora")
    shares = _shares(weights or [1.0] * len(paths), len(paths))
    check_output(output)
    with ExitStack() as stack:
        opened = [stack.enter_context(_open_verified(path)) for path in paths]
        for path, other in zip(paths[1:], opened[1:], strict=True):
            _check_same(paths[0], opened[0], path, other)

        def fill(tensor: LazyTensor[Tensor], box: Region) -> Tensor:
            blocks = [read_box(each[tensor.name], box) for each in opened]
            if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
                wide = torch.complex128 if tensor.dtype.is_complex else torch.float64
                total = torch.zeros(box.size, dtype=wide)
                for share, block in zip(shares, blocks, strict=True):
                    total += share * block.to(wide)
                return total.to(tensor.dtype)
            for path, block in zip(paths[1:], blocks[1:], strict=True):
                if not torch.equal(block, blocks[0]):
                    raise UsageError(
                        f"{tensor.name!r} is {_dtype(tensor)}, which cannot be averaged, and differs between "
                        f"{paths[0]} and {path}"
                    )
            return blocks[0]

        changed = {tensor.stored_name for tensor in opened[0].values()}
        return _write(opened[0], output, fill, changed, tuple(paths), tuple(shares))


def add_lora(base: str, adapter: str, output: str, *, alpha: float | None = None) -> MergeReport:
    """Write a base checkpoint with a LoRA adapter added: W + B @ A * alpha / r, computed in float32 at least.

    The adapter has the names of PEFT: `NAME.lora_A.weight` of shape [r, in] and `NAME.lora_B.weight` of shape [out, r]
    belong to `NAME.weight` of the base, after the prefix `base_model.model.`. Alpha is that of `adapter_config.json`
    beside the adapter, unless it is given; with `use_rslora`, it is divided by the square root of r.
    """
    check_output(output)
    with _open_verified(base) as opened, _open_verified(adapter) as parts:
        config = _config(adapter)
        updates = _updates(opened, parts, config, alpha)

        def fill(tensor: LazyTensor[Tensor], box: Region) -> Tensor:
            block = read_box(tensor, box)
            update = updates.get(tensor.stored_name)
            if update is None:
                return block
            wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
            rows, columns = box.slices()
            delta = update.b[rows].to(wide) @ update.a[:, columns].to(wide)
            return (block.to(wide) + delta * update.scale).to(tensor.dtype)

        return _write(opened, output, fill, set(updates), (base, adapter), (1.0, 1.0))


@dataclass(frozen=True)
class _Update:
    """What is added to a weight: `b @ a * scale`."""

    a: Tensor
    b: Tensor
    scale: float


def _write(
    opened: Checkpoint,
    output: str,
    fill: Fill,
    changed: set[str],
    inputs: tuple[str, ...],
    weights: tuple[float, ...],
) -> MergeReport:
    """Fill tensors of the shapes and dtypes of a checkpoint, box by box, and save them with its plain values."""
    stored = {opened[name].stored_name: opened[name] for name in opened}
    nbytes = sum(tensor.nbytes for tensor in stored.values())
    with new_checkpoint(output) as folder:
        tensors = scratch_tensors(folder, {name: (tuple(t.shape), t.dtype) for name, t in stored.items()})
        with progress_bar("merging", nbytes) as advance:
            for name, tensor in stored.items():
                for box in boxes(Region.whole(tensor.shape), tensor.dtype.itemsize, _BLOCK):
                    tensors[name][box.slices()] = fill(tensor, box)
                    advance(box.volume * tensor.dtype.itemsize)
        checkpoint.save(with_tensors(opened.tree(), tensors), os.path.join(folder, "result"))
    return MergeReport(output, inputs, weights, len(stored), len(changed), nbytes)


def _open_verified(path: str) -> Checkpoint:
    """Open a checkpoint; one of another format is verified first, as its checksums are not those of small blocks."""
    opened = open_checkpoint(path)
    if opened.format == "shardwright":
        return opened
    with progress_callback(f"verifying {printable(path)}") as progress:
        report = checkpoint.verify(path, progress)
    if not report:
        opened.close()
        raise CorruptionError(f"{path} is damaged: {join_first(report.corruptions, _MAX_LISTED, '; ')}")
    return opened


def _shares(weights: Sequence[float], number: int) -> list[float]:
    if len(weights) != number:
        raise UsageError(f"{plural(number, 'checkpoint')} but {plural(len(weights), 'weight')}: give one for each")
    total = math.fsum(weights)
    if not all(map(math.isfinite, weights)) or not total:
        raise UsageError(f"weights must be finite and have a sum other than 0, got {', '.join(map(str, weights))}")
    return [weight / total for weight in weights]


def _check_same(first_path: str, first: Checkpoint, path: str, other: Checkpoint) -> None:
    problems = [f"{name!r} is only in {first_path}" for name in first if name not in other]
    problems += [f"{name!r} is only in {path}" for name in other if name not in first]
    for name in first:
        if name in other and (first[name].shape, first[name].dtype) != (other[name].shape, other[name].dtype):
            kinds = [f"{_dtype(each[name])} {shape_text(each[name].shape)}" for each in (first, other)]
            problems.append(f"{name!r} is {kinds[0]} in {first_path}, but {kinds[1]} in {path}")
    if problems:
        raise UsageError(f"the checkpoints cannot be averaged: {join_first(problems, _MAX_LISTED, '; ')}")


def _config(adapter: str) -> Mapping[str, object]:
    folder = adapter if os.path.isdir(adapter) else os.path.dirname(os.path.abspath(adapter))
    path = os.path.join(folder, "adapter_config.json")
    if not os.path.exists(path):
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except ValueError as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise UsageError(f"{path} must hold a JSON object")
    for unsupported in ("use_dora", "fan_in_fan_out", "alpha_pattern", "rank_pattern"):
        if config.get(unsupported):
            raise UsageError(f"{path}: an adapter with {unsupported} cannot be merged by this command")
    return config


def _updates(
    base: Checkpoint, adapter: Checkpoint, config: Mapping[str, object], alpha: float | None
) -> dict[str, _Update]:
    """Return the updates by the stored names of the weights of the base; raise if anything does not fit."""
    pairs: dict[str, dict[str, LazyTensor[Tensor]]] = {}
    others = []
    for name in adapter:
        module, _, rest = name.removeprefix(_PREFIX).partition(".lora_")
        if rest in ("A.weight", "B.weight", "A.default.weight", "B.default.weight"):
            pairs.setdefault(module, {})[rest[0]] = adapter[name]
        else:
            others.append(name)
    if others or not pairs:
        shown = join_first([repr(name) for name in others], _MAX_LISTED) or "nothing"
        raise UsageError(
            f"a LoRA adapter has tensors NAME.lora_A.weight and NAME.lora_B.weight, but this one has {shown}"
        )
    given = config.get("lora_alpha") if alpha is None else alpha
    if not isinstance(given, int | float) or not math.isfinite(given):
        raise UsageError("the adapter has no adapter_config.json with lora_alpha: pass --alpha")
    updates = {}
    for module, pair in pairs.items():
        name = f"{module}.weight"
        if name not in base or pair.keys() != {"A", "B"}:
            missing = f"the base has no {name!r}" if name not in base else "its lora_A or lora_B is missing"
            raise UsageError(f"{module}: {missing}")
        weight, a, b = base[name], pair["A"], pair["B"]
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or tuple(weight.shape) != (b.shape[0], a.shape[1]):
            shapes = ", ".join(shape_text(each.shape) for each in (weight, a, b))
            raise UsageError(f"{module}: weight, lora_A and lora_B have shapes {shapes}, which do not fit together")
        if not weight.dtype.is_floating_point:
            raise UsageError(f"{name!r} is {_dtype(weight)}: an update can only be added to floating-point numbers")
        rank = a.shape[0]
        scale = given / (math.sqrt(rank) if config.get("use_rslora") else rank)
        updates[weight.stored_name] = _Update(a.tensor(), b.tensor(), scale)
    return updates


def _dtype(tensor: LazyTensor[Tensor]) -> str:
    return str(tensor.dtype).removeprefix("torch.")
