"""Every error shardwright raises on purpose.

```
ShardwrightError
├── LayoutError            (ValueError)    nonsense geometry: the value, the rule and the numbers
│   ├── RegionError                        a region outside its parent, or of the wrong rank
│   ├── TilingError                        shards that overlap, leave a gap, or reach outside their tensor
│   ├── PlacementError                     a placement that cannot be, or not on this tensor and mesh
│   └── MeshError                          a mesh that cannot be, or a rank or name that is not in it
├── ArgumentTypeError      (TypeError)     a value of a kind that has no meaning here
├── CommError              (RuntimeError)  something went wrong between ranks
│   ├── CollectiveArgumentError (ValueError) sizes that do not fit the tensor or the group
│   ├── ProgramMismatchError               ranks run different programs: who is where
│   ├── RankFailedError                    a step failed on some rank; raised alike on all of them
│   └── RankLostError                      a rank died, or did not answer in time
├── TensorError            (RuntimeError)  a DTensor was asked for what it cannot do
│   ├── MixedTensorsError                  plain tensors beside DTensors
│   ├── MeshMismatchError                  DTensors on different meshes in one call
│   ├── InPlaceError                       a write that would change its target's layout, or be lost
│   ├── CommunicationError                 implicit communication that the policy forbids
│   ├── PartialGradientError               a gradient through a partial maximum, which has none
│   ├── RandomArgumentError  (ValueError)  a parameter that a distribution does not have
│   ├── ShardError           (ValueError)  a shard that does not fit its metadata
│   │   └── DisagreementError              ranks that describe one ShardedTensor differently
│   ├── LocalTensorError                   a local tensor that does not fit its layout, on some rank
│   ├── RuleError                          a rule of your own that cannot be registered, or gives no sense
│   ├── CaptureError                       a program that `sw.compile` cannot capture: which line, and why
│   └── UnsupportedError                   a path that would silently see the shard alone
├── StorageError           (OSError)       the place of a checkpoint could not be read or written
│   ├── MissingKeyError                    nothing is stored under that key
│   └── StorageBusyError                   another process is saving there
├── CheckpointError        (RuntimeError)  a checkpoint could not be saved or loaded
│   ├── StateError           (ValueError)  something in the state that is not stored, with its path
│   │   └── StateDiffersError              ranks have different values under one name
│   ├── NotACheckpointError                nothing was saved there
│   ├── SaveTimeoutError     (TimeoutError) a save in the background has not ended yet
│   ├── MissingNameError     (KeyError)    no tensor or value of that name is stored; near misses
│   ├── LoadMismatchError    (ValueError)  what is stored does not fit what is asked for: everything that does not
│   ├── FormatError          (ValueError)  a manifest that makes no sense, or of another version
│   │   └── UnknownVersionError            a manifest of a version that this library does not read
│   └── CorruptionError                    bytes are not what was written: which file, tensor and block
└── RanksError             (RuntimeError)  testing: ranks raised, died or hung
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
    "MeshError",
    "MeshMismatchError",
    "MissingKeyError",
    "MissingNameError",
    "MixedTensorsError",
    "NotACheckpointError",
    "PartialGradientError",
    "PlacementError",
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
    "UnknownVersionError",
    "UnsupportedError",
]


class ShardwrightError(Exception):
    """The root of the tree: catches everything shardwright raises on purpose.

    >>> from shardwright import Region
    >>> try:
    ...     Region((0,), (-1,))
    ... except ShardwrightError as error:
    ...     print(error)
    Region size (-1,) is negative in dimension 0: sizes are 0 or more
    """


class LayoutError(ShardwrightError, ValueError):
    """Geometry that cannot be: the message gives the value, the rule and the numbers.

    >>> issubclass(LayoutError, ValueError)
    True
    """


class RegionError(LayoutError):
    """A region outside its parent, or regions of different numbers of dimensions.

    >>> from shardwright import Region
    >>> Region((0,), (4,)).slices(Region((2,), (4,)))
    Traceback (most recent call last):
    shardwright.errors.RegionError: region [0:4] is not inside [2:6]: ...
    """


class TilingError(LayoutError):
    """Shards that do not tile their tensor: the first overlap, gap or stray, with the shards and their numbers.

    >>> from shardwright.sharded import EnumerableShardingSpec, ShardMetadata
    >>> EnumerableShardingSpec([ShardMetadata([0], [3], "rank:0/cpu"), ShardMetadata([2], [2], "rank:1/cpu")])
    Traceback (most recent call last):
    shardwright.errors.TilingError: overlap: shard 0 [0:3] on rank:0/cpu and shard 1 [2:4] on rank:1/cpu both hold [2:3]
    """


class PlacementError(LayoutError):
    """A placement that cannot be, or that does not fit this tensor and this mesh.

    >>> from shardwright import Layout, Mesh, Shard
    >>> Layout(Mesh((2,)), [Shard(3)], (8, 8))
    Traceback (most recent call last):
    shardwright.errors.PlacementError: S(3) on mesh dimension 0 ...
    """


class MeshError(LayoutError):
    """A mesh that cannot be, or a rank or a dimension name that is not in it.

    >>> from shardwright import Mesh
    >>> Mesh((2, 2), ranks=(0, 1, 2))
    Traceback (most recent call last):
    shardwright.errors.MeshError: mesh of shape (2, 2) needs 4 ranks, got 3: ...
    """


class ArgumentTypeError(ShardwrightError, TypeError):
    """A value of a kind that has no meaning here.

    >>> from shardwright import Shard
    >>> Shard("rows")
    Traceback (most recent call last):
    shardwright.errors.ArgumentTypeError: Shard dimension 'rows' is a str: an integer is needed
    """


class CommError(ShardwrightError, RuntimeError):
    """Something went wrong between ranks: a step failed on one of them, or one is lost.

    >>> issubclass(RankLostError, CommError), issubclass(CommError, RuntimeError)
    (True, True)
    """


class CollectiveArgumentError(CommError, ValueError):
    """Sizes or ranks given to a collective that do not fit its tensor or its group.

    >>> import torch
    >>> from shardwright import comm
    >>> comm.all_gather(torch.ones(3), sizes=[2])
    Traceback (most recent call last):
    shardwright.errors.CollectiveArgumentError: all_gather: sizes [2] give rank 0 extent 2 in dimension 0, ...
    """


class ProgramMismatchError(CommError):
    """Ranks were about to make different movements: the message says which rank, which operator, which line.

    >>> issubclass(ProgramMismatchError, RuntimeError)
    True
    """


@dataclass(frozen=True, slots=True)
class Failure:
    """What one rank said of its failure: its number, the error's type, message and traceback.

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
    """A step failed on one rank or several; every rank raises this same error.

    `failures` holds each failing rank's own words, lowest rank first; on a rank that failed, `__cause__`
    is the exception itself.

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
    """A rank died, or did not answer within the timeout. `ranks` names those that are known to be lost.

    >>> RankLostError("rank 2 did not answer within 5 s", ranks=(2,)).ranks
    (2,)
    """

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        super().__init__(message)

    def __reduce__(self) -> tuple[type[RankLostError], tuple[str, tuple[int, ...]]]:
        return type(self), (str(self), self.ranks)


class TensorError(ShardwrightError, RuntimeError):
    """A DTensor was asked for what it cannot do.

    A RuntimeError, never a TypeError: Python's operators turn a TypeError into "unsupported operand".

    >>> issubclass(TensorError, RuntimeError)
    True
    """


class MixedTensorsError(TensorError):
    """Plain tensors beside DTensors in one call: nothing says how the plain ones are laid out.

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
    """A write in place that would change its target's layout, or that would be lost.

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
    """A gradient was asked for through a partial maximum, minimum or product, which has none.

    >>> issubclass(PartialGradientError, TensorError)
    True
    """


class ShardError(TensorError, ValueError):
    """A shard whose tensor does not fit its metadata: its rank, its number, what it has and what it should have.

    >>> import torch
    >>> from shardwright import sharded
    >>> sharded.Shard.from_tensor_and_offsets(torch.zeros(2, 3), [0], rank=0)
    Traceback (most recent call last):
    shardwright.errors.ShardError: a shard of 2 dimensions at offsets [0]: give one offset for each
    """


class DisagreementError(ShardError):
    """Ranks describe one ShardedTensor differently: which ranks say what. Raised alike on all of them.

    >>> issubclass(DisagreementError, ValueError)
    True
    """


class LocalTensorError(TensorError, ValueError):
    """A local tensor that does not fit its layout: its size, dtype or device, on the rank that is named.

    >>> import torch, shardwright as sw
    >>> sw.DTensor.from_local(torch.ones(3), sw.Mesh((1,)), [sw.Shard(0)], shape=(4,))
    Traceback (most recent call last):
    shardwright.errors.LocalTensorError: from_local: rank 0 has a local tensor of shape (3,), ...
    """


class RandomArgumentError(TensorError, ValueError):
    """A parameter that a distribution does not have, or a seed on which ranks disagree.

    >>> import shardwright as sw
    >>> sw.zeros(2, mesh=sw.Mesh((1,))).bernoulli_(1.5)
    Traceback (most recent call last):
    shardwright.errors.RandomArgumentError: ...
    """


class RuleError(TensorError):
    """A rule that cannot be registered, or whose answer does not fit the operator.

    >>> import torch, shardwright as sw
    >>> sw.register_rule(torch.add, sw.rules.pointwise())
    Traceback (most recent call last):
    shardwright.errors.RuleError: add has a rule already: give replace=True to put yours in its place
    """


class CaptureError(TensorError):
    """A program that `sw.compile` cannot capture; the message says which line of it, and why.

    >>> import shardwright as sw
    >>> x = sw.ones(2, mesh=sw.init_device_mesh("cpu", (1,)))
    >>> sw.compile(lambda x: x if x.sum() > 1 else -x)(x)
    Traceback (most recent call last):
    shardwright.errors.CaptureError: ...: the program looks at a value (item), ...
    """


class UnsupportedError(TensorError):
    """A path that would silently see the shard alone, refused with the reason and what to do instead.

    >>> import torch, shardwright as sw
    >>> torch.func.grad(torch.sum)(sw.ones(2, mesh=sw.Mesh((1,))))
    Traceback (most recent call last):
    shardwright.errors.UnsupportedError: torch.func ...
    """


class StorageError(ShardwrightError, OSError):
    """The place of a checkpoint could not be read or written: what was being done, to what, and why it failed.

    >>> from shardwright.storage import LocalStorage
    >>> LocalStorage("somewhere").open("../manifest.json")
    Traceback (most recent call last):
    shardwright.errors.StorageError: key '../manifest.json': keys have small letters, digits, dots and hyphens, ...
    """


class MissingKeyError(StorageError):
    """Nothing is stored under a key.

    >>> issubclass(MissingKeyError, OSError)
    True
    """


class StorageBusyError(StorageError):
    """Another process is saving a checkpoint to the same place.

    >>> issubclass(StorageBusyError, OSError)
    True
    """


class CheckpointError(ShardwrightError, RuntimeError):
    """A checkpoint could not be saved or loaded.

    >>> issubclass(CheckpointError, RuntimeError)
    True
    """


class StateError(CheckpointError, ValueError):
    """Something in a state is not stored: its path, what it is, and what to do.

    >>> import tempfile
    >>> from shardwright import checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoint.save({"model": {"hook": print}}, folder)
    Traceback (most recent call last):
    shardwright.errors.StateError: model.hook: a builtins.builtin_function_or_method is not stored: ...
    """


class StateDiffersError(StateError):
    """Ranks have different values under one name: all such names, and which ranks have what.

    >>> issubclass(StateDiffersError, StateError)
    True
    """


class NotACheckpointError(CheckpointError):
    """Nothing was saved there, or not completely.

    >>> import tempfile
    >>> from shardwright import checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoint.read(folder)
    Traceback (most recent call last):
    shardwright.errors.NotACheckpointError: LocalStorage(...) holds no checkpoint: there is no manifest.json
    """


class SaveTimeoutError(CheckpointError, TimeoutError):
    """A save in the background had not ended when the wait for it did; it goes on.

    >>> issubclass(SaveTimeoutError, TimeoutError)
    True
    """


class MissingNameError(CheckpointError, KeyError):
    """No tensor or value of that name is stored; the message suggests the nearest name.

    >>> import tempfile
    >>> from shardwright import checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoint.save({"epoch": 3}, folder)
    ...     checkpoint.open(folder).value("epochs")
    Traceback (most recent call last):
    shardwright.errors.MissingNameError: no plain value is stored under 'epochs'; did you mean 'epoch'?
    """

    def __str__(self) -> str:  # a KeyError's text would be the repr of it
        return str(self.args[0]) if self.args else ""


class LoadMismatchError(CheckpointError, ValueError):
    """What is stored does not fit what is asked for: every name, shape and dtype that does not, at once.

    >>> issubclass(LoadMismatchError, ValueError)
    True
    """


class FormatError(CheckpointError, ValueError):
    """A manifest of a version that is not known, or one that makes no sense.

    >>> issubclass(FormatError, ValueError)
    True
    """


class UnknownVersionError(FormatError):
    """A manifest of a version that this library does not read: a newer one wrote it.

    >>> issubclass(UnknownVersionError, FormatError)
    True
    """


class CorruptionError(CheckpointError):
    """Bytes are not those that were written: which file, which tensor, which block.

    >>> issubclass(CorruptionError, RuntimeError)
    True
    """


class RanksError(ShardwrightError, RuntimeError):
    """Ranks borrowed from a test pool raised, died or hung; the message holds their tracebacks or stacks.

    >>> from shardwright.testing import run_ranks
    >>> run_ranks(1, lambda: 1 // 0)
    Traceback (most recent call last):
    shardwright.errors.RanksError: 1 of 1 rank failed
    rank 0 raised ZeroDivisionError: ...
    """
