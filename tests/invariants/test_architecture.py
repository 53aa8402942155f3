"""Law 8: imports go down only and in no circle; files and functions stay small; the map is true."""

import ast
import inspect
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from token import COMMENT, DEDENT, ENCODING, ENDMARKER, INDENT, NEWLINE, NL
from tokenize import tokenize

import pytest

from retain.engine.cache_interface import RequestRow, SchedulerCache
from retain.engine.request import Request, RequestInput
from retain.kv.capacity import CapacityPlanner
from retain.kv.eviction.policy import EvictionPolicy
from retain.kv.hints import CacheHints
from retain.kv.manager import KVCacheManager
from retain.kv.prefix.cache import PrefixCache
from retain.kv.row import Row
from retain.sampling_params import SamplingParams
from tools.simulation.cache import SimulatedCache, SimulatedRow

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "retain"
FILES = sorted(PACKAGE.rglob("*.py"))
CACHECHECK_FILES = sorted((ROOT / "packages" / "cachecheck" / "src").rglob("*.py"))  # a package of its own
ALL_FILES = FILES + CACHECHECK_FILES

# A file may import its own room and the rooms of lower layers. Rooms of one layer do not import each other.
LAYERS = [
    {"cli"},
    {"tune"},
    {"cluster"},
    {"server", "bench", "fit"},
    {"retain"},  # the public names
    {"llm"},
    {"rank_processes"},
    {"factory"},
    {"model_loader"},
    {"processing"},
    {"outputs", "gates"},
    {"engine"},
    {"kv.manager"},
    {"kv.draft_tables", "kv.hints"},
    {"kv.row"},
    {"kv.journal"},
    {"kv.prefix"},
    {"kv.row_task"},
    {"kv.checkpoints"},
    {"kv.capacity"},
    {"kv.eviction", "kv.stores", "kv.stats"},
    {"kv.memory", "kv.text", "models"},
    {"formats"},
    {"kernels"},
    {"config", "sampling_params"},
    {"plugins", "threads", "signals", "kv"},
    {"types", "options", "files", "terminal", "http_client", "garbage_collection", "sequences"},
]
# Rooms of the server, and which of the others each may import.
SERVER_ROOMS = {"openai": set(), "anthropic": {"openai"}, "observers": {"openai"}}
FAMILIES = "retain.models.families"
LAYER_OF = {room: depth for depth, layer in enumerate(LAYERS) for room in layer}

# What may be known of the cache outside of `kv`: the manager, rows, what they are asked for and what they answer.
CACHE_INTERFACE = {
    *("manager", "row", "row_task", "text", "draft_tables", "journal"),
    *("eviction.policy", "prefix.start", "stats.attention_trace", "stats.request"),
}
CACHE_OPTIONS = {
    "capacity",
    "eviction.policies",
    "eviction.auto_policy",
    "eviction.cost",
    "stores.tiers",
    "prefix.config",
}
KNOWN_OF_KV = {
    "engine": CACHE_INTERFACE,
    "llm": CACHE_INTERFACE | CACHE_OPTIONS,
    "processing": CACHE_INTERFACE | CACHE_OPTIONS,
}
PARTS_OF_A_CACHE = {"tables", "slots", "copies", "store", "pool"}
# Of a cache; others may call their methods.
ASKED_PARTS = {"planner": CapacityPlanner, "prefix_cache": PrefixCache, "hints": CacheHints}
MAX_ROW_MEMBERS = 10  # that the engine uses

# Of a class in kv.
MAX_PUBLIC_METHODS = 30
MAX_ATTRIBUTES = 16

# Lines of code of rooms. Wanted: bench 1,770, cli 1,010, processing 1,710; kv 7,100, prefix 920, checkpoints 640,
# stores 2,150.
MAX_ROOM_LINES = {
    **{"bench": 1977, "cli": 1098, "engine": 2265, "formats": 2991, "kernels": 7800, "models": 4671},
    **{"processing": 2967, "server": 9462, "top": 1676},
    **{"kv": 9870, "prefix": 1776, "checkpoints": 813, "stores": 2449, "eviction": 2485, "memory": 840},
}

