"""Every planted fault is found by its checks, and none in servers without faults."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import httpx
import pytest

import fake_cache_server as fake
from cachecheck.answer import Answer, Token
from cachecheck.client import ServerClient, Transport
from cachecheck.comparison import compare
from cachecheck.config import CachecheckConfig
from cachecheck.results import Outcome
from cachecheck.runner import RunEnvironment, run_checks
from cachecheck.texts import Prompt

KEYS = ("sk-one", "sk-two")
COMMANDS = {"restart_command": "restart", "reload_command": "reload", "reset_command": "reset"}
OPTIONS = {**COMMANDS, "adapters": ("/a", "/b"), "pressure": 12_000}
GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "cachecheck.md"
FAULTS = {
    "a stale block after an edit": fake.StaleAfterEdit,
    "off by one at a block end": fake.OffByOneAtBlockEnd,
    "a hit ignores the salt": fake.HitIgnoresSalt,
    "a hit ignores the key": fake.HitIgnoresKey,
    "wrong positions after a hit": fake.WrongPositionsAfterHit,
    "the last block is shared though it is not full": fake.PartialBlockShared,
    "concurrent requests swap answers": fake.ConcurrentSwap,
    "streams drop the last piece": fake.StreamDropsLast,
    "usage claims hits that time denies": fake.UsageClaimsHits,
    "usage hides hits that time shows": fake.UsageHidesHits,
    "the cache survives other weights": fake.SurvivesReload,
    "a branch gets the tail of its sibling": fake.SiblingTail,
    "other log-probabilities on a hit": fake.OtherLogprobsOnHit,
    "a reset leaves a tier": fake.ResetForgetsTier,
    "a tier stores and never serves": fake.StoresWithoutServing,
    "adapters are told apart by name": fake.AdaptersByName,
    "adapters find what the model has computed": fake.AdaptersShareTheModel,
    "a turn behind reasoning is computed anew": fake.ReasoningIsHistory,
    "images are not in the key": fake.ImagesShareKeys,
}


def read_table():
    """Return the guide's table: a fault, and the checks that find it on a whole server, without salts and logprobs."""
    table = GUIDE.read_text(encoding="utf-8").partition("| fault | found by |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {
        fault: [set(re.findall("`([a-z]+)`", found if cell == "the same" else cell)) for cell in (found, *cells)]
        for fault, found, *cells in rows
    }


FOUND_BY = read_table()


def check(server, url="http://fake/v1", keys=KEYS, **options):
    """Run checks against a fake server."""

    def run_command(command, timeout):
        run = {"flush": server.flush, "reset": server.reset, "restart": server.flush, "reload": server.reload}
        run[command]()

    transport = Transport(httpx.MockTransport(server.handle), lambda: server.now)
    config = CachecheckConfig(**{"seed": 7, **OPTIONS, **options})
    return run_checks(url, config, keys, RunEnvironment(transport, run_command))


def faults(report):
    """Return the names of the checks that found a fault."""
    return {result.name for result in report.results if result.outcome == Outcome.FAULT}


def test_a_server_without_faults_passes_every_check():
    report = check(fake.FakeServer())
    assert {result.outcome for result in report.results} == {Outcome.PASSED} and report.exit_code == 0


def test_the_guide_lists_the_planted_faults():
    assert FOUND_BY.keys() == FAULTS.keys()


@pytest.mark.parametrize("fault", FOUND_BY)
def test_every_planted_fault_is_found_by_the_checks_of_the_guide_and_by_no_other(fault):
    report = check(FAULTS[fault]())
    assert faults(report) == FOUND_BY[fault][0] and report.exit_code == 1


@pytest.mark.parametrize(
    "fault", ["", "a stale block after an edit", "a hit ignores the salt", "a reset leaves a tier"]
)
def test_texts_have_several_blocks_where_blocks_are_large(fault, monkeypatch):
    """As of vLLM on a CPU. A check whose requests find nothing tells nothing, and so says."""
    monkeypatch.setattr(fake, "BLOCK", 128)
    report = check(FAULTS.get(fault, fake.FakeServer)())
    assert faults(report) == (FOUND_BY[fault][0] if fault else set())
    assert fault or {result.outcome for result in report.results} == {Outcome.PASSED}
    monkeypatch.setattr(fake, "BLOCK", 4096)
    report = check(fake.FakeServer(), checks=("edits", "rounds"))
    assert {result.outcome for result in report.results} == {Outcome.UNSURE} and report.exit_code == 2


