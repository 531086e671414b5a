"""Units: parameters that are gathered together, released, and reduced together."""

from shardwright.parallel.units.build import unit_of
from shardwright.parallel.units.precision import MixedPrecisionPolicy
from shardwright.parallel.units.saved import PackGatheredParameters
from shardwright.parallel.units.schedule import Schedule
from shardwright.parallel.units.split import Split, split_along
from shardwright.parallel.units.unit import Unit

__all__ = ["MixedPrecisionPolicy", "PackGatheredParameters", "Schedule", "Split", "Unit", "split_along", "unit_of"]
