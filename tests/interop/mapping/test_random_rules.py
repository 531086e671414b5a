"""Random rules: the mapping, its inverse and every region agree with numpy's computation on whole arrays."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

import shardwright as sw
from shardwright.interop.mapping import BoundMapping, MappedPiece
from tests.interop.mapping.random_rules import Array, draw_rule

BLOCKS = 10
PER_BLOCK = 100 if os.environ.get("SHARDWRIGHT_BUDGET") == "full" else 10


def as_tensors(arrays: dict[str, Array]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.array(array, order="C")) for name, array in arrays.items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, Array]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert list(found[name].shape) == list(array.shape)
        assert np.array_equal(found[name].numpy(), array), name


def random_region(rng: random.Random, shape: tuple[int, ...]) -> sw.Region:
    ends = [sorted(rng.randint(0, size) for _ in range(2)) for size in shape]
    return sw.Region([low for low, _ in ends], [high - low for low, high in ends])


def read_region(
    bound: BoundMapping, name: str, region: sw.Region, sources: dict[str, torch.Tensor], split: str
) -> torch.Tensor:
    """Assemble a region from its pieces, copying only the source region of each."""
    made = torch.full(region.size, -1, dtype=torch.int64)
    times = torch.zeros(region.size, dtype=torch.int64)
    for piece in bound.pieces(name, region):
        piece.target.view(times, region).add_(1)
        if not isinstance(piece, MappedPiece):
            piece.fill(made, region)
            continue
        parts = {"": [piece], "dense": list(piece.dense()), "limited": list(piece.limited(3))}[split]
        for part in parts:
            assert part.source.is_dense or split != "dense"
            assert part.source.region.volume <= 3 or split != "limited"
            read = sources[part.name][part.source.region.slices()].clone()
            part.copy(read, made, part.source.region, region)
    assert bool((times == 1).all()), "the pieces do not tile the region"
    return made


@pytest.mark.parametrize("block", range(BLOCKS))
def test_random_rules_their_inverses_and_all_regions_equal_the_whole_tensor_computation(block: int) -> None:
    for number in range(PER_BLOCK):
        seed = block * 1000 + number
        rng = random.Random(seed)
        rule = draw_rule(rng)
        context = f"seed {seed}: {rule.text} with {rule.sizes}"
        try:
            mapping = sw.Mapping(rule.text, **rule.sizes)
            arrays = rule.sources()
            forward = rule.expected(arrays)
            assert_equal(mapping.apply(as_tensors(arrays)), forward)
            back = mapping.inverse().apply(as_tensors(forward))
            assert_equal(back, rule.expected(forward, backwards=True))
            assert mapping.inverse().inverse() == mapping
            for direction, sources, wanted in (
                (mapping, as_tensors(arrays), forward),
                (mapping.inverse(), as_tensors(forward), rule.expected(forward, backwards=True)),
            ):
                bound = direction.bind(sources)
                for name, array in wanted.items():
                    for split in ("", "dense", "limited"):
                        region = random_region(rng, array.shape)
                        made = read_region(bound, name, region, sources, split)
                        assert np.array_equal(made.numpy(), array[region.slices()]), (name, region)
        except Exception as error:
            raise AssertionError(context) from error


def test_without_padding_the_inverse_gives_back_every_tensor() -> None:
    checked = 0
    for seed in range(200):
        rule = draw_rule(random.Random(seed))
        if any(name.startswith("pad") for name in rule.sizes):
            continue
        mapping = sw.Mapping(rule.text, **rule.sizes)
        arrays = rule.sources()
        assert_equal(mapping.inverse().apply(mapping.apply(as_tensors(arrays))), arrays)
        checked += 1
    assert checked > 80


def test_sizes_that_are_inferred_are_the_sizes_that_were_drawn() -> None:
    inferred = 0
    for seed in range(200):
        rule = draw_rule(random.Random(seed))
        arrays = rule.sources()
        shapes = {name: array.shape for name, array in rule.expected(arrays).items()}
        try:
            bound = sw.Mapping(rule.text).bind({name: array.shape for name, array in arrays.items()}, shapes)
        except sw.errors.MappingError as error:
            assert "cannot be inferred" in str(error) or "missing" in str(error)  # noqa: PT017  some are ambiguous
            continue
        inferred += 1
        assert bound.targets == shapes
    assert inferred > 50


def test_random_rules_load_from_a_checkpoint_into_strided_targets_and_slices(tmp_path: Path) -> None:
    """`load` and `open` read the pieces of random rules from files, through tiny buffers and direct views alike."""
    for seed in range(5000, 5000 + (300 if PER_BLOCK == 100 else 30)):
        rng = random.Random(seed)
        rule = draw_rule(rng)
        arrays = rule.sources()
        wanted = rule.expected(arrays)
        mapping = sw.Mapping(rule.text, **rule.sizes)
        path = tmp_path / str(seed)
        sw.checkpoint.save(as_tensors(arrays), path)
        state = {
            name: torch.full(array.shape[::-1], -1).permute(tuple(range(array.ndim))[::-1])
            for name, array in wanted.items()
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("shardwright.checkpoint.reading.mapped_reads._MIN_REGION", rng.choice([8, 64, 1 << 20]))
            sw.checkpoint.load(state, path, mapping=mapping)
            assert_equal(state, wanted)
            with sw.checkpoint.open(path, mapping=mapping) as opened:
                for name, array in wanted.items():
                    region = random_region(rng, array.shape)
                    read = opened[name][region.slices()]
                    assert np.array_equal(read.numpy(), array[region.slices()]), (seed, rule.text, region)
