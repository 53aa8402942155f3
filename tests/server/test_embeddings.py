"""Clients get vectors and scores from the server."""

import json
from base64 import b64decode

import openai
import pytest
import torch
import transformers

from retain.processing.fill_in_formats import FILL_IN_FORMATS
from retain.server.config import Limits
from tests.helpers.folders import save_tiny_smollm2
from tests.server.conftest import HTTP, run_server

TEXTS = ["The sea is blue", "a", "Once upon a time " * 60]
ENGINE = {"kv_memory": "32MiB", "dtype": "float32", "max_model_len": 2048}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with the tokens of fill in the middle in place of others."""
    folder = save_tiny_smollm2(tmp_path_factory.mktemp("qwen3"), "qwen3")
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    for name, marker in zip(("<repo_name>", "<reponame>", "<file_sep>"), FILL_IN_FORMATS[0], strict=True):
        text = text.replace(json.dumps(name), json.dumps(marker))
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def embedder(folder):
    with run_server(
        str(folder), {**ENGINE, "pooling": "last"}, limits=Limits(max_choices=4, max_requests_per_key=2)
    ) as running:
        yield running


@pytest.fixture(scope="module")
def generator(folder):
    with run_server(str(folder), ENGINE, limits=Limits(max_choices=8)) as running:
        yield running


def post(server, path, **body):
    return HTTP.post(f"{server.url}/{path}", json={"model": "smollm2", **body})


def error_of(response):
    assert response.status_code == 400
    return response.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["float", "base64", openai.omit])
def test_openais_client_gets_the_vectors_of_transformers(embedder, folder, encoding):
    client = openai.OpenAI(base_url=embedder.url, api_key="none")
    got = client.embeddings.create(model="smollm2", input=TEXTS, encoding_format=encoding)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert [d.index for d in got.data] == [0, 1, 2] and got.model == "smollm2"
    for text, data in zip(TEXTS, got.data, strict=True):
        vector = data.embedding
        if encoding == "base64":
            vector = torch.frombuffer(bytearray(b64decode(vector)), dtype=torch.float32).tolist()
        ids = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            wanted = torch.nn.functional.normalize(model(**ids).last_hidden_state[0, -1], dim=0)
        assert (torch.tensor(vector) - wanted).abs().max() < 1e-4
    assert got.usage.prompt_tokens == got.usage.total_tokens == sum(len(tokenizer(t).input_ids) for t in TEXTS)
    ids = [tokenizer(t).input_ids for t in TEXTS]
    (one,) = client.embeddings.create(model="smollm2", input=ids[0], dimensions=8, encoding_format="float").data
    many = client.embeddings.create(model="smollm2", input=ids, dimensions=8, encoding_format="float").data
    assert len(one.embedding) == 8 and one.embedding == pytest.approx(many[0].embedding, abs=1e-5)


def test_many_texts_run_a_few_at_a_time(embedder, monkeypatch):
    sizes = []
    submit = embedder.service.engine_thread.submit

    async def record(group):
        sizes.append(len(group.requests))
        await submit(group)

    monkeypatch.setattr(embedder.service.engine_thread, "submit", record)
    got = post(embedder, "embeddings", input=[f"text {i}" for i in range(10)]).json()
    assert [d["index"] for d in got["data"]] == [*range(10)] and sizes == [2] * 5


def test_a_model_that_embeds_compares_texts_and_generates_none(embedder):
    assert "generates none" in error_of(post(embedder, "completions", prompt="x"))
    assert "generates none" in error_of(post(embedder, "chat/completions", messages=[{"role": "user", "content": "x"}]))
    results = post(embedder, "rerank", query="the sea", documents=["the land", {"text": "the sea"}]).json()["results"]
    assert results[0]["document"] == {"text": "the sea"} and results[0]["relevance_score"] == pytest.approx(1, abs=1e-4)
    assert "have 64 numbers" in error_of(post(embedder, "embeddings", input="x", dimensions=65))
    assert "maximum context length is 2048" in error_of(post(embedder, "embeddings", input=["a", "b " * 3000]))


def test_documents_are_reranked(generator):
    documents = [f"document {i}" for i in range(20)]
    query = "Which is the best document? " * 10
    got = post(generator, "rerank", query=query, documents=documents, top_n=3).json()
    scores = post(generator, "score", text_1=query, text_2=documents).json()
    ranked = sorted(scores["data"], key=lambda x: -x["score"])[:3]
    assert [r["index"] for r in got["results"]] == [x["index"] for x in ranked]
    assert [r["relevance_score"] for r in got["results"]] == pytest.approx([x["score"] for x in ranked], abs=1e-5)
    assert [r["document"]["text"] for r in got["results"]] == [documents[x["index"]] for x in ranked]
    assert "document" not in post(generator, "rerank", query="a", documents=["b"], return_documents=False).json()
    usage = got["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 19 / 20 * 0.8 * usage["prompt_tokens"]


def test_pairs_are_scored(generator):
    queries, documents = ["a", "b", "a"], ["x", "y", "z"]
    pairs = [x["score"] for x in post(generator, "score", text_1=queries, text_2=documents).json()["data"]]
    each = [
        post(generator, "score", text_1=q, text_2=d).json()["data"][0]["score"]
        for q, d in zip(queries, documents, strict=True)
    ]
    assert pairs == pytest.approx(each, abs=1e-5)
    assert "text_1 has one text" in error_of(post(generator, "score", text_1=["a", "b"], text_2=["x", "y", "z"]))
    assert "instruction" in error_of(post(generator, "score", text_1="a", text_2="x", instruction="x" * 5000))


def test_a_model_that_generates_makes_no_vectors(generator):
    assert "makes no embeddings" in error_of(post(generator, "embeddings", input="x"))


def test_a_suffix_makes_the_answer_a_middle(generator):
    fields = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    before, behind, middle = FILL_IN_FORMATS[0]
    got = post(generator, "completions", prompt="def f(", suffix="):\n", **fields).json()
    same = post(generator, "completions", prompt=f"{before}def f({behind}):\n{middle}", **fields).json()
    assert got["choices"][0]["text"] == same["choices"][0]["text"] and got["usage"]["prompt_tokens"] > 3
    assert "without echo" in error_of(post(generator, "completions", prompt="x", suffix="y", echo=True))
    assert "that are texts" in error_of(post(generator, "completions", prompt=[1, 2], suffix="y"))
