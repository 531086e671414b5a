"""The states of all ranks are merged into one; differences raise with the ranks and the values."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardwright as sw
from shardwright import checkpoint, comm, sharded
from shardwright.checkpoint import PerRank
from shardwright.checkpoint.format.manifest import sharding_to_json
from shardwright.checkpoint.reading.build_state import build
from shardwright.checkpoint.state.flatten import flatten, per_rank_nodes
from shardwright.checkpoint.state.merge import Merged, PerRankDescription, StateDescription, merge
from shardwright.checkpoint.state.merge_ranks import describe
from shardwright.errors import LoadMismatchError, StateDiffersError
from shardwright.testing import run_ranks

# --- merging, without ranks -------------------------------------------------------------------------------------------

NAMES = st.text("ab.~", min_size=0, max_size=3)
LEAVES = st.one_of(
    st.integers(-3, 3),
    st.booleans(),
    st.none(),
    st.text("xy", max_size=2),
    st.floats(allow_nan=False),
    st.tuples(st.sampled_from([torch.float32, torch.int8]), st.lists(st.integers(0, 3), max_size=2)).map(
        lambda made: torch.zeros(made[1], dtype=made[0])
    ),
)
STATES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(NAMES | st.integers(0, 2), inner, max_size=4), st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=12,
).filter(lambda state: isinstance(state, dict))


def shown(value: Any) -> Any:
    """A state with its tensors as their dtype and shape: what can be compared."""
    match value:
        case torch.Tensor():
            return ("tensor", value.dtype, tuple(value.shape))
        case dict():
            return {(type(key), key): shown(item) for key, item in value.items()}
        case list() | tuple():
            return (type(value), [shown(item) for item in value])
    return (type(value), value)


def rebuilt(merged: Merged) -> Any:
    """The state that a merged tree describes."""

    def tensor(number: int, is_array: bool) -> torch.Tensor:
        assert not is_array
        return torch.zeros(merged.table.shape(number), dtype=getattr(torch, merged.table.dtypes[number]))

    return build(merged.tree, tensor, {}, rank=0)


def described(state: Any, ranks: tuple[int, ...] = (0,)) -> StateDescription:
    return describe(flatten(state, comm.world()), ranks)


def merged(states: Mapping[tuple[int, ...], Any], ranks: tuple[int, ...] | None = None) -> Merged:
    """Merge the states of these ranks."""
    everyone = ranks or tuple(sorted(rank for some in states for rank in some))
    return merge([(some, described(state)) for some, state in states.items()], everyone)


@given(STATES)
def test_identical_states_merge_to_the_same_state(state: Any) -> None:
    assert shown(rebuilt(merged({(0, 1, 2): state}))) == shown(state)


@st.composite
def parted(draw: st.DrawFn) -> tuple[Any, list[Any]]:
    """A state, and what each of three ranks has of it: every entry of a dict is with some of them, in any order."""
    state = draw(STATES)
    parts: list[Any] = [{} for _ in range(3)]

    def give(whole: Any, into: list[Any]) -> None:
        for key in whole:
            holders = draw(st.sets(st.sampled_from(range(len(into))), min_size=1))
            some = [into[place] for place in sorted(holders)]
            if isinstance(whole[key], dict) and whole[key]:
                for part in some:
                    part[key] = {}
                give(whole[key], [part[key] for part in some])
            else:
                for part in some:
                    part[key] = whole[key]

    give(state, parts)
    return state, [_shuffled(part, draw) for part in parts]


def _shuffled(state: Any, draw: Callable[..., Any]) -> Any:
    if not isinstance(state, dict):
        return state
    return {key: _shuffled(state[key], draw) for key in draw(st.permutations(list(state)))}


@given(parted())
def test_parts_of_a_state_merge_to_the_state(made: tuple[Any, list[Any]]) -> None:
    state, parts = made
    result = merge([((rank,), described(part)) for rank, part in enumerate(parts)], (0, 1, 2))
    assert shown(rebuilt(result)) == shown(state)
    assert len(set(result.table.names)) == len(result.table.names)
    # Every rank finds its own tensors: the row it is given has their dtype, shape, and it among the holders.
    for rank, part in enumerate(parts):
        flat = flatten(part, comm.world())
        for leaf, number in zip(flat.leaves, result.numbers[rank], strict=True):
            sharding = result.table.sharding(number)
            assert (result.table.dtypes[number], sharding.shape) == (leaf.dtype, leaf.sharding.shape)
            assert rank in sharding.mesh


@given(parted(), st.permutations(range(3)))
def test_merging_does_not_depend_on_the_order_of_ranks(made: tuple[Any, list[Any]], order: list[int]) -> None:
    _, parts = made
    one = merge([((rank,), described(parts[rank])) for rank in range(3)], (0, 1, 2))
    other = merge([((rank,), described(parts[rank])) for rank in order], (0, 1, 2))
    assert shown(rebuilt(one)) == shown(rebuilt(other))
    assert sorted(one.table.dtypes) == sorted(other.table.dtypes)


F = torch.zeros(2)
DIFFERENT = {
    "a value": (1, 2, "model.x: 1 on rank 0, and 2 on ranks 1, 2"),
    "a type": (1, 1.0, "model.x: 1 on rank 0, and 1.0 on ranks 1, 2"),
    "a bool": (1, True, "model.x: 1 on rank 0, and True on ranks 1, 2"),
    "a str": ("a", "b", "model.x: 'a' on rank 0, and 'b' on ranks 1, 2"),
    "a shape": (F, torch.zeros(3), "model.x: [2] (0: R) on rank 0, and [3] (0: R) on ranks 1, 2"),
    "a dtype": (F, F.int(), "model.x: float32 on rank 0, and int32 on ranks 1, 2"),
    "a kind": (F, 5, "model.x: a tensor on rank 0, and 5 on ranks 1, 2"),
    "a container": ({"a": 1}, [1], "model.x: a dict on rank 0, and a list on ranks 1, 2"),
    "a tuple": ([1], (1,), "model.x: a list on rank 0, and a tuple on ranks 1, 2"),
    "a length": ([1], [1, 2], "model.x: 1 entries on rank 0, and 2 entries on ranks 1, 2"),
    "an array": (F, F.numpy(), "model.x: a tensor on rank 0, and an array on ranks 1, 2"),
    "a nested value": ([0, {"y": 1}], [0, {"y": 2}], "model.x.1.y: 1 on rank 0, and 2 on ranks 1, 2"),
    "a PerRank value": (PerRank(1), 1, "model.x: a PerRank value on rank 0, and 1 on ranks 1, 2"),
}


@pytest.mark.parametrize(("one", "other", "words"), DIFFERENT.values(), ids=DIFFERENT.keys())
def test_different_values_under_one_name_raise(one: Any, other: Any, words: str) -> None:
    same = {"same": 1}
    with pytest.raises(StateDiffersError, match=re.escape(words)) as caught:
        merged({(0,): {"model": {"x": one} | same}, (1, 2): {"model": same | {"x": other}}})
    assert "under 1 name; mark values that differ between ranks with PerRank" in str(caught.value)


def test_one_error_lists_all_differences() -> None:
    with pytest.raises(StateDiffersError, match="under 30 names") as caught:
        merged({(0,): {f"k{n}": n for n in range(30)}, (1,): {f"k{n}": -1 for n in range(30)}})
    assert "k0: 0 on rank 0, and -1 on rank 1" in str(caught.value)
    assert "and 10 more" in str(caught.value)


def test_nan_is_the_same_as_nan() -> None:
    result = merged({(0,): {"x": float("nan"), "a": 1}, (1,): {"x": float("nan"), "b": 1}})
    assert result.tree[0] == "d"
    assert result.tree[1::2] == ["x", "a", "b"]  # of one x, and what else either has


def test_equal_dotted_names_of_different_keys_are_different_tensors() -> None:
    result = merged({(0,): {"a.b": F}, (1,): {"a": {"b": torch.ones(2)}}})
    assert result.table.names == ("a.b", "a.b~2")
    assert [tuple(result.table.sharding(number).mesh.ranks) for number in (0, 1)] == [(0,), (1,)]


def tied(*names: str) -> dict[str, torch.Tensor]:
    one = torch.zeros(3)
    return dict.fromkeys(names, one)


def separate(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(3) for name in names}


def test_names_are_merged_into_one_tensor_if_they_are_tied_on_all_holders() -> None:
    assert len(merged({(0, 1): tied("a", "b")}).table) == 1
    assert len(merged({(0,): tied("a", "b") | {"x": 1}, (1,): tied("b", "a")}).table) == 1
    assert len(merged({(0,): tied("a", "b"), (1,): separate("a", "b")}).table) == 2
    # Of three, two are tied everywhere.
    assert len(merged({(0,): tied("a", "b", "c"), (1,): tied("a", "b") | separate("c")}).table) == 2
    # One that another rank has alone is another tensor: not all of its holders hold both.
    assert len(merged({(0,): tied("a", "b"), (1,): separate("a")}).table) == 2


def without_shards(description: StateDescription) -> StateDescription:
    """The same from a rank that holds nothing of its tensors."""
    return description._replace(unsure=list(range(len(description.aliases))))


def test_ranks_without_a_shard_do_not_decide_about_ties() -> None:
    result = merge([((0,), described(tied("a", "b"))), ((1,), without_shards(described(separate("a", "b"))))], (0, 1))
    assert len(result.table) == 1
    assert result.numbers == [[0, 0], [0, 0]]
    result = merge(
        [((0,), without_shards(described(separate("a", "b")))), ((1,), described(separate("a", "b")))], (0, 1)
    )
    assert len(result.table) == 2


def own(state: Any) -> list[PerRankDescription]:
    return [
        PerRankDescription(list(one.keys), describe(one.flat, (0,)))
        for one in per_rank_nodes(flatten(state, comm.world()).root)
    ]


def test_per_rank_tensors_are_named_by_rank() -> None:
    states = [{"r": [PerRank({"n": rank, "t": torch.zeros(rank)})], "x": 1} for rank in range(3)]
    states[1]["only"] = PerRank(tied("a", "b"))  # what one rank alone has
    result = merge(
        [((0, 2), described(states[0])), ((1,), described(states[1]))],
        (0, 1, 2),
        {n: own(s) for n, s in enumerate(states)},
    )
    assert result.table.names == ("r.0.t.rank0", "r.0.t.rank1", "only.a.rank1", "r.0.t.rank2")
    assert result.own_numbers == {0: [[0]], 1: [[1], [2, 2]], 2: [[3]]}

    def tensor(number: int, is_array: bool) -> Any:
        return result.table.shape(number)

    for rank in range(3):
        assert build(result.tree, tensor, {}, rank)["r"] == [{"n": rank, "t": (rank,)}]
        theirs = {"a": (3,), "b": (3,)}
        expected = theirs if rank == 1 else PerRank({1: theirs})
        assert build(result.tree, tensor, {}, rank)["only"] == expected


def test_a_tensor_missing_on_a_rank_of_its_mesh_raises() -> None:
    rows = sw.Layout(sw.Mesh((2,)), [sw.Shard(0)], (4,))
    whole = StateDescription(["d", "w", 0], ["w"], ["float32"], [4], [sharding_to_json(rows)], [0])
    nothing = StateDescription(["d"], [], [], [], [], [])
    with pytest.raises(
        StateDiffersError, match=r"w: \[4\] \(0: S\(0\)\) is also held by rank 1, but it is not in their state"
    ):
        merge([((0,), whole), ((1,), nothing)], (0, 1))


# --- on ranks ---------------------------------------------------------------------------------------------------------


def test_pipeline_stages_are_saved_as_one_state(tmp_path: Path) -> None:
    def work() -> None:
        rank = comm.rank()
        stage = {f"layer{2 * rank + n}": torch.full((3,), 10.0 * rank + n) for n in (0, 1)}
        state = {"model": stage, "all": torch.ones(2), "epoch": 3}
        if rank == 2:
            state = dict(reversed(state.items()))
        checkpoint.save(state, tmp_path)
        target = {"model": {name: torch.zeros(3) for name in stage}, "all": torch.zeros(2), "epoch": 0}
        checkpoint.load(target, tmp_path)
        assert target["epoch"] == 3
        assert all(torch.equal(target["model"][name], stage[name]) for name in stage)

    run_ranks(3, work)
    made = checkpoint.read(tmp_path)
    assert {name: value[0].item() for name, value in made["model"].items()} == {
        "layer0": 0.0, "layer1": 1.0, "layer2": 10.0, "layer3": 11.0, "layer4": 20.0, "layer5": 21.0
    }  # fmt: skip


def test_ranks_without_shards_describe_tensors_like_the_others() -> None:
    """Or else every save of a tensor that is shorter than the mesh would gather what they say."""

    def work() -> StateDescription:
        mesh = sw.init_device_mesh("cpu", (3,))
        short = sw.ones(2, mesh=mesh, placements=[sw.Shard(0)])
        table = sharded.zeros(sharded.ChunkShardingSpec(0, ["rank:0/cpu"]), 4)
        group = comm.world()
        return describe(flatten({"a": short, "tied": short, "table": table, "also": table}, group), group.ranks)

    one, *others = run_ranks(3, work)
    assert one.aliases == [0, 0, 2, 2]
    assert others == [one, one]


def test_different_states_raise_the_same_error_on_all_ranks_and_save_nothing(tmp_path: Path) -> None:
    def work() -> str:
        rank = comm.rank()
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.distribute_tensor(torch.ones(4, 4), mesh, [sw.Shard(rank)])
        table = sharded.zeros(sharded.ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]), 4)
        state = {"x": x, "lr": 0.1 * rank, "kind": table if rank else torch.zeros(4), "w": torch.zeros(2 + rank)}
        with pytest.raises(StateDiffersError) as caught:
            checkpoint.save(state, tmp_path)
        return str(caught.value)

    one, other = run_ranks(2, work)
    assert one == other
    assert "x: [4, 4] (0: S(0)) on rank 0, and [4, 4] (0: S(1)) on rank 1" in one
    assert "lr: 0.0 on rank 0, and 0.1 on rank 1" in one
    assert "kind: [4] (0: R) on rank 0, and [4] in 2 shards on rank 1" in one
    assert "w: [2] (0: R) on rank 0, and [3] (0: R) on rank 1" in one
    assert not list(tmp_path.glob("*.safetensors"))


def test_per_rank_values_are_loaded_on_their_ranks(tmp_path: Path) -> None:
    def work(n: int) -> None:
        rank = comm.rank()
        torch.manual_seed(rank)
        if n == 3:
            own = {"rng": torch.get_rng_state(), "seen": list(range(rank)), "t": [torch.full((rank,), 1.0)]}
            checkpoint.save({"own": PerRank(own), "x": 1, "n": PerRank(rank)}, tmp_path)
        target = {
            "own": PerRank({"rng": torch.zeros(5056, dtype=torch.uint8), "seen": [0] * rank, "t": [torch.zeros(rank)]}),
            "x": 0,
            "n": PerRank(-1),
        }
        if n == 2:
            with pytest.raises(LoadMismatchError, match="unexpected: 'n' of rank 2 is in the checkpoint"):
                checkpoint.load(target, tmp_path)
        checkpoint.load(target, tmp_path, strict=n == 3)
        assert target["n"].value == rank
        assert target["own"].value["seen"] == list(range(rank))
        assert target["own"].value["t"][0].tolist() == [1.0] * rank
        assert torch.equal(target["own"].value["rng"], torch.get_rng_state())

    run_ranks(3, work, 3)
    run_ranks(2, work, 2)
    made = checkpoint.read(tmp_path)
    assert (made["x"], made["n"], made["own"]["seen"]) == (1, 0, [])
