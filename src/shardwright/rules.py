"""Building blocks of your own sharding rules; register them with `shardwright.register_rule`."""

from shardwright.tensor.base.strategy import LocalContext, MeshStrategy, Operand, Strategies, Strategy, index_strategies
from shardwright.tensor.extend.user_rules import either, indexed, pointwise

__all__ = [
    "LocalContext",
    "MeshStrategy",
    "Operand",
    "Strategies",
    "Strategy",
    "either",
    "index_strategies",
    "indexed",
    "pointwise",
]
