"""The methods of a probe that draw. The newest figures of a test are kept for its reports."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_modelprobe.exceptions import NothingObservedError, UsageError
from pytest_modelprobe.interrupts import interruptible
from pytest_modelprobe.models import Layers, as_array, check_supported, flatten
from pytest_modelprobe.probe import Mode, ModelProbe, Watch, check_mode
from pytest_modelprobe.record import Record, Selector, label_of, select
from pytest_modelprobe.runs import Options, Run
from pytest_modelprobe.text import Cell, count, failed, out_of

from . import figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# --- maps over positions ----------------------------------------------------------------------------------------------

Target = int | Tensor | Callable[[Any], Tensor]
"""The class of each image, or a function from the output to a scalar."""


def maps_of(run: Run, layer: str) -> tuple[str, Tensor]:
    """Return the label of a layer, and the first output (N, C, H, W) of its first call."""
    __tracebackhide__ = True
    name, module = _one_layer(run, layer)
    _, kept = run.record()
    if not kept.get(name):
        raise NothingObservedError(f"{name} was never called: choose a layer that the forward uses")
    outputs = flatten("output", kept[name][0]).tensors
    maps = next((tensor for _, tensor in outputs if tensor.dim() == 4), None)
    if maps is None or not maps.numel():
        raise UsageError(f"feature maps have 4 dimensions (N, C, H, W), none of them 0; {_returned(name, outputs)}")
    return label_of(name, type(module).__name__), maps


def cam_of(run: Run, layer: str, target: Target) -> tuple[str, Tensor, Tensor]:
    """Return the label of a layer, the images (N, C, H, W), and for each its map (N, H, W), of the same size.

    The map is ``ReLU(sum_k w_k A_k)``, where A_k is channel k of the output of the layer, and w_k the mean over all
    positions of the gradient of the score by A_k (Selvaraju et al. 2017, equations 1 and 2). It is enlarged bilinearly.
    """
    __tracebackhide__ = True
    if torch.is_inference_mode_enabled():
        raise UsageError("grad_cam needs gradients, which torch.inference_mode() does not record: call it outside")
    name, module = _one_layer(run, layer)
    images = next((tensor for _, tensor in flatten("input", (run.args, run.kwargs)).tensors if tensor.dim() == 4), None)
    if images is None:
        raise UsageError("grad_cam takes images: an input of shape (N, C, H, W)")
    seen: list[Tensor] = []

    def cut(module: nn.Module, args: Any, output: Any) -> Tensor:
        if not isinstance(output, Tensor) or output.dim() != 4:
            raise UsageError(
                f"grad_cam needs outputs (N, C, H, W); {_returned(name, flatten('output', output).tensors)}"
            )
        if not torch.is_grad_enabled():
            raise UsageError(
                f"{name} runs without gradients, which grad_cam needs: in torch.no_grad(), or in a checkpoint "
                "with use_reentrant=True"
            )
        # The graph begins here, so that the backward pass goes no further than this layer.
        seen.append(output.detach().requires_grad_())
        return seen[-1].clone()  # a copy, because the layers that follow may write to it

    with run._prepared(), torch.enable_grad(), interruptible():
        handle = module.register_forward_hook(cut)
        try:
            score = _score(run._forward(), target)
        finally:
            handle.remove()
        if len(seen) != 1:
            raise UsageError(f"{name} was called {len(seen)} times in the forward: grad_cam needs a layer called once")
        if not score.requires_grad:
            raise UsageError(f"the score has no gradient: it does not depend on the output of {name}")
        gradient = torch.autograd.grad(score, seen[0], allow_unused=True)[0]
    if gradient is None:
        raise UsageError(f"the score does not depend on the output of {name}")
    weights = gradient.mean(dim=(2, 3), keepdim=True)
    small = F.relu((weights * seen[0].detach()).sum(1, keepdim=True))
    cam = F.interpolate(small, size=images.shape[-2:], mode="bilinear", align_corners=False)[:, 0]
    return label_of(name, type(module).__name__), images, cam


def _score(output: Any, target: Target) -> Tensor:
    """Return the sum of the scores of all images."""
    if callable(target) and not isinstance(target, Tensor):
        score = target(output)
        if not isinstance(score, Tensor) or score.numel() != 1:
            raise UsageError("target returns a scalar: sum the scores of all images")
        return score
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        raise UsageError(
            "target is a class where the model returns scores (N, classes): else give a function of the output"
        )
    wanted = "target is one class, or one for each image, as integers"
    try:
        classes = torch.as_tensor(target, device=logits.device).expand(len(logits))
    except (RuntimeError, TypeError, ValueError) as error:
        raise UsageError(f"{wanted}; got {target!r}") from error
    if classes.dtype not in (torch.int8, torch.int16, torch.int32, torch.int64) or not len(classes):
        raise UsageError(f"{wanted}; got {target!r} for {len(logits)} images")
    classes = classes.long()
    if not 0 <= int(classes.min()) <= int(classes.max()) < logits.shape[1]:
        raise UsageError(f"target is a class from 0 to {logits.shape[1] - 1}; got {target}")
    return logits.gather(1, classes[:, None]).sum()


def _one_layer(run: Run, layer: str) -> tuple[str, nn.Module]:
    modules = Layers(run.model).modules
    names = select(modules, layer)
    if len(names) != 1:
        raise UsageError(f"{layer!r} selects {len(names)} layers, among them {names[0]} and {names[1]}: choose one")
    return names[0], modules[names[0]]


def _returned(name: str, outputs: list[tuple[str, Tensor]]) -> str:
    shapes = ", ".join(str(tuple(tensor.shape)) for _, tensor in outputs)
    return f"{name} returned {shapes or 'no tensor'}"


def feature_maps(
    probe: ModelProbe,
    model: nn.Module,
    layer: str,
    x: torch.Tensor,
    path: str | PathLike[str] | None = None,
    *,
    mode: Mode | None = None,
    **kwargs: Any,
) -> Figure:
    """Return the output of a layer as a figure: a grid of the channels of the first image.

    Of several outputs, such as the dict of a feature pyramid, it is the first. The model is run and restored as by
    `run`.

    Args:
        model: The model.
        layer: Name of the layer.
        x: The images, (N, C, H, W).
        path: Where to write the figure too; the suffix says the format.
        mode: ``"train"`` or ``"eval"``. With `None` the model stays in its own mode.
        **kwargs: Keyword arguments for the model.

    Raises:
        UsageError: matplotlib is missing, no output has 4 dimensions, or ``mode`` is neither train nor eval.
        SelectionError: There is no such layer.
    """
    __tracebackhide__ = True
    label, found = maps_of(_unrecorded(probe, model, (x,), kwargs, mode, layer), layer)
    title = f"Feature maps of {label}, image 0 of {len(x)}"
    return _drawn(probe, title, figures.feature_maps(title, _image(found)[0]), path)


def grad_cam(
    probe: ModelProbe,
    model: nn.Module,
    layer: str,
    target: Target,
    x: torch.Tensor,
    path: str | PathLike[str] | None = None,
    *,
    mode: Mode | None = "eval",
    **kwargs: Any,
) -> torch.Tensor:
    """Return for each image the map of where a layer raises the score of a class: Grad-CAM, (N, H, W).

    ``ReLU(sum_k w_k A_k)`` with A_k the channels of the layer's output, and w_k the mean of the gradient of the
    score by A_k (Selvaraju et al. 2017), enlarged bilinearly to the size of the images. The model is restored as by
    `run`, gradients included.

    Args:
        model: The model.
        layer: Name of the layer, mostly the last convolution; its output has the shape (N, C, h, w).
        target: The class, or one for each image; or a function from the output to a scalar.
        x: The images, (N, C, H, W).
        path: Where to write the maps over the images; the suffix says the format.
        mode: ``"train"`` or ``"eval"``. With `None` the model stays in its own mode.
        **kwargs: Keyword arguments for the model.

    Raises:
        UsageError: The layer has no such output, the score does not depend on it, ``mode`` is neither train nor
            eval, or there is a path and no matplotlib.
        SelectionError: There is no such layer.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe
    >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 2))
    >>> ModelProbe().grad_cam(model, "0", 1, torch.ones(3, 1, 8, 8)).shape
    torch.Size([3, 8, 8])
    """
    __tracebackhide__ = True
    label, images, cam = cam_of(_unrecorded(probe, model, (x,), kwargs, mode, layer), layer, target)
    named = f", class {target}" if isinstance(target, int) else ""
    title = f"Grad-CAM of {label}{named}"
    draw = functools.partial(figures.overlay, title, _image(images), _image(cam))
    if path is not None:
        _drawn(probe, title, draw(), path)
    else:
        _keep(probe, title, draw)
    return cam


def plot_gradients(probe: ModelProbe, record: Record | Watch, path: str | PathLike[str] | None = None) -> Figure:
    """Return the gradients of layers' outputs by depth as a figure: boxes, or root mean squares without histograms.

    Args:
        record: A record with a backward, or a watch.
        path: Where to write the figure too.

    Raises:
        NothingObservedError: The record has no gradients.
        UsageError: matplotlib is missing.
    """
    __tracebackhide__ = True
    record = figures.record_of(record)
    return _drawn(probe, f"Gradients of {record.model}", figures.gradients(record), path)


def plot_distributions(
    probe: ModelProbe,
    a: Record | Watch,
    b: Record | Watch,
    path: str | PathLike[str] | None = None,
    *,
    layers: Selector = "**",
    labels: tuple[str, str] = ("a", "b"),
) -> Figure:
    """Return the outputs of each layer in two records side by side as a figure: two inputs, domains or models.

    Each layer has the distance of the two distributions, in standard deviations; without histograms that of normal
    distributions with the same means and standard deviations.

    Args:
        a: A record or a watch.
        b: Another with layers of the same names.
        path: Where to write the figure too.
        layers: Which layers to draw.
        labels: Names of the two records.

    Raises:
        NothingObservedError: No layer is in both.
        UsageError: matplotlib is missing.
    """
    __tracebackhide__ = True
    a, b = figures.record_of(a), figures.record_of(b)
    title = f"Outputs of {a.model}: {labels[0]} and {labels[1]}"
    return _drawn(probe, title, figures.distributions(a, b, layers, labels), path)


def _keep(probe: ModelProbe, title: str, draw: Callable[[], Figure]) -> None:
    probe.figures.append(functools.partial(figures.as_data, title, draw))


def _drawn(probe: ModelProbe, title: str, figure: Figure, path: str | PathLike[str] | None) -> Figure:
    figures.save(figure, path)
    _keep(probe, title, lambda: figure)
    return figure


def _unrecorded(
    probe: ModelProbe, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Mode | None, layer: str
) -> Run:
    check_supported(model)
    check_mode(mode)
    options = Options(layers=layer, keep=layer)
    return Run(model, args, kwargs, options, None, mode, device=probe.device, seed=probe.seed)


def _image(tensor: torch.Tensor) -> Any:
    """Return an array of its own, which `figures` may keep."""
    return as_array(tensor.detach().float().cpu()).copy()


# --- where a model looks ----------------------------------------------------------------------------------------------

Box = tuple[int, int, int, int]
Map = list[list[float]]


def assert_attends_to(cam: Any, box: Box | Sequence[Box], *, share: float = 0.5) -> None:
    """Assert that enough of a map's mass, as `ModelProbe.grad_cam` returns it, is inside a box.

    Args:
        cam: The map of one image (H, W), or of several (N, H, W): a tensor or an array, nowhere negative.
        box: ``(top, left, bottom, right)`` in pixels of the input, bottom and right exclusive, as in a slice; or one
            for each image.
        share: The minimum share of the mass inside, from 0 to 1.

    Raises:
        AssertionError: Less of a map is inside.
        NothingObservedError: A map is zero everywhere, or there is none.
        UsageError: The map or a box has another form.

    >>> import torch
    >>> cam = torch.zeros(8, 8)
    >>> cam[2:4, 2:4] = 1
    >>> assert_attends_to(cam, (1, 1, 5, 5), share=0.9)
    """
    __tracebackhide__ = True
    if not 0 <= share <= 1:
        raise UsageError(f"share is a part of the mass, from 0 to 1; got {share!r}")
    maps: list[Map] = cam.tolist() if len(cam.shape) == 3 else [cam.tolist()]
    if not maps:
        raise NothingObservedError("there is no map to look at: the batch is empty")
    boxes: Any = [box] * len(maps) if box and not isinstance(box[0], Sequence) else box
    if len(boxes) != len(maps):
        given = f"{count(len(boxes), 'box')} for {count(len(maps), 'image')}"
        raise UsageError(f"there are {given}: give one, or one for each")
    found: list[tuple[float, int, list[Cell]]] = []
    for image, (one, (top, left, bottom, right)) in enumerate(zip(maps, boxes, strict=True)):
        if not (0 <= top < bottom <= len(one) and 0 <= left < right <= len(one[0])):
            raise UsageError(
                "a box is (top, left, bottom, right) in the map, bottom and right exclusive; "
                f"got {tuple(boxes[image])} for a map of {len(one)} rows and {len(one[0])} columns"
            )
        by_row = [math.fsum(row) for row in one]
        total = math.fsum(by_row)
        if not math.isfinite(total) or any(value < 0 for row in one for value in row):
            raise UsageError(f"the map of image {image} is not finite, or negative somewhere")
        if total == 0:
            raise NothingObservedError(
                f"the map of image {image} is zero everywhere: no position of the layer raises the score of the target"
            )
        inside = math.fsum(value for row in one[top:bottom] for value in row[left:right]) / total
        down = math.fsum(i * mass for i, mass in enumerate(by_row)) / total
        across = math.fsum(j * value for row in one for j, value in enumerate(row)) / total
        _, i, j = max((value, -i, -j) for i, row in enumerate(one) for j, value in enumerate(row))
        places = [str(tuple(boxes[image])), f"({down:.1f}, {across:.1f})", str((-i, -j))]
        found.append((inside, image, [str(image), f"{inside:.1%}", *places]))
    less = sorted(one for one in found if one[0] < share)
    if less:
        least, image, _ = less[0]
        raise failed(
            f"image {image} has {least:.1%} of its map in the box {tuple(boxes[image])}, not {share:.1%} or more; "
            f"{out_of(len(less), len(maps), 'image')}",
            ["image", "in the box", "box", "center of mass", "maximum"],
            [row for _, _, row in less],
            "Positions are (row, column) in pixels of the input. modelprobe.grad_cam(..., path) draws the map.",
        )
