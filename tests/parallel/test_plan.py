"""Plans: which pattern decides, what styles do to parameters, and what is refused, all at once."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright import Replicate, Shard
from shardwright.errors import ArgumentTypeError, PlanError
from shardwright.layout import Mesh
from shardwright.parallel.plan.mesh_roles import MeshRoles, roles_of
from shardwright.parallel.plan.patterns import Pattern
from shardwright.parallel.plan.resolve import resolve
from shardwright.parallel.plan.structure import fans, repeated_blocks


def roles(**sizes: int) -> MeshRoles:
    """Return the roles of a mesh with these dimensions."""
    return roles_of(sw.Mesh(tuple(sizes.values()), tuple(sizes)))


def placements(model: nn.Module, plan: Any, **sizes: int) -> dict[str, str]:
    resolved = resolve(model, sw.Plan(plan), roles(**sizes), what="test")
    return {each.names[0]: str(each.layout or "ignored").partition("] ")[2] for each in resolved.parameters}


def problems(model: nn.Module, plan: Any, **sizes: int) -> str:
    with pytest.raises(PlanError) as caught:
        resolve(model, sw.Plan(plan), roles(**sizes), what="test")
    return str(caught.value)


class Conv1D(nn.Module):
    """As in transformers: a linear layer whose weight is transposed."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.empty(nx, nf)), nn.Parameter(torch.empty(nf))


class Attention(nn.Module):
    def __init__(self, heads: int, kv: int, size: int = 4, width: int = 8) -> None:
        super().__init__()
        self.head_dim = size
        self.q_proj, self.o_proj = (
            nn.Linear(width, heads * size, bias=False),
            nn.Linear(heads * size, width, bias=False),
        )
        self.k_proj, self.v_proj = (nn.Linear(width, kv * size, bias=False) for _ in range(2))
        self._modules.move_to_end("o_proj") if hasattr(self._modules, "move_to_end") else None
        self._modules["o_proj"] = self._modules.pop("o_proj")


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))


class Model(nn.Module):
    def __init__(self, heads: int = 4, kv: int = 2, *, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(Block(Attention(heads, kv)) for _ in range(2))
        self.head = nn.Linear(8, 12, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


# --- patterns -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.**", "a.b.c", True),
        ("**", "", True),
        ("**", "a.b", True),
        ("", "", True),
        ("", "a", False),
        ("**.c", "a.b.c", True),
        ("a.**.c", "a.c", True),
        ("a.**.c", "a.b.b.c", True),
        ("a.[bc]_proj", "a.c_proj", True),
        ("a.?", "a.bb", False),
        ("a", "ab", False),
    ],
)
def test_patterns_match_parts_of_dotted_names(pattern: str, name: str, expected: bool) -> None:
    assert Pattern(pattern).matches(name) is expected


@pytest.mark.parametrize(
    ("more", "less"),
    [
        ("layers.0.mlp", "layers.*.mlp"),
        ("layers.*.mlp", "**.mlp"),
        ("**.mlp", "layers.**"),
        ("layers.*.mlp.0.weight", "layers.*.mlp.0"),
        ("**.weight", "layers.*.mlp.0"),
        ("layers.*.mlp.*", "layers.*.mlp"),
        ("layers.*.mlp", "**"),
    ],
)
def test_the_more_specific_pattern_decides_in_any_order(more: str, less: str) -> None:
    layer = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(4, 4, bias=False))})
    model = nn.ModuleDict({"layers": nn.ModuleList([layer])})
    for first, second in ((more, less), (less, more)):
        plan = {pattern: Shard(1) if pattern == more else Replicate() for pattern in (first, second)}
        assert placements(model, plan, tp=2) == {"layers.0.mlp.0.weight": "(tp: S(1))"}, plan


# --- what styles do -------------------------------------------------------------------------------------------------


