"""`python -m shardwright.testing.proof`: prove the rules of all operators of torch's database, or of some.

    python -m shardwright.testing.proof                       all operators; print wrong strategies and a summary
    python -m shardwright.testing.proof --op cumsum --op sort these operators, with all results
    python -m shardwright.testing.proof --page FILE           write the page of the documentation

The exit status is 1 if any rule is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from shardwright.testing.operators.database import entries
from shardwright.testing.proof.everything import EntryProof, prove_all
from shardwright.testing.proof.page import page

__all__: list[str] = []


def main(arguments: list[str]) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m shardwright.testing.proof", description=__doc__.partition(":")[0])
    parser.add_argument("--op", action="append", metavar="NAME", help="an operator, as torch's database names it")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the page of all operators here")
    parser.add_argument("--workers", type=int, default=2, help="number of processes (default: 2)")
    options = parser.parse_args(arguments)
    all_names = [entry.name for entry in entries()]
    unknown = sorted(set(options.op or ()) - set(all_names))
    if unknown:
        parser.error(f"no operator of torch's database is named {', '.join(unknown)}")
    names = list(dict.fromkeys(options.op or all_names))
    console = Console(stderr=True)
    began = time.monotonic()
    proofs: list[EntryProof] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("proving", total=len(names))
        for proof in prove_all(names, workers=options.workers):
            proofs.append(proof)
            progress.advance(task)
            _print_proof(progress.console, proof, everything=bool(options.op))
    wrong_count = sum(len(proof.wrong) for proof in proofs)
    missing = sum(bool(proof.missing) for proof in proofs)
    fallbacks = sum(proof.falls_back for proof in proofs)
    console.print(
        f"{len(proofs)} operators: {sum(proof.proved for proof in proofs):,} strategies proved, {wrong_count} wrong; "
        f"{missing} lack a strategy that would be correct, {fallbacks} always fall back to full tensors; "
        f"{sum(p.left_out for p in proofs):,} combinations of placements were not tried; "
        f"{time.monotonic() - began:.0f} s",
        highlight=False,
    )
    if options.page is not None:
        options.page.write_text(page(proofs))
    return 1 if wrong_count else 0


def _print_proof(console: Console, proof: EntryProof, everything: bool) -> None:
    """Print the wrong strategies of an operator and, with `everything`, all results of its proof."""
    for text in proof.wrong:
        console.print(f"WRONG {text}", highlight=False, markup=False)
    if not everything:
        return
    counts = ", ".join(f"{count} {execution}" for execution, count in sorted(proof.executions.items()))
    console.print(
        f"{proof.name}: {proof.proved} strategies proved in {proof.samples} samples; placements: {counts or 'none'}",
        highlight=False,
        markup=False,
    )
    for text in proof.missing:
        console.print(f"  correct, but no rule offers it: {text}", highlight=False, markup=False)
    for text in proof.refused:
        console.print(f"  not proved, because torch refuses it: {text}", highlight=False, markup=False)
    if proof.unproved:
        console.print(f"  not proved: {proof.unproved}", highlight=False, markup=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
