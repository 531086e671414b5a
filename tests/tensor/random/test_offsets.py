"""Offsets agree on all ranks, follow torch's seeds and restored states, and are saved in checkpoints."""

from __future__ import annotations

import contextlib
import json

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from shardwright.tensor.random import Key, OffsetBasedRNGTracker, RandomArgumentError, manual_seed, tracker
from shardwright.tensor.random import offsets as offsets_module


@pytest.fixture(autouse=True)
def _leave_torch_alone() -> object:
    with torch.random.fork_rng(devices=()):
        yield


@pytest.fixture
def rng() -> OffsetBasedRNGTracker:
    rng = OffsetBasedRNGTracker()
    rng.manual_seed(1)
    return rng


def offsets(rng: OffsetBasedRNGTracker, count: int) -> list[int]:
    return [rng.next_offset().offset for _ in range(count)]


def test_manual_seed_starts_at_offset_zero_and_seeds_torch(rng: OffsetBasedRNGTracker) -> None:
    rng.manual_seed(11)
    assert [rng.next_offset() for _ in range(3)] == [Key(11, 0), Key(11, 1), Key(11, 2)]
    rng.manual_seed(11)
    assert rng.next_offset() == Key(11, 0)
    rng.manual_seed(11)
    plain = torch.rand(3)
    assert torch.equal(plain, torch.rand(3, generator=torch.Generator().manual_seed(11)))
    assert rng.next_offset() == Key(11, 0)


def test_module_level_manual_seed_seeds_the_tracker() -> None:
    manual_seed(5)
    assert tracker.next_offset() == Key(5, 0)


def test_negative_seeds_wrap_as_in_torch(rng: OffsetBasedRNGTracker) -> None:
    rng.manual_seed(-1)
    assert rng.next_offset() == Key(torch.initial_seed(), 0) == Key(2**64 - 1, 0)


def test_torch_manual_seed_restarts_the_offsets(rng: OffsetBasedRNGTracker) -> None:
    assert offsets(rng, 2) == [0, 1]
    torch.manual_seed(22)
    assert rng.next_offset() == Key(22, 0)
    torch.manual_seed(23)
    torch.rand(5)
    assert rng.next_offset() == Key(23, 0)


def test_the_same_seed_gives_the_same_offsets(rng: OffsetBasedRNGTracker) -> None:
    for _ in range(3):
        torch.manual_seed(1)
        torch.rand(7)
        assert offsets(rng, 3) == [0, 1, 2]


def test_seeding_restarts_at_zero_after_plain_draws_preceded_operators(rng: OffsetBasedRNGTracker) -> None:
    torch.manual_seed(22)
    torch.rand(3)
    assert offsets(rng, 3) == [0, 1, 2]
    torch.manual_seed(22)
    assert offsets(rng, 2) == [0, 1]


def test_plain_draws_do_not_change_offsets(rng: OffsetBasedRNGTracker) -> None:
    found = []
    for count in (0, 3, 1000, 1):
        torch.rand(count)
        found.append(rng.next_offset().offset)
    assert found == [0, 1, 2, 3]


def test_restored_generator_repeats_its_offsets_then_continues(rng: OffsetBasedRNGTracker) -> None:
    assert offsets(rng, 2) == [0, 1]
    state = torch.get_rng_state()
    assert offsets(rng, 3) == [2, 3, 4]
    with torch.random.fork_rng(devices=()):
        torch.set_rng_state(state)
        assert offsets(rng, 2) == [2, 3]
    assert offsets(rng, 2) == [5, 6]  # neither 4 again, nor a gap


def test_activation_checkpointing_recomputes_with_the_same_offsets(rng: OffsetBasedRNGTracker) -> None:
    seen: list[Key] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        torch.rand(2)
        seen.append(rng.next_offset())
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    for use_reentrant in (False, True):
        y = x
        for _ in range(3):
            y = checkpoint(block, y, use_reentrant=use_reentrant)
        y.sum().backward()
    first, second = seen[:6], seen[6:]
    assert [key.offset for key in first[:3]] == [0, 1, 2]
    assert first[3:] == first[2::-1]
    assert [key.offset for key in second[:3]] == [3, 4, 5]
    assert second[3:] == second[2::-1]