@pytest.mark.parametrize(("column", "lacking"), [(1, "salts"), (2, "logprobs")])
@pytest.mark.parametrize("fault", FOUND_BY)
def test_which_of_these_checks_find_it_on_a_server_that_lacks_something(fault, column, lacking):
    every, found = FOUND_BY[fault][0], FOUND_BY[fault][column]
    server = FAULTS[fault](offers=fake.FakeServer().offers - {lacking})
    assert faults(check(server, checks=tuple(every))) == found


@pytest.mark.parametrize(
    ("server", "offers", "expected"),
    [
        (fake.FakeServer, {"usage", "logprobs"}, set()),
        (fake.StaleAfterEdit, {"usage"}, {"edits"}),
        (fake.SiblingTail, {"logprobs"}, {"edits"}),
        (fake.WrongPositionsAfterHit, {"no texts"}, {"lengths", "branches", "streams"}),
        (fake.SurvivesReload, {"usage"}, {"reload"}),
    ],
)
def test_much_is_found_without_salts_counts_or_log_probabilities(server, offers, expected):
    """By order, by words and by time; what needs a cold reference cannot be told, and is no fault."""
    report = check(server(offers=frozenset(offers)), keys=("sk-one",))
    assert faults(report) >= expected and (expected or not faults(report))
    assert any(result.outcome == Outcome.UNSURE for result in report.results)


@pytest.mark.parametrize(
    ("offer", "options", "name"), [("opt out", {}, "cache_prompt=false"), ("", {"flush_command": "flush"}, "flush")]
)
def test_a_server_without_salts_gives_cold_answers_in_another_way(offer, options, name):
    """A field of llama.cpp's server, or a command that empties the cache: one flush serves all families of texts."""
    for server, expected in ((fake.FakeServer, set()), (fake.PartialBlockShared, {"lengths"})):
        fake_server = server(offers=frozenset({"logprobs", "usage", offer}))
        report = check(fake_server, keys=("sk-one",), checks=("lengths", "branches"), **options)
        assert report.server.cold.name == name and faults(report) >= expected
        assert expected or {result.outcome for result in report.results} == {Outcome.PASSED}


def test_a_reset_of_nothing_tells_nothing():
    class KeepsNothing(fake.FakeServer):
        def store(self, request, slots):
            pass

    report = check(KeepsNothing(), **COMMANDS)
    (result,) = [result for result in report.results if result.name == "reset"]
    assert result.outcome == Outcome.UNSURE


@pytest.mark.parametrize("gap", [0.02, 0.3])
def test_noise_of_a_server_is_no_fault(gap):
    """Log-probabilities that differ from one request to the next: the same cold request shows it."""
    report = check(fake.FakeServer(noise=gap))
    assert not faults(report) and report.server.noise.gap == pytest.approx(gap)


def test_a_server_that_answers_at_random_cannot_be_told():
    report = check(fake.FakeServer(noise=3.0), checks=("lengths", "logprobs", "rounds"))
    assert [r.outcome for r in report.results] == [Outcome.UNSURE, Outcome.SKIPPED, Outcome.UNSURE]
    assert report.exit_code == 2


@pytest.mark.parametrize(("server", "check_name"), [(fake.HitIgnoresSalt, "salts"), (fake.HitIgnoresKey, "keys")])
def test_time_shows_what_usage_does_not_count(server, check_name):
    offers = frozenset({"logprobs", "salts", "keys"})
    (result,) = check(server(offers=offers), checks=(check_name,)).results
    assert result.outcome == Outcome.FAULT and all("times with" in case.what for case in result.problems)
    (result,) = check(fake.FakeServer(offers=offers), checks=(check_name,)).results
    assert result.outcome == Outcome.PASSED


@pytest.mark.parametrize(("num_rounds", "outcome"), [(2, Outcome.PASSED), (3, Outcome.FAULT)])
def test_a_fault_of_time_must_show_three_times(num_rounds, outcome):
    """One round has three texts, behind the three by which the length is found."""
    server = fake.LeaksAtFirst(offers=frozenset({"logprobs", "salts"}))
    server.num_leaking = 3 * (1 + num_rounds)
    (result,) = check(server, checks=("salts",)).results
    assert result.outcome == outcome


