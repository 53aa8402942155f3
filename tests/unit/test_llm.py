"""The Python front door: a tiny model with the tokens of SmolLM2, and SmolLM2 where its knowledge matters."""

import gc

import pytest
import torch

from retain import LLM, SamplingParams, factory
from retain.config import DTYPES, Config
from retain.engine.request import Request
from retain.kv.capacity import CacheConfig
from retain.processing.grammar import grammar_from_lark
from retain.processing.input import GenerateRequest
from tests.helpers.tokenizers import SMALL_VOCABULARIES, write_tokenizer_file

GREEDY = SamplingParams(max_tokens=12, temperature=0)


@pytest.fixture(scope="module")
def llm(load_shared_llm, tiny_smollm2):
    return load_shared_llm(Config(tiny_smollm2, dtype="float32", kv_memory=2**22, max_running_requests=8))


@pytest.fixture(scope="module")
def smollm2(load_shared_llm):
    return load_shared_llm(Config("smollm2", dtype="float32", kv_memory=2**28, max_running_requests=8))


def is_idle(llm):
    llm.cache.check()
    return llm.cache.free_pages == llm.cache.total_pages and not llm.engine.has_unfinished_requests


def test_what_packing_took_for_a_moment_makes_no_pool_smaller(llm, monkeypatch):
    free = [60]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.append(100))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[-1], 200))
    config = CacheConfig(page_size=16, max_running_requests=1, max_model_len=64, max_batched_tokens=64)
    assert factory.default_pool_bytes(config, llm.spec, torch.float32, torch.device("cuda")) == 85


@pytest.mark.slow
def test_generate_takes_text_token_ids_and_batches(smollm2):
    text = "The capital of France is"
    (alone,) = smollm2.generate(text, GREEDY)
    assert "Paris" in alone.text and alone.finish_reason in ("stop", "length")
    ids = smollm2.encode(text)
    others = smollm2.generate([ids, "One, two, three,", text], [GREEDY, SamplingParams(max_tokens=3, seed=1), GREEDY])
    assert [a.token_ids for a in others[::2]] == [alone.token_ids] * 2
    assert len(others[1].token_ids) == 3 and is_idle(smollm2)


@pytest.mark.slow
def test_stream_equals_generate_and_can_be_closed(llm):
    pieces = list(llm.stream("Once upon a time", GREEDY))
    (whole,) = llm.generate("Once upon a time", GREEDY)
    assert "".join(p.text for p in pieces) == whole.text and len(pieces) > 10
    assert pieces[-1].output.token_ids == whole.token_ids and all(p.output is None for p in pieces[:-1])
    stream = llm.stream("Once upon a time", GREEDY)
    next(stream)
    assert not is_idle(llm)
    stream.close()
    assert is_idle(llm)


@pytest.mark.slow
def test_stop_string_is_excluded_from_text(llm):
    (whole,) = llm.generate("One, two, three,", GREEDY)
    stop = whole.text[10:14]
    for params in (SamplingParams(max_tokens=12, temperature=0, stop=stop),):
        (cut,) = llm.generate("One, two, three,", params)
        pieces = [p.text for p in llm.stream("One, two, three,", params)]
        assert cut.text == whole.text[: whole.text.index(stop)] == "".join(pieces)
        assert cut.finish_reason == "stop" and len(cut.token_ids) < 12
    token = whole.token_ids[4]
    (cut,) = llm.generate("One, two, three,", SamplingParams(max_tokens=12, temperature=0, stop_token_ids=(token,)))
    assert cut.token_ids == whole.token_ids[: whole.token_ids.index(token) + 1]


@pytest.mark.slow
def test_n_outputs_differ_and_are_reproducible(llm):
    params = SamplingParams(max_tokens=8, seed=5, n=3)
    first, again = llm.generate("A poem about", params), llm.generate("A poem about", params)
    assert [a.text for a in first] == [a.text for a in again] and len({a.text for a in first}) == 3


@pytest.mark.slow
def test_invalid_prompt_rejects_batch_and_leaks_no_pages(llm):
    for bad in ([[]], [[49152]], ["x " * 9000], ["x " * 2000] * 2):
        with pytest.raises(ValueError):
            llm.generate(["fine", *bad], SamplingParams(max_tokens=4000, temperature=0))
        assert is_idle(llm)


