"""Random operators: every element depends on seed, offset and global index, never on the layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.layout import Region
from shardwright.tensor.base.gradient_types import REPLICATE, without_entered
from shardwright.tensor.base.registry import composite, rule
from shardwright.tensor.base.strategy import Local, LocalContext, MeshStrategy, Operand, Strategies, index_strategies
from shardwright.tensor.random import (
    fill_bernoulli,
    fill_cauchy,
    fill_exponential,
    fill_geometric,
    fill_integers,
    fill_log_normal,
    fill_normal,
    fill_uniform,
)
from shardwright.tensor.random.local import fill_local, refuse_generator
from shardwright.tensor.rules.elementwise.overwrite import as_partial_value, overwrite_strategies
from shardwright.tensor.rules.elementwise.pointwise import broadcast_labels

__all__ = ["IN_PLACE", "Draw"]

Fill = Callable[..., Tensor]


def _integer_bounds(dtype: torch.dtype, low: int = 0, high: int | None = None) -> tuple[int, int]:
    """Return the bounds of `random_`; without an upper bound, all integers from 0 that the dtype represents exactly."""
    if high is not None:
        return int(low), int(high)
    if dtype is torch.bool:
        return int(low), 2
    if dtype.is_floating_point:
        return int(low), round(2 / torch.finfo(dtype).eps) + 1
    return int(low), torch.iinfo(dtype).max + 1


def _uninitialised(like: Any) -> Any:
    """Return an uninitialised tensor with this layout; replicated where it is partial."""
    return torch.ones_like(like) if like._layout.is_partial else torch.empty_like(like)


class Draw(NamedTuple):
    """An operator that overwrites a tensor with random numbers; `spellings` maps other names of its parameters."""

    name: str
    fill: Fill
    parameters: tuple[str, ...]
    spellings: dict[str, str]

    def read(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the tensor and the parameters by the names that `fill` uses.

        torch's methods pass the tensor first; the functions of `nn.init` pass everything by keyword.
        """
        given = dict(kwargs)
        target, *values = (given.pop("tensor"), *args) if "tensor" in given else args
        refuse_generator(f"{self.name}_", given.pop("generator", None))
        parameters = dict(zip(self.parameters, values, strict=False))
        parameters |= {self.spellings.get(key, key): value for key, value in given.items()}
        return target, parameters


