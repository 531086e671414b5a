"""What rules of your own are made of; register them with `shardwright.register_rule`."""

from shardwright.tensor.base.strategy import Decided, Operand, Situation, Way, Ways, index_ways
from shardwright.tensor.extend.user_rules import either, indexed, pointwise

__all__ = ["Decided", "Operand", "Situation", "Way", "Ways", "either", "index_ways", "indexed", "pointwise"]
