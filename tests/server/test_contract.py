"""What is promised at /openapi.json is what is done, whatever is sent: schemathesis asks."""

import subprocess
import sys
from pathlib import Path

import pytest

from retain.server.admission import Limits
from tests.server.conftest import ENGINE_OPTIONS, run_server

# A schema cannot say which policies, JSON schemas and lengths make sense: those that do not are 400, as it does say.
EXCLUDED_CHECK = "positive_data_acceptance"


@pytest.fixture(scope="module")
def server():
    """One that gives short answers only: long ones show nothing more."""
    with run_server(
        engine={**ENGINE_OPTIONS, "context": 256, "dtype": "bfloat16"},
        limits=Limits(max_output_tokens=8, max_choices=2),
    ) as up:
        yield up


def test_openapi_contract_by_schemathesis(server, tmp_path):
    command = [Path(sys.executable).parent / "schemathesis", "run", f"{server.url.removesuffix('/v1')}/openapi.json"]
    options = ["--seed", "1", "--max-examples", "4", "--request-timeout", "60"]
    options += [
        "--phases",
        "examples,coverage,fuzzing",
        "--exclude-checks",
        EXCLUDED_CHECK,
        "--generation-database",
        "none",
    ]
    done = subprocess.run(
        [*command, *options],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert "10 passed" in done.stdout
