"""The terminal: how far a prompt is computed, and a conversation that survives errors and Ctrl-C."""

import io
import signal

import pytest

from retain import LLM
from retain.cli import run as run_command
from retain.cli.chat import chat_loop, deferred_interrupts
from retain.cli.run import ERASE_LINE, PrefillProgress
from tests.helpers.cli import run_cli
from tests.helpers.engines import GREEDY


class Terminal(io.StringIO):
    """Text that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that each call moves by a second."""
    times = iter(range(1000))
    monkeypatch.setattr(run_command, "perf_counter", lambda: float(next(times)))


def test_progress_line_is_erased_before_the_answer(clock):
    terminal = Terminal()
    progress = PrefillProgress(terminal)
    for num_computed in (100, 300, 500):
        progress.update(num_computed, 600)
    progress.erase()
    progress.erase()
    lines = terminal.getvalue().split(ERASE_LINE)
    assert lines == ["", "prompt: 300 of 600 tokens, 200 tokens/s", "prompt: 500 of 600 tokens, 200 tokens/s", ""]


def test_progress_is_for_terminals_and_long_prefills(clock, monkeypatch):
    file = io.StringIO()
    progress = PrefillProgress(file)
    progress.update(100, 600)
    progress.update(300, 600)
    assert not file.getvalue()
    monkeypatch.setattr(run_command, "SHOW_AFTER_S", 10.0)
    terminal = Terminal()
    progress = PrefillProgress(terminal)
    progress.update(100, 600)
    progress.update(300, 600)
    progress.erase()
    assert not terminal.getvalue()


@pytest.mark.slow
def test_prefill_callback_counts_the_prompt():
    llm = LLM("random:tiny", kv_memory="16MiB", max_batched_tokens=16, max_running_requests=8)
    updates = []
    prompt = list(range(5, 105))
    list(llm.stream(prompt, GREEDY, prefill_callback=lambda *update: updates.append(update)))
    assert updates == [(n, 100) for n in range(16, 100, 16)]
    updates.clear()
    list(llm.stream([*prompt, *range(50)], GREEDY, prefill_callback=lambda *update: updates.append(update)))
    assert updates[0] == (116, 150), "cached tokens count as computed"


def test_error_of_the_prefill_callback_cancels_the_request():
    llm = LLM("random:tiny", kv_memory="16MiB", max_batched_tokens=16, max_running_requests=8)

    def interrupt(num_computed, num_tokens):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(llm.stream(list(range(5, 105)), prefill_callback=interrupt))
    assert not llm.engine.has_unfinished_requests
    llm.cache.check()
    assert llm.cache.free_rows == 8


def converse(monkeypatch, lines, generate_reply, interactive=True):
    """Type lines into a conversation; return the messages before each reply."""
    seen = []

    def reply(messages):
        seen.append([m["content"] for m in messages])
        return generate_reply(messages[-1]["content"])

    stdin = Terminal if interactive else io.StringIO
    monkeypatch.setattr("sys.stdin", stdin("".join(f"{line}\n" for line in lines)))
    chat_loop("Be brief.", reply)
    return seen


def test_failed_and_interrupted_answers_leave_the_conversation(monkeypatch, capsys):
    def generate_reply(line):
        if line == "long":
            raise ValueError("the context is full")
        if line == "stop":
            raise KeyboardInterrupt
        return line.upper()

    seen = converse(monkeypatch, ["a", "long", "stop", "b", "/quit", "c"], generate_reply)
    system = ["Be brief."]
    assert seen == [[*system, "a"], *([*system, "a", "A", line] for line in ("long", "stop", "b"))]
    err = capsys.readouterr().err
    assert "[the context is full;" in err and "[interrupted;" in err
    with pytest.raises(ValueError, match="context"):
        converse(monkeypatch, ["a", "long", "b"], generate_reply, interactive=False)


def test_clear_keeps_the_system_message(monkeypatch, capsys):
    seen = converse(monkeypatch, ["a", "/help", "/clear", "b"], str.upper)
    assert seen == [["Be brief.", "a"], ["Be brief.", "b"]]
    assert "/clear" in capsys.readouterr().err


def test_interrupt_waits_for_the_end_of_a_step():
    before = signal.getsignal(signal.SIGINT)
    with deferred_interrupts() as check:
        check()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_chat_protects_the_system_message(monkeypatch, capsys):
    """The policy of the command line knows how much of a conversation the system message is."""
    llm = LLM("random:tiny", kv_memory="16MiB", kv_policy="window:budget=64,protect=system")
    llm.tokenizer.choose_chat_template("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    monkeypatch.setattr("retain.cli.loading.load_llm", lambda config: llm)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    requests = []
    process = llm.input_processor.process
    monkeypatch.setattr(llm.input_processor, "process", lambda g: requests.append(g) or process(g))
    text = "Be brief. " * 20
    assert run_cli(capsys, "chat", "--model", "random:tiny", "--system", text, "--max-tokens", "4").code == 0
    assert [g.num_system_tokens > len(text) for g in requests] == [True]
