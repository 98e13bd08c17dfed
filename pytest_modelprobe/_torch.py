"""The private names of torch that the package uses. A release of torch may remove any of them.

Private are names with an underscore, and all of `torch._C`. When they were scattered over the package, one that a
release dropped broke the import of the package, or every run. Now each is looked up once, by its path, and has a public
name here. If it is missing there is a replacement, often a slower one, or a `ModelProbeError` that says in one sentence
what cannot be done. A test removes one path after the other, and a test keeps such names out of all other modules.

Six attributes are used in other modules too, because other libraries rely on them: ``_parameters``, ``_buffers``,
``_modules``, ``_forward_hooks`` and ``_forward_pre_hooks``, which are in every pickled module, and ``_version``, which
has no replacement.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import operator
import os
import pkgutil
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

from .exceptions import ModelProbeError

PATHS: list[str] = []
"""All private names that are looked up. `modelprobe doctor` says which of them this torch does not have."""

Context = Callable[[], AbstractContextManager[object]]


def _private(path: str, instead: Any = None, *, cannot: str = "") -> Any:
    """Return the object at a path.

    If there is none, return ``instead``, or with ``cannot`` a function that raises `ModelProbeError` when it is called:
    the package can still be imported, and what does not need the name still works.
    """
    PATHS.append(path)
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return functools.partial(_refuse, path, cannot) if cannot else instead


def _attribute(path: str, instead: Any = None, *, cannot: str = "") -> Any:
    """Return a function that reads an attribute, given its path on the class. If it is missing, do as `_private`."""
    missing = functools.partial(_refuse, path, cannot) if cannot else instead
    return missing if _private(path, missing) is missing else operator.attrgetter(path.rpartition(".")[2])


def _together(*paths: str, cannot: str) -> list[Any]:
    """Return the objects at paths, of which all are needed: where one is missing, each raises `ModelProbeError`."""
    found = [_private(path, cannot=cannot) for path in paths]
    missing = next((one for one in found if isinstance(one, functools.partial)), None)
    return found if missing is None else [missing] * len(found)


def _refuse(path: str, cannot: str, *_: object, **__: object) -> NoReturn:
    raise ModelProbeError(
        f"torch {torch.__version__} has no {path}, without which {cannot}: install a newer pytest-modelprobe, or an "
        "older torch"
    )


# --- what is running --------------------------------------------------------------------------------------------------

graph_task: Callable[[], int] = _private(
    "torch._C._current_graph_task_id", cannot="a forward cannot be told from a backward pass"
)
"""Return the number of the backward pass that runs in this thread, or -1 if none does."""

_will_run: Callable[[Any], bool] = _private("torch._C._will_engine_execute_node", lambda node: True)


def accumulates(leaf: Tensor) -> bool:
    """Return whether the pass that runs adds to ``.grad``, as `torch.autograd.grad` does not. True if it is unknown."""
    try:
        return _will_run(get_gradient_edge(leaf).node)
    except RuntimeError:  # under `torch.autograd.grad` the engine refuses to answer for a leaf
        return False


tracing_state: Callable[[], object] = _private(
    "torch._C._get_tracing_state", lambda: cast(Any, torch.jit).is_tracing() or None
)
"""Return the state of `torch.jit.trace` while it runs, or `None`."""

transform: Callable[[], object] = _private("torch._C._functorch.peek_interpreter_stack", lambda: "perhaps one")
"""Return the transform of `torch.func` that runs, or `None`. If it cannot be known, a string stands for one."""

_NOTHING_READ = "no tensor can be read"

function_modes: Callable[[], int] = _private("torch._C._len_torch_function_stack", cannot=_NOTHING_READ)
"""Return how many function modes are active."""

# Together, or a mode of the user's could be taken off and not put back.
pop_function_mode, push_function_mode = _together(
    "torch.overrides._pop_mode",
    "torch.overrides._push_mode",
    cannot="functionals=True and attention=True are not possible",
)
"""Take the topmost function mode off the stack, and return it; put one on top of the stack."""


_DEFAULT_DEVICE: Any = _private("torch._GLOBAL_DEVICE_CONTEXT")


def default_device_mode() -> object:
    """Return the function mode of `torch.set_default_device`, which has to be at the bottom, or `None`."""
    return getattr(_DEFAULT_DEVICE, "device_context", None)


dispatch_modes: Callable[[], int] = _private("torch._C._len_torch_dispatch_stack", cannot=_NOTHING_READ)
"""Return how many dispatch modes are active."""

pop_dispatch_mode, push_dispatch_mode, _COMPOSITE, _has_kernel, _ = _together(
    "torch.utils._python_dispatch._pop_mode",
    "torch.utils._python_dispatch._push_mode",
    "torch._C.DispatchKey.CompositeImplicitAutograd",
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    "torch.ops.aten.add.Tensor._op_dk",
    cannot="profile=True is not possible",
)
"""Take the topmost dispatch mode off the stack, and return it; put one on top of the stack; see `run_composite`."""


def dispatch_modes_now() -> tuple[Any, ...]:
    """Return all dispatch modes."""
    modes = [pop_dispatch_mode() for _ in range(dispatch_modes())][::-1]
    set_dispatch_modes(modes)
    return tuple(modes)


def set_dispatch_modes(modes: Sequence[Any]) -> None:
    """Make active what `dispatch_modes_now` returned, and nothing else."""
    for _ in range(dispatch_modes()):
        pop_dispatch_mode()
    for mode in modes:
        push_dispatch_mode(mode)


any_autocast: Callable[[], object] = _private("torch._C._is_any_autocast_enabled", cannot=_NOTHING_READ)
"""Return whether autocast is active for any device."""

# --- contexts for our own arithmetic ----------------------------------------------------------------------------------
#
# A reduction in a hook runs inside whatever the user's code switched on. Under autocast to bfloat16 it would be wrong
# by 2e-3, and a mode or a tensor subclass could see it or change it.


without_torch_function: Context = _private("torch._C.DisableTorchFunction", cannot=_NOTHING_READ)
"""Return a context in which no `__torch_function__` is called, of tensor subclasses or of modes."""

without_subclasses: Context = _private("torch._C.DisableTorchFunctionSubclass", without_torch_function)
"""Return a context in which no `__torch_function__` of a tensor subclass is called."""


without_dispatch_modes: Context = _private(
    "torch.utils._python_dispatch._disable_current_modes",
    cannot="no tensor can be read under a dispatch mode",
)
"""Return a context in which no dispatch mode is active."""

without_autocast: Context = _private("torch._C._DisableAutocast", cannot="no tensor can be read under autocast")
"""Return a context in which autocast is off for all devices."""

without_transforms: Context = _private(
    "torch._C._DisableFuncTorch", cannot="no tensor can be read inside a transform of torch.func"
)
"""Return a context in which operations pass by the transforms of `torch.func`."""

# --- tensors and storages ---------------------------------------------------------------------------------------------


is_wrapped: Callable[[Tensor], bool] = _private("torch._C._functorch.is_functorch_wrapped_tensor", cannot=_NOTHING_READ)
"""Return whether a tensor is one that a transform of `torch.func` passes to a function."""

is_view: Callable[[Tensor], bool] = _private("torch.Tensor._is_view", lambda tensor: tensor._base is not None)
"""Return whether autograd treats a tensor as a view of another."""

storage_key: Callable[[torch.UntypedStorage], int] = _attribute(
    "torch.UntypedStorage._cdata", lambda storage: StorageWeakRef(storage).cdata
)
"""Return the number of a storage. It is unique as long as the storage lives."""

_weak_ref: Any = _private("torch.UntypedStorage._weak_ref")
_free_weak_ref: Any = _private("torch.UntypedStorage._free_weak_ref")
_expired: Any = _private("torch.UntypedStorage._expired")


class _WeakStorage:
    """A weak reference to a storage as `StorageWeakRef`, but freed by code in C.

    Python swallows an exception in a `__del__`. With one in Python, a Ctrl-C that arrives while one of thousands is
    freed would be lost.
    """

    __slots__ = ("__del__", "cdata")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.cdata: Any = storage._weak_ref()
        self.__del__ = functools.partial(_free_weak_ref, self.cdata)

    def expired(self) -> bool:
        """Whether the storage is gone."""
        return bool(_expired(self.cdata))


WeakStorage: Any = _WeakStorage if _weak_ref and _free_weak_ref and _expired else StorageWeakRef
"""Class of weak references to storages. While one lives, the key of its storage is not used again."""

tensor_hooks: Callable[[Tensor], dict[int, Callable[..., Any]] | None] = _attribute(
    "torch.Tensor._backward_hooks", cannot="no gradient can be watched"
)
"""Return the hooks on a tensor. If it has none, this is `None` or an empty dict."""

_takes_hooks: Any = _private("torch._C._FunctionBase._register_hook_dict")


_DEEP = 4_000
"""So many nodes that Python has seen may be freed by each other: with a stack of 8 MiB, 30,000 end the process."""
_APART = 256
_kept: list[Any] = []
"""Nodes of deep graphs, the newest last."""


def keep_node(node: Any, number: int) -> None:
    """Keep one of some hundred nodes of a deep graph until `free_graphs`, so that no chain of nodes is freed at once.

    Since torch 2.13 a node that Python has seen frees the nodes before it on the stack of its own destructor.

    Args:
        node: The node, or None for a leaf.
        number: How many nodes of the graph, or of all, were seen before it.
    """
    # Spread as if at random, so that branches which alternate are cut too.
    if number >= _DEEP and node is not None and number * 0x9E3779B1 % 2**32 < 2**32 // _APART:
        _kept.append(node)


def free_graphs() -> None:
    """Let go of the kept nodes that no graph needs any more, the newest first, because it may need the others."""
    for i in range(len(_kept) - 1, -1, -1):
        if _references(_kept, i) <= _ALONE:
            del _kept[i]


def _references(nodes: list[Any], i: int) -> int:
    return sys.getrefcount(nodes[i])


_ALONE = _references([object()], 0)
"""References to a node that only a list has: a graph that needs it has one more."""


def hook_tensor(
    tensor: Tensor, hook: Callable[[Tensor], object], number: int = 0
) -> weakref.ref[dict[int, Callable[..., Any]]]:
    """Register a hook as `Tensor.register_hook` does, in half the time, and return what `unhook_tensor` takes.

    The handle, and what leads to it, takes more than half of the 9 microseconds of `register_hook`.

    Args:
        tensor: The tensor, which requires a gradient.
        hook: What is called with its gradient.
        number: How many tensors that may be of the same graph were hooked before it.
    """
    node: Any = tensor.grad_fn
    if number >= _DEEP:
        keep_node(node, number)
    if node is None or type(tensor) is not Tensor or _takes_hooks is None or tensor_hooks(tensor) is not None:
        tensor.register_hook(hook)
        return weakref.ref(cast("dict[int, Callable[..., Any]]", tensor_hooks(tensor)))
    hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
    hooks[id(hook)] = hook  # a key that no handle has: handles count from 0
    tensor._backward_hooks = hooks
    node._register_hook_dict(tensor)
    return weakref.ref(hooks)


def unhook_tensor(hooks: weakref.ref[dict[int, Callable[..., Any]]], hook: Callable[[Tensor], object]) -> None:
    """Remove a hook if its tensor lives and still has the hook."""
    there = hooks()
    for key in [key for key, value in (there or {}).items() if value is hook]:
        cast("dict[int, Any]", there).pop(key)


# --- modules and their hooks ------------------------------------------------------------------------------------------

CALL: str = _private("torch.nn.Module._call_impl", cast(Any, nn.Module.__call__)).__name__
"""Name of the function that runs a module's hooks and its forward. Its Python frame is that of the call."""

