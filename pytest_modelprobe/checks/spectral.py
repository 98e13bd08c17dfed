"""Spectral norms whose vectors are not those of the weight: evaluation divides by a wrong number.

A spectral norm keeps two vectors, and each forward in training mode brings them closer to the singular vectors of the
weight. Evaluation uses them as they are: at random before the first such forward, and those of another weight where it
was initialized or loaded after the norm was added.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pytest_modelprobe.record import qualified
from pytest_modelprobe.text import count, number

from .machinery.check import check_unmodified
from .machinery.prepared import PreparedModel
from .machinery.rounding import as_double
from .outcome import NotApplicableError, Violation

_TIMES = 2.0
"""How many times the singular value may be off: a few steps of power iteration bring it closer than that."""


@check_unmodified
def spectral_norms_settled(prepared: PreparedModel) -> Violation | str:
    """Check that weights under ``spectral_norm`` have a largest singular value of about 1 in evaluation mode.

    With ``torch.nn.utils.spectral_norm`` it is a random number until the first forward in training mode, and after
    weights were initialized or loaded without the norm's vectors. ``torch.nn.utils.parametrizations.spectral_norm``
    begins with its vectors settled; there it is wrong after the weight was initialized again. The largest singular
    value may be half of 1 to twice.

    Args:
        prepared: The model as it is evaluated, and its inputs.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe = ModelProbe()
    >>> model = probe.build(lambda: nn.utils.spectral_norm(nn.Linear(6, 8))).eval()
    >>> checks.spectral_norms_settled.outcome(probe, model, probe.randn(4, 6)).verdict
    'broken'
    >>> _ = model.train()(probe.randn(4, 6))
    >>> print(checks.spectral_norms_settled(probe, model, probe.randn(4, 6)))
    spectral_norms_settled holds for Linear: 1 weight
    """
    with prepared.keep_changes():
        one = prepared.reference(mode="eval")  # the older norm makes its weight in a forward
        called = {given.layer for given in one.tensors}
        norms = {
            qualified(layer, name): _largest(getattr(module, name), transposed=isinstance(module, _TRANSPOSED))
            for layer, module in prepared.layers.modules.items()
            if layer in called
            for name in _spectral_norms(module)
        }
    if not norms:
        raise NotApplicableError("no weight that it uses has a spectral norm")
    found = [(name, norm) for name, norm in norms.items() if not 1 / _TIMES <= norm <= _TIMES]
    if not found:
        return count(len(norms), "weight")
    return Violation.first_of(
        found,
        f"has a largest singular value of {number(found[0][1])} in evaluation mode, where spectral_norm is to make it "
        "1",
        columns=("weight", "largest singular value"),
        advice="Its vectors are not those of the weight: call the model in training mode before it is evaluated, or "
        "initialize the weight before spectral_norm; torch.nn.utils.parametrizations.spectral_norm settles them at "
        "once.",
    )


_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
"""Their weights have the outputs along axis 1."""


def _spectral_norms(module: nn.Module) -> Iterator[str]:
    """Yield the name of each weight under a spectral norm alone."""
    own = dict(module.named_buffers(recurse=False))
    for name in own:
        weight = name.removesuffix("_u")
        if weight != name and f"{weight}_v" in own and hasattr(module, f"{weight}_orig"):
            yield weight
    chains: Any = module.parametrizations if parametrize.is_parametrized(module) else {}
    for weight, chain in chains.items():
        norms = list(chain.children())
        if len(norms) == 1 and dict(norms[0].named_buffers(recurse=False)).keys() == {"_u", "_v"}:
            yield weight


def _largest(weight: Tensor, *, transposed: bool) -> float:
    """Return the largest singular value of a weight as a matrix with a row for each output."""
    matrix = as_double(weight.detach()).movedim(int(transposed), 0).flatten(1)
    return float(torch.linalg.matrix_norm(matrix, 2))
