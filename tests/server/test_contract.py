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
        command += ["--seed", "1", "--max-examples", "4", "--request-timeout", "60"]
        command += ["--exclude-checks", EXCLUDED_CHECK, "--generation-database", "none"]
        # Endpoints that render have the bodies of those that generate: the many of coverage are sent to one of both.
        generating = ["--exclude-path-regex", "/render$", "--phases", "examples,coverage,fuzzing"]
        rendering = ["--include-path-regex", "/render$", "--phases", "examples,fuzzing"]
        for options, summary in ((generating, "16 passed"), (rendering, "3 passed")):
            done = subprocess.run([*command, *options], capture_output=True, text=True, cwd=tmp_path, timeout=300)
            assert done.returncode == 0, done.stdout[-5000:]
            assert summary in done.stdout
