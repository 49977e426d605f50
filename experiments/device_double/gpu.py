"""Double of the GPUs of a process: tensors, streams, events, graphs, memory and faults."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from outrider.experiments.device_double.attention import attend_slots
from outrider.experiments.device_double.guard import load_guard

GIB = 1 << 30
# Operations whose result the host needs before it can go on.
_WAITING = {
    "item", "_local_scalar_dense", "nonzero", "nonzero_numpy", "argwhere", "equal", "is_nonzero", "allclose", "masked_select",
    "unique", "_unique", "_unique2", "unique_dim", "unique_consecutive", "tolist",
}  # fmt: skip
_CASTS = {"to", "_to_copy", "cpu", "cuda", "type_as"}
_UNWRITTEN = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}  # memory without a launch
_VIEWS = {
    "select", "slice", "view", "transpose", "t", "unsqueeze", "squeeze", "expand", "permute", "detach", "alias", "as_strided",
    "unbind", "split", "narrow", "unflatten", "movedim",
}  # fmt: skip
_CAPTURING = "operation not permitted when stream is capturing"


class DoubleError(AssertionError):
    """The program does what shows as wrong numbers, or as a crash, on a GPU."""


class DoubleTensor(torch.Tensor):
    """A tensor that says ``cuda:N``; ``numbers`` is the same tensor on the CPU."""

    numbers: torch.Tensor
    gpu: DoubleGpu
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, index: int, gpu: DoubleGpu) -> DoubleTensor:
        """Return the double of a tensor on a GPU."""
        with torch.inference_mode(False):  # a view of a tensor from outside of inference mode must not be one of inside
            made: DoubleTensor = torch.Tensor._make_wrapper_subclass(
                cls, numbers.size(), strides=numbers.stride(), storage_offset=numbers.storage_offset(), dtype=numbers.dtype,
                device=torch.device("cuda", index),
            )  # fmt: skip
        made.numbers, made.gpu = numbers, gpu
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Show no numbers: a print would wait for them."""
        return f"DoubleTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    def tolist(self) -> Any:
        """Copy to the host, as torch does; it refuses classes of their own."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an operation outside of ``Accelerator.current``."""
        gpu = next(each.gpu for each in tree_flatten((args, kwargs))[0] if isinstance(each, DoubleTensor))
        return gpu.run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    """Sees the operations of one thread, those that make tensors included."""

    def __init__(self, gpu: DoubleGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._gpu.run(func, args, kwargs or {})


class _Factories(TorchFunctionMode):
    """Mode in which ``torch.tensor`` copies from the host: no dispatch mode sees the tensors that it makes on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device") if func is torch.tensor else None
        if device is None or torch.device(device).type != "cuda":
            return func(*args, **kwargs)
        return func(*args, **{**kwargs, "device": "cpu"}).to(device)


class DoubleStream:
    """A queue of work. ``seen`` says up to where work of other streams is done before later work of this one."""

    def __init__(self, gpu: DoubleGpu, index: int) -> None:
        self.gpu, self.index, self.done, self.seen = gpu, index, 0, dict[DoubleStream, int]()

    def wait_stream(self, stream: DoubleStream) -> None:
        """See ``engine.accelerator.Stream``."""
        self.seen |= stream.seen | {stream: stream.done}

    def record_event(self) -> DoubleEvent:
        """See ``engine.accelerator.Stream``."""
        return DoubleEvent(self, self.gpu.recorded(self.index))


@dataclass(frozen=True, slots=True)
class DoubleEvent:
    """A point in the work of a stream: ``place`` copies and replays of its device come before it."""

    stream: DoubleStream
    place: int

    def synchronize(self) -> None:
        """See ``engine.accelerator.Event``."""
        self.stream.gpu.wait(self.stream.index, self.place)


@dataclass(slots=True)
class _Recorded:
    """An operation of a graph: what it computes from which tensors, and where its results lie."""

    func: Any
    args: Any
    kwargs: Any
    outputs: list[torch.Tensor]
    writes: bool


class DoubleGraph:
    """A list of operations on tensors. A replay executes it on the same memory, without any Python of the model."""

    def __init__(self, gpu: DoubleGpu, index: int) -> None:
        self._gpu, self.index = gpu, index
        self.operations: list[_Recorded] = []

    def replay(self) -> None:
        """See ``engine.accelerator.Graph``."""
        self._gpu.queue(self.index, "replays", self._execute)

    def _execute(self) -> None:
        for each in self.operations:
            found = each.func(*each.args, **each.kwargs)
            if each.writes:
                continue
            for kept, new in zip(each.outputs, (one for one in tree_flatten(found)[0] if torch.is_tensor(one)), strict=True):
                kept.copy_(new)


@dataclass(slots=True)
class _Gpu:
    """State of one GPU."""

    default: DoubleStream
    queue: list[Callable[[], None]] = field(default_factory=list)  # copies from pinned memory, and replays, not yet done
    flushed: int = 0  # copies and replays that are done


class _Thread(threading.local):
    """State that CUDA keeps for each thread."""

    def __init__(self) -> None:
        self.index = 0
        self.active = 0  # blocks of ``current`` that this thread is in
        self.streams: dict[int, DoubleStream] = {}
        self.capture: DoubleGraph | None = None


class DoubleGpu:
    """``engine.accelerator.Accelerator`` over GPUs whose numbers lie in the memory of the CPU.

    It fails where a GPU would: an operation over two devices, one outside of ``current``, work on a stream that nobody waits for,
    a capture that waits for the host or copies from its pageable memory. A copy from pinned memory, and a replay behind it, take
    place as late as the program allows, so that a buffer that is filled again too early shows. ``counts`` has the launches,
    replays, copies (``to_device``, ``to_host``) and waits of the host since the start, and all of them as ``calls``.
    """

    def __init__(self, gpus: int = 2, capability: tuple[int, int] = (8, 0), memory_gib: float = 80.0) -> None:
        load_guard()
        self._gpus = [_Gpu(DoubleStream(self, index)) for index in range(gpus)]
        self._capability, self._total = capability, int(memory_gib * GIB)
        self._thread = _Thread()
        self._lock = threading.RLock()
        self._written: dict[int, tuple[DoubleStream, int]] = {}  # by storage: the stream and the work that wrote to it last
        self._pinned: set[int] = set()
        self.counts: Counter[str] = Counter()
        self.graphs: list[DoubleGraph] = []
        self._fault: tuple[int, Exception] | None = None  # calls until it happens
        self.broken: Exception | None = None  # of a GPU that was lost: every later call raises it

    # ---- Accelerator --------------------------------------------------------------------------------------------------------

    def unavailable(self) -> str | None:
        """See ``Accelerator``."""
        return None

    def device_count(self) -> int:
        """See ``Accelerator``."""
        return len(self._gpus)

    def name(self, device: torch.device) -> str:
        """See ``Accelerator``."""
        return "double of a GPU"

    def uuid(self, device: torch.device) -> str:
        """See ``Accelerator``."""
        return f"GPU-double-{_index(device)}"

    def capability(self, device: torch.device) -> tuple[int, int]:
        """See ``Accelerator``."""
        return self._capability

    def has_kernels(self, dtype: torch.dtype) -> bool:
        """See ``Accelerator``; attention is written out for float64, too."""
        return dtype.is_floating_point

    def memory(self, device: torch.device) -> tuple[int, int]:
        """See ``Accelerator``."""
        return self._total, self._total

    def reserved(self, device: torch.device) -> int:
        """See ``Accelerator``; allocations are not counted here, see ``MetaGpu``."""
        return 0

    def empty_cache(self) -> None:
        """See ``Accelerator``."""

    @contextlib.contextmanager
    def current(self, device: torch.device) -> Iterator[None]:
        """See ``Accelerator``."""
        if device.type != "cuda":
            yield
            return
        thread, index = self._thread, _index(device)
        if index >= len(self._gpus):
            raise torch.AcceleratorError("CUDA error: invalid device ordinal")
        before, thread.index = thread.index, index
        thread.active += 1
        try:
            with contextlib.ExitStack() as modes:
                if thread.active == 1:
                    modes.enter_context(_Factories())
                    modes.enter_context(_Mode(self))
                yield
        finally:
            thread.index = before
            thread.active -= 1

    def synchronize(self, device: torch.device) -> None:
        """See ``Accelerator``."""
        self._raise_broken()
        self.wait(_index(device))

    def new_stream(self, device: torch.device) -> DoubleStream:
        """See ``Accelerator``."""
        return DoubleStream(self, _index(device))

    def current_stream(self, device: torch.device) -> DoubleStream:
        """See ``Accelerator``."""
        return self._stream(_index(device))

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        """See ``Accelerator``."""
        streams = self._thread.streams
        before, streams[stream.index] = streams.get(stream.index), stream
        try:
            yield
        finally:
            if before is None:
                del streams[stream.index]
            else:
                streams[stream.index] = before

    def pinned(self, size: int) -> torch.Tensor:
        """See ``Accelerator``."""
        made = torch.zeros(size, dtype=torch.int32)
        self._pinned.add(made.untyped_storage().data_ptr())
        return made

    def graph_pool(self) -> Any:
        """See ``Accelerator``."""
        return object()

    def capture(self, device: torch.device, pool: Any, forward: Callable[[], torch.Tensor]) -> tuple[DoubleGraph, torch.Tensor]:
        """See ``Accelerator``. Nothing that the function writes to is changed: a capture does not compute."""
        thread, graph = self._thread, DoubleGraph(self, _index(device))
        assert thread.capture is None, "a capture is under way"
        own = self.new_stream(device)
        own.wait_stream(self.current_stream(device))
        thread.capture = graph
        try:
            with self.stream(own):
                output = forward()
        finally:
            thread.capture = None
            self.current_stream(device).wait_stream(own)
        if not graph.operations:
            raise DoubleError("the graph is empty: what was to be captured ran on another device")
        for each in graph.operations:  # what no replay has computed yet is no number
            for made in () if each.writes else each.outputs:
                made.fill_(float("nan") if made.dtype.is_floating_point else 0)
        self.graphs.append(graph)
        return graph, output

    # ---- for tests ----------------------------------------------------------------------------------------------------------

    def move(self, module: torch.nn.Module, device: torch.device) -> torch.nn.Module:
        """Move a module's weights and buffers to a GPU, in place."""
        with self.current(device):
            for part in module.modules():
                for name, weight in part._parameters.items():
                    if weight is not None:
                        part._parameters[name] = torch.nn.Parameter(weight.data.to(device), requires_grad=False)
                for name, buffer in part._buffers.items():
                    if buffer is not None:
                        part._buffers[name] = buffer.to(device)
        return module

    def fail_at(self, call: int, error: Exception) -> None:
        """Have the n-th launch, replay, copy or wait from now on, counted from 1, raise an error.

        After ``torch.AcceleratorError`` the GPU is lost, and so is every later call.
        """
        self._fault = call, error

    def counted(self, step: Callable[[], Any]) -> Counter[str]:
        """Return the counts of one call."""
        before = self.counts.copy()
        step()
        return self.counts - before

    # ---- below: operations --------------------------------------------------------------------------------------------------

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Execute an operation of torch that this double sees."""
        flat = tree_flatten((args, kwargs))[0]
        ours = [each for each in flat if isinstance(each, DoubleTensor)]
        target = next((_index(each) for each in flat if isinstance(each, torch.device) and each.type == "cuda"), None)
        if not ours and target is None:
            return func(*args, **kwargs)
        with self._lock:
            name = func.overloadpacket.__name__
            self._raise_broken()
            if name in _CASTS and self._moves(ours, args, kwargs):
                return self._cast(func, args, kwargs, target)
            if name == "copy_" and len(ours) != 2:
                return self._copy(args[0], args[1], bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking")))
            return self._compute(func, name, ours, args, kwargs, target)

    def _moves(self, ours: Sequence[DoubleTensor], args: Any, kwargs: Any) -> bool:
        """Return whether a cast changes the device."""
        wanted = next((each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.device)), None)
        others = [each for each in args if torch.is_tensor(each)][1:]  # to(other)
        wanted = others[0].device if wanted is None and others else wanted
        return wanted is not None and wanted != args[0].device

    def _cast(self, func: Any, args: Any, kwargs: Any, target: int | None) -> Any:
        source = args[0]
        if isinstance(source, DoubleTensor) and target is None:  # to the host
            self._read(source)
            return func(*_on_cpu(args), **_on_cpu(kwargs)).clone()
        assert target is not None, func
        if isinstance(source, DoubleTensor):
            raise DoubleError(f"a copy from {source.device} to cuda:{target}: nothing in an engine needs one")
        flags = [each for each in (*args[1:], *kwargs.values()) if each is True]
        pinned = source.untyped_storage().data_ptr() in self._pinned and bool(flags)
        numbers = func(*_on_cpu(args), **_on_cpu(kwargs))
        made = self._made(numbers.clone() if numbers is source else numbers, target)
        self._call("to_device")
        self._wrote(made)
        if not pinned:
            self._wait_here(target)
        return made

    def _copy(self, to: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        if not isinstance(to, DoubleTensor):  # to the host
            assert isinstance(source, DoubleTensor), source
            self._read(source)
            return to.copy_(source.numbers)
        if source.dim() == 0:  # a number, which travels with the launch
            self._launched((to,), (to,))
            to.numbers.copy_(source)
            return to
        index = _index(to.device)
        self._use(to)
        self._wrote(to)
        if source.untyped_storage().data_ptr() in self._pinned and non_blocking:
            self.queue(index, "to_device", lambda: to.numbers.copy_(source))
            return to
        self._call("to_device")
        self._wait_here(index)
        to.numbers.copy_(source)
        return to

    def _compute(self, func: Any, name: str, ours: Sequence[DoubleTensor], args: Any, kwargs: Any, target: int | None) -> Any:
        indices = {_index(each.device) for each in ours} | ({target} if target is not None else set())
        if len(indices) != 1:
            raise DoubleError(f"{func} over tensors of several devices: {sorted(map(str, indices))}")
        (index,) = indices
        if not (name.endswith("_like") or name.startswith("new_")):  # of those only the shape and the type are read
            self._check_mixed(name, args, kwargs, index)
        cpu_args, cpu_kwargs = _on_cpu(args), _on_cpu(kwargs)
        if name == "slot_attention" and (index != self._thread.index or not self._thread.active):
            raise DoubleError(f"a kernel over tensors of cuda:{index} while another device is current")
        waits = name in _WAITING or (name in ("index", "index_put_", "index_put") and _masked(args))
        if waits:
            self._wait_here(index)
        writes = [own for own, argument in zip(args, _schema(func, len(args)), strict=False) if argument and torch.is_tensor(own)]
        func = {"slot_attention": attend_slots, "histc": _histc}.get(name, func)
        capture = self._thread.capture
        if capture is not None and capture.index == index:
            return self._record(capture, func, ours, writes, cpu_args, cpu_kwargs, index)
        return self._execute(func, name, ours, writes, cpu_args, cpu_kwargs, index)

    def _execute(
        self, func: Any, name: str, ours: Sequence[DoubleTensor], writes: Sequence[Any], args: Any, kwargs: Any, index: int
    ) -> Any:
        if name not in _VIEWS and name not in _UNWRITTEN:
            self._flush(index)
        found = func(*args, **kwargs)
        new, wrapped = self._wrap(found, ours, index)
        if new or writes:
            if name not in _UNWRITTEN:
                self._launched(ours, (*writes, *new), 2 if name == "slot_attention" else 1)
            else:
                for each in new:
                    self._wrote(each)
        return wrapped

    def _record(
        self, graph: DoubleGraph, func: Any, ours: Sequence[DoubleTensor], writes: Sequence[Any], args: Any, kwargs: Any,
        index: int,
    ) -> Any:  # fmt: skip
        for each in ours:
            self._use(each)
        before = [(each.numbers, each.numbers.clone()) for each in writes if isinstance(each, DoubleTensor)]
        found = func(*args, **kwargs)
        for numbers, kept in before:
            numbers.copy_(kept)
        new, wrapped = self._wrap(found, ours, index)
        if new or writes:
            for each in (*writes, *new):
                self._wrote(each)
            graph.operations.append(_Recorded(func, args, kwargs, [each.numbers for each in new], bool(writes)))
        return wrapped

    def _wrap(self, found: Any, ours: Sequence[DoubleTensor], index: int) -> tuple[list[DoubleTensor], Any]:
        """Return the tensors with memory of their own among the results of an operation, and the results as doubles."""
        known = {id(each.numbers): each for each in ours}
        storages = {each.numbers.untyped_storage().data_ptr() for each in ours}
        new: list[DoubleTensor] = []

        def wrapped(numbers: torch.Tensor) -> DoubleTensor:
            if id(numbers) in known:
                return known[id(numbers)]
            made = self._made(numbers, index)
            if numbers.untyped_storage().data_ptr() not in storages or not numbers.numel():
                new.append(made)
            return made

        return new, tree_map_only(torch.Tensor, wrapped, found)

    def _check_mixed(self, name: str, args: Any, kwargs: Any, index: int) -> None:
        """Raise where a tensor of the host is an argument of a launch; a number, or indices that are copied first, may be."""
        for place, each in enumerate((*args, *kwargs.values())):
            for own in each if isinstance(each, list | tuple) else (each,):
                if not torch.is_tensor(own) or isinstance(own, DoubleTensor) or own.dim() == 0:
                    continue
                if name in ("index", "index_put_", "index_put") and place == 1:
                    self._call("to_device")
                    self._wait_here(index)
                else:
                    raise DoubleError(f"{name} over a tensor of cuda:{index} and one of the CPU, {tuple(own.shape)}")

    # ---- below: order -------------------------------------------------------------------------------------------------------

    def queue(self, index: int, kind: str, work: Callable[[], Any]) -> None:
        """Queue work of a device that takes place when somebody needs its results."""
        with self._lock:
            self._call(kind)
            if self._thread.capture is not None:
                raise RuntimeError(_CAPTURING)
            self._gpus[index].queue.append(work)

    def recorded(self, index: int) -> int:
        """Return how many copies and replays of a device were queued so far."""
        gpu = self._gpus[index]
        return gpu.flushed + len(gpu.queue)

    def wait(self, index: int, place: int | None = None) -> None:
        """Have the host wait for the queued work of a device, up to a place in it."""
        with self._lock:
            self._wait_here(index, place)

    def _flush(self, index: int, place: int | None = None) -> None:
        gpu = self._gpus[index]
        if gpu.queue:
            with torch.inference_mode():  # some of the tensors are of this mode, whoever waits
                while gpu.queue and (place is None or gpu.flushed < place):
                    gpu.queue.pop(0)()
                    gpu.flushed += 1

    def _wait_here(self, index: int, place: int | None = None) -> None:
        """Count a wait of the host. Copies between a device and memory that is not pinned are of this kind."""
        self._call("waits")
        capture = self._thread.capture
        if capture is not None and capture.index == index:
            raise RuntimeError(_CAPTURING)
        self._flush(index, place)

    def _read(self, source: DoubleTensor) -> None:
        self._use(source)
        self._call("to_host")
        self._wait_here(_index(source.device))

    def _launched(self, reads: Sequence[DoubleTensor], writes: Sequence[DoubleTensor], launches: int = 1) -> None:
        self._call("launches", launches)
        for each in reads:
            self._use(each)
        for each in writes:
            self._wrote(each)

    def _call(self, kind: str, count: int = 1) -> None:
        """Count a call of the device, which fails where it is time to."""
        self._raise_broken()
        if self._fault is not None:
            left, error = self._fault
            self._fault = (left - 1, error) if left > 1 else None
            if left <= 1:
                if not isinstance(error, torch.OutOfMemoryError):
                    self.broken = error
                raise error
        self.counts[kind] += count
        self.counts["calls"] += 1

    def _stream(self, index: int) -> DoubleStream:
        return self._thread.streams.get(index, self._gpus[index].default)

    def _use(self, tensor: DoubleTensor) -> None:
        """Raise where a tensor was written on a stream for which the current one has not waited."""
        stream = self._stream(_index(tensor.device))
        wrote = self._written.get(tensor.numbers.untyped_storage().data_ptr())
        if tensor.numel() and wrote is not None and wrote[0] is not stream and stream.seen.get(wrote[0], 0) < wrote[1]:
            raise DoubleError(f"{tensor!r} was written on another stream, for which nobody has waited")

    def _wrote(self, tensor: DoubleTensor) -> None:
        stream = self._stream(_index(tensor.device))
        stream.done += 1
        self._written[tensor.numbers.untyped_storage().data_ptr()] = stream, stream.done

    def _made(self, numbers: torch.Tensor, index: int) -> DoubleTensor:
        return DoubleTensor(numbers, index, self)

    def _raise_broken(self) -> None:
        if self.broken is not None:
            raise self.broken


def _histc(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Compute a histogram of integers, too, as GPUs do."""
    return torch.histc(input.double(), *args, **kwargs).to(input.dtype)


def _index(device: torch.device) -> int:
    return device.index or 0


def _on_cpu(given: Any) -> Any:
    """Return arguments with the numbers of doubles in their place, and the CPU in that of a GPU."""
    given = tree_map_only(DoubleTensor, lambda tensor: tensor.numbers, given)
    given = tree_map_only(torch.device, lambda device: torch.device("cpu"), given)
    return {name: each for name, each in given.items() if name != "pin_memory"} if isinstance(given, dict) else given


def _masked(args: Any) -> bool:
    """Return whether one of the indices is a mask, whose length the host must know."""
    return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])


def _schema(func: Any, count: int) -> Iterator[bool]:
    """Yield for each argument of an operation whether it is written to."""
    schema = getattr(func, "_schema", None)
    arguments = [] if schema is None else schema.arguments
    for argument in itertools.islice(arguments, count):
        yield argument.alias_info is not None and argument.alias_info.is_write
