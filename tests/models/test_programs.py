"""Every program computes what that of the reference does: every family and variant, however tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from retain import models
from retain.kernels import cpu, ops, reference, triton
from retain.kernels.api import CPU, KV, NO_WINDOW, Backend, Batch, GroupInputs, Program, Tables
from retain.kernels.attention_params import AttentionParams
from retain.kernels.ops import ACTIVATIONS, Buffer
from retain.kernels.triton import graphs
from retain.kv.memory.group_pages import divide_pages, fold_states
from retain.models.decoder import ModelSpec
from retain.models.weights import Weights
from tests.helpers.attention_case import assert_close, torch_threads
from tests.helpers.backend_variants import ISAS, use_isa
from tests.helpers.decoder_runner import build_model, random_tokens, run_decoder
from tests.helpers.family_variants import CASES, Changes
from tests.helpers.layerless_batch import make_layerless_batch
from tests.helpers.marks import slow
from tests.helpers.programs import load_program
from tests.helpers.tiny_models import CONFIGS, TinyCheckpoint, has_states, tiny_checkpoint, tiny_model

needs_triton = pytest.mark.skipif(triton.unavailable_reason() is not None, reason=str(triton.unavailable_reason()))
PAGE_SIZE, PAGES_PER_HEAD = 16, 3
STEPS = [(20, 3), (1, 10), (0, 9), (18, 1), (1, 0)]  # fresh tokens of two requests
Steps = Sequence[tuple[int, ...]]


@pytest.fixture(autouse=True)
def skip_without_kernels(request: pytest.FixtureRequest) -> None:
    """Skip tests of the cpu backend where it is not built: a machine with a GPU may have no compiler."""
    reason = cpu.unavailable_reason()
    if reason and "triton" not in request.node.name:
        pytest.skip(reason)


def make_prompts(vocab_size: int, steps: Steps) -> list[Tensor]:
    rng = torch.Generator().manual_seed(5)
    return [torch.randint(0, vocab_size, (sum(counts),), generator=rng) for counts in zip(*steps, strict=True)]


def reference_logits(checkpoint: TinyCheckpoint, steps: Steps, weights: str = "auto") -> Tensor:
    """The logits [T, V] of one request after the other, computed by the program of the reference."""
    model = build_model(Weights(checkpoint, torch.float32, weights))
    prompts = make_prompts(model.spec.vocab_size, steps)
    return torch.cat(run_decoder(model, prompts, [[len(p) for p in prompts]]))


class ProgramSteps:
    """Runs steps of a program; every head of every request owns pages for all of its tokens."""

    def __init__(self, program: Program, spec: ModelSpec, backend: Backend, dtype: torch.dtype, num_requests: int):
        self.device = torch.device("cuda") if backend is triton and not triton.is_interpreted() else CPU
        self.program = program
        cache = fold_states(spec.kv_cache, PAGE_SIZE, dtype)
        self.layers = cache.group_indices
        self.groups: list[tuple[KV, Tensor, Tables]] = []  # memory, pages [L, N, G, n] and tables of each group
        formats = divide_pages(cache, PAGE_SIZE, dtype)
        shapes = [(len(g.caches), num_requests, g.num_kv_heads, PAGES_PER_HEAD) for g in cache.groups]
        num_pages, kv, end = 1 + sum(torch.Size(shape).numel() for shape in shapes), None, 1
        for group, format, shape in zip(cache.groups, formats.formats, shapes, strict=True):
            sizes = format.page_size, format.k_dim, format.dtype, 1, self.device, format.v_dim
            first = *sizes, formats.key_and_value_bytes
            kv = backend.reinterpret(kv, format) if kv else backend.allocate(num_pages, *first)
            kv.pos.fill_(-1)
            begin, end = end, end + torch.Size(shape).numel()
            pages = torch.arange(begin, end, dtype=torch.int32).view(shape)
            windows = torch.tensor([w or NO_WINDOW for w in group.windows], dtype=torch.int32)
            none = torch.zeros(0, dtype=torch.int32)
            tables = Tables(
                pages=pages.to(self.device),
                counts=torch.full(shape[:3], PAGES_PER_HEAD, dtype=torch.int32, device=self.device),
                windows=windows[:, None].repeat(1, num_requests).to(self.device),
                rows=none,
                query_start_loc=none,
            )
            self.groups.append((kv, pages, tables))

    def run(
        self, prompts: Sequence[Tensor], done: Sequence[int], counts: Sequence[int], num_bfloat16: int = 0
    ) -> list[Tensor]:
        """The logits [count, V] of the next tokens of each request, of which `num_bfloat16` tokens are a prompt."""
        chosen = [b for b, n in enumerate(counts) if n]
        starts = torch.tensor([0, *(counts[b] for b in chosen)]).cumsum(0)
        num_own = [min(max(num_bfloat16 - done[b], 0), counts[b]) for b in chosen]
        positions = torch.cat([torch.arange(done[b], done[b] + counts[b]) for b in chosen])
        owner = torch.tensor(chosen).repeat_interleave(torch.tensor([counts[b] for b in chosen]))
        groups = []
        for kv, own, all_tables in self.groups:
            S = kv.page_size
            pages = own[:, owner, :, positions // S].permute(1, 2, 0)  # [L, G, T] of [T, L, G]
            tables = replace(
                all_tables,
                rows=torch.tensor(chosen, dtype=torch.int32),
                query_start_loc=starts.int(),
            )
            slots = (pages * S + positions % S).int().contiguous().to(self.device)
            groups.append(GroupInputs(kv, tables, slots))
        logits = self.program.run(
            Batch(
                groups=groups,
                caches=self.layers,
                input_ids=torch.cat([prompts[b][done[b] : done[b] + counts[b]] for b in chosen]),
                positions=positions.int(),
                logits_indices=torch.arange(len(positions)),
                bfloat16_rows=[(begin, begin + n) for begin, n in zip(starts.tolist(), num_own, strict=False) if n],
            ),
        )
        return list(logits.cpu().clone().split(list(counts)))


def program_logits(
    checkpoint: TinyCheckpoint,
    steps: Steps,
    *,
    weights: str = "auto",
    dtype: torch.dtype = torch.float32,
    backend: Backend = cpu,
    num_bfloat16: int = 0,
) -> Tensor:
    """The logits [T, V] of one request after the other, computed by the program in these steps."""
    device = torch.device("cuda") if backend is triton and not triton.is_interpreted() else CPU
    program = backend.program(torch.float32, device)
    spec = models.build(Weights(checkpoint, dtype, weights, vector_dtype=torch.float32), program).spec
    runner = ProgramSteps(program, spec, backend, dtype, len(steps[0]))
    prompts, done, logits = make_prompts(spec.vocab_size, steps), [0] * len(steps[0]), []
    for counts in steps:
        logits.append(runner.run(prompts, done, counts, num_bfloat16))
        done = [n + count for n, count in zip(done, counts, strict=True)]
    return torch.cat([x for parts in zip(*logits, strict=True) for x in parts])


def with_two_layers(family: str) -> dict[str, Any]:
    """The changes that leave a family two layers: each kind of layer once."""
    config = CONFIGS[family]
    if "text_config" in config:
        text = config["text_config"]
        types = {"layer_types": text["layer_types"][:2]} if "layer_types" in text else {}
        return {"text_config": {**text, "num_hidden_layers": 2, **types}}
    changes: dict[str, Any] = {key: 2 for key in ("num_hidden_layers", "n_layer", "n_layers") if key in config}
    return changes | ({"layer_types": config["layer_types"][:2]} if "layer_types" in config else {})


@pytest.mark.parametrize(("family", "changes"), CASES, ids=["+".join([f, *c]) for f, c in CASES])
def test_cpu_program_equals_the_reference(family: str, changes: Changes) -> None:
    checkpoint = tiny_checkpoint(family, **changes)
    expected = reference_logits(checkpoint, STEPS)
    for isa in ISAS:
        with use_isa(isa):
            assert_close(program_logits(checkpoint, STEPS), expected, 2e-5, isa)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("family", models.list_families())
def test_triton_program_equals_the_reference(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step operation by operation, one as a captured graph."""
    monkeypatch.setattr(graphs, "CAPTURE_AFTER", 1)
    checkpoint, steps = tiny_checkpoint(family, **with_two_layers(family)), [(5, 3), (1, 1)]
    assert_close(program_logits(checkpoint, steps, backend=triton), reference_logits(checkpoint, steps), 2e-5)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("weights", ["int4", *slow("int8")])