_STAGE = "torch.distributed.pipelining.stage"


def learns_shapes(frame: FrameType | None) -> bool:
    """Return whether a call is one by which a stage of a pipeline learns shapes.

    From the second stage on, the inputs of such a call are memory that nobody has written, with NaN and huge numbers
    that no model computed.

    Args:
        frame: The Python frame of the call.
    """
    while _STAGE in sys.modules and frame is not None:
        if frame.f_code.co_name == "_prepare_forward_infra" and frame.f_globals.get("__name__") == _STAGE:
            return True
        frame = frame.f_back
    return False


_perhaps_one = {0: "perhaps one"}
global_hooks: tuple[dict[int, Any], ...] = (
    _private("torch.nn.modules.module._global_forward_pre_hooks", _perhaps_one),
    _private("torch.nn.modules.module._global_forward_hooks", _perhaps_one),
)
"""The hooks for the calls of all modules. If they cannot be read, there may be one."""

_WITH_KEYWORDS: dict[int, bool] = _private("torch.nn.modules.module._global_forward_hooks_with_kwargs", {})


def remove_global_hook(handle: RemovableHandle) -> None:
    """Remove a hook on all modules, and the entry which says that it takes keyword arguments.

    torch keeps the entry when a handle is removed, and then warns at each model that is compiled.
    """
    handle.remove()
    _WITH_KEYWORDS.pop(handle.id, None)


