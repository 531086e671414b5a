"""`compile`: replays without dispatch, with the results and gradients of the eager program; guards and errors."""

from __future__ import annotations

import importlib.util
import sys
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # torch's own short name
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import shardwright as sw
from shardwright import comm
from shardwright.errors import ArgumentTypeError, CaptureError, CommunicationError
from shardwright.testing import run_ranks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
Placer = Callable[[str], sw.Placement]


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(EXAMPLES))
    spec.loader.exec_module(module)
    return module


def mesh_of_all(*shape: int) -> sw.DeviceMesh:
    return sw.init_device_mesh("cpu", shape or (comm.world().size,))


def distribute(model: nn.Module, mesh: sw.DeviceMesh, place: Placer) -> nn.Module:
    def partition(module_name: str, module: nn.Module, mesh: sw.DeviceMesh) -> None:
        for key, parameter in module.named_parameters(recurse=False):
            module.register_parameter(key, sw.distribute_tensor(parameter, mesh, [place(f"{module_name}.{key}")]))

    return sw.distribute_module(model, mesh, partition)


def tensor_parallel(name: str) -> sw.Placement:
    return {"0.weight": sw.Shard(0), "0.bias": sw.Shard(0), "2.weight": sw.Shard(1)}.get(name, sw.Replicate())


def fully_sharded(_: str) -> sw.Placement:
    return sw.Shard(0)


def replicated(_: str) -> sw.Placement:
    return sw.Replicate()


def mlp(place: Placer, mesh: sw.DeviceMesh) -> nn.Module:
    torch.manual_seed(3)
    return distribute(nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 5)).double(), mesh, place)


def transformer(place: Placer, mesh: sw.DeviceMesh, dropout: float = 0.0) -> nn.Module:
    model = load("transformer").Transformer(vocabulary=12, width=8, heads=4, layers=1, length=6, dropout=dropout)
    sw.manual_seed(4)
    distribute(model.double(), mesh, place)
    model.reset()
    return model