@pytest.mark.parametrize("family", ["gpt2", *slow("gemma3_text", "qwen3_moe")])
def test_triton_program_with_quantized_weights_equals_the_reference(family: str, weights: str) -> None:
    """Few rows and many, alone and as a graph."""
    checkpoint, steps = tiny_checkpoint(family, **with_two_layers(family)), [(48, 5), *[(0, 1)] * 3]
    found = program_logits(checkpoint, steps, weights=weights, backend=triton)
    assert_close(found, reference_logits(checkpoint, steps, weights), 2e-5)


@needs_triton
def test_triton_graph_serves_several_padded_steps() -> None:
    """The second step of a shape is captured, and replayed by the third; three requests are padded to four."""
    checkpoint, steps = tiny_checkpoint("llama", num_hidden_layers=1), [(5, 2, 3), *[(1, 1, 1)] * 3]
    assert_close(program_logits(checkpoint, steps, backend=triton), reference_logits(checkpoint, steps), 2e-5)


@pytest.mark.parametrize("weights", ["int4", *slow("bf16", "int8")])
@pytest.mark.parametrize("family", models.list_families())
def test_chunks_and_other_requests_change_no_bit(family: str, weights: str) -> None:
    """Of any weights: integers are summed exactly, and floats in the order of the inputs."""
    checkpoint = tiny_checkpoint(family)
    for isa in ISAS:
        with use_isa(isa):
            together = program_logits(checkpoint, [(9, 12)], weights=weights, dtype=torch.bfloat16)
            apart = program_logits(checkpoint, [(9, 0), *[(0, 1)] * 12], weights=weights, dtype=torch.bfloat16)
        assert torch.equal(together, apart), isa


