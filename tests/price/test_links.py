"""What collectives take on links in a node and between nodes."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from autopar.machine.cluster_file import cluster_from
from autopar.machine.fabrics import EFA_STEP, FABRICS
from autopar.machine.hardware import cluster_of
from autopar.passes.mesh import Mesh
from autopar.passes.price.cluster import ClusterError, Level, Link, Near, nodes

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


def counted(mesh: Mesh, axes: tuple[str, ...], devices: int) -> tuple[int, int] | None:
    """The same by looking at every rank."""
    groups = {mesh.group(rank, axes) for rank in range(mesh.size)}
    found = [Counter(rank // devices for rank in group) for group in groups]
    many = max(map(len, found))
    return (many, min(min(c.values()) for c in found)) if many > 1 else None


@pytest.mark.slow
def test_nodes_of_a_group_are_those_of_its_ranks() -> None:
    """On any mesh: groups of six straddle nodes of eight."""
    chance = random.Random(0)
    straddle = 0
    for _ in range(200):
        axes = chance.sample(["pp", "dp", "cp", "tp"], chance.randint(1, 4))
        mesh = Mesh(tuple((a, chance.choice([1, 2, 3, 4, 5, 6, 8])) for a in axes))
        group = tuple(chance.sample(axes, chance.randint(1, len(axes))))
        devices = chance.choice([4, 6, 8])
        expected = counted(mesh, group, devices)
        assert nodes(mesh, group, devices) == expected, (mesh, group, devices)
        size = math.prod(mesh.axis_size(a) for a in group)
        straddle += expected is not None and size <= devices
    assert straddle > 25


def test_a_group_that_straddles_nodes_talks_over_the_network() -> None:
    cluster = cluster_of("768xA100-80GB")
    straddles = cluster.link(Mesh.parse("dp=128,tp=6"), ("tp",))
    within = cluster.link(Mesh.parse("dp=96,tp=8"), ("tp",))
    assert straddles.near is not None and within.near is None
    assert straddles.near.ranks == 2 and straddles.near.nodes == 2
    assert straddles.seconds("all_gather", 1e9) > 3 * within.seconds("all_gather", 1e9)


def test_a_message_leaves_a_node_by_the_link_of_its_sender() -> None:
    """However many ranks of the pipeline are in the node beside it."""
    cluster = cluster_of("32xA100-80GB")
    inner = cluster.link(Mesh.parse("dp=2,pp=16"), ("pp",))
    outer = cluster.link(Mesh.parse("pp=4,dp=8"), ("pp",))
    assert inner.near is not None and inner.near.ranks == 8
    assert inner.seconds("send", 1e9) == outer.seconds("send", 1e9)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_links_of_a_ring_carry_one_message_of_each_rank(kind: str) -> None:
    link = over(nodes=4, each=2)
    busy = replace(link, step=2 * FAR)
    hops = 3 * FAR + 4 * CLOSE
    assert busy.seconds(kind, 8) - link.seconds(kind, 8) == pytest.approx(
        7 * 2 * FAR - hops
    )
    # Of messages that take less than the way of one, this way is what counts.
    assert replace(link, step=FAR / 10).seconds(kind, 8) == link.seconds(kind, 8)
    for other in ("all_to_all", "send"):
        assert busy.seconds(other, BYTES) == link.seconds(other, BYTES)


def test_links_of_a_tree_carry_a_message_of_each_rank_in_a_node() -> None:
    busy = replace(over(nodes=4, each=2), step=2 * FAR)
    levels = 2 * 2 * 2 * FAR
    assert busy.seconds("all_reduce", 0) == pytest.approx(2 * (levels + CLOSE))


def test_gathers_of_many_ranks_take_as_many_steps() -> None:
    """Where there is one of them in a node, too: what it is of is messages."""

    def seconds(mesh: str) -> float:
        cluster = cluster_of("512xA100-80GB")
        return cluster.link(Mesh.parse(mesh), ("dp",)).seconds("all_gather", 0)

    assert seconds("dp=512") == pytest.approx(511 * EFA_STEP)
    assert seconds("dp=64,tp=8") == pytest.approx(63 * EFA_STEP)
    assert cluster_of("128xCPU").levels[-1].step == 0


@pytest.mark.parametrize("step", [-1.0, float("nan")])
def test_a_step_that_cannot_be(step: float) -> None:
    with pytest.raises(ClusterError, match="step of a level of links"):
        Level(8, 1e9, 1e-6, step=step)


def described(**network: object) -> Level:
    """The outer links of a cluster file, 8 H100s a node."""
    links = [{"devices": 8, "fabric": "NVLink 4"}, {"devices": 16, **network}]
    data = {"devices": 16, "device": "H100", "links": links}
    return cluster_from(data).levels[-1]


def test_a_network_is_named_in_a_cluster_file() -> None:
    """By its NICs, which all devices of a node share; what is written overrules it."""
    assert described(fabric="InfiniBand NDR") == cluster_of("16xH100").levels[-1]
    rails = described(fabric="RoCE 200G", nics=4, step="1e-6")
    assert rails.bytes_per_second == FABRICS["RoCE 200G"].bytes_per_second / 2
    assert rails.step == 1e-6 and rails.latency == FABRICS["RoCE 200G"].latency


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ({"fabric": "Token Ring"}, "no fabric is known as 'Token Ring'"),
        ({"nics": 4}, "'links.nics' says how many, but not of what"),
        ({"latency": 1e-6}, "links has no 'bytes_per_second'"),
    ],
)
def test_a_network_that_is_not_described(
    network: dict[str, object], message: str
) -> None:
    with pytest.raises(ClusterError, match=message):
        described(**network)


def test_networks_differ_in_what_a_message_keeps_busy() -> None:
    """What one cluster's network was measured to take is charged to no other."""
    mesh = Mesh.parse("dp=2,tp=16")
    fast = cluster_of("32xH100").link(mesh, ("tp",)).seconds("all_gather", 0)
    slow = described(fabric="EFA 100G", nics=32)
    assert slow.bytes_per_second == FABRICS["InfiniBand NDR"].bytes_per_second
    assert fast < 15 * slow.step / 2
