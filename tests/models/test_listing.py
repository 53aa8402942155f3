"""`retain model`: a model as a table."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from retain import models
from retain.cli.main import main
from retain.models.listing import Listing, bytes_of, count_parameters, find_repeats, list_caches
from retain.models.weights import Weights
from tests.helpers.decoder_runner import build_model
from tests.helpers.tiny_models import tiny_checkpoint


@pytest.mark.parametrize("family", models.list_families())
def test_a_row_for_each_operation_of_a_program(family: str) -> None:
    weights = Weights(tiny_checkpoint(family), torch.float32)
    listing = Listing()
    decoder = models.build(weights, listing)
    program = build_model(weights).program
    assert len(listing.rows) == len(program.computes)
    assert json.loads(json.dumps(listing.rows, default=list))
    assert count_parameters(listing.rows) > 0
    assert [row["cache"] for row in list_caches(decoder.spec.kv_cache)] == list(range(decoder.spec.num_caches))
    used = [c for row in listing.rows for c in (*row.get("caches", ()), *([row["cache"]] if "cache" in row else []))]
    assert used == list(range(decoder.spec.num_caches)), "each cache is used once, in order"


@pytest.mark.parametrize("quantization", ["auto", "bf16", "int8", "int4"])
def test_bytes_of_weights_are_those_of_their_formats(quantization: str) -> None:
    weights = Weights(tiny_checkpoint("llama"), torch.bfloat16, quantization)
    matrix = weights.load_matrix("model.layers.0.mlp.up_proj.weight")
    bits = {"auto": 16, "bf16": 16, "int8": 8.5, "int4": 5}[quantization]
    assert bytes_of(matrix) == pytest.approx(matrix.shape[0] * matrix.shape[1] * bits / 8, rel=0.02)


@given(st.lists(st.integers(0, 2), max_size=40))
def test_parts_that_repeat_cover_a_list(numbers: list[int]) -> None:
    rows: list[dict[str, Any]] = [{"op": n, "cache": i} for i, n in enumerate(numbers)]
    covered: list[int] = []
    for begin, length, times in find_repeats(rows):
        assert begin == len(covered) and length >= 1 and times >= 1
        covered += numbers[begin : begin + length] * times
    assert covered == numbers


def test_the_command_prints_operations_and_their_outputs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "random:tiny"]) == 0
    printed = capsys.readouterr().out
    assert "Attend" in printed and "2 times:" in printed and "FullAttention" in printed
    text = "Hello " * 200  # of several steps the last one has logits
    assert main(["model", "random:tiny", "--run", text, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    outputs = [row["output"] for row in listed["operations"]]
    assert all(output["not_finite"] == 0 and output["largest"] >= output["rms"] > 0 for output in outputs)


def test_a_model_that_is_none_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "nosuch"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