MAX_CODE_LINES = 400  # of a file, without docstrings, comments and blank lines
MAX_STEP_LINES = 25
MAX_PARAMETERS = 9  # self included
MAX_UNNAMED_ARGUMENTS = 5  # of the launch of a kernel


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def num_code_lines(path: Path) -> int:
    """Count the lines of a file that hold code."""
    nodes = [n for n in ast.walk(tree_of(path)) if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef))]
    docstrings = [n.body[0] for n in nodes if ast.get_docstring(n)]
    prose = {line for d in docstrings for line in range(d.lineno, d.end_lineno + 1)}
    with path.open("rb") as file:
        tokens = [t for t in tokenize(file.readline) if t.type not in (COMMENT, ENCODING, ENDMARKER, NL)]
    spaces = (INDENT, DEDENT, NEWLINE)
    code = {line for t in tokens if t.type not in spaces for line in range(t.start[0], t.end[0] + 1)}
    return len(code - prose)


def all_nodes(files: Iterable[Path] = FILES) -> Iterator[tuple[Path, ast.AST]]:
    return ((path, node) for path in files for node in ast.walk(tree_of(path)))


def module_name(path: Path) -> str:
    source = next(folder for folder in path.parents if folder.name == "src")
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}
ALL_MODULES = {module_name(path): path for path in ALL_FILES}


