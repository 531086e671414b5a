"""Which seed and which offset a random operator takes: the same on every rank, and again the same in a recompute."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from shardwright.errors import RandomArgumentError
from shardwright.tensor.random import events
from shardwright.tensor.random.philox import Key

__all__ = ["OffsetBasedRNGTracker", "manual_seed", "tracker"]

_REMEMBERED_DRAWS = 32_768
_REMEMBERED_STATES = 32_768
_REMEMBERED_SEEDS = 256
_STATE = struct.Struct("<QQ")


@dataclass(slots=True)
class _Stream:
    """The numbers of one seed of torch's: the seed to use for it, and the next offset that no operator has had."""

    seed: int
    next_offset: int
    first_draw: int | None  # what torch draws first after this seed, where that means a new start
    agreed: set[Hashable] | None  # among whom the seed was agreed on; None: it was given to all, nobody need ask


@final
class OffsetBasedRNGTracker:
    """Gives each random operator its (seed, offset), in step with torch's default CPU generator.

    Every operator takes the next offset of the seed, whatever plain numbers are drawn in between: ranks that draw
    different amounts of them agree on every offset. The offset follows what the program does to torch's generator:

    - *seeded* by `torch.manual_seed`: the offset is 0 again. Ranks may have given torch different seeds
      (`torch.manual_seed(seed + rank)`), so `agree_seed` maps the seed to the one they share.
    - *restored* by `torch.set_rng_state` to a state that `torch.get_rng_state` gave: the offset is what it was when the
      state was taken. So a recompute of activation checkpointing gets the offsets of the first pass, and what comes
      after `fork_rng` goes on where it was. The last 32,768 states are known.
    - done to the generator itself (`torch.default_generator.set_state`): nobody tells. So each operator also draws one
      63-bit number from the generator: a number that was drawn before means that it was rewound, and the operator gets
      what the operator of that draw had. Here ranks must have drawn the same amounts of plain numbers. The last 32,768
      draws are known, until the generator is seeded or restored as above.

    >>> rng = OffsetBasedRNGTracker()
    >>> rng.manual_seed(7)
    >>> rng.next_offset(), rng.next_offset()
    (Key(seed=7, offset=0), Key(seed=7, offset=1))
    >>> _ = torch.manual_seed(8)
    >>> before = torch.get_rng_state()
    >>> rng.next_offset()
    Key(seed=8, offset=0)
    >>> torch.set_rng_state(before)  # as a recompute does
    >>> rng.next_offset(), rng.next_offset()
    (Key(seed=8, offset=0), Key(seed=8, offset=1))
    """

    def __init__(self) -> None:
        self._cell = torch.empty((), dtype=torch.int64, device="cpu")
        self._streams: OrderedDict[int, _Stream] = OrderedDict()  # by torch's seed, the last used at the end
        self._keys: OrderedDict[int, Key] = OrderedDict()  # by draw, the oldest first
        self._saved: OrderedDict[int, tuple[int, int]] = OrderedDict()  # by state: torch's seed and the next offset
        events.listen(self)

    def manual_seed(self, seed: int) -> None:
        """Start at offset 0 of this seed, and seed torch with it. Call it with one seed on all ranks.

        >>> rng = OffsetBasedRNGTracker()
        >>> rng.manual_seed(7)
        >>> rng.next_offset()
        Key(seed=7, offset=0)
        """
        torch_seed = torch.manual_seed(seed).initial_seed()
        self._start_at(_Stream(torch_seed, 0, self._first_draw(torch_seed), agreed=None))

    def next_offset(self, agree_seed: Callable[[int], int] | None = None, among: Hashable = None) -> Key:
        """The seed and the offset of the next random operator.

        `agree_seed` gets this rank's seed and gives the one that all ranks of the operator shall use: it may
        communicate. It is called once for each torch seed and each `among` (the mesh of those ranks), so that all of
        them call it alike whatever else each has done, and never after `manual_seed`. Without it, each rank's own
        seed counts.

        >>> rng = OffsetBasedRNGTracker()
        >>> _ = torch.manual_seed(1000)
        >>> rng.next_offset(agree_seed=lambda seed: seed - 1)
        Key(seed=999, offset=0)
        """
        draw = self._draw(None)
        known = self._keys.get(draw)
        if known is not None:
            return known
        stream = self._stream(agree_seed, among)
        if draw == stream.first_draw:
            stream.next_offset = 0
        key = Key(stream.seed, stream.next_offset)
        stream.next_offset += 1
        self._keys[draw] = key
        if len(self._keys) > _REMEMBERED_DRAWS:
            self._keys.popitem(last=False)
        return key

    def seeded(self) -> None:
        """Start at offset 0: torch has been given a seed, one of before or a new one.

        >>> rng = OffsetBasedRNGTracker()
        >>> for _ in range(2):
        ...     _ = torch.manual_seed(7)
        ...     _ = torch.rand(3)
        ...     rng.next_offset()
        Key(seed=7, offset=0)
        Key(seed=7, offset=0)
        """
        self._keys.clear()
        stream = self._streams.get(torch.initial_seed())
        if stream is not None:
            stream.next_offset = 0

    def saved(self, state: Tensor) -> None:
        """Remember the offset at which this state of torch's generator was taken.

        >>> rng = OffsetBasedRNGTracker()
        >>> rng.saved(torch.get_rng_state())
        """
        stream = self._streams.get(torch.initial_seed())
        self._saved[_digest(state)] = torch.initial_seed(), 0 if stream is None else stream.next_offset
        if len(self._saved) > _REMEMBERED_STATES:
            self._saved.popitem(last=False)

    def restored(self, state: Tensor) -> None:
        """Go on at the offset at which this state of torch's generator was taken, where it is known.

        >>> rng = OffsetBasedRNGTracker()
        >>> rng.manual_seed(7)
        >>> before = torch.get_rng_state()
        >>> first = rng.next_offset()
        >>> torch.set_rng_state(before)
        >>> _ = torch.rand(5)
        >>> rng.next_offset() == first
        True
        """
        known = self._saved.get(_digest(state))
        if known is None:
            return
        self._keys.clear()
        stream = self._streams.get(known[0])
        if stream is not None:
            stream.next_offset = known[1]

    def get_state(self) -> Tensor:
        """Seed and next offset in 16 bytes: what `set_state` takes.

        >>> rng = OffsetBasedRNGTracker()
        >>> rng.manual_seed(7)
        >>> saved, first = rng.get_state(), rng.next_offset()
        >>> rng.set_state(saved)
        >>> rng.next_offset() == first
        True
        """
        seed, offset = self._position()
        return torch.frombuffer(bytearray(_STATE.pack(seed % 2**64, offset)), dtype=torch.uint8)

    def set_state(self, state: Tensor) -> None:
        """Go on from a state of `get_state`, whatever torch's own generator does.

        >>> OffsetBasedRNGTracker().set_state(torch.zeros(3, dtype=torch.uint8))
        Traceback (most recent call last):
        shardwright.errors.RandomArgumentError: state of 3 torch.uint8: 16 torch.uint8 are needed, ...
        """
        if state.dtype is not torch.uint8 or state.numel() != _STATE.size:
            raise RandomArgumentError(
                f"state of {state.numel()} {state.dtype}: {_STATE.size} torch.uint8 are needed, as get_state gives them"
            )
        seed, offset = _STATE.unpack(bytes(state.tolist()))
        self.load_state_dict({"seed": seed, "offset": offset})

    def state_dict(self) -> dict[str, int]:
        """Seed and next offset as plain values, for a checkpoint.

        >>> rng = OffsetBasedRNGTracker()
        >>> rng.manual_seed(7)
        >>> rng.state_dict()
        {'seed': 7, 'offset': 0}
        """
        seed, offset = self._position()
        return {"seed": seed, "offset": offset}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from a `state_dict`; restore torch's own generator before or after it, or not at all.

        >>> rng = OffsetBasedRNGTracker()
        >>> rng.load_state_dict({"seed": 7, "offset": 3})
        >>> rng.next_offset()
        Key(seed=7, offset=3)
        """
        if state.keys() != {"seed", "offset"} or not all(type(value) is int and value >= 0 for value in state.values()):
            raise RandomArgumentError(
                f"state {state!r}: 'seed' and 'offset', integers of 0 or more, are needed, as state_dict gives them"
            )
        # Where torch has drawn nothing since its seed, its first draw is what comes next, and no sign of a new start.
        torch_seed = torch.initial_seed()
        is_fresh = torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(torch_seed).get_state())
        first_draw = None if is_fresh else self._first_draw(torch_seed)
        self._start_at(_Stream(state["seed"], state["offset"], first_draw, agreed=None))

    def reset(self) -> None:
        """Forget every seed and draw: this process has become a rank of another world.

        >>> rng = OffsetBasedRNGTracker()
        >>> rng.manual_seed(7)
        >>> _ = rng.next_offset()
        >>> rng.reset()
        >>> rng.next_offset().offset
        0
        """
        self._streams.clear()
        self._keys.clear()
        self._saved.clear()

    @contextmanager
    def fork(self) -> Iterator[None]:
        """What is seeded and drawn inside leaves no trace outside, in torch's CPU generator neither.

        >>> rng = OffsetBasedRNGTracker()
        >>> rng.manual_seed(7)
        >>> with rng.fork():
        ...     rng.manual_seed(8)
        ...     rng.next_offset()
        Key(seed=8, offset=0)
        >>> rng.next_offset()
        Key(seed=7, offset=0)
        """
        streams, keys, saved = deepcopy(self._streams), self._keys.copy(), self._saved.copy()
        with torch.random.fork_rng(devices=()):
            try:
                yield
            finally:
                self._streams, self._keys, self._saved = streams, keys, saved

    def _start_at(self, stream: _Stream) -> None:
        """Forget all draws and go on from here, under torch's present seed and under the seed itself."""
        self._keys.clear()
        self._saved.clear()
        self._streams = OrderedDict({stream.seed: stream, torch.initial_seed(): stream})

    def _position(self) -> Key:
        stream = self._streams.get(torch.initial_seed())
        return Key(torch.initial_seed(), 0) if stream is None else Key(stream.seed, stream.next_offset)

    def _stream(self, agree_seed: Callable[[int], int] | None, among: Hashable) -> _Stream:
        torch_seed = torch.initial_seed()
        stream = self._streams.get(torch_seed)
        if stream is None:
            stream = self._streams[torch_seed] = _Stream(torch_seed, 0, self._first_draw(torch_seed), agreed=set())
            if len(self._streams) > _REMEMBERED_SEEDS:
                self._streams.popitem(last=False)
        if agree_seed is not None and stream.agreed is not None and among not in stream.agreed:
            seed = agree_seed(stream.seed)
            if stream.agreed and seed != stream.seed:
                raise RandomArgumentError(
                    f"ranks of {among} draw under different seeds, {stream.seed} here and {seed} on the first of them: "
                    "call shardwright.manual_seed with one seed on all ranks"
                )
            stream.seed = seed
            stream.agreed.add(among)
        self._streams.move_to_end(torch_seed)
        return stream

    def _first_draw(self, torch_seed: int) -> int:
        return self._draw(torch.Generator().manual_seed(torch_seed))

    def _draw(self, generator: torch.Generator | None) -> int:
        return int(self._cell.random_(generator=generator).item())


def _digest(state: Tensor) -> int:
    # Compilers save and restore the generator while their modes are on, which take no real tensors.
    with torch._C._DisableTorchDispatch():
        return hash(state.numpy().tobytes())


tracker = OffsetBasedRNGTracker()
"""The tracker of this process."""


def manual_seed(seed: int) -> None:
    """Seed random DTensors and torch: from here on, equal programs give equal numbers on every layout and mesh.

    >>> manual_seed(7)
    >>> tracker.next_offset()
    Key(seed=7, offset=0)
    >>> torch.initial_seed()
    7
    """
    tracker.manual_seed(seed)
