"""Replicas without a cluster: what they share, and options that cannot work."""

import os
import subprocess
import sys

import pytest

from retain.cli.cluster import parse_options
from retain.cluster.config import ClusterConfig, ClusterSettings
from retain.config import Config
from retain.server.config import ServerConfig
from retain.threads import share_of_cores

# ---- what replicas share ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_cores", "num_shares"), [(8, 2), (7, 3), (4, 4), (2, 3), (1, 2)])
def test_replicas_divide_the_cores(num_cores, num_shares):
    shares = [list(share_of_cores(range(num_cores), i, num_shares)) for i in range(num_shares)]
    assert all(len(share) == max(num_cores // num_shares, 1) for share in shares)
    used = [core for share in shares for core in share]
    assert len(used) == len(set(used)) or num_shares > num_cores
    assert share_of_cores(range(num_cores), num_shares, num_shares) == range(num_cores)[: len(shares[0])]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no CPU affinity here")
def test_a_pinned_process_stays_on_its_cores():
    code = """
import os
from retain.threads import pin_to_cores, reset_cpu_affinity
core = max(os.sched_getaffinity(0))
pin_to_cores([core])
reset_cpu_affinity()
assert os.sched_getaffinity(0) == {core} and os.environ["OMP_NUM_THREADS"] == "1"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_claimed_index_is_free_again_when_its_owner_ends(tmp_path):
    claim_index = pytest.importorskip("retain.cluster.replica").claim_index
    (first, lock), (second, _other) = claim_index(tmp_path / "a"), claim_index(tmp_path / "a")
    lock.close()
    assert (first, second, claim_index(tmp_path / "a")[0], claim_index(tmp_path / "b")[0]) == (0, 1, 0, 0)


def test_metrics_of_replicas_keep_their_samples_under_one_header():
    page = b'# HELP m_total Help\n# TYPE m_total counter\nm_total 1.0\n# HELP g \n# TYPE g gauge\ng{a="x y"} 2.0\n'
    text = pytest.importorskip("retain.cluster.replica").label_pages({"r1": page, "r2": page}).decode()
    assert text.splitlines() == [
        "# HELP m_total Help",
        "# TYPE m_total counter",
        'm_total{replica="r1"} 1.0',
        'm_total{replica="r2"} 1.0',
        "# HELP g ",
        "# TYPE g gauge",
        'g{a="x y",replica="r1"} 2.0',
        'g{a="x y",replica="r2"} 2.0',
    ]


# ---- options ---------------------------------------------------------------------------------------------------------


def test_options_of_a_serve_config_are_those_of_the_command_line(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("ann sk-ann-0123456789\n")
    keys.chmod(0o600)
    given = {
        "model": "random:tiny",
        "replicas": "3",
        "kv_memory": "64MiB",
        "tier": ["ram:capacity=1MiB"],
        "drain_timeout": 5,
        "request_timeout": 60,
        "max_queued_requests": 9,
        "insecure_no_api_key": "true",
        "api_keys": str(keys),
    }
    settings = parse_options(given)
    assert (settings.cluster.replicas, settings.engine.kv_memory) == (3, 64 * 2**20)
    assert settings.engine.tier == ("ram:capacity=1MiB",) and settings.server.limits.request_timeout == 60.0
    assert settings.server.insecure_no_api_key and len(settings.server.api_keys) == 1
    assert settings.server.limits.max_queued_requests == 9
    assert settings.graceful_shutdown_s > 5
    for wrong in ({"replica": 2}, {"replicas": "two"}, {"replicas": 1.5}, {"max_connections": 3}, {"kv_memory": "x"}):
        with pytest.raises(ValueError, match="--" + next(iter(wrong)).replace("_", "-")):
            parse_options({"model": "random:tiny", **wrong})
    with pytest.raises(ValueError, match="model"):
        parse_options({})


def test_each_replica_has_a_disk_store_of_its_own():
    def settings(path: str, replicas: int) -> ClusterSettings:
        config = Config("random:tiny", tier=(f"disk:path={path},capacity=1GiB", "ram:capacity=1GiB"))
        return ClusterSettings(config, ServerConfig(), ClusterConfig(replicas=replicas))

    stores = [settings("/store/{replica}", 2).engine_of(i).tier[0] for i in range(2)]
    assert stores == ["disk:path=/store/0,capacity=1GiB", "disk:path=/store/1,capacity=1GiB"]
    assert settings("/store", 1).engine_of(0).tier[0] == "disk:path=/store,capacity=1GiB"
    with pytest.raises(ValueError, match=r"\{replica\}"):
        settings("/store", 2)


def test_without_ray_one_line_says_what_to_install():
    code = "import sys; sys.modules['ray'] = None; from retain.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "cluster", "up", "--model", "random:tiny"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "retain: replicas need the package ray: pip install 'retain[serve,ray]'\n"


def test_importing_the_package_imports_no_ray():
    code = "import sys, retain.cli.cluster, retain.cluster.launch; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.slow
def test_a_replica_imports_torch_only_when_it_is_built():
    """OpenMP reads the cores of a replica when torch is imported, and Ray imports this module before that."""
    code = "import sys, retain.cluster.replica; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_each_rank_of_a_replica_has_a_gpu_or_none_has():
    config = Config("random:tiny", tensor_parallel=2)
    for gpus in (0, 2, 4):
        ClusterSettings(config, ServerConfig(), ClusterConfig(gpus=gpus))
    with pytest.raises(ValueError, match="2 ranks of a replica take a GPU each: raise --gpus"):
        ClusterSettings(config, ServerConfig(), ClusterConfig(gpus=1))
