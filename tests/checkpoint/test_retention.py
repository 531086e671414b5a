"""Which checkpoints are kept: compared with a slow reference implementation, and by properties."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.checkpoint import KeepBest
from shardwright.checkpoint.manage.retention import Policy, Saved, best_of, to_remove
from shardwright.errors import CheckpointError

counts = st.integers(1, 6)
bests = st.builds(KeepBest, counts, st.sampled_from(["loss", "other"]), st.sampled_from(["min", "max"]))
policies = st.builds(Policy, st.none() | counts, st.none() | counts, st.none() | bests)
values = st.sampled_from([-1.0, 0.0, 0.5, 2.0, math.inf, math.nan])


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Saved], int]:
    """Steps in any order, some damaged, some without the metric; and the one just saved, which is sound."""
    steps = draw(st.lists(st.integers(0, 30), unique=True, min_size=1, max_size=12))
    newest = draw(st.sampled_from(steps))
    saved = [
        Saved(step, draw(st.dictionaries(st.just("loss"), values)), step == newest or draw(st.booleans()))
        for step in steps
    ]
    return saved, newest


def kept_slowly(saved: list[Saved], policy: Policy, newest: int) -> set[int]:
    """Step by step, from the words of the documentation."""
    if (policy.last, policy.every, policy.best) == (None, None, None):
        return {one.step for one in saved}
    kept = set()
    for one in saved:
        better = newer = 0
        for other in saved:
            if other.step > newest or not other.valid:
                continue
            newer += other.step > one.step
            if policy.best is not None and policy.best.metric in other.metrics and policy.best.metric in one.metrics:
                mine, theirs = one.metrics[policy.best.metric], other.metrics[policy.best.metric]
                ahead = theirs < mine if policy.best.mode == "min" else theirs > mine
                better += ahead or (theirs == mine and other.step > one.step)
        ranked = policy.best is not None and one.valid and not math.isnan(one.metrics.get(policy.best.metric, math.nan))
        if (
            one.step > newest
            or (one.valid and newer == 0)
            or (policy.last is not None and newer < policy.last)
            or (policy.every is not None and one.step % policy.every == 0)
            or (policy.best is not None and ranked and better < policy.best.n)
        ):
            kept.add(one.step)
    return kept


@given(histories(), policies)
def test_to_remove_returns_the_steps_that_no_rule_keeps(history: tuple[list[Saved], int], policy: Policy) -> None:
    saved, newest = history
    assert set(to_remove(saved, policy, newest)) == {one.step for one in saved} - kept_slowly(saved, policy, newest)


@given(histories(), policies)
def test_the_saved_step_and_all_later_ones_are_kept(history: tuple[list[Saved], int], policy: Policy) -> None:
    saved, newest = history
    gone = to_remove(saved, policy, newest)
    assert newest not in gone
    assert all(step < newest for step in gone)
    assert gone == sorted(set(gone))


@given(histories(), policies)
def test_applying_retention_twice_removes_nothing_more(history: tuple[list[Saved], int], policy: Policy) -> None:
    saved, newest = history
    gone = to_remove(saved, policy, newest)
    assert to_remove([one for one in saved if one.step not in gone], policy, newest) == []


@given(histories(), counts, counts, bests)
def test_combined_rules_keep_the_union_of_their_steps(
    history: tuple[list[Saved], int], last: int, every: int, best: KeepBest
) -> None:
    saved, newest = history
    alone = [Policy(last=last), Policy(every=every), Policy(best=best)]
    each = [set(to_remove(saved, policy, newest)) for policy in alone]
    assert set(to_remove(saved, Policy(last, every, best), newest)) == each[0] & each[1] & each[2]


@given(histories(), policies)
def test_corrupted_steps_do_not_count_towards_retention(history: tuple[list[Saved], int], policy: Policy) -> None:
    saved, newest = history
    sound = [one for one in saved if one.valid]
    gone = set(to_remove(saved, policy, newest)) & {one.step for one in sound}
    assert gone == set(to_remove(sound, policy, newest))


def test_all_steps_are_kept_without_a_rule() -> None:
    assert to_remove([Saved(step) for step in range(5)], Policy(), 4) == []


def test_the_newer_of_two_equal_metrics_is_better() -> None:
    assert best_of([Saved(1, {"loss": 1.0}), Saved(2, {"loss": 1.0})], KeepBest(1, "loss")) == [2]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"last": 0}, "keep_last must be at least 1 or None, got 0"),
        ({"every": -1}, "keep_every must be at least 1 or None, got -1"),
        ({"best": KeepBest(0, "loss")}, "keep_best must be at least 1 or None, got 0"),
        ({"best": KeepBest(1, "loss", "least")}, 'mode must be "min" or "max", got \'least\''),
    ],
)
def test_an_invalid_rule_raises(policy: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Policy(**policy)  # type: ignore[arg-type]  # by name
