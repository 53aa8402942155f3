"""`retain model`: print what a model computes, as operations, and what its layers cache."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from contextlib import closing
from dataclasses import fields
from typing import Any, cast

import torch
from torch import Tensor

from retain import models
from retain.cli.args import given_args
from retain.config import Config
from retain.llm import LLM
from retain.models.listing import Listing, Row, count_parameters, find_repeats, list_caches
from retain.models.resolve import resolve_model
from retain.models.weights import open_weights
from retain.sampling_params import SamplingParams
from retain.terminal import escape_controls


def model(args: Namespace) -> int:
    """Print the program of a model; with a text also how large the outputs of its operations are."""
    options = given_args(args, Config)
    dtype = getattr(torch, options.get("dtype", "bfloat16"))
    weights = open_weights(resolve_model(args.model), dtype, options.get("weights", "auto"))
    listing = Listing()
    decoder = models.build(weights, listing)
    rows = listing.rows
    sizes = {
        f.name: getattr(decoder.spec, f.name) for f in fields(decoder.spec) if f.name not in ("caches", "attention")
    }
    caches = list(list_caches(decoder.spec.kv_cache))
    if args.run is not None:
        for row, output in zip(rows, _run(options, args.run), strict=True):
            row["output"] = output
    listed = {"model": args.model, **sizes, "parameters": count_parameters(rows), "caches": caches, "operations": rows}
    if args.json:
        print(json.dumps(listed, default=list, allow_nan=False))
        return 0
    print(
        escape_controls(
            f"{args.model}: {type(decoder).__name__}, {listed['parameters'] / 1e6:.1f} M numbers in weights"
        )
    )
    print("  " + ", ".join(f"{name} {value}" for name, value in sizes.items()))
    _print_parts("caches", caches, _format_cache)
    _print_parts("operations", rows, _format_operation)
    return 0


def _run(options: dict[str, Any], text: str) -> list[Row]:
    """Compute a prompt by the reference backend. Returns the size of what each operation writes in the last step."""
    llm = LLM(**{**options, "backend": "reference", "device": "cpu", "prefix_cache": "off"})
    outputs: list[Row] = []
    with closing(llm):
        program = cast(Any, llm.program)
        program.computes = [(out, _observed(compute, outputs)) for out, compute in program.computes]
        llm.generate(text, SamplingParams(max_tokens=1))
    return outputs[-len(program.computes) :]


def _observed(compute: Any, outputs: list[Row]) -> Any:
    def observe(step: Any) -> Tensor:
        rows: Tensor = compute(step)
        numbers = rows.float()
        is_unwritten = numbers.isnan().all(0)  # columns that a later operation fills
        numbers = numbers if is_unwritten.all() else numbers[:, ~is_unwritten]
        written = numbers[numbers.isfinite()]
        largest = written.abs().max().item() if len(written) else 0.0
        rms = written.square().mean().sqrt().item() if len(written) else 0.0
        outputs.append({"rms": rms, "largest": largest, "not_finite": numbers.numel() - len(written)})
        return rows

    return observe


def _print_parts(title: str, rows: Sequence[Row], format_row: Any) -> None:
    """Print rows, and parts that repeat once."""
    print(f"\n{title} ({len(rows)})")
    shown = [{k: v for k, v in row.items() if k not in ("layer", "output")} for row in rows]
    has_outputs = any("output" in row for row in rows)
    parts = [(i, 1, 1) for i in range(len(rows))] if has_outputs else find_repeats(shown)
    for begin, length, times in parts:
        if times > 1:
            print(f"  {times} times:")
        for row in rows[begin : begin + length]:
            print(escape_controls(("    " if times > 1 else "  ") + format_row(row)))


def _format_cache(row: Row) -> str:
    sizes = ", ".join(f"{k} {v}" for k, v in row.items() if k not in ("cache", "layer", "kind"))
    return f"cache {row['cache']}, layer {row['layer']}: {row['kind']}, {sizes}"


def _format_operation(row: Row) -> str:
    buffers = dict(row["buffers"])
    name, width = buffers.pop("out")
    inputs = ", ".join(f"{x} [{n}]" for x, n in buffers.values())
    weights = [
        f"{name} {'x'.join(map(str, w['shape']))} {w['format']} {_format_bytes(w['bytes'])}"
        for name, w in row["weights"].items()
    ]
    constants = [f"{k}={_short(v)}" for k, v in row["constants"].items() if v is not False]
    caches = [f"{k} {row[k]}" for k in ("cache", "caches") if k in row]
    output = row.get("output")
    found = [f"rms {output['rms']:.4g}", f"largest {output['largest']:.4g}"] if output else []
    found += [f"{output['not_finite']} numbers not finite"] if output and output["not_finite"] else []
    details = "; ".join([*found, *caches, *weights, *constants])
    return f"{row['op']:<15} {f'{inputs} -> ' if inputs else ''}{name} [{width}]  {details}".rstrip()


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _format_bytes(n: int) -> str:
    return f"{n / 2**20:.1f} MiB" if n >= 2**19 else f"{n} B"
