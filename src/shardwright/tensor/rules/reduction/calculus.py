"""Differences and integrals along a dimension, composed of its slices: neighbours exchange their edges."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.tensor.base.registry import composite

__all__: list[str] = []


def _ends(values: Any, dim: int) -> tuple[Any, Any]:
    """Return all but the last, and all but the first."""
    size = max(values.shape[dim] - 1, 0)
    return values.narrow(dim, 0, size), values.narrow(dim, values.shape[dim] - size, size)


def _is_dim(values: Any, dim: Any) -> bool:
    return isinstance(dim, int) and -values.ndim <= dim < values.ndim


@composite("diff")
def _diff(input: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Any:
    if not _is_dim(input, dim) or n < 0:
        return NotImplemented
    if n == 0:
        return input.clone()
    parts = [part for part in (prepend, input, append) if part is not None]
    if any(part.ndim != input.ndim or part.dtype != input.dtype for part in parts):
        return NotImplemented
    joined = torch.cat(parts, dim) if len(parts) > 1 else input
    for _ in range(min(n, joined.shape[dim])):
        before, after = _ends(joined, dim)
        joined = before.logical_xor(after) if joined.dtype == torch.bool else after - before
    return joined


def _distances(y: Any, x: Any, dim: int) -> Any:
    """Return the distances of the points, shaped to multiply values between them; None if torch raises the error."""
    if x.ndim == 1:
        if x.shape[0] != y.shape[dim]:
            return None
        return x.diff().reshape(-1, *[1] * (y.ndim - 1 - dim % y.ndim))
    if x.ndim > y.ndim:
        return None
    padded = x.reshape(*[1] * (y.ndim - x.ndim), *x.shape)
    return padded.diff(dim=dim) if padded.shape[dim] == y.shape[dim] else None


def _areas(y: Any, x: Any, dx: Any, dim: Any) -> Any:
    """Return the area below every interval between two points."""
    floats = all(v is None or v.is_floating_point() or v.is_complex() for v in (y, x))
    if not isinstance(y, torch.Tensor) or not floats or not _is_dim(y, dim) or y.shape[dim] < 2:
        return None
    distance = dx if dx is not None else 1.0
    if x is not None:
        distance = _distances(y, x, dim)
    if distance is None or isinstance(distance, complex):
        return None
    before, after = _ends(y, dim)
    return (before + after) * distance / 2


@composite("trapezoid", "trapz")
def _trapezoid(y: Any, x: Any = None, *, dx: Any = None, dim: Any = -1) -> Any:
    areas = _areas(y, x, dx, dim)
    return NotImplemented if areas is None else areas.sum(dim)


@composite("cumulative_trapezoid")
def _cumulative_trapezoid(y: Any, x: Any = None, *, dx: Any = None, dim: Any = -1) -> Any:
    areas = _areas(y, x, dx, dim)
    return NotImplemented if areas is None else areas.cumsum(dim)


@composite("gradient")
def _gradient(input: Any, *, spacing: Any = None, dim: Any = None, edge_order: int = 1) -> Any:
    dims = list(range(input.ndim)) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    if not all(_is_dim(input, d) and input.shape[d] > edge_order for d in dims) or edge_order not in (1, 2):
        return NotImplemented
    if not (input.is_floating_point() or input.is_complex()):
        return NotImplemented
    given = spacing if isinstance(spacing, list | tuple) else [1 if spacing is None else spacing] * len(dims)
    if len(given) != len(dims):
        return NotImplemented
    slopes = []
    for d, space in zip(dims, given, strict=True):
        has_points = isinstance(space, torch.Tensor) and space.ndim == 1
        if has_points and space.shape[0] != input.shape[d]:
            return NotImplemented
        slopes.append(_slope_at(input, d, space, edge_order) if has_points else _slope(input, d, space, edge_order))
    return tuple(slopes)


def _row(values: Any, dim: int, index: int) -> Any:
    return values.narrow(dim, index % values.shape[dim], 1)


def _slope(f: Any, dim: int, step: Any, edge_order: int) -> Any:
    """Gradient with equal spacing."""
    size = f.shape[dim]
    middle = (f.narrow(dim, 2, size - 2) - f.narrow(dim, 0, size - 2)) / step / 2 if size > 2 else None
    if edge_order == 1:
        first, last = _row(f, dim, 1) - _row(f, dim, 0), _row(f, dim, -1) - _row(f, dim, -2)
    else:
        first = _row(f, dim, 0) * -1.5 + _row(f, dim, 1) * 2 - _row(f, dim, 2) * 0.5
        last = _row(f, dim, -1) * 1.5 - _row(f, dim, -2) * 2 + _row(f, dim, -3) * 0.5
    return torch.cat([part for part in (first / step, middle, last / step) if part is not None], dim)


def _slope_at(f: Any, dim: int, points: Any, edge_order: int) -> Any:
    """Gradient with the given coordinates."""
    distances = points.diff().reshape(-1, *[1] * (f.ndim - 1 - dim % f.ndim))
    size = f.shape[dim]
    parts = []
    if size > 2:
        one, two = _ends(distances, 0)
        parts = [
            f.narrow(dim, 0, size - 2) * (-two / (one * (one + two)))
            + f.narrow(dim, 1, size - 2) * ((two - one) / (one * two))
            + f.narrow(dim, 2, size - 2) * (one / (two * (one + two)))
        ]
    if edge_order == 1:
        first = (_row(f, dim, 1) - _row(f, dim, 0)) / _row(distances, 0, 0)
        last = (_row(f, dim, -1) - _row(f, dim, -2)) / _row(distances, 0, -1)
    else:
        first = _edge(f, dim, (0, 1, 2), _row(distances, 0, 0), _row(distances, 0, 1))
        last = -_edge(f, dim, (-1, -2, -3), _row(distances, 0, -1), _row(distances, 0, -2))
    return torch.cat([first, *parts, last], dim)


def _edge(f: Any, dim: int, indices: tuple[int, int, int], one: Any, two: Any) -> Any:
    """Return the slope at the first of three points with distances `one` and `two`."""
    a, b, c = (_row(f, dim, index) for index in indices)
    both = one + two
    return a * (-(one + both) / (one * both)) + b * (both / (one * two)) - c * (one / (two * both))
