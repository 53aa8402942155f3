"""Slow tests are left out only while nothing that they depend on has changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import stamps
from tests.helpers.stamps import DEPENDENCIES, ROOT, missing_dependencies, part_of, stamp_of

PART = "tests/server/test_replicas.py::"


def test_parts_depend_on_files_that_exist() -> None:
    assert not missing_dependencies()
    assert part_of(f"{PART}test_the_replica_answers_429") == PART
    assert part_of("tests/server/test_serve.py::test_request_timeout") is None


@pytest.mark.parametrize("changed", ["tests/server/test_replicas.py", "src/retain/cluster/replica.py"])
def test_a_stamp_follows_from_files_and_packages(changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tests/server/test_replicas.py", *DEPENDENCIES[PART]):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    before = stamp_of(PART, tmp_path)
    assert before == stamp_of(PART)
    with monkeypatch.context() as without_packages:
        without_packages.setattr(stamps, "distributions", lambda: [])
        assert stamp_of(PART, tmp_path) != before
    (tmp_path / changed).write_text("")
    assert stamp_of(PART, tmp_path) != before


CONFTEST = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tests.helpers import stamps
stamps.DEPENDENCIES = {{"test_part.py::": ()}}
stamps.stamp_of = lambda part: Path("test_part.py").read_text()
def pytest_configure(config): config.pluginmanager.register(stamps.Stamps(config))
"""
TESTS = "import os\ndef test_one(): assert 'FAIL' not in os.environ\ndef test_two(): pass\n"


@pytest.mark.slow
def test_a_part_that_passed_is_left_out_until_it_changes(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_part.py").write_text(TESTS)
    (tmp_path / "test_other.py").write_text("def test_other(): pass\n")

    def run(*args: str, **variables: str) -> str:
        command = [sys.executable, "-m", "pytest", "--rootdir", str(tmp_path), "-n", "1", *args]
        env = {**os.environ, **variables}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        return done.stdout.splitlines()[-1].strip("= ")

    assert run("-k", "one").startswith("1 passed")
    assert run(FAIL="1").startswith("1 failed, 2 passed")
    assert run().startswith("3 passed"), "neither a choice of tests nor a failed part is stamped"
    assert run().startswith("1 passed")
    (tmp_path / "test_part.py").write_text(f"{TESTS}\n")
    assert run().startswith("3 passed")
