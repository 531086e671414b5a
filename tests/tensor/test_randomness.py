"""The same seed gives bitwise the same global tensor on any number of ranks, in every layout."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright import comm
from shardwright.errors import TensorError, UnsupportedError
from shardwright.tensor.random.local import same_draws
from shardwright.testing import run_ranks

SHAPE = (5, 6)


def draws() -> dict[str, Callable[[Any, Any], Any]]:
    """Return every random function as a function of mesh and placements."""
    blank: Callable[..., Any] = lambda m, p, *s, **o: sw.zeros(*(s or SHAPE), mesh=m, placements=p, **o)  # noqa: E731  # one of a table
    chances = torch.linspace(0, 1, 30).reshape(SHAPE)
    made: dict[str, Callable[[Any, Any], Any]] = {
        "rand": lambda m, p: sw.rand(*SHAPE, mesh=m, placements=p),
        "rand, double": lambda m, p: sw.rand(SHAPE, mesh=m, placements=p, dtype=torch.float64),
        "randn": lambda m, p: sw.randn(*SHAPE, mesh=m, placements=p),
        "normal": lambda m, p: sw.normal(3.0, 0.5, SHAPE, mesh=m, placements=p),
        "randint": lambda m, p: sw.randint(-3, 9, SHAPE, mesh=m, placements=p),
        "randperm": lambda m, p: sw.randperm(
            11, mesh=m, placements=[x if x == sw.Shard(0) else sw.Replicate() for x in p]
        ),
        "normal_": lambda m, p: blank(m, p).normal_(1, std=2.0),
        "normal_, bfloat16": lambda m, p: blank(m, p, dtype=torch.bfloat16).normal_(),
        "normal_, complex": lambda m, p: blank(m, p, dtype=torch.complex64).normal_(),
        "uniform_": lambda m, p: blank(m, p).uniform_(-1, 2),
        "uniform_, by name": lambda m, p: blank(m, p).uniform_(**{"from": -1, "to": 2}),
        "bernoulli_": lambda m, p: blank(m, p).bernoulli_(0.3),
        "bernoulli_ of a tensor": lambda m, p: blank(m, p).bernoulli_(sw.distribute_tensor(chances, m)),
        "bernoulli": lambda m, p: torch.bernoulli(sw.distribute_tensor(chances, m, p)),
        "bernoulli, p": lambda m, p: torch.bernoulli(blank(m, p), 0.5),
        "random_": lambda m, p: blank(m, p, dtype=torch.int64).random_(),
        "random_(to)": lambda m, p: blank(m, p).random_(7),
        "random_(from, to)": lambda m, p: blank(m, p).random_(-7, to=7),
        "exponential_": lambda m, p: blank(m, p).exponential_(lambd=2.0),
        "cauchy_": lambda m, p: blank(m, p).cauchy_(),
        "log_normal_": lambda m, p: blank(m, p).log_normal_(0, 1),
        "geometric_": lambda m, p: blank(m, p).geometric_(0.4),
        "rand_like": lambda m, p: torch.rand_like(blank(m, p)),
        "randn_like": lambda m, p: torch.randn_like(blank(m, p), dtype=torch.float64),
        "randint_like": lambda m, p: torch.randint_like(blank(m, p), 2, 9),
        "randint_like, high": lambda m, p: torch.randint_like(blank(m, p), high=9),
        "torch.normal": lambda m, p: torch.normal(sw.distribute_tensor(chances, m, p), 0.5),
        "torch.normal of two": lambda m, p: torch.normal(blank(m, p), sw.distribute_tensor(chances, m)),
        "multinomial": lambda m, p: torch.multinomial(sw.distribute_tensor(chances, m, p), 3),
        "multinomial, put back": lambda m, p: sw.distribute_tensor(chances, m, p).multinomial(9, replacement=True),
        "poisson": lambda m, p: torch.poisson(sw.distribute_tensor(chances * 9, m, p)),
        "binomial": lambda m, p: torch.binomial(blank(m, p) + 9, sw.distribute_tensor(chances, m, p)),
        "dropout": lambda m, p: nn.functional.dropout(blank(m, p) + 1),
        "fractional_max_pool2d": lambda m, p: nn.functional.fractional_max_pool2d(
            sw.distribute_tensor(chances, m, p).reshape(1, *SHAPE), 2, 3
        ),
    }
    fills: dict[str, Callable[[Any], Any]] = {
        "uniform_": lambda w: nn.init.uniform_(w, -1, 1),
        "normal_": lambda w: nn.init.normal_(w, 1.0, 2.0),
        "trunc_normal_": lambda w: nn.init.trunc_normal_(w, std=0.5),
        "constant_": lambda w: nn.init.constant_(w, 3.0),
        "ones_": nn.init.ones_,
        "zeros_": nn.init.zeros_,
        "eye_": nn.init.eye_,
        "xavier_uniform_": nn.init.xavier_uniform_,
        "xavier_normal_": lambda w: nn.init.xavier_normal_(w, gain=2.0),
        "kaiming_uniform_": lambda w: nn.init.kaiming_uniform_(w, a=5**0.5),
        "kaiming_normal_": lambda w: nn.init.kaiming_normal_(w, mode="fan_out"),
        "orthogonal_": nn.init.orthogonal_,
    }
    for name, fill in fills.items():
        made[f"nn.init.{name}"] = lambda m, p, f=fill: f(nn.Parameter(blank(m, p))).detach()
    made["nn.init.sparse_"] = lambda m, p: _sparse(blank(m, p))
    made["nn.init.dirac_"] = lambda m, p: nn.init.dirac_(blank(m, p, 5, 6, 3))
    return made


def _sparse(tensor: Any) -> Any:
    with sw.implicit_replication():  # it draws plain indices, the same on every rank after sw.manual_seed
        return nn.init.sparse_(tensor, 0.4)


def values(mesh_shapes: list[tuple[int, ...]], names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Return what each function draws, checking that it is the same on all meshes and layouts."""
    known: dict[str, Tensor] = {}
    for shape in mesh_shapes:
        mesh = sw.init_device_mesh("cpu", shape)
        layouts = [
            [first, *[sw.Replicate()] * (len(shape) - 1)] for first in (sw.Replicate(), sw.Shard(0), sw.Shard(1))
        ]
        layouts += [[sw.Shard(1), sw.Shard(0)], [sw.Shard(0), sw.Shard(0)]] if len(shape) == 2 else []
        for name, draw in draws().items():
            for layout in layouts if names is None or name in names else []:
                sw.manual_seed(1234)
                whole = draw(mesh, layout).full_tensor()
                assert torch.equal(known.setdefault(name, whole), whole), f"{name}: {shape} {layout}"
    return known


