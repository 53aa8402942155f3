"""A server in process with a toy model and a cache of blocks, and servers whose cache is wrong in one way each.

A token of the model is a word. What a token leaves in the cache (its slot) is its word, its position, and a digest of
these and of all before. An answer depends on all slots in order: its first words continue what the end of the prompt
quotes, the others follow from the digests, and so do the log-probabilities.
"""

import itertools
import json
import threading
import time
from dataclasses import dataclass, field
from hashlib import blake2b

import httpx

from cachecheck.texts import WORDS

BLOCK = 16
NUM_COPIED = 4  # words of an answer
REQUEST_S = 0.01
TOKEN_S = 0.001


@dataclass(frozen=True)
class FakeRequest:
    """What of a request the cache may depend on."""

    tokens: tuple[str, ...]
    salt: str
    key: str
    weights: str
    adapter: str = ""  # its name
    is_chat: bool = False


@dataclass
class FakeServer:
    """A server without faults. `offers` names what it has besides texts and chats.

    A cache of `max_blocks` blocks has a tier below it.
    """

    offers: frozenset[str] = frozenset({"logprobs", "usage", "salts", "keys", "reasoning", "images"})
    weights: str = "one"
    noise: float = 0.0  # of log-probabilities
    now: float = 0.0  # its clock
    blocks: dict = field(default_factory=dict)
    max_blocks: int = 500
    tier: dict = field(default_factory=dict)
    num_stored: int = 0
    adapters: dict = field(default_factory=dict)  # folders, by name
    lock: threading.RLock = field(default_factory=threading.RLock)
    num_requests: int = 0
    bodies: list = field(default_factory=list)  # of requests for answers, as they came

    # ---- the cache: what servers with a fault do in another way

    def root(self, request):
        """Return what a cached block must have in common with a request, besides tokens."""
        return (request.salt, request.key, request.weights)

    def block_key(self, tokens, end):
        """Return by what the block that ends there is found."""
        return tokens[:end]

    def find(self, request):
        """Return the slots of the longest cached beginning, without the last token: it must be computed."""
        slots = []
        for end in range(BLOCK, len(request.tokens), BLOCK):
            block = self.lookup((self.root(request), self.block_key(request.tokens, end)))
            if block is None:
                break
            slots += block
        return slots

    def lookup(self, key):
        """Return the slots of a block, in the cache or the tier."""
        return self.blocks.get(key) or self.tier.get(key)

    def first_position(self, num_cached):
        """Return the position of the first token that is computed."""
        return num_cached

    def store(self, request, slots):
        """Keep whole blocks."""
        for end in range(BLOCK, len(slots) + 1, BLOCK):
            key = (self.root(request), self.block_key(request.tokens, end))
            self.blocks.setdefault(key, slots[end - BLOCK : end])
        while len(self.blocks) > self.max_blocks:
            key = next(iter(self.blocks))
            self.tier[key] = self.blocks.pop(key)
            self.num_stored += 1

    def flush(self):
        """Empty the cache."""
        self.blocks.clear()

    def reset(self):
        """Empty the cache and the tier."""
        self.blocks.clear()
        self.tier.clear()

    def reload(self):
        """Load other weights; the cache stays, and its blocks are not found."""
        self.weights = "two"

    # ---- the answer

    def complete(self, request, num_words):
        """Return the answer as pairs of word and log-probability, and the number of cached tokens."""
        slots = self.find(request)
        num_cached = len(slots)
        fresh = self.fresh(request.tokens, num_cached)
        slots = slots + self.compute(fresh, self.first_position(num_cached), slots, request.weights)
        self.spend(num_cached, len(fresh))
        self.store(request, slots)
        return self.decode(slots, request.weights, num_words, num_cached), num_cached

    def fresh(self, tokens, num_cached):
        """Return the tokens that are computed."""
        return tokens[num_cached:]

    def compute(self, tokens, position, slots, weights):
        """Return the slots of tokens behind others."""
        digest = slots[-1][2] if slots else ""
        fresh = []
        for i, token in enumerate(tokens):
            digest = blake2b(f"{digest} {token} {position + i} {weights}".encode(), digest_size=8).hexdigest()
            fresh.append((token, position + i, digest))
        return fresh

    def spend(self, num_cached, num_fresh):
        """Let the time of a request pass."""
        self.now += REQUEST_S + TOKEN_S * num_fresh

    def logprob(self, digest, num_cached):
        """Return the log-probability of a token."""
        return -0.1 - 2.0 * (digest % 1000) / 1000

    def decode(self, slots, weights, num_words, num_cached):
        words = [word for word, _, _ in slots]
        quote = words[-3:]
        starts = [i for i in range(len(words) - 6) if words[i : i + 3] == quote]
        copied = words[starts[0] + 3 : starts[0] + 3 + NUM_COPIED] if starts else []
        state = blake2b(repr((weights, slots)).encode(), digest_size=8)
        answer = []
        for i in range(num_words):
            digest = int.from_bytes(blake2b(state.digest() + bytes([i]), digest_size=8).digest(), "big")
            word = copied[i] if i < len(copied) else WORDS[digest % len(WORDS)]
            noise = self.noise * (self.num_requests % 2)
            answer.append((word, self.logprob(digest >> 16, num_cached) + noise))
        return answer

    # ---- HTTP

    def handle(self, http_request):
        """Answer a request, as a transport of httpx does."""
        if http_request.url.path.endswith("/models"):
            return httpx.Response(200, json={"data": [{"id": "toy"}]})
        if http_request.url.path == "/metrics":
            name = 'retain_tier_transferred_bytes_total{direction="written"}'
            return httpx.Response(200, text=f"# TYPE x counter\nx 1\n{name} {self.num_stored}\n")
        self.bodies.append(http_request.content)
        body = json.loads(http_request.content)
        if http_request.url.path.endswith("load_lora_adapter"):
            self.adapters.pop(body["lora_name"], None)
            if "lora_path" in body:
                self.adapters[body["lora_name"]] = body["lora_path"]
            return httpx.Response(200, text="Success")
        is_chat = http_request.url.path.endswith("/chat/completions")
        salt = body.get("cache_salt", "") if "salts" in self.offers else ""
        if "opt out" in self.offers and body.get("cache_prompt") is False:
            salt = f"request {self.num_requests}"  # no other request has it
        if not isinstance(salt, str):
            return httpx.Response(400, json={"error": {"message": "cache_salt is no text"}})
        if "no texts" in self.offers and not is_chat:
            return httpx.Response(404, json={"error": {"message": "no such path"}})
        if "images" not in self.offers and "image_url" in str(body.get("messages")):
            return httpx.Response(400, json={"error": {"message": "no images"}})
        tokens = self.tokenize(body, is_chat)
        key = http_request.headers.get("authorization", "") if "keys" in self.offers else ""
        with self.lock:
            self.num_requests += 1
            adapter = body.get("model", "")
            weights = f"{self.weights} {self.adapters[adapter]}" if adapter in self.adapters else self.weights
            request = FakeRequest(tokens, salt, key, weights, adapter, is_chat)
            pieces, cached = self.complete(request, body.get("max_tokens", 4))
        pieces = self.deliver(pieces)
        usage = {"prompt_tokens": len(tokens), "completion_tokens": len(pieces)}
        if "usage" in self.offers:
            usage["prompt_tokens_details"] = {"cached_tokens": self.counted(cached)}
        if body.get("stream"):
            return self.stream(is_chat, pieces, usage)
        choice = {"finish_reason": "length", **self.piece(is_chat, pieces, "message")}
        return httpx.Response(200, json={"choices": [choice], "usage": usage})

    def counted(self, num_cached):
        """Return the cached tokens that usage counts."""
        return num_cached

    def deliver(self, pieces):
        """Return the answer that goes out."""
        return pieces

    def tokenize(self, body, is_chat):
        if not is_chat:
            return ("<s>", *body["prompt"].split())
        turns = ((f"<{m['role']}>", *self.words_of(m["content"]), "</>") for m in body["messages"])
        return ("<s>", *itertools.chain.from_iterable(turns), "<assistant>")

    def words_of(self, content):
        """Return the words of a turn; an image is one word."""
        if isinstance(content, str):
            return content.split()
        image, text = content
        return [f"<image {image['image_url']['url'][-60:]}>", *text["text"].split()]

    def piece(self, is_chat, pieces, name):
        """Return a choice's fields of a part of an answer."""
        text = "".join(f" {word}" for word, _ in pieces)
        fields = {name: {"content": text}} if is_chat else {"text": text}
        if is_chat and name == "message" and "reasoning" in self.offers:
            thought, _, rest = text[1:].partition(" ")
            fields[name] = {"reasoning_content": f" {thought}", "content": f" {rest}" if rest else ""}
        if "logprobs" not in self.offers:
            return fields
        tops = [[(f" {word}", p), (" other", p - 5)] for word, p in pieces]
        if is_chat:
            keys = ("token", "logprob")
            content = [
                {**dict(zip(keys, top[0], strict=True)), "top_logprobs": [dict(zip(keys, t, strict=True)) for t in top]}
                for top in tops
            ]
            return {**fields, "logprobs": {"content": content}}
        names, values = ([top[0][i] for top in tops] for i in (0, 1))
        return {
            **fields,
            "logprobs": {"tokens": names, "token_logprobs": values, "top_logprobs": [dict(top) for top in tops]},
        }

    def streamed(self, pieces):
        """Return the pieces that a stream has."""
        return pieces

    def stream(self, is_chat, pieces, usage):
        events = [{"choices": [self.piece(is_chat, [piece], "delta")]} for piece in self.streamed(pieces)]
        events += [{"choices": [{"text": "", "finish_reason": "length"}]}, {"choices": [], "usage": usage}]
        data = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        return httpx.Response(200, text=f"{data}data: [DONE]\n\n")


