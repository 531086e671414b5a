"""Foreign code never reads a shard with the global shape: it gets the global value, the local tensor, or an error."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright import comm
from shardwright.errors import UnsupportedError
from shardwright.tensor.dispatch import constructors
from shardwright.testing import run_ranks

R, S0, S1, P = sw.Replicate(), sw.Shard(0), sw.Shard(1), sw.Partial()
WHOLE = torch.arange(32.0).reshape(8, 4)
REFUSED = r"x\.to_local\(\).*x\.full_tensor\(\)"


def _mesh(*shape: int) -> Any:
    return sw.init_device_mesh("cpu", shape or (2,))


def _split() -> Iterator[Any]:
    """Tensors with the global value WHOLE that are not fully local: even and uneven shards, partial values."""
    mesh = _mesh()
    for placement in (S0, S1, sw.Ragged(0, (7, 1))):
        yield sw.distribute_tensor(WHOLE, mesh, [placement])
    yield sw.DTensor.from_local(WHOLE / 2, mesh, [P])


def _kept() -> Iterator[Any]:
    """Tensors with the global value WHOLE that are fully local on both ranks."""
    yield sw.distribute_tensor(WHOLE, _mesh(), [R])
    yield sw.distribute_tensor(WHOLE, _mesh(2, 1), [R, S0])
    yield sw.DTensor.from_local(WHOLE.clone(), _mesh(2, 1), [R, P])


def _is_memory(value: Any, storage: torch.UntypedStorage) -> bool:
    """True for an address inside the storage, and for every kind of object that exposes its bytes."""
    if isinstance(value, int) and not isinstance(value, bool):
        return storage.data_ptr() <= value < storage.data_ptr() + storage.nbytes()
    if isinstance(value, dict):
        return "data" in value  # an array interface
    kinds = (torch.UntypedStorage, torch.TypedStorage, np.ndarray, memoryview)
    return isinstance(value, kinds) or type(value).__name__ == "PyCapsule"


def _answer(tensor: Any, name: str) -> Any:
    """Return the attribute of this name, or its result if callable; None if it raises one of torch's errors."""
    try:
        value = getattr(tensor, name)
        return value() if callable(value) and not isinstance(value, torch.Tensor) else value
    except UnsupportedError:
        raise
    except Exception:  # noqa: BLE001  # torch's own refusals are of many kinds
        return None


SIDE_EFFECTS = {"backward", "register_hook", "__init_subclass__", "__del__", "__dir__", "__subclasshook__", "__class__"}


def _exposing_names() -> list[str]:
    """Return the attributes of torch.Tensor that expose memory, by trying all of them on a plain tensor."""
    names = []
    for name in dir(torch.Tensor):
        plain = WHOLE.clone()
        if name not in SIDE_EFFECTS and _is_memory(_answer(plain, name), plain.untyped_storage()):
            names.append(name)
    return names


@pytest.mark.filterwarnings("ignore")
def test_attributes_that_expose_memory_raise_unless_fully_local() -> None:
    names = _exposing_names()
    assert {"data_ptr", "untyped_storage", "storage", "_typed_storage", "numpy", "__array__", "__dlpack__"} <= set(
        names
    )

    def on_rank() -> dict[str, str]:
        import warnings

        warnings.simplefilter("ignore")  # storage() is deprecated
        wrong = {}
        for x in _split():
            for name in names:
                try:
                    found = _answer(x, name)
                except UnsupportedError as error:
                    if "`x.to_local()`" not in str(error) or "`x.full_tensor()`" not in str(error):
                        wrong[name] = str(error)
                    continue
                if isinstance(found, np.ndarray) and found.shape == WHOLE.shape and (found == WHOLE.numpy()).all():
                    continue
                if found is not None:
                    wrong[name] = f"{x.sharding}: {found!r}"
        return wrong

    for wrong in run_ranks(2, on_rank):
        assert wrong == {}