class Counted:
    """Count the calls of DTensor.__torch_function__."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Counted:
        self.original = sw.DTensor.__dict__["__torch_function__"]

        def counting(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return self.original.__get__(None, cls)(func, types, args, kwargs)

        sw.DTensor.__torch_function__ = classmethod(counting)
        return self

    def __exit__(self, *_: object) -> None:
        sw.DTensor.__torch_function__ = self.original


def train(model: nn.Module, forward: Callable[..., Any], batches: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Train with AdamW; return the losses and the final parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = forward(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.full_tensor().detach())
    return losses, [parameter.full_tensor().detach() for parameter in model.parameters()]


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    for left, right in zip(actual, expected, strict=True):
        assert torch.equal(left, right)


def train_mlp(place: Placer, batch_placement: sw.Placement) -> None:
    mesh = mesh_of_all()
    batches = [sw.distribute_tensor(torch.randn(7, 6, dtype=torch.float64), mesh, [batch_placement]) for _ in range(5)]
    eager, captured = mlp(place, mesh), mlp(place, mesh)
    expected = train(eager, lambda x: eager(x).square().mean(), batches)
    loss = sw.compile(lambda x: captured(x).square().mean())
    found = train(captured, loss, batches)
    assert_equal(found[0] + found[1], expected[0] + expected[1])
    assert len(loss.programs) == 1
    with Counted() as seen:
        result = loss(batches[0])
    assert seen.count == 0
    assert result._layout is eager(batches[0]).square().mean()._layout


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("place", "batch"),
    [(tensor_parallel, sw.Replicate()), (fully_sharded, sw.Shard(0)), (replicated, sw.Shard(0))],
    ids=["tensor parallel", "fully sharded", "data parallel"],
)
def test_training_equals_eager_training(ranks: int, place: Placer, batch: sw.Placement) -> None:
    run_ranks(ranks, train_mlp, place, batch)


def train_transformer(place: Placer, batch: sw.Placement, dropout: float) -> None:
    mesh = mesh_of_all()
    batches = [
        sw.distribute_tensor(torch.randint(0, 12, (4, 7), generator=torch.Generator().manual_seed(i)), mesh, [batch])
        for i in range(5)
    ]
    eager = transformer(place, mesh, dropout)
    expected = train(eager, eager, batches)
    model = transformer(place, mesh, dropout)
    compiled = sw.compile(model)
    found = train(model, compiled, batches)
    assert_equal(found[0] + found[1], expected[0] + expected[1])
    with Counted() as seen:
        compiled(batches[0])
    assert seen.count == 0


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("ranks", [1, 4])
def test_transformer_trains_as_in_eager_mode(ranks: int, dropout: float) -> None:
    """With dropout: every replay draws new random numbers, the same as in eager mode."""
    run_ranks(ranks, train_transformer, load("02_tensor_parallel").placement, sw.Replicate(), dropout)
    run_ranks(ranks, train_transformer, fully_sharded, sw.Shard(0), dropout)


def communicates_as_eager() -> None:
    mesh = mesh_of_all()
    model = mlp(fully_sharded, mesh)
    x = sw.distribute_tensor(torch.randn(8, 6, dtype=torch.float64), mesh, [sw.Shard(0)])
    compiled = sw.compile(model)
    compiled(x).sum().backward()
    traffic = []
    for call in (model, compiled):
        with comm.count() as seen:
            call(x).sum().backward()
        traffic.append((seen.bytes, dict(seen.calls)))
    assert traffic[0] == traffic[1]
    assert traffic[0][0] > 0


def test_replay_communicates_as_much_as_eager() -> None:
    run_ranks(4, communicates_as_eager)


def uses_twice() -> None:
    mesh = mesh_of_all()
    w = sw.distribute_tensor(torch.randn(6, 6, dtype=torch.float64), mesh, [sw.Shard(0)]).requires_grad_()
    x = sw.distribute_tensor(torch.randn(5, 6, dtype=torch.float64), mesh, [sw.Shard(0)]).requires_grad_()

    def program(x: Tensor) -> Tensor:
        return torch.tanh(x @ w) @ w

    compiled = sw.compile(program)
    for _ in range(2):
        grads = []
        for call in (program, compiled):
            first = torch.autograd.grad(call(x).square().sum(), (x, w), create_graph=True)
            second = torch.autograd.grad(first[0].square().sum() + first[1].square().sum(), (x, w))
            grads.append([*first, *second])
        for one, other in zip(*grads, strict=True):
            assert one._layout is other._layout
            assert torch.equal(one.full_tensor(), other.full_tensor())
    with sw.defer_gradient_reduction():
        for call in (program, compiled):
            call(x).sum().backward()
    expected = torch.autograd.grad(program(x).sum(), w)[0].full_tensor()
    torch.testing.assert_close(w.grad.full_tensor(), 2 * expected)


def test_second_order_gradients_and_deferred_reduction_of_a_parameter_used_twice() -> None:
    run_ranks(2, uses_twice)


def one_rank(*placements: sw.Placement, shape: tuple[int, ...] = (4, 3)) -> sw.DTensor:
    mesh = sw.init_device_mesh("cpu", (1,))
    return sw.distribute_tensor(torch.arange(12.0).reshape(shape), mesh, placements or [sw.Shard(0)])


def test_new_layout_dtype_value_or_mode_is_captured_again() -> None:
    compiled = sw.compile(lambda x, power=2: x**power)
    x = one_rank()
    calls: list[Callable[[], Any]] = [
        lambda: compiled(x),
        lambda: compiled(one_rank(sw.Replicate())),
        lambda: compiled(x.double()),
        lambda: compiled(x, 3),
        lambda: compiled(x, power=3),
        lambda: compiled(x, 3.0),
        lambda: compiled(x.t()),
        lambda: compiled(x.clone().requires_grad_()),
    ]
    for known, call in enumerate(calls, start=1):
        for _ in range(2):
            call()
            assert len(compiled.programs) == known
    assert compiled(x, 3)[1].tolist() == [27.0, 64.0, 125.0]
    with torch.no_grad():
        compiled(x)
    assert len(compiled.programs) == len(calls) + 1
    compiled.forget()
    assert compiled.programs == []


def test_nested_arguments_and_results() -> None:
    def program(pair: tuple[Tensor, Tensor], options: dict[str, Any]) -> dict[str, Any]:
        a, b = pair
        return {"sum": [a + b, options["w"] * 2], "name": options["name"], "a": a, "twice": (b * 2,) * 2}

    compiled = sw.compile(program)
    a, b, w = one_rank(), one_rank(), one_rank(sw.Replicate())
    for _ in range(3):
        result = compiled((a, b), {"w": w, "name": "x"})
        assert torch.equal(result["sum"][0].full_tensor(), (a + b).full_tensor())
        assert result["sum"][1].placements == (sw.Replicate(),)
        assert result["name"] == "x"
        assert result["a"] is a
        assert result["twice"][0] is result["twice"][1]
    x = one_rank()
    compiled((x, x), {"w": w, "name": "x"})  # one tensor twice is another program
    assert len(compiled.programs) == 2


def test_in_place_writes_to_buffers_and_arguments_are_replayed() -> None:
    mesh = sw.init_device_mesh("cpu", (1,))
    norm = sw.distribute_module(nn.BatchNorm1d(3), mesh)
    other = sw.distribute_module(nn.BatchNorm1d(3), mesh)
    compiled = sw.compile(norm)
    for seed in range(3):
        x = sw.distribute_tensor(torch.randn(5, 3, generator=torch.Generator().manual_seed(seed)), mesh, [sw.Shard(0)])
        assert torch.equal(compiled(x).full_tensor(), other(x).full_tensor())
    assert torch.equal(norm.running_var.full_tensor(), other.running_var.full_tensor())
    assert norm.num_batches_tracked.item() == 3
    norm.eval()
    other.eval()
    assert torch.equal(compiled(x).full_tensor(), other(x).full_tensor())

    def count(x: Tensor) -> Tensor:
        x += 1
        return x

    counted, y = sw.compile(count), one_rank()
    for _ in range(3):
        assert counted(y) is y
    assert y[0].tolist() == [3.0, 4.0, 5.0]


def test_no_grad_regions_stay_without_gradients() -> None:
    def program(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = (x * 2).sum()
        return (x / scale).sum() + torch.softmax(x, 0).square().sum()

    compiled = sw.compile(program)
    for _ in range(2):
        gradients = []
        for call in (program, compiled):
            x = one_rank(sw.Replicate()).requires_grad_()
            call(x).backward()
            gradients.append(x.grad.full_tensor())
        assert torch.equal(*gradients)


class Cube(torch.autograd.Function):
    """With a backward that is not the derivative, which shows that it is called."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 100 * ctx.saved_tensors[0] * gradient


