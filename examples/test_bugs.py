"""Bugs that train without an error, and what the probe says about each. `pytest -s` prints the whole text.

Each model has one bug. For a subclass in which the bug is fixed, the same assertion passes.
"""

import textwrap

import numpy as np
import pytest
import torch
from torch import nn

from pytest_modelprobe import (
    assert_all_params_have_grad,
    assert_called,
    assert_dtypes,
    assert_finite,
    assert_grad_finite,
    assert_grad_flow,
    assert_no_dead_layers,
    assert_no_leftover_hooks,
    assert_shapes,
)

# The texts below have numbers in them, which depend on the seed.
pytestmark = pytest.mark.modelprobe(seed=0)


def said(failure):
    """Print the text of a failure, at most 100 characters wide, and return its first line."""
    lines = str(failure.value).splitlines()
    print("", *(textwrap.fill(line, 100) for line in lines), "", sep="\n")
    return lines[0]


# --- a ReLU without a positive input ------------------------------------------------------------------------------


class ImageClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(16, 64, 3, stride=2, padding=1)
        self.relu2 = nn.ReLU()
        self.head = nn.Linear(64, 10)
        nn.init.constant_(self.conv2.bias, -10.0)  # the bug: this was meant for the bias of the head

    def forward(self, images):
        features = self.relu2(self.conv2(self.relu1(self.conv1(images))))
        return self.head(features.mean(dim=(2, 3)))


class ImageClassifierMended(ImageClassifier):
    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.conv2.bias)


def test_a_relu_killed_by_the_bias_before_it(modelprobe):
    model = modelprobe.build(ImageClassifier)
    record = modelprobe.run(model, modelprobe.randn(4, 1, 14, 14))
    with pytest.raises(AssertionError) as failure:
        assert_no_dead_layers(record)
    assert said(failure) == "relu2 is dead: all 12,544 outputs are 0 in 1 forward; 1 of 6 layers looked at"


def test_a_relu_is_alive_with_a_bias_of_zero(modelprobe):
    model = modelprobe.build(ImageClassifierMended)
    assert_no_dead_layers(modelprobe.run(model, modelprobe.randn(4, 1, 14, 14)))


# --- the logarithm of a negative number ---------------------------------------------------------------------------


class AudioTagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.filters = nn.Conv1d(1, 8, kernel_size=16, stride=8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 4)

    def compress(self, energy):
        return torch.log(energy + 1e-6)  # the bug: the filters may return negative numbers

    def forward(self, waves):
        levels = self.norm(self.compress(self.filters(waves)))
        return self.head(levels.mean(dim=2))


class AudioTaggerMended(AudioTagger):
    def compress(self, energy):
        return torch.log(energy.square() + 1e-6)


def test_a_nan_by_the_logarithm_of_a_negative_number(modelprobe):
    model = modelprobe.build(AudioTagger)
    record = modelprobe.run(model, modelprobe.randn(2, 1, 256))
    with pytest.raises(AssertionError) as failure:
        assert_finite(record)
    assert said(failure) == (
        "norm input is not finite: 232 NaN of 496 elements, made between filters and norm; 3 of 4 layers looked at"
    )


def test_the_logarithm_of_an_energy_is_finite(modelprobe):
    model = modelprobe.build(AudioTaggerMended)
    assert_finite(modelprobe.run(model, modelprobe.randn(2, 1, 256)))


# --- a branch without a gradient ----------------------------------------------------------------------------------


class Matcher(nn.Module):
    """Scores how well an image and a text fit together."""

    def __init__(self):
        super().__init__()
        self.image_encoder = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 16))
        self.text_encoder = nn.Sequential(nn.Linear(48, 32), nn.GELU(), nn.Linear(32, 16))
        self.score = nn.Bilinear(16, 16, 1)

    def encode_text(self, text):
        return self.text_encoder(text).detach()  # the bug: left over from a cache of texts

    def forward(self, image, text):
        return self.score(self.image_encoder(image), self.encode_text(text))


