"""Tool calls as published chat templates write them, a writer for each dialect: what parsers and grammars must read.

The writers know nothing of the code that is tested. Facts are from the templates that the models' makers publish.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

SEPARATOR = "\n\n"  # between messages of gpt-oss that become one text


class Call(NamedTuple):
    """A function's name and its arguments."""

    name: str
    arguments: Mapping[str, Any]


Calls = tuple[Call, ...]  # that an answer has in a row
Answer = Sequence[str | Calls]


@dataclass(frozen=True)
class Dialect:
    """How one dialect writes calls. `between` is the part of several in a row that is content.

    `inexpressible`: texts that no value can have. `is_demanded`: the grammar of a demanded call allows what is written.
    """

    format: str
    write_calls: Callable[[Sequence[Call]], str]
    between: str = ""
    inexpressible: tuple[str, ...] = ()
    is_demanded: bool = True

    def write(self, answer: Answer) -> str:
        """Return an answer as a model writes it."""
        return "".join(part if isinstance(part, str) else self.write_calls(part) for part in answer)

    def expect(self, answer: Answer, is_known: Callable[[Calls], bool]) -> tuple[str, list[Call]]:
        """Return the content of an answer and its calls. Calls that are not known are content."""
        content = ""
        calls: list[Call] = []
        for part in answer:
            if isinstance(part, str) or not is_known(part):
                content += self.write([part])
            else:
                content += self.between * (len(part) - 1)
                calls += part
        return content, calls

    def can_express(self, call: Call) -> bool:
        """Return whether the dialect can write a call."""
        texts = list(iter_texts(call.arguments))
        return not any(mark in text for mark in self.inexpressible for text in texts)


class HarmonyDialect(Dialect):
    """Answers of messages: an answer that is written is whole, and texts are messages of their own."""

    def write(self, answer: Answer) -> str:
        """Return an answer as a model writes it."""
        messages = []
        for part in answer:
            if isinstance(part, str):
                messages.append(f"<|channel|>final<|message|>{part}<|end|>")
            else:
                messages += [self.write_calls([call]) for call in part]
        return "<|start|>assistant".join(messages)

    def expect(self, answer: Answer, is_known: Callable[[Calls], bool]) -> tuple[str, list[Call]]:
        """Return the content of an answer and its calls. The text of a call that is not known is content."""
        known = [part for part in answer if not isinstance(part, str) and is_known(part)]
        texts = [[p] if isinstance(p, str) else [to_json(c.arguments) for c in p] for p in answer if p not in known]
        return SEPARATOR.join(text for group in texts for text in group if text), [c for part in known for c in part]


def iter_texts(value: Any) -> Any:
    """Yield all texts in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from iter_texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from iter_texts(item)


def to_json(value: Any) -> str:
    """Return JSON as templates write it."""
    return json.dumps(value, ensure_ascii=False)


def to_text(value: Any) -> str:
    """Return a value as dialects of text write it: a text as it is, others as JSON."""
    return value if isinstance(value, str) else to_json(value)


def to_jinja_text(value: Any) -> str:
    """Return a value as jinja writes it: constants and numbers as Python does, lists and objects as JSON."""
    return to_json(value) if isinstance(value, dict | list) else str(value)


def write_object(call: Call, arguments_key: str = "arguments", **more: Any) -> str:
    """Return a call as a JSON object."""
    return to_json({"name": call.name, arguments_key: call.arguments, **more})


def write_list(calls: Sequence[Call]) -> str:
    """Return calls as a JSON list of objects."""
    return "[" + ", ".join(map(write_object, calls)) + "]"


def write_hermes(calls: Sequence[Call]) -> str:
    """Write calls as Hermes, Qwen 2.5, Qwen 3, SmolLM3 and Granite 4 do."""
    return "\n".join(f"<tool_call>\n{write_object(call)}\n</tool_call>" for call in calls)


def write_mistral_ids(calls: Sequence[Call]) -> str:
    """Write calls as Mistral's models of v3 do, with an id behind each."""
    objects = (write_object(call, id=f"call{i:05}") for i, call in enumerate(calls))
    return "[TOOL_CALLS] [" + ", ".join(objects) + "]"


def write_tagged(calls: Sequence[Call], show: Callable[[Any], str] = to_text) -> str:
    """Write calls as Qwen3-Coder, Qwen3.5 and Nemotron 3 do."""
    return "\n".join(
        f"<tool_call>\n<function={call.name}>\n"
        + "".join(f"<parameter={name}>\n{show(value)}\n</parameter>\n" for name, value in call.arguments.items())
        + "</function>\n</tool_call>"
        for call in calls
    )


