"""Vectors and scores equal those of transformers; what documents have in common is computed once."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from retain import LLM, SamplingParams
from retain.formats.errors import UnsupportedError
from retain.formats.pooling import Pooling, choose_pooling, read_pooling
from retain.processing.fill_in_formats import FILL_IN_FORMATS
from retain.processing.infill import encode_infill
from retain.processing.reranking import AFTER, BEFORE, INSTRUCTION, Reranker
from retain.processing.tokenizer import Tokenizer
from tests.helpers.folders import save_tiny_smollm2, write_tokenizer_folder
from tests.helpers.gguf_files import BYTE_LEVEL_VOCABULARY, tiny_for_gguf, write_gguf
from tests.helpers.tokenizers import open_tokenizer

TEXTS = ["The sea is blue", "a", "Once upon a time " * 50, "The sea is red"]
OPTIONS = {"kv_memory": "16MiB", "dtype": "float32"}
POOLING_MODULE = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    POOLING_MODULE,
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]


def write_modules(folder: Path, modules, config) -> Path:
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return folder


def peer_states(folder: Path, ids: list[int]) -> torch.Tensor:
    """Return the last states of a text by transformers, [T, E]."""
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([ids])).last_hidden_state[0]


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "llama"])
def test_vectors_equal_those_of_transformers(tmp_path, family, pooling):
    save_tiny_smollm2(tmp_path, family)
    llm = LLM(str(tmp_path), pooling=pooling, max_batched_tokens=80, **OPTIONS)  # a long prompt takes several steps
    vectors = llm.embed([*TEXTS, *TEXTS])
    for text, vector, again in zip(TEXTS, vectors[:4], vectors[4:], strict=True):
        states = peer_states(tmp_path, llm.encode(text))
        wanted = states[-1] if pooling == "last" else states.mean(0)
        assert (torch.tensor(vector) - torch.nn.functional.normalize(wanted, dim=0)).abs().max() < 1e-4
        assert vector == pytest.approx(again, abs=1e-6)
        (short,) = llm.embed([text], dimensions=8)
        assert short == pytest.approx(torch.nn.functional.normalize(torch.tensor(vector[:8]), dim=0).tolist(), abs=1e-5)
    for dimensions in (0, -3, 1000):
        with pytest.raises(ValueError, match="dimensions must be 1 to "):
            llm.embed(TEXTS[:1], dimensions)
    with pytest.raises(ValueError, match="embeds texts and generates none"):
        llm.generate("x", SamplingParams(max_tokens=1))


@pytest.mark.parametrize("family", ["granite", "granitemoehybrid", "cohere2"])
def test_vectors_lack_the_factor_of_logits(tmp_path, family):
    """It is part of the last norm, and a vector that is not normalized shows it."""
    save_tiny_smollm2(tmp_path, family)
    write_modules(tmp_path, MODULES[:2], {"pooling_mode_lasttoken": True})
    llm = LLM(str(tmp_path), **OPTIONS)
    (vector,) = llm.embed(TEXTS[:1])
    torch.testing.assert_close(torch.tensor(vector), peer_states(tmp_path, llm.encode(TEXTS[0]))[-1], atol=1e-4, rtol=0)


def test_a_file_without_a_head_embeds(tmp_path):
    """Published embedding models lack the head, and the prefix `model.` of all names."""
    save_tiny_smollm2(tmp_path, "qwen3")
    whole = LLM(str(tmp_path), pooling="last", **OPTIONS).embed(TEXTS)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({k.removeprefix("model."): v for k, v in tensors.items() if k != "lm_head.weight"}, tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    config = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "word_embedding_dimension": 64}
    write_modules(tmp_path, MODULES, config)
    llm = LLM(str(tmp_path), **OPTIONS)
    assert llm.pooling == Pooling("last") and llm.embed(TEXTS) == whole
    with pytest.raises(ValueError, match=r"no tensor 'lm_head\.weight'"):
        LLM(str(tmp_path), pooling="off", **OPTIONS)


# ---- what files say --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_cls_token": False}, Pooling("last")),
        ({"pooling_mode_mean_tokens": True}, Pooling("mean")),
        ({"pooling_mode": "lasttoken"}, Pooling("last")),
        ({"pooling_mode": "mean"}, Pooling("mean")),
    ],
)
def test_folders_say_how_to_pool(tmp_path, config, wanted):
    assert read_pooling(tmp_path) is None and choose_pooling(tmp_path, "mean") == Pooling("mean")
    assert read_pooling(write_modules(tmp_path, MODULES, config)) == wanted
    assert read_pooling(write_modules(tmp_path, MODULES[:2], config)) == Pooling(wanted.kind, normalize=False)
    assert read_pooling(write_modules(tmp_path, MODULES[:1], config)) is None
    assert choose_pooling(tmp_path, "off") is None


@pytest.mark.parametrize(
    ("modules", "config", "error"),
    [
        (MODULES, {"pooling_mode_cls_token": True}, "only lasttoken and mean"),
        (MODULES, {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True}, "only lasttoken and mean"),
        (MODULES, {"pooling_mode": ["mean"]}, "only lasttoken and mean"),
        (MODULES, [], "holds no object"),
        ([*MODULES, {"type": "sentence_transformers.models.Dense", "path": "3"}], {}, "module 'Dense'"),
        ([{**POOLING_MODULE, "path": "../x"}], {}, "no folder of the model"),
        ([{**POOLING_MODULE, "path": ""}], {}, "no folder of the model"),
        ([7], {}, "no list of objects"),
        ({}, {}, "no list of objects"),
    ],
)
def test_other_poolings_are_refused_in_one_line(tmp_path, modules, config, error):
    with pytest.raises(ValueError, match=error) as caught:
        read_pooling(write_modules(tmp_path, modules, config))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("kind", "wanted"), [(None, None), (0, None), (1, Pooling("mean")), (3, Pooling("last"))])
def test_gguf_files_say_how_to_pool(tmp_path, kind, wanted):
    extra = {} if kind is None else {"qwen3.pooling_type": kind}
    path = write_gguf(tmp_path / "a.gguf", tiny_for_gguf("qwen3"), vocabulary=BYTE_LEVEL_VOCABULARY, extra=extra)
    assert read_pooling(path) == wanted


@pytest.mark.parametrize("kind", [2, 4, "last", [1, 3]])
def test_other_poolings_of_gguf_files_are_refused(tmp_path, kind):
    extra = {"qwen3.pooling_type": kind}
    path = write_gguf(tmp_path / "a.gguf", tiny_for_gguf("qwen3"), vocabulary=BYTE_LEVEL_VOCABULARY, extra=extra)
    with pytest.raises(UnsupportedError, match="pooling_type"):
        read_pooling(path)


# ---- reranking -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reranker_folder(tmp_path_factory) -> Path:
    return save_tiny_smollm2(tmp_path_factory.mktemp("reranker"), "qwen3")


@pytest.fixture(scope="module")
def reranker(reranker_folder) -> LLM:
    return LLM(str(reranker_folder), kv_memory="64MiB", dtype="float32")


def test_a_model_that_generates_makes_no_vectors(reranker):
    with pytest.raises(ValueError, match="makes no embeddings"):
        reranker.embed(["x"])


def test_scores_equal_those_of_transformers(reranker_folder, reranker):
    """The example of Qwen3-Reranker's model card: the softmax of the logits of no and yes behind the last token."""
    query = "What is the capital of China?"
    documents = ["The capital of China is Beijing.", "Gravity is a force.", "x"]
    model = transformers.AutoModelForCausalLM.from_pretrained(reranker_folder, dtype=torch.float32)
    encode = partial(reranker.tokenizer.encode, add_special_tokens=False)
    for document, score in zip(documents, reranker.rerank(query, documents), strict=True):
        text = f"<Instruct>: {INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        ids = [*encode(BEFORE), *encode(text), *encode(AFTER)]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        (no,), (yes,) = encode("no"), encode("yes")
        assert score == pytest.approx(float(logits[[no, yes]].softmax(0)[1]), abs=1e-5)


