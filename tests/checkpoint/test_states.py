"""States of every kind round-trip: containers, tensors, values, objects; unsupported ones raise."""

from __future__ import annotations

import datetime
import enum
import math
import random
import types
import warnings
from collections import Counter, OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright import checkpoint, comm, sharded
from shardwright.checkpoint import Codec, PerRank
from shardwright.errors import LoadMismatchError, StateError
from shardwright.testing import run_ranks

Point = namedtuple("Point", "x y")


class Colour(enum.Enum):
    RED = 1
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1


NARROW = [f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)]
DTYPES = sorted(
    {
        value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype) and not str(value).startswith(("torch.q", "torch.bits"))
    }
    - {getattr(torch, name) for name in NARROW},
    key=str,
)


def again(state: Any, folder: Path, target: Any = None, **how: Any) -> Any:
    """The state, saved and loaded: into the target, or made anew."""
    checkpoint.save(state, folder)
    return checkpoint.read(folder) if target is None else checkpoint.load(target, folder, **how)


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def of_dtype(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bits at all, NaNs with a payload among them; a bool is 0 or 1."""
    count = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


# --- containers and values ------------------------------------------------------------------------------------------


def test_load_fills_containers_in_place(tmp_path: Path) -> None:
    inner: dict[str, Any] = {"list": [1, [2.5, None]], "w": torch.zeros(2)}
    target = {"inner": inner, "tuple": (0, torch.zeros(1)), "point": Point(0, [0])}
    kept = target["inner"]["list"], inner["w"], target["tuple"][1]
    state = {
        "inner": {"list": [7, [8.5, "nine"]], "w": torch.ones(2)},
        "tuple": (5, torch.full((1,), 3.0)),
        "point": Point(1, [2]),
    }
    made = again(state, tmp_path, target)
    assert made is target
    assert made["inner"] is inner
    assert inner["list"] is kept[0] == [7, [8.5, "nine"]]
    assert inner["w"] is kept[1]
    assert kept[1].tolist() == [1.0, 1.0]
    assert made["tuple"] == (5, kept[2])
    assert made["tuple"][1] is kept[2]
    assert kept[2].item() == 3.0
    assert made["point"] == Point(1, [2])
    assert type(made["point"]) is Point


def test_read_returns_plain_containers(tmp_path: Path) -> None:
    made = again({"o": OrderedDict(a=1), "p": Point(1, 2), "c": Counter("aab"), "s": torch.Size([2, 3])}, tmp_path)
    assert made == {"o": {"a": 1}, "p": (1, 2), "c": {"a": 2, "b": 1}, "s": (2, 3)}
    assert [type(value) for value in made.values()] == [dict, tuple, dict, tuple]


def test_load_keeps_the_types_of_the_targets_containers(tmp_path: Path) -> None:
    target = {"o": OrderedDict(a=0), "c": Counter("x"), "s": torch.Size([0, 0]), "v": types.MappingProxyType({"a": 0})}
    state = {"o": OrderedDict(a=1), "c": Counter("xx"), "s": torch.Size([2, 3]), "v": types.MappingProxyType({"a": 5})}
    made = again(state, tmp_path, target)
    assert made == state
    assert [type(value) for value in made.values()] == [OrderedDict, Counter, torch.Size, types.MappingProxyType]


def test_keys_may_be_str_int_float_bool_or_none(tmp_path: Path) -> None:
    state = {"a.b": 1, "": 2, 0: 3, -5: 4, 1.5: 5, None: 6, True: 7, "0": 8, "è\n\0": 9, 2**63 - 1: 10}
    state |= {key: torch.full((1,), float(number)) for number, key in enumerate(["t.u", "~", "x@[0:1]", 12, "12"])}
    made = again(state, tmp_path)
    assert {(type(key), key) for key in made} == {(type(key), key) for key in state}
    for key, value in state.items():
        assert torch.equal(made[key], value) if isinstance(value, torch.Tensor) else made[key] == value


def test_entries_with_the_same_dotted_name_are_kept_apart(tmp_path: Path) -> None:
    def state(first: float) -> dict[Any, Any]:
        numbers = iter(range(100))

        def tensor() -> torch.Tensor:
            return torch.full((1,), first + next(numbers) if first else 0.0)

        return {
            "a.b": tensor(),
            "a": {"b": tensor(), "b~2": tensor()},
            "a.b~2": tensor(),
            "l": [tensor(), {"1": 7, 1: 8}],
            "l.0": tensor(),
            "state": tensor(),
            "__metadata__": tensor(),
        }

    saved = state(1.0)
    other = dict(reversed(state(0.0).items()))  # in another order: names are not counted, keys are followed
    for made in (again(saved, tmp_path), again(saved, tmp_path, other)):
        assert made["a.b"].item() == 1.0
        assert [value.item() for value in made["a"].values()] == [2.0, 3.0]
        assert made["a.b~2"].item() == 4.0
        assert (made["l"][0].item(), made["l"][1], made["l.0"].item()) == (5.0, {"1": 7, 1: 8}, 6.0)
        assert (made["state"].item(), made["__metadata__"].item()) == (7.0, 8.0)


@pytest.mark.parametrize("key", [(1, 2), b"x", 2**63, math.inf, math.nan, "\ud800", np.int64(3)], ids=repr)
def test_unsupported_keys_raise_with_their_path(key: Any, tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"model\.x: key "):
        checkpoint.save({"model": {"x": {key: 1}}}, tmp_path)
    assert not list(tmp_path.glob("*.json"))


VALUES = {
    "none": None,
    "bool": True,
    "int": -3,
    "big": 2**200,
    "bigger": -(2**64),
    "float": 1e-308,
    "minus zero": -0.0,
    "inf": math.inf,
    "minus inf": -math.inf,
    "complex": complex(1.5, -math.inf),
    "str": 'è"\\\n\0\u2028',
    "bytes": bytes(range(256)),
    "datetime": datetime.datetime(2024, 2, 29, 1, 2, 3, 4, tzinfo=datetime.UTC),
    "date": datetime.date(2024, 2, 29),
    "time": datetime.time(23, 59, 59, 999999),
    "timedelta": datetime.timedelta(days=-1, microseconds=1),
    "dtype": torch.bfloat16,
    "device": torch.device("cuda", 3),
    "numpy float": np.float32(0.1),
    "numpy int": np.uint64(2**64 - 1),
    "numpy bool": np.bool_(True),
    "numpy complex": np.complex128(1 + 2j),
}


def test_plain_values_are_loaded_with_their_types(tmp_path: Path) -> None:
    made = again(VALUES | {"nan": math.nan}, tmp_path)
    assert math.isnan(made.pop("nan"))
    assert made == VALUES
    assert {name: type(value) for name, value in made.items()} == {name: type(value) for name, value in VALUES.items()}
    assert math.copysign(1, made["minus zero"]) == -1
    filled = again(VALUES, tmp_path, dict.fromkeys(VALUES))
    assert filled == VALUES


def test_enums_are_read_as_values_unless_the_target_has_the_type(tmp_path: Path) -> None:
    state = {"a": Colour.BLUE, "b": Colour.RED, "c": Level.LOW, "d": bytearray(b"xy")}
    made = again(state, tmp_path)
    assert made == {"a": "blue", "b": 1, "c": 1, "d": b"xy"}
    assert type(made["c"]) is int
    target = {"a": Colour.RED, "b": 5, "c": Level.LOW, "d": bytearray()}
    made = checkpoint.load(target, tmp_path)
    assert made == {"a": Colour.BLUE, "b": 1, "c": Level.LOW, "d": bytearray(b"xy")}
    assert type(made["d"]) is bytearray

    class Other(enum.Enum):
        GREEN = 1

    with pytest.raises(
        LoadMismatchError, match=r"'a' is Colour.BLUE \('blue'\) in the checkpoint, which is not a member of Other"
    ):
        checkpoint.load({"a": Other.GREEN}, tmp_path, only="a")


class Version:
    def __init__(self, *parts: int) -> None:
        self.parts = parts


def test_a_codec_stores_a_user_defined_type(tmp_path: Path) -> None:
    codecs = {Version: Codec("version", lambda v: {"parts": list(v.parts)}, lambda s: Version(*s["parts"]))}
    checkpoint.save({"v": [Version(1, 2)]}, tmp_path, codecs=codecs)
    assert checkpoint.read(tmp_path) == {"v": [{"parts": [1, 2]}]}
    made = checkpoint.read(tmp_path, codecs=codecs)["v"][0]
    assert (type(made), made.parts) == (Version, (1, 2))
    target = {"v": [Version(0, 0)]}
    assert checkpoint.load(target, tmp_path, codecs=codecs)["v"][0].parts == (1, 2)


REFUSED = {
    "a set": ({1, 2}, "builtins.set cannot be stored: nothing is pickled"),
    "a function": (print, "builtin_function_or_method cannot be stored"),
    "a class": (Version, "builtins.type cannot be stored"),
    "an object": (Version(), "Version cannot be stored: nothing is pickled. Give it state_dict"),
    "a generator": (torch.Generator(), r"torch\.\w+\.Generator cannot be stored"),
    "a huge int": (1 << 20000, "20001 bits cannot be stored"),
    "a lone surrogate": ("\ud800", "not valid Unicode"),
    "numpy text": (np.array(["a"]), "'<U1' cannot be stored: torch has no such dtype"),
    "numpy dates": (np.array(["2024-01-01"], "datetime64[D]"), r"datetime64.*|'<M8\[D\]' cannot be stored"),
    "numpy objects": (np.array([None]), "'|O' cannot be stored"),
    "the other byte order": (np.arange(3, dtype=">f4"), r"'>f4' cannot be stored.*newbyteorder\('='\)"),
    "a sparse tensor": (torch.eye(2).to_sparse(), r"layout torch.sparse_coo cannot be stored; call to_dense\(\)"),
    "a meta tensor": (torch.empty(2, device="meta"), "on the meta device has no data"),
    "a subclass": (nn.UninitializedParameter(), "unknown tensor type UninitializedParameter"),
    "per rank in per rank": (PerRank([PerRank(1)]), "a PerRank inside a PerRank"),
    **{name: (torch.zeros(2, dtype=torch.uint8).view(getattr(torch, name)), f"torch.{name} cannot be stored; view it")
       for name in [*NARROW, "bits8", "bits1x8", "bits2x4", "bits4x2", "bits16"]},
}  # fmt: skip


@pytest.mark.parametrize(("value", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_unsupported_values_raise_with_their_path(value: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(StateError, match=rf"model\.x\.0.*{words}"):
        checkpoint.save({"model": {"x": [value]}}, tmp_path)


def test_quantized_tensors_raise_with_the_remedy(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates them
        value = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(StateError, match=r"w: a quantized tensor \(torch.qint8\) cannot be stored; dequantize it"):
        checkpoint.save({"w": value}, tmp_path)


def test_a_state_that_contains_itself_raises_but_shared_containers_do_not(tmp_path: Path) -> None:
    loop: list[Any] = [1]
    loop.append({"again": loop})
    with pytest.raises(StateError, match=r"x\.1\.again: the state contains itself: a list contains itself"):
        checkpoint.save({"x": loop}, tmp_path)
    deep: Any = 1
    for _ in range(100):
        deep = [deep]
    with pytest.raises(StateError, match="nested more than 60 deep"):
        checkpoint.save(deep, tmp_path)
    shared = {"n": [1]}
    assert again([shared, shared], tmp_path) == [{"n": [1]}, {"n": [1]}]


@pytest.mark.parametrize("state", [torch.arange(3.0), 5, [], (), {}, {"a": {}, "b": [(), []]}], ids=repr)
def test_any_value_can_be_the_state(state: Any, tmp_path: Path) -> None:
    made = again(state, tmp_path)
    assert torch.equal(made, state) if isinstance(state, torch.Tensor) else made == state
    assert type(made) is type(state)
    if isinstance(state, torch.Tensor):
        target = torch.zeros(3)
        assert checkpoint.load(target, tmp_path) is target
        assert torch.equal(target, state)


# --- tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_round_trips_bit_by_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(3)
    base = of_dtype(dtype, 5, 6)
    state = {
        "a": base,
        "t": base.T,
        "s": base[1:4, ::2],
        "0": of_dtype(dtype),
        "e": of_dtype(dtype, 0, 3),
        "n": base[2],
    }
    made = again(state, tmp_path)
    target = {name: of_dtype(dtype, *value.shape) for name, value in state.items()}
    filled = checkpoint.load(target, tmp_path)
    strided = checkpoint.load(
        {"a": of_dtype(dtype, 6, 5).T, "s": of_dtype(dtype, 6, 6)[::2, ::2]}, tmp_path, only="[as]"
    )
    for name, value in state.items():
        for one in (made[name], filled[name], *([strided[name]] if name in strided else [])):
            assert (one.dtype, one.shape) == (dtype, value.shape)
            assert bits(one) == bits(value)
        assert filled[name] is target[name]


def test_conjugate_and_negative_views_are_stored_by_value(tmp_path: Path) -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    state = {"z": z, "conj": z.conj(), "neg": z.conj().imag, "imag": z.imag}
    assert state["neg"].is_neg()
    made = again(state, tmp_path)
    for name, value in state.items():
        assert made[name].tolist() == value.tolist()
    memory = torch.zeros(2, dtype=torch.complex64)
    target = {"z": torch.zeros_like(z), "conj": memory.conj(), "neg": memory.conj().imag, "imag": torch.zeros(2)}
    checkpoint.load(target, tmp_path, only=["z", "conj", "imag"])
    assert memory.tolist() == z.tolist()
    memory.zero_()
    checkpoint.load(target, tmp_path, only="neg")
    assert memory.imag.tolist() == z.imag.tolist()


def test_exact_aliases_are_saved_once_and_shared_after_loading(tmp_path: Path) -> None:
    w = torch.arange(1000.0)
    array = np.arange(100.0)
    state = {"a": w, "b": {"c": w, "d": w.view(1000)}, "p": array, "q": array, "view": w.view(10, 100), "part": w[:500]}
    checkpoint.save(state, tmp_path)
    size = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert size < 4096 + 4000 + 800 + 4000 + 2000 + 100  # w, the array, the view and the part, once each
    made = checkpoint.read(tmp_path)
    assert made["a"] is made["b"]["c"] is made["b"]["d"]
    assert np.shares_memory(made["p"], made["q"])
    pointers = {made[name].untyped_storage().data_ptr() for name in ("a", "view", "part")}
    assert len(pointers) == 3  # another shape, or a part of it, is another tensor
    apart = {"a": torch.zeros(1000), "b": {"c": torch.zeros(1000), "d": torch.zeros(1000)}}
    checkpoint.load(apart, tmp_path, only=["a", "b.*"])
    assert all(torch.equal(one, w) for one in (apart["a"], *apart["b"].values()))


def test_loading_two_stored_tensors_into_a_tied_target_raises(tmp_path: Path) -> None:
    checkpoint.save({"a": torch.ones(2), "b": torch.zeros(2)}, tmp_path)
    w = torch.full((2,), 5.0)
    with pytest.raises(LoadMismatchError, match="tied: 'a' and 'b' share memory in the state, but are two tensors"):
        checkpoint.load({"a": w, "b": w}, tmp_path)
    assert w.tolist() == [5.0, 5.0]
    checkpoint.load({"a": w, "b": w}, tmp_path, strict=False)
    assert w.tolist() == [1.0, 1.0]


def test_expanded_tensors_are_saved_in_full_and_raise_as_targets(tmp_path: Path) -> None:
    state = {"x": torch.arange(3.0).expand(2, 3)}
    assert again(state, tmp_path)["x"].tolist() == [[0, 1, 2]] * 2
    with pytest.raises(LoadMismatchError, match=r"memory: 'x' has strides \[0, 1\].*contiguous\(\) copy"):
        checkpoint.load({"x": torch.zeros(3).expand(2, 3)}, tmp_path)


def test_loading_keeps_requires_grad_of_parameters_and_buffers(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.ones(3))
    state = {"p": parameter, "b": nn.Buffer(torch.ones(2)), "r": torch.ones(2, requires_grad=True)}
    made = again(state, tmp_path)
    assert not any(one.requires_grad for one in made.values())
    target = {
        "p": nn.Parameter(torch.zeros(3)),
        "b": nn.Buffer(torch.zeros(2)),
        "r": torch.zeros(2, requires_grad=True),
    }
    product = target["p"] * target["p"]
    version = target["p"]._version
    checkpoint.load(target, tmp_path)
    assert isinstance(target["p"], nn.Parameter)
    assert target["p"].is_leaf
    assert target["p"].requires_grad
    assert target["r"].requires_grad
    assert all(torch.equal(value, torch.ones_like(value)) for value in target.values())
    assert target["p"]._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_numpy_arrays_round_trip_as_arrays(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    base = rng.standard_normal((4, 6))
    frozen = base.copy()
    frozen.flags.writeable = False
    fields = np.zeros(3, dtype=[("x", "<f4"), ("y", "u1")])  # its steps are no multiple of an element
    fields["x"] = [1, 2, 3]
    state = {"a": base, "f": np.asfortranarray(base), "r": base[::-1, ::2], "0": np.array(2.5), "e": np.empty((0, 2)),
             "z": frozen, "c": base.astype("c8"), "u": np.arange(3, dtype=np.uint16), "b": base > 0,
             "p": fields["x"]}  # fmt: skip
    made = again(state, tmp_path)
    target = {name: np.zeros_like(value) for name, value in state.items()} | {"r": np.zeros((8, 3))[::-2]}
    target["p"] = np.zeros_like(fields)["x"]
    filled = checkpoint.load(target, tmp_path)
    for name, value in state.items():
        for one in (made[name], filled[name]):
            assert isinstance(one, np.ndarray)
            assert one.dtype == value.dtype
            assert np.array_equal(one, value)
        assert filled[name] is target[name]
    with pytest.raises(LoadMismatchError, match="memory: 'z' is a read-only array"):
        checkpoint.load({"z": frozen}, tmp_path, only="z")
    tensor = checkpoint.load({"a": torch.zeros(4, 6, dtype=torch.float64)}, tmp_path, only="a")["a"]
    assert np.array_equal(tensor.numpy(), base)


# --- objects ----------------------------------------------------------------------------------------------------------


class Loader:
    """Like a dataloader: its state is made anew whenever it is asked for."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.order = torch.randperm(10, generator=self.generator)
        self.place, self.asked = 0, 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"rng": self.generator.get_state(), "order": self.order.clone(), "place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["rng"])
        self.order, self.place = state["order"].clone(), state["place"]


class Extra(nn.Linear):
    note = "fresh"

    def get_extra_state(self) -> Any:
        return {"note": self.note, "seen": torch.tensor(len(self.note))}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


def test_objects_are_saved_and_loaded_by_their_state_dict(tmp_path: Path) -> None:
    torch.manual_seed(0)

    def build(lr: float) -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), Extra(4, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, amsgrad=True)
        return {
            "model": model,
            "optimizer": optimizer,
            "schedulers": [
                torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]),
                torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
            ],
            "scaler": torch.amp.GradScaler("cpu", init_scale=2.0 ** round(1 / lr)),
            "loader": Loader(round(1 / lr)),
        }

    def train(state: dict[str, Any], steps: int) -> list[float]:
        losses = []
        generator = torch.Generator().manual_seed(5)
        for _ in range(steps):
            state["optimizer"].zero_grad()
            loss = state["model"](torch.randn(6, 3, generator=generator)).square().mean()
            loss.backward()
            state["optimizer"].step()
            state["schedulers"][0].step()
            state["schedulers"][1].step(loss.item())
            state["loader"].place += 1
            losses.append(loss.item())
        return losses

    first, second = build(0.1), build(0.3)
    train(first, 3)
    first["model"][2].note = "changed"
    checkpoint.save(first, tmp_path)
    before = dict(second["model"].named_parameters())
    assert checkpoint.load(second, tmp_path) is second
    assert second["loader"].place == 3
    assert second["model"][2].note == "changed"
    assert second["scaler"].state_dict() == first["scaler"].state_dict()
    assert torch.equal(second["loader"].order, first["loader"].order)
    for name, parameter in second["model"].named_parameters():
        assert parameter is before[name]
    assert train(second, 3) == train(first, 3)
    assert second["schedulers"][0].state_dict() == first["schedulers"][0].state_dict()
    assert second["schedulers"][1].state_dict() == first["schedulers"][1].state_dict()