def write_seed(calls: Sequence[Call], show: Callable[[Any], str] = to_text) -> str:
    """Write calls as Seed-OSS does."""
    return "\n".join(
        f"<seed:tool_call>\n<function={call.name}>\n"
        + "".join(f"<parameter={name}>{show(value)}</parameter>\n" for name, value in call.arguments.items())
        + "</function>\n</seed:tool_call>"
        for call in calls
    )


def write_glm(calls: Sequence[Call], line: str = "\n") -> str:
    """Write calls as GLM-4.5 and 4.6 do; without `line` as GLM-4.7 does."""
    return line.join(
        f"<tool_call>{call.name}{line}"
        + "".join(
            f"<arg_key>{name}</arg_key>{line}<arg_value>{to_text(value)}</arg_value>{line}"
            for name, value in call.arguments.items()
        )
        + "</tool_call>"
        for call in calls
    )


def write_gemma(calls: Sequence[Call]) -> str:
    """Write calls as Gemma 4 does."""
    return "".join(f"<|tool_call>call:{call.name}{to_gemma(call.arguments)}<tool_call|>" for call in calls)


def to_gemma(value: Any) -> str:
    """Return a value with bare keys, and with marks around texts."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{to_gemma(item)}" for key, item in value.items()) + "}"
    return "[" + ",".join(map(to_gemma, value)) + "]" if isinstance(value, list) else to_json(value)


def write_deepseek_v3(calls: Sequence[Call]) -> str:
    """Write calls as DeepSeek-V3 and R1 do."""
    return in_section(f"function<｜tool▁sep｜>{c.name}\n```json\n{to_json(c.arguments)}\n```" for c in calls)


def write_deepseek_v31(calls: Sequence[Call], line: str = "") -> str:
    """Write calls as DeepSeek-V3.1 does."""
    return in_section((f"{c.name}<｜tool▁sep｜>{to_json(c.arguments)}" for c in calls), line)


def in_section(bodies: Any, line: str = "\n") -> str:
    """Return the bodies of calls between DeepSeek's marks."""
    calls = line.join(f"<｜tool▁call▁begin｜>{body}<｜tool▁call▁end｜>" for body in bodies)
    return f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>"


def write_python(call: Call, show: Callable[[Any], str] = to_json) -> str:
    """Return a call as Python writes one."""
    return f"{call.name}({', '.join(f'{name}={show(value)}' for name, value in call.arguments.items())})"


def write_named(calls: Sequence[Call], call_id: str = "") -> str:
    """Write calls as Ministral 3 and Magistral do; with an id as Mistral Small 3.2 does."""
    return "".join(f"[TOOL_CALLS]{call.name}{call_id}[ARGS]{to_json(call.arguments)}" for call in calls)


def write_cohere(calls: Sequence[Call]) -> str:
    """Write calls as Command R7B and Command A do."""
    objects = (
        f'    {{"tool_call_id": "{i}", "tool_name": {to_json(c.name)}, "parameters": {to_json(c.arguments)}}}'
        for i, c in enumerate(calls)
    )
    return "<|START_ACTION|>[\n" + ",\n".join(objects) + "\n]<|END_ACTION|>"


def write_harmony(calls: Sequence[Call]) -> str:
    """Write one call as gpt-oss does."""
    (call,) = calls
    arguments = to_json(call.arguments)
    return f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>{arguments}<|call|>"


