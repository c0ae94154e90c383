"""Collectives of parameters in blocks: where they start, and where they are awaited."""

from __future__ import annotations

from graphs import calls, lines, nodes_of

from autopar.passes.builder import Builder
from autopar.passes.stage.overlap import by_layer, gather_ahead, scatter_behind

SOURCES = "".join(
    f"input %{name} {kind}[4]\n"
    for kind, names in {"f32": "a b c0 x y e grad.a grad.b grad.c", "bf16": "h"}.items()
    for name in names.split()
)


def written(text: str) -> str:
    """The nodes of a text as they print, without types and places."""
    return calls(nodes_of(SOURCES + text))


def ahead(text: str, *given: str) -> str:
    return _by_block(text, gather_ahead, given)


def behind(text: str, *keep: str) -> str:
    return _by_block(text, scatter_behind, keep)


def _by_block(text: str, change, names: tuple[str, ...]) -> str:
    nodes = nodes_of(SOURCES + text)
    builder = Builder({v.name for n in nodes for v in (*n.operands, *n.results)})
    return calls(change(nodes, names, by_layer, builder))


def test_a_block_comes_while_the_one_before_computes():
    nodes = """
        f32[4] %a1 = comm.all_gather(%a, 'dp', 0, None)  #   h.0
        f32[4] %y1 = mul(%x, %a1)
        f32[4] %b1 = comm.all_gather(%b, 'dp', 0, None)  #   h.0
        f32[4] %z = mul(%y1, %b1)
        f32[4] %c = view(%c0)
        f32[4] %c1 = comm.all_gather(%c, 'dp', 0, None)  #   h.1
        f32[4] %u = mul(%z, %c1)
    """
    assert ahead(nodes, "a", "b", "c0") == lines("""
        %gathering = comm.start_gather([%a, %b], 'dp', [0, 0])
        %a1, %b1 = comm.wait(%gathering)
        %c = view(%c0)
        %gathering_1 = comm.start_gather([%c], 'dp', [0])
        %y1 = mul(%x, %a1)
        %z = mul(%y1, %b1)
        %c1 = comm.wait(%gathering_1)
        %u = mul(%z, %c1)
    """)


def test_what_is_gathered_of_activations_stays():
    nodes = """
        f32[4] %z = mul(%x, %a)
        f32[4] %z1 = comm.all_gather(%z, 'dp', 0, None)  #   h.0
        f32[4] %u = mul(%z1)
    """
    assert ahead(nodes, "a") == written(nodes)


def test_a_parameter_split_over_two_axes_is_whole_in_two_messages():
    nodes = """
        f32[4] %a1 = comm.all_gather(%a, 'cp', 0, None)  #   h.0
        f32[4] %a2 = comm.all_gather(%a1, 'dp', 0, None)  #   h.0
        f32[4] %b1 = comm.all_gather(%b, 'cp', 0, None)  #   h.0
        f32[4] %b2 = comm.all_gather(%b1, 'dp', 0, None)  #   h.0
        f32[4] %z = mul(%a2, %b2)
    """
    assert ahead(nodes, "a", "b") == lines("""
        %gathering = comm.start_gather([%a, %b], 'cp', [0, 0])
        %a1, %b1 = comm.wait(%gathering)
        %gathering_1 = comm.start_gather([%a1, %b1], 'dp', [0, 0])
        %a2, %b2 = comm.wait(%gathering_1)
        %z = mul(%a2, %b2)
    """)


