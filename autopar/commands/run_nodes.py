"""`autopar run --nodes`: the ranks of this node, of several that meet."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from autopar.commands.arguments import number, text
from autopar.commands.run_model import is_model
from autopar.runtime.launch.launch import launch_by
from autopar.runtime.launch.several_nodes import NodesError, read_nodes
from autopar.training.options import RunOptions


def add_nodes(add: argparse.ArgumentParser) -> None:
    """Adds the flags of a run on several nodes."""
    group = add.add_argument_group("on several nodes, by the same command on each")
    group.add_argument(
        "--nodes",
        type=text,
        metavar="N|MIN:MAX",
        help="number of nodes; with a range, nodes may be lost and come",
    )
    group.add_argument(
        "--rendezvous",
        type=text,
        metavar="HOST:PORT",
        help="where nodes meet: the name of one of them, and a port that is free there",
    )
    group.add_argument(
        "--ranks-per-node",
        type=number("ranks_per_node"),
        metavar="N",
        help="ranks of each node (default: its GPUs, or 1 without GPUs)",
    )


def wants_nodes(arguments: argparse.Namespace) -> bool:
    """Whether several nodes are named. Raises: NodesError for what only these have."""
    if arguments.nodes is not None:
        return True
    for name in ("rendezvous", "ranks_per_node"):
        if getattr(arguments, name) is not None:
            raise NodesError(
                f"--{name.replace('_', '-')} is of several nodes, and none are named",
                fix="add --nodes N, or --nodes MIN:MAX",
            )
    return False


def launch_node(
    arguments: argparse.Namespace, argv: Sequence[str], options: RunOptions
) -> int:
    """Start this node's ranks; the first of all plans for those that there are."""
    ranks = arguments.ranks_per_node or torch.cuda.device_count() or 1
    nodes = read_nodes(arguments.nodes, arguments.rendezvous, ranks, options.timeout)
    if nodes.elastic and not options.resume:
        raise NodesError(
            f"with --nodes {arguments.nodes} a run goes on from its checkpoints, and "
            "none are written",
            fix="add --save DIR --save-every N --resume, with a DIR that nodes share",
        )
    if nodes.elastic and not is_model(arguments.plan):
        raise NodesError(
            f"'{arguments.plan}' is a plan for one number of ranks",
            fix="give the MODEL: it is planned for as many ranks as there are; or give "
            "one number of --nodes",
        )
    return launch_by(nodes.flags, argv, environment=nodes.environment)
