"""What does not carry over from a small program to a large one is noticed."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from proofs import BIG, changed, compiled

from autopar.passes.proof.extents import Extent
from autopar.passes.proof.same_specs import find_other_spec
from autopar.passes.proof.shrink_plan import StageLayers
from autopar.passes.proof.transfer import Sizes, differs
from autopar.proof.prove_program import NotProved, check_transfer
from autopar.proof.small import make_small
from examples.gpt import Config


@cache
def texts(mesh: str) -> tuple[str, str, Sizes, StageLayers]:
    """The large program, the small one, and what is known of both."""
    model, batch, program = compiled(mesh)
    small = make_small(program, model, batch)
    (large,), (few,) = program.modules.values(), small.program.modules.values()
    sizes = Sizes.of(small.sizes, [(2, 2)])
    return large, few, sizes, small.few.layers(0, range(BIG.layers))


@pytest.mark.matrix(quick=0)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("'tp', 1)", "'tp', 0)"),  # another dim
        ("'tp', 1)", "'tp', 2)"),
        (".transpose(1, 2)", ".transpose(1, 3)"),
        ("reduce_scatter(", "all_to_all("),
        ("+{i}.mlp.up.weight", "+{i - 1}.mlp.up.weight"),  # of another layer
        ("(range(6))", "(range(5))"),
        ("range(6))", "range(3))"),
        ("    for i in range(6)", "    for i in range(5)"),
        (".add_(", ".sub_("),
        ("1e-05", "1e-03"),
        ("    kernels.bias_grad_(", "    id("),
        (", True, ", ", False, "),  # not causal
        (", 3, 8])", ", 3, 9])"),  # no size
    ],
)
def test_a_large_program_that_is_not_as_the_small_one_is_noticed(
    old: str, new: str
) -> None:
    large, few, *known = texts("tp=2")
    assert differs(large, few, *known) is None
    assert differs(changed(large, old, new), few, *known) is not None


@pytest.mark.slow
def test_parameters_for_others_and_other_factors_are_noticed() -> None:
    model, batch, program = compiled("tp=2")
    small = make_small(program, model, batch)
    check_transfer(program, small)
    (stage,) = program.stages
    one, other = "blocks.+1.norm1.weight", "blocks.+2.norm1.weight"
    names = {**stage.names, one: stage.names[other], other: stage.names[one]}
    with pytest.raises(NotProved, match=r"'blocks.2.norm1.weight' does not rest"):
        check_transfer(replace(program, stages=(replace(stage, names=names),)), small)
    name = "blocks.0.attention.qkv.weight"
    spec = program.parameters[name]
    turned = replace(spec, factors=tuple(dim[::-1] for dim in spec.factors))
    assert turned != spec
    with pytest.raises(NotProved, match=f"'{name}' does not rest"):
        parameters = {**program.tensors, name: turned}
        check_transfer(replace(program, tensors=parameters), small)


def test_keys_that_count_layers_from_one_end_with_the_last() -> None:
    def text(end: int) -> str:
        keys = f'f"reshape.{{i}}": ((8,), torch.float32) for i in range(1, {end})'
        return f"PARAMETERS = {{}}\nWHOLE_GRADIENTS = {{\n    **{{{keys}}},\n}}\n"

    known = Sizes.of({Extent(8): 8}, [(2, 2)]), StageLayers("blocks", (0, 1, 2), 4)
    assert differs(text(5), text(4), *known) is None
    assert differs(text(6), text(4), *known) is not None


def test_layers_outside_of_loops_have_their_turn() -> None:
    def text(count: int, outside: int = 1) -> str:
        return f"""PARAMETERS = {{
    **{{
        f"blocks.+{{i}}.{{name}}": row
        for i in range({count})
        for name, row in {{
            "weight": ((8,), torch.float32),
        }}.items()
    }},
}}

def backward(c, p, g, k, b, saved):
    for i in reversed(range(2, {count})):
        kernels.add_(g[f"blocks.+{{i}}.weight"], saved[0])
    kernels.add_(g["blocks.+{outside}.weight"], saved[0])
    kernels.add_(g["blocks.+0.weight"], saved[0])
