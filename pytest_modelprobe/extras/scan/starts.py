"""The first guesses of what a model takes: from its configuration, its signature and its first layer."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from pytest_modelprobe.models import own_parameters

from .inputs import Input, required

BATCH, LENGTH = 4, 16
SPATIAL = {1: (64, 1024), 2: (32, 64, 224, 28), 3: (16, 32)}
"""Number of spatial dimensions → the sizes that are tried first."""

Guess = tuple[Input, ...]


def starts(model: nn.Module) -> list[Guess]:
    """Return inputs that the model may take, the likeliest first; empty if it takes what is no tensor.

    They are guessed from the configuration of a model of transformers, the ``pretrained_cfg`` of a model of timm, the
    first layer with parameters, and the names, types and documented shapes of the arguments of ``forward``.

    >>> [str(one) for [one] in starts(nn.Sequential(nn.Flatten(), nn.Linear(8, 2)))][:2]
    ['4x8', '4x16x8']
    """
    parameters = inspect.signature(model.forward).parameters
    if not parameters:
        return [()]
    if any(map(nn.parameter.is_lazy, nn.Module.parameters(model))):
        return []
    names = required(model.forward)
    found = [tuple(inputs) for inputs in _of_transformers(model)] if hasattr(model, "config") else []
    shipped = getattr(model, "pretrained_cfg", None)
    size = shipped.get("input_size") if isinstance(shipped, dict) else None
    if size:
        found.append((Input((BATCH, *size)),))
    first = next((m for m in model.modules() if any(own_parameters(m, atomic=False))), None)
    if first is not None and len(names) < 2:
        found += [(one,) for one in of_layer(first)]
    main: Any = getattr(model, "main_input_name", None)
    names = names or [main if main in parameters else next(iter(parameters))]
    known = [_of_argument(model, parameters[name]) for name in names if name in parameters]
    if any(one is NO_TENSOR for one in known):
        return found
    is_named = main is not None or len(names) > 1
    # A sequence without a batch would be taken for a batch.
    is_sequential = any(isinstance(module, nn.RNNBase | nn.MultiheadAttention) for module in model.modules())
    for shape, below in sorted(_SEEDS, key=lambda seed: is_sequential and seed[0] == _SEEDS[0][0]):
        inputs = [one or Input(shape, below) for one in known]
        if is_named and all(parameters[name].kind is not inspect.Parameter.POSITIONAL_ONLY for name in names):
            inputs = [dataclasses.replace(one, name=name) for one, name in zip(inputs, names, strict=False)]
        found.append(tuple(inputs))
    return list(dict.fromkeys(filter(None, found)))


_SEEDS: tuple[tuple[tuple[int, ...], int | None], ...] = (
    ((BATCH, 8), None),
    ((BATCH, LENGTH, 8), None),
    ((BATCH, 3, 64, 64), None),
    ((BATCH, LENGTH), 10),
    ((BATCH, 1, 1024), None),
    ((BATCH, 3, 8, 64, 64), None),
)  # fmt: skip
"""What is tried for arguments of which nothing is known: shapes, and limits of integers."""

NO_TENSOR = Input(())
"""Stands for an argument that takes something else."""

_TIMES = re.compile(r"t|times?|time_?steps?|sigmas?|noise_levels?|diffusion_steps?")
_IDS = re.compile(r"(?:.*_)?(?:ids|tokens|idx|indices|index)(?:_.*)?")
_EDGES = re.compile(r"edge_?ind(?:ex|ices)(?:_.*)?")  # from and to which node of a graph
_IMAGES = re.compile(r"(?:.*_)?(?:ima?ge?s?|pictures?|pixels?|frames?)\d*(?:_.*)?")
_OTHER_TYPES = re.compile(
    r"^(?:int|float|bool|str|(?:typing\.)?(?:list|dict|sequence|iterable|tuple)\b.*)$", re.IGNORECASE
)


def of_argument(model: nn.Module, name: str) -> Input | None:
    """Return what an argument of ``forward`` takes according to its name, its type and its documentation."""
    return _of_argument(model, inspect.signature(model.forward).parameters[name])


def _of_argument(model: nn.Module, parameter: inspect.Parameter) -> Input | None:
    kind = parameter.annotation
    written = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
    if parameter.annotation is not parameter.empty and _OTHER_TYPES.fullmatch(written):
        return NO_TENSOR
    if _TIMES.fullmatch(parameter.name):
        return Input((BATCH,), below=1000)
    if _EDGES.fullmatch(parameter.name):
        return Input((2, 2 * LENGTH), below=BATCH)
    documented = _documented(model, parameter.name)
    if "Long" in written or _IDS.fullmatch(parameter.name):
        return Input(documented or (BATCH, LENGTH), below=10)
    if documented:
        return Input(documented)
    return Input((BATCH, 3, 64, 64)) if _IMAGES.fullmatch(parameter.name) else None


def _documented(model: nn.Module, name: str) -> tuple[int, ...] | None:
    """Return the shape of an argument that the docstring tells, as ``(batch, channels, height, width)``."""
    told = rf"\b{name}\b[^\n]*?(?:\n[^\n]*?)?\bshape:?\s*[`*]*[(\[]([^)\]\n]*)[)\]]"
    found = re.search(told, f"{model.forward.__doc__ or ''}\n{model.__doc__ or ''}")
    axes = [axis.strip(" `*") for axis in found[1].split(",") if axis.strip()] if found else []
    if len(axes) < 2:
        return None
    return (BATCH, *(_size(model, axis.lower(), rank=len(axes)) for axis in axes[1:]))


def _size(model: nn.Module, axis: str, rank: int) -> int:
    configured = _first(getattr(model, "config", None), axis)
    if isinstance(configured, int):
        return configured
    if "channel" in axis or axis in ("c", "d", "dim", "features", "hidden_size") or "feature" in axis:
        return 3 if rank > 3 else 8
    return 64 if rank > 3 else LENGTH


def sizes_named(model: nn.Module) -> list[int]:
    """Return the sizes and lengths that the model and its configuration have as attributes, as ``image_size``."""
    holders: list[Any] = [model, *model.children()]
    holders += [config for config in (getattr(one, "config", None) for one in holders) if config is not None]
    found: dict[int, None] = {}
    for holder in holders:
        for name, value in _entries(holder):
            if _SIZE.search(name):
                sizes = value if isinstance(value, tuple | list) else [value]
                found |= dict.fromkeys(n for n in sizes if type(n) is int and 2 <= n <= 4096)
    return list(found)


_SIZE = re.compile(r"image|img|sample_size|input_(?:size|shape|resolution)|seq|context|block_size|n_ctx|length|_len\b")


def _entries(holder: Any) -> Iterable[tuple[str, Any]]:
    return holder.items() if isinstance(holder, dict) else getattr(holder, "__dict__", {}).items()


def demand(layer: nn.Module) -> tuple[str, int, int] | None:
    """Return what a layer takes: a kind, the number of spatial dimensions, and how many channels, features or integers.

    >>> demand(nn.Conv2d(3, 8, 1)), demand(nn.Linear(5, 2)), demand(nn.Embedding(9, 2)), demand(nn.ReLU())
    (('channels', 2, 3), ('features', 0, 5), ('integers', 0, 9), None)
    """
    n = getattr(layer, "num_embeddings", None)
    if isinstance(n, int):
        return "integers", 0, n
    channels, kernel = getattr(layer, "in_channels", None), getattr(layer, "kernel_size", None)
    if isinstance(channels, int) and isinstance(kernel, tuple):
        return "channels", len(kernel), channels
    for kind, sizes in ((nn.BatchNorm2d, 2), (nn.BatchNorm3d, 3)):
        if isinstance(layer, kind):
            return "channels", sizes, layer.num_features
    shape = getattr(layer, "normalized_shape", None)
    if isinstance(shape, tuple) and len(shape) == 1:
        return "features", 0, shape[0]
    features = (getattr(layer, name, None) for name in ("in_features", "input_size", "embed_dim", "num_features"))
    n = next((n for n in features if isinstance(n, int)), None)
    return None if n is None else ("features", 0, n)


def of_layer(layer: nn.Module) -> Iterator[Input]:
    """Yield inputs that a layer takes."""
    if isinstance(layer, nn.LayerNorm) and len(layer.normalized_shape) > 1:
        yield Input((BATCH, *layer.normalized_shape))
        yield Input((BATCH, LENGTH, *layer.normalized_shape))
    found = demand(layer)
    if found is None:
        return
    kind, sizes, n = found
    if kind == "integers":
        yield Input((BATCH, LENGTH), below=n)
    elif kind == "channels":
        yield from (Input((BATCH, n, *[size] * sizes)) for size in SPATIAL[sizes])
    else:
        flat, sequence = Input((BATCH, n)), Input((BATCH, LENGTH, n))
        is_sequential = isinstance(layer, nn.RNNBase | nn.MultiheadAttention)
        yield from (sequence, flat) if is_sequential else (flat, sequence)


def _of_transformers(model: Any) -> list[list[Input]]:
    if not hasattr(model, "main_input_name"):
        return []
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
