"""Settings that must be made before torch and Ray are imported, and fixtures that all tests share."""

import gc
import os
import re
import shutil
from pathlib import Path

if hasattr(os, "sched_getaffinity"):
    # With `pytest -n` each worker, and what it starts, gets a core of its own. OpenMP binds their parent to one core.
    # More workers than cores use what is idle while tests of others wait.
    cores = os.environ.setdefault("TEST_CORES", ",".join(map(str, sorted(os.sched_getaffinity(0))))).split(",")
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        number = int(worker.removeprefix("gw"))
        if number < len(cores):
            os.sched_setaffinity(0, {int(cores[number])})
        else:
            os.environ |= {"OMP_NUM_THREADS": "1", "OMP_PROC_BIND": "false"}
os.environ.setdefault("OMP_PROC_BIND", "true")  # threads stay on their cores, as in `retain`
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Folders of tests lie in memory where it is large enough: a busy disk takes 10 ms for each of thousands of writes.
if Path("/dev/shm").is_dir() and shutil.disk_usage("/dev/shm").free >= 4 * 2**30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")

from collections.abc import Generator, Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from retain.cluster.launch import set_environment
from retain.kernels import cpu, triton
from tests.helpers.backend_variants import ISAS, use_isa
from tests.helpers.covering_cases import find_repeated_pairs, is_of_triton_alone, mark_repetitions
from tests.helpers.fake_s3 import FakeS3, serve_fake_s3
from tests.helpers.folders import save_tiny_smollm2
from tests.helpers.stamps import Stamps

if triton.is_interpreted():
    from tests.helpers.fast_interpreter import speed_up

    speed_up()
if ISAS:
    cpu._C.select_isa(ISAS[0])
set_environment()  # Ray's; no module that is imported so far imports it

# No example fails for its time: on a busy machine any may be slow.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test on each instruction set of the cpu backend."""
    with use_isa(request.param):
        yield request.param


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    """A server of objects by Amazon's protocol, and the credentials that clients find for it."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with serve_fake_s3() as served:
        yield served


@pytest.fixture(scope="session")
def tiny_smollm2(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny model with the tokenizer and the chat template of SmolLM2."""
    return str(save_tiny_smollm2(tmp_path_factory.mktemp("tiny_smollm2")))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-case", action="store_true", help="run every combination of parameters")
    parser.addoption("--stamps", action="store_true", help="leave out slow tests of what has not changed")


def pytest_configure(config: pytest.Config) -> None:
    """Look up what has changed since slow tests passed."""
    if config.getoption("stamps") and not config.getoption("every_case"):
        config.pluginmanager.register(Stamps(config))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import what `make check` leaves out as a whole: clients, Ray and transformers take seconds."""
    if config.option.markexpr != "not slow" or collection_path.suffix != ".py":
        return None
    return True if re.search(r"^pytestmark = pytest\.mark\.slow\b", collection_path.read_text(), re.M) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without collections of garbage: imports leave none, and each would look at all they made."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the repetitions of values to `make test`, and those of pairs to `--every-case`."""
    mark_repetitions(items)
    if config.getoption("every_case"):
        return
    has_values_once = is_of_triton_alone if triton.is_interpreted() else lambda case: False
    repeated = set(find_repeated_pairs(items, has_values_once))
    config.hook.pytest_deselected(items=[item for item in items if item in repeated])
    items[:] = [item for item in items if item not in repeated]
