"""What each fault of an object store costs a request, beside computing its prompt.

    python -m tools.remote_faults --data ../shared/data

The bar: no request later than 1.2 times its computation plus half a second, and the same tokens. The store is the
tests' fake of S3, on loopback. A fault begins when the engine knows what the store has.
"""

from __future__ import annotations

import argparse
import json
import os
from contextlib import closing
from pathlib import Path
from statistics import median

from retain import LLM, SamplingParams
from retain.bench.tasks import load_records
from retain.kv.prefix.cache import PrefixCache
from retain.kv.stores.tiers.remote import RemoteStore
from tests.helpers.fake_s3 import FakeS3, serve_fake_s3
from tests.invariants.test_remote_tier import FAULTS

PARAMS = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)


def open_engine(model: str, s3: FakeS3, name: str) -> tuple[LLM, RemoteStore]:
    """Open an engine on the store, which knows how fast it computes and what the store has."""
    llm = LLM(model, tier=[f"remote:url=s3://bucket/kv,endpoint={s3.url},region=us-east-1"])
    cache = llm.cache.prefix_cache
    assert isinstance(cache, PrefixCache) and cache.offloader
    store = cache.offloader.stores[-1]
    assert isinstance(store, RemoteStore)
    llm.generate(f"{name} is a text that no store has. " * 100, PARAMS)
    store.sync()
    return llm, store


def main() -> None:
    """Print a line for each fault."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with books.jsonl")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompt-chars", type=int, default=28_000)
    args = parser.parse_args()
    os.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    prompt = load_records(args.data, "books")[0]["text"][: args.prompt_chars]
    with closing(LLM(args.model, prefix_cache="off")) as plain:
        outputs = [plain.generate(prompt, PARAMS)[0] for _ in range(3)]
    expected, computing = outputs[0].token_ids, median(output.ttft_s for output in outputs)
    bar = 1.2 * computing + 0.5
    for name in (None, *FAULTS):
        with serve_fake_s3() as s3:
            llm, store = open_engine(args.model, s3, "This")
            llm.generate(prompt, PARAMS)
            store.sync()
            llm.close()
            llm, store = open_engine(args.model, s3, "That")
            if name:
                FAULTS[name](s3)
            (output,) = llm.generate(prompt, PARAMS)
            line = {"fault": name or "none", "equal": output.token_ids == expected, "cached": output.cached_tokens}
            line |= {"ttft_s": round(output.ttft_s, 3), "computing_s": round(computing, 3), "bar_s": round(bar, 3)}
            print(json.dumps(line | {"holds": output.ttft_s <= bar}), flush=True)
            s3.released.set()
            llm.close()


if __name__ == "__main__":
    main()