def on_local(x: sw.DTensor) -> sw.DTensor:
    return sw.DTensor.from_local(Cube.apply(x.to_local()), x.device_mesh, x.placements)


@pytest.mark.parametrize("function", [on_local, Cube.apply])
def test_autograd_functions_keep_their_backward(function: Callable[..., Any]) -> None:
    compiled = sw.compile(lambda x: function(x * 1).sum())
    for _ in range(3):
        x = one_rank().requires_grad_()
        compiled(x).backward()
        assert x.grad[1].tolist() == [300.0, 400.0, 500.0]


def test_compiled_functions_work_inside_other_tracers() -> None:
    x = one_rank()
    compiled = sw.compile(lambda x: (x * 2).sum(0).redistribute(placements=[sw.Replicate()]))
    expected = compiled(x).full_tensor()
    graph = make_fx(lambda local: compiled(sw.DTensor.from_local(local, x.device_mesh, [sw.Shard(0)])).to_local())
    traced = graph(x.to_local())
    assert torch.equal(traced(x.to_local()), expected)
    assert any(node.target is torch.ops.aten.mul.Tensor for node in traced.graph.nodes)
    outer = torch.compile(lambda x: compiled(x) + 1, backend="eager")
    assert torch.equal(outer(x).full_tensor(), expected + 1)
    nested = sw.compile(lambda x: compiled(x) + 1)
    for _ in range(2):
        assert torch.equal(nested(x).full_tensor(), expected + 1)