@pytest.mark.slow
def test_ignore_eos_and_chat_stop_token(smollm2):
    ids = smollm2.tokenizer.encode_chat([{"role": "user", "content": "Say only yes."}])
    (chat,) = smollm2.generate([ids], SamplingParams(max_tokens=20, temperature=0))
    assert (
        chat.finish_reason == "stop"
        and chat.token_ids[-1] in smollm2.tokenizer.stop_token_ids
        and "<|im_end|>" not in chat.text
    )
    (longer,) = smollm2.generate([ids], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    assert len(longer.token_ids) == 20 and longer.token_ids[: len(chat.token_ids)] == chat.token_ids


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_every_dtype_is_computed_in_or_refused_with_those_that_are(backend, dtype):
    for weights, kv_dtype in (("auto", "auto"), ("int4", "int8"), ("bf16", "int4")):
        options = {"weights": weights if dtype != "float32" else "auto", "kv_dtype": kv_dtype, "kv_memory": "4MiB"}
        try:
            tiny = LLM("random:tiny", backend=backend, dtype=dtype, **options)
        except ValueError as error:
            assert str(error) == f"the {backend} backend does not compute in {dtype}: choose dtype float32 or bfloat16"
            assert (backend, dtype) == ("cpu", "float16")
        else:
            assert len(tiny.generate("a", SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2


@pytest.mark.slow
def test_each_request_has_its_own_policy(llm):
    text = " ".join(f"Item {i} costs {i * i} coins." for i in range(30))
    chosen = ["full", "h2o:budget=64", "ring:window=120"]
    together = llm.generate([text] * 3, GREEDY, kv_policy=chosen)
    assert [a.token_ids for a in together] == [llm.generate(text, GREEDY, kv_policy=c)[0].token_ids for c in chosen]
    num_heads = sum(layer.num_kv_heads for layer in llm.cache.spec.caches)
    full, h2o, ring = (a.kv["groups"][0] for a in together)
    assert together[1].kv["bytes_end"] == num_heads * 2 * llm.cache.store.page_bytes < together[0].kv["bytes_end"]
    assert h2o["slots_end"] == 128 < ring["slots_end"] == 192 < full["slots_end"] == full["slots_peak"]
    assert h2o["policy"].startswith("h2o:budget=64") and ring["policy"] == "ring:window=120" and is_idle(llm)
    assert llm.generate(text, GREEDY)[0].token_ids == together[0].token_ids
    for wrong in ("lru", "h2o", ["full"]):
        with pytest.raises(ValueError):
            llm.generate([text] * 2, GREEDY, kv_policy=wrong)
    assert is_idle(llm)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "h2o:budget=64", "keyformer:budget=25%,interval=5"])
def test_score_equals_sampling(llm, policy):
    """Given tokens are computed many at a time, and forgotten as if they had been drawn one by one."""
    text = " ".join(f"Item {i} costs {i * i} coins." for i in range(20))
    greedy = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, logprobs=0, seed=7)
    (drawn,) = llm.generate(text, greedy, kv_policy=policy)
    seen = []
    (scored,) = llm.score([text], [drawn.token_ids], policy, lambda i, logits: seen.append(logits.argmax(-1)), seed=7)
    assert torch.cat(seen).tolist() == drawn.token_ids
    assert scored == pytest.approx([p.logprob for p in drawn.logprobs], abs=0.02)
    assert is_idle(llm)


@pytest.mark.slow
def test_per_query_head_policy_needs_per_query_head_masses(llm):
    with pytest.raises(ValueError, match="every query head"):
        llm.generate("Once upon a time", GREEDY, kv_policy="h2o:budget=64,heads=kv-max")
    assert is_idle(llm)


@pytest.mark.slow
def test_protected_system_prompt_is_never_evicted(llm):
    said = [{"role": "system", "content": "Answer like a pirate."}, {"role": "user", "content": "Count. " * 60}]
    ids, system = llm.tokenizer.encode_chat(said), llm.tokenizer.count_system_tokens(said)
    assert "pirate" in "".join(llm.tokenizer.token_bytes(i).decode() for i in ids[:system])
    assert llm.tokenizer.count_system_tokens(said[1:]) == 0
    policy = "window:budget=40,protect=system"
    kept = llm.kept_positions(ids, policy, system)
    n = len(ids)
    assert kept[1][1] == [*range(system), *range(n - 40 + system, n)]
    assert llm.kept_positions(ids, policy)[1][1] == list(range(n - 40, n))
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    (a,), (b,) = (llm.generate([ids], params, policy, num_system_tokens=s) for s in (system, 0))
    assert a.token_ids != b.token_ids and is_idle(llm)
    assert list(llm.stream(ids, params, policy, system))[-1].output.token_ids == a.token_ids


@pytest.mark.slow
def test_prefix_cache_hits_only_within_a_salt(llm):
    ids = llm.encode("Once upon a time there was a lamp that nobody could put out. " * 8)
    first, again = (llm.generate(ids, GREEDY)[0] for _ in range(2))
    assert again.cached_tokens == len(ids) - 1 and first.token_ids == again.token_ids
    (turn,) = llm.generate([*ids, *first.token_ids, *llm.encode(" And then?")], GREEDY)
    assert turn.cached_tokens == len(ids) + len(first.token_ids) - 1  # the last token was never computed
    (other,) = llm.generate(ids, GREEDY, salt="somebody else")
    assert other.cached_tokens == 0 and other.token_ids == first.token_ids and is_idle(llm)
    streamed = list(llm.stream(ids, GREEDY, salt="somebody else"))[-1].output
    assert streamed.cached_tokens == len(ids) - 1


