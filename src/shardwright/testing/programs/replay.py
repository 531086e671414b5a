"""Run one program under torchrun and print the result of every step."""

from __future__ import annotations

import os
import sys

import torch.distributed as dist

from shardwright import comm
from shardwright.testing.programs.execute import run_program
from shardwright.testing.programs.program import Program
from shardwright.testing.programs.witness import forget_witness

__all__ = ["replay"]


def replay(program: Program) -> None:
    """Run a program as one of the ranks that torchrun started; rank 0 prints the result of each step.

    Without torchrun it runs on one rank, if the program is for one rank.

    >>> replay(Program(("a = leaf([1, 2], (2,), torch.float32, [Shard(0)])", "a += 1"), mesh=(1,)))
    right         a = leaf([1, 2], (2,), torch.float32, [Shard(0)])
    right         a += 1
    right         (all values are read)
    """
    joined = not dist.is_initialized() and "RANK" in os.environ
    if joined:
        dist.init_process_group("gloo")
    course = run_program(program)
    if not dist.is_initialized() or dist.get_rank() == 0:
        steps = [*program.steps, "(all values are read)"]
        lines = [f"{result:<13} {step}" for result, step in zip(course.results, steps, strict=False)]
        lines += [f"refused: {refusal}" for refusal in course.refusals]
        sys.stdout.write("\n".join([*lines, course.detail]).rstrip("\n") + "\n")
    if joined:
        forget_witness()
        comm.leave()
