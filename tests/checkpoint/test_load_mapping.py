"""`load(mapping=)`: tensors under other names and shapes, permuted, joined and split, into any layout, in place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright import checkpoint
from shardwright.errors import ArgumentTypeError, LoadMismatchError, MappingError
from shardwright.interop.mapping import LLAMA_MEGATRON
from shardwright.testing import run_ranks
from tests.checkpoint.calls import CountingReads

RULES = """
layers.{i}.{q,k,v}.weight = layers.{i}.wqkv : (g n d) e, (g d) e, (g d) e = (g (n + 1 + 1) d) e
layers.{i}.experts.{x}.{gate,up}.weight = layers.{i}.w13 : f e, f e = x (f + f) e
layers.{i}.o.weight = layers.{i}.wo : (h 2 r) e = e (h r 2)
embed.weight = tok.weight : v e = (v + pad) e
norm.weight = final.weight
unused = -
* = *
"""
SIZES = {"d": 4, "n": 3, "r": 2}


def stored_state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    state = {"embed.weight": torch.randn(11, 6), "norm.weight": torch.randn(6), "unused": torch.ones(1)}
    for layer in range(2):
        for name, rows in (("q", 24), ("k", 8), ("v", 8), ("o", 24)):
            state[f"layers.{layer}.{name}.weight"] = torch.randn(rows, 6)
        for expert in range(4):
            for part in ("gate", "up"):
                state[f"layers.{layer}.experts.{expert}.{part}.weight"] = torch.randn(5, 6)
    return state


def expected_state() -> dict[str, torch.Tensor]:
    return sw.Mapping(RULES, **SIZES, pad=5).apply(stored_state())


def test_a_mapped_load_fills_the_state_in_place_and_infers_padding_from_it(tmp_path: Path) -> None:
    checkpoint.save({**stored_state(), "epoch": 3}, tmp_path)
    wanted = expected_state()
    state = {name: torch.full_like(tensor, 9) for name, tensor in wanted.items()}
    before = dict(state)
    loaded = checkpoint.load({**state, "epoch": 0}, tmp_path, mapping=sw.Mapping(RULES, **SIZES))
    assert loaded["epoch"] == 3
    for name, tensor in wanted.items():
        assert loaded[name] is before[name]
        assert torch.equal(loaded[name], tensor), name


def test_the_inverse_loads_what_was_mapped(tmp_path: Path) -> None:
    checkpoint.save(expected_state(), tmp_path)
    wanted = stored_state()
    del wanted["unused"]
    state = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    checkpoint.load(state, tmp_path, mapping=sw.Mapping(RULES, **SIZES).inverse())
    assert all(torch.equal(state[name], tensor) for name, tensor in wanted.items())


def test_a_mapped_load_casts_only_if_it_may(tmp_path: Path) -> None:
    checkpoint.save(stored_state(), tmp_path)
    wanted = expected_state()
    state = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in wanted.items()}
    mapping = sw.Mapping(RULES, **SIZES)
    with pytest.raises(LoadMismatchError, match=r"dtype: 'layers\.0\.wqkv'"):
        checkpoint.load(state, tmp_path, mapping=mapping)
    checkpoint.load(state, tmp_path, mapping=mapping, cast=True)
    assert all(torch.equal(state[name], tensor.double()) for name, tensor in wanted.items())


def test_strided_targets_and_arrays_are_filled(tmp_path: Path) -> None:
    checkpoint.save(stored_state(), tmp_path)
    wanted = expected_state()
    state = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    state["layers.0.wqkv"] = torch.zeros(6, 40).t()
    loaded = checkpoint.load(
        {**state, "layers.1.w13": state["layers.1.w13"].numpy()}, tmp_path, mapping=sw.Mapping(RULES, **SIZES)
    )
    assert torch.equal(state["layers.0.wqkv"], wanted["layers.0.wqkv"])
    assert torch.equal(torch.from_numpy(loaded["layers.1.w13"]), wanted["layers.1.w13"])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wqkv = nn.Parameter(torch.zeros(40, 6))
        self.final = nn.Parameter(torch.zeros(6))


def test_modules_are_filled_and_names_of_the_state_that_the_mapping_does_not_give_are_missing(tmp_path: Path) -> None:
    stored = stored_state()
    rules = "{q,k,v} = m.wqkv : (g n d) e, (g d) e, (g d) e = (g (n + 1 + 1) d) e\nnorm.weight = m.final"
    kept = {name: stored[f"layers.0.{name}.weight"] for name in ("q", "k", "v")}
    checkpoint.save({**kept, "norm.weight": stored["norm.weight"]}, tmp_path)
    model = Model()
    checkpoint.load({"m": model}, tmp_path, mapping=sw.Mapping(rules, d=4))
    assert torch.equal(model.wqkv, expected_state()["layers.0.wqkv"])
    with pytest.raises(LoadMismatchError, match=r"missing: 'm2\.wqkv'"):
        checkpoint.load({"m": model, "m2": Model()}, tmp_path, mapping=sw.Mapping(rules, d=4))


def test_a_mapping_that_does_not_fit_is_an_error_before_anything_changes(tmp_path: Path) -> None:
    checkpoint.save(stored_state(), tmp_path)
    state = {name: torch.zeros_like(tensor) for name, tensor in expected_state().items()}
    state["layers.1.wqkv"] = torch.zeros(41, 6)
    with pytest.raises(MappingError, match=r"'layers\.1\.wqkv' of shape \[41, 6\] as .* does not fit"):
        checkpoint.load(state, tmp_path, mapping=sw.Mapping(RULES, **SIZES))
    with pytest.raises(ArgumentTypeError, match="rename and mapping cannot both be given"):
        checkpoint.load(state, tmp_path, mapping=sw.Mapping(RULES, **SIZES), rename={})
    with pytest.raises(ArgumentTypeError, match=r"mapping must be a shardwright\.Mapping, got str"):
        checkpoint.load(state, tmp_path, mapping="a = b")  # type: ignore[arg-type]  # the mistake
    with pytest.raises(MappingError, match="no rule matches 'embed"):
        checkpoint.load(state, tmp_path, mapping=sw.Mapping("norm.weight = final.weight"))
    state["layers.1.wqkv"] = torch.zeros(40, 6)
    checkpoint.save({**stored_state(), "layers.0.k.weight": torch.zeros(8, 6).double()}, tmp_path)
    with pytest.raises(MappingError, match=r"it joins 'layers\.0\.q\.weight' of float32 and 'layers\.0\.k\.weight' of"):
        checkpoint.load(state, tmp_path, mapping=sw.Mapping(RULES, **SIZES))
    assert not any(tensor.any() for tensor in state.values())


def test_only_and_strict_apply_to_the_mapped_names(tmp_path: Path) -> None:
    checkpoint.save(stored_state(), tmp_path)
    wanted = expected_state()
    state = {name: torch.zeros_like(wanted[name]) for name in ("layers.0.wqkv", "layers.0.wo")}
    mapping = sw.Mapping(RULES, **SIZES)
    with pytest.raises(LoadMismatchError, match=r"unexpected: 'layers\.0\.w13' is in the checkpoint"):
        checkpoint.load(state, tmp_path, mapping=mapping)
    checkpoint.load(state, tmp_path, mapping=mapping, only="*.wo")
    assert not state["layers.0.wqkv"].any()
    checkpoint.load(state, tmp_path, mapping=mapping, strict=False)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in state.items())


def _load_sharded(path: str) -> None:
    mesh = sw.init_device_mesh("cpu", (sw.checkpoint.api.comm.world().size,))
    wanted = expected_state()
    placements = {"layers.0.wqkv": 0, "layers.1.wqkv": 1, "layers.0.w13": 1, "layers.1.w13": 0, "layers.0.wo": 1}
    state: dict[str, torch.Tensor] = {}
    for name, tensor in wanted.items():
        dim = placements.get(name)
        placement = sw.Replicate() if dim is None else sw.Shard(dim)
        state[name] = sw.zeros(*tensor.shape, mesh=mesh, placements=[placement])
    sw.checkpoint.load(state, path, mapping=sw.Mapping(RULES, **SIZES))
    for name, tensor in wanted.items():
        assert torch.equal(state[name].full_tensor(), tensor), name  # type: ignore[attr-defined]  # a DTensor


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_load_their_shards_of_mapped_tensors(ranks: int, tmp_path: Path) -> None:
    checkpoint.save(stored_state(), tmp_path)
    run_ranks(ranks, _load_sharded, str(tmp_path))


def _load_a_stage(path: str) -> None:
    wanted = expected_state()
    rank = sw.checkpoint.api.comm.rank()
    names = [name for name in wanted if (name == "tok.weight" or name.startswith("layers.0.")) == (rank == 0)]
    state = {name: torch.zeros_like(wanted[name]) for name in names}
    sw.checkpoint.load(state, path, mapping=sw.Mapping(RULES, **SIZES))
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in state.items())


def test_ranks_with_different_stages_load_them_though_one_does_not_know_the_padding(tmp_path: Path) -> None:
    checkpoint.save(stored_state(), tmp_path)
    run_ranks(2, _load_a_stage, str(tmp_path))


def _bytes_read(path: str) -> tuple[int, int]:
    mesh = sw.init_device_mesh("cpu", (2,))
    calls = CountingReads()
    state = {"w13": sw.zeros(4, 1024, 512, mesh=mesh, placements=[sw.Shard(0)])}
    mapping = sw.Mapping("e.{x}.{gate,up} = w13 : f e, f e = x (f + f) e")
    sw.checkpoint.load(state, sw.storage.LocalStorage(path, calls=calls), mapping=mapping)
    return calls.read, state["w13"].to_local().nbytes


def test_a_rank_reads_the_bytes_of_its_shard_and_little_else(tmp_path: Path) -> None:
    stored = {f"e.{x}.{part}": torch.randn(512, 512) for x in range(4) for part in ("gate", "up")}
    checkpoint.save(stored, tmp_path)
    for read, wanted in run_ranks(2, _bytes_read, str(tmp_path)):
        assert wanted <= read <= 1.05 * wanted


def test_buffers_of_a_mapped_load_stay_within_its_memory(tmp_path: Path) -> None:
    stored = {"q": torch.randn(4096, 512)}  # 8 MiB
    checkpoint.save(stored, tmp_path)
    state = {"wq": torch.zeros(4096, 512)}
    mapping = sw.Mapping("q = wq : (h 2 r) e = (h r 2) e", r=32)
    sizes: list[int] = []
    empty = torch.empty

    def noted(*args: object, **kwargs: object) -> torch.Tensor:
        made = empty(*args, **kwargs)  # type: ignore[call-overload]  # passed on
        sizes.append(made.nbytes)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", noted)
        checkpoint.load(state, tmp_path, mapping=mapping, memory=2 << 20)
    assert max(sizes) <= 2 << 20
    expected = stored["q"].view(64, 2, 32, 512).transpose(1, 2).reshape(4096, 512)
    assert torch.equal(state["wq"], expected)


def test_a_shipped_mapping_loads_a_hugging_face_llama_into_megatron_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    hidden, head, groups, per_group = 16, 4, 2, 2
    shapes = {"q": groups * per_group * head, "k": groups * head, "v": groups * head}
    stored = {f"model.layers.0.self_attn.{n}_proj.weight": torch.randn(rows, hidden) for n, rows in shapes.items()}
    checkpoint.save(stored, tmp_path)
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    state = {name: torch.zeros(sum(shapes.values()), hidden)}
    checkpoint.load(state, tmp_path, mapping=sw.Mapping(LLAMA_MEGATRON, d=head))
    q, k, v = (tensor.view(groups, -1, hidden) for tensor in stored.values())
    assert torch.equal(state[name], torch.cat([q, k, v], dim=1).reshape(-1, hidden))


def test_an_open_checkpoint_has_the_names_and_slices_of_the_mapping(tmp_path: Path) -> None:
    checkpoint.save({**stored_state(), "epoch": 3, "old": 4}, tmp_path)
    mapping = sw.Mapping(RULES + "old = new", **SIZES, pad=5)
    wanted = expected_state()
    with checkpoint.open(tmp_path, mapping=mapping) as opened:
        assert set(opened) == set(wanted)
        assert opened.plain_values() == {"epoch": 3, "new": 4}
        assert opened.value("new") == 4
        for name, tensor in wanted.items():
            assert list(opened[name].shape) == list(tensor.shape)
            assert torch.equal(opened[name].tensor(), tensor)
        assert torch.equal(opened["layers.1.wqkv"][3:21:2, 1:4], wanted["layers.1.wqkv"][3:21:2, 1:4])
        assert torch.equal(opened["tok.weight"][9:14, -1], wanted["tok.weight"][9:14, -1])
        assert torch.equal(torch.from_numpy(opened.numpy("layers.0.w13")[2]), wanted["layers.0.w13"][2])
        assert opened["layers.1.wqkv"].stored_ranges()
        assert opened["layers.1.wqkv"].holdings() == ()
        assert opened["final.weight"].stored_name == "norm.weight"
        assert opened.tree()["epoch"] == 3
    read = checkpoint.read(tmp_path, mapping=mapping)
    assert {name: value for name, value in read.items() if name not in wanted} == {"epoch": 3, "new": 4}
    assert all(torch.equal(read[name], tensor) for name, tensor in wanted.items())


def test_tensors_made_of_one_stored_tensor_of_two_names_are_tied(tmp_path: Path) -> None:
    shared = torch.randn(5, 3)
    checkpoint.save({"embed": shared, "head": shared, "other": shared.clone()}, tmp_path)
    mapping = sw.Mapping("{embed,head,other} = {e,h,o} : v d, w d, x d = (v + pad) d, (w + pad) d, (x + pad) d", pad=3)
    with checkpoint.open(tmp_path, mapping=mapping) as opened:
        assert [opened[name].stored_name for name in ("e", "h", "o")] == ["e", "e", "o"]
    tied = torch.zeros(8, 3)
    checkpoint.load({"e": tied, "h": tied, "o": torch.zeros(8, 3)}, tmp_path, mapping=mapping)
    assert torch.equal(tied[:5], shared)
