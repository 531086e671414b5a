"""Expert parallelism: models with experts on different ranks train as on one rank, with the documented collectives."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import shardwright as sw
from shardwright import comm
from shardwright.errors import ArgumentTypeError, PlanError, UnsupportedError
from shardwright.parallel.experts.products import grouped_linear
from shardwright.parallel.experts.route import route
from shardwright.testing import run_ranks, same_as_one_rank

hf = pytest.importorskip("transformers")

FULL = os.environ.get("SHARDWRIGHT_BUDGET") == "full"
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 96}
EXPERTS, WIDTH = 5, 4


def mixtral() -> Any:
    config = hf.MixtralConfig(**SMALL, num_local_experts=EXPERTS, output_router_logits=True)
    return hf.MixtralForCausalLM(config).train()


def qwen3() -> Any:
    moe = {"num_experts": EXPERTS, "moe_intermediate_size": 12, "num_experts_per_tok": 2, "head_dim": 4}
    return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**SMALL, **moe)).train()


def gpt_oss() -> Any:
    """Experts with biases and transposed weights."""
    return hf.GptOssForCausalLM(hf.GptOssConfig(**SMALL, num_local_experts=EXPERTS, head_dim=4)).train()


def batch(step: int, samples: int = 3) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 96, (samples, 7), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


CASES: list[tuple[Any, dict[str, int]]] = [(mixtral, {"ep": 4})]  # a rank without samples, and one without experts
if FULL:
    meshes: list[dict[str, int]] = [{"ep": 2}, {"dp": 2, "ep": 2}, {"replicate": 2, "ep": 2}, {"ep": 2, "tp": 2}]
    meshes += [{"cp": 2, "ep": 2}, {"dp": 2, "ep": 2, "tp": 2}]
    CASES += [(kind, sizes) for kind in (mixtral, qwen3) for sizes in meshes] + [(gpt_oss, {"ep": 2, "tp": 2})]
else:
    CASES += [(qwen3, {"dp": 2, "ep": 2})]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("model", "sizes"), CASES)
def test_a_model_trains_as_on_one_rank(model: Any, sizes: dict[str, int]) -> None:
    same_as_one_rank(model, batch, mesh=sizes, dtype=torch.float32, tolerance=2e-5, timeout=350.0)


@pytest.mark.skipif(not FULL, reason="SHARDWRIGHT_BUDGET=full")
@pytest.mark.timeout(400)
def test_recomputed_experts_give_the_same_gradients() -> None:
    same_as_one_rank(
        mixtral,
        batch,
        lambda model, mesh: sw.parallelize(model, mesh, checkpoint=True),
        mesh={"dp": 2, "ep": 2},
        dtype=torch.float32,
        tolerance=2e-5,
        timeout=350.0,
    )


def routed(choices: str) -> Any:
    """Return what differs from computing all tokens with all experts on one rank, and the transfers."""
    group = comm.world()
    generator = torch.Generator().manual_seed(0)
    make = {"dtype": torch.float64, "generator": generator}
    weight = torch.randn(EXPERTS, WIDTH, WIDTH, **make).requires_grad_()
    tokens = torch.randn(7, WIDTH, **make).requires_grad_()
    factors = torch.rand(7, 2, **make).requires_grad_()
    chosen = torch.randint(0, EXPERTS, (7, 2), generator=generator)
    if choices == "one expert":
        chosen.fill_(4)
    expected = (
        torch.einsum("tki,tkoi->tko", tokens[:, None].expand(-1, 2, -1), weight[chosen]) * factors[..., None]
    ).sum(1)
    gradients = torch.autograd.grad(expected.square().sum(), (tokens, factors, weight))
    samples = [range(4), range(4, 7), range(7, 7)][group.rank]  # the last rank has no tokens
    experts = [range(2), range(2, 2), range(2, EXPERTS)]  # the second one no experts
    rows, own = slice(samples.start, samples.stop), experts[group.rank]
    leaves = [tokens[rows], factors[rows], weight[own.start : own.stop]]
    local = [each.detach().clone().requires_grad_() for each in leaves]
    transfers: list[comm.Transfer] = []
    with comm.listen(transfers.append):
        found = route(
            local[0], chosen[rows], local[1], experts, lambda x, counts: grouped_linear(x, counts, local[2]), group
        )
        found.square().sum().backward()
    wanted = [gradients[0][rows], gradients[1][rows], gradients[2][own.start : own.stop]]
    same = [
        torch.allclose(found, expected[rows]),
        *(torch.allclose(a.grad, b) for a, b in zip(local, wanted, strict=True)),
    ]
    arriving = int(((chosen >= own.start) & (chosen < own.stop)).sum()) if own else 0
    mine = int(((chosen[rows] >= own.start) & (chosen[rows] < own.stop)).sum()) if own else 0
    row = WIDTH * 8
    there, back = (arriving - mine) * row, (2 * len(samples) - mine) * row
    received = [each.received for each in transfers]
    return same, received == [2 * len(own) * 8, there, back, there, back], {each.kind for each in transfers}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("choices", ["any", "one expert"])
def test_tokens_go_to_their_experts_and_back(choices: str) -> None:
    for same, as_documented, kinds in run_ranks(3, routed, choices, timeout=150.0):
        assert same == [True] * 4
        assert as_documented
        assert kinds == {"all_to_all"}


@pytest.mark.timeout(200)
def test_experts_are_distributed_and_dense_layers_are_not_gathered_with_them() -> None:
    def work() -> Any:
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        model = sw.parallelize(mixtral(), mesh, experts=sw.ExpertParallel())
        kinds: list[comm.Transfer] = []
        for _ in range(2):
            kinds.clear()
            with comm.listen(kinds.append):
                model(**sw.shard_batch(batch(0, 4), mesh)).loss.backward()
        layer = model.model.layers[0]
        shown = [str(each.sharding) for each in (layer.mlp.experts.gate_up_proj, layer.self_attn.q_proj.weight)]
        gathered = sorted({each.ranks for each in kinds if each.kind == "all_gather"}, key=len)
        return shown, len([each for each in kinds if each.kind == "all_to_all"]), gathered

    for rank, (shown, exchanges, gathered) in enumerate(run_ranks(4, work, timeout=150.0)):
        assert shown == ["[5, 48, 16] (dp: S(1), ep: S(0))", "[16, 16] (dp: S(0), ep: S(0))"]
        assert exchanges == 2 * 5  # in each of 2 layers: numbers, tokens and results, then two gradients
        assert gathered[0] == (rank % 2, rank % 2 + 2)  # experts over dp alone
        assert gathered[-1] == (0, 1, 2, 3)


def test_wrong_arguments_are_found_before_anything_changes() -> None:
    def work() -> list[Any]:
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        flat = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = mixtral()
        found = []
        for call in (
            lambda: sw.parallelize(model, flat, experts=sw.ExpertParallel()),
            lambda: sw.parallelize(model, mesh, experts=True),
            lambda: sw.parallelize(torch.nn.Linear(2, 2), mesh),
            lambda: sw.parallelize(model, mesh, {"**.experts": {"ep": sw.Shard(1)}}),
            lambda: sw.predict(model, {"ep": 2}, batch=batch(0)),
        ):
            with pytest.raises(Exception) as caught:
                call()
            found.append((caught.type, str(caught.value)))
        assert not any(isinstance(each, sw.DTensor) for each in model.parameters())
        return found

    for found in run_ranks(2, work, timeout=100.0):
        assert [kind for kind, _ in found] == [PlanError, ArgumentTypeError, PlanError, PlanError, UnsupportedError]
        assert "no dimension named 'ep'" in found[0][1]
        assert "has no experts" in found[2][1]
        assert "which ep distributes" in found[3][1]
        assert "depends on values" in found[4][1]
