"""A script written for PyTorch's FSDP2 runs with only its import changed, to the same losses."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.testing import run_ranks

SCRIPT = Path(__file__).with_name("fsdp2_script.py")
THEIRS, OURS = "from torch.distributed.fsdp import", "from shardwright import"


def run_script(library):
    source = SCRIPT.read_text()
    assert source.count(THEIRS) == 1
    names = {"__name__": "script", "__file__": str(SCRIPT)}
    exec(compile(source.replace(THEIRS, library), str(SCRIPT), "exec"), names)  # the script under test
    return names["main"]()


def test_an_fsdp2_script_runs_with_its_import_changed_to_the_losses_of_torch():
    pytest.importorskip("transformers")
    theirs, ours = run_ranks(2, run_script, THEIRS), run_ranks(2, run_script, OURS)
    for rank in range(2):
        for name, (expected, tokens) in theirs[rank].items():
            found, generated = ours[rank][name]
            assert generated == tokens, name
            assert found == pytest.approx(expected, rel=5e-3 if name == "bfloat16" else 1e-5), name