class StaleAfterEdit(FakeServer):
    """A block is found by its last words, its place and the text's beginning: it is stale after an edit before them."""

    def block_key(self, tokens, end):
        return (tokens[:6], tokens[end - 4 : end], end)


class OffByOneAtBlockEnd(FakeServer):
    """A prompt whose words fill its blocks is found whole, and its last token is computed again behind its end."""

    def find(self, request):
        slots = super().find(request)
        num_left = len(request.tokens) - len(slots)
        last = self.blocks.get((self.root(request), request.tokens), []) if num_left == BLOCK else []
        return slots + last

    def fresh(self, tokens, num_cached):
        return tokens[min(num_cached, len(tokens) - 1) :]


class HitIgnoresSalt(FakeServer):
    """Texts are found under every salt."""

    def root(self, request):
        return (request.key, request.weights)


@dataclass
class LeaksAtFirst(FakeServer):
    """Some long texts, the first ones, are found under every salt: as if load hid what computing them takes."""

    num_leaking: int = 0
    long_texts: dict = field(default_factory=dict)  # in the order of their first requests

    def root(self, request):
        long = self.long_texts
        if len(request.tokens) > 200:
            long.setdefault(request.tokens, len(long))
        is_leaking = long.get(request.tokens, self.num_leaking) < self.num_leaking
        return ("" if is_leaking else request.salt, request.key, request.weights)


