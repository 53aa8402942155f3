"""Programs of the triton backend. A step in which all requests have equally many fresh tokens runs as a CUDA graph
(graphs.py), any other operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from retain.kernels import ops
from retain.kernels.api import Batch
from retain.kernels.reference.program import TorchProgram
from retain.kernels.shape_checks import check_batch
from retain.kernels.triton import compilation
from retain.kernels.triton.graphs import CUDAGraphRunner
from retain.kernels.triton.operations import OPERATIONS, DeviceOperands
from retain.kernels.triton.plan import plan_attention, request_tiles
from retain.kernels.triton.step_inputs import DeviceStep, upload_step


class TritonProgram(TorchProgram[DeviceStep, DeviceOperands]):
    """A program on the device."""

    def __init__(self, dtype: torch.dtype, device: torch.device, beside: TritonProgram | None = None):
        """`beside`: a program whose weights it may share."""
        super().__init__(DeviceOperands(dtype, device, beside.operands if beside else None), OPERATIONS)
        self.device = device
        self._num_heads = 0  # H, known once an attention is loaded
        self._attended: set[int] = set()  # the caches of attentions
        self._graphs = CUDAGraphRunner(self._run_step, device, captures=device.type == "cuda")

    def load(self, operations: Iterable[ops.Operation]) -> None:
        """Append a model's operations to the program, and note the caches that attention reads."""
        super().load(self._note_attention(operations))

    @property
    def vector_dtype(self) -> torch.dtype:
        """Return float32, in which norms are computed."""
        return torch.float32

    def compile_ahead(self, compute: Callable[[], None]) -> None:
        """Compile the kernels of these steps. No graph of them is kept: it would lack the kernels."""
        graphs = self._graphs
        self._graphs = CUDAGraphRunner(self._run_step, self.device, captures=False)
        try:
            compilation.compile_ahead(compute)
        finally:
            self._graphs = graphs

    @torch.no_grad()
    def run(self, batch: Batch) -> Tensor:
        """Run all operations for the tokens of a batch. Returns the logits."""
        check_batch(batch)
        attended = {batch.caches[cache][0] for cache in self._attended}
        num_heads = [self._num_heads if i in attended else 0 for i in range(len(batch.groups))]
        if not batch.before_attention:
            output = self._graphs.run(batch, num_heads)
            if output is not None:
                return self._keep(output)
        plans = [
            plan_attention(g.tables, H // g.tables.pages.shape[2], g.kv.k_dim, g.kv, batch.scoring) if H else None
            for g, H in zip(batch.groups, num_heads, strict=True)
        ]
        requests = request_tiles(batch.groups[0].tables)
        return self._keep(self._run_step(upload_step(batch, plans, requests, self.device)))

    def _note_attention(self, operations: Iterable[ops.Operation]) -> Iterator[ops.Operation]:
        for op in operations:
            if isinstance(op, ops.Attend):
                self._num_heads = op.heads[0]
                self._attended.add(op.cache)
            yield op
