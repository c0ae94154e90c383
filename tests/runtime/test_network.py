"""Two nodes that share no loopback: network namespaces, joined by a cable to be cut."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from agents import Nodes, nodes, until
from plans import rows, tiny_file

from autopar.cli import main

HOSTS = {"node-a": "10.73.0.1", "node-b": "10.73.0.2"}
PORT = 29555  # of addresses that nothing else has


class Network:
    """Namespaces of network, host name and files, each held open by a process."""

    def __init__(self, folder: Path, held: list[subprocess.Popen[bytes]]) -> None:
        self.ids = [str(process.pid) for process in held]
        lines = [f"{address} {name}\n" for name, address in HOSTS.items()]
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
        a, b = self.ids
        self._do(*f"ip link add va netns {a} type veth peer name vb netns {b}".split())
        for place, end, (name, address) in zip(
            self.ids, ("va", "vb"), HOSTS.items(), strict=True
        ):
            for command in (
                f"ip addr add {address}/24 dev {end}",
                "ip link set lo up",
                f"ip link set {end} up",
                f"hostname {name}",
                f"mount --bind {folder / 'hosts'} /etc/hosts",
            ):
                self._do(*inside(place), *command.split())

    def cut(self) -> None:
        """From here on nothing arrives, and nobody is told."""
        self._do(*inside(self.ids[0]), "ip", "link", "set", "va", "down")

    @staticmethod
    def _do(*command: str) -> None:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        if done.returncode:
            pytest.skip(f"no namespaces of network here: {done.stderr.strip()}")


def inside(place: str) -> list[str]:
    """Runs another command in a namespace, by the process that holds it."""
    return ["nsenter", "-t", place, "-n", "-u", "-m"]


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        pytest.skip("no unshare, nsenter and ip here")
    held = [
        subprocess.Popen(["unshare", "-n", "-u", "-m", "sleep", "250"]) for _ in HOSTS
    ]
    try:
        time.sleep(0.5)  # until they are in namespaces of their own
        yield Network(tmp_path, held)
    finally:
        for process in held:
            process.kill()
            process.wait()


def losses(made: Nodes) -> dict[int, float]:
    told = (row for number in (0, 1) for row in rows(made.said(number)[0]))
    return {int(row["step"]): row["loss"] for row in told}


@pytest.mark.nightly
def test_a_cut_network_ends_both_nodes_by_name(
    network: Network, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No connection breaks: what does not answer is taken for gone. Until then the
    losses are those of a single device."""
    model = tiny_file(tmp_path)
    plan = str(tmp_path / "plan")
    assert main(["compile", model, "--mesh", "dp=2,tp=2", "-o", plan]) == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    torchrun += ["--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    torchrun += ["--rdzv-endpoint", f"{HOSTS['node-a']}:{PORT}"]
    run = ("-m", "autopar", "run", plan, "--steps", "1000000", "--json")
    with nodes(tmp_path, "2", 2) as made, ExitStack() as started:
        for place in network.ids:
            started.enter_context(made.start(*run, by=[*inside(place), *torchrun]))
        until("steps", lambda: max(losses(made), default=0) > 6, 90)
        network.cut()
        until("the end", lambda: not made.processes(), 60)
    a, b = (made.said(number)[1] for number in (0, 1))
    lost = r"autopar: rank \d on node 1 \(host node-b\) does not answer"
    assert len(re.findall(lost, a)) == 1, a
    gone = "autopar: torchrun on host node-a is gone or out of reach"
    assert gone in b, b
    alone = str(tmp_path / "alone")
    assert main(["compile", model, "--mesh", "tp=1", "-o", alone]) == 0
    capsys.readouterr()
    assert main(["run", alone, "--steps", "6", "--json"]) == 0
    for row in rows(capsys.readouterr().out):
        assert losses(made)[row["step"]] == pytest.approx(row["loss"], rel=1e-5)
