"""Softcap and sink logits: a family that has both equals plain torch, alone and in company of everything else.

Its layers slide in turns (tests/helpers/sink_family.py), so rings are part of every engine.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from retain import models
from retain.fit.dense import EVERY, DenseModel
from retain.kernels import cpu, reference, triton
from retain.kernels.api import CPU
from retain.kernels.attention_params import AttentionParams
from retain.models.weights import Weights
from tests.helpers.attention_case import AttentionCase, assert_close, torch_threads
from tests.helpers.backend_variants import ISAS, use_isa
from tests.helpers.decoder_runner import build_model, random_tokens, run_decoder
from tests.helpers.engines import make_engine, make_request, run_to_completion
from tests.helpers.list_model import ListModel, ListPolicy
from tests.helpers.marks import slow
from tests.helpers.schedule_runner import ScheduleRun
from tests.helpers.schedules import draw_schedule
from tests.helpers.sink_family import sink_family as sink_family
from tests.helpers.tiny_models import tiny_checkpoint, tiny_model
from tests.models.test_programs import program_logits, reference_logits

needs_cpu = pytest.mark.skipif(cpu.unavailable_reason() is not None, reason=str(cpu.unavailable_reason()))
needs_triton = pytest.mark.skipif(triton.unavailable_reason() is not None, reason=str(triton.unavailable_reason()))
STEPS = [(20, 3), (1, 10), (0, 9), (18, 1), (1, 0)]  # fresh tokens of two requests
PROMPT, NUM_TOKENS = [7 * i % 128 for i in range(50)], 60
POLICIES = {
    "full": ListPolicy("sinks", budget=1000),
    "sinks:budget=40,interval=3": ListPolicy("sinks", sinks=4, interval=3),
    "h2o:budget=40,interval=5": ListPolicy("h2o", interval=5),
    "h2o:budget=40,interval=5,heads=query": ListPolicy("h2o", heads="query", interval=5),
    "keyformer:budget=40,interval=5": ListPolicy("keyformer", interval=5),
    "snapkv:budget=40,interval=4,queries=16": ListPolicy("snapkv", num_queries=16, interval=4),
    "reread:budget=40,interval=3,rereads=30": ListPolicy("reread", interval=3, reread_chunk=30),
}


@pytest.mark.slow  # transformers takes seconds to import
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_the_reference_attends_as_transformers_does(softcap: float | None, sinks: bool) -> None:
    """Gemma 2's attention has the softcap, gpt-oss's has sink logits; both at once are written out here."""
    from transformers.models.gemma2 import modeling_gemma2
    from transformers.models.gpt_oss import modeling_gpt_oss

    case = AttentionCase((5,), ((4, 4),), S=16, D=16, softcap=softcap, sinks=sinks, shared_pages=False, holes=0.0)
    kv, t = case.build_cache(reference), case.build_tables()
    q, q_pos = case.build_queries()
    pages = t.pages[int(t.rows[0]), :, :4].long()  # [G, n]
    k, v = (x[pages].flatten(1, 2)[None] for x in (kv.k, kv.v))  # [1, G, n S, D]
    mask = torch.where(kv.pos[pages[0]].flatten() <= q_pos[:, None], 0.0, -torch.inf)[None, None]  # [1, 1, T, n S]
    module = SimpleNamespace(num_key_value_groups=case.R, training=False, sinks=case.params.sink_logits)
    args = module, q.transpose(0, 1)[None], k, v, mask
    if not sinks:
        found = modeling_gemma2.eager_attention_forward(*args, scaling=case.params.scale, softcap=softcap)[0]
    elif softcap is None:
        found = modeling_gpt_oss.eager_attention_forward(*args, scaling=case.params.scale)[0]
    else:
        x = case.params.scale * args[1] @ k.repeat_interleave(case.R, 1).mT
        x = softcap * torch.tanh(x / softcap) + mask
        weights = torch.cat((x, case.params.sink_logits.view(1, -1, 1, 1).expand(*x.shape[:3], 1)), -1).softmax(-1)
        found = (weights[..., :-1] @ v.repeat_interleave(case.R, 1)).transpose(1, 2)
    assert_close(case.attend(reference, kv), found[0])


def test_a_sink_logit_far_below_all_scores_changes_nothing_and_one_far_above_takes_all() -> None:
    case = AttentionCase((1, 70), ((9, 3), (4, 4)), D=16)
    params, (q, q_pos), t = case.params, case.build_queries(), case.build_tables()
    for backend in [reference, *([cpu] if cpu.unavailable_reason() is None else [])]:
        kv = case.build_cache(backend)
        for logit in (-1e4, 1e4):
            with_sink = replace(params, sink_logits=torch.full((case.G * case.R,), logit))
            o = backend.attend(q, kv, t, q_pos, with_sink)
            assert torch.equal(o, torch.zeros_like(o) if logit > 0 else backend.attend(q, kv, t, q_pos, params))


def test_rejects_parameters_that_do_not_fit() -> None:
    for params, message in (
        (AttentionParams(1.0, softcap=0.0), "softcap must be positive, not 0.0"),
        (
            AttentionParams(1.0, sink_logits=torch.ones(3)),
            r"sink_logits must be float32 \[4\], not torch.float32 \[3\]",
        ),
        (AttentionParams(1.0, alibi_slopes=torch.ones(4).double()), r"alibi_slopes must be float32 \[4\]"),
        (AttentionParams(1.0, key_offset=torch.ones(2, 8), softcap=1.0), "a key_offset changes weights"),
    ):
        with pytest.raises(ValueError, match=message):
            params.check(4, 2, 8)


def test_keys_have_no_offset_where_it_would_change_weights(sink_family: str) -> None:
    """Qwen 2 has biases, too, and its keys lose the mean of theirs."""
    assert tiny_model("qwen2").key_offsets
    model = tiny_model(sink_family)
    assert not model.key_offsets and model.decoder.load_layer(0).attention.own_params.sink_logits is not None


def test_written_out_attention_equals_the_decoder(sink_family: str) -> None:
    """Of `retain fit`, which differentiates it."""
    weights, text = Weights(tiny_checkpoint(sink_family), torch.float32), random_tokens(40)
    found, _ = DenseModel(weights).forward(text.tolist(), predicting=EVERY)
    expected = run_decoder(build_model(weights), [text], [[40]])[0].log_softmax(-1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@needs_cpu
def test_cpu_program_equals_the_reference(sink_family: str) -> None:
    checkpoint = tiny_checkpoint(sink_family)
    expected = reference_logits(checkpoint, STEPS)
    for isa in ISAS:
        with use_isa(isa):
            assert_close(program_logits(checkpoint, STEPS), expected, 2e-5, isa)


@needs_triton
@pytest.mark.slow
def test_triton_program_equals_the_reference(sink_family: str) -> None:
    checkpoint, steps = tiny_checkpoint(sink_family, num_hidden_layers=2), [(5, 3), (1, 1)]
    assert_close(program_logits(checkpoint, steps, backend=triton), reference_logits(checkpoint, steps), 2e-5)


@needs_cpu
def test_a_program_checks_the_parameters(sink_family: str) -> None:
    checkpoint = tiny_checkpoint(sink_family)
    checkpoint.shapes["model.layers.1.self_attn.sinks"] = (5,)
    with pytest.raises(ValueError, match=r"sink_logits must be float32 \[4\], not torch.float32 \[5\]"):
        models.build(Weights(checkpoint, torch.float32), cpu.program(torch.float32, CPU))
    with pytest.raises(ValueError, match=r"sink_logits must be float32 \[4\], not torch.float32 \[5\]"):
        build_model(Weights(checkpoint, torch.float32))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("backend", ["cpu", *slow("reference")])
def test_every_policy_keeps_the_tokens_of_plain_torch(sink_family: str, policy: str, backend: str) -> None:
    """Of lists of tokens, whose attention is written out; through all evictions the answers must be equal."""
    check_policy(sink_family, policy, backend, NUM_TOKENS)


@needs_triton
@pytest.mark.slow
def test_triton_does_so_too(sink_family: str) -> None:
    """With one policy and few tokens, because the interpreter is slow: it evicts after the prompt and twice more."""
    check_policy(sink_family, "keyformer:budget=40,interval=5", "triton", 12)


def check_policy(family: str, policy: str, backend: str, num_tokens: int) -> None:
    lists = ListModel(family, POLICIES[policy])
    expected = lists.generate(PROMPT, num_tokens, num_tokens, seed=0)
    columns = lists.spec.num_heads // lists.spec.kv_cache.only_group.num_kv_heads
    engine = make_engine(family, backend=backend, score_columns=columns)
    assert run_to_completion(engine, [make_request(PROMPT, num_tokens, policy)]) == [expected]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(2), *slow(*range(2, 8))])
def test_every_request_of_a_random_schedule_equals_itself_alone(sink_family: str, seed: int, tmp_path: Path) -> None:
    """With drafts, prefixes, tiers, preemption, and slots of few bits."""
    run = ScheduleRun(draw_schedule(seed, families=[sink_family]), tmp_path)
    with torch_threads(1):
        run.run()
        assert not list(run.differences())