def test_gradients_of_a_block_leave_while_the_next_one_computes():
    nodes = """
        f32[4] %d = mul(%x, %y)
        f32[4] %da = comm.reduce_scatter(%d, 'dp', 0)  #   h.1
        autopar.add_(%grad.a, %da)
        f32[4] %f = mul(%x, %y)
        f32[4] %db0 = comm.reduce_scatter(%f, 'dp', 0)  #   h.1
        f32[4] %db = reshape(%db0)
        autopar.add_(%grad.b, %db)
        f32[4] %g = mul(%x, %y)
        f32[4] %dc = comm.reduce_scatter(%g, 'dp', 0)  #   h.0
        autopar.add_(%grad.c, %dc)
    """
    assert behind(nodes) == lines("""
        %d = mul(%x, %y)
        %f = mul(%x, %y)
        %scattering = comm.start_scatter([%d, %f], 'dp', [0, 0])
        %g = mul(%x, %y)
        %da, %db0 = comm.wait(%scattering)
        autopar.add_(%grad.a, %da)
        %db = reshape(%db0)
        autopar.add_(%grad.b, %db)
        %scattering_1 = comm.start_scatter([%g], 'dp', [0])
        %dc = comm.wait(%scattering_1)
        autopar.add_(%grad.c, %dc)
    """)


def test_gradients_over_two_axes_leave_in_two_messages():
    nodes = """
        f32[4] %da1 = comm.reduce_scatter(%x, 'dp', 0)  #   h.0
        f32[4] %da2 = comm.reduce_scatter(%da1, 'cp', 0)  #   h.0
        autopar.add_(%grad.a, %da2)
        f32[4] %db1 = comm.reduce_scatter(%y, 'dp', 0)  #   h.0
        f32[4] %db2 = comm.reduce_scatter(%db1, 'cp', 0)  #   h.0
        autopar.add_(%grad.b, %db2)
    """
    assert behind(nodes) == lines("""
        %scattering = comm.start_scatter([%x, %y], 'dp', [0, 0])
        %da1, %db1 = comm.wait(%scattering)
        %scattering_1 = comm.start_scatter([%da1, %db1], 'cp', [0, 0])
        %da2, %db2 = comm.wait(%scattering_1)
        autopar.add_(%grad.a, %da2)
        autopar.add_(%grad.b, %db2)
    """)


def test_a_share_that_is_read_otherwise_is_there_at_once():
    nodes = """
        f32[4] %da = comm.reduce_scatter(%x, 'dp', 0)  #   h.0
        f32[4] %z = reshape(%da)
        autopar.add_(%grad.a, %z)
    """
    assert behind(nodes, "z") == written(nodes)
    assert behind(nodes) != written(nodes)


def test_what_is_computed_with_is_no_gradient_of_a_parameter():
    """Rows of activations, whose shares may lie in zigzag."""
    nodes = """
        f32[4] %da = comm.reduce_scatter(%x, 'dp', 0)  #   h.0
        f32[4] %z = mul(%da)
        autopar.add_(%grad.a, %z)
    """
    assert behind(nodes) == written(nodes)


def test_a_gradient_leaves_before_it_is_written_over():
    nodes = """
        f32[4] %d = mul(%x, %y)
        f32[4] %da = comm.reduce_scatter(%d, 'dp', 0)  #   h.0
        autopar.add_(%grad.a, %da)
        autopar.add_(%d, %y)
        f32[4] %z = mul(%d)
        f32[4] %db = comm.reduce_scatter(%e, 'dp', 0)  #   h.0
        autopar.add_(%grad.b, %db)
    """
    found = behind(nodes, "z").splitlines()
    start = found.index("%scattering = comm.start_scatter([%d], 'dp', [0])")
    assert start < found.index("autopar.add_(%d, %y)")
    assert found.count("%scattering_1 = comm.start_scatter([%e], 'dp', [0])") == 1


def test_messages_are_of_one_dtype_and_axis():
    nodes = """
        f32[4] %a1 = comm.all_gather(%a, 'dp', 0, None)
        f32[4] %b1 = comm.all_gather(%b, 'tp', 0, None)
        bf16[8] %h1 = comm.all_gather(%h, 'dp', 0, None)
        f32[4] %z = mul(%a1)
    """
    assert ahead(nodes, "a", "b", "h").startswith(
        lines("""
        %gathering = comm.start_gather([%a], 'dp', [0])
        %gathering_1 = comm.start_gather([%b], 'tp', [0])
        %gathering_2 = comm.start_gather([%h], 'dp', [0])
    """)
    )
