"""Prove every operator of PyTorch's database: count correct, wrong, possible and falling-back placements."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor

from shardwright.errors import TensorError
from shardwright.layout import Layout, Mesh, Placement
from shardwright.tensor.base.tagging import DTensorBase, no_torch_function, tag
from shardwright.tensor.base.trace import trace
from shardwright.testing.operators.database import Entry, OpSample, entry, samples_of
from shardwright.testing.operators.sample import Sample
from shardwright.testing.proof.parts import PartCall, parts_of, pattern_of
from shardwright.testing.proof.placements import combinations_of, placements_of
from shardwright.testing.proof.possible import candidates_of, possible
from shardwright.testing.proof.proving import prove
from shardwright.testing.proof.worker_processes import run_in_workers

__all__ = ["EntryProof", "Prover", "prove_all"]

Placements = tuple[Placement, ...]
Execution = Literal["local", "redistributed", "fallback", "refused"]

# Rules of these draw random numbers, which are compared between layouts in tests on ranks.
DRAWN = frozenset(
    """alpha_dropout bernoulli cauchy dropout exponential feature_alpha_dropout feature_dropout geometric log_normal
    multinomial native_dropout normal rand_like randint_like randn_like random rrelu uniform""".split()
)
# The values of these are arbitrary: only the shapes of their results are compared.
ARBITRARY = frozenset(("empty_like", "new_empty", "new_empty_strided", "empty"))
# Kernels of these write out of bounds if their inputs do not match: other strategies are not searched for.
UNSAFE = frozenset(("lu_unpack", "_segment_reduce"))


@final
@dataclass(slots=True)
class EntryProof:
    """The results for one operator of the database.

    `executions` counts the tried placements of its inputs by how the call is executed: "local" (without communication),
    "redistributed" (some inputs first), "fallback" (on full tensors), or "refused".
    """

    name: str
    samples: int = 0
    proved: int = 0  # strategies of rules
    wrong: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # possible without communication, but not covered by a rule
    executions: Counter[str] = field(default_factory=Counter)
    local: set[str] = field(default_factory=set)  # the placements executed locally, as text
    left_out: int = 0
    refused: list[str] = field(default_factory=list)  # calls it makes that torch refuses on plain tensors
    unproved: str = ""  # the reason if nothing was proved

    @property
    def falls_back(self) -> bool:
        """True if it is computed on full tensors for every sharding of its inputs."""
        return bool(self.executions["fallback"]) and not (self.executions["local"] or self.executions["redistributed"])


class _Judged(NamedTuple):
    proved: int
    wrong: tuple[str, ...]
    left_out: int
    refused: tuple[str, ...]


@final
class Prover:
    """Proves entries of the database; calls that several of them make are proved once."""

    def __init__(
        self,
        ranks: int = 3,
        max_samples: int = 6,
        max_placements: int = 60,
        search: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._ranks, self._max_samples, self._max_placements = ranks, max_samples, max_placements
        self._search = search  # for strategies that no rule has
        self._dtype = dtype  # of the samples; None: float64 if supported
        self._known: dict[Any, _Judged] = {}

    def prove(self, name: str) -> EntryProof:
        """Prove the entry of this name."""
        proof = EntryProof(name)
        all_samples = samples_of(name, self._dtype)
        samples = [sample for sample in all_samples if all(t.layout == torch.strided for t in sample.tensors)]
        proof.unproved = _reason_unproved(entry(name), samples)
        if proof.unproved:
            return proof
        samples = [sample for sample in samples if sample.tensors]
        proof.left_out += max(0, len(samples) - self._max_samples)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for sample in _spread(samples, self._max_samples):
                self._prove_sample(sample, proof)
        return proof

    def _prove_sample(self, sample: OpSample, proof: EntryProof) -> None:
        call = _caller(sample)
        proof.samples += 1
        for part in parts_of(call, sample.tensors):
            judged = self._prove_part(part)
            proof.proved += judged.proved
            proof.left_out += judged.left_out
            proof.wrong += [text for text in judged.wrong if text not in proof.wrong]
            proof.refused += [text for text in judged.refused if text not in proof.refused]
        combinations, left_out = combinations_of([placements_of(tensor, self._ranks) for tensor in sample.tensors])
        sharded = [placements for placements in combinations if any(p.is_shard() for p in placements)]
        proof.left_out += left_out
        local = set()
        for placements in _spread(sharded, self._max_placements):
            execution = _execution(call, sample, placements, self._ranks)
            proof.executions[execution] += 1
            if execution == "local":
                local.add(placements)
                proof.local.add(", ".join(map(str, placements)))
        if self._search:
            self._find_missing(sample, call, local, proof)

    def _find_missing(
        self, sample: OpSample, call: Callable[[Sequence[Tensor]], Any], local: set[Placements], proof: EntryProof
    ) -> None:
        if entry(proof.name).info.name in ARBITRARY | DRAWN | UNSAFE:
            return
        plain = Sample(sample.func, sample.args, sample.kwargs, inplace=False)
        candidates = [ins for ins in candidates_of(sample.tensors, self._ranks) if ins not in local]
        on_two = set(possible(plain, 2, candidates))  # a coincidence on three ranks is rarely one on two
        for ins, outs in possible(plain, self._ranks, candidates):
            if (ins, outs) in on_two and _execution(call, sample, ins, self._ranks) != "local":
                text = f"{', '.join(map(str, ins))} -> {', '.join(map(str, outs))}"
                if text not in proof.missing:
                    proof.missing.append(text)

    def _prove_part(self, part: PartCall) -> _Judged:
        pattern = pattern_of(part)
        judged = self._known.get(pattern)
        if judged is None:
            judged = self._known[pattern] = self._judge(part)
        return judged

    def _judge(self, part: PartCall) -> _Judged:
        if part.name in DRAWN:
            return _Judged(0, (), 0, ())
        values = part.name not in ARBITRARY
        proved, left_out, wrong = 0, 0, []
        for ranks in (self._ranks, 2):  # some faults show only with two ranks, others only with three
            try:
                proof = prove(part.func, *part.args, ranks=ranks, values=values, **part.kwargs)
            except TensorError as error:
                return _Judged(0, (), 0, (f"{part.name}: {str(error)[:200]}",))
            proved, left_out = proved + len(proof.proved), left_out + proof.left_out
            wrong += [f"{part.name} on {ranks} ranks: {verdict}" for verdict in proof.wrong]
        return _Judged(proved, tuple(wrong), left_out, ())


def prove_all(names: Iterable[str], *, workers: int = 2, timeout: float = 120.0) -> Iterator[EntryProof]:
    """Prove these entries in separate processes and yield the results as they complete.

    If a process dies while searching for strategies that no rule has, no rule is at fault: the entry is proved again
    without the search.
    """
    failed: list[str] = []
    for name, result in run_in_workers(_prove_and_search, names, workers=workers, timeout=timeout):
        if isinstance(result, EntryProof):
            yield result
        else:
            failed.append(name)
    for name, result in run_in_workers(_prove_alone, failed, workers=workers, timeout=timeout):
        if isinstance(result, EntryProof):
            yield result
        else:
            failure = "timed out" if result.code is None else f"ended its process with exit code {result.code}"
            yield EntryProof(name, wrong=[f"{name}: the proof {failure}"])


@lru_cache(maxsize=2)
def _prover(search: bool) -> Prover:
    torch.set_num_threads(1)
    return Prover(search=search)


def _prove_and_search(name: str) -> EntryProof:
    return _prover(search=True).prove(name)


def _prove_alone(name: str) -> EntryProof:
    return _prover(search=False).prove(name)


def _reason_unproved(op: Entry, samples: Sequence[OpSample]) -> str:
    if op.dtype is None:
        return "torch has no CPU kernel for it"
    if not samples:
        return "its samples are sparse"
    return "" if any(sample.tensors for sample in samples) else "it takes no tensor"


def _spread(values: Sequence[Any], limit: int) -> list[Any]:
    """Return at most `limit` of the values, evenly spaced."""
    if len(values) <= limit:
        return list(values)
    return [values[index * len(values) // limit] for index in range(limit)]


def _caller(sample: OpSample) -> Callable[[Sequence[Tensor]], Any]:
    plain = Sample(sample.func, sample.args, sample.kwargs, inplace=False)

    def call(tensors: Sequence[Tensor]) -> Any:
        args, kwargs = plain.with_each(tensors)
        return sample.func(*args, **kwargs)

    return call


def _execution(
    call: Callable[[Sequence[Tensor]], Any], sample: OpSample, placements: Placements, ranks: int
) -> Execution:
    """Determine how a call on inputs with these placements is executed, with meta tensors and without ranks."""
    mesh = Mesh((ranks,))
    with no_torch_function():
        dtensors = [
            _meta_tensor(tensor, Layout(mesh, [p], tuple(tensor.shape)))
            for tensor, p in zip(sample.tensors, placements, strict=True)
        ]
    with trace() as traced:
        try:
            call(dtensors)
        except Exception:  # noqa: BLE001  # a refusal, by us or by torch, or a call that needs values
            return "fallback" if any(operation.fell_back for operation in traced.operations) else "refused"
    if any(operation.fell_back for operation in traced.operations):
        return "fallback"
    return "redistributed" if traced.redistributions else "local"


def _meta_tensor(tensor: Tensor, layout: Layout) -> DTensorBase:
    local = torch.empty(layout.local_shape(0), dtype=tensor.dtype, device="meta")
    tagged: DTensorBase = tag(local, layout)
    return tagged
