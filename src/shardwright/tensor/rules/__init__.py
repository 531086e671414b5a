"""Sharding rules, grouped by kind. Importing this package registers all of them."""

from shardwright.tensor.rules.create import like, random, seeded
from shardwright.tensor.rules.elementwise import pointwise
from shardwright.tensor.rules.index import gather, getitem_setitem, masked, scatter, scatter_views
from shardwright.tensor.rules.matrix import contract, distance, fourier, linalg
from shardwright.tensor.rules.nn import (
    activation,
    attention,
    backward,
    ctc,
    dropout,
    embedding,
    embedding_bag,
    loss,
    normalise,
    recurrent,
    softmax,
)
from shardwright.tensor.rules.order import extremes, quantile, select, sort
from shardwright.tensor.rules.reduction import calculus, count, norm, reduce, scan, statistics
from shardwright.tensor.rules.shape import arrange, copies, diagonal, join, roll_flip, split, views
from shardwright.tensor.rules.space import convolution, interpolate, patches, pooling

__all__ = [
    "activation",
    "arrange",
    "attention",
    "backward",
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
    "embedding_bag",
    "extremes",
    "fourier",
    "gather",
    "getitem_setitem",
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
    "roll_flip",
    "scan",
    "scatter",
    "scatter_views",
    "seeded",
    "select",
    "softmax",
    "sort",
    "split",
    "statistics",
    "views",
]
