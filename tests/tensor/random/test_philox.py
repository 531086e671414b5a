"""Words are a pure function of key and counter, for every implementation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.tensor.random import philox
from shardwright.tensor.random.philox import Key, multiply_high, words

CPU = torch.device("cpu")
WORD = 2**64


def reference_block(key: Key, block: int) -> list[int]:
    """Philox4x64-10 as published, in Python integers."""
    a, b, c, d = block, 0, 0, 0
    first, second = key.seed % WORD, key.offset % WORD
    for _ in range(10):
        one, other = 0xD2E7470EE14C6C93 * a, 0xCA5A826395121157 * c
        a, b, c, d = other // WORD ^ b ^ first, other % WORD, one // WORD ^ d ^ second, one % WORD
        first, second = (first + 0x9E3779B97F4A7C15) % WORD, (second + 0xBB67AE8584CAA73B) % WORD
    return [a, b, c, d]


keys = st.builds(Key, st.integers(0, WORD - 1), st.integers(0, 2**40))
blocks = st.one_of(st.integers(0, 100), st.integers(0, 2**61))


@given(keys, st.lists(blocks, min_size=1, max_size=5).map(sorted), st.integers(1, 9))
def test_numpy_torch_and_the_reference_give_the_same_words(key: Key, firsts: list[int], count: int) -> None:
    expected = [[w for b in range(first, first + count) for w in reference_block(key, b)] for first in firsts]
    by_torch = philox._torch_words(key, torch.tensor(firsts), count)
    by_numpy = [philox._numpy_words(key, first, count).tolist() for first in firsts]
    assert (by_torch.numpy().view(np.uint64).tolist(), by_numpy) == (expected, expected)


@pytest.mark.parametrize(
    ("firsts", "count", "way"),
    [
        (range(0, 40_000, 2), 1, "one span"),
        (range(0, 10**9, 10**5), 2, "torch"),
        (range(0, 10**9, 10**8), 2, "row by row"),
    ],
)
def test_all_strategies_for_rows_give_the_same_words(
    firsts: range, count: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = {"numpy": 0, "torch": 0}
    by_numpy, by_torch = philox._numpy_words, philox._torch_words
    monkeypatch.setattr(philox, "_numpy_words", lambda *a: (calls.update(numpy=calls["numpy"] + 1), by_numpy(*a))[1])
    monkeypatch.setattr(philox, "_torch_words", lambda *a: (calls.update(torch=1), by_torch(*a))[1])
    found = words(Key(5, 6), np.array(firsts), count, CPU)
    expected_calls = {"one span": (1, 0), "torch": (0, 1), "row by row": (len(firsts), 0)}[way]
    assert (calls["numpy"], calls["torch"]) == expected_calls
    assert torch.equal(found, by_torch(Key(5, 6), torch.tensor(firsts), count))


@given(st.lists(st.integers(0, WORD - 1), min_size=1), st.one_of(st.integers(1, 2**33), st.integers(1, WORD - 1)))
def test_multiply_high_is_the_high_word_of_the_product(numbers: list[int], factor: int) -> None:
    found = multiply_high(torch.from_numpy(np.array(numbers, np.uint64).view(np.int64)), factor)
    assert found.numpy().view(np.uint64).tolist() == [number * factor // WORD for number in numbers]


def test_seeds_and_offsets_beyond_64_bits_wrap() -> None:
    assert torch.equal(words(Key(-1, 3), [0], 2, CPU), words(Key(2**64 - 1, 3 + 2**64), [0], 2, CPU))


def test_different_keys_give_different_words() -> None:
    seen = {tuple(words(Key(seed, offset), [0], 1, CPU)[0].tolist()) for seed in range(20) for offset in range(20)}
    assert len(seen) == 400


@pytest.mark.gpu
@pytest.mark.parametrize("key", [Key(0, 0), Key(2**64 - 3, 2**40), Key(2**63, 2**63 - 1)])
def test_the_cuda_kernel_gives_the_same_words(key: Key) -> None:
    firsts = [0, 5, 2**40, 2**61]
    on_cuda = words(key, firsts, 1000, torch.device("cuda")).cpu()
    assert torch.equal(on_cuda, philox._torch_words(key, torch.tensor(firsts), 1000))
