"""A subgroup is created by its members only."""

from __future__ import annotations

import torch

from shardwright import comm
from shardwright.testing import run_ranks


def test_subgroups_do_not_depend_on_the_number_of_earlier_groups() -> None:
    """Ranks 0 and 1 create one, then 1 and 2, then 0 and 2: each has created a different number before."""

    def work() -> list[float]:
        me = comm.rank()
        mine = [ranks for ranks in ((0, 1), (1, 2), (0, 2), (0, 1, 2)) if me in ranks]
        return [comm.all_reduce(torch.tensor(float(me)), comm.subgroup(ranks)).item() for ranks in mine]

    assert run_ranks(3, work, timeout=30) == [[1.0, 2.0, 3.0], [1.0, 3.0, 3.0], [3.0, 2.0, 3.0]]


def test_a_subgroup_can_be_created_again_after_forget() -> None:
    def work() -> list[float]:
        sums = []
        for _ in range(2):
            if comm.rank() < 2:
                sums.append(comm.all_reduce(torch.ones(()), comm.subgroup((0, 1))).item())
            comm.forget()
        return sums

    assert run_ranks(3, work, timeout=30) == [[2.0, 2.0], [2.0, 2.0], []]


def test_subgroups_do_not_depend_on_groups_of_earlier_worlds() -> None:
    """The other ranks have created groups in a smaller world without rank 2."""

    def work(ranks: tuple[int, ...]) -> float | None:
        if comm.rank() not in ranks:
            return None
        return comm.all_reduce(torch.ones(()), comm.subgroup(ranks)).item()

    run_ranks(2, work, (0, 1))
    run_ranks(3, work, (0, 1), timeout=30)
    assert run_ranks(4, work, (1, 2), timeout=30) == [None, 2.0, 2.0, None]
    assert run_ranks(3, work, (1, 2), timeout=30) == [None, 2.0, 2.0]
    assert run_ranks(4, work, (0, 1, 2), timeout=30) == [3.0, 3.0, 3.0, None]
