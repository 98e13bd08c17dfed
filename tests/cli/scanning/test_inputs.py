"""Inputs of a scanned model: as they are given, and guessed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_modelprobe import ModelProbe
from pytest_modelprobe.cli.scanning import Input, ScannedModel, Target, guesses, parse_input
from pytest_modelprobe.exceptions import UsageError


def shapes(model: nn.Module) -> list[str]:
    return [" ".join(map(str, inputs)) for inputs in guesses(model)]


def test_a_shape_is_an_input_of_normally_distributed_numbers() -> None:
    assert parse_input("8x3x32x32") == Input((8, 3, 32, 32))


def test_a_limit_makes_integers() -> None:
    ids = parse_input("ids=2x16:10")
    assert ids == Input((2, 16), below=10, name="ids")
    tensor = ids.tensor(ModelProbe(), 0)
    assert tensor.dtype == torch.int64
    assert set(tensor.unique().tolist()) <= set(range(10))


@pytest.mark.parametrize("text", ["", "8x", "x8", "8X3", "ids=", "8x3:0", "-1x3", "8x3:a", "a b=3"])
def test_what_is_no_input_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"is no input: write a shape such as 8x3x32x32"):
        parse_input(text)


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.Conv1d(2, 3, 1), "4x2x64"),
        (nn.Conv2d(2, 3, 1), "4x2x32x32"),
        (nn.Conv3d(2, 3, 1), "4x2x16x16x16"),
        (nn.ConvTranspose2d(2, 3, 1), "4x2x32x32"),
        (nn.BatchNorm2d(5), "4x5x32x32"),
        (nn.Linear(8, 2), "4x8"),
        (nn.Embedding(7, 3), "4x16:7"),
        (nn.LSTM(6, 2), "4x16x6"),
        (nn.LayerNorm(9), "4x9"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_inputs_are_guessed_from_the_first_layer_with_parameters(layer: nn.Module, expected: str) -> None:
    assert shapes(nn.Sequential(nn.Dropout(), layer))[0] == expected


def test_no_input_is_guessed_from_a_layer_that_is_lazy() -> None:
    assert shapes(nn.LazyLinear(3)) == []


def test_inputs_are_guessed_from_the_configuration_of_a_model_of_timm() -> None:
    model = nn.Conv2d(3, 4, 3)
    model.pretrained_cfg = {"input_size": (3, 96, 96)}  # type: ignore[assignment]
    assert shapes(model) == ["4x3x96x96"]


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("GPT2", {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 50, "n_positions": 24}, "input_ids=4x12:50"),
        (
            "T5",
            {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "vocab_size": 50},
            "input_ids=4x16:50 decoder_input_ids=4x16:50",
        ),
        (
            "ViT",
            {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
             "image_size": 16, "patch_size": 8, "num_channels": 1},
            "pixel_values=2x1x16x16",
        ),
        (  # it reshapes a batch of another size, and computes nonsense
            "Whisper",
            {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
             "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": 60,
             "num_mel_bins": 8, "max_source_positions": 10, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
             "decoder_start_token_id": 0},
            "input_features=2x8x20 decoder_input_ids=2x16:60",
        ),
    ],
)  # fmt: skip
def test_a_model_of_transformers_runs_on_what_is_guessed_from_its_configuration(
    name: str, settings: dict[str, int], expected: str
) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**settings)
    model = getattr(transformers, f"{name}Model")(config)
    assert shapes(model)[0] == expected
    scanned = ScannedModel(Target("", lambda: model, "", "", ""), ModelProbe())
    assert (scanned.record.forwards, scanned.record.backwards) == (1, 1)


def test_the_first_guess_on_which_the_model_runs_is_taken() -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc = nn.Conv2d(1, 2, 3), nn.Linear(2 * 26 * 26, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.conv(x).flatten(1))  # type: ignore[no-any-return]

    scanned = ScannedModel(Target("", Sized, "", "", ""), ModelProbe())
    assert [str(one) for one in scanned.inputs] == ["4x1x28x28"]


def test_a_model_of_two_inputs_says_how_both_are_given() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            return self.fc(image) + text  # type: ignore[no-any-return]

    with pytest.raises(UsageError) as error:
        ScannedModel(Target("", Two, "", "", ""), ModelProbe())
    assert str(error.value) == (
        "the inputs of Two cannot be guessed: forward takes image, text: give each as --input image=SHAPE "
        "--input text=SHAPE"
    )


def test_inputs_that_do_not_fit_are_refused_with_what_the_model_raised() -> None:
    with pytest.raises(UsageError, match=r"^Linear does not run on 4x5: RuntimeError: "):
        ScannedModel(Target("", lambda: nn.Linear(3, 2), "", "", ""), ModelProbe(), [Input((4, 5))]).record  # noqa: B018


def test_some_inputs_by_name_and_some_without_are_refused() -> None:
    with pytest.raises(UsageError, match=r"^4x5 b=4x5: name every input, or none$"):
        ScannedModel(
            Target("", lambda: nn.Linear(5, 2), "", "", ""), ModelProbe(), [Input((4, 5)), Input((4, 5), name="b")]
        )
