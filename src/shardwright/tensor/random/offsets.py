"""Choose seed and offset of each random operator: the same on every rank, and the same again in a recompute."""

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

_MAX_DRAWS = 32_768
_MAX_STATES = 32_768
_MAX_SEEDS = 256
_STATE = struct.Struct("<QQ")


@dataclass(slots=True)
class _Stream:
    """The stream of one torch seed: the seed to use for it, and the next unused offset."""

    seed: int
    next_offset: int
    first_draw: int | None  # the first draw of torch after this seed, if drawing it means a restart
    agreed: set[Hashable] | None  # the meshes that agreed on the seed; None: it is the same on all ranks


@final
class OffsetBasedRNGTracker:
    """Assigns (seed, offset) to each random operator, in step with torch's default CPU generator.

    Every operator takes the next offset of the seed, whatever plain numbers are drawn in between: ranks that draw
    different amounts of them agree on every offset. The offset follows what the program does to torch's generator:

    - *seeded* by `torch.manual_seed`: the offset starts at 0. Ranks may have given torch different seeds
      (`torch.manual_seed(seed + rank)`), so `agree_seed` maps the seed to the one they share.
    - *restored* by `torch.set_rng_state` to a state returned by `torch.get_rng_state`: the offset is the one at which
      the state was taken. So a recompute of activation checkpointing gets the offsets of the first pass, and operators
      after `fork_rng` continue where they were. The last 32,768 states are kept.
    - changed directly (`torch.default_generator.set_state`): this cannot be observed. So each operator also draws one
      63-bit number from the generator: a number that was drawn before means that the generator was rewound, and the
      operator gets the key of that draw. Here ranks must have drawn the same amounts of plain numbers. The last 32,768
      draws are kept, until the generator is seeded or restored as above.

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
        self._streams: OrderedDict[int, _Stream] = OrderedDict()  # by torch's seed, most recently used last
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
        """Return the seed and offset of the next random operator.

        `agree_seed` takes this rank's seed and returns the one that all ranks of the operator use; it may communicate.
        It is called once for each torch seed and each `among` (the mesh of those ranks), so that all of them call it
        the same number of times, and never after `manual_seed`. Without it, each rank uses its own seed.

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
        if len(self._keys) > _MAX_DRAWS:
            self._keys.popitem(last=False)
        return key

    def seeded(self) -> None:
        """Start at offset 0: torch was seeded, with a known seed or a new one.

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
        """Record the offset at which this state of torch's generator was taken.

        >>> rng = OffsetBasedRNGTracker()
        >>> rng.saved(torch.get_rng_state())
        """
        stream = self._streams.get(torch.initial_seed())
        self._saved[_digest(state)] = torch.initial_seed(), 0 if stream is None else stream.next_offset
        if len(self._saved) > _MAX_STATES:
            self._saved.popitem(last=False)

    def restored(self, state: Tensor) -> None:
        """Continue at the offset at which this state of torch's generator was taken, if it is known.

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
        """Return seed and next offset in 16 bytes, for `set_state`.

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
        """Continue from a state of `get_state`, independently of torch's own generator.

        >>> OffsetBasedRNGTracker().set_state(torch.zeros(3, dtype=torch.uint8))
        Traceback (most recent call last):
        shardwright.errors.RandomArgumentError: state must be 16 torch.uint8 from get_state, got 3 ...
        """
        if state.dtype is not torch.uint8 or state.numel() != _STATE.size:
            raise RandomArgumentError(
                f"state must be {_STATE.size} torch.uint8 from get_state, got {state.numel()} {state.dtype}"
            )
        seed, offset = _STATE.unpack(bytes(state.tolist()))
        self.load_state_dict({"seed": seed, "offset": offset})

    def state_dict(self) -> dict[str, int]:
        """Return seed and next offset as plain values, for a checkpoint.

        >>> rng = OffsetBasedRNGTracker()
        >>> rng.manual_seed(7)
        >>> rng.state_dict()
        {'seed': 7, 'offset': 0}
        """
        seed, offset = self._position()
        return {"seed": seed, "offset": offset}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a `state_dict`; torch's own generator may be restored before or after it, or not at all.

        >>> rng = OffsetBasedRNGTracker()
        >>> rng.load_state_dict({"seed": 7, "offset": 3})
        >>> rng.next_offset()
        Key(seed=7, offset=3)
        """
        if state.keys() != {"seed", "offset"} or not all(type(value) is int and value >= 0 for value in state.values()):
            raise RandomArgumentError(
                f"state must have 'seed' and 'offset', integers of at least 0, as from state_dict, got {state!r}"
            )
        # If torch has drawn nothing since it was seeded, its first draw comes next and does not mean a restart.
        torch_seed = torch.initial_seed()
        is_fresh = torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(torch_seed).get_state())
        first_draw = None if is_fresh else self._first_draw(torch_seed)
        self._start_at(_Stream(state["seed"], state["offset"], first_draw, agreed=None))

    def reset(self) -> None:
        """Forget every seed and draw: this process is now a rank of another world.

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
        """Restore this tracker and torch's CPU generator afterwards, whatever is seeded and drawn inside.

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
        """Forget all draws and continue from this stream, for torch's present seed and for the seed itself."""
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
            if len(self._streams) > _MAX_SEEDS:
                self._streams.popitem(last=False)
        if agree_seed is not None and stream.agreed is not None and among not in stream.agreed:
            seed = agree_seed(stream.seed)
            if stream.agreed and seed != stream.seed:
                raise RandomArgumentError(
                    f"ranks of {among} have different seeds, {stream.seed} here and {seed} on the first of them: call "
                    "shardwright.manual_seed with the same seed on all ranks"
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
    # Compilers save and restore the generator under dispatch modes that do not accept real tensors.
    with torch._C._DisableTorchDispatch():
        return hash(state.numpy().tobytes())


tracker = OffsetBasedRNGTracker()
"""The tracker of this process."""


def manual_seed(seed: int) -> None:
    """Seed random DTensors and torch: from then on, equal programs give equal numbers on every layout and mesh.

    >>> manual_seed(7)
    >>> tracker.next_offset()
    Key(seed=7, offset=0)
    >>> torch.initial_seed()
    7
    """
    tracker.manual_seed(seed)
