"""Inputs of a model: as the command line gives them, or guessed from the model."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.probe import ModelProbe

from .target import required

BATCH, LENGTH = 4, 16

_SPEC = re.compile(r"(?:(?P<name>[^\W\d]\w*)=)?(?P<shape>\d+(?:x\d+)*)(?::(?P<below>\d+))?")


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor that a model takes: random numbers of a shape.

    >>> Input((4, 16), below=100, name="ids")
    Input(shape=(4, 16), below=100, name='ids')
    >>> str(Input((4, 16), below=100, name="ids")), str(Input((4, 3, 32, 32)))
    ('ids=4x16:100', '4x3x32x32')
    """

    shape: tuple[int, ...]
    below: int | None = None
    """Integers from 0 to ``below`` - 1; None: normally distributed numbers."""
    name: str | None = None
    """A keyword argument; None: a positional one."""

    def __str__(self) -> str:
        name, below = self.name and f"{self.name}=", self.below and f":{self.below}"
        return f"{name or ''}{'x'.join(map(str, self.shape))}{below or ''}"

    def tensor(self, probe: ModelProbe, position: int) -> Tensor:
        """Return the tensor, drawn from the seed of a probe."""
        name = self._drawn_as(position)
        if self.below is None:
            return probe.randn(*self.shape, **name)
        return probe.randint(0, self.below, self.shape, **name)

    def code(self, position: int) -> str:
        """Return the call that draws the tensor, for a test.

        >>> Input((4, 16), below=100).code(0), Input((4, 3)).code(1)
        ('modelprobe.randint(0, 100, (4, 16))', 'modelprobe.randn(4, 3, name="input 1")')
        """
        name = "".join(f', name="{name}"' for name in self._drawn_as(position).values())
        if self.below is None:
            return f"modelprobe.randn({', '.join(map(str, self.shape))}{name})"
        return f"modelprobe.randint(0, {self.below}, {self.shape}{name})"

    def _drawn_as(self, position: int) -> dict[str, str]:
        """Return the name by which the numbers are drawn, if they need one: inputs of one shape are to differ."""
        if self.name is not None:
            return {"name": self.name}
        return {"name": f"input {position}"} if position else {}


def parse_input(text: str) -> Input:
    """Return the input of ``[NAME=]SHAPE[:BELOW]``.

    >>> parse_input("8x3x32x32"), parse_input("ids=8x16:1000")
    (Input(shape=(8, 3, 32, 32), below=None, name=None), Input(shape=(8, 16), below=1000, name='ids'))

    Raises:
        UsageError: It is none.
    """
    found = _SPEC.fullmatch(text)
    if found is None or found["below"] == "0":
        raise UsageError(
            f"{text!r} is no input: write a shape such as 8x3x32x32; 8x16:1000 for integers below 1000; ids=8x16:1000 "
            "for a keyword argument"
        )
    shape = tuple(map(int, found["shape"].split("x")))
    return Input(shape, int(found["below"]) if found["below"] else None, found["name"])