def test_columns_and_rows_of_linear_layers_embeddings_and_conv1d() -> None:
    model = nn.ModuleDict({"linear": nn.Linear(4, 6), "conv": Conv1D(6, 4), "embedding": nn.Embedding(10, 4)})
    assert placements(model, {"*": sw.ColwiseParallel()}, tp=2) == {
        "linear.weight": "(tp: S(0))",
        "linear.bias": "(tp: S(0))",
        "conv.weight": "(tp: S(1))",
        "conv.bias": "(tp: S(0))",
        "embedding.weight": "(tp: S(1))",
    }
    assert placements(model, {"*": sw.RowwiseParallel()}, tp=2) == {
        "linear.weight": "(tp: S(1))",
        "linear.bias": "(tp: R)",
        "conv.weight": "(tp: S(0))",
        "conv.bias": "(tp: R)",
        "embedding.weight": "(tp: S(0))",
    }


def test_parameters_are_sharded_over_dp_inside_their_tensor_parallel_shard() -> None:
    model = nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})
    model.register_parameter("scale", nn.Parameter(torch.ones(())))
    plan = {"up": sw.ColwiseParallel(), "down": sw.RowwiseParallel(), "scale": sw.Replicated()}
    resolved = resolve(model, sw.Plan(plan), roles(replicate=2, dp=2, tp=2), what="test")
    layouts = {each.names[0]: each for each in resolved.parameters}
    up = layouts["up.weight"].layout
    assert up is not None
    # tp shards first: ranks 0 and 2, which differ along dp, hold neighbouring rows of the first half.
    assert [up.region(rank).offset[0] for rank in range(4)] == [0, 4, 2, 6]
    assert str(layouts["down.weight"].layout) == "[4, 8] (replicate: R, dp: S(0), tp: S(1))"
    assert str(layouts["scale"].layout) == "[] (replicate: R, dp: R, tp: R)"
    assert layouts["up.weight"].gathered == frozenset([1])
    assert layouts["scale"].gathered == frozenset()


def test_raw_placements_by_name_in_order_and_alone() -> None:
    model = nn.ModuleDict({key: nn.Linear(4, 4, bias=False) for key in "abcd"})
    plan = {"a": {"tp": Shard(1), "dp": Replicate()}, "b": [Shard(1), Shard(0)], "c": Shard(1), "d": sw.Ignored()}
    assert placements(model, plan, dp=2, tp=2) == {
        "a.weight": "(dp: R, tp: S(1))",
        "b.weight": "(dp: S(1), tp: S(0))",
        "c.weight": "(dp: S(0), tp: S(1))",
        "d.weight": "",
    }


def test_a_plan_for_tp_does_nothing_on_a_mesh_without_it() -> None:
    found = placements(nn.Linear(4, 4), {"": sw.ColwiseParallel()}, dp=2)
    assert set(found.values()) == {"(dp: S(0))"}


def test_heads_stay_whole() -> None:
    weight = "layers.0.attention.{}_proj.weight"
    cases = {
        # heads, kv heads, ranks: query, key and value, output
        (4, 2, 2): ("S(0)", "S(0)", "S(1)"),
        (6, 6, 4): ("S(0: 8+8+4+4)", "S(0: 8+8+4+4)", "S(1: 8+8+4+4)"),
        (6, 2, 4): ("S(0: 8+8+4+4)", "R", "S(1: 8+8+4+4)"),
        (12, 6, 4): ("S(0: 16+16+8+8)", "S(0: 8+8+4+4)", "S(1: 16+16+8+8)"),
        (28, 4, 8): ("S(0: 16+16+16+16+12+12+12+12)", "R", "S(1: 16+16+16+16+12+12+12+12)"),
    }
    for (heads, kv, ranks), (query, keys, output) in cases.items():
        model = Model(heads, kv)
        found = placements(model, auto(model, ranks), tp=ranks)
        assert found[weight.format("q")] == f"(tp: {query})", (heads, kv, ranks)
        assert found[weight.format("k")] == found[weight.format("v")] == f"(tp: {keys})", (heads, kv, ranks)
        assert found[weight.format("o")] == f"(tp: {output})", (heads, kv, ranks)


