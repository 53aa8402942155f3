"""Replicas without Ray: which replica a request goes to, what replicas share, and options that cannot work."""

import asyncio
import json
import os
import re
import subprocess
import sys

import pytest

from retain.cluster import haproxy, routing
from retain.cluster.affinity import prefix_key
from retain.cluster.arguments import parse_arguments
from retain.cluster.config import ClusterConfig, ClusterSettings
from retain.cluster.cores import claim_index, share_of_cores
from retain.cluster.haproxy import configure_haproxy, header_rules
from retain.cluster.metrics import label_pages
from retain.cluster.routing import ReplicaLoads, choose, rank
from retain.config import Config
from retain.server.config import ServerConfig
from tests.helpers.cli import assert_one_line_error, run_cli

REPLICAS = [f"replica-{i}" for i in range(8)]
KEYS = [f"key-{i}" for i in range(400)]


# ---- the router ------------------------------------------------------------------------------------------------------


def test_a_replica_that_goes_moves_only_its_own_keys():
    first = {key: rank(key, REPLICAS)[0] for key in KEYS}
    left = REPLICAS[1:]
    assert set(first.values()) == set(REPLICAS)
    for key in KEYS:
        again = rank(key, left)[0]
        assert again == first[key] if first[key] in left else again in left
    moved = {rank(key, left)[0] for key in KEYS if first[key] == REPLICAS[0]}
    assert len(moved) > 1, "the keys of the replica that went are spread"


def test_rank_depends_on_no_order():
    assert rank("key", REPLICAS) == rank("key", REPLICAS[::-1])


def test_a_key_leaves_its_replica_only_where_that_has_too_much():
    idle = dict.fromkeys(REPLICAS, 0)
    first, *rest = rank("key", REPLICAS)
    assert choose(idle, "key", spread=4) == first
    assert choose({**idle, first: 4}, "key", spread=4) == first
    busy = {**dict.fromkeys(REPLICAS, 1), first: 9, rest[3]: 0}
    assert choose(busy, "key", spread=4) == rest[3]
    assert choose(busy, "key", spread=float("inf")) == first


def test_requests_without_a_key_go_to_the_least_loaded_replicas():
    assert choose({"a": 2, "b": 1, "c": 2}, None, spread=0) == "b"
    assert {choose({"a": 1, "b": 1, "c": 2}, None, spread=0) for _ in range(100)} == {"a", "b"}


class Replicas:
    """Answers of replicas about their requests, and how often they were asked."""

    def __init__(self, **counts: int):
        self.counts, self.num_questions, self.is_busy, self.may_answer = counts, 0, False, asyncio.Event()
        self.may_answer.set()

    async def ask(self) -> list[tuple[str, int]]:
        self.num_questions += 1
        await self.may_answer.wait()
        if self.is_busy:
            raise TimeoutError
        return list(self.counts.items())


def test_requests_at_once_ask_once():
    async def run():
        replicas = Replicas(a=3, b=1)
        loads = ReplicaLoads(replicas.ask)
        assert await asyncio.gather(*(loads.get() for _ in range(5))) == [{"a": 3, "b": 1}] * 5
        assert replicas.num_questions == 1
        replicas.counts["b"] = 2
        await asyncio.sleep(routing.REFRESH_S * 3)
        assert await loads.get() == {"a": 3, "b": 2}

    asyncio.run(run())


def test_a_replica_that_ended_is_forgotten_and_a_busy_one_is_not():
    async def run():
        replicas = Replicas(a=3, b=1)
        loads = ReplicaLoads(replicas.ask)
        await loads.get()
        replicas.is_busy = True
        await asyncio.sleep(routing.REFRESH_S * 3)
        assert await loads.get() == {"a": 3, "b": 1}
        replicas.is_busy = False
        del replicas.counts["b"]
        await asyncio.sleep(routing.REFRESH_S * 3)
        assert await loads.get() == {"a": 3}

    asyncio.run(run())


