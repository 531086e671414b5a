"""Samples of activations, backward passes, losses, norms, bags and recurrent nets, to prove their rules.

Batches of 4 or 5 are uneven over 3 ranks, batches of 2 leave one empty.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own short name
from torch import Tensor

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
A = torch.ops.aten
N = torch._C._nn


def S(func: Any, *args: Any, **kwargs: Any) -> Call:  # noqa: N802  # short, for long tables
    return func, args, kwargs


def r(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape)))


def g(*shape: int) -> Tensor:
    """A tensor that requires grad."""
    return r(*shape).requires_grad_()


def i(*shape: int, low: int = 0, high: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(sum(shape)))


def net(name: str, gates: int, batch: int, batch_first: bool, bidirectional: bool, packed: bool = False) -> Call:
    """One layer of a recurrent net."""
    directions = 2 if bidirectional else 1
    weights = [r(gates * 3, size, seed=d) for d in range(directions) for size in (2, 3)]
    params = [x for pair in zip(weights[::2], weights[1::2], strict=True) for x in (*pair, r(gates * 3), r(gates * 3))]
    state: Any = [r(directions, batch, 3, seed=s) for s in range(2)] if name == "lstm" else r(directions, batch, 3)
    rest = (True, 1, 0.0, False, bidirectional)
    if packed:
        sizes = torch.tensor([batch, batch - 1, 1])
        return S(getattr(torch, name), r(2 * batch, 2), sizes, state, params, *rest)
    input = r(batch, 4, 2) if batch_first else r(4, batch, 2)
    return S(getattr(torch, name), input, state, params, *rest, batch_first)


def nets(name: str, gates: int) -> list[Call]:
    return [
        net(name, gates, 4, False, True),
        net(name, gates, 2, True, False),
        net(name, gates, 1, False, False),
        net(name, gates, 4, False, False, packed=True),
    ]


def bags(mode: str) -> list[Call]:
    flat, starts = i(8, high=7), torch.tensor([0, 3, 3, 6])
    made = [S(F.embedding_bag, i(5, 3, high=7), g(7, 4), mode=mode, padding_idx=pad) for pad in (None, 2, -1)]
    made += [S(F.embedding_bag, flat, g(7, 4), offsets=starts, mode=mode, padding_idx=pad) for pad in (None, 2)]
    ends = torch.tensor([0, 3, 3, 6, 8])
    made.append(S(F.embedding_bag, flat % 2, g(2, 2), offsets=ends, mode=mode, include_last_offset=True))
    return made


PROBABILITIES = r(6, 4, 5).log_softmax(-1).requires_grad_()
ROWS, ROW = i(4, 3, low=1, high=5), i(9, low=1, high=5)
LENGTHS, COUNTS = torch.tensor([6, 5, 6, 4]), torch.tensor([3, 2, 1, 3])
CLASSES = torch.tensor([[0, 1, -1, 2, 3]])
SLOPES = ((4, 5, 2), (5,)), ((4, 2), (2,)), ((4, 5), (1,)), ((5,), (1,)), ((4, 5), ())
SEGMENTS: list[dict[str, Any]] = [{"lengths": torch.tensor([2, 0, 3])}, {"offsets": torch.tensor([0, 2, 2, 5])}]

SAMPLES: dict[str, list[Call]] = {
    "glu": [S(F.glu, r(4, 6, 2), 1), S(F.glu, r(4, 2)), S(F.glu, r(0, 4))],
    "prelu": [S(F.prelu, r(*shape), r(*slopes)) for shape, slopes in SLOPES],
    "elu_backward": [S(A.elu_backward, r(4, 2), 1.0, 1.0, 1.0, False, r(4, 2, seed=1))],
    "gelu_backward": [S(A.gelu_backward, r(4, 2), r(4, 2, seed=1))],
    "hardshrink_backward": [S(A.hardshrink_backward, r(4, 2), r(4, 2, seed=1), 0.5)],
    "hardsigmoid_backward": [S(A.hardsigmoid_backward, r(4, 2), r(4, 2, seed=1))],
    "hardswish_backward": [S(A.hardswish_backward, r(4, 2), r(4, 2, seed=1))],
    "hardtanh_backward": [S(A.hardtanh_backward, r(4, 2), r(4, 2, seed=1), -1.0, 1.0)],
    "leaky_relu_backward": [S(A.leaky_relu_backward, r(4, 2), r(4, 2, seed=1), 0.1, False)],
    "logit_backward": [S(A.logit_backward, r(4, 2), r(4, 2, seed=1).sigmoid())],
    "mish_backward": [S(A.mish_backward, r(4, 2).detach(), r(4, 2, seed=1))],
    "native_dropout_backward": [S(A.native_dropout_backward, r(4, 2), r(4, 2, seed=1) > 0, 2.0)],
    "sigmoid_backward": [S(A.sigmoid_backward, r(4, 2), r(4, 2, seed=1).sigmoid())],
    "silu_backward": [S(A.silu_backward, r(4, 2), r(4, 2, seed=1))],
    "softplus_backward": [S(A.softplus_backward, r(4, 2), r(4, 2, seed=1), 1.0, 20.0)],
    "softshrink_backward": [S(A.softshrink_backward, r(4, 2), r(4, 2, seed=1), 0.5)],
    "tanh_backward": [S(A.tanh_backward, r(4, 2), r(4, 2, seed=1).tanh())],
    "threshold_backward": [S(A.threshold_backward, r(4, 2), r(4, 2, seed=1), 0.0)],
    "_softmax_backward_data": [
        S(A._softmax_backward_data, r(4, 5), r(4, 5, seed=1).softmax(d), d, torch.float64) for d in (0, -1)
    ],
    "_log_softmax_backward_data": [
        S(A._log_softmax_backward_data, r(4, 5), r(4, 5, seed=1).log_softmax(d), d, torch.float64) for d in (0, -1)
    ],
    "_safe_softmax": [S(A._safe_softmax, r(4, 5), 0), S(A._safe_softmax, r(4, 2, 5), -1)],
    "native_layer_norm": [
        S(torch.native_layer_norm, r(4, 2, 3), [3], r(3), r(3), 1e-5),
        S(torch.native_layer_norm, r(4, 2, 3), [2, 3], None, None, 1e-5),
    ],
    "native_group_norm": [
        S(torch.native_group_norm, r(4, 6, 3), r(6), r(6), 4, 6, 3, 2, 1e-5),
        S(torch.native_group_norm, r(2, 6, 3), None, None, 2, 6, 3, 3, 1e-5),
    ],
    "multi_margin_loss": [
        S(N.multi_margin_loss, g(4, 5), i(4, high=5), 1, 1.0, r(5).abs(), 0),
        S(N.multi_margin_loss, g(2, 5), i(2, high=5), 2, 0.5, None, 0),
        S(N.multi_margin_loss, g(5), torch.tensor(1), 2, 1.0, None, 0),
    ],
    "multilabel_margin_loss": [
        S(N.multilabel_margin_loss, g(4, 5), CLASSES.repeat(4, 1), 0),
        S(N.multilabel_margin_loss, g(5), CLASSES[0], 0),
    ],
    "ctc_loss": [
        S(torch.ctc_loss, PROBABILITIES, ROWS, LENGTHS, COUNTS, 0, 0),
        S(torch.ctc_loss, PROBABILITIES, ROWS, LENGTHS.tolist(), COUNTS.tolist(), 0, 0),
        S(torch.ctc_loss, PROBABILITIES, ROW, LENGTHS.tolist(), COUNTS.tolist(), 0, 0),
        S(torch.ctc_loss, PROBABILITIES, ROW, LENGTHS, COUNTS, 0, 0, zero_infinity=True),
        S(torch.ctc_loss, PROBABILITIES.detach()[:, :2].requires_grad_(), ROWS[:2], LENGTHS[:2], COUNTS[:2], 0, 0),
        S(torch.ctc_loss, PROBABILITIES.detach()[:, 0].requires_grad_(), ROWS[0], LENGTHS[:1], COUNTS[:1], 0, 0),
    ],
    "embedding_bag": [
        *(sample for mode in ("sum", "mean", "max") for sample in bags(mode)),
        S(F.embedding_bag, i(5, 3, high=7), g(7, 4), mode="sum", per_sample_weights=g(5, 3)),
        S(F.embedding_bag, i(5, 3, high=2), g(2, 4), mode="sum", per_sample_weights=g(5, 3)),
        S(F.embedding_bag, i(5, 3, high=7), g(7, 4), mode="sum", scale_grad_by_freq=True),
    ],
    "segment_reduce": [
        *(
            S(torch.segment_reduce, r(5, 4), reduce, **given, axis=0, unsafe=True, initial=initial)
            for reduce, initial in (("sum", None), ("mean", 1.0), ("max", 1.0), ("min", 1.0), ("prod", 1.0))
            for given in SEGMENTS
        ),
        S(torch.segment_reduce, r(4, 5, 2), "mean", lengths=SEGMENTS[0]["lengths"].repeat(4, 1), axis=1, unsafe=True),
        S(torch.segment_reduce, r(2, 5), "max", lengths=SEGMENTS[0]["lengths"].repeat(2, 1), axis=1, initial=0.0),
    ],
    "lstm": nets("lstm", 4),
    "gru": nets("gru", 3),
    "rnn_tanh": nets("rnn_tanh", 1),
    "rnn_relu": nets("rnn_relu", 1),
    "lstm_cell": [
        S(torch.lstm_cell, r(4, 2), [r(4, 3), r(4, 3, seed=1)], r(12, 2), r(12, 3), r(12), r(12, seed=1)),
        S(torch.lstm_cell, r(2, 2), [r(2, 3), r(2, 3, seed=1)], r(12, 2), r(12, 3)),
    ],
    "gru_cell": [S(torch.gru_cell, r(4, 2), r(4, 3), r(9, 2), r(9, 3), r(9), r(9, seed=1))],
    "rnn_tanh_cell": [S(torch.rnn_tanh_cell, r(4, 2), r(4, 3), r(3, 2), r(3, 3), r(3), r(3, seed=1))],
    "rnn_relu_cell": [S(torch.rnn_relu_cell, r(4, 2), r(4, 3), r(3, 2), r(3, 3))],
    "fill": [S(Tensor.fill_, r(4, 2), 2.0), S(torch.fill, r(4, 2), r())],
}