def test_the_state_may_be_a_single_module(tmp_path: Path) -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    checkpoint.save(one, tmp_path)
    assert checkpoint.load(two, tmp_path) is two
    assert torch.equal(one.weight, two.weight)
    assert set(checkpoint.read(tmp_path)) == {"weight", "bias"}


def test_tied_weights_of_a_module_stay_tied(tmp_path: Path) -> None:
    def build() -> nn.ModuleDict:
        model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
        model["head"].weight = model["embed"].weight
        return model

    one, two = build(), build()
    checkpoint.save(one, tmp_path)
    made = checkpoint.read(tmp_path)
    assert made["embed.weight"] is made["head.weight"]
    checkpoint.load(two, tmp_path)
    assert two["head"].weight is two["embed"].weight
    assert torch.equal(one["head"].weight, two["head"].weight)


def test_restored_generators_continue_the_sequence(tmp_path: Path) -> None:
    torch.manual_seed(1)
    version, words, gauss = random.Random(3).getstate()
    state = {"torch": torch.get_rng_state(), "python": [version, list(words), gauss]}
    checkpoint.save(state, tmp_path)
    expected = torch.randn(3)
    made = checkpoint.read(tmp_path)
    torch.set_rng_state(made["torch"])
    assert torch.equal(torch.randn(3), expected)
    again_ = random.Random()
    again_.setstate((made["python"][0], tuple(made["python"][1]), made["python"][2]))
    assert again_.random() == random.Random(3).random()