class MatcherMended(Matcher):
    def encode_text(self, text):
        return self.text_encoder(text)


def test_a_branch_that_is_detached(modelprobe):
    model = modelprobe.build(Matcher)
    record = modelprobe.run(model, modelprobe.randn(8, 64), modelprobe.randn(8, 48), loss=torch.mean)
    with pytest.raises(AssertionError) as failure:
        assert_all_params_have_grad(record)
    assert said(failure) == "text_encoder.0.weight has no gradient; 4 of 10 parameters looked at have none"


def test_both_branches_get_a_gradient(modelprobe):
    model = modelprobe.build(MatcherMended)
    record = modelprobe.run(model, modelprobe.randn(8, 64), modelprobe.randn(8, 48), loss=torch.mean)
    assert_all_params_have_grad(record)


# --- a reshape that moves features into the batch -----------------------------------------------------------------


class DigitReader(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, stride=2, padding=1)
        self.fc = nn.Linear(32, 16)
        self.head = nn.Linear(16, 10)

    def flatten(self, features):
        return features.reshape(-1, 32)  # the bug: the features of one image are 8 * 4 * 4 = 128

    def forward(self, images):
        return self.head(torch.relu(self.fc(self.flatten(self.conv(images)))))


class DigitReaderMended(DigitReader):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(128, 16)

    def flatten(self, features):
        return features.flatten(1)


SHAPES = {"conv": "batch 8 4 4", "fc": "batch 16", "head": "batch 10"}


def test_a_reshape_that_moves_features_into_the_batch(modelprobe):
    model = modelprobe.build(DigitReader)
    record = modelprobe.run(model, modelprobe.randn(4, 1, 8, 8))
    with pytest.raises(AssertionError) as failure:
        assert_shapes(record, SHAPES)
    assert said(failure) == (
        "fc output has shape (16, 16): dimension 0 is 16, but batch is 4, bound by conv output; 2 of 3 shapes differ"
    )


def test_a_flatten_that_leaves_the_batch_alone(modelprobe):
    model = modelprobe.build(DigitReaderMended)
    assert_shapes(modelprobe.run(model, modelprobe.randn(4, 1, 8, 8)), SHAPES)


# --- a gradient that fades ----------------------------------------------------------------------------------------


class DeepRegressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Sigmoid(), nn.Linear(32, 32)) for _ in range(10))
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)  # the bug: a sigmoid lets at most a quarter of the gradient through
        return self.head(x)


class DeepRegressorMended(DeepRegressor):
    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def test_a_gradient_that_fades_through_sigmoids(modelprobe):
    model = modelprobe.build(DeepRegressor)
    record = modelprobe.run(model, modelprobe.randn(16, 8), loss=lambda out: out.square().mean())
    with pytest.raises(AssertionError) as failure:
        assert_grad_flow(record)
    line = said(failure)
    assert line.startswith("stem gets a gradient ")
    assert line.endswith(" times smaller than head, 1e+06 is allowed; 4 of 12 layers looked at")


def test_a_gradient_that_goes_around_sigmoids(modelprobe):
    model = modelprobe.build(DeepRegressorMended)
    record = modelprobe.run(model, modelprobe.randn(16, 8), loss=lambda out: out.square().mean())
    assert_grad_flow(record)


# --- the derivative of a root at zero -----------------------------------------------------------------------------


