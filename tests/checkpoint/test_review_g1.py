"""Nothing is given that was not stored, nothing is guessed, and what does not fit is told before anything changes."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright import checkpoint, comm
from shardwright.checkpoint import Codec, PerRank, optimizer_state
from shardwright.errors import ArgumentTypeError, LoadMismatchError, StateDiffersError, StateError
from shardwright.testing import run_ranks


class Counter:
    """An object that counts how often it is given a state."""

    def __init__(self, **state: Any) -> None:
        self.state, self.given = state, 0

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state, self.given = dict(state), self.given + 1


def stepped(seed: int = 0) -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer


# --- only -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_named", [False, True])
def test_an_optimizer_that_is_not_chosen_is_given_nothing(is_named: bool, tmp_path: Path) -> None:
    def state(model: nn.Linear, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {"model": model, "optim": optimizer_state(model, optimizer) if is_named else optimizer}

    checkpoint.save(state(*stepped()), tmp_path)
    model = nn.Linear(3, 3)
    fresh = torch.optim.AdamW(model.parameters(), lr=0.5)
    checkpoint.load(state(model, fresh), tmp_path, only="model.*")
    assert fresh.state_dict()["state"] == {}
    assert fresh.param_groups[0]["lr"] == 0.5
    first = "weight" if is_named else "0"
    checkpoint.load(state(model, fresh), tmp_path, only=f"optim.state.{first}.*")
    assert [len(fresh.state[one]) for one in model.parameters()] == [3, 0]
    assert fresh.state[model.weight]["step"].item() == 1.0
    assert fresh.param_groups[0]["lr"] == 0.5


def test_objects_of_which_nothing_is_chosen_are_left_alone(tmp_path: Path) -> None:
    checkpoint.save({"k": Counter(v=1), "w": torch.ones(1)}, tmp_path)
    other = Counter(v=5)
    checkpoint.load({"k": other, "w": torch.zeros(1)}, tmp_path, only="w")
    assert (other.given, other.state) == (0, {"v": 5})
    checkpoint.load({"k": other, "w": torch.zeros(1)}, tmp_path)
    assert (other.given, other.state) == (1, {"v": 1})
    with pytest.raises(ArgumentTypeError, match="only must be a pattern or a list of patterns, got int"):
        checkpoint.load({"w": torch.zeros(1)}, tmp_path, only=5)  # type: ignore[arg-type]  # wrong on purpose


# --- keys and values --------------------------------------------------------------------------------------------------


class Level(enum.IntEnum):
    LOW = 1


class Word(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "another"


class Number(int):
    pass


class Mode(enum.Flag):
    A = 1
    B = 2


def test_keys_and_values_of_subclasses_are_stored_as_what_they_are(tmp_path: Path) -> None:
    state = {
        Level.LOW: 1,
        Number(3): Number(5),
        Word("a"): Word("b"),
        np.float64(1.5): 2.0,
        np.str_("n"): Number(2**70),
    }
    checkpoint.save(state, tmp_path)
    made = checkpoint.read(tmp_path)
    assert made == {1: 1, 3: 5, "a": "b", 1.5: 2.0, "n": 2**70}
    assert {type(key) for key in made} == {int, str, float}
    target = dict.fromkeys(state, 0)
    assert checkpoint.load(target, tmp_path) == made

    class Odd(str):
        __slots__ = ()

        def __hash__(self) -> int:
            return 1

    with pytest.raises(StateError, match=r"x: key 'q' is a Odd that is not found by its plain value 'q'"):
        checkpoint.save({"x": {Odd("q"): 1}}, tmp_path)


def test_enums_are_resolved_before_anything_changes(tmp_path: Path) -> None:
    class One(enum.Enum):
        A = 1
        B = 2

    class Two(enum.Enum):
        A = 1

    checkpoint.save({"w": torch.ones(2), "e": One.B, "f": Mode.A | Mode.B, "g": Mode(0)}, tmp_path)
    state: dict[str, Any] = {"w": torch.zeros(2), "e": Two.A, "f": Mode.A, "g": Mode.A}
    with pytest.raises(
        LoadMismatchError, match=r"enum: 'e' is One.B \(2\) in the checkpoint, and no member of Two here"
    ):
        checkpoint.load(state, tmp_path)
    assert not state["w"].any()
    state["e"] = One.A
    checkpoint.load(state, tmp_path)
    assert (state["e"], state["f"], state["g"]) == (One.B, Mode.A | Mode.B, Mode(0))


def test_arrays_that_are_more_than_their_numbers_are_refused(tmp_path: Path) -> None:
    for array in (np.ma.MaskedArray([1.0], mask=[True]), np.ones((1, 1)).view(np.recarray)):
        with pytest.raises(StateError, match=r"m: a numpy.* has more than its numbers"):
            checkpoint.save({"m": array}, tmp_path)
    mapped = np.memmap(tmp_path / "map", dtype=np.float32, mode="w+", shape=(3,))
    mapped[:] = 2
    checkpoint.save({"m": mapped}, tmp_path / "saved")
    assert checkpoint.read(tmp_path / "saved")["m"].tolist() == [2.0] * 3


# --- optimizers -------------------------------------------------------------------------------------------------------


class Nested(torch.optim.Optimizer):
    """An optimizer whose state has all kinds of containers, and keys with dots."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it takes none
        for group in self.param_groups:
            for one in group["params"]:
                self.state[one] = {
                    "a.b": one.detach() * 2,
                    "d": {"x": torch.ones(3), "0": 5, 0: 6},
                    "l": [torch.ones(2), {"z": 1}, []],
                    0: torch.zeros(1),
                    "none": None,
                    "e": {},
                    "t": (1, torch.ones(1), ()),
                }


