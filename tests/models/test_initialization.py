"""Named initialization: every weight is drawn from its own name."""

import copy
import inspect
import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.models import initialization as initialization
from pytest_modelprobe.models.initialization import build
from pytest_modelprobe.models.seeding import randn, seeded


def rng_states():
    numpy = [np.asarray(part).tolist() for part in np.random.get_state()]  # noqa: NPY002
    return torch.get_rng_state().tolist(), numpy, random.getstate()


# --- named initialization: what is promised of every model ------------------------------------


def tensors(model):
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach() for name, tensor in named}


def resnet(blocks):
    transformers = pytest.importorskip("transformers")
    sizes = {"depths": [1, 1, blocks], "hidden_sizes": [8, 16, 32], "embedding_size": 8}
    return transformers.ResNetModel(transformers.ResNetConfig(**sizes))


@pytest.fixture(scope="module")
def built():
    with seeded(1):
        return tensors(build(lambda: resnet(2), seed=0))


def test_one_more_block_leaves_all_weights_alone(built):
    larger = tensors(build(lambda: resnet(3), seed=0))
    assert len(larger) > len(built)
    assert all(torch.equal(tensor, larger[name]) for name, tensor in built.items())


def test_the_global_seed_does_not_matter_and_is_not_touched(built):
    torch.manual_seed(99)
    before = rng_states()
    again = tensors(build(lambda: resnet(2), seed=0))
    assert rng_states() == before
    assert all(torch.equal(tensor, again[name]) for name, tensor in built.items())


def test_each_weight_keeps_its_distribution(built):
    with seeded(10):  # the model twice without build(): what the two share is not random
        first, second = tensors(resnet(2)), tensors(resnet(2))
    for name, tensor in built.items():
        if tensor.numel() >= 1000 and not torch.equal(first[name], second[name]):
            ratio = float(tensor.std() / first[name].std())
            assert abs(ratio - 1) < 5 / tensor.numel() ** 0.5, name
            assert abs(float(tensor.mean() - first[name].mean())) < 0.2 * tensor.std(), name


def test_tied_weights_stay_tied():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=64, n_head=4, vocab_size=300)
    model = build(lambda: transformers.GPT2LMHeadModel(config), seed=0)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.lm_head.weight.std().item() == pytest.approx(config.initializer_range, rel=0.05)


# --- named initialization: ways to fill a tensor ----------------------------------------------


class Holder(nn.Module):
    """A module with one parameter, made by a function, after some layers and before some."""

    def __init__(self, make, more=0):
        super().__init__()
        self.before = nn.ModuleList(nn.Linear(3, 3) for _ in range(more))
        made = make()
        self.it = made if isinstance(made, nn.Module) else nn.Parameter(made)
        self.after = nn.ModuleList(nn.Linear(3, 3) for _ in range(more))


def filled(fill, *shape):
    return lambda: fill(torch.empty(*shape))


def masked():
    weight = torch.randn(6, 6)
    return weight * torch.tril(torch.ones(6, 6))


def via_data():
    layer = nn.Linear(4, 4)
    layer.weight.data = torch.randn(4, 4) / 10
    return layer


def deep_copied_buffer():
    layer = nn.BatchNorm1d(4)
    layer.running_mean.normal_()
    return copy.deepcopy(layer)


WAYS = {
    "normal_": filled(nn.init.normal_, 5),
    "trunc_normal_": filled(nn.init.trunc_normal_, 50, 40),
    "randn": lambda: torch.randn(4, 8) * 0.02,
    "masked": masked,
    ".data": via_data,
    "deep copied buffer": deep_copied_buffer,
    "LSTM": lambda: nn.LSTM(4, 4, num_layers=2, bidirectional=True),
    "MultiheadAttention": lambda: nn.MultiheadAttention(4, 2),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
}


def held(make, seed=0, more=0):
    built = tensors(build(lambda: Holder(make, more), seed=seed))
    return {name: tensor for name, tensor in built.items() if name.startswith("it")}


