"""The random words from which every number is computed: Philox4x64-10, a pure function of key and counter.

The specification (a later version must give the same numbers; `tests/tensor/random` holds golden values):

- The key of an operator is (seed, offset), both modulo 2^64: 128 bits. No two operators share a key.
- Block b of a key is Philox4x64-10 of the counter (b, 0, 0, 0): words 4b to 4b + 3, 64 bits each.
- Distributions read *lanes* of 32 or 64 bits. A 64-bit lane l is word l; 32-bit lane l is the low half of word
  l / 2 where l is even, the high half where it is odd. Lanes are signed integers, in two's complement.
- Element i (row-major, in the global tensor) has lane i. A complex element i has lanes 2i (real) and 2i + 1
  (imaginary). `distributions` says how lanes become values, and which distributions take lanes of which width.

Nothing else enters, so the number of an element depends on neither layout nor mesh nor device.

Words come from numpy's generator if they are consecutive (about 4 ns each), or from the same function written in torch
operators; `words` uses whichever is estimated to be faster. On CUDA it is one kernel, on other devices the operators.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardwright.tensor.random.kernel import philox_on_cuda

__all__ = ["WORDS_PER_BLOCK", "Key", "Numbers", "multiply_high", "words"]

Numbers: TypeAlias = Sequence[int] | npt.NDArray[np.int64]
WORDS_PER_BLOCK = 4

_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10
_LOW_HALF = 0xFFFFFFFF

# Measured cost in nanoseconds, per block and per call, of numpy and of torch operators.
_NUMPY_BLOCK, _NUMPY_CALL = 15, 3_500
_TORCH_BLOCK, _TORCH_CALL = 130, 700_000
_COPY_BLOCK = 8


class Key(NamedTuple):
    """The key of one random operator, different from that of every other.

    >>> Key(seed=7, offset=3).halves  # as two words of 64 bits
    (7, 3)
    """

    seed: int
    offset: int

    @property
    def halves(self) -> tuple[int, int]:
        """Seed and offset modulo 2^64."""
        return self.seed % 2**64, self.offset % 2**64


def words(key: Key, firsts: Numbers, count: int, device: torch.device) -> Tensor:
    """Return the words of blocks `firsts[r]` to `firsts[r] + count - 1` in row r, as int64; `firsts` ascend.

    >>> row, = words(Key(0, 0), [0], 1, torch.device("cpu"))
    >>> [hex(word % 2**64) for word in row.tolist()]  # as Random123, for a key and a counter of zeros
    ['0x16554d9eca36314c', '0xdb20fe9d672d0fdc', '0xd7e772cee186176b', '0x7e68b68aec7ba23b']
    """
    if device.type == "cuda":
        blocks = torch.as_tensor(firsts, device=device)[:, None] + torch.arange(count, device=device)
        return philox_on_cuda(blocks, *map(_signed, key.halves)).view(len(firsts), -1)
    elif device.type != "cpu":
        return _torch_words(key, torch.as_tensor(firsts, device=device), count)
    rows = len(firsts)
    if rows == 1:
        return torch.from_numpy(_numpy_words(key, int(firsts[0]), count).view(np.int64).reshape(1, -1))
    firsts = np.asarray(firsts)
    span = int(firsts[-1] - firsts[0]) + count
    by_row = rows * (_NUMPY_CALL + _NUMPY_BLOCK * count)
    by_span = _NUMPY_CALL + _NUMPY_BLOCK * span + _COPY_BLOCK * rows * count
    by_torch = _TORCH_CALL + _TORCH_BLOCK * rows * count
    if by_torch < min(by_row, by_span):
        return _torch_words(key, torch.from_numpy(firsts), count)
    elif by_row < by_span:
        collected = np.concatenate([_numpy_words(key, first, count) for first in firsts.tolist()])
    else:
        inside = WORDS_PER_BLOCK * (firsts - firsts[0])[:, None] + np.arange(WORDS_PER_BLOCK * count)
        collected = _numpy_words(key, int(firsts[0]), span)[inside]
    return torch.from_numpy(collected.view(np.int64).reshape(rows, WORDS_PER_BLOCK * count))


def multiply_high(words: Tensor, factor: int) -> Tensor:
    """Return the high 64 bits of the 128-bit products of words and factor, all unsigned.

    >>> multiply_high(torch.tensor([-1, 2**62]), 12)  # (2^64 - 1) * 12 and 2^62 * 12, over 2^64
    tensor([11,  3])
    """
    factor_low, factor_high = factor & _LOW_HALF, factor >> 32
    low, high = words & _LOW_HALF, _upper_half(words)
    if factor <= 2**31:  # no sum reaches the sign bit: half the steps suffice
        return high.mul_(factor).add_(low.mul_(factor).bitwise_right_shift_(32)).bitwise_right_shift_(32)
    middle = (high * factor_low).add_(_upper_half(low * factor_low))
    carried = low.mul_(factor_high).add_(middle & _LOW_HALF)
    return high.mul_(factor_high).add_(_upper_half(middle)).add_(_upper_half(carried))


class _Generator(threading.local):
    """One numpy generator per thread: setting its state takes a third of the time of creating one."""

    def __init__(self) -> None:
        self.philox = np.random.Philox(key=0)


_generator = _Generator()


def _numpy_words(key: Key, first: int, count: int) -> npt.NDArray[np.uint64]:
    # numpy increments the counter before each block: start one before, wrapping around if `first` is 0.
    before = first - 1
    _generator.philox.state = {
        "bit_generator": "Philox",
        "state": {
            "counter": np.array([before % 2**64] + [2**64 - 1 if before < 0 else 0] * 3, np.uint64),
            "key": np.array(key.halves, np.uint64),
        },
        "buffer": np.zeros(WORDS_PER_BLOCK, np.uint64),
        "buffer_pos": WORDS_PER_BLOCK,
        "has_uint32": 0,
        "uinteger": 0,
    }
    return _generator.philox.random_raw(WORDS_PER_BLOCK * count)


def _torch_words(key: Key, firsts: Tensor, count: int) -> Tensor:
    blocks = firsts[:, None] + torch.arange(count, device=firsts.device)
    a, b, c, d = blocks, *(torch.zeros((), dtype=torch.int64, device=firsts.device) for _ in range(3))
    first_key, second_key = key.halves
    for _ in range(_ROUNDS):
        a, b, c, d = (
            multiply_high(c, _MULTIPLIERS[1]) ^ b ^ _signed(first_key),
            c * _signed(_MULTIPLIERS[1]),
            multiply_high(a, _MULTIPLIERS[0]) ^ d ^ _signed(second_key),
            a * _signed(_MULTIPLIERS[0]),
        )
        first_key, second_key = first_key + _KEY_STEPS[0], second_key + _KEY_STEPS[1]
    return torch.stack((a, b, c, d), dim=-1).reshape(len(firsts), -1)


def _upper_half(words: Tensor) -> Tensor:
    return (words >> 32).bitwise_and_(_LOW_HALF)


def _signed(word: int) -> int:
    """Return the bits of the word modulo 2^64 as a signed int64."""
    return (word + 2**63) % 2**64 - 2**63
