"""What collectives take on links in a node and between nodes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from autopar.machine.hardware import RING_STEP, cluster_of
from passes.mesh import Mesh
from passes.price.cluster import ClusterError, Level, Link, Near

FAR, CLOSE = 1e-4, 1e-6
BYTES = 1e9


def over(nodes: int, each: int) -> Link:
    """Ranks that send 1 GB/s out of their node, 10 GB/s in it."""
    return Link(nodes * each, 1e9, FAR, Near(each, 1e10, CLOSE))


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_a_ring_enters_each_node_once(kind: str) -> None:
    link = over(nodes=4, each=2)
    moved = BYTES * 7 / 8 / 2e9  # a node's two devices share what leaves it
    assert link.seconds(kind, BYTES) == pytest.approx(moved + 3 * FAR + 4 * CLOSE)


def test_a_large_all_reduce_is_two_passes_of_a_ring() -> None:
    link = over(nodes=4, each=2)
    gathered = link.seconds("all_gather", 100 * BYTES)
    assert link.seconds("all_reduce", 100 * BYTES) == pytest.approx(2 * gathered)


def test_a_small_all_reduce_takes_steps_by_the_logarithm_of_nodes() -> None:
    took = [over(nodes, each=8).seconds("all_reduce", 8) for nodes in (8, 16, 32, 64)]
    steps = [after - before for before, after in pairwise(took)]
    assert steps == pytest.approx([2 * FAR] * 3)


def test_what_goes_to_other_nodes_leaves_by_ones_own_link() -> None:
    link = over(nodes=2, each=8)
    moved = BYTES / 2 / 1e9  # half of all ranks are in the other node
    latency = 8 * FAR + 7 * CLOSE
    assert link.seconds("all_to_all", BYTES) == pytest.approx(moved + latency)
    ring = link.seconds("all_gather", BYTES)
    assert ring == pytest.approx(BYTES * 15 / 16 / 8e9 + FAR + 14 * CLOSE)


def test_in_one_node_all_steps_are_alike() -> None:
    link = Link(8, 1e10, CLOSE)
    once = BYTES * 7 / 8 / 1e10 + 7 * CLOSE
    assert link.seconds("all_gather", BYTES) == pytest.approx(once)
    assert link.seconds("all_to_all", BYTES) == pytest.approx(once)
    assert link.seconds("all_reduce", BYTES) == pytest.approx(2 * once)
    assert link.without_latency().seconds("all_gather", BYTES) == BYTES * 7 / 8 / 1e10


def test_a_group_knows_how_many_of_it_share_a_node() -> None:
    cluster = cluster_of("32xH100")
    mesh = Mesh((("dp", 16), ("tp", 2)))
    near = cluster.link(mesh, ("dp",)).near
    assert near is not None
    assert near.ranks == 4
    assert cluster.link(mesh, ("tp",)).near is None


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_a_ring_between_nodes_goes_by_its_own_step(kind: str) -> None:
    link = over(nodes=4, each=2)
    slow = replace(link, step=7 * FAR)
    assert slow.seconds(kind, 8) - link.seconds(kind, 8) == pytest.approx(18 * FAR)
    # Trees and messages do not wait for all of a ring.
    for other in ("all_to_all", "send"):
        assert slow.seconds(other, BYTES) == link.seconds(other, BYTES)
    assert slow.seconds("all_reduce", 8) == link.seconds("all_reduce", 8)


def test_gathers_of_many_nodes_take_by_the_step_of_the_network() -> None:
    took = [
        cluster_of(f"{8 * nodes}xA100-80GB")
        .link(Mesh((("dp", 8 * nodes),)), ("dp",))
        .seconds("all_gather", 0)
        for nodes in (32, 64)
    ]
    near = 32 * 7 * 5e-6
    assert took[1] - took[0] == pytest.approx(32 * RING_STEP + near)
    assert cluster_of("128xCPU").levels[-1].step == 0


@pytest.mark.parametrize("step", [-1.0, float("nan")])
def test_a_step_that_cannot_be(step: float) -> None:
    with pytest.raises(ClusterError, match="step of a level of links"):
        Level(8, 1e9, 1e-6, step=step)
