"""Programs that people write around `fully_shard`: each is right, or refused."""

from __future__ import annotations

import copy
import gc
import os
import tempfile
import warnings
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright import comm
from shardwright.errors import (
    ArgumentTypeError,
    InPlaceError,
    MeshError,
    TensorError,
    UnsupportedError,
)
from shardwright.testing import run_ranks
from tests.parallel.models import batch, loss_of, make, train_on_one_rank

EXACT = 1e-9


def world():
    return comm.world().size


def shard(model, **options):
    for block in model.blocks:
        sw.fully_shard(block, **options)
    return sw.fully_shard(model, **options)


def inputs(*shape, seed=0):
    """Return the inputs of all ranks."""
    return [
        torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * seed + rank))
        for rank in range(world())
    ]


def same_gradients(model, plain, atol=EXACT):
    for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None), name
        if other.grad is not None:
            torch.testing.assert_close(mine.grad.full_tensor(), other.grad, rtol=0, atol=atol, msg=name)


def mean_loss(plain, given, compute):
    return sum(compute(plain, each) for each in given) / len(given)


def compare(plain, prepare=sw.fully_shard, compute=lambda model, x: model(x).square().sum(), shape=(3, 4), steps=2):
    """Compare the gradients of a sharded copy with those of the plain module, over some steps; return the copy."""
    model = copy.deepcopy(plain)
    prepare(model)
    for step in range(steps):
        given = inputs(*shape, seed=step)
        compute(model, given[comm.rank()]).backward()
        mean_loss(plain, given, compute).backward()
        same_gradients(model, plain)
        for module in (model, plain):
            with torch.no_grad():
                for parameter in module.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.01 * parameter.grad
            module.zero_grad()
    return model


def on_ranks(size=2):
    """Run a test's body on ranks."""

    def decorate(body):
        def test():
            run_ranks(size, body)

        test.__name__ = test.__qualname__ = body.__name__
        test.__doc__ = body.__doc__
        return test

    return decorate


@on_ranks(4)
def test_replicas_of_shards_average_over_both_mesh_dimensions():
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard(make(), mesh=mesh)
    reference = train_on_one_rank(make(), world(), steps=1)
    with comm.count() as traffic:
        loss_of(model, batch(comm.rank(), 0)).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), reference[0][2][name], rtol=0, atol=EXACT)
        assert str(parameter.sharding).endswith("(replicate: R, shard: S(0))")
    assert dict(traffic.calls) == {"all_gather": 7, "reduce_scatter": 4, "all_reduce": 4}


@on_ranks()
def test_gradients_accumulate_over_micro_batches_with_and_without_reduction():
    plain, model = make(), shard(make())
    for defer in (False, True):
        with comm.count() as traffic:
            for step in range(3):
                model.set_requires_gradient_sync(not defer or step == 2)
                model.set_is_last_backward(step == 2)
                loss_of(model, batch(comm.rank(), step)).backward()
                for rank in range(world()):
                    (loss_of(plain, batch(rank, step)) / world()).backward()
        same_gradients(model, plain)
        assert traffic.calls["reduce_scatter"] == (4 if defer else 12)
        model.zero_grad()
        plain.zero_grad()


@on_ranks(4)
def test_gradients_accumulate_without_their_sum_over_replicas():
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    plain, model = make(), shard(make(), mesh=mesh)
    with comm.count() as traffic:
        for step in range(2):
            model.set_requires_all_reduce(step == 1)
            model.set_requires_gradient_sync(True)
            loss_of(model, batch(comm.rank(), step)).backward()
            for rank in range(world()):
                (loss_of(plain, batch(rank, step)) / world()).backward()
            with torch.inference_mode():
                model(batch(0, 0))
    same_gradients(model, plain)
    assert traffic.calls["all_reduce"] == 4


@on_ranks()
def test_accumulated_gradients_are_reduced_though_the_last_backward_skips_their_unit():
    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, which):
            return (self.a if which else self.b)(x)

    plain = Either().double()
    with torch.no_grad():
        for index, parameter in enumerate(plain.parameters()):
            parameter.fill_(index + 1)
    model = copy.deepcopy(plain)
    for layer in (model.a, model.b, model):
        sw.fully_shard(layer)
    given = inputs(3, 4)
    for which in (True, False):
        model.set_requires_gradient_sync(not which)
        model(given[comm.rank()], which).sum().backward()
        mean_loss(plain, given, lambda module, x, which=which: module(x, which).sum()).backward()
    same_gradients(model, plain)


