"""What the probe reads stays as it was, its memory included: a model may resize it, watched or not."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pytest_modelprobe
from pytest_modelprobe import ModelProbe, statistics
from pytest_modelprobe.models.seeding import generator_states
from pytest_modelprobe.models.tensors import as_array
from pytest_modelprobe.runs.fakes import architecture

KINDS: dict[str, Callable[[], Tensor]] = {
    "nothing": lambda: torch.empty(0, 3),
    "small": lambda: torch.arange(12.0).view(3, 4),
    "larger than a block": lambda: torch.arange(3.0 * 2**20).view(3, -1),
    "large, not finite": lambda: torch.full((60_000,), torch.nan),
    "bfloat16": lambda: torch.arange(60_000.0).bfloat16(),
    "imaginary part of the conjugate": lambda: torch.zeros(60_000, dtype=torch.complex64).conj().imag,
    "bool": lambda: torch.ones(60_000, dtype=torch.bool),
    "int64": lambda: torch.arange(60_000),
    "expanded": lambda: torch.randn(200, 1, 300).expand(200, 4, 300),
}


@pytest.mark.parametrize("axis", [None, -1])
@pytest.mark.parametrize("kind", KINDS)
def test_the_memory_of_what_is_reduced_can_still_be_resized(kind: str, axis: int | None) -> None:
    tensor = KINDS[kind]()
    (reading,) = statistics.collect([statistics.reduce(tensor, axis=axis if tensor.dim() else None)])
    assert reading.reason is None
    assert tensor.untyped_storage().resizable()
    tensor.detach().resize_(70_000)


def test_an_array_is_of_the_same_memory_and_keeps_it_alive() -> None:
    x = torch.arange(6.0).view(2, 3).t()
    array = as_array(x)
    x.mul_(2)
    assert array.tolist() == x.tolist() == [[0.0, 6.0], [2.0, 8.0], [4.0, 10.0]]
    del x
    assert array.tolist() == [[0.0, 6.0], [2.0, 8.0], [4.0, 10.0]]


def test_the_ranges_of_units_are_no_memory_of_the_model() -> None:
    x = torch.arange(60_000.0)
    reduced = statistics.reduce(x, axis=-1)
    x.resize_(0)
    x.resize_(60_000).fill_(-1.0)
    (reading,) = statistics.collect([reduced])
    assert reading.units is not None
    assert reading.units.low[-1] == reading.units.high[-1] == 59_999


def test_to_ask_whether_generators_moved_leaves_them_as_they_are() -> None:
    before = generator_states(torch.device("cpu"))
    torch.default_generator.get_state().resize_(0)
    assert generator_states(torch.device("cpu")) == before


class Resizing(nn.Module):
    """Keeps which elements it saw, in a buffer as long as the batch, and resizes whatever it can."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(0))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.resize_(len(x)).fill_(1.0)
        self.count.resize_(1).fill_(1)
        y: Tensor = self.fc(x)
        copy = nn.Identity()(y.detach().clone())
        copy.resize_(1000)
        return y


def test_a_model_that_resizes_a_buffer_runs_under_the_probe(modelprobe: ModelProbe) -> None:
    model = Resizing()
    modelprobe.run(model, torch.ones(2, 4), loss="random")
    assert model.seen.shape == (0,)
    modelprobe.run(model, torch.ones(3, 4))
    record = architecture(model, torch.ones(2, 4))
    assert record["fc"].output.shape == (2, 3)
    model(torch.ones(5, 4))
    assert model.seen.shape == (5,)


def test_a_model_that_resizes_a_buffer_is_watched_and_goes_on_after_it(modelprobe: ModelProbe) -> None:
    model = Resizing()
    with modelprobe.watch(model) as watch:
        for length in (2, 3, 1):
            model(torch.ones(length, 4)).sum().backward()
    assert watch.record["(root)"].buffers[0].shape == (1,)
    model(torch.ones(60_000, 4))
    assert model.seen.shape == (60_000,)


@pytest.mark.parametrize("size", [4, 200])
def test_everything_that_a_watch_reads_can_be_resized(modelprobe: ModelProbe, size: int) -> None:
    read: list[Tensor] = []
    model = nn.Sequential(nn.Linear(size, size), nn.BatchNorm1d(size), nn.ReLU())
    model.register_forward_hook(lambda module, args, output: read.extend((*args, output)))
    x = torch.randn(size, size, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with modelprobe.watch(model, attention=True, functionals=True, keep="**"):
        model(x).sum().backward()
        optimizer.step()
    gradients = [tensor.grad for tensor in (x, *model.parameters())]
    read += [*model.parameters(), *model.buffers(), *(g for g in gradients if g is not None)]
    assert len(read) == 14
    assert all(tensor.untyped_storage().resizable() for tensor in read)


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated", "ignore:Please use quant_min")
def test_quantization_aware_training_runs_under_the_probe(modelprobe: ModelProbe) -> None:
    from torch.ao import quantization

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).train()
    model.qconfig = quantization.get_default_qat_qconfig("x86")
    prepared: Any = quantization.prepare_qat(model)
    modelprobe.run(prepared, torch.randn(2, 4), loss="random", mode="train")
    with modelprobe.watch(prepared):
        prepared(torch.randn(3, 4)).sum().backward()
    prepared(torch.randn(3, 4))


def test_one_function_alone_turns_tensors_into_arrays() -> None:
    package = Path(pytest_modelprobe.__file__).parent
    found = {
        (path.relative_to(package).as_posix(), node.attr)
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in {"numpy", "from_dlpack", "__array__", "asarray"}
    }
    assert found == {("models/tensors.py", "from_dlpack")}


def test_no_tensor_is_turned_into_an_array_by_numpy(modelprobe: ModelProbe, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("this makes the memory unresizable for good")

    monkeypatch.setattr(Tensor, "numpy", refuse)
    monkeypatch.setattr(Tensor, "__array__", refuse)
    model = nn.Sequential(nn.Linear(200, 200), nn.Dropout(), nn.BatchNorm1d(200))
    with modelprobe.watch(model, functionals=True, attention=True) as watch:
        model(torch.randn(300, 200)).sum().backward()
    assert watch.record.backwards == 1
    modelprobe.run(model, torch.randn(300, 200), loss="random", mode="train")
    architecture(model, torch.randn(300, 200))