BatchNorm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""The batch norms."""

BatchOrInstanceNorm = (*BatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
"""The layers with running statistics."""

Dropout = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
"""The layers of dropout."""

COMPILED_CHILD = "_orig_mod"
"""Name of the child that is the compiled module, in what `torch.compile` returns."""


def compiled(module: nn.Module) -> nn.Module | None:
    """Return the module that was passed to `torch.compile`, given the result, or `None` for other modules."""
    return _child(module, "torch._dynamo.eval_frame.OptimizedModule", COMPILED_CHILD)


def checkpointed(module: nn.Module) -> nn.Module | None:
    """Return the module in a wrapper for activation checkpointing, or `None` if it is not such a wrapper."""
    return _child(module, "checkpoint_wrapper.CheckpointWrapper", "_checkpoint_wrapped_module")


def _child(module: nn.Module, kind: str, name: str) -> nn.Module | None:
    """Return a child of a wrapper, known by the name of its class, because to import the class would take seconds."""
    if not f"{type(module).__module__}.{type(module).__qualname__}".endswith(kind):
        return None
    if name not in module._modules:
        _refuse(f"{kind}.{name}", "the module that it wraps cannot be found")
    return module._modules[name]


def shards(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield this rank's part of each parameter that `fully_shard` manages at a module, with its owner and name.

    While a module computes, the whole parameter stands in the place of the shard. In the root it also does so between
    forward and backward. So the shard has to be asked for here.
    """
    state = getattr(module, "_get_fsdp_state", None)
    if state is None:
        _refuse("torch.distributed.fsdp.FSDPModule._get_fsdp_state", "a model under FSDP2 cannot be watched")
    found = state()
    groups = getattr(found, "_fsdp_param_groups", None)  # before torch 2.11 a module has one group
    for group in [found._fsdp_param_group] if groups is None else groups:
        for one in () if group is None else group.fsdp_params:
            info = one._module_info
            yield info.module, info.param_name, one.sharded_param
            for owner, name in zip(info.shared_modules, info.shared_param_names, strict=True):
                yield owner, name, one.sharded_param


