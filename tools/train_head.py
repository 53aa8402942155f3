"""Train an EAGLE-3 head (arXiv 2503.01840) for a model of Llama's layers, in about an hour of two cores.

    python -m tools.train_head --model smollm2 --texts wikitext2_raw_test.txt --out FOLDER [--minutes 45]

The texts are pieces of a file, and what the target itself answers to them. Its states and probabilities are computed
once. The head then learns these probabilities, at each token as the first to the `--depth`-th draft of a chain: the
first reads states of the target, others those that the head itself has left ("training-time test").
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from math import cos, pi
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaForCausalLM, apply_rotary_pos_emb

from retain import LLM, SamplingParams
from retain.models.resolve import resolve_model
from tests.helpers.transformers_gguf import load_transformers_model

TEXT_LEN = 512  # tokens of each text
PASSAGE_LEN = 250  # of a passage in a prompt
NUM_HELD_OUT = 32
WARMUP_UPDATES = 50
PIECE_LEN = 128  # rows of logits that are computed at once
FIRST_DRAFT_SHARE = 0.6  # of the time, in which only first drafts are trained: an update takes a quarter of others
PRINT_S = 120.0
STEP_WEIGHT = 0.8  # of the loss of each draft, relative to the one before
TASKS = (  # an odd number of them, so that each has answers of both kinds
    "Summarize the following text:\n\n{}",
    "Summarize this article in three sentences.\n\n{}\n\nSummary:",
    "Ask five questions about this text, and answer them:\n\n{}",
    "Explain the following text in simple words, step by step:\n\n{}",
    "Write a Python program with several functions, with docstrings and examples, about this subject:\n\n{}",
)
CODE_OPENINGS = (
    "def ",
    "import ",
    "from typing import List\n\n\ndef ",
    "def is_",
    "class ",
    "def count_",
    "\n\ndef find_",
    "# Python 3\n\n",
)


def read_passages(llm: LLM, path: Path) -> list[list[int]]:
    """Return the tokens of a file in pieces of one length."""
    ids = llm.tokenizer.encode(path.read_text())
    return [ids[i : i + TEXT_LEN] for i in range(0, len(ids) - TEXT_LEN, TEXT_LEN)]


def write_answers(llm: LLM, passages: Sequence[list[int]], num_answers: int) -> list[list[int]]:
    """Return texts that the target continues to one length, past the end of an answer: code, and tasks on passages."""
    prompts = []
    params = []
    for i in range(num_answers):
        round_, kind = divmod(i, 3)
        if kind == 0:
            prompt = llm.encode(CODE_OPENINGS[round_ % len(CODE_OPENINGS)])
        else:
            task = TASKS[(2 * round_ + kind) % len(TASKS)]
            passage = llm.tokenizer.decode(passages[i % len(passages)][:PASSAGE_LEN])
            prompt = llm.tokenizer.encode_chat([{"role": "user", "content": task.format(passage)}])
        prompts.append(prompt[: TEXT_LEN - 64])
        temperature = 0.0 if kind == 1 else 0.9
        params.append(SamplingParams(max_tokens=TEXT_LEN - len(prompts[-1]), temperature=temperature, ignore_eos=True))
    outputs = llm.generate(prompts, params)
    return [prompt + output.token_ids for prompt, output in zip(prompts, outputs, strict=True)]


def load_target(model: str) -> LlamaForCausalLM:
    """Load a folder or a .gguf file, or what such a name stands for, into transformers."""
    path = resolve_model(model)
    return AutoModelForCausalLM.from_pretrained(path) if path.is_dir() else load_transformers_model(path)


@dataclass
class Examples:
    """Texts of one length, and what the target makes of them: states between layers, and those before its `lm_head`."""

    tokens: Tensor  # [N, T]
    features: Tensor  # [N, T, number of layers * h]
    outputs: Tensor  # [N, T, h]

    def __getitem__(self, index: Any) -> Examples:
        return Examples(self.tokens[index], self.features[index], self.outputs[index])


@torch.no_grad()
def compute_states(target: LlamaForCausalLM, texts: Tensor, layers: Sequence[int]) -> Examples:
    """Run the target over all texts; the states are bfloat16."""
    features = []
    outputs = []
    for batch in texts.split(16):
        states = target.model(batch, output_hidden_states=True, use_cache=False)
        features.append(torch.cat([states.hidden_states[i] for i in layers], -1).bfloat16())
        outputs.append(states.last_hidden_state.bfloat16())
    return Examples(texts, torch.cat(features), torch.cat(outputs))


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize in float32."""
    return (x.float() * (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype) * weight.to(x.dtype)


class Head(nn.Module):
    """A head that begins as the target's last layer: it reads the highest of the states, and no token."""

    def __init__(
        self, target: LlamaForCausalLM, layers: Sequence[int], known: Tensor, dtype: torch.dtype = torch.bfloat16
    ):
        super().__init__()
        self.dtype = dtype
        last = target.model.layers[-1]
        c = target.config
        h = c.hidden_size
        self.eps = c.rms_norm_eps
        self.head_dim = last.self_attn.head_dim
        self.rope = target.model.rotary_emb
        self.known = known
        w = {
            "fc": torch.cat([torch.zeros(h, (len(layers) - 1) * h), torch.eye(h)], -1),
            "lm_head": target.lm_head.weight[known],
            "norm": target.model.norm.weight,
            "midlayer.input_layernorm": last.input_layernorm.weight,
            "midlayer.hidden_norm": last.input_layernorm.weight,
            "midlayer.post_attention_layernorm": last.post_attention_layernorm.weight,
            "midlayer.self_attn.o_proj": last.self_attn.o_proj.weight,
        }
        for part in "qkv":
            weight = getattr(last.self_attn, f"{part}_proj").weight
            w[f"midlayer.self_attn.{part}_proj"] = torch.cat([torch.zeros_like(weight), weight], -1)
        for part in ("gate", "up", "down"):
            w[f"midlayer.mlp.{part}_proj"] = getattr(last.mlp, f"{part}_proj").weight
        self.w = nn.ParameterDict({n.replace(".", "/"): x.detach().float().clone() for n, x in w.items()})

    def weight(self, name: str) -> Tensor:
        """Return a weight by the name that files have."""
        return self.w[name.replace(".", "/")]

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Multiply in the dtype of the head."""
        return F.linear(x.to(self.dtype), self.weight(name).to(self.dtype))

    def run(self, tokens: Tensor, state: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the next states [B, T, h] of embedded tokens and the states before them; adds its k, v to `cache`.

        With n entries in the cache, this is draft n of a chain from each text of a token: it sees what the first draft
        has of tokens n before and earlier, then one token of each entry.
        """
        B, T, _ = state.shape
        n = len(cache)
        p = "midlayer."
        x = state
        normed = rms(state, self.weight(p + "hidden_norm"), self.eps)
        both = torch.cat((rms(tokens, self.weight(p + "input_layernorm"), self.eps), normed), -1)
        q, k, v = (self.linear(f"{p}self_attn.{part}_proj", both) for part in "qkv")
        q, k, v = (y.view(B, T, -1, self.head_dim).transpose(1, 2) for y in (q, k, v))
        angles = self.rope(x, torch.arange(T)[None])
        q, k = apply_rotary_pos_emb(q, k, *(a.to(self.dtype) for a in angles))
        k, v = (y.repeat_interleave(q.shape[1] // k.shape[1], 1) for y in (k, v))
        cache.append((k, v))
        if n == 0:
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            earlier = torch.ones(T, T, dtype=torch.bool).tril(-n)
            scores = (q @ cache[0][0].mT).masked_fill(~earlier, -1e9)
            own = [(q * shift(cache[i][0], n - i)).sum(-1, keepdim=True) for i in range(1, n + 1)]
            shares = torch.cat((scores, *own), -1).float().mul(self.head_dim**-0.5).softmax(-1).to(self.dtype)
            o = shares[..., :T] @ cache[0][1]
            for i in range(1, n + 1):
                o = o + shares[..., T + i - 1, None] * shift(cache[i][1], n - i)
        x = x + self.linear(p + "self_attn.o_proj", o.transpose(1, 2).flatten(2))
        y = rms(x, self.weight(p + "post_attention_layernorm"), self.eps)
        y = F.silu(self.linear(p + "mlp.gate_proj", y)) * self.linear(p + "mlp.up_proj", y)
        return x + self.linear(p + "mlp.down_proj", y)

    def draft(self, embedded: Tensor, features: Tensor, depth: int) -> Iterator[Tensor]:
        """Yield what `lm_head` reads [B, T - 1, h] for drafts 1 to `depth` of chains that end at each token.

        The token at position 0 has no state before it, and no chain.
        """
        cache: list[tuple[Tensor, Tensor]] = []
        state = self.linear("fc", features[:, :-1])
        for _ in range(depth):
            state = self.run(embedded[:, 1:], state, cache)
            yield rms(state, self.weight("norm"), self.eps)
            state = shift(state, 1)


def shift(x: Tensor, n: int) -> Tensor:
    """Return rows [..., T, h] as those that are n places earlier, zeros for the first n."""
    return F.pad(x[..., : x.shape[-2] - n, :], (0, 0, n, 0))


class CrossEntropy(torch.autograd.Function):
    """The cross entropy of products x @ weight.T with probabilities [N, V], in pieces that fit into a core's cache."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, probabilities: Tensor) -> Tensor:
        """Return the mean over N; keeps the gradients of the products."""
        loss = torch.zeros(())
        gradients = torch.empty_like(probabilities)
        for rows, p, gradient in zip(*(y.split(PIECE_LEN) for y in (x, probabilities, gradients)), strict=True):
            logits = F.linear(rows, weight).float()
            sums = logits.logsumexp(-1, keepdim=True)
            loss += sums.sum() - torch.einsum("nv,nv->", p.float(), logits)
            gradient.copy_(logits.sub_(sums).exp_().sub_(p))
        ctx.save_for_backward(x, weight, gradients)
        return loss / len(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of x and the weight."""
        x, weight, gradients = ctx.saved_tensors
        (scale,) = grad_outputs
        return gradients @ weight * (scale / len(x)), gradients.T @ x * (scale / len(x)), None


def compute_loss(head: Head, target: LlamaForCausalLM, batch: Examples, depth: int) -> Tensor:
    """Return the weighted sum of the losses of all drafts of a chain."""
    with torch.no_grad():
        embedded = target.model.embed_tokens(batch.tokens)
        known = target.lm_head.weight[head.known]
        pieces = batch.outputs.flatten(0, 1).split(PIECE_LEN)
        probabilities = torch.cat([F.linear(y, known).float().softmax(-1).bfloat16() for y in pieces])
        probabilities = probabilities.view(*batch.tokens.shape, -1)
    total = torch.zeros(())
    weight = head.weight("lm_head").to(head.dtype)
    for i, x in enumerate(head.draft(embedded, batch.features, depth)):
        wanted = probabilities[:, depth:].flatten(0, 1)  # of tokens that have a whole chain
        loss = CrossEntropy.apply(x[:, depth - 1 :].flatten(0, 1), weight, wanted)
        total = total + STEP_WEIGHT**i * loss
    return total


@torch.no_grad()
def measure(head: Head, target: LlamaForCausalLM, examples: Examples, depth: int) -> list[float]:
    """Return the share of tokens at which the target's likeliest token is that of each draft of a chain."""
    rights: list[list[Tensor]] = [[] for _ in range(depth)]
    for i in range(0, len(examples.tokens), 4):
        batch = examples[i : i + 4]
        likeliest = F.linear(batch.outputs, target.lm_head.weight).argmax(-1)
        embedded = target.model.embed_tokens(batch.tokens)
        for found, x in zip(rights, head.draft(embedded, batch.features, depth), strict=True):
            drafts = head.known[head.linear("lm_head", x).argmax(-1)]
            found.append((drafts == likeliest[:, 1:])[:, depth - 1 :].float().mean())
    return [float(torch.stack(found).mean()) for found in rights]


def train(head: Head, target: LlamaForCausalLM, examples: Examples, args: argparse.Namespace) -> None:
    """Train for so many minutes, and print what is right of texts that are not trained on."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    held_out, rest = examples[:NUM_HELD_OUT], examples[NUM_HELD_OUT:]
    started = perf_counter()
    next_print = 0.0
    for num_updates in count():
        seconds = perf_counter() - started
        share = seconds / (60 * args.minutes)
        if share >= 1:
            break
        if num_updates % (len(rest.tokens) // args.batch_size) == 0:
            order = torch.randperm(len(rest.tokens)).split(args.batch_size)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min((num_updates + 1) / WARMUP_UPDATES, 0.5 + 0.5 * cos(pi * share))
        batch = rest[order[num_updates % (len(rest.tokens) // args.batch_size)]]
        depth = 1 if share < FIRST_DRAFT_SHARE else args.depth
        loss = compute_loss(head, target, batch, depth)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        if seconds >= next_print:
            next_print += PRINT_S
            rights = " ".join(f"{right:.3f}" for right in measure(head, target, held_out, args.depth))
            print(f"{seconds:6.0f} s, {num_updates:5} updates, loss {loss.item():.3f}, right {rights}", flush=True)
    print("right at last:", " ".join(f"{right:.3f}" for right in measure(head, target, held_out, args.depth)))


def save(head: Head, target: LlamaForCausalLM, layers: Sequence[int], folder: Path) -> None:
    """Write a folder that `--speculate eagle3:model=FOLDER` reads, in the form of SafeAILab's heads."""
    c = target.config
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    config = {name: getattr(c, name, None) for name in (*names, "rms_norm_eps", "max_position_embeddings")}
    config |= {"model_type": "llama", "num_hidden_layers": 1, "draft_vocab_size": len(head.known)}
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "eagle_aux_hidden_state_layer_ids": list(layers)}
    config |= {"rope_theta": c.rope_parameters["rope_theta"], "head_dim": head.head_dim}
    tensors = {f"{name.replace('/', '.')}.weight": x.detach().bfloat16().contiguous() for name, x in head.w.items()}
    tensors["d2t"] = head.known - torch.arange(len(head.known))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def main(argv: Sequence[str] | None = None) -> None:
    """Write texts, train, and save a head."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--texts", type=Path, required=True, help="a file of plain text")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the head; texts are kept there, too")
    parser.add_argument("--num-answers", type=int, default=2000)
    parser.add_argument("--draft-vocab", type=int, default=16384)
    parser.add_argument("--minutes", type=float, default=45.0, help="of training")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    started = perf_counter()
    kept = args.out / "texts.json"
    if not kept.exists():
        llm = LLM(args.model, kv_memory="3GiB", max_model_len=TEXT_LEN + 1, prefix_cache="off")
        passages = read_passages(llm, args.texts)
        texts = passages + write_answers(llm, passages, args.num_answers)
        args.out.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(texts))
        llm.close()
    all_texts = torch.tensor(json.loads(kept.read_text()))
    texts = all_texts[torch.randperm(len(all_texts))]
    print(f"{perf_counter() - started:6.0f} s, {len(texts)} texts of {TEXT_LEN} tokens", flush=True)
    target = load_target(args.model).bfloat16()
    counts = texts[NUM_HELD_OUT:].flatten().bincount(minlength=target.config.vocab_size)
    known = counts.topk(args.draft_vocab).indices.sort().values
    n = target.config.num_hidden_layers
    layers = [2, n // 2, n - 3]
    examples = compute_states(target, texts, layers)
    covered = float(counts[known].sum() / counts.sum())
    print(
        f"{perf_counter() - started:6.0f} s, states computed; the head's tokens are {covered:.3f} of the texts",
        flush=True,
    )
    head = Head(target, layers, known)
    train(head, target, examples, args)
    save(head, target, layers, args.out)


if __name__ == "__main__":
    main()