TAGS = ("</parameter>\n<parameter=", "</parameter>\n</function>")
HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
DIALECTS = {
    "hermes": Dialect("hermes", write_hermes, "\n"),
    "llama": Dialect("llama3_json", lambda cs: "; ".join(write_object(c, "parameters") for c in cs), " "),
    "llama, a list": Dialect("llama3_json", write_list, is_demanded=False),
    "llama, python tag": Dialect(
        "llama3_json", lambda cs: "<|python_tag|>" + "; ".join(write_object(c, "parameters") for c in cs), " ",
        is_demanded=False,
    ),
    "mistral": Dialect("mistral", lambda cs: f"[TOOL_CALLS] {write_list(cs)}", is_demanded=True),
    "mistral, ids": Dialect("mistral", write_mistral_ids, is_demanded=False),
    "qwen3 coder": Dialect("qwen3_coder", write_tagged, "\n", TAGS),
    "qwen3 coder, words of Python": Dialect(
        "qwen3_coder", lambda cs: write_tagged(cs, to_jinja_text), "\n", TAGS, is_demanded=False
    ),
    "seed": Dialect("seed_oss", write_seed, "\n", TAGS),
    "seed, values of Python": Dialect("seed_oss", lambda cs: write_seed(cs, str), "\n", TAGS, is_demanded=False),
    "glm 4.5": Dialect("glm45", write_glm, "\n", ("</arg_value>\n<arg_key>",)),
    "glm 4.7": Dialect("glm45", lambda cs: write_glm(cs, ""), "", ("</arg_value>\n<arg_key>",), is_demanded=False),
    "gemma 4": Dialect("gemma4", write_gemma, "", ('<|"|>',)),
    "deepseek v3": Dialect("deepseek_v3", write_deepseek_v3, "\n"),
    "deepseek v3.1": Dialect("deepseek_v31", write_deepseek_v31),
    "deepseek v3.1, lines": Dialect("deepseek_v31", lambda cs: write_deepseek_v31(cs, "\n"), "\n", is_demanded=False),
    "lfm2": Dialect("lfm2", lambda cs: f"<|tool_call_start|>[{', '.join(map(write_python, cs))}]<|tool_call_end|>"),
    "lfm2, texts of Python": Dialect(
        "lfm2",
        lambda cs: f"<|tool_call_start|>[{', '.join(write_python(c, repr) for c in cs)}]<|tool_call_end|>",
        is_demanded=False,
    ),
    "olmo 3": Dialect("olmo3", lambda cs: "<function_calls>" + "\n".join(map(write_python, cs)) + "</function_calls>"),
    "olmo 3, lines": Dialect(
        "olmo3",
        lambda cs: "<function_calls>\n" + "\n".join(write_python(c, repr) for c in cs) + "\n</function_calls>",
        is_demanded=False,
    ),
    "ministral 3": Dialect("ministral3", write_named),
    "ministral 3, ids": Dialect("ministral3", lambda cs: write_named(cs, "[CALL_ID]call00001"), is_demanded=False),
    "command": Dialect("cohere_command", write_cohere),
    "granite 3": Dialect("granite", lambda cs: f"<|tool_call|>{write_list(cs)}"),
    "phi 4 mini": Dialect("phi4_mini_json", lambda cs: f"<|tool_call|>{write_list(cs)}<|/tool_call|>"),
    "gpt-oss": HarmonyDialect("harmony", write_harmony, "", HARMONY_MARKS),
}  # fmt: skip

