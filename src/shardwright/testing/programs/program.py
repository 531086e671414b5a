"""`Program`: lines of torch code that run both on plain tensors and on DTensors."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import lru_cache
from math import prod

__all__ = ["Program", "defined_names", "used_names"]


@dataclass(frozen=True, slots=True)
class Program:
    """The lines of a program, the mesh that its DTensors are on, and the seed that it was generated from.

    A line is one statement. It may use torch, `F`, `nn` and the names in `testing.programs.draft.namespace`.

    >>> program = Program(("a = leaf([1, 2], (2,), torch.float32, [Shard(0)])", "b = a * 2"), mesh=(2,))
    >>> program.ranks
    2
    """

    steps: tuple[str, ...]
    mesh: tuple[int, ...]
    seed: int | None = None

    @property
    def ranks(self) -> int:
        """The number of ranks that the program runs on."""
        return prod(self.mesh)

    @property
    def script(self) -> str:
        """A file that runs the program on plain tensors and on DTensors side by side; run it with torchrun.

        >>> print(Program(("a = leaf([1, 2], (2,), torch.float32, [Shard(0)])",), mesh=(2,)).script)
        # torchrun --standalone --nproc-per-node 2 FILE
        from shardwright.testing.programs import Program, replay
        <BLANKLINE>
        STEPS = (
            "a = leaf([1, 2], (2,), torch.float32, [Shard(0)])",
        )
        replay(Program(STEPS, mesh=(2,)))
        """
        lines = "\n".join(f"    {_quoted(step)}," for step in self.steps)
        seed = "" if self.seed is None else f", seed={self.seed}"
        return (
            f"# torchrun --standalone --nproc-per-node {self.ranks} FILE\n"
            "from shardwright.testing.programs import Program, replay\n\n"
            f"STEPS = (\n{lines}\n)\n"
            f"replay(Program(STEPS, mesh={self.mesh}{seed}))"
        )


def _quoted(step: str) -> str:
    return f'"{step}"' if '"' not in step and "\\" not in step and "\n" not in step else repr(step)


@lru_cache(maxsize=4096)
def defined_names(step: str) -> frozenset[str]:
    """Return the names that a step assigns.

    >>> sorted(defined_names("a, b = x.split(2)"))
    ['a', 'b']
    """
    return _names(step, ast.Store)


@lru_cache(maxsize=4096)
def used_names(step: str) -> frozenset[str]:
    """Return the names that a step reads or deletes, without those of its own lambdas.

    >>> sorted(used_names("a += f(lambda y: y * b)"))
    ['a', 'b', 'f']
    """
    tree = ast.parse(step)
    lambda_names = {arg.arg for node in ast.walk(tree) if isinstance(node, ast.Lambda) for arg in node.args.args}
    augmented = {
        node.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)
    }
    return (_names(step, ast.Load) | _names(step, ast.Del) | augmented) - lambda_names


def _names(step: str, context: type[ast.expr_context]) -> frozenset[str]:
    return frozenset(
        node.id for node in ast.walk(ast.parse(step)) if isinstance(node, ast.Name) and isinstance(node.ctx, context)
    )
