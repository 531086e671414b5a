"""Ranks of one host exchange messages through shared memory: the same results, and the same errors."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch

from shardwright import comm
from shardwright.comm import shared_memory
from shardwright.comm.shared_memory import Introduction, SharedMemory
from shardwright.errors import ProgramMismatchError, RankLostError
from shardwright.testing import Raised, outcomes, run_ranks


def introduced(timeout: float = 5.0) -> list[SharedMemory | None]:
    """Return the memory of two ranks, both in this process."""
    ranks = [Introduction(rank, timeout) for rank in range(2)]
    hellos = [rank.hello() for rank in ranks]
    answers = [rank.answer({1 - index: hellos[1 - index]}) for index, rank in enumerate(ranks)]
    return [rank.result({1 - index: answers[1 - index]}) for index, rank in enumerate(ranks)]


def pair(timeout: float = 5.0) -> tuple[SharedMemory, SharedMemory]:
    first, second = introduced(timeout)
    assert first is not None
    assert second is not None
    return first, second


def data(value: int, nbytes: int = 100) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


def test_messages_are_matched_by_tag_in_any_order_and_by_order_within_a_tag() -> None:
    first, second = pair()
    for tag, value in ((7, 1), (8, 2), (7, 3)):
        assert first.send(1, tag, first.put(data(value), (1,)))
    for tag, value in ((8, 2), (7, 1), (7, 3)):
        target = torch.empty(100, dtype=torch.uint8)
        assert second.receive(0, tag, target)
        assert torch.equal(target, data(value))


def test_memory_is_reused_once_all_readers_have_read() -> None:
    first, second = pair()
    places = set()
    for value in range(3000):
        place = first.put(data(value % 256), (1,))
        places.add(place)
        first.send(1, 5, place)
        target = torch.empty(100, dtype=torch.uint8)
        assert second.receive(0, 5, target)
        assert target[0] == value % 256
    assert len(places) == 1


def test_without_room_a_message_is_left_to_gloo() -> None:
    first, second = pair()
    largest = data(9, shared_memory._MAX_BYTES)
    places = [first.put(largest, (1,)) for _ in range(4)]
    assert [slot >= 0 for slot, _ in places] == [True, True, True, False]
    first.send(1, 3, places[-1])
    assert not second.receive(0, 3, torch.empty(0, dtype=torch.uint8))


def test_notes_wait_for_room_in_the_socket() -> None:
    first, second = pair()
    place = first.put(data(1), (1,))
    sent = [first.send(1, tag, place) for tag in range(20_000)]
    assert not all(sent)
    with mock.patch.object(first, "_timeout", 0.1), pytest.raises(RuntimeError, match="timed out"):
        first.flush(1)  # nothing is read
    assert second.receive(0, 0, torch.empty(100, dtype=torch.uint8))


def test_a_wait_ends_with_the_timeout_and_with_the_connection() -> None:
    first, second = pair(timeout=0.6)
    with pytest.raises(RuntimeError, match="timed out"):
        first.receive(1, 1, data(0))
    first, second = pair()
    second.abort()
    with pytest.raises(RuntimeError, match="connection closed"):
        first.receive(1, 1, data(0))
    with pytest.raises(RuntimeError, match="connection closed"):
        first.send(1, 1, (0, 0))


def test_ranks_of_different_hosts_share_nothing() -> None:
    with mock.patch.object(shared_memory, "_host", side_effect=[b"one", b"two", b"one", b"two"]):
        assert introduced() == [None, None]


def test_a_rank_that_cannot_open_the_memory_of_another_is_known_to_both() -> None:
    before = shared_memory._open
    with mock.patch.object(shared_memory, "_open", side_effect=[OSError, before]):
        assert introduced() == [None, None]


def exchanged() -> list[bool]:
    shared = []
    group = comm.world()
    for number in range(1, 5):
        total = comm.all_gather(torch.full((3,), group.rank + number))
        assert total.tolist() == [rank + number for rank in range(group.size) for _ in range(3)]
        shared.append(group.ledger.shared is not None)
    # more than there is room for, waited for in another order; sizes up to those that go through gloo
    sizes = [1, 1000, 1 << 20, (1 << 24) + 8]
    pending = [comm.start_all_gather(torch.full((size,), group.rank, dtype=torch.uint8)) for size in sizes]
    pending += [comm.start_all_gather(torch.full((2,), group.rank + i)) for i in range(700)]
    for i, each in reversed(list(enumerate(pending))):
        pieces = each.wait().chunk(group.size)
        expected = [rank + max(0, i - len(sizes)) for rank in range(group.size)]
        assert [int(piece[0]) for piece in pieces] == [int(piece[-1]) for piece in pieces] == expected
    return shared


@pytest.mark.parametrize("size", [2, 4])
def test_a_group_shares_memory_from_its_third_collective(size: int) -> None:
    assert run_ranks(size, exchanged) == [[False, False, True, True]] * size


def lost() -> None:
    for _ in range(4):
        comm.all_gather(torch.zeros(1))
    if comm.rank() == 1:
        os._exit(7)
    comm.all_gather(torch.zeros(1))


def test_a_rank_that_dies_is_named() -> None:
    outcome = outcomes(2, lost)[0]
    assert isinstance(outcome, Raised)
    assert isinstance(outcome.exception, RankLostError), outcome
    assert outcome.exception.ranks == (1,)


def out_of_step() -> None:
    for _ in range(4):
        comm.all_gather(torch.zeros(1))
    if comm.rank() == 0:
        comm.all_gather(torch.zeros(2))
    else:
        comm.reduce_scatter(torch.zeros(2))


def test_ranks_out_of_step_are_told_so() -> None:
    for outcome in outcomes(2, out_of_step):
        assert isinstance(outcome, Raised)
        assert isinstance(outcome.exception, ProgramMismatchError), outcome