MOST_USED = [
    "rand",
    "randn",
    "normal_",
    "uniform_",
    "bernoulli_",
    "dropout",
    "randint",
    "randperm",
    "nn.init.kaiming_uniform_",
]


def test_values_are_bitwise_the_same_for_any_number_of_ranks_and_layout() -> None:
    alone = values([(1,)])
    for ranks, shapes, names in ((2, [(2,)], None), (4, [(4,), (2, 2)], None), (8, [(8,)], MOST_USED)):
        for found in run_ranks(ranks, lambda s=shapes, n=names: values(s, n), timeout=120):
            assert len(found) == len(names or alone)
            for name, value in found.items():
                assert torch.equal(alone[name], value), f"{name} on {ranks} ranks"


def test_torch_manual_seed_is_used_and_agreed_on_once() -> None:
    def on_a_rank() -> list[Tensor]:
        mesh = sw.init_device_mesh("cpu", (2,))
        torch.manual_seed(77_000 + comm.rank())  # as many programs do
        first = sw.rand(6, mesh=mesh, placements=[sw.Replicate()]).to_local()
        sw.manual_seed(3)
        _ = torch.rand(comm.rank())  # ranks may draw different amounts of plain numbers
        with comm.count() as traffic:
            second = sw.rand(6, mesh=mesh).to_local()
        assert not traffic.calls
        return [first, second]

    first, second = run_ranks(2, on_a_rank)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    mesh = sw.init_device_mesh("cpu", (1,))
    torch.manual_seed(77_000)
    assert torch.equal(first[0], sw.rand(6, mesh=mesh).to_local())