FIND = {
    "name": "find",
    "parameters": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "ratio": {"type": "number"},
            "flag": {"type": "boolean"},
            "nothing": {"type": "null"},
            "items": {"type": "array", "items": {"type": ["string", "integer", "boolean"]}},
            "deep": {"type": "object", "additionalProperties": True},
            "unit": {"type": "string", "enum": ["c", "kelvin"]},
            "place": {"$ref": "#/$defs/Place"},
        },
        "required": [],
        "additionalProperties": False,
        "$defs": {
            "Place": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "near": {"$ref": "#/$defs/Place"}},
                "required": ["city"],
                "additionalProperties": False,
            }
        },
    },
}
NOW = {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS = [FIND, NOW]
MARKS = [
    *("<tool_call>", "</tool_call>", "</parameter>", "</function>", "<function=now>", "</arg_value>", "<arg_key>"),
    *("[TOOL_CALLS]", "[ARGS]", "<｜tool▁call▁end｜>", "<｜tool▁calls▁begin｜>", "```", "<|tool_call_end|>"),
    *("<|/tool_call|>", "</think>"),
    *("</function_calls>", "<|END_ACTION|>", "</seed:tool_call>", "<tool_call|>", "<|python_tag|>", "<think>"),
]  # fmt: skip
DEEP: dict[str, Any] = {"a": [1, [2.5, {"b": {}}], []], "c": {"d": {"e": {"f": [None, True, "x, y: {z}"]}}}}
EVERY_TYPE = {"text": "x", "count": -3, "ratio": 0.25, "flag": False, "nothing": None, "items": ["a", 1, True]}


def find(**arguments: Any) -> Calls:
    """Return one call of `find`."""
    return (Call("find", arguments),)


NOW_CALL = (Call("now", {}),)
ANSWERS: dict[str, Answer] = {
    "one call": [find(text="x")],
    "a call without arguments": [NOW_CALL],
    "several calls": [find(text="x") + NOW_CALL + find(count=2)],
    "several groups": [find(text="x"), " then ", NOW_CALL, " and ", find(flag=True)],
    "no call": ["Just { a text } with [brackets], f(x) and <tags>."],
    "text before": ["It's here:\n", find(text="x")],
    "text behind": [find(text="x"), "\nThat was it."],
    "text before and behind": ["東京 🙂\n", find(text="x"), "\n{} done"],
    "every type": [find(**EVERY_TYPE)],
    "deep": [find(deep=DEEP)],
    "listed and referred": [find(unit="kelvin", place={"city": "Rome", "near": {"city": "Bari"}})],
    "words as texts": [find(text="true"), find(text="5"), find(text="null"), find(text="None"), find(text='"q"')],
    "json as a text": [find(text='{"a": [1, 2]}')],
    "no text": [find(text="", items=["", ""])],
    "blanks around": [find(text="\n\n  line\n\ttab\n\n")],
    "quotes and backslashes": [find(text='"a" \'b\' \\ \\\\ C:\\new\\x41 \\"', items=["'", '"', "\\", "it's"])],
    "unicode": [find(text="é 東京 👩‍👩‍👧 \u202e \U0010ffff e\u0301", deep={"schlüssel": "ß"})],
    "marks in a text": [find(text=mark) for mark in MARKS],
    "marks in texts": [find(text="a " + " ".join(MARKS[::2]) + " b", items=MARKS)],
    "code": [find(text='def f(x):\n    return {"a": [x, (1, 2)]}  # it\'s }])\n')],
    "large numbers": [find(count=12345678901234567890123, ratio=-1.5e-300, items=[2**63])],
    "unknown functions": [(Call("seek", {"a": 1}),), " and ", find(text="x")],
    "a name that another one begins": [(Call("no", {}),), (Call("nowhere", {}),), NOW_CALL],
}

TOOL_LIST = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
# What chat templates show of the calls of each format, and of those that nobody here reads.
SHOWN = {
    "cohere_command": '{{ "<|START_ACTION|>[" }}{"tool_call_id": "{{ i }}", "tool_name": "{{ name }}"}]<|END_ACTION|>',
    "deepseek_v3": "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + kind + '<｜tool▁sep｜>' + name }}```json",
    "deepseek_v31": "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments }}",
    "gemma4": "{{- '<|tool_call>call:' + name + '{' }}",
    "glm45": "<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>",
    "granite": "{{ '<|start_of_role|>available_tools<|end_of_role|>' }}",
    "harmony": "{{ '<|channel|>commentary to=functions.' + name + '<|message|>' }}",
    "hermes": '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
    "lfm2": "List of tools: <|tool_list_start|>[...]<|tool_list_end|>",
    "llama3_json": 'Respond in the format {"name": function name, "parameters": dictionary of arguments}.',
    "ministral3": "{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}",
    "mistral": "{{ '[TOOL_CALLS] [' }}{{ call.function | tojson }}{{ ']' }}",
    "olmo3": "<functions>{{ tools }}</functions> Call them in <function_calls></function_calls>.",
    "phi4_mini_json": "{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}",
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=p>\nvalue\n</parameter>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=f>\n<parameter=p>value</parameter>\n</function>\n</seed:tool_call>",
}  # fmt: skip
NOT_READ = {  # with the marker that a refusal names
    "Apriel": ('as a list <tool_calls>[{"name": <f>, "arguments": <x>}, {"name": <g>}]</tool_calls>', "<tool_calls>"),
    "Command R": ("{{ 'Action:\\n```json\\n[' }}{\"tool_name\": {{ name }}, \"parameters\": {{ x }}}]```", None),
    "DeepSeek-V3.2": ('{{ "<" + dsml + "function_calls>\\n<" + dsml + "invoke name=" }}', "<…function_calls>"),
    "Firefunction": ('formatted as functools[{"name": [name], "arguments": [arguments as JSON]}, ...]', None),
    "Functionary": ("<function={function_name}>{parameters}</function>", "</function>"),
    "GigaChat": ("{{ '<|function_call|>{\"name\": \"' ~ name ~ '\", \"arguments\": ' ~ x }}", "<|function_call|>"),
    "GLM-4-9B": ("{{ '<|assistant|>' + name + '\\n' + arguments }}", None),
    "Hunyuan": ("<tool_calls><tool_call>{{ name }}<tool_sep>{{ arguments }}</tool_call></tool_calls>", "<tool_calls>"),
    "InternLM2": ("<|action_start|><|plugin|>{{ call | tojson }}<|action_end|>", "<|action_start|>"),
    "Jamba": ('<tool_calls>[{"name": "{{ name }}", "arguments": {{ x }}}]</tool_calls>', "<tool_calls>"),
    "Kimi K2": ("<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}", "<|tool_calls_section_begin|>"),
    "MiniMax-M2": ('<minimax:tool_call>\n<invoke name="{{ name }}">', "<minimax:tool_call>"),
    "Muse Glimmer": ('<atem:function_calls>\n<atem:invoke name="{{ name }}">', "<atem:function_calls>"),
    "Nemotron Nano 2": ('<TOOLCALL>[{"name": "f", "arguments": "x"}, {"name": "g"}]</TOOLCALL>', "<TOOLCALL>"),
    "xLAM": ('{{ \'[{"name": "\' + name + \'", "arguments": \' }}{{ x | tojson }}{{ "}]" }}', None),
}  # fmt: skip