def traced_redistribution() -> None:
    mesh = mesh_of_all()
    x = sw.distribute_tensor(torch.arange(10.0).reshape(5, 2), mesh, [sw.Shard(0)])
    compiled = sw.compile(lambda x: (x * 2).redistribute(placements=[sw.Replicate()]))
    local = x.to_local()
    traced = make_fx(
        lambda local: compiled(sw.DTensor.from_local(local, mesh, [sw.Shard(0)], shape=(5, 2))).to_local()
    )(local)
    assert torch.equal(traced(local + 1), 2 * (x + 1).full_tensor())
    assert any(str(node.target).startswith("shardwright.redistribute") for node in traced.graph.nodes)


def test_make_fx_sees_a_redistribution_as_one_operator() -> None:
    run_ranks(2, traced_redistribution)


def train_with_backend(backend: str) -> None:
    mesh = mesh_of_all()
    batches = [sw.distribute_tensor(torch.randn(8, 6, dtype=torch.float64), mesh, [sw.Shard(0)]) for _ in range(3)]
    eager, captured = mlp(fully_sharded, mesh), mlp(fully_sharded, mesh)
    expected = train(eager, lambda x: eager(x).square().mean(), batches)
    found = train(captured, sw.compile(lambda x: captured(x).square().mean(), backend=backend), batches)
    for one, other in zip(found[0] + found[1], expected[0] + expected[1], strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.filterwarnings("ignore")  # torch's own, of its compiler
def test_torch_compile_backend_compiles_the_local_program() -> None:
    run_ranks(2, train_with_backend, "aot_eager")


class Sneaky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", one_rank())

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + x
        return self.seen


HIDDEN: list[Any] = []  # weak references, which are not followed


def branches(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x
    return -x


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (branches, r"test_compile.py:\d+: the program reads a value of a tensor \(item\)"),
        (lambda x: x * x.sum().item(), r"test_compile.py:\d+: .*\(item\)"),
        (lambda x: x + len(x.tolist()), r"test_compile.py:\d+: .*\(tolist\)"),
        (lambda x: x + x.full_tensor().numpy().sum(), r"test_compile.py:\d+: .*\(numpy\)"),
        (lambda x: str(x), r"test_compile.py:\d+: .*\(repr\)"),
        (lambda x: torch.equal(x, x), r"test_compile.py:\d+: .*\(equal\)"),
        (lambda x: x.nonzero(), r"test_compile.py:\d+: the size of the result of nonzero depends on values"),
        (lambda x: x[x > 3], r"test_compile.py:\d+: the size of the result of"),
        (lambda x: x.sum().backward(), r"test_compile.py:\d+: the program computes gradients itself"),
        (lambda x: torch.autograd.grad(x.sum(), x), r"test_compile.py:\d+: the program computes gradients itself"),
        (lambda x: torch.poisson(x), r"test_compile.py:\d+: this operator draws random numbers"),
        (lambda x: x + HIDDEN[0](), r"test_compile.py:\d+: the program uses a .*pass it as an argument"),
    ],
)
def test_capture_errors_name_the_line_and_the_reason(program: Callable[..., Any], why: str) -> None:
    hidden = one_rank()
    HIDDEN[:] = [weakref.ref(hidden)]
    with pytest.raises(CaptureError, match=why):
        sw.compile(program)(one_rank())


def test_state_changes_and_unhashable_arguments_cannot_be_captured() -> None:
    with pytest.raises(CaptureError, match=r"replaces Sneaky\.seen by another tensor"):
        sw.compile(Sneaky())(one_rank())
    with pytest.raises(CaptureError, match="replaces tensors in a list or dict among its arguments"):
        sw.compile(lambda x, results: results.append(x * 2))(one_rank(), [])
    with pytest.raises(CaptureError, match="argument 1 must be a tensor or hashable, got set"):
        sw.compile(lambda x, y: x)(one_rank(), {1, 2})
    with pytest.raises(ArgumentTypeError, match="expected a function or a module, got int"):
        sw.compile(3)
    # A failed capture leaves no state behind.
    assert (one_rank() * 2).sum().item() == 132.0
    assert sw.compile(lambda x: Cube.apply(x))(one_rank())[1].tolist() == [27.0, 64.0, 125.0]


