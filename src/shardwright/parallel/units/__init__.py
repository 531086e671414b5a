"""Units: parameters that are gathered together, released, and reduced together."""

from shardwright.parallel.units.precision import MixedPrecisionPolicy
from shardwright.parallel.units.saved import pack_gathered_parameters
from shardwright.parallel.units.schedule import Schedule
from shardwright.parallel.units.split import Split, split_along
from shardwright.parallel.units.unit import Unit

__all__ = ["MixedPrecisionPolicy", "Schedule", "Split", "Unit", "pack_gathered_parameters", "split_along"]