@on_ranks()
def test_weights_tied_across_units_stay_tied():
    def prepare(model):
        sw.fully_shard(model.embedding)
        shard(model)
        assert model.head.weight is model.embedding.weight

    plain = make(tied=True)
    model = copy.deepcopy(plain)
    prepare(model)
    assert len(list(model.parameters())) == len(list(plain.parameters()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, (_, _, gradients) in enumerate(train_on_one_rank(plain, world())):
        loss_of(model, batch(comm.rank(), step)).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad.full_tensor(), gradients[name], rtol=0, atol=EXACT)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


@on_ranks()
def test_weights_tied_across_units_of_different_parents_stay_tied():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Sequential(nn.Linear(4, 4)))).double()
    plain[1][0][0].weight = plain[0][0].weight

    def prepare(model):
        for module in (model[0], model[1][0], model[1], model):
            sw.fully_shard(module)
        assert model[1][0][0].weight is model[0][0].weight

    compare(plain, prepare)


@on_ranks()
def test_a_unit_inside_a_unit_and_a_module_called_twice():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.inner, self.after = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.after(torch.tanh(self.inner(torch.tanh(self.inner(torch.tanh(self.before(x)))))))

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.outer, self.last = Outer(), nn.Linear(4, 2)

        def forward(self, x):
            return self.last(self.outer(self.outer(x)))

    def prepare(model):
        sw.fully_shard(model.outer.inner)
        sw.fully_shard(model.outer)
        sw.fully_shard(model)

    torch.manual_seed(0)
    compare(Root().double(), prepare)


@on_ranks()
def test_a_checkpoint_inside_a_unit_and_hooks_outside():
    """Part of a unit is recomputed; other saved tensors go to the hooks that were active."""

    class Partly(nn.Module):
        def __init__(self, reentrant):
            super().__init__()
            self.first, self.second, self.reentrant = nn.Linear(4, 4), nn.Linear(4, 4), reentrant

        def forward(self, x):
            x = torch.tanh(self.first(x))
            return x + checkpoint(self.second, x, use_reentrant=self.reentrant)

    packed = []

    def compute(model, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t.clone(), lambda t: t):
            return model(x).square().sum()

    for reentrant in (False, True):
        torch.manual_seed(0)
        compare(
            nn.Sequential(Partly(reentrant), nn.Linear(4, 2)).double(),
            lambda m: (sw.fully_shard(m[0]), sw.fully_shard(m)),
        )
        packed.clear()
        model = compare(
            nn.Sequential(Partly(reentrant), nn.Linear(4, 2)).double(),
            lambda m: (sw.fully_shard(m[0]), sw.fully_shard(m)),
            compute,
            steps=1,
        )
        packed.clear()
        compute(model, inputs(3, 4)[0]).backward()
        assert packed
        assert not any(each.shape in ((4, 4), (2, 4), (4, 2)) for each in packed)  # no gathered weight


@on_ranks()
def test_autograd_functions_and_hooks_of_the_user_get_plain_tensors():
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            assert not isinstance(weight, sw.DTensor)
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx, gradient):
            x, weight = ctx.saved_tensors
            assert type(gradient) is torch.Tensor
            assert not isinstance(weight, sw.DTensor)
            return gradient * weight, (gradient * x).sum(0)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.linear = nn.Parameter(torch.linspace(1, 2, 4)), nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(Scale.apply(x, self.weight))

    seen = []

    def prepare(model):
        model.linear.register_full_backward_hook(lambda *_: seen.append(1))
        sw.fully_shard(model)

    model = compare(Layer().double(), prepare)
    assert seen
    assert type(model.weight) is sw.DTensor


@on_ranks()
def test_recurrent_layers_compute_with_gathered_weights():
    torch.manual_seed(0)
    compare(nn.LSTM(4, 3, num_layers=2).double(), compute=lambda model, x: model(x[None])[0].square().sum())


@on_ranks()
def test_shards_along_other_dimensions():
    torch.manual_seed(0)
    model = compare(
        nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).double(),
        lambda m: sw.fully_shard(m, shard_placement_fn=lambda p: sw.Shard(1) if p.dim() > 1 else None),
    )
    assert model[0].weight.placements == (sw.Shard(1),)