@given(query=st.text(max_size=30), document=st.text(st.characters(codec="utf-8"), max_size=40))
@example(query="", document="<reponame>")
def test_prompts_are_tokenized_as_one_text(query, document):
    """Tokens do not cross the place where the text is cut, before the space in front of a document."""
    tokenizer = open_tokenizer("smollm2")
    query = query.encode(errors="replace").decode()
    text = f"<Instruct>: a\n<Query>: {query}\n<Document>: {document}"
    before, after = (tokenizer.encode(x, add_special_tokens=False) for x in (BEFORE, AFTER))
    middle = tokenizer.encode_quoted(text)  # names of markers are text
    assert Reranker(tokenizer).encode(query, document, "a") == [*before, *middle, *after]


def test_what_50_documents_have_in_common_is_computed_once(reranker, monkeypatch):
    query = "Which of these documents is about the sea? " * 10
    documents = [f"{i} ships, {'waves ' * (i % 7)}" for i in range(50)]
    num_computed = 0
    forward = reranker.engine.runner.forward

    def count(batch):
        nonlocal num_computed
        num_computed += len(batch.input_ids)
        return forward(batch)

    monkeypatch.setattr(reranker.engine.runner, "forward", count)
    scores = reranker.rerank(query, documents, salt="a")
    prompts = [Reranker(reranker.tokenizer).encode(query, document) for document in documents]
    num_shared = next(i for i, tokens in enumerate(zip(*prompts, strict=False)) if len(set(tokens)) > 1)
    assert num_shared > 150
    assert num_computed <= num_shared + sum(len(prompt) - num_shared for prompt in prompts)
    each = [reranker.rerank(query, [document], salt=document)[0] for document in documents[:5]]
    assert scores[:5] == pytest.approx(each, abs=1e-5)


def test_other_models_do_not_rerank(tmp_path):
    with pytest.raises(ValueError, match="no reranker of Qwen3's kind"):
        Reranker(Tokenizer.open(write_tokenizer_folder(tmp_path)))


# ---- fill in the middle ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("markers", FILL_IN_FORMATS, ids=lambda x: x[0])
def test_prompts_of_a_middle_have_the_models_tokens(tmp_path, markers):
    save_tiny_smollm2(tmp_path)
    text = (tmp_path / "tokenizer.json").read_text(encoding="utf-8")
    for name, marker in zip(("<repo_name>", "<reponame>", "<file_sep>"), markers, strict=True):
        text = text.replace(json.dumps(name), json.dumps(marker))
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    tokenizer = Tokenizer.open(tmp_path)
    before, behind, middle = (tokenizer._core.token_to_id(marker) for marker in markers)
    prefix, suffix = (tokenizer.encode(x, add_special_tokens=False) for x in ("def f(", "):\n"))
    assert encode_infill(tokenizer, "def f(", "):\n") == [before, *prefix, behind, *suffix, middle]
    assert encode_infill(tokenizer, "", "") == [before, behind, middle]


def test_other_tokenizers_fill_in_no_middle():
    with pytest.raises(ValueError, match="no tokens to fill in the middle"):
        encode_infill(open_tokenizer("smollm2"), "a", "b")
