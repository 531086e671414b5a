"""A save removes only files that a save created."""

from __future__ import annotations

import os

import torch

from shardwright.checkpoint import save

STATE = {"w": torch.arange(64.0)}


def test_a_save_removes_only_files_that_a_save_created(tmp_path):
    mine = {
        "shard-00001-2.safetensors": b"mine",
        "model-00001-of-00002.safetensors": b"mine",
        "rank-00001-0.safetensors": b"mine",
        "5f3a9c-00001-0.safetensors": b"mine",
        "0123456789ab-00001-1.safetensors": b"mine",
        "manifest.json.0123.tmp": b"mine",
        "0123456789ab-00001-0.safetensors": b"\x40" + bytes(7) + b'{"weight":{"dtype":"F32","shape":[2]' + bytes(40),
    }
    left = {
        "abcdefabcdef-00000-0.safetensors": b"",
        "abcdefabcdef-00001-0.safetensors": b"cut off",
        "abcdefabcdef-00002-0.safetensors": bytes(5000),
        "abcdefabcdef-00003-0.safetensors": b"\xf8\x0f" + bytes(6) + b'{"__metadata__":{"cr' + bytes(5000),
        "abcdefabcdef.begun": b"abcdefabcdef",
        "manifest.json.abcdefabcdef.tmp": b"{",
    }
    save(STATE, tmp_path)
    for name, data in (mine | left).items():
        (tmp_path / name).write_bytes(data)
    save(STATE, tmp_path)
    names = set(os.listdir(tmp_path))
    assert mine.keys() <= names
    assert not left.keys() & names
    assert len(names - mine.keys()) == 3  # .lock, the manifest, one data file