class HitIgnoresKey(FakeServer):
    """Texts are found by every API key."""

    def root(self, request):
        return (request.salt, request.weights)


class WrongPositionsAfterHit(FakeServer):
    """Tokens behind a hit are computed one position too far."""

    def first_position(self, num_cached):
        return num_cached + (num_cached > 0)


class PartialBlockShared(FakeServer):
    """The last block of a text is found by what is before it, although it is not full and goes on in another way."""

    def find(self, request):
        slots = super().find(request)
        partial = self.blocks.get((self.root(request), "partial", request.tokens[: len(slots)]), [])
        return slots + partial[: len(request.tokens) - len(slots) - 1]

    def store(self, request, slots):
        super().store(request, slots)
        end = len(slots) // BLOCK * BLOCK
        if 0 < end < len(slots):
            self.blocks[self.root(request), "partial", request.tokens[:end]] = slots[end:]


class ConcurrentSwap(FakeServer):
    """Two requests in flight get each other's answer."""

    waiting = None

    def deliver(self, pieces):
        mine = [pieces, None]
        with self.lock:
            other = self.waiting
            if other:
                other[1] = pieces
                self.waiting = None
                return other[0]
            self.waiting = mine
        time.sleep(0.003)  # in which another request may come
        with self.lock:
            if self.waiting is mine:
                self.waiting = None
        return mine[1] or pieces


class StreamDropsLast(FakeServer):
    """The last piece of a stream is lost."""

    def streamed(self, pieces):
        return pieces[:-1]


class UsageClaimsHits(FakeServer):
    """What usage counts as cached is computed again."""

    def spend(self, num_cached, num_fresh):
        super().spend(0, num_cached + num_fresh)


class UsageHidesHits(FakeServer):
    """Usage counts few of the cached tokens, now fewer and now more."""

    def counted(self, num_cached):
        return num_cached and 4 * (1 + self.num_requests % 2)


class SurvivesReload(FakeServer):
    """Blocks of the earlier weights are found after other weights were loaded."""

    def root(self, request):
        return (request.salt, request.key)


class SiblingTail(FakeServer):
    """A block is found by what is before it and its first word: the other words may be those of a sibling."""

    def block_key(self, tokens, end):
        return tokens[: max(end - BLOCK + 1, BLOCK)]


class OtherLogprobsOnHit(FakeServer):
    """Log-probabilities are lower where the prompt was cached."""

    def logprob(self, digest, num_cached):
        return super().logprob(digest, num_cached) - 0.3 * (num_cached > 0)


class ResetForgetsTier(FakeServer):
    """A reset empties the cache, and not the tier that has a copy of each block."""

    def store(self, request, slots):
        super().store(request, slots)
        self.tier.update(self.blocks)

    def reset(self):
        self.blocks.clear()


class StoresWithoutServing(FakeServer):
    """Blocks that leave the cache are stored, and never found."""

    def lookup(self, key):
        return self.blocks.get(key)


class AdaptersByName(FakeServer):
    """What an adapter computes is found by its name."""

    def root(self, request):
        return (request.salt, request.key, request.weights.split()[0], request.adapter)


class AdaptersShareTheModel(FakeServer):
    """What the model has computed is found with adapters, and the other way round."""

    def root(self, request):
        return (request.salt, request.key, request.weights.split()[0])


class ReasoningIsHistory(FakeServer):
    """A chat is found only as a whole, with what was thought, or by the same prompt."""

    def find(self, request):
        slots = super().find(request)
        has_turns = request.tokens.count("</>") > 1
        return [] if request.is_chat and has_turns else slots


class ImagesShareKeys(FakeServer):
    """A block is found whatever its images are."""

    def block_key(self, tokens, end):
        return tuple("<image>" if token.startswith("<image ") else token for token in tokens[:end])