@pytest.mark.parametrize("make", WAYS.values(), ids=WAYS)
def test_a_weight_is_drawn_from_its_name_and_the_seed(make):
    first, with_others, other = held(make), held(make, more=2), held(make, seed=1)
    assert all(torch.equal(tensor, with_others[name]) for name, tensor in first.items())
    assert not all(torch.equal(tensor, other[name]) for name, tensor in first.items())


def test_a_named_weight_is_the_same_for_ever():
    model = build(lambda: nn.Linear(2, 1), seed=0)
    assert model.weight.flatten().tolist() == pytest.approx([0.57069, -0.668746], abs=1e-6)


def test_trunc_normal_stays_in_range():
    for low, high in ((-2, 2), (1.5, 2.5)):
        make = filled(lambda t, a=low, b=high: nn.init.trunc_normal_(t, a=a, b=b), 200, 50)
        weight = build(lambda make=make: Holder(make), seed=0).it
        assert low <= weight.min() < low + 0.01
        assert high - 0.01 < weight.max() <= high


def test_the_padding_row_stays_zero():
    model = build(lambda: nn.Embedding(5, 3, padding_idx=2), seed=0)
    assert model.weight[2].tolist() == [0, 0, 0]
    assert model.weight[1].abs().min() > 0


def test_a_tensor_overwritten_with_fixed_values_keeps_them():
    table = torch.arange(9.0).view(3, 3)

    def make():
        model = nn.Linear(3, 3)
        model.copied = nn.Parameter(model.weight.detach().clone())
        with torch.no_grad():
            model.weight.copy_(table)
        model.bias.data.zero_()
        return model

    model = build(make, seed=0)
    assert torch.equal(model.weight, table)
    assert model.bias.tolist() == [0, 0, 0]
    assert not torch.equal(model.copied, table)


def test_a_weight_made_of_two_others_stays_their_sum():
    def make():
        model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
        model.sum = nn.Parameter(model["a"].weight.detach() + model["b"].weight.detach())
        return model

    model = build(make, seed=0)
    assert torch.equal(model.sum, model["a"].weight + model["b"].weight)


def test_norms_of_weights_start_as_the_layers_that_they_wrap():
    original0, original1 = build(WAYS["weight_norm"], seed=0).parametrizations.weight.parameters()
    torch.testing.assert_close(original0, original1.norm(dim=1, keepdim=True))
    model = build(WAYS["spectral_norm"], seed=0).eval()  # it starts converged
    assert torch.linalg.matrix_norm(model.weight, 2).item() == pytest.approx(1, abs=0.05)


def test_draws_from_an_explicit_generator_stay():
    def make():
        return torch.randn(4, generator=torch.Generator().manual_seed(7))

    assert torch.equal(build(lambda: Holder(make), seed=0).it, make())


def test_values_that_python_looks_at_are_kept_as_python_saw_them():
    def rejection():
        weight = torch.randn(1000)
        while (bad := weight.abs() > 1).any():
            weight[bad] = torch.randn(int(bad.sum()))
        return weight

    weight = build(lambda: Holder(rejection), seed=0).it
    assert weight.abs().max() <= 1
    assert torch.equal(weight, build(lambda: Holder(rejection), seed=0).it)


def test_requires_grad_and_version_counters_are_as_the_factory_left_them():
    def make():
        model = nn.Linear(3, 3)
        model.bias.requires_grad_(False)
        return model

    model, plain = build(make, seed=0), make()
    assert [p.requires_grad for p in model.parameters()] == [True, False]
    assert [p._version for p in model.parameters()] == [p._version for p in plain.parameters()]
    assert all(p.is_leaf and p.grad is None for p in model.parameters())


def test_numbers_of_numpy_and_random_are_the_same_every_time():
    def make():
        return torch.tensor(np.random.randn(3) + random.random())  # noqa: NPY002

    first, second = (build(lambda: Holder(make), seed=0).it for _ in range(2))
    assert torch.equal(first, second)


# --- named initialization: where there is nothing to fill, and misuse -------------------------


