"""Time kernels on the device, without Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch

Line = dict[str, Any]


def time_graphs(functions: Sequence[Callable[[], Any]], repeats: int = 20) -> list[float]:
    """Return the milliseconds of each function, run as CUDA graphs in turns."""
    graphs = []
    for function in functions:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())  # which still writes the inputs
        with torch.cuda.stream(stream):
            function()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(4):
                function()
        graphs.append(graph)
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for graph, graph_times in zip(graphs, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            graph_times.append(begin.elapsed_time(end) / 4)
    return [median(graph_times) for graph_times in times]


def measure_bandwidth() -> float:
    """Return the bytes a second that the device reads."""
    x = torch.ones(2**30, device="cuda")
    (ms,) = time_graphs([lambda: x.sum()])
    return x.nbytes / ms * 1e3


def time_call(function: Callable[[], Any]) -> float:
    """Return the seconds that a call takes."""
    started = perf_counter()
    function()
    return perf_counter() - started


def kernel_ms(function: Callable[[], Any], repeats: int) -> float:
    """Return the milliseconds of the device in a call: the sum over its kernels and copies."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            function()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profiler.key_averages()) / 1e3 / repeats