def auto(model: nn.Module, ranks: int) -> sw.Plan:
    """Return the automatic plan for so many ranks along tp; it needs a mesh, but no ranks."""
    return sw.auto_plan(model, Mesh((1, ranks), ("dp", "tp")))


def test_the_automatic_plan_finds_fans_in_repeated_blocks_and_the_vocabulary() -> None:
    assert str(auto(Model(), 2)).splitlines() == [
        "layers.*.attention.q_proj  ColwiseParallel(multiple=8)",
        "layers.*.attention.k_proj  ColwiseParallel(multiple=4)",
        "layers.*.attention.v_proj  ColwiseParallel(multiple=4)",
        "layers.*.attention.o_proj  RowwiseParallel(multiple=8)",
        "layers.*.mlp.0             ColwiseParallel()",
        "layers.*.mlp.2             RowwiseParallel()",
        "embedding                  RowwiseParallel()",
        "head                       ColwiseParallel()",
        "**                         Replicated()",
    ]


def test_the_automatic_plan_reads_what_a_model_states() -> None:
    model: Any = Model(tied=False)
    model.tp_plan = {
        "layers.*.mlp.0": "colwise",
        "layers.*.mlp.2": "rowwise",
        "layers.*.attention": "moe_tp_experts",
        "layers.*.norm": "replicated_with_grad_allreduce",
        "head": "colwise_gather_output",
        "layers.*.shared_expert": "colwise",
    }
    assert dict(auto(model, 2)) == {
        "layers.*.mlp.0": sw.ColwiseParallel(),
        "layers.*.mlp.2": sw.RowwiseParallel(),
        "layers.*.norm": sw.Replicated(),
        "head": sw.ColwiseParallel(),
        "**": sw.Replicated(),
    }
    model.tp_plan = {"head": "tomorrow's style"}
    with pytest.warns(UserWarning, match="not known here: it is replicated"):
        assert dict(auto(model, 2)) == {"head": sw.Replicated(), "**": sw.Replicated()}


def test_a_stated_style_is_for_the_layer_inside_of_an_adapter() -> None:
    class Adapter(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base_layer = base
            self.lora_A, self.lora_B = nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)

    model: Any = Model(6, 6, tied=False)
    model.tp_plan = {"layers.*.attention.[qkv]_proj": "colwise", "layers.*.attention.o_proj": "rowwise"}
    for layer in model.layers:
        layer.attention.q_proj = Adapter(layer.attention.q_proj)
    assert dict(auto(model, 4)) == {
        "layers.*.attention.k_proj": sw.ColwiseParallel(multiple=4),
        "layers.*.attention.v_proj": sw.ColwiseParallel(multiple=4),
        "layers.*.attention.q_proj.base_layer": sw.ColwiseParallel(multiple=4),
        "layers.*.attention.o_proj": sw.RowwiseParallel(multiple=4),
        "**": sw.Replicated(),
    }


def test_tied_layers_that_would_be_sharded_differently_are_replicated() -> None:
    model: Any = Model()
    model.tp_plan = {"head": "rowwise", "embedding": "embedding_rowwise"}
    assert dict(auto(model, 2)) == {"**": sw.Replicated()}
    model.tp_plan = {"head": "colwise_gather_output"}  # the embedding follows
    assert dict(auto(model, 2)) == {
        "head": sw.ColwiseParallel(),
        "embedding": sw.RowwiseParallel(),
        "**": sw.Replicated(),
    }


def test_repeated_blocks_and_fans() -> None:
    assert repeated_blocks(Model()) == ["layers.0", "layers.1"]
    assert repeated_blocks(nn.Linear(2, 2)) == []
    block = nn.ModuleDict({"a": nn.Linear(8, 32), "b": nn.Linear(32, 8), "c": nn.Linear(8, 3)})
    assert [([c.name for c in fan.columns], fan.row.name) for fan in fans("x", block)] == [(["x.a"], "x.b")]


# --- plans as values ------------------------------------------------------------------------------------------------


