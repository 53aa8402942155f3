"""Write the page of families of models, for tools/reference.py: what is tested comes from the tests themselves."""

from __future__ import annotations

from retain import models
from retain.processing.reasoning import KNOWN_MARKS
from retain.server.tool_formats import load_tool_format, tool_format_names
from tests.helpers.family_variants import VARIANTS
from tests.helpers.gguf_files import GGUF_ARCHS
from tools.reference_text import NOTE, code, sentence, table

TESTED = """Each family is compared with `transformers`: tiny random weights with every config below, in float32, whole,
in chunks, token by token and in company (`tests/models/test_families.py`). Every instruction set and Triton's kernels
are compared with that (`tests/models/test_programs.py`). A GGUF file of an architecture that is named here, written by
the `gguf` package, gives the same logits (`tests/models/test_gguf.py`). Files of Mistral say `llama`, those of
Nemotron-H without experts `nemotron_h`.

Tool calls: the formats that the published chat templates of a family teach, each a file of
`src/retain/server/tool_formats/` with its name. Reasoning: the marks that begin it in templates of models that reason
(`src/retain/processing/reasoning.py`). The template of the model that is served decides.
"""
FORMATS = """## Formats

* A folder of safetensors, one file or shards, in float32, float16 or bfloat16, or quantized.
* A GGUF file, whole or in parts. Q4_0, Q4_1, Q4_K, IQ4_NL, IQ4_XS, MXFP4 and NVFP4 (without scales of whole tensors)
  stay in 4 bits, Q5_0, Q5_1 and Q5_K in 5, Q3_K and Q6_K in 6, Q8_0 in 8; other types become int8.

Quantized folders, by the `quant_method` of their config.json. A module without such tensors is read as it is.

| `quant_method` | what is read | kept as (`--weights auto`) |
|---|---|---|
| `mxfp4` | experts, as gpt-oss has them | its 4 bits |
| `awq` | 4 bits, version `gemm` | 4 bits |
| `gptq` | 4 and 8 bits, `checkpoint_format` `gptq` or `gptq_v2` | 4 bits; 8 bits where symmetric; else dense |
| `compressed-tensors` | `pack-quantized`, `int-quantized`, `float-quantized`, `naive-quantized` | the same, or dense |
| `fp8` | float8_e4m3fn with scales of blocks, outputs or matrices | dense |

Groups of 4 bits must have a multiple of 32 adjacent inputs: others, and inputs in the order of their activations,
become dense. The zero times the scale is rounded to float16, which moves a weight by less than a hundredth of a step.
`--weights int8` or `int4` makes dense ones small. Other methods are refused: use a .gguf file, or the original.
"""


def models_page() -> str:
    """Return the page: a row for each family."""
    formats = {name: load_tool_format(name).families for name in tool_format_names()}
    rows = []
    for family in models.list_families():
        about = sentence(models.load_family(family).__doc__).rstrip(".")
        configs = [", ".join(code(key) for key in changes) for changes in VARIANTS[family]]
        arch = code(GGUF_ARCHS.get(family, ""))
        calls = ", ".join(code(name) for name, families in formats.items() if family in families)
        reasoning = ", ".join(code(marks.begin) for marks in KNOWN_MARKS if family in marks.families)
        rows.append((code(family), about, arch, calls or "-", reasoning or "-", "; ".join(configs) or "-"))
    head = ["`model_type`", "what it is", "GGUF architecture", "tool calls", "reasoning", "tested with other values of"]
    return f"# Models\n\n{NOTE}{TESTED}\n{table(head, rows)}\n{FORMATS}"
