"""The house: imports run one way, and the compiler in `passes` has no effects."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import networkx
import pytest

ROOT = Path(__file__).parents[1]

# The folders and files of `passes`: what all stand on, the way through the compiler,
# what finds the best plan for it, and what calls them all.
PASSES = (
    "__init__", "errors", "ranges", "atoms", "digest", "nested", "replaced", "watch",
    "graph_text", "graph", "builder", "decode", "mesh", "ops", "cost", "layers",
    "checkpointed", "repeat_layers", "part", "rewrite", "traced", "capture", "dims",
    "schedule",
    "recompute", "plan", "shard", "stage", "emit", "price", "search", "proof_record",
    "program", "proof", "read_program", "schedule_stages", "emit_modules", "assemble",
    "pipeline",
)  # fmt: skip
# The rooms of `capture`; its own files call them all.
CAPTURE = ("forward", "rows", "exported", "normalize")
# The rooms of `autopar`, and files that are one; the API and its own name come last.
ROOMS = (
    "version", "gc_paused", "own_modes", "read_file", "units", "terminal", "progress",
    "unlike_module", "runtime.kernels", "runtime.comm", "runtime.parameters",
    "runtime.agreement", "runtime.execute", "runtime.launch", "machine", "options",
    "capture", "models", "local_batches", "checkpoints", "held_state",
    "module_calls", "rank_step",
    "measure", "proof", "verify", "compiler", "other_shapes", "plans", "planner",
    "step", "training", "reports", "__init__", "commands", "cli", "__main__",
)  # fmt: skip
# What `passes` must not reach: processes, clocks, files, the environment, chance.
EFFECTS = {
    "asyncio", "autopar", "concurrent", "datetime", "examples", "glob", "importlib",
    "io", "logging", "multiprocessing", "os", "pathlib", "random", "shutil", "signal",
    "socket", "subprocess", "sys", "tempfile", "threading", "time", "torch.distributed",
    "torch.multiprocessing", "urllib", "numpy.random",
}  # fmt: skip
# Text about a path touches no file; the module itself is a name until it is used.
HARMLESS = {"os", "os.path", "os.sep", "sys", "sys.maxsize"}
COMPILER = "autopar.passes"  # a link to the folder, so that no other package is hidden
BUILTINS = {"open", "input", "print", "exec", "eval", "__import__"}


def used(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of each import, attribute of a module, and call."""
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
                full = alias.name if alias.asname else alias.name.split(".")[0]
                modules[alias.asname or full] = full
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield node.lineno, full
                modules[alias.asname or alias.name] = full
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, _, rest = ast.unparse(node).partition(".")
            if root in modules:
                yield node.lineno, f"{modules[root]}.{rest}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.lineno, node.func.id


def within(name: str, roots: set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[: i + 1]) in roots for i in range(len(parts)))


