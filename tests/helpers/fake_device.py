"""A device other than the CPU, simulated on the CPU: what would fail on a GPU fails here.

    with FakeDevice() as device:
        engine = make_engine("llama", backend="triton", device=DEVICE)
        ...
    assert device.host_syncs == []

The device's tensors have a class of their own. Mixing them with CPU tensors, or reading them as if they were in host
memory, raises an error as CUDA does. Every wait of the host for the device is recorded. Kernels run under Triton's
interpreter.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.runtime.interpreter import InterpretedFunction

from retain.kernels import triton

DEVICE = torch.device("hpu")
# Functions that make the host wait for the device, and functions that read no elements.
# fmt: off
SYNCHRONIZING = {
    "tolist", "item", "cpu", "__bool__", "__int__", "__float__", "__index__", "nonzero", "equal", "allclose",
}
METADATA = {
    "__get__", "size", "stride", "dim", "ndim", "numel", "data_ptr", "element_size", "is_contiguous", "__len__",
    "storage_offset", "untyped_storage", "as_subclass", "__repr__", "__hash__", "__iter__", "is_floating_point",
}
# fmt: on
VIEWS = {"view", "transpose", "__getitem__", "split", "unbind", "flatten", "reshape", "expand", "permute", "unsqueeze"}
LAUNCH_OPTIONS = ("grid", "warmup", "num_warps", "num_stages", "maxnreg", "enable_fp_fusion")  # beside a kernel's own


class FakeDeviceTensor(Tensor):
    """A tensor on the fake device."""


class FakeDeviceThread(TorchFunctionMode):
    """Applies a fake device in another thread, where the host may wait."""

    def __init__(self, fake_device: FakeDevice):
        super().__init__()
        self.fake_device = fake_device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.fake_device.__torch_function__(func, types, args, kwargs)


class FakeDevice(TorchFunctionMode):
    """Simulates the device inside a `with` block; `host_syncs` are the places where the host waited for it.

    `num_uploads` counts copies from the host to the device, `launches` has the names of the kernels that ran,
    `operations` those of torch's functions that compute, allocate or copy there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.host_syncs: list[str] = []
        self.num_uploads = 0  # copies from the host
        self.launches: list[str] = []
        self.operations: list[str] = []
        self.records_syncs = True

    def __enter__(self) -> FakeDevice:
        super().__enter__()
        self._original_devices = triton.DEVICES
        triton.DEVICES = (*triton.DEVICES, DEVICE.type)
        self._original_run = original_run = InterpretedFunction.run

        def run(kernel: Any, *args: Any, **options: Any) -> Any:
            self.launches.append(kernel.fn.__name__)
            if unknown := options.keys() - {*kernel.arg_names, *LAUNCH_OPTIONS}:  # the interpreter leaves them out
                raise TypeError(f"{kernel.fn.__name__} has no {', '.join(sorted(unknown))}")
            options = {name: check_kernel_arg(x) for name, x in options.items()}
            return original_run(kernel, *map(check_kernel_arg, args), **options)

        InterpretedFunction.run = run
        self._original_submit = original_submit = ThreadPoolExecutor.submit

        def submit(pool: Any, call: Any, *args: Any, **options: Any) -> Any:
            def call_on_device() -> Any:
                with FakeDeviceThread(self):
                    return call(*args, **options)

            return original_submit(pool, call_on_device)

        ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]
        return self

    def __exit__(self, *exc_info: Any) -> None:
        triton.DEVICES = self._original_devices
        InterpretedFunction.run = self._original_run
        ThreadPoolExecutor.submit = self._original_submit  # type: ignore[method-assign]
        super().__exit__(*exc_info)

    @contextmanager
    def allow_syncs(self) -> Iterator[None]:
        """Do not record waits for a while."""
        before, self.records_syncs = self.records_syncs, False
        try:
            yield
        finally:
            self.records_syncs = before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        on_device = [x for x in flatten([args, kwargs]) if isinstance(x, FakeDeviceTensor)]
        if name == "__get__" and on_device and func == Tensor.device.__get__:
            return DEVICE
        if name == "__iter__":
            return iter(args[0].unbind(0))
        if name in ("to", "cpu"):
            return self._to(name, func, args, kwargs)
        requested = kwargs.get("device")
        if requested is not None and torch.device(requested) == DEVICE:
            kwargs["device"] = "cpu"
            if on_device and name.endswith("_like"):
                args = tuple(map(to_plain_tensor, args))
            return func(*args, **kwargs).as_subclass(FakeDeviceTensor)
        if on_device and name not in METADATA:
            self.operations += [] if name in VIEWS else [name]
            self._check_devices(name, args, kwargs)
        return func(*args, **kwargs)

    def _to(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        x, *rest = args
        named = [r for r in (*rest, *kwargs.values()) if isinstance(r, (torch.device, str))]
        target = torch.device(named[0]) if named else torch.device("cpu") if name == "cpu" else None
        if target is None:
            return func(*args, **kwargs)
        dtypes = [r for r in (*rest, *kwargs.values()) if isinstance(r, torch.dtype)]
        result = to_plain_tensor(x).to(*dtypes)
        if (target == DEVICE) == isinstance(x, FakeDeviceTensor):
            return result.as_subclass(type(x)) if isinstance(x, FakeDeviceTensor) else result
        self.num_uploads += target == DEVICE
        if not kwargs.get("non_blocking"):
            self._record_sync(name)
        result = result.clone() if result.data_ptr() == to_plain_tensor(x).data_ptr() else result
        return result.as_subclass(FakeDeviceTensor) if target == DEVICE else result

    def _check_devices(self, name: str, args: Any, kwargs: Any) -> None:
        """Raise the error of a call that CUDA would refuse, and record a call that would wait."""
        on_host = [x for x in flatten([args, kwargs]) if is_host_tensor(x)]
        if name in ("numpy", "__array__"):
            raise TypeError(f"can't convert {DEVICE} device type tensor to numpy")
        if name in SYNCHRONIZING:
            self._record_sync(name)
        elif name in ("__getitem__", "__setitem__"):
            if not isinstance(args[0], FakeDeviceTensor):
                raise RuntimeError("a tensor on the CPU is indexed by a tensor on the device")
            if name == "__setitem__" and is_host_tensor(args[2]):
                raise RuntimeError("a tensor on the device is assigned a tensor on the CPU")
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            has_mask = any(isinstance(i, Tensor) and i.dtype == torch.bool for i in index)
            if on_host or has_mask or any(isinstance(i, (list, range)) for i in index):
                self._record_sync(name)
        elif name == "copy_":
            self.num_uploads += bool(on_host) and isinstance(args[0], FakeDeviceTensor)
            if on_host and not (kwargs.get("non_blocking") or (len(args) > 2 and args[2])):
                self._record_sync(name)
        elif on_host:
            raise RuntimeError(f"{name}: expected all tensors to be on the same device")

    def _record_sync(self, name: str) -> None:
        if self.records_syncs and current_thread() is main_thread():
            frames = [f for f in traceback.extract_stack() if "/retain/" in f.filename or "/tests/" in f.filename]
            frames = [f for f in frames if f.filename != __file__]
            self.host_syncs += [
                f"{f.filename.rpartition('retain/')[2]}:{f.lineno} {f.name}: {name}" for f in frames[-1:]
            ]


def to_plain_tensor(x: Any) -> Any:
    """View a tensor of the fake device as a CPU tensor."""
    return x.as_subclass(Tensor) if isinstance(x, FakeDeviceTensor) else x


def is_host_tensor(x: Any) -> bool:
    """Whether x is a tensor in host memory; scalars may be mixed with the device's tensors."""
    return isinstance(x, Tensor) and not isinstance(x, FakeDeviceTensor) and x.dim() > 0


def check_kernel_arg(x: Any) -> Any:
    """Return a kernel's argument for the interpreter. Raises ValueError for a CPU tensor."""
    if isinstance(x, Tensor) and not isinstance(x, FakeDeviceTensor):
        raise ValueError(f"{x.dtype} {list(x.shape)}: Pointer argument cannot be accessed from Triton (cpu tensor?)")
    return to_plain_tensor(x)


def flatten(x: Any) -> Iterator[Any]:
    """Iterate over the leaves of nested lists, tuples and dicts."""
    if isinstance(x, (list, tuple)):
        for y in x:
            yield from flatten(y)
    elif isinstance(x, dict):
        yield from flatten(list(x.values()))
    else:
        yield x
