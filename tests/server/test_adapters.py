"""Adapters (LoRA) that requests name as their model, and that come and go."""

from pathlib import Path

import pytest

from retain import LLM, SamplingParams
from tests.helpers.adapters import write_adapter
from tests.server.conftest import ENGINE_OPTIONS, HTTP, run_server

PROMPT = "Rings of the sea are"


def complete(server, model: str, key: str = "") -> str:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    response = HTTP.post(f"{server.url}/completions", json=body, headers=headers)
    return response.json()["choices"][0]["text"] if response.status_code == 200 else response.json()["error"]["message"]


@pytest.fixture(scope="module")
def adapters(tiny_smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    modules = ["q_proj", "v_proj", "down_proj"]
    return {name: write_adapter(folder / name, Path(tiny_smollm2), modules, seed) for seed, name in enumerate("ab")}


def test_requests_name_adapters_and_operators_change_them(tiny_smollm2: str, adapters: dict[str, Path]) -> None:
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    llm = LLM(tiny_smollm2, **ENGINE_OPTIONS, lora=[f"{name}={folder}" for name, folder in adapters.items()])
    expected = {name: llm.generate(PROMPT, params, lora=name)[0].text for name in (None, "a", "b")}
    assert len(set(expected.values())) == 3
    options = ENGINE_OPTIONS | {"lora": f"first={adapters['a']}"}
    with run_server(tiny_smollm2, options, allow_lora_updates=True) as server:
        base = server.service.model_name

        def post(route: str, **body: str) -> tuple[int, dict]:
            response = HTTP.post(f"{server.url}/{route}", json=body)
            return response.status_code, response.json()

        assert complete(server, base) == expected[None]
        assert complete(server, "first") == expected["a"]
        cards = {card["id"]: card["parent"] for card in HTTP.get(f"{server.url}/models").json()["data"]}
        assert cards == {base: None, "first": base}
        code, answer = post("load_lora_adapter", lora_name="second", lora_path=str(adapters["b"]))
        assert (code, answer["error"]["message"]) == (400, "all 1 places of adapters are taken: see max_loras")
        assert post("unload_lora_adapter", lora_name="first") == (200, {"loras": []})
        assert "model not found" in complete(server, "first")
        assert post("load_lora_adapter", lora_name="first", lora_path=str(adapters["b"])) == (200, {"loras": ["first"]})
        assert complete(server, "first") == expected["b"]
        for body, reason in (
            ({"lora_name": base, "lora_path": str(adapters["a"])}, "cannot have the name of the model"),
            ({"lora_name": "x", "lora_path": "/nowhere"}, "nowhere"),
            ({"lora_name": "", "lora_path": "x"}, "lora_name"),
        ):
            code, answer = post("load_lora_adapter", **body)
            assert code == 400 and reason in answer["error"]["message"]
        assert post("unload_lora_adapter", lora_name="y")[0] == 400


def test_without_the_option_there_are_no_routes(server) -> None:
    body = {"lora_name": "a", "lora_path": "a"}
    assert HTTP.post(f"{server.url}/load_lora_adapter", json=body).status_code == 404
    assert "model not found" in complete(server, "a")
