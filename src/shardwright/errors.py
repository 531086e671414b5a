"""All exceptions that shardwright raises deliberately.

```
ShardwrightError
├── LayoutError            (ValueError)    invalid geometry
│   ├── RegionError                        a region outside its parent, or of another number of dimensions
│   ├── TilingError                        shards that overlap, leave a gap, or are outside the tensor
│   ├── PlacementError                     invalid placement for this tensor or mesh
│   └── MeshError                          invalid mesh, or a rank or name that is not part of it
├── ArgumentTypeError      (TypeError)     an argument of the wrong type
├── CommError              (RuntimeError)  communication between ranks failed
│   ├── CollectiveArgumentError (ValueError) sizes that do not match the tensor or the group
│   ├── ProgramMismatchError               ranks run different programs
│   ├── RankFailedError                    a step failed on some rank; raised on all of them
│   └── RankLostError                      a rank died or timed out
├── TensorError            (RuntimeError)  an operation that a DTensor does not support
│   ├── MixedTensorsError                  plain tensors mixed with DTensors
│   ├── MeshMismatchError                  DTensors on different meshes in one call
│   ├── InPlaceError                       an in-place write that would change the layout, or be lost
│   ├── CommunicationError                 implicit communication that the policy forbids
│   ├── PartialGradientError               a gradient through a partial maximum, minimum or product
│   ├── RandomArgumentError  (ValueError)  an invalid parameter of a distribution
│   ├── ShardError           (ValueError)  a shard that does not match its metadata
│   │   └── DisagreementError              ranks describe one ShardedTensor differently
│   ├── LocalTensorError                   a local tensor that does not match its layout
│   ├── RuleError                          an invalid user-defined rule
│   ├── CaptureError                       a program that `sw.compile` cannot capture
│   └── UnsupportedError                   an operation that would silently see only the local shard
├── StorageError           (OSError)       storage could not be read or written
│   ├── MissingKeyError                    no such key
│   └── StorageBusyError                   another process is saving to this location
├── CheckpointError        (RuntimeError)  a checkpoint could not be saved or loaded
│   ├── StateError           (ValueError)  a value in the state cannot be stored
│   │   └── StateDiffersError              ranks have different values under one name
│   ├── NotACheckpointError                no checkpoint at this location
│   ├── SaveTimeoutError     (TimeoutError) a background save has not finished yet
│   ├── MissingNameError     (KeyError)    no stored tensor or value of that name
│   ├── LoadMismatchError    (ValueError)  stored names, shapes or dtypes do not match the request
│   ├── FormatError          (ValueError)  an invalid manifest, or files that do not follow their format
│   │   ├── UnknownVersionError            a manifest of an unsupported version
│   │   └── PickleError                    a pickle that names what is not known, or is malformed; nothing was executed
│   └── CorruptionError                    stored bytes are corrupt
├── MappingError           (ValueError)    a rule of a mapping that is invalid, or does not fit its tensors
├── MissingExtraError      (ImportError)   a module needs an optional dependency that is not installed
├── PlanError              (ValueError)    a parallel plan that is invalid, or does not fit its model
├── UsageError             (ValueError)    arguments of the command line that do not fit together
├── RanksError             (RuntimeError)  testing: ranks raised, died or hung
└── TrainingMismatchError  (AssertionError) testing: training on ranks differs from training on one
```

Catch `ShardwrightError` for all of them, or the builtin beside each name.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.listing import join_first

__all__ = [
    "ArgumentTypeError",
    "CaptureError",
    "CheckpointError",
    "CollectiveArgumentError",
    "CommError",
    "CommunicationError",
    "CorruptionError",
    "DisagreementError",
    "Failure",
    "FormatError",
    "InPlaceError",
    "LayoutError",
    "LoadMismatchError",
    "LocalTensorError",
    "MappingError",
    "MeshError",
    "MeshMismatchError",
    "MissingExtraError",
    "MissingKeyError",
    "MissingNameError",
    "MixedTensorsError",
    "NotACheckpointError",
    "PartialGradientError",
    "PickleError",
    "PlacementError",
    "PlanError",
    "ProgramMismatchError",
    "RandomArgumentError",
    "RankFailedError",
    "RankLostError",
    "RanksError",
    "RegionError",
    "RuleError",
    "SaveTimeoutError",
    "ShardError",
    "ShardwrightError",
    "StateDiffersError",
    "StateError",
    "StorageBusyError",
    "StorageError",
    "TensorError",
    "TilingError",
    "TrainingMismatchError",
    "UnknownVersionError",
    "UnsupportedError",
    "UsageError",
]


class ShardwrightError(Exception):
    """The base class of all exceptions that shardwright raises deliberately.

    >>> from shardwright import Region
    >>> try:
    ...     Region((0,), (-1,))
    ... except ShardwrightError as error:
    ...     print(error)
    Region size must not be negative, got (-1,) (dimension 0)
    """


class LayoutError(ShardwrightError, ValueError):
    """Invalid geometry: a region, placement, mesh or layout.

    >>> issubclass(LayoutError, ValueError)
    True
    """


class RegionError(LayoutError):
    """A region outside its parent, or regions of different numbers of dimensions.

    >>> from shardwright import Region
    >>> Region((0,), (4,)).slices(Region((2,), (4,)))
    Traceback (most recent call last):
    shardwright.errors.RegionError: region [0:4] is not inside [2:6]
    """


class TilingError(LayoutError):
    """Shards do not tile their tensor: the message names the first overlap, gap or shard outside.

    >>> from shardwright.sharded import EnumerableShardingSpec, ShardMetadata
    >>> EnumerableShardingSpec([ShardMetadata([0], [3], "rank:0/cpu"), ShardMetadata([2], [2], "rank:1/cpu")])
    Traceback (most recent call last):
    shardwright.errors.TilingError: overlap: shard 0 [0:3] on rank:0/cpu and shard 1 [2:4] on rank:1/cpu both hold [2:3]
    """


class PlacementError(LayoutError):
    """A placement that is invalid, or does not match the tensor or the mesh.

    >>> from shardwright import Layout, Mesh, Shard
    >>> Layout(Mesh((2,)), [Shard(3)], (8, 8))
    Traceback (most recent call last):
    shardwright.errors.PlacementError: S(3) on mesh dimension 0 ...
    """


class MeshError(LayoutError):
    """An invalid mesh, or a rank or dimension name that is not part of it.

    >>> from shardwright import Mesh
    >>> Mesh((2, 2), ranks=(0, 1, 2))
    Traceback (most recent call last):
    shardwright.errors.MeshError: mesh of shape (2, 2) needs 4 ranks, got 3: ...
    """


class ArgumentTypeError(ShardwrightError, TypeError):
    """An argument of the wrong type.

    >>> from shardwright import Shard
    >>> Shard("rows")
    Traceback (most recent call last):
    shardwright.errors.ArgumentTypeError: Shard dimension must be an int, got str: 'rows'
    """


class CommError(ShardwrightError, RuntimeError):
    """Communication between ranks failed: a step failed on some rank, or a rank is lost.

    >>> issubclass(RankLostError, CommError), issubclass(CommError, RuntimeError)
    (True, True)
    """


class CollectiveArgumentError(CommError, ValueError):
    """Sizes or ranks passed to a collective do not match its tensor or its group.

    >>> import torch
    >>> from shardwright import comm
    >>> comm.all_gather(torch.ones(3), sizes=[2])
    Traceback (most recent call last):
    shardwright.errors.CollectiveArgumentError: all_gather: sizes [2] give rank 0 extent 2 in dimension 0, ...
    """


class ProgramMismatchError(CommError):
    """Ranks were about to run different collectives: the message names ranks, operators and source lines.

    >>> issubclass(ProgramMismatchError, RuntimeError)
    True
    """


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of one rank: its rank, and the type, message and traceback of the exception.

    >>> print(Failure(3, "OSError", "disk full"))
    rank 3: OSError: disk full
    """

    rank: int
    kind: str
    message: str
    traceback: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.kind}: {self.message}"