def collective_outside() -> None:
    x = sw.ones(4, mesh=mesh_of_all(), placements=[sw.Shard(0)])
    with pytest.raises(CaptureError, match="communicates other than by redistributing DTensors"):
        sw.compile(lambda x: comm.all_reduce(x.to_local()))(x)
    with pytest.raises(CommunicationError), sw.communication("explicit"):
        sw.compile(lambda x: torch.sort(x * 2)[0].cumsum(0) @ x.flip(0).outer(x))(x)


def test_captured_programs_communicate_only_by_redistribution() -> None:
    run_ranks(2, collective_outside)


def test_tensors_in_closures_defaults_and_modules_are_inputs() -> None:
    mesh = sw.init_device_mesh("cpu", (1,))
    layer = sw.distribute_module(nn.Linear(3, 3), mesh)
    bias = sw.ones(3, mesh=mesh)

    def inner(x: Tensor) -> Tensor:
        return F.linear(x, layer.weight) + bias

    def outer(x: Tensor, factor: sw.DTensor = sw.full((), 2.0, mesh=mesh)) -> Tensor:  # noqa: B008  # it is the point
        return inner(x) * factor

    compiled = sw.compile(outer)
    x = one_rank()
    compiled(x)
    with torch.no_grad():
        layer.weight.zero_()
    assert compiled(x)[0].tolist() == [2.0, 2.0, 2.0]
    bias = sw.full((3,), 5.0, mesh=mesh)
    assert compiled(x)[0].tolist() == [10.0, 10.0, 10.0]
    assert len(compiled.programs) == 1


SCALE = 2.0
TABLE = {"scale": [2.0]}


class Options:
    offset = 1.0

    def __init__(self) -> None:
        self.scale = 2.0

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.scale + self.offset


class Slotted:
    __slots__ = ("power",)


class Scaled(nn.Module):
    limit = 50.0

    def __init__(self) -> None:
        super().__init__()
        self.k: Any = 2.0
        self.options = Options()
        self.steps: list[Any] = [torch.relu, F.gelu]
        self.plain: Any = None

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        x = self.options.scaled(self.helper(x)).clamp(max=self.limit)
        return x if self.plain is None else x + self.plain

    def helper(self, x: Tensor) -> Tensor:
        return sum([x * SCALE for _ in range(2)]) * self.k


def assert_agree(compiled: Any, function: Callable[..., Any], *args: Any) -> None:
    """Compare twice, since the first call may capture."""
    for _ in range(2):
        assert torch.equal(compiled(*args).full_tensor(), function(*args).full_tensor())


def programs_after(compiled: Any, function: Callable[..., Any], *changes: Callable[[], Any]) -> int:
    """Return the number of programs after comparing results after each of the changes."""
    assert_agree(compiled, function, one_rank())
    for change in changes:
        change()
        assert_agree(compiled, function, one_rank())
    return len(compiled.programs)


def test_changed_closure_variables_and_globals_are_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    here = sys.modules[__name__]
    k, held = 2.0, [2.0, {"a": 3.0}]

    def inner(x: Tensor) -> Tensor:
        return x * k + held[0] * held[1]["a"] + sum(SCALE for _ in range(2)) * TABLE["scale"][0]

    def outer(x: Tensor) -> Tensor:
        return inner(x) * 2

    def set_k(value: float) -> None:
        nonlocal k
        k = value

    compiled = sw.compile(outer)
    number = programs_after(
        compiled,
        outer,
        lambda: set_k(5.0),
        lambda: set_k(-0.0),
        lambda: set_k(0.0),
        lambda: held.__setitem__(0, 7.0),
        lambda: held[1].update(a=8.0),
        lambda: monkeypatch.setattr(here, "SCALE", 9.0),
        lambda: monkeypatch.setitem(TABLE, "scale", [4.0]),
    )
    assert number == 8
    assert programs_after(compiled, outer, lambda: set_k(float("0")), lambda: held.__setitem__(0, float("7"))) == 8