def waited(tensor: Tensor) -> Tensor | None:
    """Wait for the result of a collective that may still run, and return it. `None` for other tensors."""
    if type(tensor).__name__ != "AsyncCollectiveTensor":  # importing the class would take a second
        return None
    return cast(Tensor, cast(Any, tensor).trigger_wait())


def spec_of_local(tensor: Tensor) -> Any:
    """Return the spec of the DTensor whose local tensor this is, or `None`. The spec has the placements.

    The node of ``DTensor.to_local`` in the graph has it. It is not known without gradients, or if the node of another
    torch has a different attribute.
    """
    return None if tensor.grad_fn is None else getattr(tensor.grad_fn, "dtensor_spec", None)


default_store: Callable[[], Any] = _private(
    "torch.distributed.distributed_c10d._get_default_store", cannot="records of several ranks cannot be exchanged"
)
"""Return the store of the default process group, by which its ranks found each other."""

compiled_call: Callable[[nn.Module], object] = _attribute("torch.nn.Module._compiled_call_impl", lambda module: None)
"""Return the compiled call that `module.compile()` set, or `None` if there is none."""


_HOOKS_OF_MODULE = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
_HOOKS_OF_PARAMETER = {
    "_backward_hooks": "hook",
    "_post_accumulate_grad_hooks": "hook after accumulation",
}