@pytest.mark.parametrize("is_named", [False, True])
def test_nested_optimizer_state_comes_back_as_it_was(is_named: bool, tmp_path: Path) -> None:
    def state(model: nn.Linear, optimizer: Nested) -> Any:
        return optimizer_state(model, optimizer) if is_named else optimizer

    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer, fresh = Nested(model.parameters()), Nested(other.parameters())
    optimizer.step()
    checkpoint.save({"o": state(model, optimizer)}, tmp_path)
    checkpoint.load({"o": state(other, fresh)}, tmp_path)
    assert repr(fresh.state_dict()) == repr(optimizer.state_dict())


def test_optimizers_of_scalar_dtensors_and_growing_stages_resume(tmp_path: Path) -> None:
    def scalars() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))

        def make() -> tuple[nn.Parameter, torch.optim.Optimizer]:
            one = nn.Parameter(sw.distribute_tensor(torch.tensor(2.0), mesh, [sw.Replicate()]))
            return one, torch.optim.AdamW([one], lr=0.1)

        def step(one: nn.Parameter, optimizer: torch.optim.Optimizer) -> float:
            one.grad = sw.distribute_tensor(torch.tensor(1.0), mesh, [sw.Replicate()])
            optimizer.step()
            return float(one.detach().full_tensor())  # type: ignore[attr-defined]  # a DTensor

        one, optimizer = make()
        step(one, optimizer)
        checkpoint.save({"p": one, "o": optimizer}, tmp_path / "scalar")
        other, fresh = make()
        checkpoint.load({"p": other, "o": fresh}, tmp_path / "scalar")
        assert isinstance(fresh.state[other]["exp_avg"], sw.DTensor)
        assert type(fresh.state[other]["step"]) is torch.Tensor
        assert step(other, fresh) == step(one, optimizer)

    def stages() -> None:
        """What one rank has in its object is not given to another's; what no rank has is given to all."""
        rank = comm.rank()
        saved = Counter(**{f"stage{rank}": torch.full((2,), float(rank)), "new": [1, 2]})
        checkpoint.save({"k": saved}, tmp_path / "stages")
        mine = Counter(**{f"stage{rank}": torch.zeros(2), "new": []})
        checkpoint.load({"k": mine}, tmp_path / "stages")
        assert set(mine.state) == {f"stage{rank}", "new"}
        assert mine.state[f"stage{rank}"].tolist() == [float(rank)] * 2
        assert mine.state["new"] == [1, 2]

    def own() -> None:
        """Values of ranks that are not there, and keys that are equal and not the same."""
        rank = comm.rank()
        with pytest.raises(StateDiffersError, match="key True on rank 0, and key 1 on rank 1"):
            checkpoint.save({"d": {(1 if rank else True): torch.ones(1)}}, tmp_path / "keys")
        checkpoint.save({"p": PerRank(rank), **({"q": PerRank(torch.ones(2))} if rank else {})}, tmp_path / "own")

    def work() -> None:
        scalars()
        stages()
        own()

    run_ranks(2, work)
    with pytest.raises(
        LoadMismatchError, match="unexpected: 'p' of rank 1 is in the checkpoint, and no rank 1 loads it"
    ):
        checkpoint.load({"p": PerRank(7)}, tmp_path / "own")
    assert checkpoint.load({"p": PerRank(7)}, tmp_path / "own", strict=False)["p"].value == 0
    made = checkpoint.read(tmp_path / "own")
    assert made["p"] == 0
    assert made["q"].value[1].tolist() == [1.0, 1.0]
    with checkpoint.open(tmp_path / "own") as opened:
        assert set(opened.tree()["q"].value) == {1}
        assert opened.tree(rank=1)["q"].shape == (2,)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_targets_that_overlap_are_refused_and_others_that_interleave_are_not(tmp_path: Path) -> None:
    checkpoint.save({"a": torch.ones(3), "b": torch.full((3,), 2.0)}, tmp_path)
    memory = torch.zeros(4)
    with pytest.raises(LoadMismatchError, match="memory: 'a' and 'b' overlap in memory but are not the same"):
        checkpoint.load({"a": memory[:3], "b": memory[1:]}, tmp_path)
    assert not memory.any()
    pairs = torch.zeros(3, 2)
    checkpoint.load({"a": pairs[:, 0], "b": pairs[:, 1]}, tmp_path)
    assert pairs.tolist() == [[1.0, 2.0]] * 3
    with pytest.raises(LoadMismatchError, match="'a' and 'b' overlap"):
        checkpoint.load({"a": pairs[:, 0], "b": pairs.view(-1)[2:5]}, tmp_path)
    checkpoint.save({"x": torch.arange(6.0).reshape(3, 2), "y": torch.zeros(2)}, tmp_path)
    with pytest.raises(LoadMismatchError, match=r"'x' has strides \[1, 1\], so several of its elements share memory"):
        checkpoint.load({"x": torch.zeros(4).as_strided((3, 2), (1, 1)), "y": torch.zeros(2)}, tmp_path)
    tied = torch.ones(2)
    checkpoint.save({"a": tied, "b": tied, "p": PerRank(tied)}, tmp_path)
    tied = torch.zeros(2)
    checkpoint.load({"a": tied, "b": tied, "p": PerRank(torch.zeros(2))}, tmp_path)
    assert tied.all()


