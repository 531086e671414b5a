"""Train on 4 ranks, be killed, go on on 2 ranks with another layout: the losses are those of a run nobody stopped.

python examples/05_save_and_reshard.py     (it starts its ranks itself, with torchrun)
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile

import torch
from torch import nn
from transformer import Transformer

import shardwright as sw
from shardwright import checkpoint, comm
from shardwright.tensor.random import tracker

STEPS, SAVE_EVERY, KILLED_AT = 8, 2, 5


def shard(model: nn.Module, mesh: sw.DeviceMesh, layout: str) -> None:
    """Cuts every parameter over all ranks: by rows, or matrices by columns and vectors not at all."""

    def partition(_: str, module: nn.Module, mesh: sw.DeviceMesh) -> None:
        for key, parameter in module.named_parameters(recurse=False):
            by_columns: sw.Placement = sw.Shard(1) if parameter.ndim == 2 else sw.Replicate()
            placement = sw.Shard(0) if layout == "rows" else by_columns
            module.register_parameter(key, sw.distribute_tensor(parameter, mesh, [placement]))

    sw.distribute_module(model, mesh, partition)


def train(root: str, layout: str, killed_at: int) -> None:
    """Trains from the newest checkpoint on, if there is one. Rank 1 dies at a step, as machines do."""
    mesh = sw.init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("dp",))
    sw.manual_seed(0)
    model = Transformer(layers=1)
    shard(model, mesh, layout)
    model.reset()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    progress = {"step": 0}
    state = {
        "model": model,
        "optimizer": checkpoint.optimizer_state(model, optimizer),  # by the parameters' names
        "random": tracker,  # where dropout is: the numbers go on as if nothing had happened
        "progress": progress,
    }
    with checkpoint.CheckpointManager(root, keep_last=2, save_every=SAVE_EVERY) as manager:
        if manager.restore(state) is not None and comm.rank() == 0:
            print(f"resumed at step {progress['step']} on {comm.world().size} ranks, by {layout}", flush=True)
        while progress["step"] < STEPS:
            step = progress["step"]
            tokens = torch.randint(0, 96, (8, 33), generator=torch.Generator().manual_seed(step))
            loss = model(sw.distribute_tensor(tokens, mesh, [sw.Shard(0)], src_data_rank=None))
            loss.backward()
            value = loss.item()
            if step == killed_at and comm.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            optimizer.zero_grad()
            progress["step"] += 1
            if comm.rank() == 0:
                print(f"step {step} {value:.6f}", flush=True)
            if manager.should_save(progress["step"]):
                manager.save(progress["step"], state)


def run(ranks: int, root: str, layout: str, killed_at: int = -1) -> dict[int, float]:
    """The losses of a run on so many ranks, by step; what else it says is shown."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    given = [f"--root={root}", f"--layout={layout}", f"--killed-at={killed_at}"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("TORCHELASTIC", "MASTER_"))}
    for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK"):
        environment.pop(key, None)
    done = subprocess.run(
        [sys.executable, *launcher, __file__, *given],
        env=environment | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode and killed_at < 0:
        raise SystemExit(done.stdout + done.stderr)
    losses = {}
    for line in done.stdout.splitlines():
        if line.startswith("step "):
            losses[int(line.split()[1])] = float(line.split()[2])
        else:
            print(f"  {line}")
    return losses


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        print(f"4 ranks, by rows, {STEPS} steps, undisturbed")
        undisturbed = run(4, f"{folder}/one", "rows")
        print(f"4 ranks, by rows; a rank is killed in step {KILLED_AT}, a checkpoint is saved every {SAVE_EVERY} steps")
        before = run(4, f"{folder}/two", "rows", killed_at=KILLED_AT)
        print("2 ranks, by columns, from what was saved")
        after = run(2, f"{folder}/two", "columns")
    assert min(after) == SAVE_EVERY * (KILLED_AT // SAVE_EVERY), "it should have gone on from the newest checkpoint"
    together = before | after
    worst = max(abs(together[step] - undisturbed[step]) / undisturbed[step] for step in range(STEPS))
    assert worst < 1e-5, f"the losses differ by {worst:.1e}"
    print("losses", " ".join(f"{together[step]:.6f}" for step in range(STEPS)))
    print(f"the same as undisturbed, to {worst:.0e}")


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--root")
    options.add_argument("--layout", default="rows")
    options.add_argument("--killed-at", type=int, default=-1)
    chosen = options.parse_args()
    if chosen.root:
        train(chosen.root, chosen.layout, chosen.killed_at)
    elif os.environ.get("RANK", "0") == "0":  # under torchrun, too, one process is enough to start the others
        main()