def imports_of(path: Path) -> set[str]:
    """Return the modules that a file imports anywhere: in functions and under TYPE_CHECKING, too."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} is a relative import"
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {name if name in ALL_MODULES else str(node.module) for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def imported_modules(path: Path) -> set[str]:
    """Return the modules of the package that a file imports."""
    return {name for name in imports_of(path) if name.split(".")[0] == "retain"}


def room_of(module: str) -> str:
    """Return the part of the package that a module belongs to: its first folder or file; inside of kv the second."""
    parts = module.split(".")[1:]
    return ".".join(parts[: 2 if parts[0] == "kv" else 1]) if parts else "retain"


def test_imports_only_go_down():
    for name, path in MODULES.items():
        here = room_of(name)
        for module in (name, *imported_modules(path)):
            there = room_of(module)
            assert there in LAYER_OF, f"{path} is or imports {module}, which has no layer yet"
            assert there == here or LAYER_OF[there] > LAYER_OF[here], (
                f"{here} must not import {there}: {path}, {module}"
            )


def test_cachecheck_is_a_package_of_its_own():
    """It needs httpx only, so it checks servers where no engine is installed. Of this package, `cli` offers it."""
    assert CACHECHECK_FILES and not (PACKAGE / "cachecheck").exists()
    known = {*sys.stdlib_module_names, "httpx", "cachecheck"}
    for path in CACHECHECK_FILES:
        assert {name.split(".")[0] for name in imports_of(path)} <= known, path
    for name, path in MODULES.items():
        imported = {module for module in imports_of(path) if module.split(".")[0] == "cachecheck"}
        assert not imported or (room_of(name) == "cli" and imported == {"cachecheck.command"}), path


@pytest.mark.parametrize("room", KNOWN_OF_KV)
def test_little_is_known_of_the_cache(room):
    for name, path in MODULES.items():
        if room_of(name) == room:
            used = {module.removeprefix("retain.kv.") for module in imported_modules(path) if ".kv." in module}
            assert used <= KNOWN_OF_KV[room], path


def test_nobody_reaches_through_the_cache():
    """`cache.tables.x` outside of kv is a method that the manager or a row lacks. A bench of prefixes may.

    What is planned, and what concerns prefixes, is asked of two parts with an interface of their own. Their methods may
    be called, and what lies behind them is not reached: a manager that handed them on would be twice as large.
    """
    for path, node in all_nodes():
        inside = room_of(module_name(path)).startswith("kv.") or path == PACKAGE / "bench" / "prefix.py"
        if not isinstance(node, ast.Attribute) or inside:
            continue
        owner = ast.unparse(node.value)
        assert not (node.attr in PARTS_OF_A_CACHE and owner.endswith("cache")), f"{path}:{node.lineno}"
        for name, part in ASKED_PARTS.items():
            if owner.endswith(f"cache.{name}"):
                assert hasattr(part, node.attr) and node.attr[0] != "_", f"{path}:{node.lineno} {node.attr}"


def test_the_engine_never_asks_whether_there_is_a_row():
    """A request that waits has none, and that of a running request is found where the request is."""
    for path in (PACKAGE / "engine").rglob("*.py"):
        assert not re.search(r"\brow is (not )?None|\brow == None|\bif row\b", path.read_text()), path
    assert not hasattr(Request(RequestInput([1], SamplingParams(), EvictionPolicy(), 1)), "row")


def test_the_engine_uses_few_members_of_a_row():
    members = {name for name in vars(RequestRow) if name[0] != "_"}
    assert len(members) <= MAX_ROW_MEMBERS, sorted(members)


def classes_of_kv() -> Iterator[ast.ClassDef]:
    return (n for path, n in all_nodes() if isinstance(n, ast.ClassDef) and "kv" in path.relative_to(PACKAGE).parts)


def num_attributes(function: ast.FunctionDef) -> int:
    """Count the attributes of `self` that a function assigns."""
    found = [n for n in ast.walk(function) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    return len({n.attr for n in found if ast.unparse(n.value) == "self"})


def test_a_class_of_the_cache_is_small():
    """Exceptions that are none any more are named, too."""
    many_methods = set()
    many_attributes = set()
    for node in classes_of_kv():
        functions = [n for n in node.body if isinstance(n, ast.FunctionDef)]
        if len({f.name for f in functions if f.name[0] != "_"}) > MAX_PUBLIC_METHODS:
            many_methods.add(node.name)
        if any(num_attributes(f) > MAX_ATTRIBUTES for f in functions if f.name == "__init__"):
            many_attributes.add(node.name)
    assert not many_methods and not many_attributes


@pytest.mark.parametrize("cls", [SimulatedCache, KVCacheManager])
def test_a_scheduler_can_use_any_cache_that_has_the_members_of_the_protocol(cls):
    """Their rows, too. Attributes that only instances have are not looked for."""
    row = SimulatedRow if cls is SimulatedCache else Row
    for protocol, found in ((SchedulerCache, cls), (RequestRow, row)):
        functions = {name for name, value in vars(protocol).items() if inspect.isfunction(value) and name[0] != "_"}
        for name in functions:
            wanted, given = (inspect.signature(getattr(c, name)).parameters for c in (protocol, found))
            assert list(given) == list(wanted), name
        init = inspect.getsource(found.__init__)
        properties = {name for name, value in vars(protocol).items() if isinstance(value, property)}
        assert all(hasattr(found, name) or f"self.{name}" in init for name in properties)


def test_a_family_imports_at_most_llama_of_the_others():
    """What several families share lies in models/, which imports none of them: `load_family` finds one by its name.

    A family X whose config has a text model inside may import X_text, and so may the draft head X_assistant.
    """
    for name, path in MODULES.items():
        if room_of(name) == "models":
            found = {m for m in imported_modules(path) if m.startswith(f"{FAMILIES}.")} - {name}
            may_import = {f"{FAMILIES}.llama", f"{name}_text"} if name.startswith(f"{FAMILIES}.") else set()
            if name.startswith("retain.models.heads."):
                may_import = {f"{FAMILIES}.{name.rpartition('.')[2].removesuffix('_assistant')}_text"}
            assert found <= may_import, path


@pytest.mark.parametrize("room", SERVER_ROOMS)
def test_an_api_imports_only_those_below_it(room):
    others = SERVER_ROOMS.keys() - SERVER_ROOMS[room] - {room}
    for path in (PACKAGE / "server" / room).rglob("*.py"):
        imported = {module.split(".")[2] for module in imported_modules(path) if module.startswith("retain.server.")}
        assert not imported & {*others, "app", "launch", "middleware"}, path


def test_no_files_import_each_other_in_a_circle():
    """Lazy imports and imports for type checkers count: each would mark two files that do not stand alone."""
    graph = {name: imports_of(path) - {name} for name, path in ALL_MODULES.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError with the circle


def test_no_room_grows():
    """A room may outgrow its figure only with a line in docs/log/house.md that says what was cut elsewhere."""
    lines = Counter()
    for path in FILES:
        room, *inner = path.relative_to(PACKAGE).parts
        lines[room if inner else "top"] += num_code_lines(path)
        if room == "kv" and len(inner) > 1:
            lines[inner[0]] += num_code_lines(path)
    assert {room: n for room, n in lines.items() if n > MAX_ROOM_LINES.get(room, n)} == {}


def test_a_file_is_short_and_says_what_it_is_for():
    for path in ALL_FILES:
        assert num_code_lines(path) <= MAX_CODE_LINES, path
        assert ast.get_docstring(tree_of(path)), path


def test_a_docstring_says_what_the_code_does_here():
    """A docstring that begins with `See` sends its reader to another file."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path, node in all_nodes(ALL_FILES):
        if isinstance(node, kinds):
            docstring = ast.get_docstring(node) or ""
            assert not docstring.startswith("See "), f"{path}:{node.lineno}"


