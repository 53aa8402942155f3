"""`retain cachecheck` finds no fault in this server: drafts, windows, tiers, restarts, keys, budgets that resume."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from cachecheck.config import CachecheckConfig
from cachecheck.results import Outcome
from cachecheck.runner import RunEnvironment, run_checks
from retain.server.auth import ApiKeys
from tests.helpers.adapters import write_adapter
from tests.helpers.cli import run_cli
from tests.helpers.folders import save_tiny_smollm2
from tests.helpers.tiers import disk_spec
from tests.server.conftest import API_KEYS, HTTP, run_server

ENGINE = {"kv_memory": "64MiB", "dtype": "float32", "max_model_len": 2048}
EXACT = 1e-5  # nats: bodies have rounded numbers


def outcomes(url, checks=(), keys=(None,), environment=None, **options):
    """Run checks, find no fault, and return the outcome of each."""
    config = CachecheckConfig(checks=checks, seed=5, tolerance=EXACT, **options)
    report = run_checks(url, config, keys, environment or RunEnvironment())
    assert report.exit_code == 0, report.to_table()
    return {result.name: result.outcome for result in report.results}


@pytest.mark.parametrize(
    ("options", "reference", "checks"),
    [
        ({"speculate": "ngram"}, "cold", ("lengths", "streams", "concurrency", "salts")),
        ({"kv_policy": "h2o:budget=64"}, "replay", ("branches",)),
    ],
)
def test_answers_are_those_without_a_cache(options, reference, checks, tiny_smollm2):
    with run_server(tiny_smollm2, {**ENGINE, **options}) as server:
        found = outcomes(server.url, checks, reference=reference)
    assert set(found.values()) == {Outcome.PASSED}


def test_sliding_layers_and_small_slots_go_on_from_what_is_cached(tmp_path):
    folder = str(save_tiny_smollm2(tmp_path, "gemma3_text"))
    with run_server(folder, {**ENGINE, "kv_dtype": "int8"}) as server:
        assert set(outcomes(server.url, ("edits", "rounds")).values()) == {Outcome.PASSED}


def test_tiers_survive_a_restart_and_keep_weights_apart(tmp_path, tiny_smollm2):
    """A pool that holds a part of the texts, memory and a disk below it; then other weights over the same disk."""
    tiers = ["ram:capacity=4MiB", disk_spec(tmp_path / "store", "1GiB")]
    options = {**ENGINE, "kv_memory": "4MiB", "max_running_requests": 8, "tier": tiers}
    (tmp_path / "other").mkdir()
    folders = {"restart": tiny_smollm2, "reload": str(save_tiny_smollm2(tmp_path / "other", "qwen3"))}
    with ExitStack() as first, ExitStack() as later:
        server = first.enter_context(run_server(tiny_smollm2, options))
        port = int(server.url.rpartition(":")[2].partition("/")[0])

        def run_command(command, timeout):
            first.close()
            later.close()
            later.enter_context(run_server(folders[command], options, port=port))

        checks = ("rounds", "restart", "reload")
        commands = {"restart_command": "restart", "reload_command": "reload"}
        found = outcomes(server.url, checks, environment=RunEnvironment(run_command=run_command), **commands)
    assert set(found.values()) == {Outcome.PASSED}


def test_adapters_images_and_tiers_are_right(tmp_path, tiny_smollm2):
    """Two adapters of one name, images that are refused, and a tier that serves what left a small pool."""
    folders = tuple(
        str(write_adapter(tmp_path / name, Path(tiny_smollm2), ["k_proj", "down_proj"], seed))
        for seed, name in enumerate(("one", "other"))
    )
    options = {**ENGINE, "kv_memory": "4MiB", "max_running_requests": 8, "max_loras": 1, "tier": ["ram:capacity=64MiB"]}
    with run_server(tiny_smollm2, options, allow_lora_updates=True) as server:
        checks = ("adapters", "images", "tiers")
        found = outcomes(server.url, checks, adapters=folders, pressure=20_000)
    assert set(found.values()) == {Outcome.PASSED}


def test_the_command_reports_keys_that_are_kept_apart(tiny_smollm2, capsys, monkeypatch, tmp_path):
    for name, key in zip(("OPENAI_API_KEY", "OPENAI_API_KEY_2"), API_KEYS.values(), strict=True):
        monkeypatch.setenv(name, key)
    with run_server(tiny_smollm2, ENGINE, api_keys=ApiKeys(API_KEYS)) as server:
        junit = tmp_path / "junit.xml"
        code, out, err = run_cli(capsys, "cachecheck", server.url, "--checks", "keys", "--json", "--junit", junit)
    report = json.loads(out)
    assert code == 0 and [c["outcome"] for c in report["checks"]] == ["passed"] and report["cold_answers"] == "salt"
    assert "keys: passed" in err and '<testcase classname="cachecheck" name="keys"' in junit.read_text()


def test_a_reset_forgets_tiers_too(tmp_path, tiny_smollm2):
    """The route that a key may call, as the command that resets a server."""
    options = {**ENGINE, "tier": [disk_spec(tmp_path / "store", "1GiB")]}
    with run_server(tiny_smollm2, options) as server:

        def run_command(command, timeout):
            assert HTTP.post(f"{server.url}/{command}", json={}).status_code == 200

        environment = RunEnvironment(run_command=run_command)
        found = outcomes(server.url, ("reset",), environment=environment, reset_command="cache/reset")
    assert found == {"reset": Outcome.PASSED}