def test_generator_is_saved_and_restored_under_fake_tensor_modes(rng: OffsetBasedRNGTracker) -> None:
    """Compilers do this under modes that do not accept real tensors: activation checkpointing of compiled dropout."""
    rng.manual_seed(7)
    with FakeTensorMode():
        state = torch.get_rng_state()
    first = rng.next_offset()
    with FakeTensorMode():
        torch.set_rng_state(state)
    assert rng.next_offset() == first

    def dropped(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: torch.nn.functional.dropout(y.sin()), x, use_reentrant=False)

    x = torch.ones(3, requires_grad=True)
    torch.compile(dropped, backend="aot_eager", fullgraph=True)(x).sum().backward()
    assert x.grad is not None


def test_fork_with_another_seed_does_not_affect_outer_offsets(rng: OffsetBasedRNGTracker) -> None:
    assert offsets(rng, 3) == [0, 1, 2]
    for _ in range(2):
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(99)
            assert rng.next_offset() == Key(99, 0)
    assert rng.next_offset() == Key(1, 3)


def test_offsets_agree_on_ranks_with_different_plain_draws() -> None:
    found = []
    for rank in range(3):
        rng = OffsetBasedRNGTracker()
        rng.manual_seed(3)
        keys = []
        for step in range(4):
            torch.rand(rank * 5 + step * rank)
            state = torch.get_rng_state()
            keys += [rng.next_offset(), rng.next_offset()]
            with torch.random.fork_rng(devices=()):
                torch.set_rng_state(state)
                keys.append(rng.next_offset())
        found.append(keys)
    assert found[0] == found[1] == found[2]
    assert [key.offset for key in found[0]] == [0, 1, 0, 2, 3, 2, 4, 5, 4, 6, 7, 6]


@pytest.mark.parametrize("how", ["seed", "fork", "state", "sw"])
def test_offsets_agree_on_ranks_with_different_plain_draws_after_a_restart(how: str) -> None:
    """Seed or restore the same state twice, with plain draws in between that only some ranks repeat."""
    found = []
    for rank in range(3):
        rng = OffsetBasedRNGTracker()
        rng.manual_seed(11)
        torch.manual_seed(5)
        start, keys = torch.get_rng_state(), []
        for epoch in range(3):
            with torch.random.fork_rng(devices=()) if how == "fork" else contextlib.nullcontext():
                if how == "state":
                    torch.set_rng_state(start)
                else:
                    (rng.manual_seed if how == "sw" else torch.manual_seed)(5)
                for step in range(4):
                    torch.rand(3 + epoch * rank * (step != 1))
                    keys.append(rng.next_offset())
                    inner = torch.get_rng_state()
                    keys.append(rng.next_offset())
                    with torch.random.fork_rng(devices=()):  # a recompute
                        torch.set_rng_state(inner)
                        torch.rand(epoch * rank)
                        keys.append(rng.next_offset())
        found.append(keys)
    assert found[0] == found[1] == found[2]
    assert [key.offset for key in found[0][:12]] == [0, 1, 1, 2, 3, 3, 4, 5, 5, 6, 7, 7]
    assert found[0][:12] == found[0][12:24] == found[0][24:]


def test_directly_rewound_generator_is_detected(rng: OffsetBasedRNGTracker) -> None:
    assert offsets(rng, 2) == [0, 1]
    state = torch.default_generator.get_state()
    assert offsets(rng, 3) == [2, 3, 4]
    torch.default_generator.set_state(state)
    assert offsets(rng, 3) == [2, 3, 4]
    assert offsets(rng, 1) == [5]


def test_fork_with_the_outer_seed_repeats_offsets_only_inside(rng: OffsetBasedRNGTracker) -> None:
    assert offsets(rng, 3) == [0, 1, 2]
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(1)
        assert offsets(rng, 2) == [0, 1]
    assert offsets(rng, 2) == [3, 4]


def test_ranks_with_different_torch_seeds_use_the_agreed_seed() -> None:
    asked: list[int] = []

    def agree(seed: int) -> int:
        asked.append(seed)
        return 40  # rank 0's

    for rank in range(2):
        rng = OffsetBasedRNGTracker()
        torch.manual_seed(40 + rank)
        assert [rng.next_offset(agree), rng.next_offset(agree)] == [Key(40, 0), Key(40, 1)]
        torch.manual_seed(40 + rank)
        assert rng.next_offset(agree) == Key(40, 0)
    assert asked == [40, 41]  # once per seed