def hooks_on(module: nn.Module) -> Iterator[tuple[str, int, Any]]:
    """Yield (kind, key, hook) for each hook on a module and its own parameters."""
    owners: list[tuple[object, dict[str, str], str]] = [(module, _HOOKS_OF_MODULE, "")]
    owners += [(p, _HOOKS_OF_PARAMETER, f" on {name}") for name, p in module.named_parameters(recurse=False)]
    for owner, kinds, where in owners:
        for attribute, kind in kinds.items():
            if not hasattr(owner, attribute):
                _refuse(f"{type(owner).__name__}.{attribute}", f"it is not known whether a {kind} is left")
            for key, hook in (getattr(owner, attribute) or {}).items():
                yield kind + where, key, hook


def hook_tables(module: nn.Module) -> list[dict[int, Any]]:
    """Return the dicts in which a module keeps its hooks and their options."""
    return [table for name, table in vars(module).items() if "hook" in name and isinstance(table, dict)]


def left_out(module: nn.Module) -> Collection[str] | None:
    """Return the names of a module's own buffers that its ``state_dict`` leaves out, or `None` if they are unknown."""
    return cast(Collection[str] | None, vars(module).get("_non_persistent_buffers_set"))


def next_hook() -> int | None:
    """Return the number of the next hook that is registered anywhere, or `None` if that cannot be known."""
    return getattr(RemovableHandle(OrderedDict()), "id", None)


