"""If a checkpoint is replaced while ranks load it, all ranks load the old one or all load the new one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import shardwright as sw
from shardwright import checkpoint, comm
from shardwright.checkpoint.format.manifest import Manifest
from shardwright.checkpoint.reading import current
from shardwright.checkpoint.reading.current import read_manifest
from shardwright.storage import Storage
from shardwright.testing import run_ranks


def _load_with_a_stale_first_look(folder: str, before: bytes) -> list[float]:
    """Rank 0 has read the manifest just before the commit, the others just after it."""
    looks = 0

    def look(storage: Storage) -> Manifest:
        nonlocal looks
        looks += 1
        return Manifest.decode(before) if comm.world().rank == 0 and looks == 1 else read_manifest(storage)

    mesh = sw.init_device_mesh("cpu", (2,))
    target = {"w": sw.distribute_tensor(torch.zeros(8), mesh, [sw.Shard(0)])}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(current, "read_manifest", look)
        checkpoint.load(target, folder)
    assert looks > 0
    found: list[float] = target["w"].full_tensor().tolist()
    return found


def test_ranks_that_see_different_manifests_read_them_again(tmp_path: Path) -> None:
    folder, aside = tmp_path / "saved", tmp_path / "aside"
    checkpoint.save({"w": torch.full((8,), 1.0)}, folder)
    shutil.copytree(folder, aside)
    checkpoint.save({"w": torch.full((8,), 2.0)}, folder)
    for file in aside.glob("*.safetensors"):  # committed, and not cleaned up yet
        shutil.copy(file, folder)
    found = run_ranks(2, _load_with_a_stale_first_look, str(folder), (aside / "manifest.json").read_bytes())
    assert found == [[2.0] * 8] * 2
