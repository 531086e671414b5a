"""`shardwright diff`: what differs, by how much, the largest first; `fingerprint`: equal for equal contents only."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwright import checkpoint
from shardwright.cli.differences import Tally, Tolerance
from shardwright.layout import Region
from tests.cli.conftest import Cli, Done
from tests.cli.example import weights


@pytest.fixture
def differ(cli: Cli, tmp_path: Path) -> Any:
    """Save two states, and compare them."""

    def diff(a: Any, b: Any, *options: object) -> Done:
        checkpoint.save(a, tmp_path / "a")
        checkpoint.save(b, tmp_path / "b")
        return cli("diff", tmp_path / "a", tmp_path / "b", "--json", *options)

    return diff


def test_four_ranks_and_one_saved_the_same(cli: Cli, step: Path, tmp_path: Path) -> None:
    model = dict(reversed(weights(200).items()))
    checkpoint.save({"model": {**model, "head.weight": model["tok.weight"]}, "step": 200, "lr": 1e-3}, tmp_path / "c")
    done = cli("diff", step, tmp_path / "c")
    assert (done.code, done.out) == (0, "equal: 10 tensors\n")
    first, second = (cli("fingerprint", path, "--json").json for path in (step, tmp_path / "c"))
    assert first["fingerprint"] == second["fingerprint"]


def test_the_largest_differences_come_first_and_are_those_of_numpy(cli: Cli, example_run: Path) -> None:
    done = cli("diff", example_run / "step-00000100", example_run / "step-00000200", "--json")
    assert done.code == 1
    found = done.json
    amounts = [value["max_absolute"] for value in found["values"]]
    assert amounts == sorted(amounts, reverse=True)
    assert len(amounts) == 6  # norms are equal
    for value in found["values"]:
        name = value["name"].removeprefix("model.").replace("head", "tok")
        a, b = (weights(at)[name].double().numpy() for at in (100, 200))
        difference = np.abs(a - b)
        assert value["differing"] == int((a != b).sum())
        assert value["max_absolute"] == difference.max()
        assert value["index"] == list(np.unravel_index(difference.argmax(), a.shape))
        assert (value["a"], value["b"]) == (a[tuple(value["index"])], b[tuple(value["index"])])
        assert value["max_relative"] == pytest.approx((difference / np.abs(b)).max())
    assert found["plain_values"] == [{"name": "step", "a": "100", "b": "200"}]


def test_names_shapes_dtypes_and_values_are_told_apart(differ: Any) -> None:
    same = torch.arange(4.0)
    a = {"same": same, "gone": same, "shape": torch.zeros(2), "dtype": torch.ones(2), "n": 1, "t": 1.0}
    b = {
        "same": same,
        "new": same,
        "shape": torch.zeros(3),
        "dtype": torch.ones(2, dtype=torch.float64),
        "n": 1,
        "t": 1,
    }
    found = differ(a, b).json
    assert (found["only_in_a"], found["only_in_b"]) == (["gone"], ["new"])
    assert found["shapes"] == [{"name": "shape", "a": "[2]", "b": "[3]"}]
    assert found["dtypes"] == [{"name": "dtype", "a": "float32", "b": "float64"}]
    assert found["values"] == []
    assert found["plain_values"] == [{"name": "t", "a": "1.0", "b": "1"}]


def test_options_leave_out_dtypes_plain_values_and_other_names(differ: Any) -> None:
    a = {"w": torch.ones(2), "v": torch.zeros(2), "n": 1}
    b = {"w": torch.ones(2, dtype=torch.bfloat16), "v": torch.ones(2), "n": 2}
    assert differ(a, b, "--ignore-values", "--ignore-dtypes", "--only", "w").code == 0
    assert differ(a, b, "--ignore-values", "--only", "w").json["dtypes"] != []
    assert differ(a, b, "--only", "x").code == 2


@pytest.mark.parametrize(
    ("a", "b", "options", "code"),
    [
        ([1.0, 2.0], [1.0, 2.001], ("--rtol", "1e-3"), 0),
        ([1.0, 2.0], [1.0, 2.001], ("--rtol", "1e-4"), 1),
        ([0.0], [1e-9], ("--atol", "1e-8"), 0),
        ([math.nan, math.inf], [math.nan, math.inf], (), 0),
        ([math.nan, math.inf], [math.nan, math.inf], ("--atol", "1"), 0),
        ([math.nan], [1.0], ("--atol", "1e30"), 1),
        ([math.inf], [-math.inf], ("--atol", "1e30"), 1),
        ([math.inf], [1.0], ("--rtol", "10"), 1),
        ([0.0], [-0.0], (), 1),
        ([0.0], [-0.0], ("--atol", "1e-30"), 0),
    ],
)
def test_tolerances(differ: Any, a: list[float], b: list[float], options: tuple[str, ...], code: int) -> None:
    assert differ({"w": torch.tensor(a)}, {"w": torch.tensor(b)}, *options).code == code


def test_tolerances_that_are_not_numbers_of_0_or_more_are_misuse(differ: Any) -> None:
    for value in ("-1", "nan", "inf", "x"):
        assert differ({"w": torch.zeros(1)}, {"w": torch.zeros(1)}, "--rtol", value).code == 2


@pytest.mark.parametrize(
    ("dtype", "a", "b", "largest"),
    [
        (torch.int64, [-(2**63), 5], [2**63 - 1, 5], float(2**64 - 1)),
        (torch.uint64, [2**63, 0], [0, 1], float(2**63)),
        (torch.int64, [2**62 + 1], [2**62], 1.0),
        (torch.bool, [True, False], [False, False], 1.0),
        (torch.complex64, [3 + 4j], [0j], 5.0),
        (torch.float8_e4m3fn, [1.0, 2.0], [1.0, 4.0], 2.0),
    ],
)
def test_differences_of_every_dtype_are_exact(dtype: torch.dtype, a: list[Any], b: list[Any], largest: float) -> None:
    tally = Tally(Tolerance())
    first, second = torch.tensor(a, dtype=dtype), torch.tensor(b, dtype=dtype)
    tally.add(Region.whole(first.shape), first, second)
    assert tally.largest == largest


def test_a_tensor_of_many_blocks_is_compared_to_the_end(differ: Any) -> None:
    a = torch.zeros(3, 1 << 20)  # 12 MiB
    b = a.clone()
    b[2, -1] = 0.5
    (value,) = differ({"w": a}, {"w": b}).json["values"]
    assert (value["differing"], value["index"], value["b"]) == (1, [2, (1 << 20) - 1], 0.5)


def test_a_mapping_is_applied_to_the_first(cli: Cli, tmp_path: Path) -> None:
    q, k, v = torch.randn(8, 6), torch.randn(4, 6), torch.randn(4, 6)
    checkpoint.save({"l.0.q.weight": q, "l.0.k.weight": k, "l.0.v.weight": v, "norm": torch.ones(2)}, tmp_path / "a")
    groups = [part for g in range(2) for part in (q[4 * g : 4 * g + 4], k[2 * g : 2 * g + 2], v[2 * g : 2 * g + 2])]
    checkpoint.save({"l.0.wqkv": torch.cat(groups), "final": torch.ones(2)}, tmp_path / "b")
    rules = tmp_path / "rules"
    rules.write_text(
        "l.{i}.{q,k,v}.weight = l.{i}.wqkv : (g n d) e, (g d) e, (g d) e = (g (n + 1 + 1) d) e\nnorm = final"
    )
    assert cli("diff", tmp_path / "a", tmp_path / "b", "--mapping", rules, "--size", "d=2").code == 0
    fingerprints = [
        cli("fingerprint", tmp_path / "a", "--mapping", rules, "--size", "d=2").lines[0].split()[0],
        cli("fingerprint", tmp_path / "b").lines[0].split()[0],
    ]
    assert fingerprints[0] == fingerprints[1]
    assert cli("diff", tmp_path / "a", tmp_path / "b").code == 1
    assert cli("diff", tmp_path / "a", tmp_path / "b", "--mapping", "nonsense").code == 2
    assert cli("diff", tmp_path / "a", tmp_path / "b", "--size", "d=2").code == 2
    assert cli("diff", tmp_path / "a", tmp_path / "b", "--mapping", rules, "--size", "d").code == 2


def test_a_damaged_checkpoint_is_not_compared(cli: Cli, own_run: Path) -> None:
    file = min((own_run / "step-00000200").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[4100] ^= 1
    file.write_bytes(data)
    done = cli("diff", own_run / "step-00000100", own_run / "step-00000200", "--json")
    assert done.code == 1
    assert done.json["error"]["kind"] == "CorruptionError"


def expected_fingerprint(tensors: dict[str, torch.Tensor]) -> str:
    """As the page on the command line defines it."""
    lines = ""
    for name in sorted(tensors, key=lambda name: name.encode()):
        tensor = tensors[name]
        head = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}".replace(" ", "")
        data = f"{head}\n".encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes()
        lines += f"{hashlib.blake2b(data, digest_size=32).hexdigest()} {json.dumps(name)}\n"
    return hashlib.blake2b(lines.encode(), digest_size=32).hexdigest()


def test_the_fingerprint_is_the_one_that_is_documented(cli: Cli, step: Path) -> None:
    tensors = {f"model.{name}": tensor for name, tensor in weights(200).items()}
    tensors["model.head.weight"] = tensors["model.tok.weight"]
    expected = expected_fingerprint(tensors)
    done = cli("fingerprint", step)
    assert done.out == f"{expected}  {step}\n"
    assert cli("fingerprint", step, "--expect", expected.upper()).code == 0
    assert cli("fingerprint", step, "--expect", "0" * 64).code == 1
    assert cli("fingerprint", step, "--expect", "0" * 63).code == 2
    part = {name: tensor for name, tensor in tensors.items() if "layers.1" in name}
    assert cli("fingerprint", step, "--only", "model.layers.1", "--json").json["fingerprint"] == expected_fingerprint(
        part
    )


def test_any_change_changes_the_fingerprint(cli: Cli, tmp_path: Path) -> None:
    states: list[dict[str, Any]] = [
        {"w": torch.zeros(4)},
        {"w": torch.zeros(4), "v": torch.zeros(0)},
        {"v": torch.zeros(4)},
        {"w": torch.zeros(2, 2)},
        {"w": torch.zeros(4, dtype=torch.int32)},
        {"w": torch.tensor([0.0, 0.0, 0.0, -0.0])},
        {"w": torch.zeros(3)},
        {},
    ]
    found = set()
    for number, state in enumerate(states):
        checkpoint.save(state, tmp_path / str(number))
        found.add(cli("fingerprint", tmp_path / str(number), "--json").json["fingerprint"])
    assert len(found) == len(states)