def test_changed_functions_are_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    step: Callable[..., Any] = torch.relu

    def program(x: Tensor) -> Tensor:
        return step(x - 5)

    compiled = sw.compile(program)
    assert_agree(compiled, program, one_rank())
    step = torch.tanh
    assert_agree(compiled, program, one_rank())
    step = torch.no_grad()(lambda x: x * SCALE)  # wrapped by torch
    assert_agree(compiled, program, one_rank())
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 3.0)
    assert_agree(compiled, program, one_rank())
    assert len(compiled.programs) == 4


def test_changed_module_attributes_are_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Scaled()
    compiled = sw.compile(module)
    number = programs_after(
        compiled,
        module,
        lambda: setattr(module, "k", 3.0),
        lambda: setattr(module, "k", 3),
        lambda: module.steps.pop(),
        lambda: module.steps.__setitem__(0, torch.tanh),
        lambda: setattr(module.options, "scale", 4.0),
        lambda: monkeypatch.setattr(Options, "offset", 6.0),
        lambda: setattr(module, "limit", 7.0),
        lambda: monkeypatch.setattr(Scaled, "helper", lambda self, x: x * 11 * self.k),
        lambda: setattr(module, "forward", lambda x: x * 12),
    )
    assert number == 10
    del module.forward
    assert_agree(compiled, module, one_rank())
    assert len(compiled.programs) == 10
    bound = sw.compile(module.options.scaled)
    assert_agree(bound, module.options.scaled, one_rank())
    module.options.scale = 13.0
    assert_agree(bound, module.options.scaled, one_rank())


def test_used_attributes_of_objects_classes_and_modules_are_guarded() -> None:
    settings, slotted, queue, kinds = ModuleType("settings"), Slotted(), deque([2.0, 3.0]), {"relu"}
    settings.scale, slotted.power = 2.0, 2

    class Space:
        offset: Any = 1.0
        unnamed = 0

    def program(x: Tensor) -> Tensor:
        x = x.relu() if "relu" in kinds else x.tanh()
        return x**slotted.power * settings.scale + Space.offset + queue[0]

    compiled = sw.compile(program)
    number = programs_after(
        compiled,
        program,
        lambda: setattr(settings, "scale", 3.0),
        lambda: setattr(slotted, "power", 3),
        lambda: setattr(Space, "offset", 4.0),
        lambda: setattr(Space, "unnamed", 5),
        lambda: queue.rotate(),
        lambda: kinds.clear(),
    )
    assert number == 6
    Space.offset = one_rank()
    assert_agree(compiled, program, one_rank())


def test_dropout_rate_is_guarded() -> None:
    module = nn.Dropout(0.9)
    compiled, x = sw.compile(module), one_rank()
    compiled(x)
    module.p = 0.0
    assert_agree(compiled, module, x)
    assert torch.equal(compiled(x).full_tensor(), x.full_tensor())


def test_replaced_submodules_are_captured_again() -> None:
    module = nn.Sequential(nn.ReLU(), nn.Sequential(nn.ReLU()))
    compiled = sw.compile(module)
    number = programs_after(
        compiled,
        module,
        lambda: module.__setitem__(0, nn.Tanh()),
        lambda: module[1].__setitem__(0, nn.Sigmoid()),
        lambda: module.append(nn.Softplus()),
        lambda: module.__delitem__(0),
        lambda: module.eval(),
        lambda: module.train(),
    )
    assert number == 6


def test_forward_hooks_are_guarded() -> None:
    module, factor = nn.Sequential(nn.ReLU()), 2.0
    compiled = sw.compile(module)
    assert_agree(compiled, module, one_rank())
    hooks = [module[0].register_forward_hook(lambda module, given, out: out * factor)]
    assert_agree(compiled, module, one_rank())
    factor = 3.0
    assert_agree(compiled, module, one_rank())
    hooks.append(module.register_forward_pre_hook(lambda module, given: (given[0] + 1,)))
    assert_agree(compiled, module, one_rank())
    hooks.append(nn.modules.module.register_module_forward_hook(lambda module, given, out: out + 4))
    assert_agree(compiled, module, one_rank())
    assert len(compiled.programs) == 5
    for hook in reversed(hooks):
        hook.remove()
        assert_agree(compiled, module, one_rank())


