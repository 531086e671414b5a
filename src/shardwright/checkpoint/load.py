"""Load: flatten the target, match it with what is stored, check everything on all ranks, read, and fill."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple, final

import msgspec

from shardwright import comm
from shardwright.checkpoint.format.tensor_table import TensorTable
from shardwright.checkpoint.format.tree import StoredEntry, stored_entries
from shardwright.checkpoint.reading.collective_read import CollectiveRead, ReadSummary
from shardwright.checkpoint.reading.contents import format_of
from shardwright.checkpoint.reading.current import Current
from shardwright.checkpoint.reading.fill import fill
from shardwright.checkpoint.reading.mapped_entries import MappedEntries, map_entries
from shardwright.checkpoint.reading.mapped_reads import MappedReads
from shardwright.checkpoint.reading.match import Match, leaf_nodes, match_state, rename_entries, unclaimed_rank_values
from shardwright.checkpoint.reading.mismatch import Mismatches, mismatches_of, raise_mismatches
from shardwright.checkpoint.reading.missing_state import StateCompleter, create_missing
from shardwright.checkpoint.reading.open_files import OpenFiles
from shardwright.checkpoint.reading.request import LoadRequest
from shardwright.checkpoint.reading.torch_optimizers import optimizer_names, options_by_parameter
from shardwright.checkpoint.state.flatten import (
    CodecNode,
    ContainerNode,
    FlatState,
    Node,
    ObjectNode,
    PerRankNode,
    flatten,
)
from shardwright.checkpoint.state.merge_ranks import flatten_nested_shards

__all__ = ["LoadOperation"]


class _RankReport(NamedTuple):
    """What each rank reports about its target. The last three fields are set once the target is matched."""

    creates_state: bool  # objects lack state that the checkpoint has: see `StateCompleter`
    is_nested: bool  # a ShardedTensor has shards that are sharded themselves
    is_matched: bool = False
    mismatches: Mismatches | None = None
    reads: ReadSummary | None = None
    sets_values: bool = False  # sets plain values or object states, which another load cannot undo


@final
class LoadOperation:
    """One load into `state` on this rank, from the checkpoint `current`."""

    _optimizers: list[str]  # names of those that are loaded from another format
    _flat: FlatState
    _completer: StateCompleter
    _stored: list[StoredEntry]
    _faults: list[str]  # of names
    _table: TensorTable
    _mapped: MappedEntries | None
    _match: Match
    _read: CollectiveRead

    def __init__(self, request: LoadRequest, state: Any, current: Current) -> None:
        self._request, self._state, self._current = request, state, current
        self._group = request.group

    def run(self) -> Any:
        """Fill the state and return it. Collective; nothing is changed before everything has been checked."""
        self._optimizers = self._find_optimizers()
        with ExitStack() as opened:
            files = OpenFiles(self._current.storage, self._current.manifest, opened)
            reports = self._check(files)
            raise_mismatches(
                [report.mismatches for report in reports], self._match, self._flat, self._stored, self._group
            )
            reads = [report.reads for report in reports if report.reads is not None]
            sets_values = any(report.sets_values for report in reports)

            def fill_state() -> Any:
                return fill(self._flat, self._match)

            # What another load cannot undo waits until every rank has read its tensors.
            filled = self._read.run(reads, (lambda: None) if sets_values else fill_state)
        return comm.agree(fill_state, what="load: filling the state", group=self._group) if sets_values else filled

    def _find_optimizers(self) -> list[str]:
        """Return the names of optimizers, on any rank, that are loaded from another format. Collective if it is one."""
        if format_of(self._current.manifest) == "shardwright":
            return []
        _, gathered = comm.agree(
            lambda: (None, msgspec.json.encode(optimizer_names(self._state))),
            what="load: finding optimizers",
            group=self._group,
            gather=True,
        )
        return sorted({name for names in gathered for name in msgspec.json.decode(names, type=list[str])})

    def _check(self, files: OpenFiles) -> list[_RankReport]:
        """Match the checkpoint against the target on every rank.

        It takes one round of messages, unless state must be created or nested shards flattened.
        """

        def check() -> tuple[None, bytes]:
            self._flatten_target()
            report = _RankReport(bool(self._completer.created) and self._group.size > 1, self._flat.is_nested)
            if not (report.creates_state or report.is_nested):  # else ranks must first report what they have
                report = self._match_target(files, report)
            return None, msgspec.json.encode(report)

        reports = self._agree(check, "load: checking")
        if all(rank_report.is_matched for rank_report in reports):
            return reports
        if any(rank_report.creates_state for rank_report in reports):
            self._create_missing()
        if any(rank_report.is_nested for rank_report in reports):
            flatten_nested_shards(self._flat, self._group)

        def check_again() -> tuple[None, bytes]:
            return None, msgspec.json.encode(self._match_target(files, _RankReport(False, False)))

        return self._agree(check_again, "load: checking what was created")

    def _agree(self, check: Callable[[], tuple[None, bytes]], what: str) -> list[_RankReport]:
        _, gathered = comm.agree(check, what=what, group=self._group, gather=True)
        return [msgspec.json.decode(data, type=_RankReport) for data in gathered]

    def _flatten_target(self) -> None:
        group, request, manifest = self._group, self._request, self._current.manifest
        stored = options_by_parameter(stored_entries(manifest.tree, group.global_rank), self._optimizers)
        self._table, self._mapped = manifest.tensors, None
        if request.mapping is None:
            self._stored, self._faults = rename_entries(stored, request.rename)
        else:
            shapes = _shapes(flatten(self._state, group, request.codecs))
            self._mapped = map_entries(stored, manifest.tensors, request.mapping, shapes)
            self._stored, self._table, self._faults = self._mapped.entries, self._mapped.table, []
        if request.strict and request.only is None:
            self._faults += unclaimed_rank_values(manifest.tree, group.ranks)
        self._completer = StateCompleter(self._stored, self._table, request.only)
        self._flat = flatten(self._state, group, request.codecs, self._completer)

    def _create_missing(self) -> None:
        """Keep the state that was created only on the ranks that own it."""
        self._flat, self._completer = create_missing(
            self._flat,
            self._completer,
            self._stored,
            self._group,
            lambda completer: flatten(self._state, self._group, self._request.codecs, completer),
        )

    def _match_target(self, files: OpenFiles, report: _RankReport) -> _RankReport:
        """Match stored entries to targets; open the files if this rank reads alone. Return the completed report."""
        self._match = match_state(
            self._flat,
            self._stored,
            self._table,
            self._request,
            faults=self._faults,
            created=self._completer.new_values,
        )
        match, mapped = self._match, self._mapped
        has_faults = bool(match.faults or match.missing)  # raised on all ranks: nothing is read, or planned for reading
        made = [each for each in match.tensors if mapped is not None and mapped.is_made(each.number)]
        stored = [each for each in match.tensors if mapped is None or not mapped.is_made(each.number)]
        reads_of_made = MappedReads() if has_faults else MappedReads(made, mapped)
        self._read = CollectiveRead(files, stored, self._request, self._current.hosts, reads_of_made)
        sets_values = self._group.size > 1 and bool(match.values or match.emptied or _has_objects(self._flat.root))
        reads = None if has_faults else self._read.prepare()
        return report._replace(
            is_matched=True, mismatches=mismatches_of(match, self._stored), reads=reads, sets_values=sets_values
        )


def _shapes(flat: FlatState) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a state, by name."""
    return {node.name: leaf.sharding.shape for node, leaf, _ in leaf_nodes(flat) if leaf is not None}


def _has_objects(node: Node) -> bool:
    """Return True if any value is passed to an object or a codec, rather than read in place."""
    match node:
        case ObjectNode() | CodecNode():
            return True
        case ContainerNode():
            return any(map(_has_objects, node.children))
        case PerRankNode():
            return _has_objects(node.flat.root)
    return False