def test_every_way_to_get_an_address_or_capsule_of_a_shard_raises() -> None:
    spellings: dict[str, Callable[[Any], Any]] = {
        "data_ptr": lambda x: x.data_ptr(),
        "Tensor.data_ptr": lambda x: torch.Tensor.data_ptr(x),
        "Tensor.untyped_storage": lambda x: torch.Tensor.untyped_storage(x),
        "Tensor.__dlpack__": lambda x: torch.Tensor.__dlpack__(x),
        "from_dlpack": lambda x: torch.from_dlpack(x),
        "utils.dlpack.from_dlpack": lambda x: torch.utils.dlpack.from_dlpack(x),
        "numpy.from_dlpack": lambda x: np.from_dlpack(x),
        "ctypes": lambda x: ctypes.string_at(x.data_ptr(), x.nbytes),
        "ctypes of a detached tensor": lambda x: ctypes.string_at(x.detach().data_ptr(), x.nbytes),
        "of a parameter": lambda x: nn.Parameter(x).data_ptr(),
        "of .data": lambda x: x.data.untyped_storage(),
    }

    def on_rank() -> None:
        for x in _split():
            for spelling in spellings.values():
                with comm.count() as traffic, pytest.raises(UnsupportedError, match=REFUSED):
                    spelling(x)
                assert not traffic.calls  # every rank finds out from the layout
            for probe in ("__array_interface__", "__array_struct__", "__dlpack_c_exchange_api__"):
                assert not hasattr(x, probe)
                assert not hasattr(type(x), probe)
            assert not hasattr(x, "__cuda_array_interface__")  # as of a plain tensor on the CPU
            for view in (memoryview, np.frombuffer):
                with pytest.raises(TypeError):
                    view(x)

    run_ranks(2, on_rank)


def test_memory_of_a_fully_local_tensor_is_exposed() -> None:
    def on_rank() -> None:
        for x in _kept():
            size = x.numel() * x.element_size()
            assert ctypes.string_at(x.data_ptr(), size) == WHOLE.numpy().tobytes()
            assert x.untyped_storage().nbytes() == size
            assert torch.equal(torch.from_dlpack(x), WHOLE)
            assert (np.from_dlpack(x) == WHOLE.numpy()).all()
        x = sw.ones(3, mesh=sw.Mesh((1,), ranks=(0,)))  # rank 1 is outside of the mesh
        if comm.rank() == 0:
            assert x.untyped_storage().nbytes() == 12
        else:
            with pytest.raises(UnsupportedError, match="outside its mesh"):
                x.data_ptr()

    run_ranks(2, on_rank)


def test_numpy_gets_the_global_value() -> None:
    def on_rank() -> None:
        for x in (*_split(), *_kept()):
            for array in (x.numpy(), np.asarray(x), np.array(x), np.array(x, dtype=np.float64), np.stack([x, x])[1]):
                assert array.shape == WHOLE.shape
                assert (array == WHOLE.numpy()).all()
            copied = np.array(x, copy=True)
            copied += 1
            assert torch.equal(x.full_tensor(), WHOLE)

    run_ranks(2, on_rank)


