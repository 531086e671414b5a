"""Run a case on ranks through the public API of a library, and compare it with torch on plain tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from shardwright import comm
from shardwright.layout import Layout, Mesh, Partial, Placement, Replicate
from shardwright.tensor import DTensor, manual_seed, trace
from shardwright.testing.operators.cases import Case
from shardwright.testing.operators.database import OpSample, samples_of
from shardwright.testing.operators.sample import tensors_in

__all__ = ["Ours", "Outcome", "System", "run_case"]

Kind = Literal["right", "wrong", "refused"]

# Their values are arbitrary: only shapes and dtypes are compared.
SHAPES_ONLY = frozenset(("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"))


class Outcome(NamedTuple):
    """The outcome of a case on a rank.

    >>> Outcome("refused", "InPlaceError: ...").kind
    'refused'
    """

    kind: Kind
    text: str = ""
    fell_back: bool = False


class System(Protocol):
    """The interface of a library of distributed tensors that cases need.

    >>> system: System = Ours()
    >>> system.reproducible_random
    True
    """

    reproducible_random: bool  # True if random numbers do not depend on the layout

    def begin(self, mesh: tuple[int, ...]) -> Any:
        """Return a mesh."""

    def distribute(self, local: Tensor, full: Tensor, mesh: Any, placements: Sequence[Placement]) -> Tensor:
        """Return a distributed tensor with this rank's part `local`; `full` is the global tensor."""

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the global tensor; plain tensors are returned unchanged."""

    def watch(self) -> AbstractContextManager[Callable[[], bool]]:
        """Context whose value tells whether an operator had to be computed on unsharded tensors."""


class Ours:
    """shardwright.

    >>> Ours().begin((1,)).shape
    (1,)
    """

    reproducible_random = True

    def begin(self, mesh: tuple[int, ...]) -> Any:
        """Return a mesh of all ranks."""
        manual_seed(0)
        return _mesh_of(mesh)

    def distribute(self, local: Tensor, full: Tensor, mesh: Any, placements: Sequence[Placement]) -> Tensor:
        """Tag the local part."""
        tensor: Tensor = DTensor.from_local(local, mesh, list(placements), shape=tuple(full.shape))
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the full tensor."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    @contextmanager
    def watch(self) -> Iterator[Callable[[], bool]]:
        """Use the trace."""
        with trace() as traced:
            yield lambda: any(operation.fell_back for operation in traced.operations)


@lru_cache(maxsize=8)  # a mesh has process groups with threads: one per world
def _mesh_of(shape: tuple[int, ...]) -> Any:
    return comm.init_device_mesh("cpu", shape)


comm.on_forget(_mesh_of.cache_clear)


def run_case(system: System, case: Case, gradients: bool = True) -> Outcome:
    """Run a case on this rank and return its outcome. Collective.

    >>> run_case(Ours(), Case("mul", 0, (1,), ((Replicate(),), (Replicate(),)))).kind
    'right'
    """
    sample = samples_of(case.operator)[case.sample]
    full = [tensor.detach() for tensor in sample.tensors]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected, expected_gradients = _reference(sample, full, gradients, seed=1)
            is_drawn = any(  # two draws may coincide
                _difference(_reference(sample, full, False, seed)[0], expected, False, "") is not None
                for seed in range(2, 6)
            )
        except Exception as error:  # noqa: BLE001  # torch itself rejects some samples
            return Outcome("right", f"torch refuses it: {type(error).__name__}")
        fell_back = False
        mesh = system.begin(case.mesh)
        shapes_only = case.operator in SHAPES_ONLY or (is_drawn and not system.reproducible_random)
        try:
            if is_drawn and not shapes_only:  # random numbers must equal those of plain tensors
                replicated = case._replace(placements=tuple((Replicate(),) * len(case.mesh) for _ in case.placements))
                expected, expected_gradients = _distributed(system, sample, full, mesh, replicated, gradients)
                system.begin(case.mesh)
            with system.watch() as fell:
                result, gradients_here = _distributed(system, sample, full, mesh, case, gradients)
            fell_back = fell()
        except Exception as error:  # noqa: BLE001  # any error is an outcome
            return Outcome("refused", f"{type(error).__name__}: {str(error)[:500]}")
    fault = _difference(result, expected, shapes_only, "result")
    if fault is None and expected_gradients is not None and not shapes_only:
        fault = _difference(gradients_here, expected_gradients, False, "gradient")
    return Outcome("right" if fault is None else "wrong", fault or "", fell_back)


def _reference(sample: OpSample, full: Sequence[Tensor], gradients: bool, seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    leaves = _leaves(sample, [tensor.clone() for tensor in full])
    result = _call(sample, leaves)
    result_gradients = _gradients(sample, result, leaves, lambda weights: weights) if gradients else None
    return _detached(result), result_gradients


def _distributed(
    system: System, sample: OpSample, full: Sequence[Tensor], mesh: Any, case: Case, gradients: bool
) -> tuple[Any, Any]:
    parts = [
        local_part(tensor, case.mesh, placements) for tensor, placements in zip(full, case.placements, strict=True)
    ]
    leaves = _leaves(
        sample,
        [
            system.distribute(part, tensor, mesh, placements)
            for part, tensor, placements in zip(parts, full, case.placements, strict=True)
        ],
    )
    result = _call(sample, leaves)
    result_gradients = None
    if gradients:

        def spread(weights: Tensor) -> Tensor:
            return system.distribute(weights, weights, mesh, [Replicate()] * len(case.mesh))

        result_gradients = _gradients(sample, result, leaves, spread)
        if result_gradients is not None:
            result_gradients = [None if gradient is None else system.gather(gradient) for gradient in result_gradients]
    return _gathered(system, result), result_gradients


def local_part(full: Tensor, mesh: tuple[int, ...], placements: Sequence[Placement]) -> Tensor:
    """Return this rank's part of a tensor; partial values differ between ranks and sum up along each mesh dimension."""
    layout = Layout(Mesh(mesh), list(placements), tuple(full.shape))
    rank = comm.rank()
    generator = torch.Generator().manual_seed(full.numel())
    at = layout.mesh.coordinate(rank)
    value = full
    for dim, (placement, size) in enumerate(zip(placements, mesh, strict=True)):
        if isinstance(placement, Partial):
            # Integers, so that integral values stay exact when they are summed.
            others = [torch.randint(-9, 10, full.shape, generator=generator).to(full.dtype) for _ in range(size - 1)]
            value = others[at[dim]] if at[dim] < size - 1 else value - sum(others, torch.zeros_like(full))
    return value[layout.region(rank).slices()].clone() if full.ndim else value.clone()