def test_meta_and_lazy_layers_are_left_alone():
    layers = nn.LazyLinear, lambda n: nn.Linear(n, n, device="meta"), lambda n: nn.Linear(n, n)
    model = build(lambda: nn.Sequential(*(layer(3) for layer in layers)), seed=0)
    assert model[0].has_uninitialized_params()
    assert model[1].weight.is_meta
    assert model[2].weight.abs().min() > 0


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (nn.Linear(2, 2), "got a Linear, already made"),
        (None, "got a NoneType"),
        (lambda: {"model": 1}, "got a function that returned a dict"),
    ],
    ids=["module", "no function", "no module"],
)
def test_what_is_no_factory_is_named(factory, message):
    with pytest.raises(UsageError) as error:
        build(factory, seed=0)
    start = "build() takes a function that makes the model: build(lambda: Net(...)); "
    assert str(error.value) == start + message


def test_an_error_of_the_factory_passes_and_the_states_are_put_back():
    def fail():
        nn.Linear(3, 3)
        raise KeyError("mine")

    before = rng_states()
    with pytest.raises(KeyError, match="mine"):
        build(fail, seed=0)
    assert rng_states() == before


class Drawn(nn.ParameterDict):
    def __init__(self):
        super().__init__(
            {
                "linear": nn.Linear(37, 20).weight,
                "embedding": nn.Embedding(37, 20).weight,
                "lstm": nn.LSTM(5, 20).weight_hh_l0,
                "randn": torch.randn(7, 9) * 0.02,
                "like": torch.randn_like(torch.empty(7, 9)),
                "imaginary": torch.randn(7, 9, dtype=torch.complex64),
                "narrow": nn.init.normal_(torch.empty(7, 9, dtype=torch.bfloat16), 1, 0.02),
                "wide": nn.Linear(7, 9, dtype=torch.float64).weight,
                "truncated": nn.init.trunc_normal_(torch.empty(40, 30), std=0.02),
                "orthogonal": nn.init.orthogonal_(torch.empty(33, 33)),
            }
        )


def as_drawn():
    drawn = {name: torch.view_as_real(p) if p.is_complex() else p for name, p in build(Drawn, seed=0).items()}
    drawn["an input"] = randn((3, 77), seed=0, name="x", device="cpu")
    return {name: tensor.tolist() for name, tensor in drawn.items()}


IN_ANOTHER_PROCESS = f"""
import json, sys
import torch
from torch import nn
from pytest_modelprobe.models.initialization import build
from pytest_modelprobe.models.seeding import randn

build(lambda: nn.Sequential(nn.Linear(2, 2), nn.Embedding(3, 2), nn.LSTM(2, 2)), seed=0)
seen = ["torch._dynamo" in sys.modules]
{inspect.getsource(Drawn)}
{inspect.getsource(as_drawn)}
torch.set_num_threads(3)
seen.append(as_drawn())
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def another_process():
    command = [sys.executable, "-Werror", "-c", IN_ANOTHER_PROCESS]
    base = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}  # without vector instructions
    out = subprocess.run(command, env=base, capture_output=True, text=True, check=True)
    assert out.stderr == ""
    return json.loads(out.stdout)


def test_building_a_model_does_not_import_the_compiler(another_process):
    assert another_process[0] is False


def test_another_process_without_vector_instructions_and_with_other_threads_draws_the_same_bits(another_process):
    assert another_process[1] == as_drawn()


def test_a_draw_for_another_device_is_made_on_the_cpu_into_the_same_tensor(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)  # as from another device
    target = torch.zeros(4, 4)[::2]
    fill = torch.ops.aten.normal_.default
    with seeded(3):
        result = initialization._on_cpu(fill, (target,), {}, torch.device("cpu"))
    with seeded(3):
        expected = torch.randn(2, 4)
    assert result is target
    assert torch.equal(target, expected)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["randn", "masked", "LSTM", "weight_norm"])
def test_a_model_made_on_cuda_has_the_weights_of_the_cpu(name):
    cpu = tensors(build(lambda: Holder(WAYS[name], more=1), seed=0))
    with torch.device("cuda"):
        cuda = tensors(build(lambda: Holder(WAYS[name], more=1), seed=0))
    for key, tensor in cpu.items():
        torch.testing.assert_close(cuda[key].cpu(), tensor, msg=key)