def test_safetensors_raises_for_a_shard_and_writes_a_fully_local_tensor(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")

    def on_rank() -> None:
        from safetensors.torch import load, load_file, save, save_file, save_model

        file = tmp_path / f"{comm.rank()}.safetensors"
        for x in _split():
            module = nn.Module()
            module.w = nn.Parameter(x)
            for write in (
                lambda x=x: save({"w": x}),
                lambda x=x: save_file({"w": x}, file),
                lambda module=module: save_model(module, file),
            ):
                with pytest.raises(UnsupportedError, match=REFUSED):
                    write()
            assert not file.exists()
            save_file({"w": x.full_tensor()}, file)
            assert torch.equal(load_file(file)["w"], WHOLE)
            file.unlink()
            local = load(save({"w": x.to_local().contiguous()}))["w"]
            assert torch.equal(local, x.to_local())
        for x in _kept():
            assert torch.equal(load(save({"w": x}))["w"], WHOLE)

    assert safetensors is not None
    run_ranks(2, on_rank)


def test_pickle_and_torch_save_store_the_shard_with_its_layout() -> None:
    def on_rank() -> None:
        for x in (*_split(), *_kept()):
            file = io.BytesIO()
            torch.save({"w": x}, file)
            file.seek(0)
            for loaded in (torch.load(file)["w"], pickle.loads(pickle.dumps(x))):
                assert loaded.sharding is x.sharding
                assert torch.equal(loaded.to_local(), x.to_local())
                assert torch.equal(loaded.full_tensor(), WHOLE)

    run_ranks(2, on_rank)


def test_copy_shares_memory_and_deepcopy_behaves_as_in_torch() -> None:
    """torch copies only the values of a parameter; for a tensor also its gradient, attributes and shared memory."""

    def on_rank() -> None:
        for x in _split():
            twin = copy.copy(x)
            assert twin is not x
            assert twin.sharding is x.sharding
            assert twin.is_set_to(x)
            assert not copy.deepcopy(x).is_set_to(x)

        def like(make: Callable[[torch.Tensor], Any]) -> None:
            plain, ours = (make(value) for value in (WHOLE.clone(), sw.distribute_tensor(WHOLE, _mesh(), [S0])))
            for tensor in (plain, ours):
                tensor.requires_grad_()
                (tensor * 3).sum().backward()
                tensor.note = ["kept"]
            expected, found = copy.deepcopy(plain), copy.deepcopy(ours)
            assert isinstance(found, sw.DTensor)
            assert isinstance(found, nn.Parameter) == isinstance(expected, nn.Parameter)
            assert found.requires_grad
            assert torch.equal(found.full_tensor(), expected)
            assert hasattr(found, "note") == hasattr(expected, "note")
            assert getattr(found, "note", None) is not ours.note
            assert (found.grad is None) == (expected.grad is None)
            for tensor in (expected, found):
                (tensor * 2).sum().backward()
            assert torch.equal(found.grad.full_tensor(), expected.grad)

        like(lambda value: value)
        like(nn.Parameter)
        x = sw.distribute_tensor(WHOLE, _mesh(), [S1])
        state = copy.deepcopy({"whole": x, "rows": x[2:4], "again": x})
        assert state["again"] is state["whole"]
        state["rows"].zero_()
        assert torch.equal(state["whole"].full_tensor()[2:4], torch.zeros(2, 4))
        assert torch.equal(x.full_tensor(), WHOLE)
        with pytest.raises(RuntimeError, match="graph leaves"):
            copy.deepcopy(x.requires_grad_() * 2)

    run_ranks(2, on_rank)


@pytest.mark.filterwarnings("ignore")
def test_tensors_constructed_from_a_dtensor_have_its_global_value() -> None:
    def on_rank() -> None:
        import warnings

        warnings.simplefilter("ignore")  # torch.tensor(tensor) advises clone()
        plain = torch.zeros(1, dtype=torch.float64)
        for x in (*_split(), *_kept()):
            for made in (torch.tensor(x), torch.tensor(data=x), plain.new_tensor(x), plain.new_tensor(data=x)):
                assert type(made) is torch.Tensor
                assert made.shape == WHOLE.shape
                assert not made.requires_grad
                assert torch.equal(made.float(), WHOLE)
            assert plain.new_tensor(x).dtype == plain.new_tensor(WHOLE).dtype
            assert torch.equal(torch.zeros(1).new(x), WHOLE)
            assert torch.tensor(x.requires_grad_(), requires_grad=True).is_leaf
            x.requires_grad_(False)
            assert torch.as_tensor(x) is x
            assert torch.asarray(x) is x
            assert torch.asarray(x, copy=False) is x
            for made in (
                torch.as_tensor(x, dtype=torch.float64),
                torch.as_tensor(data=x, dtype=torch.float64),
                torch.asarray(x, dtype=torch.float64),
                torch.asarray(obj=x, dtype=torch.float64),
                torch.asarray(x, copy=True),
                torch.as_tensor(x, device="cpu", dtype=torch.int64),
                x.new_tensor(x),
            ):
                assert isinstance(made, sw.DTensor)
                assert made is not x
                assert torch.equal(made.full_tensor().float(), WHOLE)
            with pytest.raises(ValueError, match="copy=False"):
                torch.asarray(x, dtype=torch.float64, copy=False)
            assert torch.equal(torch.stack(list(x)).full_tensor(), WHOLE)
            assert torch.tensor([row.sum() for row in x]).tolist() == WHOLE.sum(1).tolist()
        assert torch.asarray(sw.ones(2, mesh=_mesh()), requires_grad=True).requires_grad

    run_ranks(2, on_rank)


def test_factories_read_the_global_value_of_a_scalar_dtensor() -> None:
    """A partial scalar is a partial value on each rank, with the shape of the sum."""

    def on_rank() -> None:
        n = sw.DTensor.from_local(torch.tensor(2), _mesh(), [P])  # 4
        assert torch.equal(torch.full((2,), n), torch.full((2,), 4))
        assert torch.equal(torch.full((2,), fill_value=n), torch.full((2,), 4))
        for like in (torch.full_like(torch.zeros(2), n), torch.full_like(input=torch.zeros(2), fill_value=n)):
            assert torch.equal(like, torch.full((2,), 4.0))
        for new in (torch.zeros(1).new_full((2,), n), torch.zeros(1).new_full(size=(2,), fill_value=n)):
            assert torch.equal(new, torch.full((2,), 4.0))
        assert torch.full_like(n, n).full_tensor().item() == 4
        assert torch.equal(torch.arange(n), torch.arange(4))
        assert torch.equal(torch.arange(0, n, 2), torch.arange(0, 4, 2))
        assert torch.equal(torch.linspace(0, 1, steps=n), torch.linspace(0, 1, 4))
        assert torch.equal(torch.eye(n), torch.eye(4))
        assert torch.scalar_tensor(n).item() == 4
        assert sorted(torch.randperm(n).tolist()) == [0, 1, 2, 3]
        assert torch.equal(torch.tril_indices(n, n), torch.tril_indices(4, 4))
        assert torch.equal(torch.hann_window(n), torch.hann_window(4))
        assert torch.equal(torch.arange(8.0)[n:], torch.arange(4.0, 8.0))
        assert [*range(n)] == [0, 1, 2, 3]
        half = sw.DTensor.from_local(torch.tensor(0.5), _mesh(), [P])
        with pytest.raises(TypeError):
            torch.full((2,), half.requires_grad_())  # as of a plain tensor: its gradient would be lost

    run_ranks(2, on_rank)


def test_sparse_and_nested_constructors_raise_for_dtensors() -> None:
    def on_rank() -> None:
        indices = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7]])
        for x in _split():
            for make in (
                lambda x=x: torch.sparse_coo_tensor(indices, x),
                lambda x=x: torch.sparse_csr_tensor(indices[0], indices[0], values=x),
                lambda x=x: torch.nested.nested_tensor([x, x]),
                lambda x=x: torch.nested.as_nested_tensor([x, x]),
                lambda x=x: torch.utils.dlpack.to_dlpack(x),
                lambda x=x: torch.to_dlpack(x),
            ):
                with pytest.raises(UnsupportedError, match=r"x\.full_tensor\(\)"):
                    make()

    run_ranks(2, on_rank)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_constructors_of_plain_tensors_are_unchanged() -> None:
    """The replaced functions call torch's for plain tensors: default devices, TorchScript, compiled code, pickle."""

    def make(x: torch.Tensor) -> torch.Tensor:
        made = torch.tensor([1.0, 2.0]) + torch.as_tensor([3.0, 4.0]) + torch.asarray([5.0, 6.0]) + torch.arange(2)
        made = made + torch.full_like(x, 1.0) + x.new_full((2,), 1.0)
        return made + torch.full((2,), 1.0) + torch.eye(2)[0] + x.new_tensor([7.0, 8.0]) + torch.scalar_tensor(2.0)

    expected = torch.tensor([22.0, 26.0])
    assert torch.equal(make(torch.ones(2)), expected)
    assert torch.equal(torch.compile(make, backend="aot_eager", fullgraph=True)(torch.ones(2)), expected)
    with torch.device("meta"):
        made = [torch.tensor(1.0), torch.as_tensor([1.0]), torch.asarray([1.0]), torch.arange(2), torch.full((1,), 1.0)]
    assert {tensor.device.type for tensor in made} == {"meta"}
    scripted = torch.jit.script(_scripted)
    assert torch.equal(scripted(torch.ones(2)), torch.tensor([3.0, 4.0]))
    for function in (torch.tensor, torch.arange):
        assert pickle.loads(pickle.dumps(function)) is function