def _leaves(sample: OpSample, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [
        tensor.requires_grad_(original.requires_grad) if original.requires_grad else tensor
        for tensor, original in zip(tensors, sample.tensors, strict=True)
    ]


def _call(sample: OpSample, leaves: Sequence[Tensor]) -> Any:
    remaining = iter([leaf.clone() if leaf.requires_grad else leaf for leaf in leaves])

    def visit(value: Any) -> Any:
        if isinstance(value, Tensor):
            return next(remaining)
        return type(value)(visit(item) for item in value) if type(value) in (list, tuple) else value

    args = [visit(value) for value in sample.args]
    return sample.func(*args, **{key: visit(value) for key, value in sample.kwargs.items()})


def _gradients(sample: OpSample, result: Any, leaves: Sequence[Tensor], distribute: Any) -> list[Tensor | None] | None:
    """Return the gradients of a weighted sum of all results; None for inputs that do not require grad."""
    inputs = [leaf for leaf in leaves if leaf.requires_grad]
    outs = [out for out in tensors_in((sample.differentiable(result),)) if out.requires_grad]
    if not inputs:
        return None
    if not outs:
        return [None] * len(inputs)
    generator = torch.Generator().manual_seed(7)
    loss: Any = 0
    for out in outs:
        weights = torch.randn(tuple(out.shape), dtype=out.dtype, generator=generator)
        product = out * distribute(weights)
        loss = loss + (torch.real(product).sum() if product.is_complex() else product.sum())
    return list(torch.autograd.grad(loss, inputs, allow_unused=True))


def _detached(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.detach()
    return [_detached(item) for item in result] if isinstance(result, list | tuple) else result


def _gathered(system: System, result: Any) -> Any:
    if isinstance(result, Tensor):
        return system.gather(result.detach()).detach()
    return [_gathered(system, item) for item in result] if isinstance(result, list | tuple) else result


def _difference(actual: Any, expected: Any, shapes_only: bool, what: str) -> str | None:
    """Describe the difference, or return None."""
    if isinstance(expected, Tensor):
        if actual is None and not bool((expected != 0).any()):
            return None  # no gradient is equivalent to zeros
        if not isinstance(actual, Tensor):
            return f"{what}: {type(actual).__name__} instead of a tensor"
        if actual.shape != expected.shape or actual.dtype != expected.dtype:
            return f"{what}: {actual.dtype} {list(actual.shape)} instead of {expected.dtype} {list(expected.shape)}"
        if shapes_only or expected.layout != torch.strided:
            return None
        return _distance(actual.resolve_conj().resolve_neg(), expected.resolve_conj().resolve_neg(), what)
    if isinstance(expected, list):
        if not isinstance(actual, list) or len(actual) != len(expected):
            return f"{what}: {type(actual).__name__} instead of {len(expected)} values"
        for number, (value, expected_value) in enumerate(zip(actual, expected, strict=True)):
            fault = _difference(value, expected_value, shapes_only, f"{what} {number}")
            if fault is not None:
                return fault
        return None
    if expected is None or shapes_only:
        return None if actual is None or shapes_only else _nonzero(actual, what)
    is_equal = actual == expected or (isinstance(expected, float) and abs(actual - expected) <= 1e-7 * abs(expected))
    return None if is_equal or expected != expected else f"{what}: {actual!r} instead of {expected!r}"


def _nonzero(actual: Any, what: str) -> str | None:
    """Accept a gradient of zeros where torch has none."""
    is_zero = isinstance(actual, Tensor) and not bool((actual != 0).any())
    return None if is_zero else f"{what}: {actual!r} instead of None"


def _distance(actual: Tensor, expected: Tensor, what: str) -> str | None:
    if not (expected.dtype.is_floating_point or expected.dtype.is_complex):
        return None if torch.equal(actual, expected) else f"{what}: {_where(actual, expected, actual != expected)}"
    if expected.dtype.itemsize == 1:
        actual, expected = actual.float(), expected.float()
    tolerance = {8: 1e-7, 16: 1e-7, 4: 1e-3}.get(expected.dtype.itemsize, 1e-2)
    finite = expected[torch.isfinite(expected)]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    close = torch.isclose(actual, expected, rtol=tolerance, atol=tolerance * max(scale, 1e-3), equal_nan=True)
    return None if bool(close.all()) else f"{what}: {_where(actual, expected, ~close)}"


def _where(actual: Tensor, expected: Tensor, mask: Tensor) -> str:
    at = mask.nonzero()[0].tolist()
    return (
        f"{actual[tuple(at)].item()} instead of {expected[tuple(at)].item()} at {at}, "
        f"{int(mask.sum())} of {mask.numel()} differ"
    )