def test_replicas_that_hang_delay_no_request_for_long(monkeypatch):
    monkeypatch.setattr(routing, "WAIT_S", 0.05)
    monkeypatch.setattr(routing, "FIRST_WAIT_S", 0.1)

    async def run():
        replicas = Replicas(a=3)
        loads = ReplicaLoads(replicas.ask)
        replicas.may_answer.clear()
        assert await loads.get() == {}
        replicas.may_answer.set()
        assert await loads.get() == {"a": 3}
        replicas.may_answer.clear()
        await asyncio.sleep(routing.REFRESH_S * 2)
        assert await loads.get() == {"a": 3}

    asyncio.run(run())


# ---- HAProxy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forward_body", "condition"),
    [
        (True, "{ req.hdr(x-session-id) -m found } known or METH_POST known"),
        (False, "{ req.hdr(x-session-id) -m found } known"),
    ],
)
def test_haproxy_shows_statistics_to_this_machine_only_and_asks_for_routes(
    tmp_path, monkeypatch, forward_body, condition
):
    config = tmp_path / "haproxy.cfg"
    config.write_text(
        "frontend prometheus\n    bind :9101\nfrontend http_frontend\n    bind *:8000\n"
        "    http-request lua.route_via_ingress_request_router if METH_POST known\nlisten stats\n  bind *:8404\n"
    )
    monkeypatch.setattr(haproxy, "_find_binary", lambda: "/bin/echo")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    configure_haproxy(tmp_path, forward_body)
    script = os.environ["RAY_SERVE_HAPROXY_BINARY_PATH"]
    done = subprocess.run([script, "-db", "-f", str(config), "-sf", "7"], capture_output=True, text=True, check=True)
    assert done.stdout == f"-db -f {config} -sf 7\n"
    assert re.findall(r"bind (\S+)", config.read_text()) == ["127.0.0.1:9101", "*:8000", "127.0.0.1:8404"]
    assert re.findall(r"router if (.*)", config.read_text()) == [condition]
    _, before, _ = re.split(r"bind \*:8000\n|    http-request lua", config.read_text())
    assert before == "".join(header_rules()) and before.count("set-header x-session-id ") == 1


# ---- the key of a text -----------------------------------------------------------------------------------------------


def key_of(num_chars: int = 40, **fields: object) -> str | None:
    return prefix_key(json.dumps(fields).encode(), num_chars)


def test_texts_with_an_equal_beginning_have_one_key():
    assert key_of(prompt="a" * 40 + "b") == key_of(prompt="a" * 40 + "c") != key_of(prompt="a" * 39 + "c")
    assert key_of(prompt=[1] * 10 + [2]) == key_of(prompt=[1] * 10 + [3]) != key_of(prompt=[1] * 9 + [3])
    assert key_of(prompt=["x", "y"]) == key_of(prompt="x")


def test_a_salt_separates_equal_texts():
    assert key_of(prompt="a text", cache_salt="s") != key_of(prompt="a text")


def test_every_turn_of_a_conversation_has_one_key():
    system, first = {"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"text": "Hi"}]}
    later = [{"role": "assistant", "content": "Hello"}, {"role": "user", "content": "More"}]
    assert key_of(messages=[system, first]) == key_of(messages=[system, first, *later])
    assert key_of(messages=[first]) != key_of(messages=[system, first]) != key_of(messages=[system, later[1]])
    assert key_of(system="s", messages=[first]) == key_of(system=[{"text": "s"}], messages=[first, *later])
    assert key_of(instructions="s", input="Hi") != key_of(instructions="t", input="Hi")


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b'{"model": "m"}', b'{"messages": [3, {"content": 4}]}', b"\xff"])
def test_a_body_without_text_has_no_key_or_any(body):
    prefix_key(body, 40)
    assert body.startswith(b'{"messages"') or prefix_key(body, 40) is None


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
    (first, lock), (second, _other) = claim_index(tmp_path / "a"), claim_index(tmp_path / "a")
    lock.close()
    assert (first, second, claim_index(tmp_path / "a")[0], claim_index(tmp_path / "b")[0]) == (0, 1, 0, 0)


