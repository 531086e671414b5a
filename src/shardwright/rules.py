"""What rules of your own are made of; register them with `shardwright.register_rule`."""

from shardwright.tensor.extend.notations import either, indexed, pointwise
from shardwright.tensor.rules.notation import Decided, Operand, Situation, Way, Ways, index_ways

__all__ = ["Decided", "Operand", "Situation", "Way", "Ways", "either", "index_ways", "indexed", "pointwise"]