def test_init_functions_that_a_library_has_replaced_initialize_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers replaces the functions of torch.nn.init by its own, which call the original ones."""
    mesh = sw.init_device_mesh("cpu", (1,))
    expected = {}
    for replaced in (False, True):
        for name in ("normal_", "constant_", "kaiming_uniform_", "zeros_"):
            original = getattr(nn.init, name)
            arguments = (3.0,) if name == "constant_" else ()

            def replacement(tensor: Tensor, *args: float, original: Any = original) -> Tensor:
                return original(tensor, *args)

            replacement.__name__ = name
            with monkeypatch.context() as patched:
                if replaced:
                    patched.setattr(nn.init, name, replacement)
                sw.manual_seed(0)
                value = getattr(nn.init, name)(sw.ones(4, 6, mesh=mesh), *arguments).to_local()
            assert torch.equal(expected.setdefault(name, value), value), name


def test_random_factories_reject_partial_layouts() -> None:
    mesh = sw.init_device_mesh("cpu", (1,))
    for make in (sw.rand, sw.randn):
        with pytest.raises(TensorError, match="the sum of random partial values has another distribution"):
            make(3, mesh=mesh, placements=[sw.Partial()])
    assert torch.rand_like(sw.ones(3, mesh=mesh, placements=[sw.Partial()])).placements == (sw.Replicate(),)


def test_generator_argument_raises() -> None:
    x, generator = sw.ones(3, mesh=sw.init_device_mesh("cpu", (1,))), torch.Generator()
    for call in (
        lambda: x.normal_(generator=generator),
        lambda: torch.bernoulli(x, generator=generator),
        lambda: torch.rand_like(x, generator=generator),
        lambda: torch.multinomial(x, 1, generator=generator),
        lambda: nn.init.uniform_(x, generator=generator),
    ):
        with pytest.raises(UnsupportedError, match=r"'generator' is not supported, .* local to each rank"):
            call()


def test_in_place_random_fills_are_seen_by_autograd() -> None:
    mesh = sw.init_device_mesh("cpu", (1,))
    leaf = sw.ones(3, mesh=mesh, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        leaf.normal_()
    (leaf * 2).uniform_().sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [0.0] * 3
    square = leaf.square()
    kept = leaf.detach()
    kept.normal_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()


def test_operators_without_a_rule_draw_the_same_numbers_on_every_rank() -> None:
    def on_a_rank() -> list[Tensor]:
        mesh = sw.init_device_mesh("cpu", (2,))
        torch.manual_seed(comm.rank())
        query = sw.ones(2, 2, 8, 8, mesh=mesh, placements=[sw.Shard(0)])
        attended, _ = torch._scaled_dot_product_attention_math(query, query, query, None, 0.5)
        aten = getattr(torch, "ops").aten  # noqa: B009  # cloudpickle cannot pickle a function that names torch.ops
        drawn = aten.normal_functional(query)
        negative, noise = aten.rrelu_with_noise_functional(-query, query, training=True)
        return [x.full_tensor() for x in (attended, drawn, negative, noise)]

    first, second = run_ranks(2, on_a_rank)
    for mine, other in zip(first, second, strict=True):
        assert torch.equal(mine, other)
        assert mine.unique().numel() > 1


def test_custom_random_operators_need_the_nondeterministic_seeded_tag() -> None:
    def on_a_rank() -> tuple[Tensor, Tensor]:
        with torch.library._scoped_library("drawing", "DEF") as library:
            library.define("noisy(Tensor x) -> Tensor")
            library.define("tagged(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
            for name in ("noisy", "tagged"):
                library.impl(name, lambda x: x + torch.rand_like(x), "CompositeExplicitAutograd")
            drawing = getattr(torch, "ops").drawing  # noqa: B009  # cloudpickle cannot pickle a function that names torch.ops
            mesh = sw.init_device_mesh("cpu", (2,))
            torch.manual_seed(comm.rank())
            x = sw.zeros(4, 3, mesh=mesh, placements=[sw.Shard(0)])
            with pytest.raises(UnsupportedError, match="nondeterministic_seeded"):
                drawing.noisy(x)
            return drawing.tagged(x).full_tensor(), torch.rand(3)

    (first, plain), (second, other_plain) = run_ranks(2, on_a_rank)
    assert torch.equal(first, second)
    assert not torch.equal(plain, other_plain)  # the ranks' own generators are restored


def test_functions_named_like_an_attribute_of_torch_ops_do_not_draw() -> None:
    def name() -> None: ...

    assert not isinstance(torch.ops.aten.name, torch._ops.OpOverloadPacket)  # a str: the namespace's own attribute
    with same_draws("name", name, sw.Mesh((1,))):
        name()


def test_recurrent_dropout_is_the_same_on_every_rank() -> None:
    def on_a_rank() -> Tensor:
        mesh = sw.init_device_mesh("cpu", (2,))
        layer = sw.distribute_module(nn.GRU(3, 4, num_layers=2, dropout=0.5), mesh)
        for parameter in layer.parameters():
            nn.init.constant_(parameter, 0.1)
        torch.rand(comm.rank())
        sw.manual_seed(0)
        state = sw.zeros(2, 5, 4, mesh=mesh)
        out, _ = layer(sw.rand(6, 5, 3, mesh=mesh, placements=[sw.Shard(1)]), state)
        return out.full_tensor().detach()

    first, second = run_ranks(2, on_a_rank)
    assert torch.equal(first, second)


def test_module_built_on_meta_materializes_only_its_shards() -> None:
    def on_a_rank() -> Tensor:
        mesh = sw.init_device_mesh("cpu", (4,))
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(64, 40), nn.LayerNorm(40), nn.Linear(40, 8))

        def shard(name: str, module: nn.Module, mesh: Any) -> None:
            for key, value in module.named_parameters(recurse=False):
                module.register_parameter(key, nn.Parameter(sw.distribute_tensor(value, mesh, [sw.Shard(0)])))

        sw.distribute_module(model, mesh, shard)
        assert all(parameter.is_meta for parameter in model.parameters())
        model.to_empty(device="cpu")
        sw.manual_seed(0)
        for module in model:
            module.reset_parameters()
        for parameter in model.parameters():
            local = parameter.to_local()
            assert not local.is_meta
            assert local.untyped_storage().nbytes() == 4 * parameter.numel() // 4
        return model[0].weight.full_tensor().detach()

    found = run_ranks(4, on_a_rank)
    mesh = sw.init_device_mesh("cpu", (1,))
    sw.manual_seed(0)
    weight = nn.init.kaiming_uniform_(sw.empty(40, 64, mesh=mesh), a=5**0.5)
    assert all(torch.equal(whole, weight.full_tensor()) for whole in found)


def test_tracker_state_can_be_saved_and_restored() -> None:
    from shardwright.tensor.random import tracker

    mesh = sw.init_device_mesh("cpu", (1,))
    sw.manual_seed(0)
    sw.rand(3, mesh=mesh)
    assert isinstance(tracker, sw.OffsetBasedRNGTracker)
    saved = tracker.get_state()
    first = sw.rand(3, mesh=mesh).tolist()
    tracker.set_state(saved)
    assert sw.rand(3, mesh=mesh).tolist() == first


def test_ranks_with_different_histories_agree_on_a_seed() -> None:
    """Some ranks have drawn under a torch seed before and others have not: they still agree."""

    def draw(ranks: tuple[int, ...] | None) -> list[float]:
        torch.manual_seed(20_261)
        everyone = sw.Mesh((comm.world().size,))
        if ranks is not None and comm.rank() in ranks:
            sw.rand(3, mesh=sw.Mesh((len(ranks),), ranks=ranks))
        torch.manual_seed(20_261)
        return sw.rand(8, mesh=everyone, placements=[sw.Shard(0)]).full_tensor().tolist()

    first = run_ranks(3, draw, None)[0]
    assert run_ranks(4, draw, None, timeout=30) == [first] * 4
    assert run_ranks(4, draw, (1, 2), timeout=30) == [first] * 4


def test_gradients_of_distribution_parameters_are_zero_as_in_torch() -> None:
    draws = (
        torch.bernoulli,
        lambda x: torch.normal(x, 1.0),
        lambda x: torch.normal(0.0, x),
        lambda x: torch.normal(x, x),
        torch.poisson,
    )
    for draw in draws:
        plain = torch.full((4,), 0.5, requires_grad=True)
        ours = sw.full((4,), 0.5, mesh=sw.init_device_mesh("cpu", (1,)), placements=[sw.Shard(0)], requires_grad=True)
        for x in (plain, ours):
            draw(x).square().sum().backward()
            assert x.grad is not None
            assert x.grad.tolist() == [0.0] * 4
        with torch.no_grad():
            assert not draw(ours).requires_grad
