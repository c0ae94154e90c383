"""What is so of an op, its declaration says: no pass keeps a list of such ops."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MASKS = "what masks are written in"
LEFT_OUT = "what is followed where rows are left out"
NOTHING = "what is known to be 0"
# Tables of ops that neither declarations nor functions stand for, and why.
TABLES = {
    "autopar/proof/interpret.py SKIPPED": "ops without results",
    "passes/capture/normalize/add_dim.py ALONG": "overloads that are told which dims",
    "passes/capture/normalize/causal_masks.py COMPARES": MASKS,
    "passes/capture/exported/buffer_updates.py ADDS_TO": "writes, made of others",
    "passes/capture/normalize/causal_masks.py VIEWS": MASKS,
    "passes/capture/normalize/column_masks.py ANDS": MASKS,
    "passes/capture/normalize/column_masks.py ORDERS": MASKS,
    "passes/capture/rows/choose_rows.py TURNS": "which arguments turn a table round",
    "passes/capture/rows/chosen_rows.py LOOKUPS": LEFT_OUT,
    "passes/capture/rows/compare_readings.py STAY": NOTHING,
    "passes/capture/rows/compare_readings.py TAKEN_TOGETHER": NOTHING,
    "passes/capture/rows/compare_readings.py WRITES": NOTHING,
    "passes/capture/normalize/decompose_slices.py FILLED": "what slices are written to",
    "passes/capture/rows/join_answers.py FINITE_OF_HALVES": "finite unless all are 0",
    "passes/capture/rows/rows.py ADDING": LEFT_OUT,
    "passes/capture/rows/rows.py SETTING": LEFT_OUT,
    "passes/capture/rows/rows.py ZEROS": NOTHING,
    "passes/capture/exported/functionalize.py FILLS": "writes that are the same again",
    "passes/capture/exported/in_place.py NEW": "names that do not follow from others",
    "passes/shard/parameter_sharding.py RESHARDINGS": "made of the table of resharding",
    "passes/shard/ring.py SOFTMAX": "two names of one op",
    "passes/stage/overlap.py HANDS_ON": "what follows a scatter of a gradient",
}
NAME = r"(aten|autopar|comm)\.\w+(\.\w+)?"
MANY = 99  # ops of each of some words


def is_op(name: ast.AST | None) -> bool:
    """Whether it is the name of an op, or made of words that are."""
    if isinstance(name, ast.JoinedStr):
        return ast.unparse(name)[2:].startswith(("aten.{", "autopar.{", "comm.{"))
    return isinstance(name, ast.Constant) and bool(re.fullmatch(NAME, str(name.value)))


def is_function(value: ast.AST) -> bool:
    named = isinstance(value, ast.Name | ast.Attribute)
    return isinstance(value, ast.Lambda) or (named and not ast.unparse(value).isupper())


def names_of_ops(tree: ast.AST) -> int:
    """How many ops a table names, but for those whose values are functions."""
    match tree:
        case ast.Starred(value=inner):
            return names_of_ops(inner)
        case ast.Set(elts=items) | ast.Tuple(elts=items) | ast.List(elts=items):
            return sum(is_op(item) or names_of_ops(item) for item in items)
        case ast.SetComp(elt=one) | ast.GeneratorExp(elt=one) | ast.ListComp(elt=one):
            return MANY * is_op(one)
        case ast.DictComp():
            return MANY * (is_op(tree.key) and not is_function(tree.value))
        case ast.Dict():
            pairs = zip(tree.keys, tree.values, strict=True)
            return sum(is_op(key) and not is_function(value) for key, value in pairs)
    return 0


def tables(tree: ast.AST, least: int) -> Iterator[ast.AST]:
    """Tables that name so many ops, or more."""
    by_name = isinstance(tree, ast.Call) and ast.unparse(tree.func) == "dict.fromkeys"
    if by_name and all(map(is_function, tree.args[1:])):
        return
    if names_of_ops(tree) >= least:
        yield tree
    for child in ast.iter_child_nodes(tree):
        yield from tables(child, least)


def tables_of(text: str) -> Iterator[str]:
    """Names in a module: of tables, and of what has one inside."""
    for statement in ast.parse(text).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)]):
                least = 2
            case ast.AnnAssign(target=ast.Name(id=name)):
                least = 2
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                least = 3  # fewer are a condition
            case _:  # a name for each op
                continue
        if any(tables(statement, least)):
            yield name


@pytest.mark.slow
def test_tables_of_ops_are_declarations() -> None:
    passes, rest = ROOT / "passes", ROOT / "autopar"
    paths = {*passes.rglob("*.py"), *rest.rglob("*.py")} - {*passes.glob("ops/*.py")}
    known = {
        f"{path.relative_to(ROOT).as_posix()} {name}"
        for path in paths
        for name in tables_of(path.read_text(encoding="utf-8"))
    }
    assert known == TABLES.keys()


@pytest.mark.parametrize(
    "table",
    [
        "A = {'aten.add', 'aten.sub'}",
        "A: set[str] = {f'aten.{n}' for n in WORDS}",
        "A = frozenset(f'comm.{n}' for n in WORDS)",
        "A = {*(f'comm.{n}' for n in WORDS)}",
        "A = {'aten.add': 1, 'aten.sub': LIMIT}",
        "A = {**dict.fromkeys(('aten.add', 'aten.sub'), True)}",
        "A = {f'aten.{n}': 1 for n in WORDS}",
        "def A(x):\n    return x in ('aten.add', 'aten.sub', 'aten.mul')",
    ],
)
def test_a_table_of_ops_is_seen(table: str) -> None:
    assert [*tables_of(table)] == ["A"]


@pytest.mark.parametrize(
    "table",
    [
        "A = {'aten.add': add, 'aten.sub': lambda node: node}",
        "A = {**dict.fromkeys(('aten.add', 'aten.sub'), self.add)}",
        "A = {f'aten.{n}': rule for n in WORDS}",
        "A = {name for name, op in OPS.items() if op.labels}",
        "ADD, SUB = 'aten.add', 'aten.sub'",
        "def A(x):\n    return x in ('aten.add', 'aten.sub')",
    ],
)
def test_rewritings_and_conditions_are_no_tables(table: str) -> None:
    assert [*tables_of(table)] == []
