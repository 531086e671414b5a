"""`parallelize`: any model trains as on one rank, is initialized, copied and refused as promised."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright import comm
from shardwright.errors import LocalTensorError, MeshError, MeshMismatchError, MixedTensorsError, PlanError, TensorError
from shardwright.tensor.base.policy import replicates_implicitly
from shardwright.testing import Raised, outcomes, run_ranks, same_as_one_rank


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv: int) -> None:
        super().__init__()
        self.head_dim, self.groups = 4, heads // kv
        self.q_proj = nn.Linear(width, heads * 4)
        self.k_proj, self.v_proj = nn.Linear(width, kv * 4), nn.Linear(width, kv * 4)
        self.o_proj = nn.Linear(heads * 4, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (
            project(x).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        key, value = (each.repeat_interleave(self.groups, 1) for each in (key, value))
        attended = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.o_proj(attended.transpose(1, 2).reshape(*x.shape[:2], -1))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv: int, dropout: float) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, kv)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).tril()  # a plain tensor, made in the forward
        x = x + self.dropout(self.attention(self.before(x), mask))
        return x + self.dropout(self.mlp(self.between(x)))


class Transformer(nn.Module):
    """A language model with tied weights, grouped query attention, a buffer, and plain tensors made in its forward."""

    def __init__(self, heads: int = 4, kv: int = 2, dropout: float = 0.0, layers: int = 2) -> None:
        super().__init__()
        width = 8
        self.tokens, self.positions = nn.Embedding(12, width), nn.Embedding(8, width)
        self.layers = nn.ModuleList(Block(width, heads, kv, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 12, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.tokens(ids) * self.scale + self.positions(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


IDS = torch.randint(0, 12, (6, 7), generator=torch.Generator().manual_seed(0))
BATCH = {"ids": IDS, "labels": IDS}
MESHES = ({"dp": 4}, {"tp": 2}, {"dp": 2, "tp": 2}, {"replicate": 2, "dp": 2})


def mesh_of(**sizes: int) -> Any:
    return sw.init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


# --- training -------------------------------------------------------------------------------------------------------


def test_a_model_trains_as_on_one_rank_on_every_mesh() -> None:
    same_as_one_rank(Transformer, BATCH, sw.parallelize, mesh=MESHES, max_norm=0.5)


def test_ragged_batches_and_ignored_labels_train_as_on_one_rank() -> None:
    labels = IDS[:5].clone()
    labels[0], labels[:, 3] = -100, -100
    same_as_one_rank(Transformer, {"ids": IDS[:5], "labels": labels}, sw.parallelize, mesh=MESHES[::2])


@pytest.mark.parametrize(("heads", "kv"), [(6, 6), (6, 2), (3, 1)])
def test_heads_that_do_not_divide_over_the_ranks_train_as_on_one_rank(heads: int, kv: int) -> None:
    same_as_one_rank(lambda: Transformer(heads, kv), BATCH, sw.parallelize, mesh=[{"tp": 4}, {"dp": 2, "tp": 2}])


def test_dropout_draws_the_same_on_every_mesh() -> None:
    def model() -> nn.Module:
        return Transformer(dropout=0.3)

    same_as_one_rank(model, BATCH, sw.parallelize, mesh=MESHES[1:3], reference="shardwright")


def test_frozen_parameters_and_adapters_train_as_on_one_rank() -> None:
    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.down, self.up = base, nn.Linear(8, 2, bias=False), nn.Linear(2, 16, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.up(self.down(x))

    def model() -> nn.Module:
        whole = Transformer()
        whole.requires_grad_(False)
        for layer in whole.layers:
            layer.attention.q_proj = Adapted(layer.attention.q_proj)
        return whole

    plan = {"**.q_proj.base": sw.ColwiseParallel(), "**.q_proj.up": sw.ColwiseParallel(), "**": sw.Replicated()}
    for each in ("auto", plan):
        same_as_one_rank(model, BATCH, lambda m, mesh, p=each: sw.parallelize(m, mesh, p), mesh=MESHES[2])


def test_accumulation_trains_as_on_one_rank() -> None:
    def step(model: nn.Module, batches: Any) -> Tensor:
        total = torch.zeros(())
        for batch in batches:
            loss = model(**batch) / 2
            loss.backward()
            total = total + loss.detach()
        return total

    def deferred(model: nn.Module, batches: Any) -> Tensor:
        with sw.defer_gradient_reduction():
            return step(model, batches)

    micro = [{name: value[rows] for name, value in BATCH.items()} for rows in (slice(0, 2), slice(2, 6))]
    for each in (step, deferred):
        same_as_one_rank(Transformer, micro, sw.parallelize, mesh=MESHES[2], step=each)


@pytest.mark.parametrize("checkpoint", [True, ["layers.0", "layers.*.attention"]])
def test_recomputed_activations_give_the_same_gradients(checkpoint: Any) -> None:
    def parallel(model: nn.Module, mesh: Any) -> None:
        sw.parallelize(model, mesh, checkpoint=checkpoint)

    def model() -> nn.Module:
        return Transformer(dropout=0.3)

    same_as_one_rank(model, BATCH, parallel, mesh=MESHES[2], reference="shardwright")


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_block_that_the_program_checkpoints_makes_plain_tensors_in_recomputation(use_reentrant: bool) -> None:
    def step(model: Any, batch: Any) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        def forward(ids: Tensor) -> Tensor:
            x = model.tokens(ids)
            for layer in model.layers:
                x = checkpoint(layer, x, use_reentrant=use_reentrant)
            return model.head(x).square().mean()

        return forward(batch["ids"])

    same_as_one_rank(Transformer, BATCH, sw.parallelize, mesh={"dp": 2}, step=step)


def sequence_parallel(model: nn.Module, mesh: Any) -> sw.Plan:
    """Return the automatic plan with norms and residuals sharded along the sequence."""
    return sw.auto_plan(model, mesh) | {
        "**.before": sw.SequenceParallel(),
        "**.between": sw.SequenceParallel(),
        "norm": sw.SequenceParallel(),
        "layers.*.attention.o_proj": sw.RowwiseParallel(multiple=8, output_layouts=sw.Shard(1)),
        "layers.*.mlp.2": sw.RowwiseParallel(output_layouts=sw.Shard(1)),
        "tokens": sw.RowwiseParallel(output_layouts=sw.Shard(1)),
    }


def test_sequence_parallelism_trains_as_on_one_rank() -> None:
    def parallel(model: nn.Module, mesh: Any) -> None:
        sw.parallelize(model, mesh, sequence_parallel(model, mesh))

    same_as_one_rank(Transformer, BATCH, parallel, mesh=MESHES[1:3])


def test_ignored_parameters_stay_plain_and_train_as_on_one_rank() -> None:
    def parallel(model: Any, mesh: Any) -> None:
        names = [name for name, _ in model.named_parameters()]
        sw.parallelize(model, mesh, sw.auto_plan(model, mesh) | {"positions": sw.Ignored()})
        assert [name for name, _ in model.named_parameters()] == names
        assert not isinstance(model.positions.weight, sw.DTensor)

    def step(model: Any, batch: Any) -> Tensor:
        return model(**batch)

    same_as_one_rank(Transformer, BATCH, parallel, mesh=MESHES[2], step=step, max_norm=float("inf"), steps=1)


class Small(nn.Module):
    """Parameters with fewer rows than ranks, a scalar, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 1)
        self.scale, self.empty = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x.flatten(1)[:, :4]))) * self.scale + self.empty.sum()


