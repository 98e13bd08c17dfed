"""Write the call of a layer, alone on synthetic tensors, into a file of safetensors."""

from __future__ import annotations

import hashlib
import inspect
import json
import platform
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_modelprobe.comparison import Diagnosis
from pytest_modelprobe.files import file_name
from pytest_modelprobe.record import codec

from .encoding import Encoder, NotPlainError

KEY = "modelprobe"
"""The entry of the metadata that holds all but the tensors."""

SCHEMA = 1


def save(diagnosis: Diagnosis, folder: str, item: pytest.Item, number: int) -> str:
    """Write the call of the first cause whose layer, alone, computes something else; return a line that says where."""
    found, layers = diagnosis.comparison, [cause.layer for cause in (*diagnosis.causes, *diagnosis.possible)]
    differing = (d for layer in layers for d in found.found if d.layer == layer and d.kind == "response")
    first = next((d for d in differing if d.change is not None), None)
    if first is None:
        return "no call is saved: no layer that is a cause computes something else when it is called alone"
    seen, label = _SeenCall(first.layer, first.call), found.actual[first.layer].label
    pairs = [pair for pair in found.calls if (pair.layer, pair.actual.index) == (first.layer, first.call)]
    live_run, expected = found.actual.live_run, pairs[0].expected.response
    if live_run is not None and len(pairs) == 1:
        only = [first.layer]
        live_run.isolated(found.actual, like=found.expected, names=found.names_before, only=only, observer=seen)
    then_computed = {h.where: h.reading for h in expected.handed if h.reading} if expected is not None else {}
    reason = seen.reason or ("" if first.what in seen.data.get("computed", {}) else "it cannot be called again")
    if len(pairs) > 1:
        reason = "it is called in several kinds of forwards"
    if reason:
        return f"the call of {label} is not saved: {reason}"
    state = seen.data["call"]["tuple"][0]["of"]
    then, now = (record[first.layer].attributes for record in (found.expected, found.actual))
    seen.data |= {
        "test": item.nodeid,
        "label": label,
        "type": found.actual[first.layer].type,
        "precision": "measured" if found.expected.noise == "measured" else "unmeasured",
        "expected": {where: codec.encode(reading) for where, reading in then_computed.items()},
        "attributes": {n: then[n] for n in sorted(now.keys() & then.keys()) if state.get(n) == now[n] != then[n]},
        "path": _path_of(seen.data["class"].partition(".")[0], item.config.rootpath),
    }
    name = ".".join([item.nodeid.replace("/", ".").replace("::", "."), first.layer, *([str(number)] * (number > 1))])
    file = Path(folder) / f"{file_name(name)}.safetensors"
    path = item.config.invocation_params.dir / file
    path.parent.mkdir(parents=True, exist_ok=True)
    from safetensors.torch import save_file

    save_file(seen.tensors, path, metadata={KEY: json.dumps(seen.data)})
    return f"the call of {label} alone is saved: modelprobe replay {file}"


def source_digest(cls: type) -> str:
    """Return the digest of the source of a class; empty if there is none."""
    try:
        return hashlib.sha256(inspect.getsource(cls).encode()).hexdigest()[:12]
    except (OSError, TypeError):
        return ""


def versions(cls: type) -> dict[str, str]:
    """Return the versions of Python, of torch, and of the package of a class."""
    top = cls.__module__.partition(".")[0]
    own = getattr(sys.modules.get(top), "__version__", "")
    return {"python": platform.python_version(), top: str(own), "torch": torch.__version__}


class _SeenCall:
    """A `CallObserver` that keeps the first time that one call is made alone."""

    def __init__(self, layer: str, index: int) -> None:
        self._key = layer, index
        self._seeing = False
        self.reason = ""
        """Why the call cannot be saved; empty if it can."""
        self.data: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {}

    def begins(self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, widened: bool) -> None:
        """Keep the layer and the arguments."""
        self._seeing = (call.layer, call.index) == self._key and not (self.data or self.reason)
        if not self._seeing:
            return
        module: nn.Module = call.module
        encode = Encoder(self.tensors, {id(child.module): child for child in call.calls})
        forward = vars(module).get("forward")
        if module._forward_hooks or module._forward_pre_hooks:
            self.reason = "it has hooks"
        elif getattr(getattr(forward, "__wrapped__", None), "__func__", None) is not type(module).forward:
            self.reason = "its forward is not that of its class"
        try:
            encoded = encode((module, args, kwargs), type(module).__name__)
        except NotPlainError as error:
            self.reason, self._seeing = self.reason or str(error), False
            return
        device = next((str(tensor.device) for tensor in self.tensors.values()), "cpu")
        self.data = {
            "schema": SCHEMA,
            "class": type(module).__module__,
            "call": encoded,
            "left_out": encode.left_out,
            "mode": "train" if module.training else "eval",
            "widened": widened,
            "device": device,
            "source": source_digest(type(module)),
            "versions": versions(type(module)),
            "children": defaultdict(list),
            "computed": {},
        }

    def answered(self, child: str, output: Any) -> None:
        """Keep what a child returned."""
        if not self._seeing:
            return
        try:
            self.data["children"][child].append(Encoder(self.tensors, {})(output, f"what {child} returns"))
        except NotPlainError as error:
            self.reason, self._seeing = str(error), False

    def computed(self, where: str, tensor: Tensor) -> None:
        """Keep a tensor that the code computed."""
        if self._seeing:
            self.data["computed"][where] = key = str(len(self.tensors))
            self.tensors[key] = tensor.detach().clone(memory_format=torch.contiguous_format)


def _path_of(top: str, root: Path) -> str:
    """Return the folder below the root from which a module is imported; empty if it is an installed one."""
    file = getattr(sys.modules.get(top), "__file__", None)
    folder = None if file is None else Path(file).parent.parent if Path(file).stem == "__init__" else Path(file).parent
    inside = folder is not None and folder.is_relative_to(root) and "site-packages" not in folder.parts
    return folder.relative_to(root).as_posix() if inside and folder is not None else ""