def test_a_plan_is_a_value() -> None:
    plan = sw.Plan({"a": sw.ColwiseParallel(multiple=2), "b": {"tp": Shard(0)}})
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert {plan: 1}[sw.Plan(dict(plan))] == 1
    assert plan | {"a": Replicate()} != plan
    assert (plan | {"c": sw.Replicated()})["c"] == sw.Replicated()
    with pytest.raises(TypeError):
        plan["a"] = sw.Replicated()  # type: ignore[index]  # a Plan is immutable


def test_torch_placements_are_accepted() -> None:
    from torch.distributed.tensor import Shard as TorchShard

    assert sw.Plan({"a": {"tp": TorchShard(1)}}) == sw.Plan({"a": Shard(1)})
    assert sw.RowwiseParallel(output_layouts=TorchShard(1)) == sw.RowwiseParallel(output_layouts=Shard(1))


# --- what is refused ------------------------------------------------------------------------------------------------


def test_everything_wrong_is_reported_at_once() -> None:
    model = Model()
    message = problems(
        model,
        {
            "layers.*.mpl": sw.ColwiseParallel(),
            "layers.*.norm": sw.RowwiseParallel(),
            "layers.*.mlp": {"tpp": Shard(0)},
            "head": sw.ColwiseParallel(),
            "embedding": sw.ColwiseParallel(),
            "layers.*.attention.q_*": sw.ColwiseParallel(),
            "layers.*.attention.*_proj": sw.Replicated(),
            "layers.*.attention.o_proj": Shard(5),
        },
        dp=2,
        tp=2,
    )
    assert message.startswith("test: 8 problems"), message  # that of o_proj in each of two layers
    for expected in (
        "pattern 'layers.*.mpl' matches no module and no parameter",
        "RowwiseParallel() does not fit layers.0.norm (LayerNorm)",
        "pattern 'layers.*.mlp' names the mesh dimension 'tpp'",
        "embedding.weight and head.weight are tied",
        "patterns 'layers.*.attention.q_*' and 'layers.*.attention.*_proj' are equally specific, but differ",
        "layers.0.attention.o_proj.weight of shape (8, 16) (by pattern 'layers.*.attention.o_proj')",
    ):
        assert expected in message, message


def test_every_parameter_must_be_placed_over_tp() -> None:
    message = problems(Model(), {"head": sw.ColwiseParallel()}, tp=2)
    assert "does not place layers.0.attention.q_proj.weight, " in message
    assert "and 12 more over 'tp'" in message
    placements(Model(), {"head": sw.ColwiseParallel(), "**": sw.Replicated()} | {"embedding": Shard(0)}, tp=2)


def test_equally_specific_patterns_that_agree_are_accepted() -> None:
    plan = {"layers.*.**": sw.Replicated(), "layers.[01].**": sw.Replicated(), "**": sw.Replicated()}
    assert set(placements(Model(), plan, tp=2).values()) == {"(tp: R)"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sw.Plan([("a", sw.Replicated())]), "expected a mapping"),
        (lambda: sw.Plan({3: sw.Replicated()}), "a pattern must be a str"),
        (lambda: sw.Plan({"a": "colwise"}), "expected a style"),
        (lambda: sw.ColwiseParallel(multiple=0), "multiple must be a positive int"),
        (lambda: sw.Plan({"a": sw.Partial()}), "cannot be Partial"),
        (lambda: sw.PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=Shard(0)), "same length"),
        (
            lambda: sw.PrepareModuleInput(input_kwarg_layouts={"x": Shard(1)}, desired_input_kwarg_layouts={}),
            "names arguments",
        ),
    ],
)
def test_wrong_plans_are_refused_when_they_are_made(make: Any, message: str) -> None:
    with pytest.raises((PlanError, ArgumentTypeError), match=message):
        make()


def test_a_dimension_that_is_not_made_of_heads_is_reported() -> None:
    assert "is not a multiple of 3" in problems(nn.Linear(4, 8), {"": sw.ColwiseParallel(multiple=3)}, tp=2)
