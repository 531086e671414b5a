"""Random numbers that do not depend on sharding: the same for every layout, mesh and device."""

from shardwright.errors import RandomArgumentError
from shardwright.tensor.random.distributions import (
    fill_bernoulli,
    fill_cauchy,
    fill_exponential,
    fill_geometric,
    fill_integers,
    fill_log_normal,
    fill_normal,
    fill_scaled_mask,
    fill_uniform,
    keep_mask,
    permutation,
)
from shardwright.tensor.random.offsets import OffsetBasedRNGTracker, manual_seed, tracker
from shardwright.tensor.random.philox import Key

__all__ = [
    "Key",
    "OffsetBasedRNGTracker",
    "RandomArgumentError",
    "fill_bernoulli",
    "fill_cauchy",
    "fill_exponential",
    "fill_geometric",
    "fill_integers",
    "fill_log_normal",
    "fill_normal",
    "fill_scaled_mask",
    "fill_uniform",
    "keep_mask",
    "manual_seed",
    "permutation",
    "tracker",
]
