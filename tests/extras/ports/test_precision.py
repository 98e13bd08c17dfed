"""`precision`: the errors of each layer of a quantized or lower-precision model."""

import copy
import math

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from pytest_modelprobe import ModelProbe, NothingObservedError, SelectionError, UsageError, precision

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(64, 32), nn.ReLU(inplace=True), nn.Linear(32, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        x = self.act(self.fc1(x))
        return self.head(self.act(self.fc2(x)))


@pytest.fixture(scope="module")
def digits():
    data = load_digits()
    return torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)


@pytest.fixture(scope="module")
def net(digits):
    model = ModelProbe().build(Net)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(digits[0]), digits[1]).backward()
        optimizer.step()
    return model.eval()


@pytest.fixture
def images(digits):
    return digits[0][:100]


def int8(model):
    return torch.ao.quantization.quantize_dynamic(copy.deepcopy(model).eval(), {nn.Linear}, torch.qint8)


def sqnr(actual, expected):
    noise = (expected.double() - actual.double()).norm()
    return 20 * math.log10(expected.double().norm() / noise)


def cosine(actual, expected):
    return torch.cosine_similarity(actual.double().flatten(), expected.double().flatten(), dim=0).item()


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [int8, lambda model: copy.deepcopy(model).bfloat16()])
def test_the_errors_are_those_of_a_plain_computation(version, net, images):
    low = version(net)
    cast = images.bfloat16() if next(low.parameters(), images).dtype == torch.bfloat16 else images
    table = precision(low, net, images)
    with torch.no_grad():
        x = net.fc1(images).relu()
        expected = net.fc2(x)
        own = low.fc2(x.to(cast.dtype))
        run = low.fc2(low.fc1(cast).relu())
        output = net.head(own.float().relu())
        whole = net(images)
        row = table["fc2"]
        assert row.own == pytest.approx(sqnr(own, expected))
        assert row.own_cosine == pytest.approx(cosine(own, expected))
        assert row.run == pytest.approx(sqnr(run, expected))
        assert row.run_cosine == pytest.approx(cosine(run, expected))
        left = (run.double() - own.double()).norm()
        assert row.inherited == pytest.approx(20 * math.log10(expected.double().norm() / left))
        assert row.output == pytest.approx(sqnr(output, whole))
        assert table.sqnr == pytest.approx(sqnr(low(cast), whole))
        assert table.cosine == pytest.approx(cosine(low(cast), whole))


def test_the_first_layer_inherits_nothing_and_an_equal_layer_adds_nothing(net, images):
    table = precision(int8(net), net, images)
    assert table["fc1"].inherited == math.inf
    assert table["fc1"].run == table["fc1"].own
    assert (table["act"].own, table["act"].output) == (math.inf, math.inf)
    assert table["act"].run == table["act"].inherited < 60


def test_only_layers_with_an_error_of_their_own_are_put_into_the_reference(net, images):
    reference, forwards = copy.deepcopy(net), []
    reference.register_forward_hook(lambda *call: forwards.append(call))
    precision(int8(net), reference, images)
    assert len(forwards) == 2 + 3


def test_equal_models_have_no_error(net, images):
    table = precision(copy.deepcopy(net), net, images)
    assert (table.sqnr, table.cosine) == (math.inf, pytest.approx(1))
    assert {(row.own, row.run, row.inherited, row.output) for row in table.rows} == {(math.inf,) * 4}


def test_a_copy_that_is_not_finite_has_the_worst_error(net, images):
    low = copy.deepcopy(net)
    nn.init.constant_(low.fc2.bias, math.nan)
    table = precision(low, net, images)
    assert (table.rows[0].layer, table.rows[0].own, table.sqnr, table.cosine) == ("fc2", -math.inf, -math.inf, None)


# --- a planted fault --------------------------------------------------------------------------------------------------


def with_bad_scale(low, net, layer):
    """Quantize the weight of one layer with a scale that is too small for it, as a wrong observer does."""
    weight = getattr(net, layer).weight.detach()
    bad = torch.quantize_per_tensor(weight, weight.abs().max().item() / 127 / 4, 0, torch.qint8)
    getattr(low, layer).set_weight_bias(bad, getattr(net, layer).bias)


