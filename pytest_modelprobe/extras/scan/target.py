"""What ``package.module:make_model`` names: a function or a class that makes a model."""

from __future__ import annotations

import copy
import functools
import importlib
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.record import nearest

from .search import may_run, required

# --- small models of transformers -------------------------------------------------------------------------------------

LAYERS, HEADS, HEAD, WORDS, EXPERTS, PIXELS, DIVISOR = 2, 4, 16, 128, 4, 64, 4

_WAYS = (
    "depth words experts widths pixels", "depth words experts widths", "words experts widths", "depth words experts",
    "depth", "",
)  # fmt: skip
"""What is shrunk, the most that works."""

_MOST_SHRUNK = 200_000_000
"""Parameters of a model that counts as shrunk."""

_DEPTH = re.compile(r"(?:.*_)?(?:n_|num_)?(?:hidden_|encoder_|decoder_)*(?:layers?|depth|blocks)|num_layers_per_stage")
_DEPTHS = re.compile(r"depths?|(?:.*_)?(?:num_layers|layers|num_blocks|layer_depths)(?:_per_stage)?")
_HEADS = re.compile(r"(?:.*_)?(?:n_|num_)?(?:attention_|key_value_|kv_)*heads?|n_head_kv|num_kv|.*_heads_kv")
_HEAD_DIM = re.compile(r"(?:.*_)?(?:head_dim|head_size|d_kv|kv_channels|attention_head_size)")
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_MAIN = ("hidden_size", "d_model", "n_embd", "hidden_dim", "embed_dim", "dim", "model_dim", "embedding_size")
_WIDTH = re.compile(
    r"(?:.*_)?(?:hidden|embed(?:ding)?s?|intermediate|ffn|inner|d_model|d_ff|d_inner|model|n_embd|n_inner|"
    r"projection|output|mlp|conv|stem|dim|neck)(?:_?(?:dims?|sizes?|widths?|channels?|features))?|.*lora_rank"
)
_NO_WIDTH = re.compile(r".*(?:kernel|stride|patch|image|window|vocab|position|layer|dropout|ratio|num_|head|groups?).*")
_WORDS = re.compile(r"(?:.*_)?(?:vocab(?:ulary)?_size|codebook_size|num_embeddings)")
_TOKEN = re.compile(r".*_token(?:_id|_index|_ids)?|.*_id")
_EXPERTS = re.compile(r"(?:.*_)?(?:num_|n_)(?:.*_)?experts")
_CHOSEN = re.compile(r".*(?:experts_per_tok(?:en)?|top_?k|n_group|topk_group|num_selected_experts|expert_groups)")
_PIXELS = re.compile(r"(?:.*_)?image_size")


def tiny(kind: Any) -> nn.Module:
    """Return a model of a class of transformers, of its default configuration shrunk, with random weights.

    Raises:
        UsageError: Its configuration cannot be shrunk so that a model can be made.
    """
    model: nn.Module = kind(copy.deepcopy(_configuration(kind)))
    return model


@functools.cache
def _configuration(kind: Any) -> Any:
    """Return the configuration in which the most is shrunk of those with which a model runs, or else can be made."""
    refused: Exception | None = None
    made: list[Any] = []
    for ways in _WAYS:
        try:
            config = shrunk(kind.config_class(), frozenset(ways.split()))
            if any(config.to_dict() == other.to_dict() for other in made):
                continue
            with torch.device("meta"):
                model = kind(copy.deepcopy(config))
            if sum(p.numel() for p in nn.Module.parameters(model)) > _MOST_SHRUNK:
                raise UsageError("what can be shrunk leaves it too large")
            made.append(config)
            if may_run(model):
                return config
        except Exception as error:  # noqa: BLE001 - whatever a class raises on a configuration of which it knows nothing
            refused = refused or error
    if made:
        return made[0]
    raise UsageError(f"{kind.__name__} cannot be made of a shrunk configuration: {type(refused).__name__}: {refused}")


def shrunk(config: Any, ways: frozenset[str]) -> Any:
    """Return a configuration of transformers with smaller numbers, and with its nested ones shrunk alike."""
    tokens: dict[int, int] = {}
    return _shrunk(config, ways, tokens)