def test_a_fault_names_the_share_that_is_too_small():
    """Of three texts that usage counts at 2% and 3%, the largest share is the one that time denies."""
    (result,) = check(fake.UsageHidesHits(), checks=("usage",)).results
    assert [case.detail.partition(",")[0] for case in result.problems] == ["usage claims 3% of the prompt cached"]


def answer(*tokens, finish_reason="length"):
    texts = [Token(text, logprob, {text: logprob, "x": other}) for text, logprob, other in tokens]
    return Answer("".join(t.text for t in texts), texts, finish_reason)


@pytest.mark.parametrize(
    ("one", "other", "is_equal"),
    [
        (answer(("a", -0.5, -3.0)), answer(("a", -0.55, -3.0)), True),
        (answer(("a", -0.5, -3.0)), answer(("a", -0.7, -3.0)), False),
        (answer(("a", -0.1, -3.0)), answer(("x", -0.1, -0.1)), False),
        (answer(("a", -0.7, -0.8)), answer(("x", -0.7, -0.7)), True),
        (answer(("a", float("nan"), -3.0)), answer(("a", -0.5, -3.0)), False),
        (answer(("a", -0.1, -3.0), ("b", -0.1, -3.0)), answer(("a", -0.1, -3.0)), False),
        (answer(("a", -0.1, -3.0), ("b", -0.1, -3.0)), answer(("a", -0.1, -3.0), finish_reason="stop"), False),
        (answer(("a", -0.1, -3.0), ("b", -0.9, -3.0)), answer(("a", -0.1, -3.0), finish_reason="stop"), True),
    ],
)
def test_only_near_ties_may_turn(one, other, is_equal):
    assert (compare(one, other, 0.1) is None) == is_equal and (compare(other, one, 0.1) is None) == is_equal


def test_a_report_is_a_table_json_and_xml():
    report = check(fake.StreamDropsLast(), checks=("streams", "edits"))
    assert "streams" in report.to_table() and "fault: chat of 14 words" in report.to_table()
    both = report.to_json()["checks"]
    assert [c["outcome"] for c in both] == ["passed", "fault"] and both[1]["problems"]
    cases = ElementTree.fromstring(report.to_junit()).findall("testcase")
    assert [[child.tag for child in case] for case in cases] == [[], ["failure"]]


def test_a_seed_sends_the_same_requests():
    servers = [fake.FakeServer() for _ in range(3)]
    for server, seed in zip(servers, (7, 7, 8), strict=True):
        check(server, checks=("edits", "branches", "salts"), seed=seed)
    one, again, other = (server.bodies for server in servers)
    assert one == again and not set(one) & set(other)
    server = fake.FakeServer()
    check(server, checks=("salts",))
    with pytest.raises(ValueError, match="choose another seed"):
        check(server, checks=("salts",))


def answering(status, **content):
    server = fake.FakeServer()
    server.handle = lambda request: httpx.Response(status, **content)
    return server


@pytest.mark.parametrize(
    ("server", "options", "message"),
    [
        (answering(401, json={"error": {"message": "no such key"}}), {}, "401 no such key"),
        (answering(200, text="<html>"), {}, "no JSON object"),
        (answering(200, json={"data": []}), {}, "lists no model"),
        (answering(200, json={"choices": [7]}), {"model": "m"}, "not one of OpenAI's API"),
        (fake.FakeServer(), {"checks": ("lenghts",)}, "unknown check 'lenghts'"),
        (fake.FakeServer(), {"url": "fake"}, "begins with http://"),
        (fake.FakeServer(), {"max_tokens": 0}, "at least 1"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(server, options, message):
    with pytest.raises(ValueError, match=message) as error:
        check(server, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ('{"choices": [7]}', "not one of OpenAI's API"),
        ('{"choices": 7}', "not one of OpenAI's API"),
        ('{"error": {"message": "out of memory"}}', "http://fake/v1: out of memory"),
        ('{"error": 7}', "ended by an error"),
        ("[" * 10_000, "no JSON object"),
        ("{}\n\ndata: " * 10_001, "more than 10000 events"),
    ],
)
def test_what_is_wrong_in_a_stream_is_said_in_one_line(event, message):
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=f"data: {event}\n\n"))
    client = ServerClient("http://fake/v1", None, 1.0, Transport(transport))
    with pytest.raises(ValueError, match=message) as error:
        client.ask(Prompt(("hello",)), {"stream": True})
    assert "\n" not in str(error.value)


