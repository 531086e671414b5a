"""All mismatches are found before anything changes, and raised in one error that is the same on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright import checkpoint, comm
from shardwright.checkpoint import PerRank
from shardwright.errors import ArgumentTypeError, LoadMismatchError
from shardwright.testing import run_ranks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    state = {
        "model": {"layer.weight": torch.ones(2, 3), "layer.bias": torch.ones(2)},
        "epoch": 3,
        "empty": {},
        "note": None,
    }
    checkpoint.save(state, tmp_path)
    return tmp_path


def target(**changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "model": {"layer.weight": torch.zeros(2, 3), "layer.bias": torch.zeros(2)},
        "epoch": 0,
        "empty": {},
        "note": "",
    }
    made.update(changes)
    return made


def mismatch(state: Any, folder: Path, **how: Any) -> list[str]:
    """The lines of the one error, the first without the rest of its sentence."""
    with pytest.raises(LoadMismatchError) as caught:
        checkpoint.load(state, folder, **how)
    first, *lines = str(caught.value).splitlines()
    assert first.endswith("nothing was changed")
    number = int(first.split(" in ")[1].split()[0])
    assert number >= len(lines)
    return [line.strip() for line in lines]


def test_one_error_lists_all_mismatches(folder: Path) -> None:
    state = target(
        model={"layer.weight": torch.zeros(3, 2, dtype=torch.int8), "layer.bais": torch.zeros(2)},
        epoch=torch.zeros(1),
        more=5,
    )
    del state["note"]
    assert mismatch(state, folder) == [
        "missing: 'model.layer.bais' is not in the checkpoint (it has 'model.layer.bias')",
        "missing: 'more' is not in the checkpoint",
        "shape: 'model.layer.weight' is [3, 2] in the state, but [2, 3] in the checkpoint",
        "dtype: 'model.layer.weight' is int8 in the state, but float32 in the checkpoint; cast=True converts it",
        "kind: 'epoch' is a tensor in the state, but 3 in the checkpoint",
        "unexpected: 'model.layer.bias' is in the checkpoint and not in the state (the state has 'model.layer.bais')",
        "unexpected: 'note' is in the checkpoint and not in the state",
    ]
    assert not state["model"]["layer.weight"].any()
    assert state["more"] == 5


def test_a_kind_mismatch_raises(folder: Path) -> None:
    assert mismatch(target(model={"layer.weight": 7, "layer.bias": torch.zeros(2)}), folder) == [
        "kind: 'model.layer.weight' is 7 in the state, but a tensor in the checkpoint"
    ]
    assert mismatch(target(epoch=[]), folder) == ["kind: 'epoch' is a container in the state, but 3 in the checkpoint"]
    assert mismatch(target(empty=4), folder) == ["kind: 'empty' is 4 in the state, but an empty dict in the checkpoint"]
    assert mismatch(target(empty={"x": 4}), folder) == ["missing: 'empty.x' is not in the checkpoint (it has 'empty')"]
    assert mismatch(target(note=[torch.zeros(1)]), folder) == [
        "missing: 'note.0' is not in the checkpoint (it has 'note')",
        "kind: 'note' is a container in the state, but None in the checkpoint",
    ]


def test_an_empty_container_matches_anything_empty(folder: Path) -> None:
    state = target(another={}, empty=[])
    checkpoint.load(state, folder)
    assert (state["another"], state["empty"], state["epoch"], state["note"]) == ({}, [], 3, None)


def test_a_long_list_of_mismatches_is_shortened_and_counted(tmp_path: Path) -> None:
    checkpoint.save({f"a{n}": n for n in range(70)}, tmp_path)
    with pytest.raises(LoadMismatchError, match="in 170 places") as caught:
        checkpoint.load({f"b{n}": n for n in range(100)}, tmp_path)
    assert len(str(caught.value).splitlines()) == 52
    assert str(caught.value).endswith("and 120 more")


def test_strict_false_ignores_unexpected_names(folder: Path) -> None:
    state = {"epoch": 0}
    assert len(mismatch(state, folder)) == 4
    assert checkpoint.load(state, folder, strict=False) == {"epoch": 3}


def test_only_selects_the_names_to_load(folder: Path) -> None:
    state = target(model={"layer.weight": torch.zeros(2, 3), "layer.bias": torch.zeros(5)}, other=1)
    checkpoint.load(state, folder, only="*.weight")
    assert state["model"]["layer.weight"].all()
    assert (state["epoch"], state["other"]) == (0, 1)
    checkpoint.load(state, folder, only=["epoch", "note"])
    assert (state["epoch"], state["note"]) == (3, None)
    assert mismatch(state, folder, only=["epoch", "modle.*"]) == ["only: 'modle.*' fits no name of the state"]
    assert mismatch(state, folder, only="other") == ["missing: 'other' is not in the checkpoint"]


def test_rename_takes_a_mapping_or_a_function(folder: Path) -> None:
    state = {"net": {"w": torch.zeros(2, 3), "b": torch.zeros(2)}, "epoch": 0, "empty": {}, "note": 0}
    names = {"model.layer.weight": "net.w", "model.layer.bias": "net.b"}
    checkpoint.load(state, folder, rename=names)
    assert state["net"]["w"].all()
    assert state["net"]["b"].all()
    state["net"]["w"].zero_()
    checkpoint.load(state, folder, rename=lambda name: names.get(name, name))
    assert state["net"]["w"].all()
    # A swap is one mapping, not two steps.
    checkpoint.save({"a": 1, "b": 2}, folder)
    assert checkpoint.load({"a": 0, "b": 0}, folder, rename={"a": "b", "b": "a"}) == {"a": 2, "b": 1}
    assert "rename: 'a' and 'b' both become 'b'" in mismatch({"a": 0, "b": 0}, folder, rename={"a": "b"})
    assert mismatch({"a": 0, "b": 0}, folder, rename={"c": "b"}) == ["rename: the checkpoint has no 'c'"]
    with pytest.raises(ArgumentTypeError, match="rename must return a str, got 5 for 'a'"):
        checkpoint.load({"a": 0}, folder, rename=lambda _: 5)  # type: ignore[arg-type,return-value]  # wrong on purpose


def test_cast_applies_only_to_matching_names(folder: Path) -> None:
    state = target(model={"layer.weight": torch.zeros(2, 3).half(), "layer.bias": torch.zeros(2).double()})
    assert len(mismatch(state, folder)) == 2
    (line,) = mismatch(state, folder, cast={"*.weight": True})
    assert "'model.layer.bias' is float64 in the state" in line
    (line,) = mismatch(state, folder, cast={"*.bias": False, "*": True})  # the first that fits
    assert "'model.layer.bias' is float64 in the state" in line
    checkpoint.load(state, folder, cast=True)
    assert state["model"]["layer.weight"].dtype == torch.half
    assert state["model"]["layer.weight"].all()
    assert state["model"]["layer.bias"].all()
    checkpoint.save({"z": torch.tensor([1 + 1j]), "n": torch.tensor([1.5, -2.5])}, folder)
    (line,) = mismatch({"z": torch.zeros(1), "n": torch.zeros(2)}, folder, cast=True)
    assert line.endswith("a cast would lose its imaginary part")
    made = checkpoint.load({"z": torch.zeros(1, dtype=torch.complex128), "n": torch.zeros(2).int()}, folder, cast=True)
    assert (made["z"].tolist(), made["n"].tolist()) == ([1 + 1j], [1, -2])


def test_on_missing_raises_or_keeps_missing_names(folder: Path) -> None:
    kept = torch.full((2,), 7.0)
    state = target(new=kept, other=5)
    assert len(mismatch(state, folder)) == 2
    checkpoint.load(state, folder, on_missing="keep")
    assert (state["epoch"], state["other"], kept.tolist()) == (3, 5, [7.0, 7.0])
    asked: list[str] = []

    def decide(name: str) -> Any:
        asked.append(name)
        return "keep" if name == "new" else "raise"

    assert mismatch(state, folder, on_missing=decide) == ["missing: 'other' is not in the checkpoint"]
    assert asked == ["new", "other"]
    with pytest.raises(
        ArgumentTypeError, match="on_missing must be or return 'raise' or 'keep', got 'ignore' for 'new'"
    ):
        checkpoint.load(state, folder, on_missing="ignore")  # type: ignore[arg-type]  # wrong on purpose


def test_keys_match_other_spellings_of_the_same_key_path(tmp_path: Path) -> None:
    checkpoint.save({"layers": [{"w": torch.ones(1)}, {"w": torch.full((1,), 2.0)}]}, tmp_path)
    made = checkpoint.load({"layers.0.w": torch.zeros(1), "layers": {1: {"w": torch.zeros(1)}}}, tmp_path)
    assert (made["layers.0.w"].item(), made["layers"][1]["w"].item()) == (1.0, 2.0)
    module = nn.ModuleDict({"layers": nn.ModuleList([nn.Module(), nn.Module()])})
    for part in module["layers"]:
        part.w = nn.Parameter(torch.zeros(1))
    checkpoint.load(module, tmp_path)
    assert module["layers"][1].w.item() == 2.0


def test_a_name_is_unexpected_only_if_it_is_in_no_ranks_state(tmp_path: Path) -> None:
    """Each rank has one stage of a model; the checkpoint was saved by one process."""
    checkpoint.save({f"layer{n}": torch.full((2,), float(n)) for n in range(5)}, tmp_path)

    def work() -> str:
        rank = comm.rank()
        stages = [["layer0", "layer1"], ["layer2"], ["layer3", "layer4"]]
        mine = {name: torch.zeros(2) for name in stages[rank]}
        checkpoint.load(mine, tmp_path)
        assert {name: value[0].item() for name, value in mine.items()} == {n: float(n[-1]) for n in stages[rank]}
        checkpoint.load(mine, tmp_path, only="layer0")  # it is enough that one rank has it
        fewer = {name: torch.zeros(2) for name in stages[rank][:1]}
        with pytest.raises(LoadMismatchError) as caught:
            checkpoint.load(fewer | ({"layer9": 5} if rank == 2 else {}), tmp_path)
        assert not any(value.any() for value in fewer.values())
        return str(caught.value)

    one, *others = run_ranks(3, work)
    assert others == [one, one]
    assert one.splitlines()[1:] == [
        "  missing: 'layer9' is not in the checkpoint (it has 'layer4') (on rank 2)",
        "  unexpected: 'layer1' is in the checkpoint and not in the state (the state has 'layer0')",
        "  unexpected: 'layer4' is in the checkpoint and not in the state (the state has 'layer0')",
    ]


def test_a_mismatch_raises_the_same_message_on_all_ranks(tmp_path: Path) -> None:
    def work() -> str:
        rank = comm.rank()
        mesh = sw.init_device_mesh("cpu", (3,))
        state = {"x": sw.ones(4, mesh=mesh, placements=[sw.Shard(0)]), "p": PerRank(1), "v": 1}
        checkpoint.save(state, tmp_path)
        wrong = {"x": sw.zeros(5, mesh=mesh, placements=[sw.Shard(0)]), "v": torch.zeros(1) if rank else 0}
        with pytest.raises(LoadMismatchError) as caught:
            checkpoint.load(wrong, tmp_path)
        return str(caught.value)

    one, *others = run_ranks(3, work)
    assert others == [one, one]
    assert one.splitlines()[1:] == [
        "  shape: 'x' is [5] in the state, but [4] in the checkpoint",
        "  unexpected: 'p' is in the checkpoint and not in the state",
        "  kind: 'v' is a tensor in the state, but 1 in the checkpoint (on ranks 1, 2)",
    ]