def arguments(inputs: Sequence[Input], probe: ModelProbe) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Return positional and keyword arguments."""
    tensors = [(one.name, one.tensor(probe, position)) for position, one in enumerate(inputs)]
    return tuple(x for name, x in tensors if name is None), {name: x for name, x in tensors if name is not None}


def guesses(model: nn.Module) -> list[list[Input]]:
    """Return inputs that the model may take, the likeliest first; empty if nothing can be guessed.

    They are guessed from the configuration of a model of transformers, the ``pretrained_cfg`` of a model of timm, or
    the first layer with parameters.

    >>> [str(one) for [one] in guesses(nn.Sequential(nn.Flatten(), nn.Linear(8, 2)))]
    ['4x8', '4x16x8']
    """
    if not inspect.signature(model.forward).parameters:
        return [[]]
    if hasattr(model, "main_input_name") and hasattr(model, "config"):
        return _of_transformers(model)
    shipped = getattr(model, "pretrained_cfg", None)
    size = shipped.get("input_size") if isinstance(shipped, dict) else None
    if size:
        return [[Input((BATCH, *size))]]
    first = next((m for m in model.modules() if next(m.parameters(recurse=False), None) is not None), None)
    needed = required(model.forward)
    if first is None or len(needed) > 1 or any(map(nn.parameter.is_lazy, first.parameters(recurse=False))):
        return []
    return [[one] for one in _of_layer(first)]


def how_to_name(model: nn.Module) -> str:
    """Return how the inputs of a model are given on the command line."""
    needed = required(model.forward)
    if len(needed) > 1:
        return f"forward takes {', '.join(needed)}: give each as " + " ".join(f"--input {one}=SHAPE" for one in needed)
    return "give them with --input, such as --input 8x3x32x32, or --input 8x16:1000 for integers below 1000"


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def _of_layer(layer: nn.Module) -> list[Input]:
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        return [Input((BATCH, LENGTH), below=layer.num_embeddings)]
    spatial = {1: (64, 1024), 2: (32, 64, 224, 28), 3: (16, 32)}
    if isinstance(layer, _CONVOLUTIONS):
        sizes = len(layer.kernel_size)
        return [Input((BATCH, layer.in_channels, *[size] * sizes)) for size in spatial[sizes]]
    if isinstance(layer, nn.BatchNorm2d | nn.BatchNorm3d):
        sizes = 2 if isinstance(layer, nn.BatchNorm2d) else 3
        return [Input((BATCH, layer.num_features, *[size] * sizes)) for size in spatial[sizes]]
    features = next(
        (n for n in (getattr(layer, a, None) for a in ("in_features", "input_size", "embed_dim", "num_features"))
         if isinstance(n, int)),
        None,
    )  # fmt: skip
    if isinstance(layer, nn.LayerNorm):
        return [Input((BATCH, *layer.normalized_shape)), Input((BATCH, LENGTH, *layer.normalized_shape))]
    if features is None:
        return []
    flat, sequence = Input((BATCH, features)), Input((BATCH, LENGTH, features))
    return [sequence, flat] if isinstance(layer, nn.RNNBase | nn.MultiheadAttention) else [flat, sequence]


def _of_transformers(model: Any) -> list[list[Input]]:
    return [_of_one_batch(inputs) for inputs in _by_main_input(model)]


def _of_one_batch(inputs: list[Input]) -> list[Input]:
    """Return inputs with as many rows in each: a model may reshape what does not fit, and compute nonsense.

    >>> _of_one_batch([Input((4, 16), below=9), Input((2, 3, 8, 8))])[0].shape
    (2, 16)
    """
    rows = min((one.shape[0] for one in inputs), default=BATCH)
    return [dataclasses.replace(one, shape=(rows, *one.shape[1:])) for one in inputs]


def _by_main_input(model: Any) -> list[list[Input]]:
    config, main = model.config, model.main_input_name
    taken = inspect.signature(model.forward).parameters
    vision = _first(config, "vision_config", "backbone_config") or config
    text = _first(config, "text_config", "encoder", "text_encoder") or config
    vocabulary, longest = _first(text, "vocab_size"), _first(text, "max_position_embeddings", "n_positions")
    length = min(LENGTH, longest // 2) if longest else LENGTH
    words = [Input((BATCH, length), below=vocabulary, name="input_ids")] if vocabulary else []
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in taken and vocabulary:
        words += [Input((BATCH, length), below=vocabulary, name="decoder_input_ids")]
    pictures = _pictures(vision)
    if main == "input_ids":
        # A model of texts and images takes both.
        return [found for found in ([*words, *pictures] if vision is not config else words, words) if found]
    if main == "pixel_values":
        return [pictures, [*words[:1], *pictures]] if words else [pictures]
    if main == "input_features":
        bins = _first(config, "num_mel_bins", "feature_size", "input_feat_per_channel", "feature_projection_input_dim")
        frames = 2 * (_first(config, "max_source_positions") or 50)
        layouts = [(bins, frames), (frames, bins)] if bins else []
        return [[Input((2, *layout), name=main), *words[1:]] for layout in layouts]
    if main == "input_values":
        bins, frames = _first(config, "num_mel_bins"), _first(config, "max_length")
        spectrogram = [[Input((2, frames, bins), name=main)]] if bins and frames else []
        return [*spectrogram, [Input((2, 16_000), name=main)], [Input((2, 1, 16_000), name=main)]]
    return []


def _pictures(config: Any) -> list[Input]:
    channels = _first(config, "num_channels", "in_channels") or 3
    size = _first(config, "image_size") or 224
    if isinstance(size, dict):
        size = [size["height"], size["width"]]
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    return [Input((2, channels, height, width), name="pixel_values")]


def _first(config: Any, *names: str) -> Any:
    """Return the first of the attributes that is there and not None."""
    return next((value for value in (getattr(config, name, None) for name in names) if value is not None), None)
