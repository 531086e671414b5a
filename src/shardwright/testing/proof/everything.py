"""Every operator of PyTorch's database, proved: what is right, what is wrong, what is possible, what falls back."""

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
from shardwright.testing.proof.apart import apart
from shardwright.testing.proof.parts import PartCall, parts_of, pattern_of
from shardwright.testing.proof.placing import combinations_of, placements_of
from shardwright.testing.proof.possible import candidates_of, possible
from shardwright.testing.proof.proving import prove

__all__ = ["EntryProof", "Prover", "prove_all"]

Placements = tuple[Placement, ...]
Course = Literal["free", "moves", "whole", "refused"]

# Rules of these draw numbers: theirs are compared from layout to layout, on ranks.
DRAWN = frozenset(
    """alpha_dropout bernoulli cauchy dropout exponential feature_alpha_dropout feature_dropout geometric log_normal
    multinomial native_dropout normal rand_like randint_like randn_like random rrelu uniform""".split()
)
# Rules of these leave numbers as they are: the shapes of their results are all there is to prove.
ARBITRARY = frozenset(("empty_like", "new_empty", "new_empty_strided", "empty"))
# Kernels of these write out of bounds when they are handed parts that do not fit: no other ways are looked for.
UNSAFE = frozenset(("lu_unpack", "_segment_reduce"))


@final
@dataclass(slots=True)
class EntryProof:
    """What was found of one operator of the database.

    `courses` counts the placements of its inputs, some of them cut, by what becomes of the call: computed where
    everything lies ("free"), after moving some of it ("moves"), on whole tensors ("whole"), or "refused".
    """

    name: str
    samples: int = 0
    proved: int = 0  # strategies of rules
    wrong: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # possible without communication, and no rule has it
    courses: Counter[str] = field(default_factory=Counter)
    free: set[str] = field(default_factory=set)  # the free ones, in words
    left_out: int = 0
    refused: list[str] = field(default_factory=list)  # calls it comes to that torch refuses on plain tensors
    unproved: str = ""  # why nothing was proved, if so

    @property
    def falls_back(self) -> bool:
        """Whether it is computed on whole tensors however its inputs are cut."""
        return bool(self.courses["whole"]) and not (self.courses["free"] or self.courses["moves"])


class _Judged(NamedTuple):
    proved: int
    wrong: tuple[str, ...]
    left_out: int
    refused: tuple[str, ...]