@pytest.mark.parametrize("weights", ["int4", *slow("int8")])
@pytest.mark.parametrize("family", models.list_families())
def test_chunks_change_no_bit_where_prompts_are_multiplied_in_bfloat16(family: str, weights: str) -> None:
    """A prompt of 9 tokens and its answer, in one step, in many, and with other requests between its parts."""
    checkpoint = tiny_checkpoint(family)

    def run(*steps: tuple[int, ...]) -> Tensor:
        return program_logits(checkpoint, steps, weights=weights, dtype=torch.bfloat16, num_bfloat16=9)

    for isa in ISAS:
        with use_isa(isa):
            together = run((12, 5), (0, 7))
            assert torch.equal(together, run((12, 12))), isa
            assert torch.equal(together, run((4, 1), (7, 0), *[(0, 1)] * 11, (1, 0))), isa


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_prompts_in_bfloat16_are_nearer_to_the_reference(weights: str) -> None:
    checkpoint, steps = tiny_checkpoint("llama"), [(40,)]
    expected = reference_logits(checkpoint, steps, weights)

    def error(num_bfloat16: int) -> float:
        found = program_logits(checkpoint, steps, weights=weights, num_bfloat16=num_bfloat16)
        return (found - expected).abs().mean().item()

    for isa in ISAS:
        with use_isa(isa):
            assert 1e-4 < error(40) < 0.7 * error(0), isa


