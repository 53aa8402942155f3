"""Who may reach what: Host names and addresses without API keys, operators, and paths that need a key."""

import re
import socket

import pytest

from retain.server.auth import ApiKeys, load_api_keys
from retain.server.config import ServerConfig
from retain.server.hosts import HostRule, check_exposure
from retain.server.launch import serve
from tests.server.conftest import API_KEYS, HTTP, INSPECTOR_API_KEYS, run_tiny_server


def root_of(server):
    return server.url.removesuffix("/v1")


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


# ---- without keys ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inspected_server():
    with run_tiny_server(enable_inspector=True, allowed_hosts=("gpu.example.org",)) as running:
        yield running


@pytest.mark.parametrize(
    "host", ["evil.example.com", "evil.example.com:8000", "localhost.evil.com", "10.0.0.1", "", "[::2]"]
)
def test_a_page_of_another_origin_reads_nothing_without_keys(inspected_server, host):
    """DNS rebinding: the page's name resolves to this machine, and its requests come with that name as Host."""
    body = {"model": "smollm2", "prompt": "A secret", "max_tokens": 1}
    assert HTTP.post(f"{inspected_server.url}/completions", json=body).status_code == 200
    for path in ("/inspect/state", "/inspect", "/inspect/playground", "/metrics", "/v1/models", "/openapi.json"):
        response = HTTP.get(root_of(inspected_server) + path, headers={"Host": host})
        assert response.status_code == 403 and "--allow-host" in response.json()["error"]["message"]
    assert HTTP.get(f"{root_of(inspected_server)}/health", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.9.9.9:1", "[::1]:8000", "gpu.example.org:80"]
)
def test_local_and_allowed_names_are_accepted(inspected_server, host):
    assert HTTP.get(f"{inspected_server.url}/models", headers={"Host": host}).status_code == 200


def test_a_name_is_quoted_cut(inspected_server):
    response = HTTP.get(f"{inspected_server.url}/models", headers={"Host": "x" * 5000})
    assert response.status_code == 403 and len(response.text) < 400


def test_with_keys_every_name_is_accepted(secured_server):
    headers = {**bearer(API_KEYS["bob"]), "Host": "gpu.example.org"}
    assert HTTP.get(f"{secured_server.url}/models", headers=headers).status_code == 200


def test_a_server_for_everybody_accepts_addresses_but_no_names():
    rule = HostRule(["gpu"], any_address=True)
    assert all(map(rule.accepts, ("10.0.0.1:80", "[2001:db8::1]:80", "::1", "gpu", "localhost")))
    assert not any(map(rule.accepts, ("evil.com", "10.0.0.1.evil.com", "10.0.0.1:80:80", "[::1]evil.com", "")))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1"])
def test_listening_beyond_this_machine_needs_keys_or_consent(host):
    def load_llm():
        raise AssertionError("refused before the model is loaded")

    with pytest.raises(ValueError, match=r"--api-keys.*--insecure-no-api-key") as error:
        serve(load_llm, ServerConfig(host=host, port=0))
    assert "\n" not in str(error.value)
    check_exposure(host, has_keys=True, insecure=False)
    check_exposure(host, has_keys=False, insecure=True)


def test_listening_on_this_machine_needs_no_keys():
    for host in ("127.0.0.1", "127.5.5.5", "localhost", *(["::1"] if socket.has_ipv6 else [])):
        check_exposure(host, has_keys=False, insecure=False)


# ---- with keys -------------------------------------------------------------------------------------------------------


def test_the_contract_needs_a_key(secured_server):
    root = root_of(secured_server)
    assert HTTP.get(f"{root}/openapi.json").status_code == 401
    assert HTTP.get(f"{root}/openapi.json", headers=bearer(API_KEYS["bob"])).json()["paths"]


def test_no_page_loads_scripts_from_elsewhere(secured_server):
    root, headers = root_of(secured_server), bearer(API_KEYS["bob"])
    for path in ("/docs", "/redoc", "/docs/oauth2-redirect"):
        assert HTTP.get(root + path).status_code == 401 and HTTP.get(root + path, headers=headers).status_code == 404
    page = HTTP.get(f"{root}/inspect").text
    assert not re.search(r"(src|href)=.?(https?:|//)", page)


def test_sums_over_all_keys_are_for_operators(secured_server):
    """ann is an operator, bob is not; see tests/server/conftest.py."""
    root = root_of(secured_server)
    assert HTTP.get(f"{root}/metrics", headers=bearer(API_KEYS["ann"])).status_code == 200
    refused = HTTP.get(f"{root}/metrics", headers=bearer(API_KEYS["bob"]))
    assert refused.status_code == 403 and refused.json()["error"]["type"] == "permission_error"


def test_the_inspector_shows_a_key_only_its_own_sums(secured_server):
    root, body = root_of(secured_server), {"model": "smollm2", "prompt": "x" * 300, "max_tokens": 5, "ignore_eos": True}

    def state_of(name):
        return HTTP.get(f"{root}/inspect/state", headers=bearer({**API_KEYS, **INSPECTOR_API_KEYS}[name])).json()

    before = {name: state_of(name) for name in ("ann", "bob", "dave")}
    headers = bearer(API_KEYS["bob"])
    assert HTTP.post(f"{secured_server.url}/completions", json=body, headers=headers).status_code == 200
    after = {name: state_of(name) for name in before}
    grown = {name: after[name]["generated_tokens"] - before[name]["generated_tokens"] for name in before}
    assert grown == {"ann": 5, "bob": 5, "dave": 0}
    assert after["ann"]["pages"]["cached"] > 0 and sum(after["ann"]["prefix_hits"].values()) >= 0
    for name in ("bob", "dave"):
        assert after[name]["pages"] == {
            s: n and sum(after["ann"]["pages"].values()) for s, n in after[name]["pages"].items()
        }
        assert after[name]["pages"]["cached"] == 0 and after[name]["tiers"] == [] and after[name]["prefix_hits"] == {}


def test_operators_are_named_keys():
    keys = ApiKeys(API_KEYS, operators=["bob"])
    assert [keys.authenticate(f"Bearer {key}").is_operator for key in API_KEYS.values()] == [False, True]
    assert ApiKeys({"only": "sk-0123456789"}).authenticate("Bearer sk-0123456789").is_operator
    with pytest.raises(ValueError, match="'eve'"):
        ApiKeys(API_KEYS, operators=["eve"])


def test_a_key_file_that_others_can_read_is_reported(tmp_path, caplog):
    file = tmp_path / "keys"
    file.write_text("ann sk-ann-0123456789\n")
    file.chmod(0o600)
    load_api_keys(file, {})
    assert not caplog.records
    file.chmod(0o644)
    load_api_keys(file, {})
    (record,) = caplog.records
    assert "mode 644" in record.getMessage() and "sk-ann" not in caplog.text