def converted(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Apply a function to each parameter, buffer and gradient of a module, and store the results in them."""
    for tensor in (*nn.Module.parameters(module), *nn.Module.buffers(module)):
        gradient, tensor.grad = tensor.grad, None  # torch refuses data whose dtype is not that of the gradient
        tensor.data = function(tensor.data)
        tensor.grad = None if gradient is None else function(gradient)


# --- operations, modes and settings -----------------------------------------------------------------------------------


class _NoDispatchMode:
    """Stands in for `TorchDispatchMode` if it is missing. Classes can derive from it, but none can be made."""

    def __init__(self) -> None:
        _refuse(
            "torch.utils._python_dispatch.TorchDispatchMode",
            "build() cannot tell which draw fills which weight, architecture() takes no inputs, nothing is computed in "
            "a wider dtype, and profile=True is not possible",
        )


class DispatchMode(_private("torch.utils._python_dispatch.TorchDispatchMode", _NoDispatchMode)):  # type: ignore[misc]
    """Base class of dispatch modes."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first call imports torch._dynamo, which takes over a second


FakeTensorMode: Any = _private("torch._subclasses.fake_tensor.FakeTensorMode", cannot="architecture() takes no inputs")
"""The dispatch mode whose tensors have shapes and no elements."""

Operation: Any = type(torch.ops.aten.add.Tensor)
"""Class of the operations that a dispatch mode receives."""

schema: Callable[[Any], Any] = _attribute(
    "torch.ops.aten.add.Tensor._schema", cannot="build() and gradcheck cannot tell what an operation writes"
)
"""Return the schema of an operation. It has the name of each argument, and whether it is written to."""

TRUNC_NORMAL: str = _private("torch.nn.init._no_grad_trunc_normal_", nn.init.trunc_normal_).__name__
"""Name in `torch.nn.init` of the function that is called for all draws from a truncated normal distribution."""


_DYNAMO = "torch._dynamo.eval_frame"

_Function = TypeVar("_Function", bound=Callable[..., Any])

CompiledCall = Callable[[Any, tuple[Any, ...], dict[str, Any]], bool]


class CompiledCalls:
    """Asks at each call of a compiled callable whether it is to run eagerly.

    It takes the place of the function by which ``torch.compiler.set_stance`` works. The stance itself is one for the
    whole process, and does not ask which callable it is for. `torch._dynamo` is not imported for it, because that takes
    seconds. If somebody imports it later, the function is replaced then. If there is no such function, compiled code
    stays compiled.

    Args:
        is_eager: Takes the callable and its arguments, and returns whether it is to run eagerly.
    """

    def __init__(self, is_eager: CompiledCall) -> None:
        self._is_eager = is_eager
        self._original: Callable[[Any], Any] | None = None

    def intercept(self) -> None:
        """Begin to ask. Safe to repeat."""
        if _DYNAMO in sys.modules:
            self._take_hold(sys.modules[_DYNAMO])
        elif self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def release(self) -> None:
        """Stop asking. Safe to repeat."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        if self._original is not None:
            cast(Any, sys.modules[_DYNAMO])._callback_from_stance, self._original = self._original, None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Replace the function as soon as its module has been imported, see `importlib.abc.MetaPathFinder`."""
        if name != _DYNAMO:
            return None
        sys.meta_path.remove(self)  # first, or the search for the spec would come here again
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._take_hold(module)

        spec.loader.exec_module = exec_module
        return spec

    def _take_hold(self, module: Any) -> None:
        if self._original is None:
            self._original = getattr(module, "_callback_from_stance", None)
            if self._original is not None:
                module._callback_from_stance = self._callback

    def _callback(self, callback: Any) -> Any:
        frame = sys._getframe(1)
        call, original = frame.f_locals, self._original
        if original is None:
            return callback
        # The function is also called by contexts that switch compilation off, and by contexts without a function.
        asks = callback not in (None, False) and {"fn", "args", "kwargs"} <= set(call)
        if not asks or not self._is_eager(call["fn"], call["args"], call["kwargs"]):
            return original(callback)
        # With `fullgraph=True` torch counts the compiled frames and takes none for an error.
        if call.get("fullgraph_count_enabled"):
            cast(Any, sys.modules[_DYNAMO]).set_fullgraph_compiled_frame_count(-1)
        return None


not_compiled: Callable[[_Function], _Function] = _private("torch._disable_dynamo", torch.compiler.disable)
"""Return a function that compiled code calls as it is. `torch.compiler.disable` imports `torch._dynamo` for it."""


COMPILATION_LOGGERS = ("torch._dynamo", "torch.__trace")


def compilation_notes() -> tuple[list[Any], dict[Any, list[str]]]:
    """Return what torch keeps of its compilations since `torch.compiler.reset`.

    These are the graph breaks, each with a ``reason`` and a ``user_stack``, and by code the guards that failed, because
    of which it was compiled again. `torch._dynamo` is imported here, because that takes seconds.
    """
    utils, found = importlib.import_module("torch._dynamo.utils"), list[Any]()
    for name in ("graph_break_reasons", "guard_failures"):
        if not hasattr(utils, name):
            _refuse(f"torch._dynamo.utils.{name}", "graph breaks and compilations cannot be told")
        found.append(getattr(utils, name))
    return found[0], found[1]


FLASH_ATTENTION_ON_CPU: Any = _private("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu")
"""The fused attention on the CPU, which `torch.utils.flop_counter` does not count, or `None` if there is none."""


def run_composite(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation by its kernel in C++ that is made of others; return `NotImplemented` if it has none.

    `OpOverload.decompose` prefers a kernel in Python if there is one. That of an LSTM rounds differently, so that a
    model in training would return other numbers while it is profiled.
    """
    if _has_kernel(func.name(), _COMPOSITE):
        return func._op_dk(_COMPOSITE, *args, **kwargs)
    return func.decompose(*args, **kwargs)


_cuda_seeds: Any = _private("torch.cuda._lazy_seed_tracker")


def seed_cuda(seed: int) -> None:
    """Seed all CUDA devices as `torch.cuda.manual_seed_all` does. If CUDA is not in use yet, the seed waits for it.

    For a seed that waits, torch formats the stack of that moment, which takes half a millisecond.
    """
    if torch.cuda.is_initialized() or not hasattr(_cuda_seeds, "queue_seed_all"):
        torch.cuda.manual_seed_all(seed)
    else:
        _cuda_seeds.queue_seed_all(functools.partial(_seed_cuda_now, seed), ["a seed of pytest-modelprobe\n"])


def _seed_cuda_now(seed: int) -> None:
    for generator in torch.cuda.default_generators:
        generator.manual_seed(seed)


GROUPED_PRODUCT = "aten::_grouped_mm"
"""Name of the operation behind `torch.nn.functional.grouped_mm`. If a torch calls it differently, nothing matches."""


_parallel_info = _private("torch.__config__.parallel_info", str)


def openmp_team() -> int:
    """Return the address of ``GOMP_parallel`` in the OpenMP library that computes for torch; 0 if there is none.

    After an operation its threads go on spinning for a while, so that other threads would share their cores with them.
    They are the ones that can read a tensor at once. libgomp, libomp and libiomp5 have the function by this name.
    """
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if sys.platform != "linux" or not path.is_file() or "parallel backend: OpenMP" not in _parallel_info():
        return 0
    try:
        # It is loaded already. The name is looked up in the library and in those that it depends on.
        library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0
