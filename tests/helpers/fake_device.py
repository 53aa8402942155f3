"""A device that is not the CPU, played by the CPU: what would fail on a GPU fails here.

    with Pretend() as far:
        engine = rig("llama", backend="triton", device=DEVICE)
        ...
    assert far.waits == []

Tensors there are of a class of their own. Who mixes them with the CPU's, or asks for their numbers as if they were
there, gets an error as from CUDA; and every time that the host would wait for the device is written down. Kernels run
under Triton's interpreter.
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

DEVICE = torch.device("hpu")
SYNCHRONIZING = {
    "tolist",
    "item",
    "cpu",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "nonzero",
    "equal",
    "allclose",
}
METADATA = {"__get__", "size", "stride", "dim", "ndim", "numel", "data_ptr", "element_size", "is_contiguous", "__len__"}
METADATA |= {
    "storage_offset",
    "untyped_storage",
    "as_subclass",
    "__repr__",
    "__hash__",
    "__iter__",
    "is_floating_point",
}


class FakeDeviceTensor(Tensor):
    """One that lies there."""


class FakeDeviceThread(TorchFunctionMode):
    """The same in another thread. There the host may wait."""

    def __init__(self, fake_device: FakeDevice):
        super().__init__()
        self.fake_device = fake_device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.fake_device.__torch_function__(func, types, args, kwargs)


class FakeDevice(TorchFunctionMode):
    """While it lasts. `waits`: where the host waited for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.host_syncs: list[str] = []
        self.records_syncs = True

    def __enter__(self) -> FakeDevice:
        super().__enter__()
        self._original_run = InterpretedFunction.run
        InterpretedFunction.run = lambda kernel, *args, **more: self._original_run(
            kernel, *map(check_kernel_arg, args), **more
        )
        self._original_submit = submit = ThreadPoolExecutor.submit

        def everywhere(pool: Any, call: Any, *args: Any, **more: Any) -> Any:
            def there() -> Any:
                with FakeDeviceThread(self):
                    return call(*args, **more)

            return submit(pool, there)

        ThreadPoolExecutor.submit = everywhere  # type: ignore[method-assign]
        return self

    def __exit__(self, *why: Any) -> None:
        InterpretedFunction.run = self._original_run
        ThreadPoolExecutor.submit = self._original_submit  # type: ignore[method-assign]
        super().__exit__(*why)

    @contextmanager
    def allow_syncs(self) -> Iterator[None]:
        """Who only looks at what there is may wait."""
        before, self.records_syncs = self.records_syncs, False
        yield
        self.records_syncs = before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        there = [x for x in flatten([args, kwargs]) if isinstance(x, FakeDeviceTensor)]
        if name == "__get__" and there and func == Tensor.device.__get__:
            return DEVICE
        if name == "__iter__":
            return iter(args[0].unbind(0))
        if name in ("to", "cpu"):
            return self._to(name, func, args, kwargs)
        wanted = kwargs.get("device")
        if wanted is not None and torch.device(wanted) == DEVICE:
            kwargs["device"] = "cpu"
            if there and name.endswith("_like"):
                args = tuple(map(to_plain_tensor, args))
            return func(*args, **kwargs).as_subclass(FakeDeviceTensor)
        if there and name not in METADATA:
            self._check_devices(name, args, kwargs)
        return func(*args, **kwargs)

    def _to(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        x, *rest = args
        named = [r for r in (*rest, *kwargs.values()) if isinstance(r, (torch.device, str))]
        target = torch.device(named[0]) if named else torch.device("cpu") if name == "cpu" else None
        if target is None:
            return func(*args, **kwargs)
        dtypes = [r for r in (*rest, *kwargs.values()) if isinstance(r, torch.dtype)]
        found = to_plain_tensor(x).to(*dtypes)
        if (target == DEVICE) == isinstance(x, FakeDeviceTensor):
            return found.as_subclass(type(x)) if isinstance(x, FakeDeviceTensor) else found
        if not kwargs.get("non_blocking"):
            self._record_sync(name)
        found = found.clone() if found.data_ptr() == to_plain_tensor(x).data_ptr() else found
        return found.as_subclass(FakeDeviceTensor) if target == DEVICE else found

    def _check_devices(self, name: str, args: Any, kwargs: Any) -> None:
        here = [
            x
            for x in flatten([args, kwargs])
            if isinstance(x, Tensor) and not isinstance(x, FakeDeviceTensor) and x.dim()
        ]
        if name in ("numpy", "__array__"):
            raise TypeError(f"can't convert {DEVICE} device type tensor to numpy")
        if name in SYNCHRONIZING:
            self._record_sync(name)
        elif name in ("__getitem__", "__setitem__"):
            if not isinstance(args[0], FakeDeviceTensor):
                raise RuntimeError("indices of a CPU's tensor lie elsewhere")
            if (
                name == "__setitem__"
                and isinstance(args[2], Tensor)
                and not isinstance(args[2], FakeDeviceTensor)
                and args[2].dim()
            ):
                raise RuntimeError("values lie on the CPU")
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            sought = [i for i in index if isinstance(i, Tensor) and i.dtype == torch.bool]
            if here or sought or any(isinstance(i, (list, range)) for i in index):
                self._record_sync(name)
        elif name == "copy_":
            if here and not (kwargs.get("non_blocking") or (len(args) > 2 and args[2])):
                self._record_sync(name)
        elif here:
            raise RuntimeError(f"{name}: expected all tensors to be on the same device")

    def _record_sync(self, name: str) -> None:
        if self.records_syncs and current_thread() is main_thread():
            ours = [f for f in traceback.extract_stack() if "/retain/" in f.filename or "/tests/" in f.filename]
            frames = [f for f in ours if f.filename != __file__]
            self.host_syncs += [
                f"{f.filename.rpartition('retain/')[2]}:{f.lineno} {f.name}: {name}" for f in frames[-1:]
            ]


def to_plain_tensor(x: Any) -> Any:
    """The same memory, as the CPU's."""
    return x.as_subclass(Tensor) if isinstance(x, FakeDeviceTensor) else x


def check_kernel_arg(x: Any) -> Any:
    """What a kernel is given: it must lie there."""
    if isinstance(x, Tensor) and not isinstance(x, FakeDeviceTensor):
        raise ValueError(f"{x.dtype} {list(x.shape)}: Pointer argument cannot be accessed from Triton (cpu tensor?)")
    return to_plain_tensor(x)


def flatten(x: Any) -> Iterator[Any]:
    """Everything in nested lists and tuples."""
    if isinstance(x, (list, tuple)):
        for y in x:
            yield from flatten(y)
    elif isinstance(x, dict):
        yield from flatten(list(x.values()))
    else:
        yield x