@pytest.mark.parametrize(
    ("weights", "num_bfloat16"), [("int4", 0), ("int4", 23), pytest.param("bf16", 0, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "qwen3_moe", "deepseek_v3", "qwen3_next"])
def test_blocks_of_many_rows_change_no_bit(family: str, weights: str, num_bfloat16: int) -> None:
    """Threads take many rows through several operations each, few rows through one operation together."""
    checkpoint = tiny_checkpoint(family)

    def run(*steps: tuple[int, ...]) -> Tensor:
        return program_logits(checkpoint, steps, weights=weights, dtype=torch.bfloat16, num_bfloat16=num_bfloat16)

    for isa in ISAS:
        with use_isa(isa):
            expected = run(*[(10, 10, 10)] * 3)
            for num_threads in (1, 2):
                with torch_threads(num_threads):
                    assert torch.equal(run((30, 30, 30)), expected), isa


@pytest.mark.parametrize("family", models.list_families())
def test_less_exact_weights_are_close(family: str) -> None:
    checkpoint = tiny_checkpoint(family)
    expected = reference_logits(checkpoint, STEPS)
    for weights in ("bf16", "int8"):
        logits = program_logits(checkpoint, STEPS, weights=weights, dtype=torch.bfloat16)
        errors = (logits - expected).norm(dim=1) / expected.norm(dim=1)
        # Tiny random models magnify rounding errors, and a token may take another expert for a last bit.
        assert errors.median() <= 0.15


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("backend", [cpu, pytest.param(triton, marks=needs_triton)])
def test_activations_of_numbers_that_are_not_finite(backend: Backend, act: str) -> None:
    """What is NaN stays so: an activation hides no mistake. A row holds one number, as products mix its columns."""
    rows = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf, 0.0, -3.0, 2.0])[:, None].expand(-1, 32)

    def run(backend: Backend) -> Tensor:
        x, y = Buffer("x", 64), Buffer("y", 32)
        embed = ops.Embed(x, torch.cat((rows, torch.ones_like(rows)), 1))
        p = load_program(backend, [embed, ops.Activate(x, y, act, gated=True)], y)
        ids = torch.arange(len(rows))
        return p.run(make_layerless_batch(backend, ids, ids))

    expected = run(reference)
    assert expected[:2].isnan().all() and expected[4:].isfinite().all()
    torch.testing.assert_close(run(backend), expected, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_rejects_weights_whose_shapes_do_not_fit() -> None:
    checkpoint = tiny_checkpoint("llama")
    checkpoint.shapes["model.layers.1.mlp.down_proj.weight"] = (64, 97)
    with pytest.raises(ValueError, match="the input of a linear layer has width 97, but 96 is expected"):
        models.build(Weights(checkpoint, torch.float32), cpu.program(torch.float32, CPU))


@pytest.mark.parametrize("family", [family for family in models.list_families() if not has_states(family)])
def test_the_reference_can_be_differentiated(family: str) -> None:
    """The gradient by an output of attention is how the logits change with it."""
    model, step = tiny_model(family), 1e-3  # more, and a token may take another expert
    direction = random_tokens(8).view(8, 1, 1) / 128

    def compute(nudge: Tensor) -> Tensor:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
            kv = k[..., : v.shape[-1]] + v  # a value may be shorter than a key
            o = (q[..., : v.shape[-1]] + kv.repeat_interleave(q.shape[1] // k.shape[1], 1)) / 3
            return o + nudge * direction if layer == 0 else o

        return model.compute(random_tokens(8), torch.arange(8), attend).log_softmax(-1)[:, 5].sum()

    nudge = torch.zeros((), requires_grad=True)
    (gradient,) = torch.autograd.grad(compute(nudge), nudge)
    change = compute(torch.tensor(step)) - compute(torch.tensor(-step))
    assert gradient.abs() > 0.05
    torch.testing.assert_close(gradient, change.detach() / (2 * step), rtol=0.02, atol=0.05)
