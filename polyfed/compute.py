"""The machine and how it computes: threads, precision, captured graphs, freed memory."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from threading import RLock
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

MESSAGE_SHARE = 8
"""One of so many parts of a GPU's memory may be filled by the clients' messages of a round."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""What glibc's malloc.h calls M_TRIM_THRESHOLD and M_MMAP_THRESHOLD."""
_LARGEST_PIECE = 32 * 2**20
"""As far as glibc lets M_MMAP_THRESHOLD grow by itself on 64-bit systems."""
SMALL_TRANSFER = 1 << 18
"""Numbers in a tensor up to which copying it next to others costs less than another transfer."""
CPU = torch.device("cpu")
_GRAPHS: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
"""Captured graphs that may still be replayed."""
_CAPTURE = RLock()
"""Of whoever captures: PyTorch allows one capture at a time in a process, and runs that train together have threads."""


@contextmanager
def compute_threads(number: int) -> Iterator[None]:
    """Inside, every operation uses this many threads; with 1, only the thread it was called from."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def beside(device: torch.device) -> AbstractContextManager[None]:
    """Inside, what is left for the CPU uses one thread if a GPU does the work, and is as it was otherwise.

    Such operations are too small for several threads. These wait for each other without sleeping, and where processes
    share a machine that takes many times as long as the operations themselves.
    """
    return compute_threads(1) if device.type == "cuda" else nullcontext()


def physical_memory() -> int:
    """Bytes of memory that the machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def reuse_memory() -> None:
    """Let the C library (glibc) keep freed memory for the next step, until `return_memory`.

    By default it gives large pieces back at once, in worker threads all the more, and the system clears every page of
    the next step's gradients and activations again. What the user has set in the environment stays.
    """
    if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(name.startswith("MALLOC_") for name in os.environ):
        return
    with suppress(AttributeError, OSError, TypeError):  # other C libraries
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, _LARGEST_PIECE)
        mallopt(_TRIM_THRESHOLD, 4 * _LARGEST_PIECE)


def return_memory() -> None:
    """Give freed memory back to the system, where the C library (glibc) would keep it for reuse."""
    with suppress(AttributeError, OSError, TypeError):  # other C libraries
        ctypes.CDLL(None).malloc_trim(0)


def free_gpu_memory() -> None:
    """Give back the GPU's memory that is only kept for reuse.

    cuBLAS keeps a workspace for every stream that it has worked on (32 MB on an H200), and PyTorch has 32 of these
    streams to give away in turn, so engines that come one after another could leave a gigabyte behind. A captured graph
    uses the workspaces of its stream, so they stay as long as there is a graph.
    """
    gc.collect()
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None and not _GRAPHS:
        clear()
    torch.cuda.empty_cache()


@cache
def message_budget(device: torch.device) -> int | None:
    """Bytes of a device's own memory that the messages of a round may fill; None: no limit but the machine's."""
    return torch.cuda.mem_get_info(device)[1] // MESSAGE_SHARE if device.type == "cuda" else None


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device, without waiting for what is queued there.

    Where several processes share a GPU, every wait lasts until the others have had their turns. A GPU's driver has
    read ordinary memory when this returns, so the tensor may change then; pinned memory must not.
    """
    if tensor.device == device:
        return tensor
    return tensor.to(device, non_blocking=tensor.device.type == "cpu")


def all_to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors on the device, one that comes several times once; none may be changed there.

    On a GPU, small ones of one type come in one transfer and share memory there.
    """
    distinct = list({id(tensor): tensor for tensor in tensors}.values())
    small: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(distinct):
        if device.type != "cpu" and tensor.device.type == "cpu" and tensor.numel() <= SMALL_TRANSFER:
            small.setdefault(tensor.dtype, []).append(place)
    found: dict[int, Tensor] = {}
    for places in small.values():
        found |= zip(places, _packed([distinct[place] for place in places], device), strict=True)
    moved = {
        id(tensor): found[place] if place in found else to_device(tensor, device)
        for place, tensor in enumerate(distinct)
    }
    return [moved[id(tensor)] for tensor in tensors]