class Siamese(nn.Module):
    """The distance between two faces."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 8))

    def distance(self, a, b):
        return (a - b).square().sum(dim=1).sqrt()  # the bug: it has no derivative if a face is paired with itself

    def forward(self, first, second):
        return self.distance(self.encoder(first), self.encoder(second))


class SiameseMended(Siamese):
    def distance(self, a, b):
        return (a - b).square().sum(dim=1).add(1e-8).sqrt()


@pytest.fixture
def pairs(modelprobe):
    """Eight pairs of faces. The first pair is a face and itself."""
    first, second = modelprobe.randn(8, 32, name="first"), modelprobe.randn(8, 32, name="second")
    second[0] = first[0]
    return first, second


def test_a_root_at_zero_has_no_gradient(modelprobe, pairs):
    model = modelprobe.build(Siamese)
    record = modelprobe.run(model, *pairs, loss=torch.mean)
    assert_finite(record)
    with pytest.raises(AssertionError) as failure:
        assert_grad_finite(record)
    assert said(failure) == (
        "gradient of encoder (call 2) output is not finite: 8 NaN of 64 elements, made after encoder (call 2); "
        "4 of 5 layers looked at"
    )


def test_a_root_away_from_zero_has_a_gradient(modelprobe, pairs):
    model = modelprobe.build(SiameseMended)
    assert_grad_finite(modelprobe.run(model, *pairs, loss=torch.mean))


# --- a layer that is never called ---------------------------------------------------------------------------------


class TokenClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.mixer = nn.GRU(16, 16, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 5)

    def forward(self, tokens):
        mixed, _ = self.mixer(self.embedding(tokens))
        return self.head(mixed)  # the bug: mixed is not normalized


class TokenClassifierMended(TokenClassifier):
    def forward(self, tokens):
        mixed, _ = self.mixer(self.embedding(tokens))
        return self.head(self.norm(mixed))


def test_a_layer_that_is_never_called(modelprobe):
    model = modelprobe.build(TokenClassifier)
    record = modelprobe.run(model, modelprobe.randint(0, 100, (2, 12)))
    with pytest.raises(AssertionError) as failure:
        assert_called(record)
    assert said(failure) == "norm was never called in 1 forward; 1 of 5 layers looked at"


def test_every_layer_is_called(modelprobe):
    model = modelprobe.build(TokenClassifierMended)
    assert_called(modelprobe.run(model, modelprobe.randint(0, 100, (2, 12))))


# --- a number of float64 that spreads -----------------------------------------------------------------------------


class WithPrior(nn.Module):
    """Adds to the logits the log of how frequent each class is."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 3)
        frequencies = np.array([0.7, 0.2, 0.1])
        self.register_buffer("prior", torch.tensor(np.log(frequencies)))  # the bug: numpy's dtype is float64

    def forward(self, features):
        return self.head(features) + self.prior


class WithPriorMended(WithPrior):
    def __init__(self):
        super().__init__()
        self.prior = self.prior.float()


def test_a_float64_from_numpy_that_spreads(modelprobe):
    model = modelprobe.build(WithPrior)
    record = modelprobe.run(model, modelprobe.randn(4, 16))
    with pytest.raises(AssertionError) as failure:
        assert_dtypes(record, torch.float32)
    assert said(failure) == "(root) output is float64, not float32; 1 of 2 outputs differs"


def test_everything_is_float32(modelprobe):
    model = modelprobe.build(WithPriorMended)
    assert_dtypes(modelprobe.run(model, modelprobe.randn(4, 16)), torch.float32)


# --- a hook that is left on ---------------------------------------------------------------------------------------


def features_of(model, images, layer):
    """Return the output of a layer. The bug: the hook stays."""
    found = []
    layer.register_forward_hook(lambda module, args, output: found.append(output))
    model(images)
    return found[0]


def features_of_mended(model, images, layer):
    found = []
    with layer.register_forward_hook(lambda module, args, output: found.append(output)):
        model(images)
    return found[0]


def test_a_hook_that_is_left_on(modelprobe):
    model = modelprobe.build(ImageClassifierMended)
    features_of(model, modelprobe.randn(4, 1, 14, 14), model.conv2)
    with pytest.raises(AssertionError) as failure:
        assert_no_leftover_hooks(model)
    assert said(failure).startswith("conv2 has a forward hook left on it")


def test_a_hook_that_is_taken_off(modelprobe):
    model = modelprobe.build(ImageClassifierMended)
    features_of_mended(model, modelprobe.randn(4, 1, 14, 14), model.conv2)
    assert_no_leftover_hooks(model)
