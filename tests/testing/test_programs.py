"""Random programs give torch's values or are refused; and the fuzzer detects planted faults."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from shardwright import comm
from shardwright.errors import InPlaceError, TensorError
from shardwright.tensor import DTensor
from shardwright.testing.programs import Program, Verdict, fuzz, generate, judge, minimise
from shardwright.testing.programs.__main__ import main
from shardwright.testing.programs.witness import StepResult

FULL = os.environ.get("SHARDWRIGHT_BUDGET") == "full"


# --- generated programs ---------------------------------------------------------------------------------------------


def test_a_seed_gives_one_program_of_ten_to_forty_steps():
    programs = [generate(seed) for seed in range(20)]
    assert programs == [generate(seed) for seed in range(20)]
    assert all(10 <= len(program.steps) <= 45 for program in programs)
    assert {program.ranks for program in programs} == {1, 2, 3, 4}


def test_generated_programs_cover_every_feature():
    text = "\n".join(step for seed in range(300) for step in generate(seed).steps)
    for part in """Shard( Replicate() Partial( Ragged( order= bfloat16 float64 int64 bool requires_grad=True backward(
        retain_graph create_graph register_hook register_full_backward_hook no_grad inference_mode checkpoint( deepcopy
        unfold as_strided out= copy_ masked_fill index_add_ None, ...] += *= optim zero_grad embedding layer_norm
        softmax torch.cat torch.stack split chunk topk torch.sort redistribute( expand permute transpose
        AddBias del""".split():
        assert part in text, part


@pytest.mark.timeout(1200)
def test_random_programs_equal_torch_or_are_refused():
    """The same programs every time in `make test`; new ones for ten minutes in `make test-full`."""
    if FULL:
        found = fuzz(1_000_000, seed=int(time.time()), seconds=600, workers=2, minimising=30)
    else:
        found = fuzz(120, workers=2, minimising=20, most=3)
    assert not found.failures, "\n\n".join(map(str, found.failures))
    assert found.steps[StepResult.RIGHT] > 10 * found.verdicts.total()  # most of each program was compared


# --- planted faults -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def planted(fault):
    """Replace DTensor.__torch_function__ by a call of `fault`, which gets the original call."""
    own = DTensor.__dict__["__torch_function__"].__func__

    def call(cls, func, types, args=(), kwargs=None):
        return fault(functools.partial(own, cls, func, types, args, kwargs), getattr(func, "__name__", ""), args)

    DTensor.__torch_function__ = classmethod(call)
    try:
        yield
    finally:
        DTensor.__torch_function__ = classmethod(own)


def wrong_rule(call, name, args):
    result = call()
    if name == "square":
        with torch._C.DisableTorchFunctionSubclass():
            result.data.add_(1)
    return result


def wrong_on_one_rank(call, name, args):
    result = call()
    if name == "square" and comm.rank() == 1:
        with torch._C.DisableTorchFunctionSubclass():
            result.data.add_(1)
    return result


def wrong_gradient(call, name, args):
    if name == "square":
        with torch._C.DisableTorchFunctionSubclass():
            args[0].register_hook(lambda gradient: gradient + 1)
    return call()


def torn_write(call, name, args):
    result = call()
    if name == "neg_":
        raise InPlaceError("neg_: refused, but written")
    return result


def lost_view(call, name, args):
    result = call()
    return result.clone() if name == "t" else result


def raises_on_one_rank(call, name, args):
    if name == "square" and comm.rank() == 0:
        raise TensorError("square: refused on this rank only")
    return call()


def raises_untyped(call, name, args):
    if name == "square":
        raise KeyError("square")
    return call()


def waits_alone(call, name, args):
    if name == "square" and comm.rank() == 0:
        dist.barrier()
    return call()


def dies(call, name, args):
    if name == "square":
        os.kill(os.getpid(), signal.SIGSEGV)
    return call()


PROGRAM = Program(
    (
        "a = leaf([1, 2, 3, 4, 5, 6], (3, 2), torch.float32, [Shard(0)], requires_grad=True)",
        "b = leaf([1, 2, 3, 4, 5, 6], (2, 3), torch.float32, [Partial('sum')])",
        "c = a * 2",
        "d = leaf([1, 2, 3, 4], (2, 2), torch.float64, [Shard(1)])",
        "e = d.t()",
        "d.neg_()",
        "f = b + 1",
        "g = c.square()",
        "h = f[0]",
        "g.sum().backward()",
        "d += 1",
        "i = e + d",
    ),
    mesh=(2,),
)
FAULTS = {
    wrong_rule: (Verdict.WRONG, "square()"),
    wrong_on_one_rank: (Verdict.WRONG, "square()"),
    wrong_gradient: (Verdict.WRONG, "backward()"),
    torn_write: (Verdict.TORN, "neg_()"),
    lost_view: (Verdict.WRONG, ""),
    raises_on_one_rank: (Verdict.DIVERGED, "square()"),
    raises_untyped: (Verdict.UNTYPED, "square()"),
    dies: (Verdict.CRASHED, "square()"),
}


def test_the_program_is_right_without_a_planted_fault():
    assert judge(PROGRAM).verdict is Verdict.RIGHT


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_detected(fault):
    verdict, step = FAULTS[fault]
    found = judge(PROGRAM, setup=functools.partial(planted, fault))
    assert found.verdict is verdict
    assert step in PROGRAM.steps[found.step]


@pytest.mark.parametrize("fault", [wrong_rule, torn_write, lost_view], ids=lambda fault: fault.__name__)
def test_a_failing_program_is_minimised(fault):
    judged = functools.partial(judge, setup=functools.partial(planted, fault))
    found = judged(PROGRAM)
    small = minimise(found, judged, seconds=150)
    assert small.kind == found.kind
    assert len(small.program.steps) <= 4
    assert FAULTS[fault][1] in small.program.steps[-1]
    assert judge(small.program).verdict is Verdict.RIGHT  # only the planted fault makes it fail


def test_a_hang_is_detected_and_the_ranks_are_replaced():
    found = judge(PROGRAM, setup=functools.partial(planted, waits_alone), timeout=8)
    assert found.verdict is Verdict.HUNG
    assert "square()" in PROGRAM.steps[found.step]
    assert "barrier" in found.detail  # in the stacks
    assert judge(PROGRAM).verdict is Verdict.RIGHT


def lost_slices(call, name, args):
    result = call()
    return result.clone() if name == "__getitem__" and isinstance(result, DTensor) else result


def test_the_fuzzer_finds_a_fault_and_minimises_it():
    found = fuzz(60, ranks=(1,), setup=functools.partial(planted, lost_slices), minimising=20, most=3)
    small = [failure.program.steps for failure in found.failures if failure.verdict is Verdict.WRONG]
    assert any(len(steps) <= 6 and "[" in "".join(steps) for steps in small)


# --- verdicts ---------------------------------------------------------------------------------------------------------


def test_a_program_continues_after_a_refused_write():
    steps = (
        "a = leaf([1, 2], (2,), torch.float32, [Partial('sum')])",
        "a.relu_()",
        "b = a * 2",
    )
    found = judge(Program(steps, mesh=(2,)))
    assert found.verdict is Verdict.REFUSED
    assert [str(result) for result in found.results] == ["right", "refused", "right", "right"]
    assert found.refusals[0].startswith("InPlaceError")


def test_steps_that_use_a_refused_value_are_skipped():
    steps = ("a = leaf([1], (1,), torch.float32, [Shard(0)])", "b = torch.func.grad(torch.sum)(a)", "c = b + 1")
    found = judge(Program(steps, mesh=(2,)))
    assert [str(result) for result in found.results] == ["right", "refused", "skipped", "right"]


def test_a_step_that_torch_refuses_too_is_not_a_fault():
    steps = ("a = leaf([1, 2], (2,), torch.float32, [Shard(0)])", "a.view(3)", "b = a + 1")
    found = judge(Program(steps, mesh=(2,)))
    assert found.verdict in (Verdict.RIGHT, Verdict.REFUSED)
    assert str(found.results[-1]) == "right"


def test_hooks_that_ran_before_a_backward_raised_are_not_a_fault():
    steps = (
        "a = leaf([0], (1, 1), torch.float64, [Replicate()], requires_grad=True)",
        "b = a.square()",
        "b.register_hook(keep('b'))",
        "c = torch.autograd.grad(b.sum(), [a])[0].clone()",
        "(b * 2).sum().backward()",
    )
    found = judge(Program(steps, mesh=(1,)))
    assert [str(result) for result in found.results] == ["right"] * 4 + ["refused"]


def test_the_script_of_a_program_runs_under_torchrun(tmp_path):
    program = Program(PROGRAM.steps[:3], mesh=(2,))
    script = tmp_path / "program.py"
    script.write_text(program.script)
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert [line.split()[0] for line in ran.stdout.splitlines()] == ["right"] * 4


def test_the_command_prints_counts_and_returns_0_without_failures(capsys):
    assert main(["--count", "3", "--ranks", "1", "--workers", "1", "--seed", "20"]) == 0
    assert capsys.readouterr().out.startswith("3 programs: ")


# --- regressions ----------------------------------------------------------------------------------------------------

ONCE_WRONG = {
    "flatten of one dimension returns its input": Program(
        (
            "a = leaf([1, 2, 3], (3,), torch.float32, [Shard(0)], requires_grad=True)",
            "b = a.flatten()",
            "(b * 2).sum().backward()",
        ),
        mesh=(2,),
    ),
    "a reshape to the same shape is a view, however nested the shards are": Program(
        (
            "a = leaf([1, 2, 3, 4, 5], (5, 1), torch.float32, [Shard(0), Shard(0)], order=[1, 0])",
            "b = a.reshape((5, 1))",
            "b += 1",
        ),
        mesh=(2, 2),
    ),
    "a gradient of what was not used requires grad if the graph is recorded": Program(
        (
            "a = leaf([1, 2], (2,), torch.float32, [Shard(0)], requires_grad=True)",
            "b = leaf([1, 2], (2,), torch.float32, [Shard(0)], requires_grad=True)",
            "c, d = torch.autograd.grad(a.sum(), [a, b], materialize_grads=True, create_graph=True)",
        ),
        mesh=(2,),
    ),
    "a clone, or a negative, of any partial value may be written to": Program(
        (
            "a = leaf([1, 2, 3], (3,), torch.float64, [Partial('min')])",
            "b = -a",
            "b += 1",
            "c = a.clone()",
            "c.relu_()",
        ),
        mesh=(2,),
    ),
    "a nested activation checkpoint saves as many tensors again, without parameters too": Program(
        (
            "a = leaf([1, 2, 3], (3,), torch.float64, [Shard(0)], requires_grad=True)",
            "f = lambda x: checkpoint(lambda y: y.tanh() * y, x * 2, use_reentrant=False)",
            "b = checkpoint(f, a * 1, use_reentrant=False)",
            "b.sum().backward()",
        ),
        mesh=(2,),
    ),
}
REFUSED = {
    "`out=` whose elements are several times in memory": Program(
        (
            "a = leaf([3, 1, -1, -4], (4,), torch.int64, [Replicate()])",
            "b = a.unfold(-1, 3, 1)",
            "torch.neg(b, out=b)",
        ),
        mesh=(1,),
    ),
    "an assignment to no element of an expanded tensor": Program(
        (
            "a = leaf([0, -2], (1, 2, 1), torch.int64, [Shard(1)])",
            "b = a.expand(3, -1, -1, -1)",
            "c = leaf([0], (1,), torch.int64, [Replicate()])",
            "b[-2:1, c, 0, :0:2] = -4",
        ),
        mesh=(2,),
    ),
    "detach_ of a result whose local tensor is a view": Program(
        (
            "a = leaf([0, 1, 2, 3, 4, 5], (2, 3), torch.float32, [Replicate()], requires_grad=True)",
            "b = leaf([1, 0], (2,), torch.int64, [Replicate()])",
            "c = a[b, None, ..., -3]",
            "d = leaf([1, 1], (2, 1), torch.bool, [Shard(0)])",
            "e = c[d]",
            "e.detach_()",
        ),
        mesh=(2,),
    ),
}


@pytest.mark.parametrize("name", ONCE_WRONG)
def test_programs_of_fixed_faults_are_right(name):
    found = judge(ONCE_WRONG[name])
    assert found.verdict is Verdict.RIGHT, str(found)


@pytest.mark.parametrize("name", REFUSED)
def test_programs_that_raised_untyped_errors_are_refused(name):
    found = judge(REFUSED[name])
    assert found.verdict in (Verdict.RIGHT, Verdict.REFUSED), str(found)