@pytest.mark.parametrize("layer", ["fc2", "head"])
def test_a_layer_with_a_bad_scale_comes_first(layer, net, images):
    low = int8(net)
    with_bad_scale(low, net, layer)
    worst, second, *_ = precision(low, net, images).rows
    assert worst.layer == layer
    assert worst.own < 20 < second.own
    assert worst.output < second.output - 10


# --- transformers -----------------------------------------------------------------------------------------------------


def gpt2(probe):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=100, bos_token_id=1, eos_token_id=1)
    return probe.build(lambda: transformers.GPT2LMHeadModel(config))


def test_a_fault_in_a_transformer_with_a_cache_comes_first():
    probe = ModelProbe()
    model = gpt2(probe)
    low = copy.deepcopy(model).bfloat16()
    with torch.no_grad():
        low.transformer.h[1].attn.c_proj.weight.mul_(-1)
    table = probe.precision(low, model, probe.randint(0, 100, (2, 8)))
    assert table.rows[0].layer == "transformer.h.1.attn.c_proj"
    assert {"transformer.h.1.attn", "transformer.h.1", "transformer"} == {row.layer for row in table.containers[:3]}
    assert not any(row.note for row in (*table.rows, *table.containers))


# --- other versions ---------------------------------------------------------------------------------------------------


class Autocast(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(x)


@pytest.mark.parametrize("shared", [True, False])
def test_autocast_is_on_where_a_layer_is_called_alone(shared, net, images):
    low = Autocast(net if shared else copy.deepcopy(net))
    table = precision(low, net, images, rename={"model.*": "*"})
    with torch.no_grad():
        x = net.fc1(images).relu()
        own = nn.functional.linear(x.bfloat16(), net.fc2.weight.bfloat16(), net.fc2.bias.bfloat16())
        assert table["model.fc2"].own == pytest.approx(sqnr(own, net.fc2(x)), abs=1e-3)
    assert table["model"].note == "the reference has no such layer"


def test_a_compiled_model_is_refused(net, images):
    with pytest.raises(UsageError, match="is compiled, and layers in compiled code cannot be called alone"):
        precision(torch.compile(copy.deepcopy(net), backend="eager"), net, images)


# --- what cannot be measured is told ----------------------------------------------------------------------------------


class OfIntegers(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        if not (x == x.round()).all():
            raise ValueError("codes are integers.\nSee the manual.")
        return x @ self.weight


class Codes(nn.Module):
    def __init__(self, coded):
        super().__init__()
        self.coded = coded
        self.fc = OfIntegers(torch.ones(4, 4)) if coded else nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x.round() if self.coded else x)


def test_a_layer_that_cannot_take_the_inputs_of_the_reference_is_told():
    table = precision(Codes(True), Codes(False), torch.randn(3, 4))
    (row,) = table.rows
    assert row.run is not None
    assert (row.own, row.inherited, row.output) == (None, None, None)
    assert str(table).splitlines()[-1] == (
        "Not measured: fc: it cannot take the inputs of the reference (ValueError: codes are integers)."
    )


class Parts(nn.Module):
    def __init__(self, *, act=False, times=1, width=4):
        super().__init__()
        self.fc, self.pick, self.times = nn.Linear(4, width), Pick(), times
        if act:
            self.act = nn.ReLU()

    def forward(self, x):
        y = x
        for _ in range(self.times):
            y = self.fc(x)
        if hasattr(self, "act"):
            y = self.act(y)
        return y[:, :4] * (self.pick(y) >= 0)[:, None]


class Pick(nn.Module):
    def forward(self, x):
        return x.argmax(-1)


@pytest.mark.parametrize(
    ("mine", "theirs", "layer", "note"),
    [
        ({}, {}, "pick", "it has no floating-point output"),
        ({"act": True}, {}, "act", "the reference has no such layer"),
        ({"times": 0}, {}, "fc", "the model does not call it"),
        ({"times": 2}, {}, "fc", "the model calls it 2 times, the reference 1"),
        ({"width": 6}, {}, "fc", "its outputs are output (3, 6), those of the reference output (3, 4)"),
    ],
)
def test_a_layer_that_is_not_comparable_has_a_row_that_says_why(mine, theirs, layer, note):
    table = precision(Parts(**mine), Parts(**theirs), torch.randn(3, 4))
    assert table[layer].note == note
    assert (table[layer].output, table[layer].own, table[layer].run) == (None, None, None)
    assert f"Not measured: {layer}: {note}." in str(table).splitlines()


class Drops(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x, training=True)


def test_a_layer_that_draws_random_numbers_in_eval_mode_is_told():
    net = nn.Sequential(nn.Linear(4, 4), Drops())
    table = precision(copy.deepcopy(net), net, torch.randn(3, 4))
    assert table["1"].note == "it draws random numbers in eval mode"
    assert table["0"].own == math.inf


# --- misuse -----------------------------------------------------------------------------------------------------------


class Argmax(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x).argmax(-1)


COUNTED = []


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        COUNTED.append(1)
        return self.fc(x) + len(COUNTED)


@pytest.mark.parametrize(
    ("model", "reference", "message"),
    [
        (nn.Linear(4, 2), nn.Linear(4, 3), "the outputs of the model and of the reference cannot be compared: "),
        (Argmax(), Argmax(), "the output of the reference has no floating-point tensor: return the logits"),
        (Counting(), Counting(), "the reference does not repeat its output in eval mode"),
    ],
)
def test_models_that_cannot_be_compared_are_refused(model, reference, message):
    with pytest.raises(UsageError, match=f"^{message}"):
        precision(model, reference, torch.randn(3, 4))


def test_a_selection_that_matches_nothing_is_an_error(net, images):
    with pytest.raises(SelectionError):
        precision(int8(net), net, images, layers="blocks.*")
    with pytest.raises(NothingObservedError, match=r"^no layer was compared: select layers that the forward calls$"):
        precision(nn.Linear(4, 2), nn.Linear(4, 2), torch.randn(3, 4))


# --- no trace ---------------------------------------------------------------------------------------------------------


def hooks_of(*models):
    return [h for model in models for m in model.modules() for h in (*m._forward_hooks, *m._forward_pre_hooks)]


def test_both_models_are_restored_and_have_no_hooks(images):
    net = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2)).train()
    low = copy.deepcopy(net).bfloat16()
    low[0].eval()
    states = [copy.deepcopy(model.state_dict()) for model in (low, net)]
    random = torch.get_rng_state()
    precision(low, net, images)
    for model, state in zip((low, net), states, strict=True):
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert [m.training for m in low.modules()] == [True, False, True, True, True]
    assert all(m.training for m in net.modules())
    assert torch.equal(torch.get_rng_state(), random)
    assert hooks_of(low, net) == []