def _shrunk(config: Any, ways: frozenset[str], tokens: dict[int, int]) -> Any:
    values = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    width, heads = _scales(values)
    depth = next((values[name] for name in _LAYERS if type(values.get(name)) is int), None)
    lengths = {len(value) for value in values.values() if isinstance(value, list | tuple)}
    # A classifier of sequences refuses a batch without it.
    changed: dict[str, Any] = {"pad_token_id": 0} if values.get("pad_token_id", 0) is None else {}
    for name, value in values.items():
        if isinstance(value, list | tuple) and len(value) == depth and "depth" in ways:  # one for each layer
            distinct = list(dict.fromkeys(map(str, value)))  # as many as are left, each kind once if that is possible
            chosen = [next(kind for kind in value if str(kind) == one) for one in distinct[-LAYERS:]]
            value = type(value)((chosen * LAYERS)[:LAYERS])
            changed[name] = value
        if hasattr(value, "to_diff_dict"):
            changed[name] = _shrunk(value, ways, tokens)
        elif type(value) is int and (name in _LAYERS or value not in lengths or not _DEPTH.fullmatch(name)):
            changed[name] = _number(name, value, ways, width, heads)
        elif isinstance(value, list | tuple) and value and all(type(n) is int for n in value):
            changed[name] = type(value)(_of_list(name, value, ways, width))
        if "words" in ways and _TOKEN.fullmatch(name):
            changed[name] = _token(changed.get(name, value), tokens)
    kept = {name: changed[name] for name in changed if changed[name] != values[name]}
    written = config.to_diff_dict()
    if "depth" in ways:  # a backbone gives out its last stage, which is another one then
        written = {name: value for name, value in written.items() if name not in ("out_features", "out_indices")}
    return type(config).from_dict({**written, **kept})