def _register_in_place(draw: Draw) -> None:
    """Register an operator that overwrites a tensor with random numbers."""
    name, fill, read = draw.name, draw.fill, draw.read

    def find_strategies(*args: Any, **kwargs: Any) -> Strategies:
        target, parameters = read(args, kwargs)
        operands = [target, *(value for value in parameters.values() if isinstance(value, Operand))]
        ins, out = broadcast_labels(operands)

        def run(context: LocalContext) -> Local:
            def local(_: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
                target, parameters = read(args, kwargs)
                return as_partial_value(
                    fill_local(target, context.outs[0], fill, **parameters), context.outs[0], context.rank
                )

            return local

        at = overwrite_strategies(index_strategies(operands, ins, [out]), target, len(operands))
        return Strategies(at, run=run, shapes=(target.shape,), draws=True)

    rule(name, numbers_by_type=True)(find_strategies)
    composite(name)(lambda input, *args, **kwargs: getattr(_uninitialised(input.detach()), f"{name}_")(*args, **kwargs))


def _fill_random(out: Tensor, region: Region, shape: Sequence[int], seed: int, offset: int, **bounds: Any) -> Tensor:
    """`random_(to)` and `random_(from, to)` share their first argument."""
    first, last = (0, bounds["first"]) if bounds.keys() == {"first"} else (bounds.get("first", 0), bounds.get("last"))
    low, high = _integer_bounds(out.dtype, first, last)
    return fill_integers(out, region, shape, seed, offset, low, high)


def _fill_bernoulli(
    out: Tensor, region: Region, shape: Sequence[int], seed: int, offset: int, p: float | Tensor = 0.5
) -> Tensor:
    probability = p.expand(out.shape) if isinstance(p, Tensor) else p
    return fill_bernoulli(out, region, shape, seed, offset, probability)


IN_PLACE = (
    Draw("uniform", fill_uniform, ("low", "high"), {"from": "low", "a": "low", "to": "high", "b": "high"}),
    Draw("normal", fill_normal, ("mean", "std"), {}),
    Draw("log_normal", fill_log_normal, ("mean", "std"), {}),
    Draw("exponential", fill_exponential, ("rate",), {"lambd": "rate"}),
    Draw("cauchy", fill_cauchy, ("median", "sigma"), {}),
    Draw("geometric", fill_geometric, ("p",), {}),
    Draw("bernoulli", _fill_bernoulli, ("p",), {}),
    Draw("random", _fill_random, ("first", "last"), {"from": "first", "to": "last"}),
)
for _draw in IN_PLACE:
    _register_in_place(_draw)


def _like(fill: Fill) -> Callable[..., MeshStrategy]:
    """Return a rule for `*_like`: the layout of the input, with partial placements replicated."""

    def find_strategies(input: Operand, *_: Any, **options: Any) -> MeshStrategy:
        refuse_generator("*_like", options.get("generator"))
        source = without_entered(input.layout)
        placements = [REPLICATE if p.is_partial() else p for p in source.placements]
        layout = source.replace(placements=placements, order=source.order)

        def run(_: LocalContext) -> Local:
            def local(_: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
                given = {
                    key: value for key, value in kwargs.items() if key not in ("low", "high", "generator", "input")
                }
                wants_grad = given.pop("requires_grad", False)
                limits = [*args[1:], *(kwargs[key] for key in ("low", "high") if key in kwargs)]
                like = args[0] if args else kwargs["input"]
                out = torch.empty_like(like, **given).detach()
                return fill_local(out, layout, fill, **_limits(limits)).requires_grad_(wants_grad)

            return local

        return MeshStrategy((input.layout,), (layout,), run=run, draws=True)

    return find_strategies


def _limits(given: list[Any]) -> dict[str, Any]:
    """Return the bounds of `randint_like(x, high)` or `randint_like(x, low, high)`; other operators have none."""
    if not given:
        return {}
    low, high = (0, given[0]) if len(given) == 1 else given
    return {"low": int(low), "high": int(high)}


rule("rand_like")(_like(fill_uniform))
rule("randn_like")(_like(fill_normal))
rule("randint_like")(_like(fill_integers))


@composite("bernoulli")
def _bernoulli(input: Any, p: Any = None, *, generator: torch.Generator | None = None) -> Any:
    refuse_generator("bernoulli", generator)
    probabilities = input.detach()
    return _with_zero_gradients(_uninitialised(probabilities).bernoulli_(probabilities if p is None else p), input)


@composite("normal")
def _normal(mean: Any, std: Any = 1.0, *, generator: torch.Generator | None = None) -> Any:
    """`torch.normal` of tensors: scaled and shifted standard normal numbers."""
    refuse_generator("normal", generator)
    centre, spread = (value.detach() if isinstance(value, Tensor) else value for value in (mean, std))
    return _with_zero_gradients(torch.randn_like(centre + spread) * spread + centre, mean, std)


def _with_zero_gradients(samples: Any, *parameters: Any) -> Any:
    """Return the random numbers with zero gradients for the parameters that require one, as torch does."""
    for parameter in parameters:
        if isinstance(parameter, Tensor) and parameter.requires_grad and torch.is_grad_enabled():
            samples = torch.where(torch.ones_like(samples, dtype=torch.bool), samples, parameter)
    return samples


@composite("rrelu")
def _rrelu(
    input: Any,
    lower: float = 1.0 / 8,
    upper: float = 1.0 / 3,
    training: bool = False,
    inplace: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> Any:
    refuse_generator("rrelu", generator)
    if inplace:
        return NotImplemented
    if not training:
        return torch.nn.functional.leaky_relu(input, (lower + upper) / 2)
    slopes = _uninitialised(input.detach()).uniform_(lower, upper)
    return torch.where(input <= 0, input * slopes, input)