class Fails(nn.Module):
    def __init__(self, at):
        super().__init__()
        self.fc, self.at, self.calls = nn.Linear(4, 4), at, 0

    def forward(self, x):
        COUNTED.append(1)
        if len(COUNTED) == self.at:
            raise RuntimeError("out of memory")
        return self.fc(x)


@pytest.mark.parametrize("at", [3])
def test_both_models_have_no_hooks_after_an_error(at):
    COUNTED.clear()
    low, net = Fails(at).train(), Fails(at).train()
    with pytest.raises(RuntimeError, match="out of memory"):
        precision(low, net, torch.randn(3, 4))
    assert hooks_of(low, net) == []
    assert low.training
    assert net.fc.training


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_table_says_what_its_columns_are():
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Identity())
    low = copy.deepcopy(net)
    with torch.no_grad():
        net[0].weight.copy_(torch.eye(2))
        low[0].weight.copy_(torch.eye(2) * 1.1)
    assert str(precision(low, net, torch.ones(1, 2))).splitlines() == [
        "Sequential: SQNR of the output 20.0 dB, cosine 1.0000",
        "",
        "layer                  type       output dB   own dB   own cosine   run dB   inherited dB",
        "layer '0' (Linear)     Linear          20.0     20.0       1.0000     20.0            inf",
        "layer '1' (Identity)   Identity         inf      inf       1.0000     20.0           20.0",
        "",
        (
            "SQNR in dB. output: of the reference with this layer taken from the model; own: of the layer on the "
            "inputs of the reference;"
        ),
        "run: in the run of the model; inherited: what is left in the run without the layer's own error.",
    ]
