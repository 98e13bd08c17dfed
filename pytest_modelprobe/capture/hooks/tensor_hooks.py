"""Hooks on tensors. A tensor is reduced once and hooked once, in however many places it is seen.

The output of one layer is the input of the next, so most tensors are seen several times. A tensor is known again by its
contents (storage, version and layout) or by our hook on it. The hook hands its gradient to every observation of it.
Contents alone decide nothing about gradients: a gradient reversal returns the memory of its input, and has another
gradient.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch

from pytest_modelprobe import statistics
from pytest_modelprobe._torch import WeakStorage, free_graphs, hook_tensor, is_view, tensor_hooks, unhook_tensor
from pytest_modelprobe.capture.observed.observation import Forward, TensorObservation
from pytest_modelprobe.capture.observed.tensors import ContentKey, content_key, is_parameter, shape_of
from pytest_modelprobe.models import is_distributed, local_tensor, value_layout
from pytest_modelprobe.statistics import Reduction, Samples, ambient_modes_disabled

from .guard import HookGuard, hidden

OnGradient = Callable[[Mapping[Forward, list[TensorObservation]], torch.Tensor], None]


class HookedViews:
    """Finds the views that were overwritten after they were observed.

    Autograd drops the hook on a view silently when the view is overwritten in place. Its gradient is then that of the
    uses before, and a record says so.
    """

    def __init__(self) -> None:
        self._views: list[tuple[TensorObservation, int, torch.Tensor]] = []

    def add(self, tensor: torch.Tensor, seen: TensorObservation) -> None:
        """Look after a view."""
        with ambient_modes_disabled(), contextlib.suppress(RuntimeError):  # a tensor subclass may not allow it
            version = tensor.detach()
            # The alias gives up the memory, so that it keeps none alive. It still shares the count of versions.
            version.data = _no_elements(tensor.dtype, tensor.device)
            self._views.append((seen, tensor._version, version))

    def mark_overwritten(self) -> None:
        """Mark the views that were overwritten by now, and forget them all."""
        for seen, before, version in self._views:
            seen.overwritten |= version._version > before
        self._views.clear()


@functools.cache
def _no_elements(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device)


@dataclass(eq=False)
class TensorObserver:
    """Makes a `TensorObservation` of each tensor, with a hook for its gradient."""

    guard: HookGuard
    views: HookedViews
    on_gradient: OnGradient
    """Called with the observations of a tensor, by forward, and its whole gradient."""
    histograms: bool
    """Whether to count the elements of each tensor in bins."""

    def __post_init__(self) -> None:
        self.model_storages: frozenset[int] = frozenset()
        """Keys of the storages of the model's parameters and buffers."""
        self.reads_layouts = False
        """Whether the model is tensor parallel."""
        # Hooks of the newest forward, and earlier ones that were alive when it began. They are removed on detach.
        self._hooks: list[ReferenceType[_TensorHook]] = []

    def observe(
        self, forward: Forward, tensor: torch.Tensor, axis: int | None, own: Samples | None = None
    ) -> TensorObservation:
        """Return the observation of a tensor in a new place.

        Args:
            forward: The forward.
            tensor: What is seen.
            axis: The axis of its units.
            own: Of an input of the model, samples with hashes of it alone, if those of the forward are others.
        """
        if not tensor.requires_grad:
            return self._seen(forward, tensor, *self._read(forward, tensor, axis, own))
        hook = self._hook_on(tensor)
        # `.data` may change a leaf, or a parameter of which this is a view, without a new version. So what was read of
        # these before is not used again.
        view = is_view(tensor)
        places = hook.observed.get(forward) if hook.observed else None
        before = places[0] if places else None
        if before is not None and hook.version is not None and not (view or before.forward in forward.own):
            without = before.backward is None and before.backward_inner is None
            if without and before.shape == shape_of(tensor):
                return before  # one observation in both places
            seen = self._seen(forward, tensor, before.number, before.forward)
        else:
            number, reduced = self._read(forward, tensor, axis, own)
            if before is not None:
                number = before.number
            elif not (self.reads_layouts and is_distributed(tensor)):
                # Numbered by the hook and not by the contents: after a `detach` or a gradient reversal, the same
                # contents have another gradient.
                number = forward.next_number()
                if self.reads_layouts:
                    _renumber(forward, content_key(tensor), number)
            seen = self._seen(forward, tensor, number, reduced)
        hook.add(forward, seen)
        if view:
            self.views.add(tensor, seen)
        return seen

    def observe_again(self, forward: Forward, tensor: torch.Tensor, seen: TensorObservation) -> None:
        """Let the gradient of a recomputed tensor go to the observation of the original."""
        # The original may be the last position of the tensor alone, and the gradient is of all positions.
        if tensor.requires_grad and not tensor.is_leaf and seen.shape == shape_of(tensor):
            seen.requires_grad = True
            hook = self._hook_on(tensor)
            if not any(seen is known for known in hook.observed.get(forward, ())):
                hook.add(forward, seen)

    def drop_dead_hooks(self) -> None:
        """Forget the hooks whose tensors are gone."""
        free_graphs()
        self._hooks = [alive for alive in self._hooks if alive() is not None]

    def detach(self) -> None:
        """Remove the hooks from all tensors that are alive."""
        for alive in self._hooks:
            if (hook := alive()) is not None:
                unhook_tensor(hook.hooks, hook)
        self._hooks.clear()
        free_graphs()

    def _read(
        self, forward: Forward, tensor: torch.Tensor, axis: int | None, own: Samples | None
    ) -> tuple[tuple[int, int], Reduction]:
        """Return the number of a tensor's contents, and their reduction."""
        # A DTensor that a layer is given may be made of the local tensor that the layer before returned, and then has
        # its memory.
        local = local_tensor(tensor) if self.reads_layouts else tensor
        key = content_key(local)
        if local is not tensor and value_layout(tensor) == "partial":
            key = None  # its local tensor is a summand of it, so they have different elements
        if key is not None and (key[0] in self.model_storages or is_parameter(tensor)):
            key = None  # `p.data.add_()` changes a parameter without a new version
        known = None if key is None else forward.reductions.get(key)
        number, reduced = (forward.next_number(), None) if known is None else known[:2]
        if reduced is not None and own is None and reduced not in forward.own:
            return number, reduced
        reduced = statistics.reduce(
            tensor,
            axis=axis,
            index=forward.index,
            samples=own or forward.samples,
            histogram=self.histograms,
        )
        if own is not None:
            forward.own.add(reduced)
        if key is not None:
            forward.reductions[key] = number, reduced, WeakStorage(local.untyped_storage())
        return number, reduced

    def _seen(
        self, forward: Forward, tensor: torch.Tensor, number: tuple[int, int], reduced: Reduction
    ) -> TensorObservation:
        """Return a new observation of a tensor of which the numbers are known."""
        local = local_tensor(tensor) if self.reads_layouts else tensor
        whole = local.is_nested or not forward.samples.has_batch(local.shape)
        seen = TensorObservation(tensor, number, reduced, whole=whole)
        if self.reads_layouts:
            seen.layout = value_layout(tensor)
        return seen

    def _hook_on(self, tensor: torch.Tensor) -> _TensorHook:
        """Return our hook on the tensor as it is now. It is made if there is none."""
        # A leaf keeps its hook for ever. Any other tensor becomes the output of another node when it is written to, and
        # the hook stays with the old node.
        version = None if tensor.is_leaf else tensor._version
        hooks = tensor_hooks(tensor)
        for known in hooks.values() if hooks else ():
            if type(known) is _TensorHook and known.observer is self and known.version == version:
                return known
        hook = _TensorHook(self, version)
        hook.hooks = hook_tensor(tensor, hook, len(self._hooks))
        self._hooks.append(ref(hook))
        return hook


