"""The rules, grouped by kind: importing this package registers them all."""

from shardwright.tensor.rules.create import like, random, seeded
from shardwright.tensor.rules.elementwise import foreach, pointwise
from shardwright.tensor.rules.index import brackets, gather, masked, scatter, scatter_views
from shardwright.tensor.rules.matrix import contract, distance, fourier, linalg
from shardwright.tensor.rules.nn import (
    activation,
    attention,
    backward,
    bags,
    ctc,
    dropout,
    embedding,
    loss,
    normalise,
    recurrent,
    softmax,
)
from shardwright.tensor.rules.order import extremes, quantile, select, sort
from shardwright.tensor.rules.reduction import calculus, count, norm, reduce, scan, statistics
from shardwright.tensor.rules.shape import arrange, copies, diagonal, join, split, turn, views
from shardwright.tensor.rules.space import convolution, interpolate, patches, pooling

__all__ = [
    "activation",
    "arrange",
    "attention",
    "backward",
    "bags",
    "brackets",
    "calculus",
    "contract",
    "convolution",
    "copies",
    "count",
    "ctc",
    "diagonal",
    "distance",
    "dropout",
    "embedding",
    "extremes",
    "foreach",
    "fourier",
    "gather",
    "interpolate",
    "join",
    "like",
    "linalg",
    "loss",
    "masked",
    "norm",
    "normalise",
    "patches",
    "pointwise",
    "pooling",
    "quantile",
    "random",
    "recurrent",
    "reduce",
    "scan",
    "scatter",
    "scatter_views",
    "seeded",
    "select",
    "softmax",
    "sort",
    "split",
    "statistics",
    "turn",
    "views",
]