@on_ranks()
def test_gradients_of_gradients():
    """A gradient penalty on the input, and a penalty on the gradients of the parameters."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh()).double()

    def penalty(model, x):
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return gradient.square().sum()

    compare(plain, lambda m: (sw.fully_shard(m[0]), sw.fully_shard(m)), penalty)
    model = copy.deepcopy(plain)
    sw.fully_shard(model[0])
    sw.fully_shard(model)
    given = inputs(3, 4)
    gradients = torch.autograd.grad(
        model(given[comm.rank()]).square().sum(), list(model.parameters()), create_graph=True
    )
    sum(each.square().sum() for each in gradients).backward()
    mean = mean_loss(plain, given, lambda module, x: module(x).square().sum())
    sum(
        each.square().sum() for each in torch.autograd.grad(mean, list(plain.parameters()), create_graph=True)
    ).backward()
    same_gradients(model, plain)


@on_ranks()
def test_a_graph_is_used_twice_and_gradients_are_returned():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).double()
    model = copy.deepcopy(plain)
    sw.fully_shard(model[0])
    sw.fully_shard(model)
    given = inputs(3, 4)
    found = torch.autograd.grad(model(given[comm.rank()]).square().sum(), list(model.parameters()))
    mean = mean_loss(plain, given, lambda module, x: module(x).square().sum())
    for mine, other in zip(found, torch.autograd.grad(mean, list(plain.parameters()), retain_graph=True), strict=True):
        torch.testing.assert_close(mine.full_tensor(), other, rtol=0, atol=EXACT)
    loss = model(given[comm.rank()]).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    mean.backward(retain_graph=True)
    mean.backward()
    same_gradients(model, plain)


@on_ranks()
def test_gradient_hooks_see_reduced_gradients_and_may_step_in_backward():
    plain, model = make(), shard(make())
    reference = train_on_one_rank(make(), world(), steps=1)[0][2]
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def step(parameter):
        torch.testing.assert_close(parameter.grad.full_tensor(), reference[names[id(parameter)]], rtol=0, atol=EXACT)
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    loss_of(model, batch(comm.rank(), 0)).backward()
    for mine, (name, other) in zip(model.parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), other - 0.1 * reference[name], rtol=0, atol=EXACT)


@on_ranks()
def test_a_hook_of_a_parameter_changes_its_reduced_gradient():
    model = shard(make())
    weight, norms = model.blocks[0].up.weight, []
    weight.register_hook(lambda gradient: norms.append(gradient.norm().item()) or 2 * gradient)
    loss_of(model, batch(comm.rank(), 0)).backward()
    reference = train_on_one_rank(make(), world(), steps=1)[0][2]["blocks.0.up.weight"]
    assert norms == pytest.approx([reference.norm().item()])
    torch.testing.assert_close(weight.grad.full_tensor(), 2 * reference, rtol=0, atol=EXACT)


@on_ranks(4)
def test_a_parameter_that_one_replica_alone_uses_has_its_gradient_on_all():
    """And one that no rank uses has none."""
    torch.manual_seed(0)
    parts = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "c": nn.Linear(4, 4)}).double()

    class Chosen(nn.Module):
        def __init__(self, parts):
            super().__init__()
            self.parts = parts

        def forward(self, x, key):
            return self.parts[key](x) + self.parts["a"](x)

    plain = Chosen(parts)
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sw.fully_shard(copy.deepcopy(plain), mesh=mesh)
    given, keys = inputs(3, 4), ["a", "a", "a", "b"]
    model(given[comm.rank()], keys[comm.rank()]).square().sum().backward()
    sum(plain(each, key).square().sum() for each, key in zip(given, keys, strict=True)).div(4).backward()
    same_gradients(model, plain)
    assert plain.parts["c"].weight.grad is None


@on_ranks()
def test_parameters_may_be_used_outside_the_model_too():
    """A penalty on the sharded parameters themselves adds to the gradients of the model."""
    plain, model = make(), shard(make())
    penalty = sum(parameter.square().sum() for parameter in model.parameters())
    (loss_of(model, batch(comm.rank(), 0)) + penalty.full_tensor()).backward()
    for rank in range(world()):
        (loss_of(plain, batch(rank, 0)) / world()).backward()
    sum(parameter.square().sum() for parameter in plain.parameters()).backward()
    same_gradients(model, plain)


@on_ranks()
def test_a_step_after_an_exception_is_right():
    class Fails(nn.Module):
        fails = False

        def forward(self, x):
            if self.fails == "forward":
                raise ValueError("in forward")
            if self.fails == "backward" and x.requires_grad:
                x.register_hook(self.fail)
            return x

        def fail(self, _):
            raise ValueError("in backward")

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 5), Fails(), nn.Linear(5, 3)).double()
    model = copy.deepcopy(plain)
    for layer in (model[0], model[2], model):
        sw.fully_shard(layer)
    schedule = model.__dict__["_shardwright_fsdp"].unit.schedule
    given = inputs(3, 4)
    for where in (False, "forward", "between", "backward", False):
        model[1].fails = where
        with pytest.raises(ValueError, match=where) if where else nullcontext():
            loss = model(given[comm.rank()]).square().sum()
            if where == "between":
                raise ValueError("between")
            loss.backward()
        if where:
            model.zero_grad()
        assert all(isinstance(parameter, sw.DTensor) for parameter in model.parameters())
    mean = mean_loss(plain, given, lambda module, x: module(x).square().sum())
    (2 * mean).backward()
    model(given[comm.rank()]).square().sum().backward()
    same_gradients(model, plain)
    assert schedule.gathered == []


@on_ranks()
def test_evaluation_between_steps():
    plain, model = make(), shard(make())
    tokens = batch(comm.rank(), 0)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            torch.testing.assert_close(model(tokens), plain(tokens), rtol=0, atol=EXACT)
        reference = train_on_one_rank(make(), world(), steps=1)[0][2]
        loss_of(model, tokens).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad.full_tensor(), reference[name], rtol=0, atol=EXACT)
        model.zero_grad()


@on_ranks()
def test_meta_modules_are_initialized_after_sharding():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    sw.fully_shard(model[0])
    sw.fully_shard(model)
    with pytest.raises(TensorError, match=r"'(weight|1.weight)' is on the meta device and has no values"):
        model(torch.ones(2, 4))
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        with torch.no_grad():
            mine.copy_(sw.distribute_tensor(other.detach(), mine.device_mesh, mine.placements))
    torch.testing.assert_close(model(torch.ones(2, 4)), plain(torch.ones(2, 4)))


@on_ranks()
def test_state_dicts_hold_shards_and_load_by_copy_assignment_and_checkpoint():
    model, other = shard(make()), shard(make())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    tokens = batch(comm.rank(), 0)
    before = model(tokens)
    assert all(isinstance(value, sw.DTensor) for value in model.state_dict().values())
    assert list(model.state_dict()) == list(make().state_dict())
    changed = other(tokens)
    for assign in (False, True):
        model.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
        torch.testing.assert_close(model(tokens), changed, rtol=0, atol=EXACT)
        loss_of(model, tokens).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        model.load_state_dict(shard(make()).state_dict())
        torch.testing.assert_close(model(tokens), before, rtol=0, atol=EXACT)
        model.zero_grad()
    folder = comm.gather_bytes(tempfile.mkdtemp().encode() if comm.rank() == 0 else b"")[0].decode()
    sw.checkpoint.save({"model": other.state_dict()}, folder)
    sw.checkpoint.load({"model": model.state_dict()}, folder)
    torch.testing.assert_close(model(tokens), changed, rtol=0, atol=EXACT)


@on_ranks()
def test_a_deep_copy_is_a_sharded_model_of_its_own():
    model = shard(make(tied=True))
    tokens = batch(comm.rank(), 0)
    loss_of(model, tokens).backward()
    twin = copy.deepcopy(model)
    model.zero_grad()
    assert twin.head.weight is twin.embedding.weight
    assert not {id(p) for p in model.parameters()} & {id(p) for p in twin.parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    reference = train_on_one_rank(make(tied=True), world(), steps=1)[0][2]
    with comm.count() as traffic:
        loss_of(twin, tokens).backward()
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), reference[name], rtol=0, atol=EXACT)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert dict(traffic.calls) == {"all_gather": 7, "reduce_scatter": 4}


@on_ranks()
def test_unshard_and_reshard_change_what_is_registered():
    plain, model = make(), shard(make())
    block = model.blocks[0]
    handle = block.unshard(async_op=True)
    assert isinstance(block.up.weight, sw.DTensor)
    handle.wait()
    with comm.count() as traffic:
        assert torch.equal(block.up.weight, plain.blocks[0].up.weight)
        loss = loss_of(model, batch(comm.rank(), 0))
        assert traffic.calls["all_gather"] == 3  # the root and the other blocks
        loss.backward()
    assert isinstance(block.up.weight, sw.DTensor)
    model.unshard()
    assert torch.equal(model.head.weight, plain.head.weight)
    model.reshard()
    assert isinstance(model.head.weight, sw.DTensor)


@on_ranks()
def test_parameters_are_kept_where_that_is_asked_for():
    model = shard(make(), reshard_after_forward=False)
    with comm.count() as traffic:
        loss_of(model, batch(comm.rank(), 0)).backward()
    assert dict(traffic.calls) == {"all_gather": 4, "reduce_scatter": 4}
    model.set_reshard_after_forward(True)
    with comm.count() as traffic:
        loss_of(model, batch(comm.rank(), 0)).backward()
    assert dict(traffic.calls) == {"all_gather": 8, "reduce_scatter": 4}
    model.set_reshard_after_backward(False)
    loss_of(model, batch(comm.rank(), 0)).backward()
    reference = make()
    with torch.no_grad():
        for parameter in (*model.parameters(), *reference.parameters()):
            parameter.mul_(1.5)  # kept values are gathered again, as they were written to
    tokens = batch(comm.rank(), 0)
    torch.testing.assert_close(model(tokens), reference(tokens), rtol=0, atol=EXACT)


@on_ranks()
def test_other_methods_and_single_submodules_are_called_with_gathered_parameters():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.features(x))

        def features(self, x):
            return x @ self.body.weight

    torch.manual_seed(0)
    plain = Model().double()
    model = sw.fully_shard(copy.deepcopy(plain))
    sw.register_fsdp_forward_method(model, "features")
    given = inputs(3, 4)
    compute = lambda module, x: module.head(module.features(x)).square().sum()  # noqa: E731  # two of it
    compute(model, given[comm.rank()]).backward()
    mean_loss(plain, given, compute).backward()
    for name in ("body.weight", "head.weight", "head.bias"):
        mine, other = model.get_parameter(name), plain.get_parameter(name)
        torch.testing.assert_close(mine.grad.full_tensor(), other.grad, rtol=0, atol=EXACT)


@on_ranks()
def test_several_modules_make_one_unit():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(3, 2)).double()
    model = copy.deepcopy(plain)
    sw.fully_shard([model[0], model[1]])
    sw.fully_shard(model)
    given = inputs(3, 4)
    with comm.count() as traffic:
        model(given[comm.rank()]).square().sum().backward()
    mean_loss(plain, given, lambda module, x: module(x).square().sum()).backward()
    same_gradients(model, plain)
    assert dict(traffic.calls) == {"all_gather": 3, "reduce_scatter": 2}


@on_ranks()
def test_ignored_parameters_stay_plain_and_their_gradients_are_not_reduced():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    kept = list(model[1].parameters())
    sw.fully_shard(model, ignored_params=set(kept))
    model(inputs(3, 4)[comm.rank()]).sum().backward()
    assert [isinstance(p, sw.DTensor) for p in model.parameters()] == [True, True, False, False]
    assert all(type(p.grad) is torch.Tensor for p in kept)


@on_ranks()
def test_a_factor_divides_sums_of_gradients():
    model = sw.fully_shard(nn.Linear(4, 2))
    model.set_gradient_divide_factor(1.0)
    model(torch.ones(1, 4)).sum().backward()
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((2, 4), float(world())))


@pytest.mark.skipif(os.environ.get("SHARDWRIGHT_BUDGET") != "full", reason="compiling is slow")
@on_ranks()
def test_compiled_blocks_and_models_compute_the_same_and_are_compiled_once():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    warnings.simplefilter("ignore")  # of the compiler, which looks for .grad of every tensor
    plain, model = make(), make()
    for block in model.blocks:
        block.compile(backend=backend)
    shard(model)
    for compiled in (model, torch.compile(model, backend=backend)):
        for step in range(2):
            loss_of(compiled, batch(comm.rank(), step)).backward()
            for rank in range(world()):
                (loss_of(plain, batch(rank, step)) / world()).backward()
            same_gradients(model, plain)
            model.zero_grad()
            plain.zero_grad()
        assert 0 < len(graphs) < 8  # not one for each block and step


@on_ranks()
def test_a_model_and_the_graph_of_a_forward_are_freed():
    model = shard(make())
    references = [weakref.ref(each) for each in (model, model.blocks[0], *model.parameters())]
    loss = loss_of(model, batch(comm.rank(), 0))
    loss.backward()
    loss = torch.tanh(loss_of(model, batch(comm.rank(), 1)))
    del model, loss
    gc.collect()
    gc.collect()  # what C++ held is garbage only now
    assert [reference() is None for reference in references] == [True] * len(references)


# --- refused ----------------------------------------------------------------------------------------------------------


@on_ranks()
def test_writes_that_would_be_lost_or_change_gradients_raise():
    class Clamps(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.clamp_(-1, 1)
            return super().forward(x)

    model = sw.fully_shard(Clamps(4, 2))
    with pytest.raises(InPlaceError, match="'weight' was written to in forward, where it is a gathered copy"):
        model(torch.ones(1, 4))
    assert isinstance(model.weight, sw.DTensor)
    model = sw.fully_shard(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
    loss = model(torch.ones(1, 4)).sum()
    with torch.no_grad():
        model[1].weight.mul_(2)
    with pytest.raises(InPlaceError, match=r"'1.weight', which is needed to compute gradients, was written to"):
        loss.backward()
    activation = model[0](torch.ones(1, 4)).exp()
    loss = activation.sum()
    hidden = sw.fully_shard(nn.Tanh())
    value = torch.ones(2, requires_grad=True) * 1
    result = hidden(value)
    with torch.no_grad():
        result.mul_(2)
    with pytest.raises(InPlaceError, match="was written to in place after it was used"):
        result.sum().backward()


def test_bad_arguments_raise_before_anything_changes():
    model = nn.Sequential(nn.Linear(2, 2), nn.ParameterList([nn.Parameter(torch.ones(()))]))
    cases = [
        (lambda: sw.fully_shard(model), TensorError, "1.0 has no dimensions"),
        (lambda: sw.fully_shard(nn.ModuleList([model])), ArgumentTypeError, "ModuleList has no forward"),
        (lambda: sw.fully_shard([]), ArgumentTypeError, "got an empty list"),
        (lambda: sw.fully_shard("model"), ArgumentTypeError, "a list of modules, got str"),
        (lambda: sw.fully_shard(model[0], mp_policy=torch.bfloat16), ArgumentTypeError, "got dtype"),
        (lambda: sw.fully_shard(model[0], reshard_after_forward="yes"), ArgumentTypeError, "got str"),
        (lambda: sw.fully_shard(model[0], offload_policy=object()), UnsupportedError, "object is not supported"),
        (lambda: sw.fully_shard(model[0], ignored_params=["x"]), ArgumentTypeError, "must be parameters, got str"),
        (lambda: sw.fully_shard(model[0], shard_placement_fn=lambda _: "x"), ArgumentTypeError, "got str: 'x'"),
        (lambda: sw.fully_shard(model[0], mesh=sw.Mesh((1, 1, 1))), MeshError, "a mesh of one dimension, or of two"),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()
    assert type(model[0].weight) is nn.Parameter
    assert type(model[0]) is nn.Linear
    sw.fully_shard(model[0])
    with pytest.raises(TensorError, match="was already called on this FSDPLinear"):
        sw.fully_shard(model[0])
    with pytest.raises(TensorError, match="is a DTensor already"):
        sw.fully_shard(nn.Sequential(sw.distribute_module(nn.Linear(2, 2), sw.init_device_mesh("cpu", (1,)))))
    model[0].weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(TensorError, match="'weight' of a fully sharded module was replaced by Parameter"):
        model[0](torch.ones(1, 2))
    with pytest.raises(ArgumentTypeError, match="has no method 'nothing'"):
        sw.register_fsdp_forward_method(model[0], "nothing")
    with pytest.raises(ArgumentTypeError, match="must be a bool, got int"):
        model[0].set_reshard_after_forward(2)
    with pytest.raises(ArgumentTypeError, match="expected modules that fully_shard was called on, got Tanh"):
        model[0].set_modules_to_forward_prefetch([nn.Tanh()])
