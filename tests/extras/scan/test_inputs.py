"""Inputs of a scanned model: as they are given, and guessed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_modelprobe import ModelProbe
from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.extras.scan.scanning import ScannedModel
from pytest_modelprobe.extras.scan.search import Input, Search, parse_input, starts
from pytest_modelprobe.extras.scan.target import Target, load


def shapes(model: nn.Module) -> list[str]:
    return [" ".join(map(str, inputs)) for inputs in starts(model)]


def found(model: nn.Module) -> str:
    return " ".join(map(str, next(iter(Search(model)))))


def test_a_limit_makes_integers() -> None:
    ids = parse_input("ids=2x16:10")
    assert ids == Input((2, 16), below=10, name="ids")
    tensor = ids.tensor(ModelProbe(), 0)
    assert tensor.dtype == torch.int64
    assert set(tensor.unique().tolist()) <= set(range(10))


@pytest.mark.parametrize("text", ["", "8x", "ids=", "8x3:0", "a b=3"])
def test_what_is_no_input_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"is no input: write a shape such as 8x3x32x32"):
        parse_input(text)


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.Conv1d(2, 3, 1), "4x2x64"),
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


def test_inputs_are_guessed_from_the_configuration_of_a_model_of_timm() -> None:
    model = nn.Conv2d(3, 4, 3)
    model.pretrained_cfg = {"input_size": (3, 96, 96)}  # type: ignore[assignment]
    assert shapes(model)[0] == "4x3x96x96"


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


class Pixels(nn.Module):
    """A vision transformer: parameters of its own, another order of layers, positions for one size."""

    def __init__(self, size: int = 48, patch: int = 8, channels: int = 3) -> None:
        super().__init__()
        self.patch = patch
        self.token = nn.Parameter(torch.zeros(1, 1, 16))
        self.positions = nn.Parameter(torch.zeros(1, (size // patch) ** 2 + 1, 16))
        self.head, self.embed = nn.Linear(16, 3), nn.Linear(channels * patch**2, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, c, _, _ = x.shape
        patches = x.unfold(2, self.patch, self.patch).unfold(3, self.patch, self.patch)
        tokens = self.embed(patches.permute(0, 2, 3, 1, 4, 5).reshape(b, -1, c * self.patch**2))
        tokens = torch.cat([self.token.expand(b, -1, -1), tokens], 1) + self.positions
        return self.head(tokens.mean(1))  # type: ignore[no-any-return]


class Denoiser(nn.Module):
    """Inputs that are told apart by what is made of them, and by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.text, self.conv = nn.Embedding(50, 6), nn.Embedding(70, 6), nn.Conv2d(2, 6, 3, padding=1)

    def forward(self, text: torch.Tensor, sample: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        shift = self.time(timestep) + self.text(text).mean(1)
        return self.conv(sample) + shift[:, :, None, None]  # type: ignore[no-any-return]


class Pair(nn.Module):
    """One of its inputs leads to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 2)

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return self.fc(image) + text  # type: ignore[no-any-return]


class Documented(nn.Module):
    """Nothing but its documentation tells what it takes."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Attend.

        Args:
            states (`torch.Tensor` of shape `(batch, heads, sequence_length, feature)`): What it attends to.
        """
        b, heads, length, features = states.shape
        return states.reshape(b, heads * length, features)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Pixels(size=20, patch=4, channels=2), "4x2x20x20"),
        (Denoiser(), "text=4x16:70 sample=4x2x32x32 timestep=4:50"),
        (Pair(), "image=4x5 text=4x2"),
        (Documented(), "4x64x64x3"),
        (nn.Transformer(24, 2, 1, 1, 8, batch_first=True), "src=4x16x24 tgt=4x16x24"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_inputs_are_found_by_trying_what_a_failure_asks_for(model: nn.Module, expected: str) -> None:
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}
    assert found(model) == expected
    after = model.state_dict()
    assert all(after[name].data_ptr() == at and after[name].equal(bits) for name, (at, bits) in before.items())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_an_argument_of_which_an_error_speaks_is_given_too() -> None:
    class Needs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 2)

        def forward(
            self,
            one: torch.Tensor | None = None,
            context: torch.Tensor | None = None,
            other: torch.Tensor | None = None,
        ) -> torch.Tensor:
            if one is None or context is None:
                raise ValueError("one and context are needed")
            return self.fc(one) + self.fc(context)  # type: ignore[no-any-return]

    model = Needs()
    model.main_input_name = "one"  # type: ignore[assignment]
    assert found(model) == "one=4x6 context=4x6"


def test_a_model_that_looks_at_contents_is_run_on_tensors() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(7, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x) if x.sum().item() < 1e9 else x  # type: ignore[no-any-return]

    scanned = ScannedModel(Target("", Looks, "", "", ""), ModelProbe())
    assert [str(one) for one in scanned.inputs] == ["4x7"]


class Levels(nn.Module):
    """A model that takes no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, levels: list[torch.Tensor], scale: torch.Tensor) -> torch.Tensor:
        return self.fc(levels[0]) * scale  # type: ignore[no-any-return]


