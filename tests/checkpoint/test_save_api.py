"""Arguments of save: replicas are compared on request, plans are reused, wrong arguments raise on every rank."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwright as sw
from shardwright import checkpoint, comm
from shardwright.checkpoint import CheckpointManager
from shardwright.checkpoint.writing.replicas import checksums
from shardwright.errors import RankFailedError, StateDiffersError, StorageError
from shardwright.testing import run_ranks

saving: Any = importlib.import_module("shardwright.checkpoint.save")  # the package has a function of that name


def _refused(state: dict[str, Any], folder: str, **how: Any) -> str:
    with pytest.raises(StateDiffersError) as raised:
        checkpoint.save(state, folder, check_replicas=True, **how)
    return str(raised.value)


def test_check_replicas_names_different_replicas_on_all_ranks_before_writing(tmp_path: Path) -> None:
    def body(folder: str) -> tuple[str, list[str]]:
        checkpoint.save({"w": torch.full((4, 4), 5.0)}, folder)
        weights = torch.full((4, 4), 1.0 + (comm.rank() == 1))
        mesh = sw.init_device_mesh("cpu", (4,))
        same = sw.distribute_tensor(torch.arange(40.0), mesh, [sw.Replicate()])
        other = sw.distribute_tensor(torch.arange(40.0), mesh, [sw.Replicate()])
        if comm.rank() == 3:
            other.to_local()[7] = -1
        rows = sw.distribute_tensor(torch.rand(8, 2), mesh, [sw.Shard(0)])  # every rank its own, as it should be
        state = {"w": weights.t(), "same": same, "other": other, "rows": rows, "step": 1}
        return _refused(state, folder), checkpoint.read(folder)["w"].unique().tolist()

    found = run_ranks(4, body, str(tmp_path))
    assert len({text for text, _ in found}) == 1
    lines = found[0][0].splitlines()
    assert "different bytes under 2 names" in lines[0]
    assert lines[1].startswith("  w: ranks 0, 2, 3 ")
    assert "; rank 1 " in lines[1]
    assert lines[2].startswith("  other: ranks 0, 1, 2 ")
    assert "; rank 3 " in lines[2]
    assert len(lines) == 3
    assert [old for _, old in found] == [[5.0]] * 4
    assert len(list(tmp_path.glob("*.safetensors"))) > 0


def test_check_replicas_compares_replicated_shards_with_their_replicas(tmp_path: Path) -> None:
    def body(folder: str) -> str:
        mesh = sw.init_device_mesh("cpu", (2, 2))
        tensor = sw.distribute_tensor(torch.arange(10.0), mesh, [sw.Replicate(), sw.Shard(0)])
        checkpoint.save({"w": tensor}, folder, check_replicas=True)
        if comm.rank() == 3:
            tensor.to_local()[0] = 99
        return _refused({"w": tensor}, folder)

    for text in run_ranks(4, body, str(tmp_path)):
        assert "w: rank 1 " in text
        assert "; rank 3 " in text
        assert "rank 0" not in text
    assert torch.equal(checkpoint.read(tmp_path)["w"], torch.arange(10.0))


def test_check_replicas_compares_names_among_the_ranks_that_have_them(tmp_path: Path) -> None:
    def body(folder: str) -> str:
        state: dict[str, Any] = {"all": torch.ones(3), "own": checkpoint.PerRank(torch.tensor([comm.rank()]))}
        if comm.rank() != 1:
            state["some"] = torch.tensor([comm.rank()])
        return _refused(state, folder)

    for text in run_ranks(3, body, str(tmp_path)):
        assert "under 1 name;" in text
        assert "some: rank 0 " in text
        assert "; rank 2 " in text


def test_replicas_are_not_compared_by_default(tmp_path: Path) -> None:
    run_ranks(2, lambda folder: checkpoint.save({"w": torch.tensor([comm.rank()])}, folder), str(tmp_path))
    assert checkpoint.read(tmp_path)["w"].tolist() in ([0], [1])


def test_checksums_are_of_the_bytes_in_row_major_order() -> None:
    import crc32c

    weights = torch.rand(1500, 1800)  # more than a window
    tensors = [weights, weights.t(), weights[::2], torch.tensor([]), weights.to(torch.complex64).conj(), weights[0, 0]]
    expected = [crc32c.crc32c(t.resolve_conj().contiguous().numpy().tobytes()) for t in tensors]
    assert checksums(tensors, threads=2).tolist() == expected


def test_a_wrong_argument_on_one_rank_raises_on_all(tmp_path: Path) -> None:
    def body(folder: str) -> list[str]:
        found = []
        for how in ({"memory": 5}, {"memory": "64 MB"}, {"threads": 0}):
            for function in (checkpoint.save, checkpoint.async_save):
                with pytest.raises(RankFailedError) as raised:
                    function({"w": torch.ones(1)}, folder, **(how if comm.rank() == 1 else {}))
                found.append(str(raised.value).splitlines()[1])
        checkpoint.save({"w": torch.ones(1)}, folder)
        return found

    found = run_ranks(2, body, str(tmp_path))
    assert found[0] == found[1]
    assert [text.split(":")[0].strip() for text in found[0]] == ["rank 1"] * 6
    assert "CheckpointError: memory must be at least 1048576 bytes (one block), got 5" in found[0][0]
    assert "ArgumentTypeError: memory must be an int, got str: '64 MB'" in found[0][2]
    assert "CheckpointError: threads must be at least 1, got 0" in found[0][4]


def test_the_plan_of_an_unchanged_state_is_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []
    plan = saving.file_plan
    monkeypatch.setattr(saving, "_plans", type(saving._plans)())
    monkeypatch.setattr(saving, "file_plan", lambda table, rank: planned.append(len(table)) or plan(table, rank))
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for step, folder in enumerate(folders):
        checkpoint.save({"w": torch.full((3, 4), float(step)), "v": torch.ones(2), "step": step}, folder)
    checkpoint.async_save({"w": torch.zeros(3, 4), "v": torch.ones(2), "step": 7}, folders[0]).wait()
    assert planned == [2]
    assert [checkpoint.read(folder)["step"] for folder in folders] == [7, 1, 2]
    assert checkpoint.read(folders[2])["w"].unique().tolist() == [2]
    changes: list[dict[str, Any]] = [
        {"w": torch.zeros(3, 4), "u": torch.ones(2)},  # a name
        {"w": torch.zeros(4, 3), "v": torch.ones(2)},  # a shape
        {"w": torch.zeros(3, 4), "v": torch.ones(2, dtype=torch.int32)},  # a dtype
        {"v": torch.ones(2), "w": torch.zeros(3, 4)},  # the order
    ]
    for number, state in enumerate(changes):
        checkpoint.save(state, tmp_path)
        assert len(planned) == 2 + number
        loaded = checkpoint.read(tmp_path)
        assert loaded.keys() == state.keys()
        assert all(torch.equal(loaded[name], state[name]) for name in state)


def test_plans_of_sharded_and_per_rank_states_are_reused_on_all_ranks(tmp_path: Path) -> None:
    def body(folder: str) -> list[int]:
        counts = []
        plan = saving.file_plan

        def counting(table: Any, rank: int) -> Any:
            counts.append(len(table))
            return plan(table, rank)

        saving._plans.clear()
        saving.file_plan = counting
        try:
            spec = sw.sharded.ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in range(3)])
            own = torch.ones(comm.rank())
            for step in range(3):
                table = sw.sharded.full(spec, (7, 2), fill_value=float(step))
                state = {"table": table, "w": torch.full((9,), step), "own": checkpoint.PerRank(own)}
                checkpoint.save(state, f"{folder}/{step}")
        finally:
            saving.file_plan = plan
        return counts

    assert run_ranks(3, body, str(tmp_path)) == [[5]] * 3
    for step in range(3):
        loaded = checkpoint.read(tmp_path / str(step))
        assert loaded["table"].unique().tolist() == [step]
        assert loaded["table"].shape == (7, 2)


def test_the_number_of_cached_plans_is_bounded(tmp_path: Path) -> None:
    for size in range(1, 9):
        checkpoint.save({"w": torch.ones(size)}, tmp_path)
    assert len(saving._plans) == saving._MAX_PLANS


@pytest.mark.parametrize("path", ["s3://bucket/run", "gs://b/r", "HTTP://host/x", "hdfs:/x", Path("s3://bucket/run")])
def test_an_unsupported_url_scheme_raises_in_every_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    state = {"w": torch.ones(2)}
    for work in (
        lambda: checkpoint.save(state, path),
        lambda: checkpoint.async_save(state, path),
        lambda: checkpoint.load(state, path),
        lambda: checkpoint.read(path),
        lambda: checkpoint.open(path),
        lambda: checkpoint.verify(path),
        lambda: CheckpointManager(path),
    ):
        with pytest.raises(StorageError, match=r"is not supported, only paths and file:// are"):
            work()
    assert not list(tmp_path.iterdir())


def test_file_urls_and_directories_with_a_colon_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint.save({"w": torch.ones(2)}, f"file://{tmp_path}/a%20b")
    assert checkpoint.read(tmp_path / "a b")["w"].tolist() == [1, 1]
    checkpoint.save({"w": torch.ones(2)}, "./s3:/run")
    assert checkpoint.read(tmp_path / "s3:" / "run")["w"].tolist() == [1, 1]
    with pytest.raises(StorageError, match="a path on this host"):
        checkpoint.read(f"file://elsewhere{tmp_path}")


class Talks:
    """An object whose state costs a collective of its own kind, so that ranks in another order would wait for ever."""

    def __init__(self, name: str) -> None:
        self.name, self.calls = name, 0

    def state_dict(self) -> dict[str, Any]:
        self._talk()
        return {"name": self.name, "inner": self.calls}

    def load_state_dict(self, _state: dict[str, Any]) -> None:
        self._talk()

    def _talk(self) -> None:
        self.calls += 1
        said = comm.gather_bytes(self.name.encode(), what=f"state of {self.name}")
        assert set(said) == {self.name.encode()}


def test_state_dict_is_called_in_one_order_whatever_the_order_of_the_dicts(tmp_path: Path) -> None:
    def body(folder: str) -> list[int]:
        names = ["foo", "bar", "deep", "zed"]
        objects = {name: Talks(name) for name in (names if comm.rank() else reversed(names))}
        state: dict[str, Any] = {name: objects[name] for name in objects if name != "deep"}
        state["own"] = checkpoint.PerRank({"deep": objects["deep"]})
        if comm.rank():
            state = {"w": torch.ones(2), **state, "inner": {"b": Talks("b"), "a": Talks("a")}}
        else:
            state = {"inner": {"a": Talks("a"), "b": Talks("b")}, **state, "w": torch.ones(2)}
        checkpoint.save(state, folder)
        checkpoint.load(state, folder)
        return [objects[name].calls for name in sorted(objects)]

    assert run_ranks(2, body, str(tmp_path)) == [[3] * 4] * 2
