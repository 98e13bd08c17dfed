"""Maps over positions: the outputs of a layer, and where they raise the score of a target (Grad-CAM).

Both need a forward of a `Run`, so they are here. The figures are drawn elsewhere, from the tensors that these functions
return.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_modelprobe.exceptions import NothingObservedError, UsageError
from pytest_modelprobe.interrupts import interruptible
from pytest_modelprobe.models import Layers, flatten
from pytest_modelprobe.record import label_of, select
from pytest_modelprobe.runs import Run

Target = int | Tensor | Callable[[Any], Tensor]
"""The class of each image, or a function from the output to a scalar."""


def feature_maps(run: Run, layer: str) -> tuple[str, list[tuple[str, Tensor]]]:
    """Return the label of a layer, and the outputs (N, C, H, W) of its first call, each with its path."""
    __tracebackhide__ = True
    name, module = _one_layer(run, layer)
    _, kept = run.record()
    if not kept.get(name):
        raise NothingObservedError(f"{name} was never called: choose a layer that the forward uses")
    outputs = flatten("output", kept[name][0]).tensors
    maps = [(path.removeprefix("output."), tensor) for path, tensor in outputs if tensor.dim() == 4]
    if not maps or not all(tensor.numel() for _, tensor in maps):
        raise UsageError(f"feature maps have 4 dimensions (N, C, H, W), none of them 0; {_returned(name, outputs)}")
    return label_of(name, type(module).__name__), maps


def grad_cam(run: Run, layer: str, target: Target) -> tuple[str, Tensor, Tensor]:
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