class Odd(nn.Module):
    """A model that runs on nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError(f"no picture: {tuple(self.conv(x).shape)}")


def test_a_model_whose_inputs_are_not_found_tells_the_command_to_start_from() -> None:
    with pytest.raises(UsageError) as error:
        ScannedModel(Target("nets:make", Odd, "", "", ""), ModelProbe())
    assert str(error.value) == (
        "the inputs of Odd cannot be guessed, start from: modelprobe scan nets:make --input 4x2x32x32. "
        "It got furthest on these: ValueError: no picture: (4, 3, 32, 32)"
    )


def test_an_argument_that_takes_no_tensor_is_named() -> None:
    with pytest.raises(UsageError) as error:
        ScannedModel(Target("nets:make", Levels, "", "", ""), ModelProbe())
    assert str(error.value) == "Levels takes no tensor as levels: name a module that calls it with tensors"


class Graph(nn.Module):
    """A convolution on a graph: which nodes have edges is known of tensors alone."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        source, target = edge_index[:, (edge_index[0] != edge_index[1]).nonzero()[:, 0]]
        return torch.zeros(len(x), 2).index_add(0, target, nn.functional.linear(x, self.fc.weight)[source])


class Sound(nn.Module):
    """It needs more samples than anything else has elements on an axis, and looks at their contents."""

    main_input_name = "input_values"
    config = None

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 400, stride=320)

    def forward(self, input_values: torch.Tensor) -> torch.Tensor:
        frames = self.conv(input_values[:, None])
        if frames.shape[-1] < 40:
            raise ValueError("too few frames")
        return frames if frames.sum().item() < 1e9 else -frames


@pytest.mark.parametrize(("model", "expected"), [(Graph, "x=4x6 edge_index=2x32:4"), (Sound, "input_values=2x16000")])
def test_inputs_are_found_by_what_tensors_tell(model: type[nn.Module], expected: str) -> None:
    scanned = ScannedModel(Target("", model, "", "", ""), ModelProbe())
    assert " ".join(map(str, scanned.inputs)) == expected


def test_the_line_of_an_assertion_without_a_text_tells_what_to_try(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(
        window="""
        from torch import nn

        class Window(nn.Module):
            def __init__(self):
                super().__init__()
                self.lookback, self.variates = 21, 5
                self.fc = nn.Linear(21, 2)

            def forward(self, x):
                assert x.shape[1:] == (self.lookback, self.variates)
                return self.fc(x.transpose(1, 2))
    """
    )
    monkeypatch.syspath_prepend(pytester.path)
    assert [str(one) for one in ScannedModel(load("window:Window"), ModelProbe()).inputs] == ["4x21x5"]
    with pytest.raises(UsageError, match=r"AssertionError: assert x.shape.* == \(self.lookback, self.variates\)$"):
        ScannedModel(load("window:Window"), ModelProbe(), [Input((4, 21))]).record  # noqa: B018


def test_inputs_that_do_not_fit_are_refused_with_what_the_model_raised() -> None:
    with pytest.raises(UsageError, match=r"^Linear does not run on 4x5: RuntimeError: "):
        ScannedModel(Target("", lambda: nn.Linear(3, 2), "", "", ""), ModelProbe(), [Input((4, 5))]).record  # noqa: B018


def test_some_inputs_by_name_and_some_without_are_refused() -> None:
    with pytest.raises(UsageError, match=r"^4x5 b=4x5: name every input, or none$"):
        ScannedModel(
            Target("", lambda: nn.Linear(5, 2), "", "", ""), ModelProbe(), [Input((4, 5)), Input((4, 5), name="b")]
        )


def test_no_input_is_guessed_from_a_layer_that_is_lazy() -> None:
    assert shapes(nn.LazyLinear(3)) == []