@final
class Prover:
    """Proves entries of the database; what two of them are both made of is proved once."""

    def __init__(
        self,
        ranks: int = 3,
        most_samples: int = 6,
        most_placements: int = 60,
        search: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._ranks, self._most_samples, self._most_placements = ranks, most_samples, most_placements
        self._search = search  # for strategies that no rule has
        self._dtype = dtype  # of the samples; None: float64 where there are such
        self._known: dict[Any, _Judged] = {}

    def prove(self, name: str) -> EntryProof:
        """What is found of the entry of this name."""
        one = entry(name)
        found = EntryProof(name)
        known = samples_of(name, self._dtype)
        samples = [sample for sample in known if all(t.layout == torch.strided for t in sample.tensors)]
        found.unproved = _without_proof(one, samples)
        if found.unproved:
            return found
        samples = [sample for sample in samples if sample.tensors]
        found.left_out += max(0, len(samples) - self._most_samples)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for sample in _spread(samples, self._most_samples):
                self._prove_sample(sample, found)
        return found

    def _prove_sample(self, sample: OpSample, found: EntryProof) -> None:
        call = _caller(sample)
        found.samples += 1
        for part in parts_of(call, sample.tensors):
            judged = self._prove_part(part)
            found.proved += judged.proved
            found.left_out += judged.left_out
            found.wrong += [text for text in judged.wrong if text not in found.wrong]
            found.refused += [text for text in judged.refused if text not in found.refused]
        combinations, left_out = combinations_of([placements_of(tensor, self._ranks) for tensor in sample.tensors])
        combinations = _spread(
            [each for each in combinations if any(p.is_shard() for p in each)], self._most_placements
        )
        found.left_out += left_out
        free = set()
        for placements in combinations:
            course = _course(call, sample, placements, self._ranks)
            found.courses[course] += 1
            if course == "free":
                free.add(placements)
                found.free.add(", ".join(map(str, placements)))
        if self._search:
            self._find_missing(sample, call, free, found)

    def _find_missing(
        self, sample: OpSample, call: Callable[[Sequence[Tensor]], Any], free: set[Placements], found: EntryProof
    ) -> None:
        if entry(found.name).info.name in ARBITRARY | DRAWN | UNSAFE:
            return
        plain = Sample(sample.func, sample.args, sample.kwargs, inplace=False)
        candidates = [each for each in candidates_of(sample.tensors, self._ranks) if each not in free]
        on_two = set(possible(plain, 2, candidates))  # what is right on three ranks by accident is seldom so on two
        for ins, outs in possible(plain, self._ranks, candidates):
            if (ins, outs) in on_two and _course(call, sample, ins, self._ranks) != "free":
                text = f"{', '.join(map(str, ins))} -> {', '.join(map(str, outs))}"
                if text not in found.missing:
                    found.missing.append(text)

    def _prove_part(self, part: PartCall) -> _Judged:
        pattern = pattern_of(part)
        known = self._known.get(pattern)
        if known is None:
            known = self._known[pattern] = self._judge(part)
        return known

    def _judge(self, part: PartCall) -> _Judged:
        if part.name in DRAWN:
            return _Judged(0, (), 0, ())
        values = part.name not in ARBITRARY
        proved, left_out, wrong = 0, 0, []
        for ranks in (self._ranks, 2):  # a part of a half can look like something else than a part of a third
            try:
                proof = prove(part.func, *part.args, ranks=ranks, values=values, **part.kwargs)
            except TensorError as error:
                return _Judged(0, (), 0, (f"{part.name}: {str(error)[:200]}",))
            proved, left_out = proved + len(proof.proved), left_out + proof.left_out
            wrong += [f"{part.name} on {ranks} ranks: {verdict}" for verdict in proof.wrong]
        return _Judged(proved, tuple(wrong), left_out, ())


def prove_all(names: Iterable[str], *, workers: int = 2, timeout: float = 120.0) -> Iterator[EntryProof]:
    """What is found of each of these entries, by processes of their own, as they are done.

    A process that dies while trying strategies that no rule has is not a rule's fault: the entry is proved again
    without them.
    """
    again: list[str] = []
    for name, found in apart(_prove_and_search, names, workers=workers, timeout=timeout):
        if isinstance(found, EntryProof):
            yield found
        else:
            again.append(name)
    for name, found in apart(_prove_alone, again, workers=workers, timeout=timeout):
        if isinstance(found, EntryProof):
            yield found
        else:
            how = "was given up" if found.code is None else f"ended its process with {found.code}"
            yield EntryProof(name, wrong=[f"{name}: proving it {how}"])


@lru_cache(maxsize=2)
def _prover(search: bool) -> Prover:
    torch.set_num_threads(1)
    return Prover(search=search)


def _prove_and_search(name: str) -> EntryProof:
    return _prover(search=True).prove(name)


def _prove_alone(name: str) -> EntryProof:
    return _prover(search=False).prove(name)


def _without_proof(one: Entry, samples: Sequence[OpSample]) -> str:
    if one.dtype is None:
        return "torch has no CPU kernel for it"
    if not samples:
        return "its samples are sparse"
    return "" if any(sample.tensors for sample in samples) else "it takes no tensor"


def _spread(values: Sequence[Any], most: int) -> list[Any]:
    """At most so many of the values, evenly."""
    if len(values) <= most:
        return list(values)
    return [values[number * len(values) // most] for number in range(most)]


def _caller(sample: OpSample) -> Callable[[Sequence[Tensor]], Any]:
    plain = Sample(sample.func, sample.args, sample.kwargs, inplace=False)

    def call(tensors: Sequence[Tensor]) -> Any:
        args, kwargs = plain.with_each(tensors)
        return sample.func(*args, **kwargs)

    return call


def _course(call: Callable[[Sequence[Tensor]], Any], sample: OpSample, placements: Placements, ranks: int) -> Course:
    """What becomes of a call on inputs placed so, told without values and without ranks."""
    mesh = Mesh((ranks,))
    with no_torch_function():
        given = [
            _stand_in(tensor, Layout(mesh, [p], tuple(tensor.shape)))
            for tensor, p in zip(sample.tensors, placements, strict=True)
        ]
    with trace() as seen:
        try:
            call(given)
        except Exception:  # noqa: BLE001  # a refusal, by us or by torch, or values that had to be looked at
            return "whole" if any(operation.fell_back for operation in seen.operations) else "refused"
    if any(operation.fell_back for operation in seen.operations):
        return "whole"
    return "moves" if seen.redistributions else "free"


def _stand_in(tensor: Tensor, layout: Layout) -> DTensorBase:
    local = torch.empty(layout.local_shape(0), dtype=tensor.dtype, device="meta")
    tagged: DTensorBase = tag(local, layout)
    return tagged