@pytest.mark.slow
def test_pinned_prompt_is_not_evicted(tiny_smollm2):
    llm = LLM(tiny_smollm2, dtype="float32", kv_memory="1MiB", max_running_requests=8)
    text = "You are a patient and terse assistant. " * 30
    n = llm.pin(text, seconds=600)
    assert n == len(llm.encode(text))
    for token in range(100, 106):  # as much as there is room for beside it, again and again
        llm.generate([token] * 300, SamplingParams(max_tokens=1, temperature=0))
    assert llm.generate(text, GREEDY)[0].cached_tokens == n - 1
    llm.cache.prefix_cache.tree.pins.clear()
    for token in range(100, 106):
        llm.generate([token] * 300, SamplingParams(max_tokens=1, temperature=0))
    assert llm.generate(text, GREEDY)[0].cached_tokens == 0 and is_idle(llm)


def test_pin_needs_prefix_cache():
    with pytest.raises(ValueError, match="off"):
        LLM("smollm2", kv_memory="64MiB", prefix_cache="off").pin("Hello", 1.0)


def test_an_answer_that_ends_before_it_owns_pages_has_statistics():
    """Followers sample their first token from the leader's logits, and the pool has no room for their fork."""
    llm = LLM("random:tiny", dtype="float32", kv_memory="1MiB", kv_policy="h2o:budget=50%", max_running_requests=16)
    answers = llm.generate("x" * 700, SamplingParams(max_tokens=1, n=16))
    peaks = [a.kv["bytes_peak"] for a in answers]
    assert len(peaks) == 16 and max(peaks) > 0 and min(peaks) == 0
    llm.close()


@pytest.mark.slow
def test_ended_requests_are_freed():
    """The output processor knows a request only as long as its caller keeps the state."""
    llm = LLM("random:tiny", kv_memory="16MiB")
    others = [x for x in gc.get_objects() if type(x) is Request]  # of servers that tests cut off
    llm.generate(["x"] * 3, SamplingParams(max_tokens=2))
    gc.collect()
    assert not [x for x in gc.get_objects() if type(x) is Request and x not in others]


def test_a_dead_end_of_a_grammar_is_a_failure():
    """Greedy, sampled and speculative. What precedes it is returned, and statistics are those of an answer."""
    llm = LLM("random:tiny", kv_memory="16MiB", dtype="float32", speculate="suffix")
    grammar = grammar_from_lark('start: "aaaaaaaa" x\nx: x')
    for temperature in (0, 1.0):
        params = SamplingParams(max_tokens=20, temperature=temperature, seed=1)
        for speculate in ("off", "suffix"):
            request = GenerateRequest("aaaaaaaa" * 3, params, speculate=speculate, grammar=grammar)
            (output,) = llm.generate_from_requests([request])
            assert (output.text, output.finish_reason) == ("a" * 8, "failed")
            assert output.ttft_s > 0 and output.decode_tok_s >= 0
    refused = GenerateRequest("x", grammar=grammar_from_lark("start: x\nx: x"))
    with pytest.raises(ValueError, match="matches no text"):
        llm.generate_from_requests([refused])


@pytest.mark.parametrize("kind", ["sentencepiece", "unspaced"])
def test_answers_go_on_with_the_text_of_the_prompt(kind, tmp_path):
    """In streams too: only an answer that begins a text loses the first space of SentencePiece."""
    llm = LLM(str(write_tokenizer_file(tmp_path, SMALL_VOCABULARIES[kind])), kv_memory="16MiB", dtype="float32")
    k = llm.tokenizer
    token = next(i for i in range(k.vocab_size) if k.token_bytes(i) == b" the")
    params = SamplingParams(max_tokens=3, temperature=0, logit_bias=((token, 100.0),))
    for prompt in ("the cat", "cat sat ", "<s>"):
        ids = llm.encode(prompt)
        (output,) = llm.generate([prompt], params)
        assert k.decode(ids) + output.text == k.decode([*ids, *output.token_ids]) and " the the" in output.text
        assert "".join(chunk.text for chunk in llm.stream(prompt, params)) == output.text


def test_texts_are_hinted_at_from_python(tiny_smollm2: str) -> None:
    llm = LLM(tiny_smollm2, kv_memory="64MiB", dtype="float32", tier=["ram:capacity=16MiB"])
    prompt = list(range(100, 300))
    llm.generate(prompt, SamplingParams(max_tokens=2))
    assert llm.hint("retain", prompt, 0.0) == 200
    assert llm.hint("demote", prompt) >= 192
    assert llm.hint("prefetch", prompt) == 192
    assert llm.generate(prompt, SamplingParams(max_tokens=2))[0].cached_tokens == 192
    assert llm.hint("release", prompt, num_kept=10) == 190 + 1
    assert llm.reset_cache("other") == 0 and llm.reset_cache() == 10
    with pytest.raises(ValueError, match="unknown hint 'forget': choose retain, release"):
        llm.hint("forget", prompt)
