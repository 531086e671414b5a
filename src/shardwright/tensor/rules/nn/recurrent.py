"""Recurrent nets: the sequences of a batch are independent, so a sharded batch needs no communication.

Weights are replicated; sharded ones are gathered once, and their gradients reduced once. With dropout between layers,
the layers run one by one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from shardwright.tensor.base.registry import composite, rule
from shardwright.tensor.base.strategy import Labels, Strategies, index_strategies
from shardwright.tensor.rules.create.seeded import call_seeded
from shardwright.tensor.rules.elementwise.pointwise import operands_in

__all__: list[str] = []

NETS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
CELLS = ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
BATCH = "batch"
STATE: Labels = [None, BATCH, None]  # layers and directions, sequences, features


def _is_packed(args: Any) -> bool:
    """True for packed sequences: then the weights are the fourth argument."""
    return isinstance(args[3], list | tuple)


@rule(*NETS)
def _net(*args: Any, **named: Any) -> Strategies | None:
    if named or len(args) != 9:
        return None
    operands = operands_in(*args)
    states = operands_in(args[2 if _is_packed(args) else 1])
    # Given explicitly: inferring the shapes would run the whole net on meta tensors.
    features = states[0].shape[-1] * (2 if args[8 if _is_packed(args) else 7] else 1)
    shapes = ((*operands[0].shape[:-1], features), *(state.shape for state in states))
    if _is_packed(args):  # a step holds only the sequences that are long enough: not sharded
        replicated: list[Labels] = [[None] * operand.ndim for operand in operands]
        return Strategies(index_strategies(operands, replicated, [[]] * (1 + len(states))), shapes=shapes)
    sequence: Labels = [BATCH, None, None] if args[8] else [None, BATCH, None]
    weights: list[Labels] = [[None] * operand.ndim for operand in operands[1 + len(states) :]]
    outs = [sequence, *[STATE] * len(states)]
    return Strategies(index_strategies(operands, [*outs, *weights], outs), shapes=shapes)


def _compose(name: str, *args: Any, **named: Any) -> Any:
    """With dropout, run layer by layer: then the numbers do not depend on the layout."""
    if named or len(args) != 9:
        return call_seeded(name, args, named)
    num_layers, dropout, train = args[5:8] if _is_packed(args) else args[4:7]
    if num_layers == 1 or not dropout or not train:
        return NotImplemented
    return call_seeded(name, args, named) if _is_packed(args) else _layer_by_layer(name, *args)


def _layer_by_layer(
    name: str,
    input: Any,
    hx: Any,
    params: Any,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    per_layer, directions = len(params) // num_layers, 2 if bidirectional else 1
    is_list = isinstance(hx, list | tuple)
    states: list[Any] = []
    for layer in range(num_layers):
        input = torch.dropout(input, dropout, True) if layer else input
        starts = [state.narrow(0, layer * directions, directions) for state in (hx if is_list else [hx])]
        own = params[layer * per_layer : (layer + 1) * per_layer]
        rest = (own, has_biases, 1, 0.0, train, bidirectional, batch_first)
        input, *end = getattr(torch, name)(input, starts if is_list else starts[0], *rest)
        states.append(end)
    return (input, *(torch.cat(end, 0) for end in zip(*states, strict=True)))


for _name in NETS:
    composite(_name)(partial(_compose, _name))


@rule(*CELLS)
def _cell(input: Any, hx: Any, *weights: Any, **named: Any) -> Strategies | None:
    if input.ndim != 2:
        return None
    states = operands_in(hx)
    rest = operands_in(*weights, *named.values())
    outs: list[Labels] = [[BATCH, None]] * len(states)
    ins = [[BATCH, None], *outs, *([None] * weight.ndim for weight in rest)]
    return Strategies(
        index_strategies([input, *states, *rest], ins, outs), shapes=tuple(state.shape for state in states)
    )
