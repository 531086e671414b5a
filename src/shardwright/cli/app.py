"""The commands and their options. Each calls one function, which is imported only then, and shows its report."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shardwright.cli.report import Report

__all__ = ["app"]

app = typer.Typer(
    name="shardwright",
    help="Look at checkpoints, verify, compare, change and remove them.",
    epilog="Exit codes: 0 well, 1 something was found, 2 misuse, 3 unreadable.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Path = Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint: a folder or a file.")]
Names = Annotated[
    list[str] | None, typer.Argument(metavar="[NAME]...", help="Names, prefixes of names, or patterns with *.")
]
Only = Annotated[
    list[str] | None, typer.Option("--only", metavar="NAME", help="A name, a prefix, or a pattern with *; repeatable.")
]
MappingOption = Annotated[
    str | None,
    typer.Option("--mapping", metavar="RULES", help="A file of mapping rules, or the name of a shipped mapping."),
]
SizeOption = Annotated[
    list[str] | None, typer.Option("--size", metavar="AXIS=N", help="The length of an axis of the mapping; repeatable.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and change nothing.")]
Json = Annotated[bool, typer.Option("--json", help="Write JSON to stdout.")]


@app.callback(invoke_without_command=True)
def no_command(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Show the version, and exit.")] = False,
) -> None:
    """Look at checkpoints, verify, compare, change and remove them."""
    if show_version:
        typer.echo(f"shardwright {version('shardwright')}")
        raise typer.Exit(0)
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


def finish(report: Report, as_json: bool) -> None:
    """Show a report, and exit with its code."""
    from shardwright.cli.report import show_report

    show_report(report, as_json=as_json)
    raise typer.Exit(report.exit_code)


@app.command()
def show(
    path: Path,
    names: Names = None,
    patterns: Annotated[bool, typer.Option("--patterns", help="Fold names that differ in numbers only.")] = False,
    flat: Annotated[bool, typer.Option("--flat", help="Show whole names, one per line, instead of a tree.")] = False,
    as_json: Json = False,
) -> None:
    """Show the tensors and values of a checkpoint, or one tensor and who held which region of it."""
    from shardwright.cli.show import describe_checkpoint

    finish(describe_checkpoint(path, names or [], patterns=patterns, flat=flat), as_json)


@app.command("ls")
def ls(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="The folder of a run, or of checkpoints.")] = ".",
    as_json: Json = False,
) -> None:
    """List the steps of a run: size, age, metrics, and whether each is valid."""
    from shardwright.cli.ls import list_checkpoints

    finish(list_checkpoints(root), as_json)


@app.command("cat")
def cat(
    path: Path,
    name: Annotated[str, typer.Argument(metavar="NAME[SLICE]", help="A name, or a part of a tensor: 'w[0:2, :3]'.")],
    everything: Annotated[
        bool, typer.Option("--all", help="Write all values, a line for each row of the last dimension.")
    ] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Write the bytes: row-major, little-endian.")] = False,
    as_json: Json = False,
) -> None:
    """Print the values of a tensor, of a part of it, or a plain value."""
    from shardwright.cli import cat as values
    from shardwright.errors import UsageError

    if raw + everything + as_json > 1:
        raise UsageError("--all, --raw and --json exclude each other")
    if raw:
        if sys.stdout.isatty():
            raise UsageError("--raw writes bytes, which would garble the terminal: redirect the output")
        values.write_raw(path, name, sys.stdout.buffer)
    elif everything:
        values.write_rows(path, name, sys.stdout)
    else:
        finish(values.read_values(path, name, as_json=as_json), as_json)


@app.command()
def stats(
    path: Path,
    names: Names = None,
    bins: Annotated[int, typer.Option("--bins", help="Intervals of the histogram.")] = 16,
    fail_on_nan: Annotated[bool, typer.Option("--fail-on-nan", help="Exit with 1 on NaN or infinite values.")] = False,
    as_json: Json = False,
) -> None:
    """Compute minimum, maximum, mean, standard deviation, NaN and Inf counts and a histogram of tensors."""
    from shardwright.cli.stats import tensor_stats

    finish(tensor_stats(path, names or [], bins=bins, fail_on_nan=fail_on_nan), as_json)


@app.command()
def verify(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Checkpoints, or folders of runs.")],
    threads: Annotated[int, typer.Option("--threads", min=1, max=64, help="Files that are read at a time.")] = 2,
    as_json: Json = False,
) -> None:
    """Check every byte, and name the tensors and bytes that are damaged."""
    from shardwright.cli.verify import verify_checkpoints

    finish(verify_checkpoints(paths, threads=threads), as_json)


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one, of any format and layout.")],
    only: Only = None,
    rtol: Annotated[float, typer.Option("--rtol", help="Relative tolerance, of the values of B.")] = 0.0,
    atol: Annotated[float, typer.Option("--atol", help="Absolute tolerance.")] = 0.0,
    mapping: MappingOption = None,
    size: SizeOption = None,
    ignore_values: Annotated[bool, typer.Option("--ignore-values", help="Do not compare plain values.")] = False,
    ignore_dtypes: Annotated[bool, typer.Option("--ignore-dtypes", help="Compare values only, not dtypes.")] = False,
    as_json: Json = False,
) -> None:
    """Compare names, shapes, dtypes and values of two checkpoints, exactly unless there is a tolerance."""
    from shardwright.cli.diff import compare_checkpoints
    from shardwright.cli.differences import Tolerance
    from shardwright.cli.mapping_option import read_mapping

    report = compare_checkpoints(
        a,
        b,
        only=only or [],
        tolerance=Tolerance(rtol, atol),
        mapping=read_mapping(mapping, size or []),
        ignore_values=ignore_values,
        ignore_dtypes=ignore_dtypes,
    )
    finish(report, as_json)


@app.command()
def fingerprint(
    path: Path,
    only: Only = None,
    mapping: MappingOption = None,
    size: SizeOption = None,
    expect: Annotated[str | None, typer.Option("--expect", help="Exit with 1 unless it is this one.")] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List the digest of each tensor, too.")] = False,
    as_json: Json = False,
) -> None:
    """Compute a digest of all tensors that does not depend on layout, format or the order of names."""
    from shardwright.cli.fingerprint import fingerprint_checkpoint
    from shardwright.cli.mapping_option import read_mapping

    rules = read_mapping(mapping, size or [])
    report = fingerprint_checkpoint(path, only or [], mapping=rules, expected=expect, list_tensors=tensors)
    finish(report, as_json)


@app.command()
def repair(
    path: Path,
    sources: Annotated[
        list[str] | None,
        typer.Option("--from", metavar="PATH", help="A checkpoint that holds the same tensors; repeatable."),
    ] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Restore damaged blocks and files from other copies of the same tensors, bit for bit."""
    from shardwright.cli.repair import repair_checkpoint

    finish(repair_checkpoint(path, sources or [], dry_run=dry_run), as_json)


