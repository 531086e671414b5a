"""`Mapping`: its notation, whole names, sizes, and every mistake as an error that names the rule and its line."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import shardwright as sw
from shardwright.errors import ArgumentTypeError, MappingError, RegionError

EXAMPLES = """
# the examples of the documentation
model.layers.{i}.self_attn.{q,k,v}_proj.weight = layers.{i}.wqkv : (g n d) e, (g d) e, (g d) e = (g (n + 1 + 1) d) e
model.layers.{i}.mlp.experts.{x}.{gate,up}_proj.weight = layers.{i}.moe.w13 : f e, f e = x (f + f) e

model.layers.{i}.self_attn.o_proj.weight = layers.{i}.wo : (h two r) e = (h r two) e  # a comment
model.embed_tokens.weight = tok.weight : v e = (v + pad) e
*.rotary_emb.inv_freq = -
"""


def state_of_examples() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    state = {"model.embed_tokens.weight": torch.randn(11, 6), "model.rotary_emb.inv_freq": torch.randn(3)}
    for layer in range(2):
        start = f"model.layers.{layer}"
        for name, rows in (("q", 24), ("k", 8), ("v", 8), ("o", 24)):
            state[f"{start}.self_attn.{name}_proj.weight"] = torch.randn(rows, 6)
        for expert in range(3):
            for part in ("gate", "up"):
                state[f"{start}.mlp.experts.{expert}.{part}_proj.weight"] = torch.randn(5, 6)
    return state


def test_the_documented_rules_do_what_view_transpose_cat_and_stack_do() -> None:
    state = state_of_examples()
    mapped = sw.Mapping(EXAMPLES, d=4, two=2, r=4, pad=5).apply(state)
    assert len(mapped) == 1 + 2 * 3
    assert torch.equal(mapped["tok.weight"], torch.cat([state["model.embed_tokens.weight"], torch.zeros(5, 6)]))
    for layer in range(2):
        start = f"model.layers.{layer}"
        q, k, v, o = (state[f"{start}.self_attn.{name}_proj.weight"] for name in "qkvo")
        fused = torch.cat([q.view(2, 3, 4, 6), k.view(2, 1, 4, 6), v.view(2, 1, 4, 6)], dim=1)
        assert torch.equal(mapped[f"layers.{layer}.wqkv"], fused.reshape(40, 6))
        assert torch.equal(mapped[f"layers.{layer}.wo"], o.view(3, 2, 4, 6).transpose(1, 2).reshape(24, 6))
        gate, up = (
            torch.stack([state[f"{start}.mlp.experts.{expert}.{part}_proj.weight"] for expert in range(3)])
            for part in ("gate", "up")
        )
        assert torch.equal(mapped[f"layers.{layer}.moe.w13"], torch.cat([gate, up], dim=1))


def test_the_inverse_gives_back_what_was_neither_dropped_nor_padding() -> None:
    state = state_of_examples()
    mapping = sw.Mapping(EXAMPLES, d=4, two=2, r=4, pad=5, n=3)
    back = mapping.inverse().apply(mapping.apply(state))
    del state["model.rotary_emb.inv_freq"]
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())


def test_a_tensor_that_is_only_renamed_is_the_same_object_and_any_shape_fits() -> None:
    state = {"a.0.w": torch.ones(2, 3, 4), "a.1.w": torch.tensor(1.0)}
    mapped = sw.Mapping("a.{i}.w = b.{i}.v").apply(state)
    assert mapped["b.0.v"] is state["a.0.w"]
    assert mapped["b.1.v"] is state["a.1.w"]


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("experts.{x}.w", "shared_experts.0.w", False),
        ("experts.{x}.w", "experts.0.w.bias", False),
        ("experts.{x}.w", "model.experts.0.w", False),
        ("experts.{x}.w", "experts.0.1.w", False),
        ("experts.{x}.w", "experts.word.w", True),
        ("*.experts.{x}.w", "model.layers.3.experts.0.w", True),
        ("*.experts.{x}.w", "experts.0.w", False),
        ("*.experts.{x}.w", "model.shared_experts.0.w", False),
        ("a.w", "aaw", False),
        ("layer{i}.w", "layer12.w", True),
        ("{i}.{i}.w", "1.1.w", True),
        ("{i}.{i}.w", "1.2.w", False),
    ],
)
def test_patterns_match_whole_names_only(pattern: str, name: str, matches: bool) -> None:
    mapping = sw.Mapping(f"{pattern} = -\n* = *")
    assert (mapping.bind({name: ()}).dropped == (name,)) is matches


def test_a_binding_that_is_an_axis_matches_numbers_only() -> None:
    rules = "experts.{x}.w = w : f = x f\nexperts.shared.w = shared"
    found = sw.Mapping(rules).apply({f"experts.{x}.w": torch.ones(2) for x in (0, 1, "shared")})
    assert {name: list(tensor.shape) for name, tensor in found.items()} == {"shared": [2], "w": [2, 2]}
    with pytest.raises(MappingError, match=r"no rule matches 'experts\.00\.w'"):
        sw.Mapping("experts.{x}.w = w : f = x f").apply({"experts.00.w": torch.ones(2)})


def test_parts_with_different_axes_are_paired_by_their_axes_and_others_in_order() -> None:
    state = {"w": torch.arange(5)}
    assert sw.Mapping("w = v : (a + b) = (b + a)", a=2).apply(state)["v"].tolist() == [2, 3, 4, 0, 1]
    mapped = sw.Mapping("w = x, y : (a + a) = a, a").apply({"w": torch.arange(4)})
    assert [mapped["x"].tolist(), mapped["y"].tolist()] == [[0, 1], [2, 3]]


def test_a_tensor_beside_numbered_ones_can_be_the_last_of_a_stack() -> None:
    mapping = sw.Mapping("experts.{x}.w, shared.w = w : f e, f e = (x + 1) f e")
    state = {"experts.0.w": torch.zeros(2, 3), "experts.1.w": torch.ones(2, 3), "shared.w": torch.full((2, 3), 2.0)}
    assert mapping.apply(state)["w"][:, 0, 0].tolist() == [0, 1, 2]
    assert mapping.inverse().apply(mapping.apply(state)).keys() == state.keys()


def test_other_names_are_kept_by_the_rule_that_says_so_and_refused_without_it() -> None:
    state = {"a": torch.ones(1), "b": torch.ones(2)}
    assert sw.Mapping("a = c\n* = *").apply(state).keys() == {"b", "c"}
    with pytest.raises(MappingError, match=r"no rule matches 'b'; add a rule, drop such tensors"):
        sw.Mapping("a = c").apply(state)
    with pytest.raises(MappingError, match=r"line 2: `\* = \*`: it gives a tensor 'b', and so does line 1"):
        sw.Mapping("a = b\n* = *").apply(state)


def test_names_say_which_sources_every_target_has() -> None:
    mapping = sw.Mapping("{q,k} = qk : d, d = (d + d)\na = b\n- = c")
    assert mapping.names({"q": (2,), "k": (2,), "a": (1,)}) == {"b": ("a",), "qk": ("q", "k")}
    assert mapping.inverse().names({"qk": (4,), "b": (1,), "c": (9,)}) == {"a": ("b",), "q": ("qk",), "k": ("qk",)}


def test_a_mapping_is_printed_as_its_rules_compared_by_them_copied_and_pickled() -> None:
    mapping = sw.Mapping("a = b : (x y) = y x  # why\n\n{c,d}.w = {e,f}.w", x=2)
    assert str(mapping) == "a = b : (x y) = y x\nc.w = e.w\nd.w = f.w"
    assert repr(mapping) == "Mapping(3 rules, x=2)"
    assert str(mapping.inverse()) == "b = a : y x = (x y)\ne.w = c.w\nf.w = d.w"
    assert sw.Mapping(str(mapping), x=2) == mapping != sw.Mapping(str(mapping), x=3)
    assert pickle.loads(pickle.dumps(mapping)) == copy.deepcopy(mapping) == mapping
    assert hash(copy.copy(mapping)) == hash(mapping)


def test_a_rule_goes_on_in_the_next_line_and_errors_name_its_first() -> None:
    mapping = sw.Mapping("a =  # one\n\n  b :\n x y = y x\nc = d")
    assert str(mapping) == "a = b : x y = y x\nc = d"
    with pytest.raises(MappingError, match=r"line 2: `a = b : x =`: it is not a bijection"):
        sw.Mapping("\na = b :\nx =")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "needs at least one rule"),
        ("a", "line 1: `a`: a rule has two sides of names"),
        ("a = b = c", "got 2 '='"),
        ("\n# x\na = b : x", "line 3: `a = b : x`: a rule has two sides of index expressions"),
        ("a = b : x = x = x", "got 2 '='"),
        ("- = -", "both sides are '-'"),
        ("a = - : x = x", "a rule that drops tensors has no index expressions"),
        ("a b = c", "has ' ', which cannot be part of a name"),
        ("a, = c", "a name is empty"),
        (" = c", "a name is empty"),
        ("a.{i = c", "without a '}'"),
        ("a.} = c", "has '}'"),
        ("a.{} = c", "must be an identifier"),
        ("a.{1} = c", "must be an identifier"),
        ("a.{q,q} = c.{x,y}", "an alternative twice"),
        ("a..b = c", "empty component"),
        (".a = c", "empty component"),
        ("a.{i}{j} = b.{i}.{j}", "binds twice between two dots"),
        ("a.{i}_{j} = b.{i}.{j}", "binds twice between two dots"),
        ("*.a.* = -", "once in a name"),
        ("a*.b = -", "whole dotted components"),
        ("{a,b} = c", "2 names on the left and 1 on the right; to join or split"),
        ("a.{i} = b", "{i} is on one side only"),
        ("a = b.{i}", "{i} is on one side only"),
        ("*.a = b", "* is on one side only"),
        ("{q,k} = w : f, f, f = (f + f + f)", "2 names on the left (q, k), but 3 index expressions"),
        ("a = b : x, x = (x + x)", "1 names on the left (a), but 2 index expressions"),
        ("a.{i} = b : f = f", "{i} is not bound on the other side"),
        ("a.{i}, c = b.{i} : f, f = (f + f)", "not in every name"),
        ("a.{i} = b.{i} : i f = f i", "cannot be an axis too"),
        ("a.{pad} = b : f = (f + pad)", "is padding"),
        ("a = b : x x = x x", "the axis 'x' occurs twice in one part"),
        ("a.{x} = b : x f = x f", "the axis 'x' occurs twice"),
        ("a = b : x = x y", "it is not a bijection: 1 part on the left and 0 on the right"),
        ("a = b : x = (x + y)", "0 parts on the left and 1 on the right"),
        ("a = b : (x + y) = (x + x)", "it is not a bijection"),
        ("a = b : 2 x = x", "it is not a bijection"),
        ("a = b : pad x = x", "'a' is all padding"),
        ("a = b : x + y = x y", "put them in parentheses"),
        ("a = b : (x y = x y", "'(' without ')'"),
        ("a = b : x) y = x y", "')' without '('"),
        ("a = b : (x +) = x", "'+' needs a part on both sides"),
        ("a = b : x-y = x", "'-' is not part of the notation"),
        ("a = b : 0 = 0", "must be a positive number"),
        ("a = b : 02 = 02", "without leading zeros"),
        ("a.{i} = b.{i}\na.{j} = c.{j}", "line 2: `a.{j} = c.{j}`: 'a.{j}' on the left and 'a.{i}' of line 1"),
        ("a.{i} = b.{i}\na.w = c", "both match 'a.w'"),
        ("*.w = *.v\nm.{i}.w = n.{i}", "both match 'm.0.w'"),
        ("*.w = -\nl.{i}.w = n.{i}", "both match 'l.0.w'"),
        ("a = x\nb = x", "'x' on the right and 'x' of line 1"),
        ("a, a = x, y", "of another name of the rule both match 'a'"),
        ("*.gamma = *.weight\na.weight = b.weight", "both match 'b.weight'"),
        ("* = *\n* = *", "has this rule already"),
    ],
)
def test_an_invalid_rule_is_an_error_that_says_what_is_wrong(text: str, expected: str) -> None:
    with pytest.raises(MappingError) as raised:
        sw.Mapping(text)
    assert expected in str(raised.value)


@pytest.mark.parametrize(
    ("text", "sizes", "shapes", "expected"),
    [
        ("w = v : a b = b a", {}, {"w": (2,)}, "'w' of shape [2] as `a b` has 1 dimensions, but the expression has 2"),
        ("w = v : (a b) = b a", {}, {"w": (6,)}, "the sizes of a, b cannot be inferred from 'w' of shape [6]"),
        ("w = v : (a b) = b a", {"a": 4}, {"w": (6,)}, "no size of the axis 'b' makes `a b` with a=4 right"),
        (
            "w = v : (a b) = b a",
            {"a": 2, "b": 2},
            {"w": (6,)},
            "dimension 0 has length 6, but `a b` has 4 with a=2, b=2",
        ),
        ("w = v : (a + b) = (b + a)", {"a": 2}, {"w": (1,)}, "no size of the axis 'b' makes `a + b` with a=2 right"),
        ("q, k = w : d, d = (d + d)", {}, {"q": (2,), "k": (3,)}, "'k' of shape [3] as `d` does not fit"),
        ("q, k = w : d, d = (d + d)", {}, {"q": (2,)}, "the rule joins 'q' with tensors that are missing: 'k'"),
        ("e.{x} = w : f = x f", {}, {"e.0": (2,), "e.2": (2,)}, "missing: 'e.1'"),
        ("e.{x} = w : f = x f", {"x": 3}, {"e.0": (2,), "e.1": (2,)}, "x=3 was given, but the tensors have 2 indices"),
        ("e.{x} = w : f = x f", {}, {"e.0": (2,), "e.1": (3,)}, "'e.1' of shape [3] as `f` does not fit"),
        ("w = v : a = (a + pad)", {}, {"w": (2,)}, "pass pad= to Mapping"),
        ("w = v : (7 a) = a 7", {}, {"w": (6,)}, "no size of the axis 'a' makes `7 a` right"),
    ],
)
def test_tensors_that_do_not_fit_are_an_error_with_rule_tensor_shape_and_axis(
    text: str, sizes: dict[str, int], shapes: dict[str, tuple[int, ...]], expected: str
) -> None:
    with pytest.raises(MappingError) as raised:
        sw.Mapping(text, **sizes).bind(shapes)
    assert expected in str(raised.value)
    assert str(raised.value).startswith("line 1: `")


def test_wrong_arguments_are_typed_errors() -> None:
    with pytest.raises(ArgumentTypeError, match="needs the text of its rules, got dict"):
        sw.Mapping({"a": "b"})  # type: ignore[arg-type]  # the mistake
    with pytest.raises(ArgumentTypeError, match="x= must be an int, got True"):
        sw.Mapping("a = b : (x y) = x y", x=True)
    with pytest.raises(MappingError, match="x=0 must be positive"):
        sw.Mapping("a = b : (x y) = x y", x=0)
    with pytest.raises(MappingError, match=r"no rule has an axis 'z'.*the axes are: x, y"):
        sw.Mapping("a = b : (x y) = x y", z=1)
    with pytest.raises(ArgumentTypeError, match="apply needs plain tensors, got list for 'a'"):
        sw.Mapping("a = b").apply({"a": [1.0]})  # type: ignore[dict-item]  # the mistake
    with pytest.raises(ArgumentTypeError, match="a tensor or a shape for 'a', got int"):
        sw.Mapping("a = b").bind({"a": 3})
    with pytest.raises(MappingError, match=r"it joins 'q' of torch.float32 and 'k' of torch.float16"):
        sw.Mapping("q, k = w : d, d = (d + d)").apply({"q": torch.ones(1), "k": torch.ones(1).half()})
    bound = sw.Mapping("a = b").bind({"a": (2, 3)})
    with pytest.raises(RegionError, match=r"region \[0:3, 0:3\] is not inside 'b' of shape \[2, 3\]"):
        bound.pieces("b", sw.Region((0, 0), (3, 3)))
    with pytest.raises(MappingError, match="the mapping gives no tensor named 'a'"):
        bound.pieces("a")


def test_shards_of_a_permuted_tensor_read_only_their_rows() -> None:
    """A rank that holds some heads of a tensor whose rows are permuted within heads reads the rows of those heads."""
    bound = sw.Mapping("q = wq : (h two r) e = (h r two) e", two=2, r=4).bind({"q": (64, 16)})
    for rank in range(4):
        region = sw.Region((16 * rank, 0), (16, 16))
        assert [piece.source.region for piece in bound.pieces("wq", region)] == [region]  # type: ignore[union-attr]  # no padding
    cut = bound.pieces("wq", sw.Region((3, 0), (2, 16)))
    assert [str(piece) for piece in cut] == ["q[5:6, 0:16] -> [3:4, 0:16]", "q[2:3, 0:16] -> [4:5, 0:16]"]


def test_a_piece_of_a_fused_tensor_can_be_read_without_what_lies_between() -> None:
    mapping = sw.Mapping("{q,k} = qk : (g n d) e, (g d) e = (g (n + 1) d) e", n=3, d=2)
    [piece] = mapping.inverse().bind({"qk": (32, 5)}).pieces("k")
    assert isinstance(piece, sw.interop.mapping.MappedPiece)
    assert piece.source.region == sw.Region((6, 0), (26, 5))
    assert not piece.source.is_dense
    assert [part.source.region.offset[0] for part in piece.dense()] == [6, 14, 22, 30]
    assert list(piece.dense(least=11)) == [piece]
    assert max(part.source.region.volume for part in piece.limited(20)) <= 20


def test_absurd_numbers_of_tensors_are_refused_at_once() -> None:
    mapping = sw.Mapping("e.{x} = w : f = x f")
    with pytest.raises(MappingError, match=r"missing: 'e\.1', 'e\.2', .*'e\.8', \.\.\."):
        mapping.bind({"e.0": (2,), "e.999999999999": (2,)})
    with pytest.raises(MappingError, match=r"it would make 999999999999 tensors 'e\.\{x\}' of 'w'"):
        mapping.inverse().bind({"w": (999999999999, 2)})


def test_a_star_is_bound_in_rules_with_indices() -> None:
    mapping = sw.Mapping("*.q, *.k = *.qk : d, d = (d + d)")
    state = {f"{start}.{name}": torch.randn(2) for start in ("a", "b.0.c") for name in ("q", "k")}
    mapped = mapping.apply(state)
    assert mapped.keys() == {"a.qk", "b.0.c.qk"}
    assert torch.equal(mapped["b.0.c.qk"], torch.cat([state["b.0.c.q"], state["b.0.c.k"]]))
    assert mapping.inverse().apply(mapped).keys() == state.keys()


def test_a_mapping_of_ten_thousand_experts_is_bound_quickly() -> None:
    """No step takes a time that grows with the number of elements, or with the square of the number of tensors."""
    shapes = {
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight": (1 << 20, 1 << 20)
        for layer in range(40)
        for expert in range(128)
        for part in ("gate", "up")
    }
    bound = sw.Mapping(EXAMPLES, pad=0).bind(shapes)
    assert len(bound.targets) == 40
    assert len(bound.pieces("layers.7.moe.w13", sw.Region((5, 0, 0), (2, 1 << 21, 1 << 20)))) == 4
