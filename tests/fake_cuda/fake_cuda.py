"""Two CUDA devices on a machine that has none: import it, or load it as a plugin of pytest with ``-p fake_cuda``.

    PYTHONPATH=tests/fake_cuda python -c "import fake_cuda, torch; print(torch.ones(2, device='cuda:1') + 1)"

Tensors on them have ``is_cuda``, and every branch for CUDA runs as it is. The CPU computes (device.cpp), but

- it cannot read the memory of the device: whoever tries ends with a segmentation fault,
- memory in which nothing was written is NaN,
- a copy with ``non_blocking`` into pinned memory arrives when somebody waits for the stream, the event or the device;
  who reads it before reads NaN,
- `waits` lists each wait with the line that caused it, and `torch.cuda.set_sync_debug_mode` works,
- `out_of_memory` makes an allocation fail.

It cannot judge speed, rounding, errors of cuBLAS and cuDNN, sparse tensors, or kernels that the CPU lacks.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import cuda

HERE = Path(__file__).parent
COUNT = 2


def _library() -> ctypes.CDLL:
    """Compile device.cpp, unless it has been for this torch, and load it."""
    source = HERE / "device.cpp"
    name = hashlib.sha256(source.read_bytes() + torch.__version__.encode() + sys.prefix.encode()).hexdigest()[:16]
    made = Path(os.environ.get("FAKE_CUDA_BUILD", HERE / "build")) / f"{name}.so"
    if not made.exists():
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None:
            raise RuntimeError(f"the fake CUDA device needs a C++ compiler, and there is no {compiler}")
        made.parent.mkdir(parents=True, exist_ok=True)
        for old in made.parent.glob("*.so"):
            old.unlink()
        home = Path(torch.__file__).parent
        new = made.with_suffix(f".{os.getpid()}")
        command = [compiler, "-O1", "-std=c++20", "-w", "-shared", "-fPIC", str(source), "-o", str(new)]
        command += [f"-I{home}/include", f"-I{home}/include/torch/csrc/api/include", f"-L{home}/lib"]
        subprocess.run([*command, f"-Wl,-rpath,{home}/lib", "-ltorch_cpu", "-lc10"], check=True)
        new.replace(made)
    return ctypes.CDLL(str(made))


# --- what there is to ask -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def waits() -> Iterator[list[str]]:
    """Return a list, to which each wait in the block is added: what waited, and for which lines of the package."""
    found: list[str] = []
    _listeners.append(found)
    try:
        yield found
    finally:
        _listeners.remove(found)


@contextlib.contextmanager
def out_of_memory(after: int = 0) -> Iterator[None]:
    """Let an allocation in the block fail, after so many that succeed."""
    _fake.fake_fail_after(after)
    try:
        yield
    finally:
        _fake.fake_fail_after(-1)


def launches() -> int:
    """Return how many operations the devices have computed."""
    return int(_fake.fake_launches())


_listeners: list[list[str]] = []


@ctypes.CFUNCTYPE(None, ctypes.c_char_p)
def _on_wait(what: bytes) -> None:
    if not _listeners:
        return
    frame, mine, last = sys._getframe(1), [], ""
    while frame is not None:
        file, line = frame.f_code.co_filename, frame.f_lineno
        if "pytest_modelprobe" in file:
            mine.append(f"{file.rpartition('pytest_modelprobe/')[2]}:{line}")
        elif "/torch/" not in file and file != __file__ and not last:
            last = f"{Path(file).name}:{line}"
        frame = frame.f_back  # type: ignore[assignment]
    for found in _listeners:
        found.append(f"{what.decode()}: {' < '.join(mine[:5]) or last}")


# --- pytest -------------------------------------------------------------------------------------------------------


def pytest_ignore_collect(collection_path: Path, config: Any) -> bool | None:
    """Leave aside the files without a test for CUDA, if no other is asked for: importing them takes longest."""
    if config.option.markexpr != "cuda" or not collection_path.name.startswith("test_"):
        return None
    return "mark.cuda" not in collection_path.read_text("utf-8") or None


# --- torch.cuda ---------------------------------------------------------------------------------------------------


class Stream(torch.Stream):
    """`torch.cuda.Stream`."""

    def __new__(cls, device: Any = None, priority: int = 0, **known: Any) -> Stream:
        if known:
            return super().__new__(cls, **known)  # type: ignore[call-arg]
        return super().__new__(cls, device=f"cuda:{_index(device)}", priority=priority)  # type: ignore[call-arg]

    @property
    def cuda_stream(self) -> int:
        """The number of the stream, in place of its address."""
        return self.stream_id


class Event(torch.Event):
    """`torch.cuda.Event`."""

    def __new__(cls, enable_timing: bool = False, **_: Any) -> Event:
        return super().__new__(cls, "cuda", enable_timing=enable_timing)  # type: ignore[call-arg]

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._is_timed = enable_timing

    def elapsed_time(self, end: Any) -> float:
        """Return the milliseconds until another event. Torch's own knows no classes that inherit from its event."""
        if not (self._is_timed and self.event_id and end.event_id and self.device == end.device):
            raise RuntimeError("events have a time if both were made with enable_timing and recorded on one device")
        return float(_fake.fake_elapsed(self.event_id, end.event_id))