def test_plain_tensor_attributes_of_modules_are_inputs() -> None:
    module = Scaled()
    compiled = sw.compile(module)
    for value in (1.0, 2.0):
        module.plain = one_rank() * value
        assert_agree(compiled, module, one_rank())
    assert len(compiled.programs) == 1
    module.plain = None
    assert_agree(compiled, module, one_rank())


def test_tensors_in_partials_lists_and_dicts_are_inputs() -> None:
    mesh = sw.init_device_mesh("cpu", (1,))
    layers = [sw.distribute_module(nn.Linear(3, 3), mesh) for _ in range(2)]
    tensors: dict[str, Any] = {"bias": sw.ones(3, mesh=mesh), "more": (sw.ones(3, mesh=mesh),)}

    def apply(layer: nn.Module, x: Tensor, *, scale: float) -> Tensor:
        return layer(x) * scale

    def uses(x: Tensor) -> Tensor:
        return layers[0](x) + layers[1](x) + tensors["bias"] + tensors["more"][0]

    for program in (partial(apply, layers[0], scale=2.0), uses, partial(partial(apply, scale=3.0), layers[1])):
        compiled = sw.compile(program)
        assert_agree(compiled, program, one_rank())
        with torch.no_grad():
            layers[0].weight.mul_(2)
        tensors["bias"] = sw.full((3,), 5.0, mesh=mesh)
        assert_agree(compiled, program, one_rank())
        assert len(compiled.programs) == 1
        for call in (program, compiled):
            call(one_rank()).sum().backward()
        layers.reverse()
        assert_agree(compiled, program, one_rank())
        layers.reverse()
    nested, inner = sw.compile(lambda x: inner(x)), sw.compile(uses)
    assert_agree(nested, uses, one_rank())
    tensors["bias"] = sw.full((3,), 6.0, mesh=mesh)
    assert_agree(nested, uses, one_rank())


def test_modules_and_functions_among_the_arguments_are_guarded() -> None:
    module, k = Scaled(), 2.0
    x = one_rank()

    def program(x: Tensor, module: nn.Module, function: Callable[..., Any]) -> Tensor:
        return function(module(x))

    def function(x: Tensor) -> Tensor:
        return x * k

    compiled = sw.compile(program)
    assert_agree(compiled, program, x, module, function)
    module.k = 3.0
    assert_agree(compiled, program, x, module, function)
    k = 5.0
    assert_agree(compiled, program, x, module, function)
    module.plain = one_rank()
    assert_agree(compiled, program, x, module, function)
    assert len(compiled.programs) == 4
    times = sw.compile(lambda x, y: x / y)
    assert times(x, 0.0)[1].tolist() == [float("inf")] * 3
    assert times(x, -0.0)[1].tolist() == [-float("inf")] * 3


def test_reference_cycles_are_visited_once() -> None:
    cyclic: list[Any] = [2.0]
    cyclic.append(cyclic)
    module = Scaled()
    module.options.owner = module

    def program(x: Tensor, again: bool = True) -> Tensor:
        return program(module(x) * cyclic[1][1][0], again=False) if again else x

    assert_agree(sw.compile(program), program, one_rank())


class Remembers(nn.Module):
    def __init__(self, first: Any = None) -> None:
        super().__init__()
        self.cache, self.calls, self.found = first, 0, {}

    def forward(self, x: Tensor, how: str = "cache") -> Tensor:
        if how == "list":
            self.cache = [item + x for item in self.cache]
            return self.cache[0] * 1
        if how == "cache":
            self.cache = x if self.cache is None else self.cache + x
            return self.cache * 1
        if how == "calls":
            self.calls += 1
        elif how == "new":
            self.latest = x
        else:
            self.found[how] = x
        return x * 2