def _scales(values: Mapping[str, Any]) -> tuple[Callable[[int], int], Callable[[int], int]]:
    """Return what widths and what numbers of heads become."""
    most = max((n for name, n in values.items() if type(n) is int and _HEADS.fullmatch(name)), default=0)
    main: int | None = next((values[name] for name in _MAIN if type(values.get(name)) is int), None)
    fewer = max((d for d in range(1, most + 1) if most % d == 0 and most // d >= HEADS), default=1)

    def heads(n: int) -> int:
        return max(1, n // fewer)

    def width(n: int) -> int:
        if main is None or not most:
            return n // DIVISOR if n % (DIVISOR * 8) == 0 else n
        return min(n, 8 * math.ceil(n * heads(most) * HEAD / main / 8))

    return width, heads


def _number(name: str, n: int, ways: frozenset[str], width: Callable[[int], int], heads: Callable[[int], int]) -> int:
    if _EXPERTS.fullmatch(name):
        return min(n, EXPERTS) if "experts" in ways else n
    if _CHOSEN.fullmatch(name):
        return min(n, 1 if "group" in name else 2) if "experts" in ways else n
    if _DEPTH.fullmatch(name):
        return min(n, LAYERS) if "depth" in ways else n
    if _WORDS.fullmatch(name):
        return min(n, WORDS) if "words" in ways else n
    if _PIXELS.fullmatch(name):
        return PIXELS if "pixels" in ways and n > PIXELS else n
    if "widths" in ways:
        if _HEAD_DIM.fullmatch(name):
            return min(n, HEAD)
        if _HEADS.fullmatch(name):
            return heads(n)
        if _WIDTH.fullmatch(name) and not _NO_WIDTH.fullmatch(name):
            return width(n)
    return n


def _of_list(name: str, values: list[int] | tuple[int, ...], ways: frozenset[str], width: Any) -> list[int]:
    if _DEPTHS.fullmatch(name):
        return [min(n, 1) for n in values] if "depth" in ways else list(values)
    if _PIXELS.fullmatch(name):
        return [PIXELS if "pixels" in ways and n > PIXELS else n for n in values]
    if "widths" in ways and _WIDTH.fullmatch(name) and not _NO_WIDTH.fullmatch(name):
        return [n // DIVISOR for n in values] if all(n % (DIVISOR * 4) == 0 for n in values) else list(values)
    return list(values)


def _token(value: Any, tokens: dict[int, int]) -> Any:
    """Return numbers of special tokens within the smaller vocabulary, those that differ different."""
    if isinstance(value, list):
        return [_token(one, tokens) for one in value]
    if type(value) is not int or value < WORDS:
        return value
    return tokens.setdefault(value, WORDS - 1 - len(tokens))


_MOST = 1_500_000_000
"""Parameters of a model that is made of a default configuration; it takes 6 GB."""


@dataclass(frozen=True, slots=True)
class Target:
    """A model that can be made, and the code that makes it."""

    name: str
    """As it was given: ``package.module:make_model``."""
    make: Callable[[], nn.Module]
    module: str
    attribute: str
    """What is imported from the module."""
    expression: str
    """What makes the model there: ``make_model()``."""


def load(name: str) -> Target:
    """Return the target of ``module:attribute``: a function without arguments, or a class of models.

    A class of transformers is made of its default configuration, with random weights. ``hf-tiny:CLASS`` shrinks this
    configuration, and ``timm:NAME`` is a model of timm; neither downloads anything.

    Raises:
        UsageError: There is no such module or attribute; it makes no model, or not without arguments.

    >>> load("torch.nn:Identity").make()
    Identity()
    """
    module_name, colon, path = name.partition(":")
    if not (colon and module_name and path):
        raise UsageError(f"{name!r} names no model: write package.module:make_model")
    make: Callable[[], Any]
    if module_name in ("hf-tiny", "timm"):
        make = _tiny(path) if module_name == "hf-tiny" else _of_timm(path)
        return Target(name, functools.partial(_made, name, make), __name__, "load", f'load("{name}").make()')
    try:
        if module_name.startswith("."):  # a path, as ./module.py, which Python takes for a name inside a package
            raise ModuleNotFoundError(name=module_name)
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise UsageError(f"there is no module {error.name!r}: is it installed, or below the current folder?") from None
    try:
        made = operator.attrgetter(path)(module)
    except AttributeError:
        raise UsageError(f"{module_name} has no {path}{_meant(path, dir(module), n=1)}") from None
    except ImportError as error:  # of a package that imports its parts when they are asked for
        raise UsageError(f"{name} cannot be imported: {error}") from error
    expression = f"{path}()"
    if isinstance(made, type) and hasattr(made, "config_class"):
        make = functools.partial(_of_default_config, made)
        expression = f"{path}({path}.config_class())"
    else:
        make = made
        _check_callable(name, made)
    return Target(name, functools.partial(_made, name, make), module_name, path.partition(".")[0], expression)


def _check_callable(name: str, made: Any) -> None:
    if isinstance(made, nn.Module):
        raise UsageError(f"{name} is a model already: name a function that makes it, with weights by the seed")
    if not callable(made):
        raise UsageError(f"{name} is {type(made).__name__}, not a function or a class that makes a model")
    try:
        needed = required(made)
    except (TypeError, ValueError):  # written in C
        return
    if needed:
        raise UsageError(f"{name} needs arguments ({', '.join(needed)}): name a function without, which calls it")


def _made(name: str, make: Callable[[], Any]) -> nn.Module:
    model = make()
    if not isinstance(model, nn.Module):
        raise UsageError(f"{name} returned {type(model).__name__}, not a torch.nn.Module")
    return model


def _tiny(name: str) -> Callable[[], nn.Module]:
    transformers = _imported("transformers", f"hf-tiny:{name}")
    kind = getattr(transformers, name, None) if name in dir(transformers) else None
    if getattr(kind, "config_class", None) is None:
        known = (one for one in dir(transformers) if one.endswith("Model") or "For" in one)
        raise UsageError(f"transformers has no model {name}{_meant(name, known)}")
    return functools.partial(tiny, kind)


def _of_timm(name: str) -> Callable[[], nn.Module]:
    timm = _imported("timm", f"timm:{name}")
    if not timm.is_model(name):
        raise UsageError(f"timm has no model {name}{_meant(name, timm.list_models())}")
    make: Callable[[], nn.Module] = functools.partial(timm.create_model, name, pretrained=False)
    return make


def _imported(package: str, asked: str) -> Any:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise UsageError(f"{asked} needs {package}: pip install {package}") from None


def _meant(name: str, known: Iterable[str], n: int = 3) -> str:
    near = nearest(name, known, n=n)
    return f": is {' or '.join(near)} meant?" if near else ""


def _of_default_config(kind: Any) -> nn.Module:
    config = kind.config_class()
    with torch.device("meta"):
        parameters = sum(math.prod(p.shape) for p in nn.Module.parameters(kind(config)))
    if parameters > _MOST:
        raise UsageError(
            f"{kind.__name__} has {parameters:,} parameters by its default configuration: name a function that makes "
            "a smaller one"
        )
    model: nn.Module = kind(kind.config_class())
    return model