# --- guesses ----------------------------------------------------------------------------------------------------------


def test_one_stored_entry_fills_one_place(tmp_path: Path) -> None:
    checkpoint.save({"a": {"b": torch.ones(1)}, 0: 5}, tmp_path)
    with pytest.raises(
        LoadMismatchError, match=r"missing: 'a.b' is not in the checkpoint \(it has one of that name, und"
    ):
        checkpoint.load({"a": {"b": torch.zeros(1)}, "a.b": torch.zeros(1), 0: 0}, tmp_path)
    with pytest.raises(LoadMismatchError, match="missing: '0' is not"):
        checkpoint.load({"a": {"b": torch.zeros(1)}, 0: 0, "0": 0}, tmp_path)
    with pytest.raises(LoadMismatchError, match="missing: 'False' is not"):
        checkpoint.load({"a": {"b": torch.zeros(1)}, False: 0}, tmp_path)
    checkpoint.save({"a.b": {"c": 1}}, tmp_path)
    assert checkpoint.load({"a": {"b.c": 0}}, tmp_path) == {"a": {"b.c": 1}}
    with pytest.raises(LoadMismatchError, match=r"twice: two leaves of the state have the name 'a.b.c'"):
        checkpoint.load({"a": {"b.c": 0, "b": {"c": 0}}}, tmp_path)