def test_metrics_of_replicas_keep_their_samples_under_one_header():
    page = b'# HELP m_total Help\n# TYPE m_total counter\nm_total 1.0\n# TYPE g gauge\ng{a="x y"} 2.0\n'
    text = label_pages({"r1": page, "r2": page}).decode()
    assert text.splitlines() == [
        "# HELP m_total Help",
        "# TYPE m_total counter",
        'm_total{replica="r1"} 1.0',
        'm_total{replica="r2"} 1.0',
        "# TYPE g gauge",
        'g{replica="r1",a="x y"} 2.0',
        'g{replica="r2",a="x y"} 2.0',
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
    settings = parse_arguments(given, {})
    assert (settings.cluster.replicas, settings.engine.kv_memory) == (3, 64 * 2**20)
    assert settings.engine.tier == ("ram:capacity=1MiB",) and settings.server.limits.request_timeout == 60.0
    assert settings.server.insecure_no_api_key and len(settings.server.api_keys) == 1
    assert settings.max_ongoing_requests > settings.engine.max_running_requests + 9
    assert settings.graceful_shutdown_s > 5
    for wrong in ({"replica": 2}, {"replicas": "two"}, {"replicas": 1.5}, {"max_connections": 3}, {"kv_memory": "x"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            parse_arguments({"model": "random:tiny", **wrong}, {})
    with pytest.raises(ValueError, match="model"):
        parse_arguments({}, {})


def test_each_replica_has_a_disk_store_of_its_own():
    def settings(path: str, replicas: int) -> ClusterSettings:
        config = Config("random:tiny", tier=(f"disk:path={path},capacity=1GiB", "ram:capacity=1GiB"))
        return ClusterSettings(config, ServerConfig(), ClusterConfig(replicas=replicas))

    stores = [settings("/store/{replica}", 2).engine_of(i).tier[0] for i in range(2)]
    assert stores == ["disk:path=/store/0,capacity=1GiB", "disk:path=/store/1,capacity=1GiB"]
    assert settings("/store", 1).engine_of(0).tier[0] == "disk:path=/store,capacity=1GiB"
    with pytest.raises(ValueError, match=r"\{replica\}"):
        settings("/store", 2)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--replicas", "0"), "replicas: must be at least 1"),
        (("--affinity", "ip"), "affinity is session or prefix"),
        (("--min-replicas", "2"), "max_replicas"),
        (("--replicas", "4", "--max-replicas", "3"), "max_replicas (3)"),
        (("--replicas", "2", "--inspect"), "--inspect"),
        (("--replicas", "2", "--tier", "disk:path=store,capacity=1GiB"), "{replica}"),
        (("--host", "0.0.0.0"), "--insecure-no-api-key"),
        (("--max-connections", "7"), "unrecognized arguments"),
    ],
)
def test_invalid_option_prints_one_line(capsys, options, expected):
    assert_one_line_error(run_cli(capsys, "cluster", "up", "--model", "random:tiny", *options), expected)


def test_without_ray_one_line_says_what_to_install():
    code = "import sys; sys.modules['ray'] = None; from retain.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "cluster", "up", "--model", "random:tiny"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "retain: replicas need the package ray: pip install 'retain[serve,ray]'\n"


def test_importing_the_package_imports_no_ray():
    code = "import sys, retain.cluster, retain.cli.args; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.slow
def test_a_replica_imports_torch_only_when_it_is_built():
    """OpenMP reads the cores of a replica when torch is imported, and Ray imports this module before that."""
    code = "import sys, retain.cluster.replica, retain.cluster.router; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
