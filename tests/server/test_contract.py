"""The server does what /openapi.json promises, whatever is sent: checked by schemathesis."""

import subprocess
import sys
from pathlib import Path

import pytest

from retain.server.config import Limits
from tests.server.conftest import run_tiny_server

# No schema says which policies, JSON schemas and lengths are valid; invalid ones are 400, which the document allows.
EXCLUDED_CHECK = "positive_data_acceptance"


@pytest.mark.slow
def test_openapi_contract_by_schemathesis(tmp_path):
    with run_tiny_server(limits=Limits(max_output_tokens=8, max_choices=2)) as server:
        root = server.url.removesuffix("/v1")
        command = [Path(sys.executable).parent / "schemathesis", "run", f"{root}/openapi.json"]
        command += ["--seed", "1", "--request-timeout", "60"]
        command += ["--exclude-checks", EXCLUDED_CHECK, "--generation-database", "none"]
        # Coverage with valid bodies takes 50 s for 4500 of them; test_bounds.py sends each value of a field instead.
        # Endpoints that render have the bodies of those that generate: the many of coverage are sent to one of both.
        valid = ["--phases", "examples,fuzzing", "--max-examples", "12"]
        invalid = ["--exclude-path-regex", "/render$", "--phases", "coverage", "--mode", "negative"]
        for options, summary in ((valid, "24 passed"), (invalid, "21 passed")):
            done = subprocess.run([*command, *options], capture_output=True, text=True, cwd=tmp_path, timeout=300)
            assert done.returncode == 0, done.stdout[-5000:]
            assert summary in done.stdout
