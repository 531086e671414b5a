"""`auto_plan`: make a plan from what a model states about itself, or from its structure."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from shardwright.parallel.plan.layers import matrix_of
from shardwright.parallel.plan.mesh_roles import mesh_roles
from shardwright.parallel.plan.patterns import Pattern
from shardwright.parallel.plan.plan import Plan
from shardwright.parallel.plan.structure import fans, head_size, repeated_blocks
from shardwright.parallel.plan.styles import ColwiseParallel, ParallelStyle, Replicated, RowwiseParallel

__all__ = ["auto_plan"]

# Names of parallel styles in the plans of `transformers` models. Activations stay global, so styles that only tell how
# local results are put together again need nothing here.
_COLUMNS = ("colwise", "colwise_gather_output", "colwise_rep", "local_colwise")
_ROWS = ("rowwise", "rowwise_split_input", "rowwise_rep", "local_rowwise", "embedding_rowwise")
_PACKED = ("packed_colwise", "packed_rowwise", "local_packed_rowwise")
_NO_PARAMETERS = ("all_reduce", "gather", "moe_tp_experts", "moe_identity_expert", "moe_topk", "isolated", "local")
_REPLICATED = ("replicated_with_grad_allreduce", "mla_kv_a_proj", "replicate", "sequence_parallel")


def auto_plan(model: nn.Module, mesh: Any) -> Plan:
    """Return the plan that `parallelize(model, mesh, "auto")` uses; print it, or change it with `plan | {...}`.

    A model of `transformers` states its plan (`model.tp_plan`). For others, repeated blocks are searched for linear
    layers that fan out and then in, which are sharded by columns and by rows; `Conv1D` and fused projections are known.
    Attention heads stay whole: if they do not divide by the ranks, some ranks have one more, and key and value heads
    are replicated if there are fewer than ranks. An embedding and an output layer of the same vocabulary are sharded
    over it. Everything else is replicated over `tp`.

    >>> import torch, shardwright as sw
    >>> block = lambda: torch.nn.ModuleDict({"up": torch.nn.Linear(4, 8), "down": torch.nn.Linear(8, 4)})
    >>> mesh = sw.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    >>> print(sw.auto_plan(torch.nn.ModuleList([block(), block()]), mesh))
    *.up    ColwiseParallel()
    *.down  RowwiseParallel()
    **      Replicated()
    """
    roles = mesh_roles(mesh, "auto_plan")
    if roles.tensor is None:
        return Plan({"**": Replicated()})
    modules = dict(model.named_modules(remove_duplicate=False))
    stated = getattr(model, "tp_plan", None)
    if isinstance(stated, Mapping) and stated:
        styles, groups = _stated(model, modules, stated)
    else:
        styles, groups = _found(model, modules)
    for group in groups:
        _keep_heads_whole(group, styles, modules, roles.size(roles.tensor))
    _agree_on_ties(styles, model)
    return Plan({**_collapsed(styles, modules, model), "**": Replicated()})


def _stated(
    model: nn.Module, modules: Mapping[str, nn.Module], stated: Mapping[str, Any]
) -> tuple[dict[str, ParallelStyle], list[list[str]]]:
    """Return the styles of modules and parameters that the model's own plan states, and the layers of each module."""
    names = [*modules, *(name for name, _ in model.named_parameters(remove_duplicate=False))]
    styles: dict[str, ParallelStyle] = {}
    groups: dict[str, list[str]] = {}
    for text, style in stated.items():
        if style in _NO_PARAMETERS:
            continue
        chosen: ParallelStyle
        if style in _COLUMNS:
            chosen = ColwiseParallel()
        elif style in _ROWS:
            chosen = RowwiseParallel()
        else:
            chosen = Replicated()
            if style not in _REPLICATED + _PACKED:
                warnings.warn(
                    f"the model's plan gives {text!r} the style {style!r}, which is not known here: it is replicated "
                    "over tp. Pass a plan with a style for it to shard it",
                    stacklevel=4,
                )
        pattern = Pattern(text)
        for name in names:
            layer = _layer_of(name, modules) if pattern.matches(name) else None
            if layer is not None:
                styles[layer] = chosen
                if layer in modules:
                    groups.setdefault(name.rpartition(".")[0], []).append(layer)
    return styles, list(groups.values())


def _layer_of(name: str, modules: Mapping[str, nn.Module]) -> str | None:
    """Return the layer that a stated name means: itself, or the largest one inside of a module that wraps it (LoRA)."""
    module = modules.get(name)
    if module is None or matrix_of(module) is not None or next(module.parameters(recurse=False), None) is not None:
        return name  # a parameter, a layer, or a norm
    inside = {
        inner: matrix.out_size * matrix.in_size
        for inner, each in modules.items()
        if inner.startswith(f"{name}.") and (matrix := matrix_of(each)) is not None
    }
    return max(inside, key=lambda inner: inside[inner], default=None)