@app.command()
def merge(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Checkpoints to average, or one base.")],
    out: Annotated[str, typer.Option("--out", metavar="PATH", help="The checkpoint to write; it must not exist.")],
    weight: Annotated[
        list[float] | None, typer.Option("--weight", help="A weight for each checkpoint; repeatable.")
    ] = None,
    lora: Annotated[
        str | None, typer.Option("--lora", metavar="PATH", help="A LoRA adapter to add to the base.")
    ] = None,
    alpha: Annotated[float | None, typer.Option("--alpha", help="The alpha of the adapter.")] = None,
    as_json: Json = False,
) -> None:
    """Average checkpoints, or add a LoRA adapter to a base, and write the result as a new checkpoint."""
    from shardwright.cli.merge import add_lora, average
    from shardwright.errors import UsageError

    if lora is None:
        if alpha is not None:
            raise UsageError("--alpha belongs to --lora")
        finish(average(paths, out, weight or []), as_json)
        return
    if len(paths) != 1 or weight:
        raise UsageError("--lora needs one base, and takes no weights")
    finish(add_lora(paths[0], lora, out, alpha=alpha), as_json)


@app.command()
def rm(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Checkpoints to remove.")],
    force: Annotated[bool, typer.Option("--force", help="Remove even the newest valid step of a run.")] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Remove checkpoints; the newest valid step of a run only with --force."""
    from shardwright.cli.remove import remove_checkpoints

    finish(remove_checkpoints(paths, force=force, dry_run=dry_run), as_json)


@app.command()
def gc(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="The folder of a run.")],
    keep_last: Annotated[int | None, typer.Option("--keep-last", min=1, help="Keep the last N steps.")] = None,
    keep_every: Annotated[int | None, typer.Option("--keep-every", min=1, help="Keep multiples of K.")] = None,
    keep_best: Annotated[
        str | None, typer.Option("--keep-best", metavar="METRIC:N:MODE", help="Keep the best, such as loss:3:min.")
    ] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Remove the steps of a run that no rule keeps, and what failed saves left behind."""
    from shardwright.cli.remove import collect_garbage, parse_keep_best

    best = parse_keep_best(keep_best)
    report = collect_garbage(root, keep_last=keep_last, keep_every=keep_every, keep_best=best, dry_run=dry_run)
    finish(report, as_json)


@app.command()
def explain(
    path: Path,
    mesh: Annotated[str, typer.Option("--mesh", help="The mesh of ranks, such as dp=8,tp=4.")],
    plan: Annotated[
        list[str] | None,
        typer.Option("--plan", metavar="RULE", help="'*.wq.weight=tp:0', or a file of such lines; repeatable."),
    ] = None,
    only: Only = None,
    ranks_per_host: Annotated[int, typer.Option("--ranks-per-host", min=1, help="Ranks that share reads.")] = 8,
    as_json: Json = False,
) -> None:
    """Explain what a load on a mesh of ranks would read and hold, without the ranks."""
    from shardwright.cli.explain import explain_load, parse_mesh, parse_plan

    ranks = parse_mesh(mesh)
    rules = parse_plan(plan or [], ranks)
    finish(explain_load(path, ranks, rules, only=only or [], ranks_per_host=ranks_per_host), as_json)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="FROM", help="A checkpoint of any format.")],
    output: Annotated[str, typer.Argument(metavar="TO", help="What to write; it must not exist.")],
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="hf, dcp, torch or shardwright.")],
    mapping: MappingOption = None,
    size: SizeOption = None,
    only: Only = None,
    cast: Annotated[
        list[str] | None,
        typer.Option("--cast", metavar="DTYPE", help="A dtype for floats, or PATTERN=DTYPE; repeatable."),
    ] = None,
    like: Annotated[
        str | None, typer.Option("--like", metavar="FOLDER", help="Copy its other files, and check names and shapes.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option("--max-shard-size", help="The largest file of hf.")] = "5GB",
    as_json: Json = False,
) -> None:
    """Write a checkpoint in another format."""
    from shardwright.cli.convert import convert_checkpoint
    from shardwright.cli.mapping_option import read_mapping

    report = convert_checkpoint(
        source,
        output,
        to,
        mapping=read_mapping(mapping, size or []),
        only=only or [],
        cast_to=cast or [],
        like=like,
        max_shard_size=max_shard_size,
    )
    finish(report, as_json)