def test_state_changes_raise_with_the_name_of_the_state() -> None:
    x, kept, total = one_rank(), [], 0.0

    def keeps(x: Tensor) -> Tensor:
        kept.append(x * 2)
        return x

    def counts(x: Tensor) -> Tensor:
        nonlocal total
        total += 1
        return x * total

    cases: list[tuple[Any, str, str]] = [
        (Remembers(), "cache", r"changes Remembers\.cache while it runs.*write to it in place"),
        (Remembers(one_rank()), "cache", r"replaces Remembers\.cache by another tensor"),
        (Remembers([one_rank()]), "list", r"replaces Remembers\.cache\[0\] by another tensor"),
        (nn.Sequential(Remembers()), "", r"changes Sequential\.0\.cache"),
        (Remembers(), "calls", r"changes Remembers\.calls"),
        (Remembers(), "new", r"changes Remembers\.latest"),
        (Remembers(), "key", r"changes Remembers\.found"),
        (keeps, "", "changes kept"),
        (counts, "", "changes total"),
    ]
    for function, how, why in cases:
        compiled = sw.compile(function)
        with pytest.raises(CaptureError, match=why):
            compiled(*([x, how] if how else [x]))
        assert compiled.programs == []


def test_assigning_an_equal_value_is_allowed() -> None:
    class Notes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.shape = x.shape
            return x * self.shape[0]

    module = Notes()
    module(one_rank())
    assert_agree(sw.compile(module), module, one_rank())


def hooked(x: Tensor) -> Tensor:
    y = x * 2
    y.register_hook(lambda gradient: gradient * 10)
    return (y * y).sum()


def hooked_locally(x: sw.DTensor) -> Tensor:
    y = x.to_local() * 2
    y.register_hook(lambda gradient: gradient * 10)
    return (y * y).sum()


def sets_requires_grad(x: Tensor) -> Tensor:
    y = x.detach()
    y.requires_grad = True
    return y * 3


def clears_requires_grad(x: Tensor) -> Tensor:
    x.requires_grad_(False)
    return x * 3


def resets_grad(x: Tensor) -> Tensor:
    x.grad = None
    return x * 3


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (hooked, r"registers a hook on a tensor \(register_hook\)"),
        (hooked_locally, r"registers a hook on a tensor \(register_hook\)"),
        (lambda x: (x * 2).retain_grad(), r"registers a hook on a tensor \(retain_grad\)"),
        (lambda x: x.register_post_accumulate_grad_hook(print), r"\(register_post_accumulate_grad_hook\)"),
        (lambda x: x.detach().requires_grad_(True) * 3, "changes requires_grad of a tensor"),
        (sets_requires_grad, "changes requires_grad of a tensor"),
        (clears_requires_grad, "changes requires_grad of a tensor"),
        (resets_grad, "sets the gradient of a tensor"),
    ],
)
def test_tensor_hooks_and_changes_of_requires_grad_raise(program: Callable[..., Any], why: str) -> None:
    with pytest.raises(CaptureError, match=rf"test_compile.py:\d+: the program {why}|test_compile.py:\d+: .*{why}"):
        sw.compile(program)(one_rank().requires_grad_())
    x = one_rank().requires_grad_()
    hooked(x).backward()  # outside of a capture they work
    assert x.grad[1].tolist() == [240.0, 320.0, 400.0]
    assert_agree(sw.compile(lambda x: x.requires_grad_() * 3), lambda x: x * 3, x)  # no change


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_of_modules_raise(register: str) -> None:
    module = nn.Sequential(nn.ReLU())
    compiled, x = sw.compile(module), one_rank().requires_grad_()
    assert_agree(compiled, module, x)
    hook = getattr(module[0], register)(lambda module, *gradients: None)
    with pytest.raises(CaptureError, match=r"test_compile.py:\d+: Sequential\.0 has a backward hook.*: remove it"):
        compiled(x)
    with torch.no_grad():
        assert_agree(compiled, module, x)
    hook.remove()
    assert_agree(compiled, module, x)

    def makes(x: Tensor) -> Tensor:
        made = nn.ReLU()
        getattr(made, register)(lambda module, *gradients: None)
        return made(x)

    with pytest.raises(CaptureError, match=r"test_compile.py:\d+: a module has a backward hook"):
        sw.compile(makes)(x)


def test_decorator_and_number_of_programs() -> None:
    @sw.compile(backend=None)
    def twice(x: Tensor) -> Tensor:
        """Doubles."""
        return x * 2

    assert twice.__doc__ == "Doubles."
    twice(one_rank())
    assert "torch.mul" in twice.programs[0].code
    times = sw.compile(lambda x, n: x * n)
    for number in range(70):
        times(one_rank(), number)
    assert len(times.programs) == 64
