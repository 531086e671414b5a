"""Compare training on several ranks with training on one: losses, gradients, gradient norms and parameters."""

from shardwright.testing.training.compare import Comparison, Difference
from shardwright.testing.training.same_as_one_rank import same_as_one_rank

__all__ = ["Comparison", "Difference", "same_as_one_rank"]