"""

    known = Sizes.of({Extent(8): 8}, [(2, 2)]), StageLayers("blocks", (0, 1, 2, 3), 8)
    assert differs(text(8), text(4), *known) is None
    found = differs(text(8, outside=5), text(4), *known)  # as far from the last
    assert "in backward: 'g[\"weight\"] of layers [7, 6, 5, 4, 3, 2, 5, 0]'" in str(
        found
    )


@pytest.mark.parametrize(
    ("statement", "large", "small", "wrong"),
    [
        # A gradient that is whole for a step, outside of a loop, is told by its layer.
        ('yield [g["gathered.{}"]]', (4,), (3,), (2,)),
        # A piece of a parameter is named by where it lies.
        ('x = p["blocks.+0.qkv[{}:{}].weight"]', (24, 40), (12, 20), (24, 41)),
        # Choices of experts are numbered through the layers of all stages.
        ("y = c.choose(x, 2, {}, (((9, ('dp',)),),))", (7,), (2,), (1,)),
        # As many as there are heads, from 1 on.
        ("x = aten.arange.start({}, {}, dtype=torch.int32)", (1, 9), (1, 5), (1, 10)),
        # A table of numbers has a row for each layer, here of the last.
        ("x = aten.select.int(y, 0, {})", (4,), (3,), (2,)),
        ("x = aten.select_backward.default(y, [5], 0, {})", (4,), (3,), (2,)),
        ("x = attention(y, i + {})", (1,), (1,), (2,)),
    ],
)
def test_numbers_in_texts_are_told_for_what_they_are(
    statement: str,
    large: tuple[int, ...],
    small: tuple[int, ...],
    wrong: tuple[int, ...],
) -> None:
    def text(numbers: tuple[int, ...]) -> str:
        wholes = '{**{f"gathered.{i}": ((8,), torch.float32) for i in range(1, 5)}}'
        head = f"PARAMETERS = {{}}\nWHOLE_GRADIENTS = {wholes}\n"
        return f"{head}\ndef epilogue(c, p):\n    {statement.format(*numbers)}\n"

    # Layers 0 to 4, of which 0, 1, 4 are kept; keys count from 1.
    known_sizes = {Extent(n): n // 2 for n in (8, 16, 24)}
    sizes = Sizes.of(known_sizes, [(2, 2)])
    known = sizes, StageLayers("blocks", (0, 1, 3, 4), 5)
    assert differs(text(large), text(small), *known) is None
    assert differs(text(wrong), text(small), *known) is not None


def test_rows_are_counted_through_all_stages() -> None:
    stage = StageLayers("blocks", (0, 1, 3, 4), 5, begins=(4, 7))
    assert [n for n in range(20) if stage.are_rows(4, n)] == [7]
    assert [n for n in range(20) if stage.are_rows(7, n)] == [11]
    assert not stage.are_rows(3, 11) and not StageLayers("", (), 5).are_rows(0, 0)


@pytest.mark.slow
def test_factors_are_told_by_their_extents_where_small_ones_are_equal() -> None:
    *_, program = compiled("tp=2")
    name, (three, six, eight) = "blocks.0.attention.qkv.bias", map(Extent, (3, 6, 8))
    sizes = {three: 3, six: 4, eight: 4}
    spec = program.parameters[name]
    assert spec.factors == ((3, 6, 8),)

    def other(large: tuple[int, ...]) -> str | None:
        few, many = (
            replace(program, tensors={name: replace(spec, factors=(own,))})
            for own in ((3, 4, 4), large)
        )
        return find_other_spec(many, few, sizes, {name: ((three, six, eight),)})

    assert other((3, 6, 8)) is None
    assert other((3, 8, 6)) == name


@pytest.mark.slow
def test_a_stage_of_no_layers_stands_for_itself() -> None:
    config = Config(layers=8, width=48, heads=6, context=40, vocab=64)
    options = {"cuts": ("blocks.4", "")}
    model, batch, program = compiled("pp=3", 4, config, **options)
    assert program.stages[-1].layers == ("",)
    small = make_small(program, model, batch)
    assert small.few.numbers == ((0, 1, 2), (4, 5, 6), ())
    check_transfer(program, small)


@pytest.mark.slow
def test_a_layer_that_is_left_out_is_noticed() -> None:
    large, few, *known = texts("")
    assert differs(large, few, *known) is None
    for fewer in ("range(5)", "range(3)"):
        wrong = large.replace("range(6)", fewer)
        assert wrong != large
        assert differs(wrong, few, *known) is not None
