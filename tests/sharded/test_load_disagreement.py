"""Loading different state dicts on different ranks raises on all of them, and changes nothing."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from shardwright import comm, sharded
from shardwright.errors import (
    DisagreementError,
    RankFailedError,
)
from shardwright.testing import run_ranks
from tests.sharded.specs_and_errors import chunks, error_text


def test_loading_different_tensors_into_a_module_raises_on_all_ranks() -> None:
    def on_rank() -> list[str]:
        here, messages = comm.rank(), []
        model = nn.Identity()
        model.table = sharded.zeros(chunks(0, 1), 4)
        model._register_load_state_dict_pre_hook(sharded.pre_load_state_dict_hook, True)
        turned = sharded.ones(chunks(1, 0), 4)
        for mine in ({"table": torch.ones(4)}, {}, {"table": sharded.ones(chunks(0, 1), 4)}, {"table": None}):
            given = dict(mine) if here else {"table": turned}
            messages.append(error_text(DisagreementError, lambda given=given: model.load_state_dict(given)))
        assert torch.equal(model.table.local_tensor(), torch.zeros(2))
        model.load_state_dict({"table": turned})
        assert torch.equal(model.table.local_tensor(), torch.ones(2))
        return messages

    first, second = run_ranks(2, on_rank)
    assert first == second
    assert "'table' is not the same on all ranks: rank 0: a ShardedTensor of torch.float32 with" in first[0]
    assert "rank 1: expected a ShardedTensor, got Tensor" in first[0]
    assert "rank 1: missing" in first[1]


def test_loading_different_states_into_an_optimizer_raises_on_all_ranks() -> None:
    def on_rank() -> list[str]:
        here, messages = comm.rank(), []
        table = sharded.ones(chunks(0), 6, 2, requires_grad=True)  # rank 1 has no shard
        optimizer = sharded.ShardedOptimizer({"table": table}, torch.optim.Adam, lr=0.1)
        functional.embedding(torch.tensor([0, 5]), table).sum().backward()
        optimizer.step()
        saved = optimizer.state_dict()
        other = {"state": {"table": {**saved["state"]["table"], "exp_avg": torch.ones(6, 2)}}}
        for mine in ({"state": None}, {"state": {"table": None}}, {"param_groups": None}, other):
            given = {**saved, **mine} if here else saved
            messages.append(error_text(RankFailedError, lambda given=given: optimizer.load_state_dict(given)))
        cut = saved["state"]["table"]["exp_avg"].detach().reshard(chunks(0, 1, dim=1))
        resharded = {"state": {"table": {**saved["state"]["table"], "exp_avg": cut}}}
        given = {**saved, **resharded} if here else saved
        messages.append(error_text(DisagreementError, lambda: optimizer.load_state_dict(given)))
        table.reshard(chunks(0, 0))
        messages.append(error_text(RankFailedError, optimizer.state_dict))
        messages.append(error_text(RankFailedError, lambda: optimizer.load_state_dict(saved)))
        return messages

    first, second = run_ranks(2, on_rank)
    assert first == second
    assert "'state' must be a dict by parameter name, got NoneType" in first[0]
    assert "rank 0: ShardError: ShardedOptimizer: the shards of 'table' have been replaced" in first[-1]
