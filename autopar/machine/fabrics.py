"""Fabrics by name: what joins devices in a node, and nodes.

Bandwidths are the makers', of one device's links or of one NIC, one way. A message's
latency is that by which NCCL itself chooses how it communicates: 3.4 us over NVLink,
5.7 over PCIe and 14 over a network (`hwLat` of rings and the protocol Simple in
`src/graph/tuning.cc`, 2.18 to 2.27, the same whichever network it is).

A step is what each message of a collective keeps a link between nodes busy, see
`passes.price.cluster.Level`. Where nobody has published a measurement of it, it is such
a latency: the next message of a ring is sent when the one before it has arrived.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.passes.price.cluster import Level

GB = 1e9
US = 1e-6
NVLINK, PCIE, NETWORK = 3.4 * US, 5.7 * US, 14 * US


@dataclass(frozen=True)
class Fabric:
    """bytes_per_second: that one device, or one NIC, sends while it receives as many.
    latency, step: seconds, see `Level`. source: of what is measured of it."""

    name: str
    bytes_per_second: float
    latency: float
    step: float = 0.0
    source: str = ""

    def level(self, devices: int, each: float = 1.0) -> Level:
        """The links that join so many devices. each: NICs for a device of the node."""
        speed = self.bytes_per_second * each
        return Level(devices, speed, self.latency, step=self.step)


# Fitted to gathers and scatters of 256 MiB over 2 to 64 nodes of 8 H100s and EFA
# (`published.py --sweep` of `examples/benchmarks`).
EFA_STEP = 3.8e-5
FITTED = "the Ultra-Scale Playbook's benchmark of its links"
# With it runs of ZeRO-3 on 384 to 2,240 A100s (`published_zero.py` there) come out 1 %
# too slow in the middle, with NCCL's latency 25 % too fast.
SELENE = "arXiv 2104.04473, table 2"

FABRICS: Mapping[str, Fabric] = {
    fabric.name: fabric
    for fabric in (
        Fabric("NVLink 2", 150 * GB, NVLINK),  # V100
        Fabric("NVLink 3", 300 * GB, NVLINK),  # A100
        Fabric("NVLink 3, 8 links", 200 * GB, NVLINK),  # A800
        Fabric("NVLink 4", 450 * GB, NVLINK),  # H100, H200, H20, GH200
        Fabric("NVLink 4, 8 links", 200 * GB, NVLINK),  # H800
        Fabric("NVLink 5", 900 * GB, NVLINK),  # B200, GB200
        Fabric("Infinity Fabric 3", 448 * GB, NVLINK),  # MI300X: 7 links of 64 GB/s
        Fabric("PCIe 3", 16 * GB, PCIE),  # x16 each
        Fabric("PCIe 4", 32 * GB, PCIE),
        Fabric("PCIe 5", 64 * GB, PCIE),
        Fabric("InfiniBand EDR", 12.5 * GB, NETWORK, NETWORK),
        Fabric("InfiniBand HDR", 25 * GB, NETWORK, EFA_STEP, SELENE),
        Fabric("InfiniBand NDR", 50 * GB, NETWORK, NETWORK),
        Fabric("InfiniBand XDR", 100 * GB, NETWORK, NETWORK),
        Fabric("RoCE 100G", 12.5 * GB, NETWORK, NETWORK),
        Fabric("RoCE 200G", 25 * GB, NETWORK, NETWORK),
        Fabric("RoCE 400G", 50 * GB, NETWORK, NETWORK),
        # Elastic Fabric Adapter: 4 NICs of 100 Gb/s for 8 devices in a p4d, 32 of them
        # in a p5, 16 of 200 Gb/s in a p5en.
        Fabric("EFA 100G", 12.5 * GB, NETWORK, EFA_STEP, FITTED),
        Fabric("EFA 200G", 25 * GB, NETWORK, EFA_STEP, FITTED),
        Fabric("Ethernet 10G", 1.25 * GB, NETWORK, NETWORK),
        Fabric("Ethernet 100G", 12.5 * GB, NETWORK, NETWORK),
    )
}
