"""Programs in torch. ReferenceProgram is the definition of a whole model, which every other program must equal."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from retain.kernels import ops
from retain.kernels.api import KV, Batch, GroupInputs
from retain.kernels.attention_params import AttentionParams
from retain.kernels.reference.operations import (
    OPERATIONS,
    AttendToCache,
    Compute,
    Lowerings,
    Operands,
    ReferenceStep,
    Step,
)
from retain.kernels.shape_checks import check_batch
from retain.kernels.weights.weight import Weight, row_energies

Write = Callable[[KV, Tensor, Tensor, Tensor, Tensor], None]  # Backend.write
AttendToSlots = Callable[..., Tensor]  # Backend.attend
S = TypeVar("S", bound=Step)
O = TypeVar("O", bound=Operands)


class ProgramOutput(NamedTuple):
    """What a step gives: logits [N, V], and hidden states [N, E] where an operation writes them; both float32."""

    logits: Tensor
    hidden_states: Tensor | None

    def first(self, n: int) -> ProgramOutput:
        """Return the first n rows."""
        return ProgramOutput(self.logits[:n], None if self.hidden_states is None else self.hidden_states[:n])


class TorchProgram(Generic[S, O]):
    """A list of functions of a step's buffers: what `lowerings` make of operations. See `Program`."""

    def __init__(self, operands: O, lowerings: Lowerings):
        self.operands = operands
        self.lowerings = dict(lowerings)
        self.computes: list[tuple[int, Compute]] = []  # the buffer that is written, and its new rows
        self._logits: int | None = None
        self._hidden_states: int | None = None  # the buffer
        self.hidden_states: Tensor | None = None  # of the last step
        self.state_size = 0  # until an operation loads hidden states

    def load(self, operations: Iterable[ops.Operation]) -> None:
        """Append a model's operations to the program, lowered to functions of torch."""
        for op in operations:
            op.check()
            if type(op) not in self.lowerings:
                raise ValueError(f"there is no operation {type(op).__name__}")
            out = self.operands.buffers[op.out]
            self.computes.append((out, self.lowerings[type(op)](self.operands, op)))
            if op.out.name == ops.LOGITS:
                self._logits = out
            if op.out.name == ops.HIDDEN_STATES:
                self._hidden_states = out
            if isinstance(op, ops.LoadHiddenStates):
                self.state_size = op.out.width
            del op  # its weights are converted: they may be freed before the next ones are read

    def row_energies(self, weight: Weight, factors: Tensor) -> Tensor:
        """Return the sum of factors[i] * w[i]^2 over each row w of a weight, float32 [out]."""
        return row_energies(weight, factors)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows that the operations compute."""
        return self.operands.dtype

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all weights, as they are stored."""
        return self.operands.weight_bytes

    @property
    def vector_dtype(self) -> torch.dtype:
        """Return the program's dtype: torch wants biases and norms in that of the rows."""
        return self.operands.dtype

    def compile_ahead(self, compute: Callable[[], None]) -> None:
        """Do nothing: there is nothing to compile."""

    @abstractmethod
    def run(self, batch: Batch) -> Tensor:
        """Run all operations for the tokens of a batch. Returns the logits."""

    def _run_step(self, s: S) -> ProgramOutput:
        for out, compute in self.computes:
            s.buffers[out] = compute(s)
        if self._logits is None:
            raise ValueError("no operation of the program writes logits")
        states = None if self._hidden_states is None else s.buffers[self._hidden_states].float()
        return ProgramOutput(s.buffers[self._logits].float(), states)

    def _keep(self, output: ProgramOutput) -> Tensor:
        """Keep the hidden states of a step. Returns its logits."""
        self.hidden_states = output.hidden_states
        return output.logits


class ReferenceProgram(TorchProgram[ReferenceStep, Operands]):
    """A program whose attention is that of a backend in torch, or any that a caller gives to `compute`."""

    def __init__(self, dtype: torch.dtype, write: Write, attend: AttendToSlots, beside: ReferenceProgram | None = None):
        """`write` and `attend` are the backend's own functions; `beside` is a program whose weights it may share."""
        super().__init__(Operands(dtype, others=beside.operands if beside else None), OPERATIONS)
        self._write = write
        self._attend = attend

    def compute(self, input_ids: Tensor, positions: Tensor, logits_indices: Tensor, attend: AttendToCache) -> Tensor:
        """Compute logits float32 [N, V] with an attention of the caller's, differentiably.

        See `Batch` for the tensors. `attend` is called for one layer after the other. Raises ValueError for a model
        with layers that cache states.
        """
        step = ReferenceStep(
            input_ids=input_ids,
            positions=positions,
            logits_indices=logits_indices,
            attend=attend,
            write=_refuse_write,
            use_cache=_refuse_states,
        )
        return self._run_step(step).logits

    @torch.no_grad()
    def run(self, batch: Batch) -> Tensor:
        """Run all operations for the tokens of a batch. Returns the logits."""
        check_batch(batch)

        def attend(cache: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
            if batch.before_attention:
                batch.before_attention(cache, q)
            inputs = batch.cache(cache)
            has_kv = k.shape[1] > 0
            if has_kv:
                self._write(inputs.kv, inputs.slot_mapping, k, v, batch.positions)
            scoring = batch.scoring if has_kv else None
            return self._attend(q, inputs.kv, inputs.tables, batch.positions, params, scoring=scoring, layer=cache)

        def write(cache: int, k: Tensor, v: Tensor) -> None:
            inputs = use_cache(cache)
            is_written = batch.positions > 0
            slots = inputs.slot_mapping[:, is_written]
            if slots.numel():
                self._write(inputs.kv, slots, k[is_written], v[is_written], batch.positions[is_written])

        def use_cache(cache: int) -> GroupInputs:
            if batch.before_attention:
                batch.before_attention(cache, torch.zeros(len(batch.input_ids), 0, 0))
            return batch.cache(cache)

        step = ReferenceStep(
            input_ids=batch.token_ids(),
            positions=batch.positions,
            logits_indices=batch.logits_indices,
            hidden_states=batch.hidden_states,
            first_tokens=batch.query_start_loc[:-1].long(),
            adapters=batch.adapters,
            attend=attend,
            write=write,
            use_cache=use_cache,
        )
        return self._keep(self._run_step(step))


def _refuse_write(cache: int, k: Tensor, v: Tensor) -> None:
    raise ValueError("a draft head with a cache cannot be computed without one")


def _refuse_states(cache: int) -> GroupInputs:
    raise ValueError("a model with convolutions or linear attention cannot be computed without a cache")