def test_manual_seed_needs_no_agreement(rng: OffsetBasedRNGTracker) -> None:
    def agree(seed: int) -> int:
        raise AssertionError(seed)

    rng.manual_seed(7)
    assert rng.next_offset(agree) == Key(7, 0)


def test_reading_the_state_does_not_skip_the_agreement() -> None:
    rng = OffsetBasedRNGTracker()
    torch.manual_seed(41)
    assert rng.state_dict() == {"seed": 41, "offset": 0}
    assert rng.next_offset(lambda seed: 40) == Key(40, 0)


def test_caches_are_bounded(rng: OffsetBasedRNGTracker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offsets_module, "_MAX_DRAWS", 100)
    monkeypatch.setattr(offsets_module, "_MAX_SEEDS", 10)
    monkeypatch.setattr(offsets_module, "_MAX_STATES", 20)
    assert offsets(rng, 500) == list(range(500))
    assert len(rng._keys) == 100
    for seed in range(50):
        torch.manual_seed(seed)
        torch.get_rng_state()
        rng.next_offset()
    assert (len(rng._saved), len(rng._streams)) == (20, 10)


def test_state_dict_is_json_and_continues_in_another_process(rng: OffsetBasedRNGTracker) -> None:
    offsets(rng, 3)
    saved = json.loads(json.dumps(rng.state_dict()))
    assert saved == {"seed": 1, "offset": 3}
    for prepare in (lambda: None, lambda: torch.manual_seed(1), lambda: torch.manual_seed(77)):
        restarted = OffsetBasedRNGTracker()
        prepare()
        restarted.load_state_dict(saved)
        assert [restarted.next_offset(), restarted.next_offset()] == [Key(1, 3), Key(1, 4)]


def test_torch_state_may_be_restored_after_the_tracker(rng: OffsetBasedRNGTracker) -> None:
    offsets(rng, 3)
    saved, torch_state = rng.state_dict(), torch.get_rng_state()
    torch.manual_seed(77)
    restarted = OffsetBasedRNGTracker()
    restarted.load_state_dict(saved)
    torch.set_rng_state(torch_state)
    assert restarted.next_offset() == Key(1, 3)


def test_seeding_after_load_state_dict_restarts_at_zero(rng: OffsetBasedRNGTracker) -> None:
    rng.next_offset()
    rng.load_state_dict({"seed": 1, "offset": 10})
    assert offsets(rng, 2) == [10, 11]
    torch.manual_seed(1)
    assert offsets(rng, 1) == [0]


def test_set_state_restores_the_offset(rng: OffsetBasedRNGTracker) -> None:
    rng.manual_seed(2**64 - 5)
    offsets(rng, 4)
    state = rng.get_state()
    assert (state.dtype, state.numel()) == (torch.uint8, 16)
    after = offsets(rng, 3)
    rng.set_state(state)
    assert rng.next_offset() == Key(2**64 - 5, 4)
    assert offsets(rng, 2) == after[1:]


def test_fork_restores_tracker_and_torch_generator(rng: OffsetBasedRNGTracker) -> None:
    offsets(rng, 2)
    expected_plain = torch.rand(2, generator=torch.Generator().set_state(torch.get_rng_state()))
    with contextlib.suppress(KeyError), rng.fork():
        rng.manual_seed(9)
        offsets(rng, 5)
        raise KeyError
    assert torch.equal(torch.rand(2), expected_plain)
    assert offsets(rng, 2) == [2, 3]


@pytest.mark.parametrize(
    "state", [{}, {"seed": 1}, {"seed": 1, "offset": -1}, {"seed": 1.5, "offset": 0}, {"seed": 1, "offset": 0, "x": 1}]
)
def test_invalid_state_dict_raises(rng: OffsetBasedRNGTracker, state: dict[str, int]) -> None:
    with pytest.raises(RandomArgumentError, match="'seed' and 'offset', integers of at least 0"):
        rng.load_state_dict(state)


def test_invalid_state_tensor_raises(rng: OffsetBasedRNGTracker) -> None:
    with pytest.raises(RandomArgumentError, match=r"state must be 16 torch.uint8 from get_state, got 16 torch.float32"):
        rng.set_state(torch.zeros(16))
