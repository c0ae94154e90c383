"""A run on several nodes: what torchrun is told on each of them.

Where their number may change, torchrun starts all ranks again when a node is lost or
comes: `autopar run` then plans for the ranks that there are, and goes on from the
newest checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.passes.errors import AutoparError
from autopar.passes.ranges import RANKS, Range, shown

PORTS = Range(1, (1 << 16) - 1)
RESTARTS = 100  # of ranks, in a run that lasts while nodes come and go
ALIVE, MISSED = (
    3,
    3,
)  # seconds between a node's signs of life; a lost one misses so many
LAST_CALL = 5  # seconds that nodes wait for more of them, once the fewest are there


class NodesError(AutoparError):
    """Nodes are impossible, or do not find each other."""


@dataclass(frozen=True)
class SeveralNodes:
    """least, most: how many there may be. rendezvous: HOST:PORT of one of them, whose
    torchrun is to live as long as the run. ranks: on each. seconds: to wait for the
    fewest nodes."""

    least: int
    most: int
    rendezvous: str
    ranks: int
    seconds: float

    @property
    def elastic(self) -> bool:
        return self.least < self.most

    @property
    def flags(self) -> list[str]:
        """The flags of torchrun."""
        wait = {
            "join_timeout": round(self.seconds),
            "last_call_timeout": LAST_CALL,
            "keep_alive_interval": ALIVE,
            "keep_alive_max_attempt": MISSED,
        }
        conf = ",".join(f"{name}={value}" for name, value in wait.items())
        return [
            *("--nnodes", f"{self.least}:{self.most}"),
            *("--nproc-per-node", str(self.ranks)),
            *("--max-restarts", str(RESTARTS if self.elastic else 0)),
            *("--rdzv-backend", "c10d", "--rdzv-id", "autopar"),
            *("--rdzv-endpoint", self.rendezvous, "--rdzv-conf", conf),
        ]

    @property
    def environment(self) -> dict[str, str]:
        """The variables of torchrun. Each start of the ranks meets anew: the store that
        torchruns share by default is told to no node that comes later."""
        return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if self.elastic else {}


def read_nodes(
    nodes: str, rendezvous: str | None, ranks: int, seconds: float
) -> SeveralNodes:
    """Read `4`, or from the fewest to the most: `1:4`. Raises: NodesError."""
    least, colon, most = nodes.partition(":")
    few, many = RANKS.parse(least), RANKS.parse(most if colon else least)
    if few is None or many is None or few > many:
        raise NodesError(
            f"--nodes {shown(nodes)}", fix="give their number, or a range, as 1:4"
        )
    host, _, port = (rendezvous or "").rpartition(":")
    if not host or PORTS.parse(port) is None:
        meeting = (
            f"--rendezvous {shown(rendezvous)}" if rendezvous else "no --rendezvous"
        )
        raise NodesError(
            f"--nodes {nodes}, and {meeting} to say where they meet",
            fix="give the name of one of them, and a port that is free there, the same "
            "on all: --rendezvous HOST:29400",
        )
    assert rendezvous is not None
    return SeveralNodes(int(few), int(many), rendezvous, ranks, seconds)