class Convolutions(nn.Module):
    """Batch normalization, whose statistics are those of the global batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.norm(self.first(x[:, None])))).mean((2, 3))


class Recurrent(nn.Module):
    """An LSTM, which keeps its parameters in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(x)[0])


class SharedBlocks(nn.Module):
    """A block that is used twice, and blocks that are used in another order in every step, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4)) for _ in range(3)]
        self.blocks = nn.ModuleList([blocks[0], *blocks])
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for index in ((0, 1, 2, 3), (3, 0, 1), (2,))[self.calls % 3]:
            x = x + self.blocks[index](x)
        return x


def test_other_kinds_of_models_train_as_on_one_rank() -> None:
    def step(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    batch = torch.randn(5, 6, 4, generator=torch.Generator().manual_seed(0))
    for kind in (Small, Convolutions, Recurrent, SharedBlocks):
        same_as_one_rank(kind, batch, mesh=[{"dp": 4}, {"dp": 2, "tp": 2}], step=step, steps=4)


# --- what parallelize does to a model -------------------------------------------------------------------------------


def test_tied_parameters_stay_tied_and_buffers_are_replicated() -> None:
    def work() -> None:
        model: Any = sw.parallelize(Transformer(), mesh_of(dp=2, tp=2))
        assert model.head.weight is model.tokens.weight
        assert model.scale.sharding.is_replicated
        assert str(model.layers[1].mlp[0].weight.sharding) == "[32, 8] (dp: S(0)@1, tp: S(0)@0)"
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        assert model.head.weight is model.tokens.weight

    run_ranks(4, work)


def test_a_model_on_the_meta_device_gets_the_same_values_on_every_mesh() -> None:
    def work(sizes: dict[str, int]) -> dict[str, Tensor]:
        with torch.device("meta"):
            model = Transformer()
        mesh = mesh_of(**sizes)
        sw.parallelize(model, mesh)
        batch = sw.shard_batch(BATCH, mesh)
        with pytest.raises(TensorError, match=r"parameter tokens\.weight is on the meta device"):
            model(**batch)
        model.to_empty(device="cpu")
        sw.manual_seed(0)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        model.scale.fill_(0.5)
        assert model.head.weight is model.tokens.weight
        model(**batch).backward()
        return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}

    expected = run_ranks(1, work, {"dp": 1, "tp": 1})[0]
    for found in run_ranks(4, work, {"dp": 2, "tp": 2}):
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


def test_a_copy_of_a_parallel_model_is_parallel() -> None:
    def work() -> None:
        mesh = mesh_of(dp=2)
        model = sw.parallelize(Transformer(), mesh, checkpoint=True)
        batch = sw.shard_batch(BATCH, mesh)
        expected = model(**batch)
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(2)
        assert torch.equal(model(**batch).full_tensor(), expected.full_tensor())
        loss = other(**batch)
        assert not torch.equal(loss.full_tensor(), expected.full_tensor())
        loss.backward()
        assert other.layers[0].mlp[0].weight.grad is not None
        assert model.layers[0].mlp[0].weight.grad is None

    run_ranks(2, work)


def test_a_parallel_model_can_be_pickled() -> None:
    def work() -> None:
        mesh = mesh_of(dp=1, tp=2)
        layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        model = sw.parallelize(nn.Sequential(layers, copy.deepcopy(layers)), mesh, checkpoint="*")
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        batch = sw.shard_batch(torch.ones(2, 4), mesh)
        found = torch.load(buffer, weights_only=False)(batch)
        assert torch.equal(found.full_tensor(), model(batch).full_tensor())
        assert found.sharding is model(batch).sharding

    run_ranks(2, work)


def test_evaluation_without_gradients_gives_the_logits_of_one_rank() -> None:
    def work() -> None:
        mesh = mesh_of(dp=2, tp=2)
        torch.manual_seed(0)
        plain = Transformer().eval()
        expected = plain(IDS)
        model = sw.parallelize(copy.deepcopy(plain), mesh)
        with torch.no_grad():
            found = model(sw.shard_batch(IDS, mesh)).full_tensor()
        torch.testing.assert_close(found, expected)

    run_ranks(4, work)


# --- communication --------------------------------------------------------------------------------------------------


def activations(trace: sw.Trace) -> list[str]:
    """Return the redistributions of activations that received bytes, as before → after over tp."""
    return [
        f"{move.source.placements[-1]} → {move.target.placements[-1]}".removesuffix("e")  # Re: each rank uses it
        for move in trace.redistributions
        if move.received and len(move.source.shape) == 3
    ]


def test_tensor_parallelism_takes_two_all_reduces_per_layer_each_way() -> None:
    def work() -> None:
        mesh = mesh_of(tp=2)
        model = sw.parallelize(Transformer(layers=3), mesh)
        batch = sw.shard_batch(BATCH, mesh)
        with sw.trace() as forward:
            loss = model(**batch)
        with sw.trace() as backward:
            loss.backward()
        for seen in (forward, backward):  # one more for the embedding, and for the output layer
            assert activations(seen) == ["P(sum) → R"] * (2 * 3 + 1)

    run_ranks(2, work)


def test_sequence_parallelism_takes_two_gathers_and_two_scatters_per_layer_each_way() -> None:
    def work() -> None:
        mesh = mesh_of(tp=2)
        model = Transformer(layers=3)
        sw.parallelize(model, mesh, sequence_parallel(model, mesh))
        batch = sw.shard_batch({name: value[:, :6] for name, value in BATCH.items()}, mesh)
        with sw.trace() as forward:
            loss = model(**batch)
        with sw.trace() as backward:
            loss.backward()
        for seen in (forward, backward):
            assert sorted(activations(seen)) == ["P(sum) → S(1)"] * (2 * 3 + 1) + ["S(1) → R"] * (2 * 3 + 1)

    run_ranks(2, work)


# --- units ----------------------------------------------------------------------------------------------------------


@contextmanager
def counted() -> Iterator[list[str]]:
    """Count the collectives of units."""
    seen: list[str] = []
    starts = comm.start_all_gather_many, comm.start_reduce_scatter_many

    def gather(*args: Any, **kwargs: Any) -> Any:
        seen.append("gather")
        return starts[0](*args, **kwargs)

    def reduce(*args: Any, **kwargs: Any) -> Any:
        seen.append("reduce")
        return starts[1](*args, **kwargs)

    with mock.patch.multiple(comm, start_all_gather_many=gather, start_reduce_scatter_many=reduce):
        yield seen


@pytest.mark.parametrize(
    ("options", "forward", "backward"),
    [
        ({}, 4, 2),  # 3 blocks and the rest: the last block and the rest stay gathered until backward
        ({"reshard_after_forward": False}, 4, 0),
        ({"units": "layers.*.mlp"}, 4, 2),
        ({"units": []}, 1, 0),
        ({"checkpoint": True}, 4, 2),
    ],
)
def test_parameters_are_gathered_and_gradients_reduced_once_per_unit(
    options: dict[str, Any], forward: int, backward: int
) -> None:
    def work() -> None:
        mesh = mesh_of(dp=2)
        model = sw.parallelize(Transformer(layers=3), mesh, **options)
        batch = sw.shard_batch(BATCH, mesh)
        for _ in range(3):
            with counted() as seen:
                model(**batch).backward()
            assert seen.count("gather") == forward + backward
            assert seen.count("reduce") == forward
            running = next(h.__self__ for h in model._forward_pre_hooks.values() if hasattr(h, "__self__"))
            assert not any(unit.is_gathered for unit in running._units)
        with torch.no_grad(), counted() as seen:
            model(**batch)
        assert seen == ["gather"] * forward
        assert any(unit.is_gathered for unit in running._units) is (not options.get("reshard_after_forward", True))

    run_ranks(2, work)


def test_deferred_gradients_are_reduced_once_per_unit() -> None:
    def work() -> None:
        mesh = mesh_of(dp=2)
        model = sw.parallelize(Transformer(), mesh)
        batch = sw.shard_batch(BATCH, mesh)
        for _ in range(2):
            model(**batch).backward()
        expected = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
        model.zero_grad()
        with counted() as seen, sw.defer_gradient_reduction():
            for _ in range(2):
                loss = model(**batch)
                loss.backward(retain_graph=True)
            weight = model.layers[0].mlp[0].weight
            assert weight.grad is None
            assert seen.count("reduce") == 0
            (returned,) = torch.autograd.grad(loss, [weight])  # these are reduced at once
            assert seen.count("reduce") == 1
        assert seen.count("reduce") == 1 + 3
        torch.testing.assert_close(2 * returned.full_tensor(), expected["layers.0.mlp.0.weight"])
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad.full_tensor(), expected[name], msg=name)
        model.zero_grad()

        def fail() -> None:
            with sw.defer_gradient_reduction():
                model(**batch).backward()
                raise ArithmeticError

        with pytest.raises(ArithmeticError):
            fail()
        assert all(parameter.grad is None for parameter in model.parameters())  # nothing was added
        for _ in range(2):
            model(**batch).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad.full_tensor(), expected[name], msg=name)

    run_ranks(2, work)


def test_units_are_made_again_for_parameters_that_were_replaced() -> None:
    def work() -> None:
        mesh = mesh_of(dp=2)
        model = sw.parallelize(Transformer(), mesh)
        batch = sw.shard_batch(BATCH, mesh)
        first = model(**batch)
        state = {name: value.clone() * 2 for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        for change in (lambda: None, model.double, lambda: model.layers[0].mlp.requires_grad_(False)):
            change()
            with counted() as seen:
                loss = model(**batch)
            assert seen[:3] == ["gather"] * 3
            assert not torch.equal(first.double().full_tensor(), loss.double().full_tensor())
            model.zero_grad()
            loss.backward()
            for name, parameter in model.named_parameters():
                assert (parameter.grad is not None) is parameter.requires_grad, name

    run_ranks(2, work)


def test_mixed_precision_gathers_in_low_precision_and_keeps_parameters_and_gradients_in_full() -> None:
    policy = sw.MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float64)

    def work(sizes: dict[str, int]) -> None:
        mesh = mesh_of(**sizes)
        torch.manual_seed(0)
        plain = Transformer()
        model = sw.parallelize(copy.deepcopy(plain), mesh, precision=policy)
        batch = sw.shard_batch(BATCH, mesh)
        loss, expected = model(**batch), plain(**BATCH)
        loss.backward()
        expected.backward()
        assert loss.dtype == torch.float64
        assert loss.full_tensor().item() == pytest.approx(expected.item(), rel=0.02)
        for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert mine.dtype == mine.grad.dtype == torch.float32, name
            gradient = mine.grad.full_tensor()
            assert (gradient - other.grad).norm() < 0.1 * other.grad.norm() + 1e-3, name

    for sizes in ({"dp": 2}, {"dp": 2, "tp": 2}):
        run_ranks(2 if "tp" not in sizes else 4, work, sizes)


def test_units_that_overlap_or_match_nothing_are_refused() -> None:
    mesh = mesh_of(dp=1)
    with pytest.raises(PlanError, match=r"the units 'layers\.0' and 'layers\.0\.mlp' overlap"):
        sw.parallelize(Transformer(), mesh, units=["layers.*", "**.mlp"])
    with pytest.raises(PlanError, match="units pattern 'blocks' matches no module"):
        sw.parallelize(Transformer(), mesh, units="blocks")


# --- refusals -------------------------------------------------------------------------------------------------------


def test_a_bad_plan_is_refused_on_all_ranks_and_changes_nothing() -> None:
    def work() -> None:
        model = Transformer()
        before = {name: id(value) for name, value in model.state_dict(keep_vars=True).items()}
        plan = {"layers.*.mpl": sw.ColwiseParallel(), "norm": sw.RowwiseParallel(), "head": sw.ColwiseParallel()}
        try:
            sw.parallelize(model, mesh_of(dp=1, tp=2), plan)
        finally:
            assert {name: id(value) for name, value in model.state_dict(keep_vars=True).items()} == before
            assert not model._forward_pre_hooks

    for outcome in outcomes(2, work):
        assert isinstance(outcome, Raised)
        assert isinstance(outcome.exception, PlanError)
        message = str(outcome.exception)
        assert "parallelize: 3 problems" in message
        assert "'layers.*.mpl' matches no module" in message
        assert "does not fit norm (LayerNorm)" in message
        assert "does not place" in message


def test_ranks_with_different_models_are_refused_on_all_of_them() -> None:
    def work() -> None:
        sw.parallelize(Transformer(layers=1 + comm.rank()), mesh_of(dp=2))

    for outcome in outcomes(2, work):
        assert isinstance(outcome, Raised)
        assert "ranks disagree" in str(outcome.exception)


def test_a_plan_that_is_wrong_on_one_rank_is_refused_on_all() -> None:
    def work() -> None:
        sw.parallelize(Transformer(), mesh_of(dp=2), {"**" if comm.rank() else "*.nothing": sw.Replicated()})

    for outcome in outcomes(2, work):
        assert isinstance(outcome, Raised)
        assert "matches no module" in str(outcome.exception)


def test_inputs_that_do_not_belong_to_the_model_are_refused() -> None:
    mesh, other = mesh_of(dp=1), mesh_of(dp=1, tp=1)
    model = sw.parallelize(Transformer(), mesh)
    with pytest.raises(MixedTensorsError, match=r"argument 'ids' is a plain tensor.*shard_batch"):
        model(ids=IDS)
    with pytest.raises(MeshMismatchError, match=r"argument 0 is on .*use\s+sw\.shard_batch"):
        model(sw.shard_batch(IDS, other))
    with sw.implicit_replication():
        model(IDS)
    with pytest.raises(PlanError, match="is a DTensor already"):
        sw.parallelize(model, mesh)
    with pytest.raises(PlanError, match="plan must be 'auto'"):
        sw.parallelize(Transformer(), mesh, "automatic")
    with pytest.raises(PlanError, match="no repeated blocks"):
        sw.parallelize(nn.Linear(2, 2), mesh, checkpoint=True)
    with pytest.raises(PlanError, match="checkpoint pattern 'layer' matches no module"):
        sw.parallelize(Transformer(), mesh, checkpoint="layer")
    with pytest.raises(MeshError, match="must be named"):
        sw.parallelize(Transformer(), sw.init_device_mesh("cpu", (1,)))


def test_after_an_exception_in_the_forward_a_good_step_is_right_and_nothing_leaks() -> None:
    class Failing(Transformer):
        fail = False

        def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
            loss = super().forward(ids, labels)
            if self.fail:
                raise ArithmeticError
            return loss

    def step(model: Any, batch: Any) -> Tensor:
        model.fail = True
        with pytest.raises(ArithmeticError):
            model(**batch)
        model.fail = False
        assert not replicates_implicitly()
        model(**batch)  # an exception between forward and backward
        return model(**batch)

    same_as_one_rank(Failing, BATCH, sw.parallelize, mesh=[{"dp": 2}, {"dp": 2, "tp": 2}], step=step)


def test_verify_ranks_finds_plain_tensors_of_the_forward_that_differ_between_ranks() -> None:
    class Noisy(Transformer):
        def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
            return super().forward(ids, labels) + torch.full((1,), float(comm.rank()))

    def work(kind: type[nn.Module]) -> None:
        mesh = mesh_of(dp=2)
        model = sw.parallelize(kind(), mesh)
        with sw.verify_ranks():
            model(**sw.shard_batch(BATCH, mesh)).backward()

    run_ranks(2, work, Transformer)
    for outcome in outcomes(2, work, Noisy):
        assert isinstance(outcome, Raised)
        assert isinstance(outcome.exception, LocalTensorError)
        assert "add: argument 1 is a plain tensor that counts as replicated, but rank 0 and rank 1" in outcome.message


def test_plain_tensors_count_as_replicated_only_inside_the_forward() -> None:
    mesh = mesh_of(dp=1)
    model = sw.parallelize(Transformer(), mesh)
    logits = model(sw.shard_batch(IDS, mesh))
    assert not replicates_implicitly()
    with pytest.raises(MixedTensorsError):
        logits + torch.ones(12)