class CUDAGraph:
    """`torch.cuda.CUDAGraph`: what is captured is computed at once, and again by `replay`."""

    def capture_begin(self, *_: object, **__: object) -> None:
        """Remember what is computed from now on, and refuse to wait."""
        self._index = _fake.fake_capture(1)

    def capture_end(self) -> None:
        """End it."""
        _fake.fake_capture(0)

    def replay(self) -> None:
        """Compute it again, into the same tensors."""
        if error := _fake.fake_replay(self._index):
            raise RuntimeError(error.decode())

    def reset(self) -> None:
        """Forget it."""
        _fake.fake_forget(self._index)


@contextlib.contextmanager
def graph(of: CUDAGraph, pool: object = None, stream: Any = None, **_: object) -> Iterator[None]:
    """Capture on a stream of its own."""
    cuda.synchronize()
    with cuda.stream(stream or Stream()):
        of.capture_begin()
        try:
            yield
        finally:
            of.capture_end()


def _index(device: Any = None) -> int:
    index = device if isinstance(device, int) else None if device is None else torch.device(device).index
    return _exchange(-1) if index is None else index


def _exchange(device: int) -> int:
    if device >= COUNT:
        raise RuntimeError("CUDA error: invalid device ordinal")
    return int(_fake.fake_exchange(device))


def _init() -> None:
    global _process
    _process = os.getpid()


def _set_stream(stream_id: int, device_index: int, device_type: int) -> None:
    _exchange(device_index)
    _fake.fake_stream(device_index, stream_id)


def _set_mode(mode: int) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations",
            stacklevel=3,
        )
    _fake.fake_mode(mode)


def _memory(device: int) -> dict[str, Any]:
    now = {"all": {"current": _fake.fake_memory(device, 0), "peak": _fake.fake_memory(device, 1)}}
    return dict.fromkeys(("allocated_bytes", "reserved_bytes", "requested_bytes"), now)


def _properties(device: int) -> Any:
    return types.SimpleNamespace(
        name="a fake CUDA device", major=9, minor=0, total_memory=8 << 30, multi_processor_count=2, warp_size=32
    )


def _new_storage(cls: Any, *args: Any, device: Any = None, **options: Any) -> Any:
    if device is None or torch.device(device).type != "cuda":
        return _storage_new(cls, *args, **({"device": device} if device is not None else {}), **options)
    return torch.empty(args[0] if args else 0, dtype=torch.uint8, device=device).untyped_storage()


_process, _warned = 0, False
_storage_new = torch.UntypedStorage.__new__


def _install() -> None:
    """Replace what `torch.cuda` asks of the driver. Its own functions stay."""
    if _fake.fake_install():
        raise RuntimeError("the fake CUDA device needs 128 GiB of addresses, of which it uses few")
    _fake.fake_on_wait(_on_wait)
    native = {
        "exchangeDevice": _exchange,
        "maybeExchangeDevice": _exchange,
        "setDevice": _exchange,
        "getDevice": _index,
        "getDeviceCount": lambda: COUNT,
        "hasPrimaryContext": lambda device: True,
        "init": _init,
        "isInBadFork": lambda: _process not in (0, os.getpid()),
        "getArchFlags": lambda: "sm_90",
        "canDeviceAccessPeer": lambda a, b: True,
        "getCurrentStream": lambda device: (_fake.fake_stream(device, -1), device, 1),
        "getDefaultStream": lambda device: (0, device, 1),
        "getCurrentRawStream": lambda device: _fake.fake_stream(device, -1),
        "setStream": _set_stream,
        "isCurrentStreamCapturing": lambda: bool(_fake.fake_capturing()),
        "synchronize": lambda: torch.accelerator.synchronize(_index()),
        "set_sync_debug_mode": _set_mode,
        "get_sync_debug_mode": lambda: _fake.fake_mode(-1),
        "memoryStats": _memory,
        "resetPeakMemoryStats": lambda device: _fake.fake_reset_peak(device),  # torch._dynamo needs what can be hashed
        "emptyCache": lambda *_: None,
        "ipc_collect": lambda: None,
    }
    for name, function in native.items():
        setattr(torch._C, f"_cuda_{name}", function)
    cuda._exchange_device = cuda._maybe_exchange_device = _exchange
    cuda._is_in_bad_fork = native["isInBadFork"]
    cuda.graphs._cuda_isCurrentStreamCapturing = native["isCurrentStreamCapturing"]
    cuda._get_device_properties = _properties
    cuda._cudart = cuda._cudart or types.SimpleNamespace(cudaMemGetInfo=lambda device: (8 << 30, 8 << 30))
    for module in (cuda, cuda.streams, cuda.graphs):
        for replacement in (Stream, Event, CUDAGraph, graph):
            if hasattr(module, replacement.__name__):
                setattr(module, replacement.__name__, replacement)
    torch.backends.cudnn.is_acceptable = lambda tensor: False
    torch._C._has_cuda = True
    torch.version.cuda = torch.version.cuda or "13.0"
    torch.UntypedStorage.__new__ = _new_storage
    cuda.default_generators = tuple(torch.Generator(f"cuda:{index}") for index in range(COUNT))


if cuda.is_available():
    raise RuntimeError("there is a CUDA device here: the fake one would replace it")
_fake = _library()
for _returns_long in ("launches", "memory", "stream"):
    getattr(_fake, f"fake_{_returns_long}").restype = ctypes.c_long
_fake.fake_stream.argtypes = [ctypes.c_int, ctypes.c_long]
_fake.fake_elapsed.argtypes, _fake.fake_elapsed.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_double
_fake.fake_replay.restype = ctypes.c_char_p
_fake.fake_fail_after.argtypes = [ctypes.c_long]
_install()