def _found(model: nn.Module, modules: Mapping[str, nn.Module]) -> tuple[dict[str, ParallelStyle], list[list[str]]]:
    """Return the styles of linear layers in blocks and of the vocabulary's layers, and the layers of each fan."""
    styles: dict[str, ParallelStyle] = {}
    groups: list[list[str]] = []
    for name in repeated_blocks(model):
        for fan in fans(name, modules[name]):
            styles.update({column.name: ColwiseParallel() for column in fan.columns})
            styles[fan.row.name] = RowwiseParallel()
            groups.append([*(column.name for column in fan.columns), fan.row.name])
    matrices = {name: matrix for name, module in modules.items() if (matrix := matrix_of(module)) is not None}
    vocabularies = {matrix.in_size for matrix in matrices.values() if matrix.kind == "embedding"}
    heads = {
        name: matrix
        for name, matrix in matrices.items()
        if matrix.kind == "linear" and name not in styles and matrix.out_size in vocabularies
    }
    for name, matrix in matrices.items():
        if matrix.kind == "embedding" and any(head.out_size == matrix.in_size for head in heads.values()):
            styles[name] = RowwiseParallel()
    styles.update({name: ColwiseParallel() for name in heads})
    return styles, groups


def _keep_heads_whole(
    names: list[str], styles: dict[str, ParallelStyle], modules: Mapping[str, nn.Module], ranks: int
) -> None:
    """Make the projections of an attention begin their shards at heads.

    Query heads come in groups that share a key and value head: if every rank has such a head, groups stay whole.
    """
    size = next((size for name in names if (size := head_size(modules, name)) is not None), None)
    matrices = {name: matrix for name in names if (matrix := matrix_of(modules[name])) is not None}
    columns = {name: matrix.out_size for name, matrix in matrices.items() if isinstance(styles[name], ColwiseParallel)}
    rows = {name: matrix.in_size for name, matrix in matrices.items() if isinstance(styles[name], RowwiseParallel)}
    extents = {**columns, **rows}
    if size is None or not columns or any(extent % size for extent in extents.values()):
        return
    fewest, most = min(columns.values()), max((rows or columns).values())
    if most % fewest or max(columns.values()) > most:
        return  # a fused projection, whose parts the forward takes apart
    for name, extent in extents.items():
        multiple = size * (extent // fewest) if fewest // size >= ranks else size
        if extent // size < ranks:
            styles[name] = Replicated()
        else:
            styles[name] = (ColwiseParallel if name in columns else RowwiseParallel)(multiple=multiple)


def _agree_on_ties(styles: dict[str, ParallelStyle], model: nn.Module) -> None:
    """Replicate layers that share a parameter but would place it differently."""
    owners: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), set()).add(name.rpartition(".")[0])
    modules = dict(model.named_modules(remove_duplicate=False))
    for names in owners.values():
        dims = {_weight_dim(modules[name], styles.get(name)) for name in names}
        if len(dims) <= 1:
            continue
        decided = dims - {None}
        for name in names:
            if len(decided) > 1:
                styles.pop(name, None)
            elif name not in styles:
                # Tied to a layer that is sharded: shard it the same way.
                matrix, dim = matrix_of(modules[name]), next(iter(decided))
                if matrix is not None:
                    styles[name] = ColwiseParallel() if dim == matrix.outputs else RowwiseParallel()


def _weight_dim(module: nn.Module, style: ParallelStyle | None) -> int | None:
    """Return the dimension of the weight that a style shards."""
    matrix = matrix_of(module)
    if matrix is None or not isinstance(style, ColwiseParallel | RowwiseParallel):
        return None
    return matrix.outputs if isinstance(style, ColwiseParallel) else matrix.inputs


def _collapsed(
    styles: Mapping[str, ParallelStyle], modules: Mapping[str, nn.Module], model: nn.Module
) -> dict[str, ParallelStyle]:
    """Return patterns for the styles: one for all blocks where they have the same, else one for each name."""
    names = [*modules, *(name for name, _ in model.named_parameters(remove_duplicate=False))]
    found: dict[str, ParallelStyle] = {}
    for name, style in styles.items():
        if not any(Pattern(pattern).matches(name) for pattern in found):
            found[next(text for text in _generalized(name) if _all_have(style, text, styles, names))] = style
    return found


def _generalized(name: str) -> Iterator[str]:
    """Yield patterns for a name: with a `*` for all numbers in it, for the first one, and the name itself."""
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if re.fullmatch(r"\d+", part)]
    for chosen in (numbers, numbers[:1], []):
        yield ".".join("*" if index in chosen else part for index, part in enumerate(parts))


def _all_have(style: ParallelStyle, text: str, styles: Mapping[str, ParallelStyle], names: Iterable[str]) -> bool:
    pattern = Pattern(text)
    return all(styles.get(name) == style for name in names if pattern.matches(name))
