"""Find the structure of a model: repeated blocks, and linear layers that fan out and then in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from torch import nn

from shardwright.parallel.plan.layers import Matrix, matrix_of

__all__ = ["Fan", "Linear", "fans", "head_size", "repeated_blocks"]

# The attribute in which an attention module keeps the size of a head, in torch's and in transformers' models.
_HEAD_SIZES = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size", "dim_per_head", "d_head", "d_kv")


class Linear(NamedTuple):
    """A linear layer of a model."""

    name: str
    matrix: Matrix


class Fan(NamedTuple):
    """Linear layers that read the same activation, and the one that brings their results together.

    The first can be sharded by columns and the last by rows, with one all-reduce for all of them.
    """

    columns: tuple[Linear, ...]
    row: Linear


def repeated_blocks(model: nn.Module) -> list[str]:
    """Return the names of the outermost repeated blocks: children of a list or sequence that have one class.

    >>> repeated_blocks(nn.Sequential(nn.Embedding(4, 2), nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])))
    ['1.0', '1.1']
    """
    found: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict) or _inside(name, found):
            continue
        children = [
            (key, child) for key, child in module.named_children() if next(child.parameters(), None) is not None
        ]
        kinds = Counter(type(child) for _, child in children)
        found += [f"{name}.{key}" if name else key for key, child in children if kinds[type(child)] > 1]
    return found


def _inside(name: str, blocks: Iterable[str]) -> bool:
    return any(name == block or name.startswith(f"{block}.") for block in blocks)


def fans(name: str, block: nn.Module) -> Iterator[Fan]:
    """Yield the fans of a block, judged by the sizes of linear layers, in the order in which they are registered.

    The last linear layer of a part of the block (its attention, its MLP) brings the others together if it gives the
    width that they take. Two layers in parts of their own are a fan if one takes what the other gives.
    """
    parts = list(_parts(name, block))
    width = next((linear.matrix.in_size for linears in parts for linear in linears), None)
    waiting: tuple[Linear, ...] = ()
    for linears in parts:
        *columns, row = linears
        if (
            not columns
            and waiting
            and row.matrix.in_size == waiting[-1].matrix.out_size
            and row.matrix.out_size == width
        ):
            yield Fan(waiting, row)
            waiting = ()
            continue
        waiting = ()
        if not columns:
            waiting = (row,) if row.matrix.in_size == width != row.matrix.out_size else ()
        elif row.matrix.out_size == width and _meet(columns, row, width):
            yield Fan(tuple(columns), row)


def _parts(name: str, block: nn.Module) -> Iterator[list[Linear]]:
    """Yield the linear layers of each child of a block; lists of children are looked into."""
    for key, child in block.named_children():
        path = f"{name}.{key}" if name else key
        if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            yield from _parts(path, child)
            continue
        linears = []
        for inner, module in child.named_modules():
            matrix = matrix_of(module)
            if matrix is not None and matrix.kind == "linear":
                linears.append(Linear(f"{path}.{inner}" if inner else path, matrix))
        if linears:
            yield linears


def _meet(columns: list[Linear], row: Linear, width: int | None) -> bool:
    """Return whether all columns read the width, and the row takes what one of them gives, or a part of a fused one."""
    reads = all(column.matrix.in_size == width for column in columns)
    return reads and any(column.matrix.out_size % row.matrix.in_size == 0 for column in columns)


def head_size(modules: Mapping[str, nn.Module], name: str) -> int | None:
    """Return the size of an attention head, as the module that holds this linear layer, or one around it, states it."""
    for _ in range(2):
        name = name.rpartition(".")[0]
        for attribute in _HEAD_SIZES:
            value = getattr(modules[name], attribute, None)
            if type(value) is int and value > 0:
                return value
    return None