def impure(names: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
    """What a file of `passes` uses and must not."""
    harmless = {name for name in HARMLESS if "." in name}
    return [
        (line, name)
        for line, name in names
        if name in BUILTINS or (within(name, EFFECTS) and name not in HARMLESS)
        if not within(name, {COMPILER, *harmless})
    ]


def sources(folder: str | Path) -> list[Path]:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths, f"no sources in {folder}"
    return paths


def parse(path: Path) -> ast.Module:
    """A file of ours, with the whole names of what it imports from beside it."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    package = path.relative_to(ROOT).parent.parts
    if package[:1] == ("passes",):
        package = ("autopar", *package)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            above = package[: len(package) - node.level + 1]
            node.module = ".".join((*above, *filter(None, [node.module])))
            node.level = 0
    return tree


@cache
def used_in(path: Path) -> tuple[tuple[int, str], ...]:
    return tuple(used(parse(path)))


@pytest.mark.slow
def test_the_compiler_stands_without_the_rest() -> None:
    """It names its own files from where they are, and imports nothing of autopar."""
    for path in sources("passes"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and not node.level:
                assert not within(str(node.module), {"autopar", "passes"}), path
    line = "import passes.pipeline, sys; sys.exit('autopar' in sys.modules)"
    alone = subprocess.run([sys.executable, "-c", line], cwd=ROOT)
    assert alone.returncode == 0


@pytest.mark.parametrize("place", PASSES)
def test_a_place_of_passes_imports_those_before_it(place: str) -> None:
    after = {f"{COMPILER}.{name}" for name in PASSES[PASSES.index(place) + 1 :]}
    folder = ROOT / "passes" / place
    for path in sources(folder) if folder.is_dir() else [folder.with_suffix(".py")]:
        assert [name for _, name in used_in(path) if within(name, after)] == []


@pytest.mark.parametrize("room", CAPTURE)
def test_a_room_of_capture_imports_those_before_it(room: str) -> None:
    folder = f"{COMPILER}.capture"
    before = {f"{folder}.{name}" for name in CAPTURE[: CAPTURE.index(room) + 1]}
    for path in sources(ROOT / "passes" / "capture" / room):
        names = {name for _, name in used_in(path) if within(name, {folder})}
        assert {name for name in names if not within(name, before)} == set(), path


def test_all_of_passes_has_a_place() -> None:
    rooms = {path.parent.name for path in (ROOT / "passes/capture").rglob("*.py")}
    assert rooms - {"capture"} == set(CAPTURE)
    places = {path.stem for path in (ROOT / "passes").glob("[a-z_]*")}
    assert places - {"__pycache__"} == set(PASSES)


def module_of(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    if name.startswith("passes"):
        name = f"autopar.{name}"
    return name.removesuffix(".__init__") if name.count(".") > 1 else name


def imported(tree: ast.AST) -> Iterator[str]:
    """Modules of ours that a file imports when it runs, and not for its types alone."""
    if isinstance(tree, ast.If) and ast.unparse(tree.test) == "TYPE_CHECKING":
        return
    if isinstance(tree, ast.ImportFrom) and tree.module:
        for alias in tree.names:
            full = f"{tree.module}.{alias.name}"
            yield full if full in MODULES else tree.module
    for child in ast.iter_child_nodes(tree):
        yield from imported(child)


OURS = (*sources("autopar"), *sources("passes"))
MODULES = {module_of(path) for path in OURS}


def room_of(module: str) -> str:
    parts = module.split(".")[1:]
    return ".".join(parts[:2] if parts[0] == "runtime" else parts[:1])


@pytest.mark.slow
def test_a_room_imports_those_before_it() -> None:
    places = {room_of(module_of(path)) for path in sources("autopar")} - {"runtime"}
    assert places == set(ROOMS)
    for path in sources("autopar"):
        names = {n for n in imported(parse(path)) if n.startswith("autopar.")}
        names = {n for n in names if not within(n, {COMPILER})}
        used_rooms = {room_of(name) for name in names}
        room = room_of(module_of(path))
        if room != "runtime":
            before = {"runtime", *ROOMS[: ROOMS.index(room) + 1]}
            assert used_rooms <= before, (path, used_rooms - before)


@pytest.mark.slow
def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = networkx.DiGraph()
    for path in OURS:
        names = MODULES.intersection(imported(parse(path)))
        graph.add_edges_from((module_of(path), n) for n in names - {module_of(path)})
    assert [*networkx.simple_cycles(graph)] == []


def test_passes_have_no_effects() -> None:
    found = {str(path): impure(used_in(path)) for path in sources("passes")}
    assert {path: names for path, names in found.items() if names} == {}


DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
VAGUE = {"found", "given", "said", "things", "stuff", "what"}
# A docstring that begins so leaves out what it speaks of.
DANGLING = {
    "About", "After", "Along", "Apart", "Around", "As", "At", "Before", "Behind",
    "Beside", "Between", "Both", "By", "Down", "Each", "For", "From", "In", "Into",
    "Its", "Not", "Of", "On", "Once", "Over", "So", "That", "Their", "Those", "To",
    "Under", "Unless", "When", "Where", "Whose", "With", "Within", "Without",
}  # fmt: skip


@pytest.mark.slow
def test_names_and_docstrings_say_what_they_are_of() -> None:
    """Names as `found` and `what`, and docstrings as "Of a rank." are riddles."""
    riddles = {
        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
        for folder in ("passes", "autopar", "examples")
        for path in sources(folder)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (
            isinstance(node, ast.Name | ast.arg | ast.Attribute)
            and VAGUE & {getattr(node, field, "") for field in ("id", "arg", "attr")}
        )
        or (
            isinstance(node, DOCUMENTED)
            and DANGLING & {*re.findall(r"\A\w+", ast.get_docstring(node) or "")}
        )
    }
    assert riddles == set()


def test_public_functions_and_classes_have_docstrings() -> None:
    without = {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for folder in ("passes", "autopar")
        for path in sources(folder)
        for node in parse(path).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
        and not (node.name.startswith("_") or ast.get_docstring(node))
    }
    assert without == set()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import autopar.comm", "autopar.comm"),
        ("from autopar import comm", "autopar.comm"),
        ("import torch.distributed as dist", "torch.distributed"),
        ("from torch import distributed", "torch.distributed"),
        ("import torch\ntorch.distributed.barrier()", "torch.distributed.barrier"),
        ("import os\nos.environ['A']", "os.environ"),
        ("from os import environ", "os.environ"),
        ("from time import perf_counter", "time.perf_counter"),
        ("import numpy as np\nnp.random.rand(2)", "numpy.random.rand"),
        ("def f():\n    import subprocess", "subprocess"),
        ("open('plan.json')", "open"),
    ],
)
def test_an_effect_is_seen(text: str, name: str) -> None:
    assert name in [found for _, found in impure(used(ast.parse(text)))]


@pytest.mark.parametrize(
    "text",
    [
        "import os\nos.path.basename(os.sep)",
        "import torch\ntorch.fx.Graph()",
        "from autopar.passes.timeline import Timeline",
        "graph.time = operator.open",
    ],
)
def test_what_is_pure_passes(text: str) -> None:
    assert impure(used(ast.parse(text))) == []


def test_autopar_does_not_import_its_examples() -> None:
    used_by = ((path, name) for path in sources("autopar") for _, name in used_in(path))
    assert [own for own in used_by if within(own[1], {"examples"})] == []


def test_the_example_model_knows_nothing_of_us() -> None:
    names = {name for _, name in used_in(ROOT / "examples/gpt.py")}
    assert "torch.nn" in names
    assert [name for name in names if within(name, {"autopar"})] == []


def test_every_package_ships() -> None:
    listed = re.search(
        r"^packages = \[([^\]]*)\]$",
        (ROOT / "pyproject.toml").read_text(),
        re.MULTILINE,
    )
    assert listed, "pyproject.toml lists its packages"
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for folder in ("autopar", "autopar/passes")
        for path in sources(folder)
    }
    assert found | {"autopar.examples"} == set(re.findall(r'"([^"]+)"', listed[1]))
