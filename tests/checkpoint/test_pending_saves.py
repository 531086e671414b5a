"""A load waits for background saves of this process to the same location."""

from __future__ import annotations

import os

import torch

from shardwright.checkpoint import async_save, load, read
from shardwright.storage import MemoryStorage


def test_load_and_read_wait_for_background_saves_also_through_a_link(tmp_path):
    (tmp_path / "run").mkdir()
    os.symlink(tmp_path / "run", tmp_path / "link")
    state = {"w": torch.ones(4_000_000)}
    async_save(state, tmp_path / "run")
    assert read(tmp_path / "link")["w"][0] == 1
    state["w"].fill_(2)
    async_save(state, tmp_path / "run")
    assert load({"w": torch.zeros(4_000_000)}, tmp_path / "run")["w"][0] == 2
    handles = []
    for number, name in enumerate(("run", "link", "run")):
        state["w"].fill_(3 + number)
        handles.append(async_save(state, tmp_path / name))
    for handle in handles:
        handle.wait()
    assert read(tmp_path / "run")["w"][-1] == 5
    memory = MemoryStorage()
    async_save(state, memory)
    assert read(memory)["w"][0] == 5
