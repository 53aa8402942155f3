"""Reranking by a model that says whether a document fits a query: prompts of Qwen3-Reranker (arXiv 2506.05176)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch.nn.functional import cosine_similarity

from retain.formats.pooling import Pooling
from retain.processing.input import GenerateRequest, InputProcessor
from retain.processing.output import RequestOutputState
from retain.processing.pooling import ChoiceReader, PooledPlan, plan_vectors, prepare_pooled
from retain.processing.tokenizer import Tokenizer

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
MARKERS = ("<|im_start|>", "<|im_end|>")


class Reranker:
    """Writes prompts whose answer is yes or no. All documents of a query begin alike, so its part is computed once."""

    def __init__(self, tokenizer: Tokenizer):
        """Raises ValueError for a tokenizer without the tokens of such prompts."""
        self._tokenizer = tokenizer
        if len(tokenizer.find_tokens(MARKERS)) < len(MARKERS):
            raise ValueError("this model is no reranker of Qwen3's kind: it has no <|im_start|> and <|im_end|>")
        self._before, self._after, yes, no = map(self._encode, (BEFORE, AFTER, "yes", "no"))
        if len(yes) != 1 or len(no) != 1:
            raise ValueError("this model is no reranker of Qwen3's kind: yes and no are not single tokens")
        self._yes = yes[0]
        self._no = no[0]
        self._head: tuple[str, list[int]] = ("", [])  # the last text in front of documents, and its ids

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def encode(self, query: str, document: str, instruction: str = INSTRUCTION) -> list[int]:
        """Return the token ids of the prompt for a document.

        A space begins a token of the vocabularies that have these markers, so the text may be cut before it. Names of
        markers in the texts are text: a document cannot end its own message, and answer.
        """
        head = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>:"
        if self._head[0] != head:
            self._head = head, self._tokenizer.encode_quoted(head)
        return [*self._before, *self._head[1], *self._tokenizer.encode_quoted(f" {document}"), *self._after]

    def create_reader(self) -> ChoiceReader:
        """Return the reader of the answer to such a prompt: its probability is the score."""
        return ChoiceReader(self._yes, self._no)


def plan_scores(
    processor: InputProcessor,
    pooling: Pooling | None,
    pairs: Sequence[tuple[str, str]],
    shared: GenerateRequest,
    instruction: str = INSTRUCTION,
) -> PooledPlan[list[float]]:
    """Plan the scores of pairs of a query and a document: 0 to 1, or cosines of a model that embeds.

    Other options are those of `shared`. Raises ValueError where the model can do neither. Preparing a text raises it
    where that cannot be run.
    """
    if pooling:
        return _plan_cosines(processor, pooling, pairs, shared)
    reranker = Reranker(processor.tokenizer)
    readers = [reranker.create_reader() for _ in pairs]

    def prepare(i: int) -> RequestOutputState:
        query, document = pairs[i]
        processor.check_length(query + document)
        prompt = reranker.encode(query, document, instruction)
        return prepare_pooled(processor, replace(shared, prompt=prompt), readers[i])

    firsts = {query: i for i, (query, _) in reversed(list(enumerate(pairs)))}.values()
    others = sorted(set(range(len(pairs))) - set(firsts))
    # The first document of a query leaves the part that all have in common to the others.
    stages = [[partial(prepare, i) for i in stage] for stage in (sorted(firsts), others)]
    return PooledPlan(stages, lambda: [reader.probability for reader in readers])


def _plan_cosines(
    processor: InputProcessor, pooling: Pooling, pairs: Sequence[tuple[str, str]], shared: GenerateRequest
) -> PooledPlan[list[float]]:
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    plan = plan_vectors(processor, pooling, texts, shared)

    def scores() -> list[float]:
        vectors = dict(zip(texts, plan.result(), strict=True))
        return [float(cosine_similarity(vectors[a], vectors[b], dim=0)) for a, b in pairs]

    return PooledPlan(plan.stages, scores)
