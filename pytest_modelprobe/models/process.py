"""The state of the process that a forward may change: one table of how it is read, and how it is set.

A model may set a default dtype, warning filters or a thread count, and leave them so. Then a test would change the
tests after it. The table is read before a run, and what differs is set back after it. Random generators have a table of
their own, because seeding puts them back too. The state of autocast is read here for all who enter it again.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from pytest_modelprobe import _torch
from pytest_modelprobe.exceptions import ModelProbeError


class Setting(NamedTuple):
    """One row of the table."""

    name: str
    """Its name in the documentation."""
    get: Callable[[], Any]
    set: Callable[[Any], object]


Settings = list[tuple[Setting, Any]]
"""The type of settings, each with its value."""


@contextmanager
def settings_preserved() -> Iterator[None]:
    """Restore on exit the settings of the process.

    >>> with settings_preserved():
    ...     torch.set_default_dtype(torch.float64)
    >>> torch.ones(1).dtype
    torch.float32
    """
    before = read_settings()
    try:
        yield
    finally:
        restore_settings(before)


def read_settings() -> Settings:
    """Return the settings that have a value."""
    return [(one, was) for one in SETTINGS if (was := _read(one)) is not _NOTHING]


def restore_settings(before: Settings) -> None:
    """Set the settings that have another value now. All others are left alone: to set some takes long, or warns."""
    for one, was in before:
        if _read(one) != was:
            one.set(was)


_NOTHING = object()


def _read(one: Setting) -> Any:
    try:
        return one.get()
    # torch has two ways to set a precision. After the newer one the older one may raise instead of having a value.
    except (RuntimeError, ModelProbeError):
        return _NOTHING


Autocast = tuple[str, torch.dtype, bool]
"""Type of device, dtype to which autocast casts there, and whether it is enabled."""

_DEVICES = ("cpu", "cuda", "mps", "xpu")


def autocast_states(devices: Iterable[str] = _DEVICES) -> tuple[Autocast, ...]:
    """Return the state of autocast for the types of device that have it, enabled or not."""
    available = filter(torch.amp.is_autocast_available, dict.fromkeys(devices))
    return tuple((d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in available)


def active_autocast(devices: Iterable[str] = _DEVICES) -> tuple[Autocast, ...]:
    """Return the state of autocast for the types of device for which it is enabled.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     active_autocast()
    (('cpu', torch.bfloat16, True),)
    """
    return tuple(state for state in autocast_states(devices) if state[2]) if _torch.any_autocast() else ()


# --- settings ---------------------------------------------------------------------------------------------------------

_ENVIRONMENT: Any = getattr(os.environ, "_data", os.environ)
"""The environment variables as Python keeps them, encoded. To decode them before and after each run took a twentieth of
the run of a small model."""


def _set_environment(encoded: dict[Any, Any]) -> None:
    variables = {os.fsdecode(name): os.fsdecode(value) for name, value in encoded.items()}
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def _set_warning_filters(before: list[Any]) -> None:
    warnings.resetwarnings()  # it also makes Python forget what the old filters decided
    warnings.filters.extend(before)  # type: ignore[attr-defined]


def _set_deterministic(before: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _set_autocast(before: tuple[Autocast, ...]) -> None:
    for device, dtype, enabled in before:  # set also where it is off: the dtype for the next time is a setting too
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


_BACKENDS: list[Any] = [
    operation
    for backend in (torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn)
    for operation in (getattr(backend, name, None) for name in ("matmul", "conv", "rnn"))
    if hasattr(operation, "fp32_precision")  # torch 2.9 and newer
]


def _set_precisions(before: list[str]) -> None:
    for operation, precision in zip(_BACKENDS, before, strict=True):
        if operation.fp32_precision != precision:
            operation.fp32_precision = precision


def _stream() -> Any:
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None


def _set_stream(before: Any) -> None:
    if before is not None:
        torch.cuda.set_stream(before)


# Not the properties of `torch.backends.cudnn`, which cannot be set after the user froze the flags.
SETTINGS = (
    Setting("environment", _ENVIRONMENT.copy, _set_environment),
    Setting("warning filters", lambda: warnings.filters[:], _set_warning_filters),
    Setting("function modes and default device", _torch.function_modes_now, _torch.set_function_modes),
    Setting("dispatch modes", _torch.dispatch_modes_now, _torch.set_dispatch_modes),
    Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Setting("grad mode", torch.is_grad_enabled, lambda on: torch.set_grad_enabled(on)),
    Setting("autocast", lambda: autocast_states(("cpu", "cuda")), _set_autocast),
    Setting("autocast cache", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    Setting(
        "deterministic algorithms",
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        _set_deterministic,
    ),
    *(Setting(f"cuDNN {name}", read, write) for name, (read, write) in _torch.CUDNN.items()),
    Setting("precision of float32 products", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    Setting("precision by backend", lambda: [one.fp32_precision for one in _BACKENDS], _set_precisions),
    Setting("threads", torch.get_num_threads, torch.set_num_threads),
    Setting("stream of CUDA", _stream, _set_stream),
)
"""The settings that `settings_preserved` puts back, in this order."""


# --- random generators ------------------------------------------------------------------------------------------------


def _cuda_states() -> Any:
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # reading would initialize CUDA


def _set_cuda_states(before: Any) -> None:
    if before is not None:
        torch.cuda.set_rng_state_all(before)
    elif torch.backends.cuda.is_built():  # a seed that was set meanwhile would wait for CUDA's first use
        _torch.seed_cuda(torch.initial_seed())


def _generators() -> Iterator[Setting]:
    yield Setting("generator of torch on the CPU", torch.get_rng_state, torch.set_rng_state)
    if torch.backends.mps.is_available():
        yield Setting("generator of MPS", torch.mps.get_rng_state, torch.mps.set_rng_state)
    if torch.xpu.is_available():
        yield Setting("generators of XPU", torch.xpu.get_rng_state_all, torch.xpu.set_rng_state_all)
    yield Setting("generators of CUDA", _cuda_states, _set_cuda_states)
    yield Setting("generator of numpy", np.random.get_state, np.random.set_state)
    yield Setting("generator of random", random.getstate, random.setstate)


GENERATORS = tuple(_generators())
"""The generators that `seeding.forked_rng` puts back. The CPU comes first, because CUDA may need its seed."""