class RankFailedError(CommError):
    """A step failed on one or several ranks; every rank raises this same error.

    `failures` describes the failure of each rank, lowest rank first; on a rank that failed, `__cause__` is the
    exception itself.

    >>> error = RankFailedError("save", (Failure(3, "OSError", "disk full"),))
    >>> print(error)
    save failed on 1 rank
      rank 3: OSError: disk full
    >>> error.rank
    3
    """

    def __init__(self, what: str, failures: tuple[Failure, ...]) -> None:
        self.what = what
        self.failures = failures
        named = join_first(failures, 16, "\n  ")
        super().__init__(f"{what} failed on {len(failures)} rank{'s' * (len(failures) > 1)}\n  {named}")

    @property
    def rank(self) -> int:
        """The lowest rank that failed."""
        return self.failures[0].rank

    def __reduce__(self) -> tuple[type[RankFailedError], tuple[str, tuple[Failure, ...]]]:
        return type(self), (self.what, self.failures)


class RankLostError(CommError):
    """A rank died or timed out. `ranks` are those known to be lost.

    >>> RankLostError("rank 2 did not answer within 5 s", ranks=(2,)).ranks
    (2,)
    """

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        super().__init__(message)

    def __reduce__(self) -> tuple[type[RankLostError], tuple[str, tuple[int, ...]]]:
        return type(self), (str(self), self.ranks)


class TensorError(ShardwrightError, RuntimeError):
    """An operation that a DTensor does not support.

    A RuntimeError, never a TypeError: Python's operators turn a TypeError into "unsupported operand".

    >>> issubclass(TensorError, RuntimeError)
    True
    """


