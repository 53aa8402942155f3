"""Time kernels: on a GPU as CUDA graphs, so that no time is Python's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import cycle
from statistics import median
from time import perf_counter
from typing import Any

import torch

Line = dict[str, Any]
Function = Callable[[], Any]
LAUNCHES = 4  # of a function in one graph
NUM_COPIES = LAUNCHES  # of weights or choices: each launch has its own, so that no cache holds what it reads
LARGEST_DIFFERENCE = 0.02  # of outputs to float64; the rounding of bfloat16 makes 0.002 to 0.006


@dataclass(frozen=True)
class KernelBench:
    """Where kernels run, and how."""

    device: torch.device
    quick: bool = False  # tiny shapes, to try the bench itself
    compile_only: bool = False  # launch each kernel once, so that a later process finds it compiled
    repeats: int = 15

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU. If not, Triton's interpreter runs the kernels, and times mean nothing."""
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def measure_bandwidth(self) -> float:
        """Return the bytes that the device reads in a second; 1e12 where nothing is measured."""
        if self.compile_only:
            return 1e12
        x = torch.ones(2**12 if self.quick else 2**29, device=self.device)
        (line,) = self.time({"sum": x.sum}).values()
        return float(x.nbytes / line["us"] * 1e6)

    def time(self, functions: Mapping[str, Function], in_graphs: bool = True) -> dict[str, Line]:
        """Return a line with the microseconds of each function, and by what it was timed; they run in turns.

        A function that fails has its error instead, and stops no other. Without graphs, or where one cannot be
        captured, the time is that of its kernels and copies.
        """
        lines: dict[str, Line] = {}
        graphs: dict[str, torch.cuda.CUDAGraph] = {}
        for name, function in functions.items():
            try:
                self._warm_up(function)
            except Exception as error:
                lines[name] = {"error": describe_error(error)}
                continue
            lines[name] = {}
            if in_graphs and self.is_gpu and not self.compile_only:
                try:
                    graphs[name] = capture(function)
                except Exception as error:
                    lines[name]["not captured"] = describe_error(error)
        if self.compile_only:
            return lines
        times = time_graphs(graphs, self.repeats)
        for name, line in lines.items():
            if name in times:
                line |= {"us": 1e3 * times[name], "timed_by": "graph"}
            elif "error" not in line:
                line |= self._time_without_graph(functions[name])
        return lines

    def _warm_up(self, function: Function) -> None:
        self.synchronize()  # inputs may be written on another stream
        function()
        self.synchronize()

    def _time_without_graph(self, function: Function) -> Line:
        """Return the time of the kernels alone, or of the whole call where there is no GPU or no profiler."""
        if not self.is_gpu:
            return {"us": 1e6 * time_call(function), "timed_by": "clock"}
        try:
            return {"us": 1e3 * kernel_ms(function, LAUNCHES), "timed_by": "profiler"}
        except Exception:
            return {"us": 1e3 * events_ms(function, self.repeats), "timed_by": "events"}


def capture(function: Function) -> torch.cuda.CUDAGraph:
    """Return a graph of some launches of a function."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            function()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def time_graphs(graphs: Mapping[str, torch.cuda.CUDAGraph], repeats: int) -> dict[str, float]:
    """Return the milliseconds of a launch in each graph: medians of replays in turns."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(repeats):
        for name, graph in graphs.items():
            times[name].append(events_ms(graph.replay, 1) / LAUNCHES)
    return {name: median(graph_times) for name, graph_times in times.items()}


def events_ms(function: Function, repeats: int) -> float:
    """Return the milliseconds between events before and behind some calls, for each of them."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        function()
    end.record()
    end.synchronize()
    ms: float = begin.elapsed_time(end) / repeats
    return ms


def kernel_ms(function: Function, repeats: int) -> float:
    """Return the milliseconds of the device in a call: the sum over its kernels and copies. Raises RuntimeError."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            function()
        torch.cuda.synchronize()
    ms: float = sum(event.self_device_time_total for event in profiler.key_averages()) / 1e3 / repeats
    if not ms:
        raise RuntimeError("the profiler saw no kernel")
    return ms


def time_call(function: Function) -> float:
    """Return the seconds that a call takes."""
    started = perf_counter()
    function()
    return perf_counter() - started


def cycle_calls(function: Callable[..., torch.Tensor], *arguments: list[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Return a function whose calls take the arguments in turns."""
    turns = cycle(zip(*arguments, strict=True))
    return lambda: function(*next(turns))


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the norm of a - b over that of b, in float64."""
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm())


def check(compare: Callable[[], list[float]]) -> Line:
    """Return the differences that a comparison finds; `wrong` where they are more than rounding."""
    try:
        differences = compare()
    except Exception as error:
        return {"check": "failed", "error": describe_error(error)}
    is_wrong = not all(difference <= LARGEST_DIFFERENCE for difference in differences)  # NaN is no number <= this
    return {"check": "compared", "differences": differences, **({"wrong": True} if is_wrong else {})}


def describe_error(error: BaseException) -> str:
    """Return what went wrong, in one short line."""
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