# --- on ranks ---------------------------------------------------------------------------------------------------------


def test_partial_dtensors_raise_with_the_remedy(tmp_path: Path) -> None:
    def work() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        made = sw.DTensor.from_local(torch.ones(2), mesh, [sw.Partial()])
        with pytest.raises(StateError, match=r"g: \[2\] \(0: P\(sum\)\) is partial.*redistribute it to Replicate"):
            checkpoint.save({"g": made}, tmp_path)
        own = sw.ones(4, mesh=mesh, placements=[sw.Shard(0)])
        with pytest.raises(StateError, match=r"x: a DTensor in a PerRank; it belongs to several ranks"):
            checkpoint.save({"x": PerRank(own)}, tmp_path)

    run_ranks(2, work)


def test_an_alias_visible_on_some_ranks_is_stored_once(tmp_path: Path) -> None:
    """Rank 1 holds nothing of the tied tensor, and has it under two objects without memory in common."""

    def work() -> None:
        rank = comm.rank()
        mesh = sw.init_device_mesh("cpu", (2,))
        tied = sw.distribute_tensor(torch.ones(1, 500), mesh, [sw.Shard(0)])
        other = tied if rank == 0 else sw.distribute_tensor(torch.ones(1, 500), mesh, [sw.Shard(0)], src_data_rank=None)
        checkpoint.save({"a": tied, "b": other}, tmp_path / "tied")
        # Rank 1 holds both whole, and they are two: then they are two for all.
        first = torch.full((500,), 1.0)
        second = first if rank == 0 else first.clone()
        checkpoint.save({"a": first, "b": second}, tmp_path / "apart")

    run_ranks(2, work)
    made = checkpoint.read(tmp_path / "tied")
    assert made["a"] is made["b"]
    assert made["a"].tolist() == [[1.0] * 500]
    made = checkpoint.read(tmp_path / "apart")
    assert made["a"] is not made["b"]
    assert made["a"].tolist() == made["b"].tolist() == [1.0] * 500