class MixedTensorsError(TensorError):
    """Plain tensors mixed with DTensors in one call: the layout of the plain ones is unknown.

    >>> import torch, shardwright as sw
    >>> sw.ones(2, mesh=sw.Mesh((1,))) + torch.ones(2)
    Traceback (most recent call last):
    shardwright.errors.MixedTensorsError: add: argument 1 is a plain tensor of shape (2,) ...
    """


class MeshMismatchError(TensorError):
    """DTensors on different meshes in one call.

    >>> import shardwright as sw
    >>> sw.ones(2, mesh=sw.Mesh((1,))) + sw.ones(2, mesh=sw.Mesh((1, 1)))
    Traceback (most recent call last):
    shardwright.errors.MeshMismatchError: add: arguments are on different meshes, ...
    """


class InPlaceError(TensorError):
    """An in-place write that would change the layout of its target, or would be lost.

    >>> import shardwright as sw
    >>> sw.ones(2, mesh=sw.Mesh((1,)), placements=[sw.Partial()]).relu_()
    Traceback (most recent call last):
    shardwright.errors.InPlaceError: relu_ would change the layout of the tensor it writes to, ...
    """


class CommunicationError(TensorError):
    """An operator needs to redistribute its inputs, and the policy forbids implicit communication.

    >>> import shardwright as sw
    >>> with sw.communication("never"):
    ...     pass
    Traceback (most recent call last):
    shardwright.errors.CommunicationError: policy must be 'implicit', 'warn' or 'explicit', got 'never'
    """


class PartialGradientError(TensorError):
    """A gradient was requested through a partial maximum, minimum or product, which is undefined.

    >>> issubclass(PartialGradientError, TensorError)
    True
    """


class ShardError(TensorError, ValueError):
    """A shard does not match its metadata.

    >>> import torch
    >>> from shardwright import sharded
    >>> sharded.Shard.from_tensor_and_offsets(torch.zeros(2, 3), [0], rank=0)
    Traceback (most recent call last):
    shardwright.errors.ShardError: Shard: a tensor of 2 dimensions needs as many offsets, got [0]
    """


class DisagreementError(ShardError):
    """Ranks describe one ShardedTensor differently. Raised on all of them.

    >>> issubclass(DisagreementError, ValueError)
    True
    """


class LocalTensorError(TensorError, ValueError):
    """A local tensor does not match its layout: wrong size, dtype or device on the rank in the message.

    >>> import torch, shardwright as sw
    >>> sw.DTensor.from_local(torch.ones(3), sw.Mesh((1,)), [sw.Shard(0)], shape=(4,))
    Traceback (most recent call last):
    shardwright.errors.LocalTensorError: from_local: rank 0 has a local tensor of shape (3,), ...
    """


class RandomArgumentError(TensorError, ValueError):
    """An invalid parameter of a distribution, or a seed on which ranks disagree.

    >>> import shardwright as sw
    >>> sw.zeros(2, mesh=sw.Mesh((1,))).bernoulli_(1.5)
    Traceback (most recent call last):
    shardwright.errors.RandomArgumentError: ...
    """


class RuleError(TensorError):
    """A rule that cannot be registered, or whose result does not match the operator.

    >>> import torch, shardwright as sw
    >>> sw.register_rule(torch.add, sw.rules.pointwise())
    Traceback (most recent call last):
    shardwright.errors.RuleError: add already has a rule: pass replace=True to replace it
    """


class CaptureError(TensorError):
    """A program that `sw.compile` cannot capture; the message names the line and the reason.

    >>> import shardwright as sw
    >>> x = sw.ones(2, mesh=sw.init_device_mesh("cpu", (1,)))
    >>> sw.compile(lambda x: x if x.sum() > 1 else -x)(x)
    Traceback (most recent call last):
    shardwright.errors.CaptureError: ...: the program reads a value of a tensor (item), ...
    """


class UnsupportedError(TensorError):
    """An operation that would silently see only the local shard; the message has reason and remedy.

    >>> import torch, shardwright as sw
    >>> torch.func.grad(torch.sum)(sw.ones(2, mesh=sw.Mesh((1,))))
    Traceback (most recent call last):
    shardwright.errors.UnsupportedError: torch.func ...
    """


class StorageError(ShardwrightError, OSError):
    """Storage could not be read or written.

    >>> from shardwright.storage import LocalStorage
    >>> LocalStorage("somewhere").open("../manifest.json")
    Traceback (most recent call last):
    shardwright.errors.StorageError: invalid key '../manifest.json': keys have lowercase letters, digits, dots ...
    """


class MissingKeyError(StorageError):
    """The key does not exist.

    >>> issubclass(MissingKeyError, OSError)
    True
    """