class Version:
    def __init__(self, *parts: int) -> None:
        self.parts = parts


def test_a_codec_reads_what_it_stored(tmp_path: Path) -> None:
    def codec(name: str) -> dict[type, Codec]:
        return {Version: Codec(name, lambda v: {"parts": list(v.parts)}, lambda s: Version(*s["parts"]))}

    checkpoint.save({"v": Version(1)}, tmp_path, codecs=codec("one"))
    with pytest.raises(
        LoadMismatchError, match=r"'v.parts.0' is read by codec 'two' in the state, but was stored by 'one'"
    ):
        checkpoint.load({"v": Version(0)}, tmp_path, codecs=codec("two"))
    assert checkpoint.load({"v": Version(0)}, tmp_path, codecs=codec("one"))["v"].parts == (1,)
    assert checkpoint.load({"v": {"parts": [0]}}, tmp_path) == {"v": {"parts": [1]}}


# --- states that grow -------------------------------------------------------------------------------------------------


def test_objects_whose_state_grew_are_given_all_of_it(tmp_path: Path) -> None:
    grown = Counter(h=[1, (2, torch.ones(2))], best=torch.ones(1), more={"x.y": np.ones(2), "z": {}}, v=5)
    checkpoint.save({"k": grown}, tmp_path)
    for fresh in (Counter(), Counter(h=[], best=None, more={}, v=0), Counter(h=[0, (0, torch.zeros(2)), 7], v=None)):
        checkpoint.load({"k": fresh}, tmp_path)
        assert repr(sorted(fresh.state.items())) == repr(sorted(grown.state.items()))
        assert fresh.given == 1
    # In place where it can be; what is stored shorter is shorter; what is not stored is told.
    here = torch.zeros(1)
    fresh = Counter(best=here)
    checkpoint.load({"k": fresh}, tmp_path)
    assert fresh.state["best"] is here
    assert here.all()
    with pytest.raises(LoadMismatchError, match=r"missing: 'k.other'"):
        checkpoint.load({"k": Counter(other=1)}, tmp_path)
    checkpoint.load({"k": fresh}, tmp_path, only="k.v")
    assert fresh.state["v"] == 5
    checkpoint.save({"k": Counter(h=[])}, tmp_path)
    fresh = Counter(h=[1, 2])
    checkpoint.load({"k": fresh}, tmp_path)
    assert fresh.state == {"h": []}
    fresh = Counter(h=[1, 2])
    checkpoint.load({"kk": fresh}, tmp_path, rename={"k.h": "kk.h"})
    assert fresh.state == {"h": []}


def test_schedulers_that_grow_and_chain_resume(tmp_path: Path) -> None:
    from torch.optim import lr_scheduler

    def make() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
        parts = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
        return optimizer, lr_scheduler.SequentialLR(optimizer, parts, [2])

    def run(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
        rates = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    one, two = make(), make()
    run(*one, 4)
    checkpoint.save({"o": one[0], "s": one[1]}, tmp_path)
    checkpoint.load({"o": two[0], "s": two[1]}, tmp_path)
    assert run(*two, 5) == run(*one, 5)