def _scripted(x: torch.Tensor) -> torch.Tensor:
    return x + torch.tensor([1.0, 1.0]) + torch.arange(2) + torch.full([2], 1.0) + torch.full_like(x, 0.0)


def test_function_wrapped_by_another_package_is_replaced_once() -> None:
    asked: list[object] = []

    @wraps(torch.zeros)
    def of_another_package(data: object) -> object:
        asked.append(data)
        return data

    home = SimpleNamespace(tensor=of_another_package)
    constructors._replace(home, "tensor", constructors._from_data)
    ours = home.tensor
    assert ours is not of_another_package
    assert ours(3) == 3
    assert asked == [3]
    home.tensor = wraps(ours)(lambda data: ours(data))  # put around ours later
    later = home.tensor
    constructors._replace(home, "tensor", constructors._from_data)
    assert home.tensor is later


@pytest.mark.filterwarnings("ignore")
def test_save_pretrained_raises_for_a_sharded_model_and_writes_full_tensors(tmp_path: Path) -> None:
    pytest.importorskip("transformers")

    def on_rank() -> None:
        import warnings

        warnings.simplefilter("ignore")
        from safetensors.torch import load_file
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8}
        config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, tie_word_embeddings=True)
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        whole = {name: value.clone() for name, value in model.state_dict().items()}

        def shard(name: str, module: nn.Module, mesh: Any) -> None:
            for key, parameter in module.named_parameters(recurse=False):
                module.register_parameter(key, sw.distribute_tensor(parameter, mesh, [S0]))

        sw.distribute_module(model, _mesh(), shard)
        folder = tmp_path / str(comm.rank())
        with pytest.raises(UnsupportedError, match=REFUSED):
            model.save_pretrained(folder)
        assert not list(folder.glob("*.safetensors"))
        model.save_pretrained(folder, state_dict={k: v.full_tensor() for k, v in model.state_dict().items()})
        if comm.rank() == 0:  # transformers writes on the first rank only
            stored = load_file(folder / "model.safetensors")
            assert "model.embed_tokens.weight" in stored
            for name, value in stored.items():
                assert torch.equal(value, whole[name])

    run_ranks(2, on_rank)