class StorageBusyError(StorageError):
    """Another process is saving a checkpoint to the same location.

    >>> issubclass(StorageBusyError, OSError)
    True
    """


class CheckpointError(ShardwrightError, RuntimeError):
    """A checkpoint could not be saved or loaded.

    >>> issubclass(CheckpointError, RuntimeError)
    True
    """


class StateError(CheckpointError, ValueError):
    """A value in a state cannot be stored; the message has its path, type and a remedy.

    >>> import tempfile
    >>> from shardwright import checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoint.save({"model": {"hook": print}}, folder)
    Traceback (most recent call last):
    shardwright.errors.StateError: model.hook: builtins.builtin_function_or_method cannot be stored: ...
    """


class StateDiffersError(StateError):
    """Ranks have different values under one name; the message lists all such names.

    >>> issubclass(StateDiffersError, StateError)
    True
    """


class NotACheckpointError(CheckpointError):
    """This location does not hold a complete checkpoint.

    >>> import tempfile
    >>> from shardwright import checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoint.read(folder)
    Traceback (most recent call last):
    shardwright.errors.NotACheckpointError: LocalStorage(...) holds no checkpoint: there is no manifest.json
    """


class SaveTimeoutError(CheckpointError, TimeoutError):
    """A background save did not finish within the timeout; it continues.

    >>> issubclass(SaveTimeoutError, TimeoutError)
    True
    """


class MissingNameError(CheckpointError, KeyError):
    """No tensor or value of that name is stored; the message suggests the closest name.

    >>> import tempfile
    >>> from shardwright import checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoint.save({"epoch": 3}, folder)
    ...     checkpoint.open(folder).value("epochs")
    Traceback (most recent call last):
    shardwright.errors.MissingNameError: no plain value is stored under 'epochs'; did you mean 'epoch'?
    """

    def __str__(self) -> str:  # KeyError.__str__ would return the repr of the message
        return str(self.args[0]) if self.args else ""


class LoadMismatchError(CheckpointError, ValueError):
    """Stored names, shapes or dtypes do not match the request; the message lists all mismatches.

    >>> issubclass(LoadMismatchError, ValueError)
    True
    """


class FormatError(CheckpointError, ValueError):
    """An invalid manifest, or files that do not follow the format of a checkpoint.

    >>> issubclass(FormatError, ValueError)
    True
    """


class UnknownVersionError(FormatError):
    """A manifest of an unsupported version, written by a newer library.

    >>> issubclass(UnknownVersionError, FormatError)
    True
    """


class PickleError(FormatError):
    """A pickle that names what is not known, or is malformed. Nothing of it was executed or imported.

    >>> issubclass(PickleError, FormatError)
    True
    """


class CorruptionError(CheckpointError):
    """Stored bytes are corrupt; the message names file, tensor and block.

    >>> issubclass(CorruptionError, RuntimeError)
    True
    """


class MappingError(ShardwrightError, ValueError):
    """A rule of a mapping that is invalid, or does not fit the tensors; the message names the rule and its line.

    >>> import shardwright as sw
    >>> sw.Mapping("w = v : a b = b")
    Traceback (most recent call last):
    shardwright.errors.MappingError: line 1: `w = v : a b = b`: it is not a bijection: 1 part on the left and 0 ...
    """


class MissingExtraError(ShardwrightError, ImportError):
    """A module needs an optional dependency that is not installed; the message names the extra to install.

    >>> issubclass(MissingExtraError, ImportError)
    True
    """


class PlanError(ShardwrightError, ValueError):
    """A parallel plan that is invalid, or does not fit its model; the message lists all problems.

    >>> import torch, shardwright as sw
    >>> mesh = sw.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    >>> sw.parallelize(torch.nn.Linear(4, 2), mesh, sw.Plan({"heads": sw.ColwiseParallel()}))
    Traceback (most recent call last):
    shardwright.errors.PlanError: parallelize: 2 problems
      pattern 'heads' matches no module and no parameter...
    """


class UsageError(ShardwrightError, ValueError):
    """Arguments of the `shardwright` command that do not fit together, or do not fit the checkpoint.

    >>> issubclass(UsageError, ValueError)
    True
    """


class RanksError(ShardwrightError, RuntimeError):
    """Rank processes of a test pool raised, died or hung; the message has their tracebacks or stacks.

    >>> from shardwright.testing import run_ranks
    >>> run_ranks(1, lambda: 1 // 0)
    Traceback (most recent call last):
    shardwright.errors.RanksError: 1 of 1 rank failed
    rank 0 raised ZeroDivisionError: ...
    """


class TrainingMismatchError(ShardwrightError, AssertionError):
    """Training on several ranks differs from training on one; the message names parameters, ranks and differences.

    >>> issubclass(TrainingMismatchError, AssertionError)
    True
    """
