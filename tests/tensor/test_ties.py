"""Tied parameters and buffers of a module stay tied when it is distributed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.errors import TensorError
from shardwright.testing import outcomes, run_ranks


class Tied(nn.Module):
    """A one-layer language model: embedding and output share their weight, and two modules share a buffer."""

    def __init__(self, head_first: bool = False) -> None:
        super().__init__()
        if head_first:
            self.head, self.embedding = nn.Linear(4, 8, bias=False), nn.Embedding(8, 4)
        else:
            self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((4,), 0.5))
        self.head.register_buffer("scale", self.scale)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.embedding(tokens) * self.scale)


def every_name(name: str, module: nn.Module, mesh: Any) -> None:
    """Distribute each occurrence of a weight separately, as a user's partition function does."""
    if "weight" in module._parameters:
        module.register_parameter("weight", sw.distribute_tensor(module.weight, mesh, [sw.Shard(0)]))


def only(kind: type[nn.Module], *placements: object) -> Callable[[str, nn.Module, Any], None]:
    def partition(name: str, module: nn.Module, mesh: Any) -> None:
        if isinstance(module, kind):
            module.register_parameter("weight", sw.distribute_tensor(module.weight, mesh, placements))

    return partition


PARTITIONS: dict[str, Any] = {
    "none": None,
    "every name": every_name,
    "the embedding": only(nn.Embedding, sw.Shard(1)),
    "the head": only(nn.Linear, sw.Shard(0)),
}


def train(model: nn.Module, tokens: Any, targets: Any) -> list[Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    gradients = []
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        gradients.append(model.embedding.weight.grad.clone())
        optimizer.step()
    return [*gradients, model.embedding.weight.detach().clone()]


def test_tied_weights_train_as_on_one_process_whichever_name_is_distributed() -> None:
    def work() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        torch.manual_seed(0)
        tokens, targets = torch.randint(8, (4, 3)), torch.randint(8, (4, 3))
        rows = [sw.distribute_tensor(x, mesh, [sw.Shard(0)]) for x in (tokens, targets)]
        for head_first in (False, True):
            plain = Tied(head_first)
            expected = train(copy.deepcopy(plain), tokens, targets)
            for name, partition in PARTITIONS.items():
                ours = sw.distribute_module(copy.deepcopy(plain), mesh, partition)
                assert ours.head.weight is ours.embedding.weight, name
                assert ours.head.scale is ours.scale, name
                assert len(list(ours.parameters())) == 1, name
                for actual, value in zip(train(ours, *rows), expected, strict=True):
                    torch.testing.assert_close(actual.full_tensor(), value)

    run_ranks(2, work)


def test_different_placements_for_tied_weights_raise_and_change_nothing() -> None:
    def work() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        model = Tied()

        def partition(name: str, module: nn.Module, mesh: Any) -> None:
            only(nn.Embedding, sw.Shard(0))(name, module, mesh)
            only(nn.Linear, sw.Shard(1))(name, module, mesh)

        before = model.embedding.weight
        try:
            sw.distribute_module(model, mesh, partition)
        finally:
            assert model.embedding.weight is before
            assert model.head.weight is before

    for outcome in outcomes(2, work):
        assert outcome.kind == "TensorError"
        assert "embedding.weight and head.weight are tied" in outcome.message
        assert "S(0)" in outcome.message
        assert "S(1)" in outcome.message


def test_distinct_parameters_on_one_memory_stay_distinct_and_share_memory() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = nn.Parameter(model[0].weight.data)
    sw.distribute_module(model, sw.init_device_mesh("cpu", (1,)))
    first, second = model[0].weight, model[1].weight
    assert first is not second
    assert isinstance(second, nn.Parameter)
    with torch.no_grad():
        first.fill_(7)
    assert second.sum().item() == 63


def test_ties_survive_conversion_and_materialization() -> None:
    mesh = sw.init_device_mesh("cpu", (1,))
    with torch.device("meta"):
        model = Tied()
    sw.distribute_module(model, mesh, every_name)
    weight = model.head.weight
    model.to_empty(device="cpu")
    assert model.head.weight is model.embedding.weight is weight
    assert weight.device.type == "cpu"
    assert weight.requires_grad
    nn.init.ones_(weight)
    model.double().to("meta").to("meta")
    assert model.head.weight is model.embedding.weight is weight
    assert weight.dtype == torch.float64
    assert copy.deepcopy(model).head.weight is not weight


def test_ties_survive_load_state_dict_with_assign() -> None:
    mesh = sw.init_device_mesh("cpu", (1,))
    model, source = (sw.distribute_module(Tied(), mesh, every_name) for _ in range(2))
    loaded = {name: value.clone() for name, value in source.state_dict().items()}
    model.load_state_dict(loaded, assign=True)
    assert model.head.weight is model.embedding.weight
    assert model.head.scale is model.scale
    assert isinstance(model.head.weight, nn.Parameter)
    assert torch.equal(model.head.weight, source.head.weight)
    del loaded["head.weight"]  # as in files of Hugging Face
    loaded["embedding.weight"] = loaded["embedding.weight"] * 2
    model.load_state_dict(loaded, assign=True, strict=False)
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.head.weight, source.head.weight * 2)


def test_deliberately_untied_module_stays_untied() -> None:
    mesh = sw.init_device_mesh("cpu", (1,))
    model = sw.distribute_module(Tied(), mesh)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone() + 1)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    assert model.head.weight is not model.embedding.weight
    assert not torch.equal(model.head.weight, model.embedding.weight)


def test_assigning_different_placements_to_tied_weights_raises() -> None:
    mesh = sw.init_device_mesh("cpu", (1,))
    model = sw.distribute_module(Tied(), mesh)
    loaded = {name: value.clone() for name, value in model.state_dict().items()}
    loaded["head.weight"] = loaded["head.weight"].redistribute(placements=[sw.Shard(0)])
    with pytest.raises(TensorError, match=r"embedding\.weight and head\.weight are tied"):
        model.load_state_dict(loaded, assign=True)


def test_tied_gpt2_trains_as_on_one_process() -> None:
    pytest.importorskip("transformers")

    def work() -> None:
        from transformers import GPT2Config, GPT2LMHeadModel  # type: ignore[import-not-found]  # slow: in ranks only

        mesh = sw.init_device_mesh("cpu", (2,))
        torch.manual_seed(0)
        config = GPT2Config(
            n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=8, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
        plain = GPT2LMHeadModel(config)
        ours = sw.distribute_module(copy.deepcopy(plain), mesh, only(nn.Embedding, sw.Shard(0)))
        ours.tie_weights()
        assert ours.lm_head.weight is ours.transformer.wte.weight
        tokens = torch.randint(32, (4, 8))
        rows = sw.distribute_tensor(tokens, mesh, [sw.Shard(0)])
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (plain, ours)]
        for _ in range(2):
            losses = []
            for model, batch, optimizer in zip((plain, ours), (tokens, rows), optimizers, strict=True):
                optimizer.zero_grad()
                with sw.implicit_replication():
                    loss = model(input_ids=batch, labels=batch).loss
                    loss.backward()
                losses.append(loss.item())
            gradient = ours.lm_head.weight.grad.full_tensor()
            torch.testing.assert_close(gradient, plain.lm_head.weight.grad, rtol=1e-4, atol=1e-5)
            assert losses[1] == pytest.approx(losses[0], rel=1e-4)
            for optimizer in optimizers:
                optimizer.step()

    run_ranks(2, work)