def test_nested_sharded_tensors_are_saved_as_their_innermost_boxes(tmp_path: Path) -> None:
    def build(value: float) -> sharded.ShardedTensor:
        """Two halves, each itself two quarters on two ranks; only one rank of each pair knows of the nesting."""
        rank = comm.rank()
        pair = (0, 1) if rank < 2 else (2, 3)
        group = comm.subgroup(pair).process_group
        piece = torch.arange(6.0).reshape(2, 3) * value + rank
        inner = sharded.init_from_local_shards(
            [sharded.Shard.from_tensor_and_offsets(piece, [2 * (rank % 2), 0], rank=rank)], 4, 3, process_group=group
        )
        # The outer one is of ranks 0 and 2, or of 1 and 3: each holds its half, which is the inner one.
        side = comm.subgroup((0, 2) if rank % 2 == 0 else (1, 3)).process_group
        half = sharded.Shard.from_tensor_and_offsets(inner, [4 * (rank // 2), 0], rank=rank)
        return sharded.init_from_local_shards([half], 8, 3, process_group=side)

    def work() -> None:
        rank = comm.rank()
        checkpoint.save({"n": build(1.0), "plain": torch.ones(2)}, tmp_path)
        target = {"n": build(0.0), "plain": torch.zeros(2)}
        checkpoint.load(target, tmp_path)
        inner = target["n"].local_shards()[0].tensor
        assert torch.equal(inner.local_shards()[0].tensor, torch.arange(6.0).reshape(2, 3) + rank)

    run_ranks(4, work)
    whole = checkpoint.read(tmp_path)["n"]
    assert torch.equal(whole, torch.cat([torch.arange(6.0).reshape(2, 3) + rank for rank in range(4)]))


def test_a_process_group_saves_and_loads_without_the_other_ranks(tmp_path: Path) -> None:
    def work() -> None:
        rank = comm.rank()
        if rank == 0:
            return
        group = comm.subgroup((1, 2))
        mesh = sw.Mesh((2,), ranks=(1, 2))
        x = sw.distribute_tensor(torch.arange(5.0), mesh, [sw.Shard(0)])
        checkpoint.save({"x": x, "r": PerRank(rank)}, tmp_path, process_group=group.process_group)
        target = {"x": sw.zeros(5, mesh=mesh), "r": PerRank(0)}
        checkpoint.load(target, tmp_path, process_group=group.process_group)
        assert target["x"].full_tensor().tolist() == [0, 1, 2, 3, 4]
        assert target["r"].value == rank

    run_ranks(3, work)
    assert checkpoint.read(tmp_path)["x"].tolist() == [0, 1, 2, 3, 4]