def test_the_step_is_a_table_of_contents():
    tree = tree_of(PACKAGE / "engine" / "engine.py")
    (engine,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Engine")
    halves = [n for n in engine.body if isinstance(n, ast.FunctionDef) and n.name in ("launch", "collect")]
    assert len(halves) == 2
    for half in halves:
        assert half.end_lineno - half.lineno + 1 <= MAX_STEP_LINES


def is_triton_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function is compiled for a device; such a function can take no structures."""
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def test_no_function_has_too_many_parameters():
    for path, node in all_nodes(ALL_FILES):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_triton_kernel(node):
            a = node.args
            num_parameters = len([*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))])
            assert num_parameters <= MAX_PARAMETERS, f"{path}:{node.lineno} {node.name}"


def test_a_statement_assigns_one_value():
    """`a, b = x, y` packs two statements into a line. Kernels of Triton, which have many short ones, may."""
    for path, node in all_nodes(ALL_FILES):
        if isinstance(node, ast.Assign) and "triton" not in path.parts:
            is_packed = isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
            assert not is_packed, f"{path}:{node.lineno}"


def test_nobody_asks_a_checkpoint_for_its_kind():
    """Kinds are told apart by what they say: a new one touches no other file."""
    folder = PACKAGE / "kv" / "checkpoints"
    kinds = {
        node.name
        for path, node in all_nodes()
        if isinstance(node, ast.ClassDef) and path.is_relative_to(folder) and path.parent != folder.parent
        if any(isinstance(x, ast.Assign) and ast.unparse(x.targets[0]) == "kind" for x in node.body)
    }
    assert len(kinds) >= 3
    for path, node in all_nodes():
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
            asked = {x.id for x in ast.walk(node.args[1]) if isinstance(x, ast.Name)}
            assert not asked & kinds, f"{path}:{node.lineno}"


def test_no_two_classes_have_one_name():
    """But those by whose name a plug-in is found, and those that two dialects of clients call alike."""
    places = defaultdict(set)
    for path, node in all_nodes():
        if isinstance(node, ast.ClassDef) and not path.name.endswith("protocol.py"):
            places[node.name].add(path)
    shared = {name for name, paths in places.items() if len(paths) > 1}
    assert shared <= {"Policy", "Drafter", "Tier", "Format", "CheckpointKind"}


def test_no_call_unpacks_a_tuple_written_in_place():
    """`f(*(a, b, c), d)` hides what a, b and c are: keywords name them."""
    for path, node in all_nodes(ALL_FILES):
        if isinstance(node, ast.Call):
            unpacked = [a.value for a in node.args if isinstance(a, ast.Starred)]
            assert not any(isinstance(value, ast.Tuple | ast.List) for value in unpacked), f"{path}:{node.lineno}"


def test_a_launch_names_its_arguments():
    """Kernels have up to 65 parameters, so a launch matches none by its place: but for kernels with few."""
    for path, node in all_nodes():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and "triton" in path.parts:
            is_starred = any(isinstance(arg, ast.Starred) for arg in node.args)
            assert not is_starred and len(node.args) <= MAX_UNNAMED_ARGUMENTS, f"{path}:{node.lineno}"


def test_the_import_is_light():
    """`import retain` and the parser of the command line load neither torch nor anything else that is heavy."""
    parse = "import sys, retain, retain.cli.args; retain.cli.args.build_parser()"
    code = f"{parse}; print(*[m for m in sys.modules if '.' not in m])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "transformers", "tokenizers", "gguf", "jinja2"} & set(out)


def test_the_map_draws_every_room():
    """What docs/design/map.md draws exists, and every folder is drawn, below the one that holds it.

    Files are listed in docs/reference/files.md, which tests/unit/test_docs.py compares with the sources.
    """
    text = (ROOT / "docs" / "design" / "map.md").read_text()
    lines = re.search(r"^```\nsrc/retain/ .*?\n(.*?)^```", text, re.S | re.M)[1].splitlines()
    drawn = set()
    parents = []
    for line in lines:
        depth = (len(line) - len(line.lstrip())) // 2 - 1
        parents[depth:] = [line.split()[0].rstrip("/")]
        drawn.add("/".join(parents))
    kept = (f for f in PACKAGE.rglob("*") if f.is_file() and f.suffix not in (".pyc", ".so"))
    assert drawn == {f.parent.relative_to(PACKAGE).as_posix() for f in kept} - {"."}
