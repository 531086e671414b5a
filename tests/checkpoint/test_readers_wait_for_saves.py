"""Readers in a process wait for its background saves to the same location."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright import checkpoint
from shardwright.storage import LocalStorage
from tests.checkpoint.calls import Gate


def first_element(path: Path) -> Any:
    with checkpoint.open(path) as saved:
        return saved["w"][0].item()


def verified_save(path: Path) -> Any:
    report = checkpoint.verify(path)
    assert report
    with checkpoint.open(path) as saved:
        assert saved.save_id == report.save_id
        return saved["w"][0].item()


def loaded(path: Path) -> Any:
    return checkpoint.read(path)["w"][0].item()


@pytest.mark.parametrize("look", [first_element, verified_save, loaded])
def test_readers_wait_for_a_running_background_save(tmp_path: Path, look: Callable[[Path], Any]) -> None:
    folder, link = tmp_path / "saved", tmp_path / "link"
    checkpoint.save({"w": torch.zeros(5)}, folder)
    link.symlink_to(folder)
    gate = Gate()
    saving = checkpoint.async_save({"w": torch.ones(5)}, LocalStorage(folder, gate))
    opening = threading.Timer(0.2, gate.opened.set)
    opening.start()
    assert look(link) == 1
    opening.join()
    saving.wait()


@pytest.mark.parametrize("look", [first_element, verified_save, loaded])
def test_readers_do_not_wait_for_saves_to_other_directories(tmp_path: Path, look: Callable[[Path], Any]) -> None:
    checkpoint.save({"w": torch.zeros(5)}, tmp_path / "here")
    gate = Gate()
    saving = checkpoint.async_save({"w": torch.ones(5)}, LocalStorage(tmp_path / "there", gate))
    assert look(tmp_path / "here") == 0
    assert not saving.done()
    gate.opened.set()
    saving.wait()