def test_texts_may_hold_what_python_calls_an_end_of_a_line():
    text = "a\u2028b\x85c"
    event = json.dumps({"choices": [{"text": text}]}, ensure_ascii=False)
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=f"data: {event}\r\n\r\ndata: [DONE]"))
    client = ServerClient("http://fake/v1", None, 1.0, Transport(transport))
    assert client.ask(Prompt(("hello",)), {"stream": True}).text == text


@pytest.mark.parametrize("url", ["http://fake/v1", "http://fake"])
def test_metrics_are_beside_the_api(url):
    asked = []
    transport = httpx.MockTransport(lambda request: asked.append(str(request.url)) or httpx.Response(200, text="x 1"))
    assert ServerClient(url, None, 1.0, Transport(transport)).read_metrics() == "x 1"
    assert asked == ["http://fake/metrics"]


class BusyOnce(fake.HitIgnoresSalt):
    """Refuses a probe for what it offers, because it is busy."""

    def handle(self, http_request):
        if not isinstance(json.loads(http_request.content or b"{}").get("cache_salt", ""), str):
            return httpx.Response(429, json={"error": {"message": "busy"}})
        return super().handle(http_request)


class BreaksDown(fake.FakeServer):
    """Fails from some request on."""

    num_left = 250

    def handle(self, http_request):
        self.num_left -= 1
        return super().handle(http_request) if self.num_left > 0 else httpx.Response(500)


def test_a_busy_server_is_not_taken_for_one_that_offers_less():
    with pytest.raises(ValueError, match="429 busy"):
        check(BusyOnce())


def test_a_request_that_fails_ends_its_check_and_not_the_report():
    report = check(BreaksDown())
    ended = [result for result in report.results if result.error]
    assert ended and report.exit_code == 2 and "500" in report.to_table()
    assert all(result.outcome == Outcome.UNSURE for result in ended)
    assert any(result.outcome == Outcome.PASSED for result in report.results)


@pytest.mark.parametrize(
    "body",
    [
        '{"choices": 5}',
        '{"choices": ["a"]}',
        '{"choices": [{"text": 5}]}',
        '{"choices": [{"text": "a", "logprobs": [1]}]}',
        '{"choices": [{"text": "a", "logprobs": {"tokens": 5}}]}',
        '{"choices": [{"delta": "abc"}]}',
        '{"choices": [{"text": "a"}], "usage": {"prompt_tokens": Infinity}}',
        '{"choices": [{"text": "a"}], "usage": {"prompt_tokens": %s}}' % ("9" * 400),
        "[" * 100_000,
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_an_odd_answer_is_an_error_of_one_line(body, is_stream):
    text = f"data: {body}\n\n" if is_stream else body
    transport = Transport(httpx.MockTransport(lambda request: httpx.Response(200, text=text)))
    client = ServerClient("http://fake/v1", None, 5, transport)
    with pytest.raises(ValueError) as error:
        client.ask(Prompt(("a",)), {"stream": True} if is_stream else {})
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("num_closed", [1, 2])
def test_a_kept_connection_that_the_server_closed_is_opened_again(num_closed):
    """As llama.cpp's server does after a hundred requests. One that closes the new one, too, is told of."""
    server = fake.FakeServer()
    closed = []

    def handle(request):
        if len(server.bodies) == 300 and len(closed) < num_closed:
            closed.append(request)
            raise httpx.RemoteProtocolError("Server disconnected without sending a response.")
        return server.handle(request)

    config = CachecheckConfig(seed=7, checks=("rounds", "edits", "branches", "lengths"))
    transport = Transport(httpx.MockTransport(handle), lambda: server.now)
    report = run_checks("http://fake/v1", config, KEYS, RunEnvironment(transport, lambda command, timeout: None))
    assert len(closed) == num_closed and not faults(report)
    assert report.exit_code == (0 if num_closed == 1 else 2)


def test_an_image_that_is_refused_as_an_error_of_the_server():
    """llama.cpp's server has status 500 for it."""
    server = fake.FakeServer()

    def handle(request):
        if b"image_url" in request.content:
            return httpx.Response(500, json={"error": {"message": "image input is not supported"}})
        return server.handle(request)

    transport = Transport(httpx.MockTransport(handle), lambda: server.now)
    config = CachecheckConfig(seed=7, checks=("images",))
    (result,) = run_checks("http://fake/v1", config, KEYS, RunEnvironment(transport, lambda *_: None)).results
    assert result.outcome == Outcome.PASSED
