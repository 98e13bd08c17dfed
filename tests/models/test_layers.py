import uuid
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from pytest_modelprobe.exceptions import UnsupportedModelError
from pytest_modelprobe.models.layers import Layers, attributes
from pytest_modelprobe.probe import Watch


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x):
        return self.b(self.a(x))


NAMES = ["(root)", "a", "b", "b.0", "b.1"]


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def names(model):
    return list(Layers(model).modules)


# --- names ----------------------------------------------------------------------------------------------------------


def test_names_are_those_of_named_modules():
    model = Net()
    assert [name or "(root)" for name, _ in model.named_modules()] == names(model) == NAMES


def test_other_names_of_a_module_are_aliases():
    model = Net()
    model.c, model.d = model.b, model.b[0]
    layers = Layers(model)
    assert list(layers.modules) == NAMES
    assert layers.aliases == {"b": ["c"], "b.0": ["d"]}


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_checkpoint_wrapper_is_looked_through():
    model = Net()
    model.b[0] = checkpoint_wrapper(model.b[0], checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    model.a = checkpoint_wrapper(model.a, checkpoint_impl=CheckpointImpl.REENTRANT)
    assert names(checkpoint_wrapper(model)) == NAMES
    with Watch(model) as watch:
        model(torch.ones(3, 4, requires_grad=True)).sum().backward()
    for name in ("a", "b.0"):
        (call,) = watch.record.layers[name].calls
        assert call.recomputed == 1
        assert call.outputs[0].backward is not None


def test_a_distributed_model_is_looked_through_and_its_gradients_called_local(process_group):
    model = nn.parallel.DistributedDataParallel(Net())
    layers = Layers(model)
    assert list(layers.modules) == NAMES
    assert layers.notes == ["DistributedDataParallel: gradients are this rank's, before averaging"]
    with Watch(model) as watch:
        model(torch.ones(3, 4)).sum().backward()
    record = watch.record
    assert record.notes == ("DistributedDataParallel: gradients are this rank's, before averaging",)
    assert record.layers["(root)"].calls[0].root == "(root)"
    gradient = record.layers["a"].parameters[0].gradient.statistics
    assert gradient.max == model.module.a.weight.grad.max()


def test_wrappers_around_wrappers_are_looked_through(process_group):
    model = Net()
    model.b = torch.compile(checkpoint_wrapper(model.b), backend="eager")
    assert names(nn.parallel.DistributedDataParallel(torch.compile(model, backend="eager"))) == NAMES


# --- atomic modules -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module", [nn.MultiheadAttention(4, 2), nn.LSTM(4, 4), nn.GRU(4, 4), nn.RNN(4, 4)], ids=lambda m: type(m).__name__
)
def test_modules_with_fused_code_are_not_entered(module):
    layers = Layers(nn.Sequential(module))
    assert list(layers.modules) == ["(root)", "0"]
    assert layers.is_leaf("0")
    assert not layers.is_leaf("(root)")


# --- refused --------------------------------------------------------------------------------------------------------


def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        return torch.jit.script(nn.ReLU())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Net, "Net is the class, not a model: give an instance, Net(...)"),
        (lambda: torch.relu, "a model is a torch.nn.Module; got builtin_function_or_method: wrap the function in"),
        (lambda: "net", "a model is a torch.nn.Module; got str"),
        (lambda: nn.DataParallel(Net()), "DataParallel runs copies of the model in threads, which hooks do not see: "),
        (lambda: nn.Sequential(nn.DataParallel(Net())), "DataParallel runs copies of the model"),
        (scripted, "(root) is a ScriptModule, which runs outside Python and calls no hooks: use the eager module"),
        (lambda: nn.Sequential(scripted()), "0 is a ScriptModule, which runs outside Python"),
    ],
    ids=["class", "function", "string", "DataParallel", "inner DataParallel", "ScriptModule", "inner ScriptModule"],
)
def test_what_cannot_be_watched_is_refused_in_one_sentence(make, message):
    with pytest.raises(UnsupportedModelError) as caught:
        Layers(make())
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_fsdp1_is_refused_in_one_sentence(process_group, monkeypatch):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    wrapped = fsdp.FullyShardedDataParallel.__new__(fsdp.FullyShardedDataParallel)  # it needs an accelerator to be made
    nn.Module.__init__(wrapped)
    model = nn.Sequential()
    model._modules["0"] = wrapped
    with pytest.raises(UnsupportedModelError, match="0 is wrapped in FSDP1, whose flat parameters hide"):
        Layers(model)


# --- facts of a module ----------------------------------------------------------------------------------------------


def test_plain_attributes_are_those_of_the_user():
    model = Net()
    model.scale, model.name, model.flag, model.config = 0.5, "net", True, {"width": 4}
    assert attributes(model) == {"scale": 0.5, "name": "net", "flag": True}
    assert attributes(nn.Dropout(0.25)) == {"p": 0.25, "inplace": False}


def test_an_identity_that_is_drawn_for_each_model_is_no_attribute():
    model = Net()
    model.name, model._incremental_state_id, model.checksum = "net", str(uuid.uuid4()), "0" * 32
    assert attributes(model) == {"name": "net", "checksum": "0" * 32}


def test_the_sequences_of_a_convolution_are_attributes_but_not_those_it_derives():
    found = attributes(nn.Conv2d(1, 1, 3, stride=2, padding=1))
    assert {k: v for k, v in found.items() if type(v) is str} == {
        "kernel_size": "(3, 3)",
        "stride": "(2, 2)",
        "padding": "(1, 1)",
        "dilation": "(1, 1)",
        "output_padding": "(0, 0)",
        "padding_mode": "zeros",
    }


def test_a_sequence_that_is_long_or_holds_more_than_numbers_and_texts_is_no_attribute():
    model = Net()
    model.short, model.long, model.nested, model.modules_ = [0] * 16, [0] * 17, [(1, 2)], [nn.ReLU()]
    assert attributes(model) == {"short": str((0,) * 16)}


@pytest.mark.parametrize(("training", "notes"), [(True, 0), (False, 1)])
def test_the_fused_path_that_hooks_turn_off_is_noted(training, notes):
    model = nn.Sequential(*(nn.TransformerEncoderLayer(4, 2, 8) for _ in range(2))).train(training)
    assert len(Watch(model).record.notes) == notes