def _packed(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of one type on the device, by one transfer."""
    parts = to_device(torch.cat([each.flatten() for each in tensors]), device).split([t.numel() for t in tensors])
    return [part.view(each.shape) for part, each in zip(parts, tensors, strict=True)]


def all_copied_to_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """A copy of each tensor on the CPU, with memory of its own; small ones come from a GPU in one transfer.

    Every transfer from a GPU waits for it.
    """
    small: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(tensors):
        if tensor.device.type != "cpu" and tensor.numel() <= SMALL_TRANSFER:
            small.setdefault((tensor.device, tensor.dtype), []).append(place)
    found: dict[int, Tensor] = {}
    for places in small.values():
        for place, part in zip(places, _packed([tensors[place].detach() for place in places], CPU), strict=True):
            found[place] = part.clone()
    return [found[i] if i in found else each.detach().to(CPU, copy=True) for i, each in enumerate(tensors)]


def out_of_memory(error: BaseException) -> bool:
    """Whether this error says that memory is short; PyTorch has no type of its own for that on a CPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def set_precision(device: torch.device, *, tf32: bool) -> None:
    """How precisely a GPU multiplies 32-bit floats; and let it find its fastest convolutions."""
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # streams and graphs belong to the current device
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32
        torch.backends.cudnn.benchmark = True


@contextmanager
def without_search() -> Iterator[None]:
    """Inside, cuDNN does not search for its fastest convolutions: for a step that is made once this takes longer."""
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def precision(device: torch.device, *, bf16: bool) -> AbstractContextManager[object]:
    """Inside, layers multiply in bfloat16 if asked to; losses, weights and updates stay in 32 bits."""
    if not bf16:
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)  # a captured step can't use a cache


@contextmanager
def capturing(
    graph: torch.cuda.CUDAGraph, *, stream: torch.cuda.Stream | None = None, pool: Any = None, small: bool = False
) -> Iterator[None]:
    """Inside, work on the GPU is recorded in the graph instead of being done.

    `small`: the graph, on a stream of the caller's, needs little memory. PyTorch waits for the GPU before it captures,
    and gives back all memory that it keeps for reuse, which then has to be asked for again: milliseconds each. A large
    graph needs that memory, and nothing else of what PyTorch does there matters to a capture.
    """
    with _CAPTURE:
        _GRAPHS.add(graph)
        collects = gc.isenabled()
        gc.disable()  # it could find an old graph to destroy, which a capture does not survive
        try:
            with torch.cuda.stream(stream):
                torch.cuda.current_blas_handle()  # each thread has its own, which can't be made in a capture
            with _recorded(graph, stream, pool) if small else _with_room(graph, stream, pool):
                yield
        finally:
            if collects:
                gc.enable()


_MODE = "thread_local"
"""Other threads may use the GPU while one captures."""


def _with_room(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream | None, pool: Any
) -> AbstractContextManager[None]:
    """A capture that has all of the GPU's memory that is not in use."""
    captured: AbstractContextManager[None] = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=_MODE)
    return captured


@contextmanager
def _recorded(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream | None, pool: Any) -> Iterator[None]:
    """A capture alone, which waits for nothing and frees nothing."""
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode=_MODE)
        try:
            yield
        finally:
            graph.capture_end()


def finish_gpu_work() -> None:
    """Wait for all work on the GPU: a graph that still runs must not be freed.

    Not while another thread captures, which a GPU refuses.
    """
    if torch.cuda.is_available():
        with _CAPTURE:
            torch.cuda.synchronize()


def gpu_has_failed(device: str) -> bool:
    """Whether this process can't use its GPU any more: after some faults all that it does there fails."""
    if device == "cpu" or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize(None if device == "auto" else device)
    except RuntimeError:
        return True
    return False


def first_cause(error: RuntimeError) -> BaseException:
    """What went wrong first in a capture; leaving a failed one raises another error. Too little memory before all."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, torch.OutOfMemoryError):
        first, cause = cause, cause.__cause__ or cause.__context__
    return cause or first


@cache
def working_kernels(name: str, trial: Callable[[Any, str], object]) -> tuple[Any, str | None]:
    """The module with these kernels, or None and the reason, after a trial with the module on a device.

    Triton, which compiles them, may be missing, or something that it needs (a C compiler, a known GPU).
    """
    try:
        module = import_module(name)
        trial(module, "cuda" if torch.cuda.is_available() else "cpu")
    except Exception as error:  # whatever it is, PyTorch's own kernels still work
        return None, " ".join(str(error).split())[:200]
    return module, None


def machine_name(device: torch.device) -> str:
    """The name of the GPU, or of the processor with its number of cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} cores of {names[0] if names else platform.processor()}"


def available_cores() -> int:
    """Cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