def _renumber(forward: Forward, key: ContentKey | None, number: tuple[int, int]) -> None:
    """Give the contents of a tensor a new number, so that a DTensor that is made of it gets the same."""
    if key is not None and key in forward.reductions:
        _, reduced, storage = forward.reductions[key]
        forward.reductions[key] = number, reduced, storage


class _TensorHook:
    """Our hook on one tensor. It hands the gradient to every observation of the tensor."""

    __slots__ = ("__weakref__", "_fired", "hooks", "observed", "observer", "version")
    __torch_unserializable__ = True  # without this, torch warns when the tensor is pickled

    def __init__(self, observer: TensorObserver, version: int | None) -> None:
        self.observer = observer
        self._fired = False
        self.version = version
        self.hooks: Any = None
        # The graph holds its forward through the hooks in it. A leaf outlives many graphs, so its hook holds none.
        self.observed: MutableMapping[Forward, list[TensorObservation]] = (
            {} if version is not None else WeakKeyDictionary()
        )

    def add(self, forward: Forward, seen: TensorObservation) -> None:
        """Let the gradient go to ``seen`` too."""
        if self._fired:  # an input is used again, and earlier forwards have had its gradient
            for earlier in [other for other in self.observed if other is not forward]:
                del self.observed[earlier]
            self._fired = False
        self.observed.setdefault(forward, []).append(seen)

    def __call__(self, gradient: torch.Tensor | None) -> None:
        guard = self.observer.guard
        if guard.active and gradient is not None and self.observed:
            with guard.lock, guard, hidden():
                if guard.observes():
                    self._fired = True
                    self.observer.on_gradient(self.observed, gradient)
