"""`autopar.compile` with devices instead of a mesh: the plan is found for the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import plain_gpt
from processes import run_ranks
from trajectories import batches, build, optimizer, train_plainly

import autopar
from autopar.machine.hardware import (
    DEVICES,
    NODES,
    cluster_of,
    device_of,
    make_cluster,
    named_by_torch,
    node_size,
    with_memory,
)
from autopar.machine.measured_device import measure_device
from autopar.passes.errors import AutoparError
from autopar.passes.mesh import MeshError
from autopar.passes.plan import PlanError
from autopar.passes.price.cluster import ClusterError


def train_as_chosen(devices: Any, options: Any) -> tuple[list[float], dict, dict]:
    case = build("plain")
    step = autopar.compile(case.model, devices, loss_fn=case.loss_fn, **options)
    update, losses = None, []
    for batch in batches(case):
        loss = step(**batch)
        update = update or optimizer(step.parameters())
        step.clip_grad_norm_(0.5)
        update.step()
        update.zero_grad()
        losses.append(loss.item())
    names = ("mesh", "zero", "microbatches", "memory")
    decisions = {name: str(getattr(step.plan, name)) for name in names}
    return losses, step.state_dict(), decisions


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "options", "decided"),
    [
        (2, {}, {}),
        (
            "2xA100-80GB",
            {"zero": 1, "memory": "1GB"},
            {"mesh": "dp=2", "zero": "1", "memory": "1000000000"},
        ),
        ((2,), {"microbatches": 2}, {"microbatches": "2"}),
        ("tp=2", {"plan": "auto"}, {"mesh": "tp=2"}),
    ],
)
def test_the_chosen_plan_trains_as_one_device(devices, options, decided) -> None:
    wanted_losses, _, weights = train_plainly("plain")
    for losses, state, decisions in run_ranks(train_as_chosen, 2, devices, options):
        assert decided.items() <= decisions.items()
        assert losses == pytest.approx(wanted_losses, rel=1e-9)
        for name, value in weights.items():
            torch.testing.assert_close(state[name], value, rtol=1e-7, atol=1e-9)


def fails_as_chosen(memory: float) -> str:
    case = build("plain")
    cluster = with_memory(cluster_of("2xCPU"), memory)
    with pytest.raises(PlanError) as caught:
        autopar.compile(case.model, cluster, example_inputs=case.batch)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.slow
def test_all_ranks_hear_that_no_plan_fits() -> None:
    said = run_ranks(fails_as_chosen, 2, 1e4)
    assert said[0] == said[1]
    assert said[0].startswith("Infeasible: no plan fits into 2xCPU")


@pytest.mark.slow
def test_one_device_needs_no_processes() -> None:
    case = plain_gpt()
    step = autopar.compile(case.model, 1)
    with pytest.raises(AutoparError, match="not compiled yet"):
        assert step.plan
    loss = step(**case.batch)
    expected = case.model(**case.batch)[1]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert step.plan.mesh.size == 1


@pytest.mark.parametrize(
    ("mesh", "options", "error", "says"),
    [
        (0, {}, MeshError, "a mesh of 0 devices"),
        (True, {}, MeshError, "a mesh of True devices"),
        ("8xB1", {}, ClusterError, "no device is known as 'B1'"),
        ("8x", {}, ClusterError, "not a number of devices"),
        (2, {"offload": True}, PlanError, "no prices for offload="),
        ("tp=2", {"plan": "best"}, PlanError, "plan='best'"),
        ("x=2", {}, MeshError, "unknown axis 'x'"),
        ("x=2", {"plan": "auto"}, MeshError, "cluster '2xCPU' has 2 ranks"),
        (2, {}, MeshError, "cluster '2xCPU' has 2 ranks, but 1 processes run"),
    ],
)
def test_what_cannot_be_chosen_for(mesh, options, error, says) -> None:
    with pytest.raises(error, match=says):
        autopar.compile(plain_gpt().model, mesh, **options)


@pytest.mark.parametrize(
    ("name", "gigabytes", "known"),
    [
        ("NVIDIA A100-SXM4-80GB", 85.1, "A100-80GB"),
        ("NVIDIA A100-PCIE-40GB", 42.4, "A100-PCIe-40GB"),
        ("NVIDIA A100 80GB PCIe", 85.1, "A100-PCIe-80GB"),
        ("NVIDIA H100 80GB HBM3", 84.9, "H100"),
        ("NVIDIA H100 PCIe", 84.9, "H100-PCIe"),
        ("NVIDIA H100 NVL", 100.0, "H100-NVL"),
        ("NVIDIA A10G", 23.8, "A10G"),
        ("NVIDIA L40S", 47.7, "L40S"),
        ("NVIDIA GeForce RTX 4090", 25.3, "RTX-4090"),
        ("NVIDIA RTX A6000", 50.9, "RTX-A6000"),
        ("NVIDIA GH200 480GB", 101.5, "GH200"),
        ("NVIDIA B200", 191.5, "B200"),
        ("AMD Instinct MI300X", 205.8, "MI300X"),
        ("NVIDIA H200", 150.0, "H200"),
        ("Tesla V100-SXM2-32GB", 34.0, "V100"),
        ("NVIDIA L4", 23.6, "L4"),
        ("NVIDIA L40", 47.7, "L40"),
        ("NVIDIA A30", 25.2, "A30"),
        ("NVIDIA H200 NVL", 150.0, "H200-NVL"),
        ("NVIDIA H800 PCIe", 84.9, "H800-PCIe"),
        ("NVIDIA A800 80GB PCIe", 85.1, "A800-PCIe-80GB"),
        ("NVIDIA A800-PCIE-40GB", 42.4, "A800-PCIe-40GB"),
        ("NVIDIA B300 SXM6 AC", 288.0, "B300"),
        ("AMD Instinct MI325X", 274.9, "MI325X"),
    ],
)
def test_devices_are_known_by_the_names_that_torch_gives(
    name: str, gigabytes: float, known: str
) -> None:
    assert named_by_torch(name, gigabytes * 1e9) is DEVICES[known]


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("2xRTX4090", "RTX-4090"),
        ("2x GeForce RTX 4090", "RTX-4090"),
        ("8xh100_sxm5", "H100"),
        ("8xH100-80GB-HBM3", "H100"),
        ("8xNVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("4xA100 80GB PCIe", "A100-PCIe-80GB"),
    ],
)
def test_devices_are_known_by_other_spellings(text: str, known: str) -> None:
    assert cluster_of(text).device is DEVICES[known]


def test_nodes_of_other_sizes_are_told_by_their_number() -> None:
    assert cluster_of("2x8xH100") == cluster_of("16xH100")
    small = cluster_of("4 x 4 x A100-80GB")
    assert [level.devices for level in small.levels] == [4, 16]
    with pytest.raises(ClusterError, match=r"\n.*write 8xH100"):
        cluster_of("H100x8")
    for text in (f"{'9' * 5000}x8xH100", "0x8xH100", "131072x8xH100"):
        with pytest.raises(ClusterError, match="devices\n  fix  give a whole number"):
            cluster_of(text)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("H200NVR", "H200-NVL"), ("A100", "A100-80GB"), ("H100-16GB", "H100")],
)
def test_names_near_to_that_of_a_device_are_told(name: str, meant: str) -> None:
    with pytest.raises(ClusterError, match=rf"did you mean .*{meant}.*\? else use"):
        device_of(name)


def test_an_unknown_gpu_is_to_be_described() -> None:
    with pytest.raises(ClusterError, match=r"speed of a 'NVIDIA P100'"):
        named_by_torch("NVIDIA P100", 16e9)


def test_a_device_is_measured_by_products_and_copies() -> None:
    cpu, small = torch.device("cpu"), {"width": 128, "copied": 1 << 16}
    found = measure_device("of no table", 1e9, cpu, dispatch=1e-5, **small)
    assert found.peak("float32") > found.peak("float16") > 1e6 > 1 / found.efficiency
    assert found.bytes_per_second > 1e6 and found.dispatch == 1e-5
    cluster = make_cluster(found, 16)
    assert [level.devices for level in cluster.levels] == [8, 16]


def test_every_device_is_planned_for() -> None:
    """In its usual node, and beyond it."""
    for name, device in DEVICES.items():
        node = node_size(device)
        for devices in (1, node, 2 * node):
            cluster = cluster_of(f"{devices}x{name}")
            assert cluster.device.name == name
            assert cluster.levels[-1].devices >= devices
    assert set(NODES) | {"CPU"} == set(DEVICES)


# TFLOP/s of the best products in bfloat16, see `autopar.machine.hardware.DEVICES`.
BEST = {"A100-80GB": 271.2, "A100-PCIe-80GB": 252.9, "H100": 794.5, "H200": 794.5}
BEST |= {"GH200": 828.6, "B200": 1745, "GB200": 1822, "MI300X": 668.4}


@pytest.mark.parametrize("name", BEST)
def test_no_device_is_priced_above_the_best_that_it_was_seen_to_do(name: str) -> None:
    device = DEVICES[name]
    reached = device.flops["bfloat16"] * device.efficiency / 1e12
    assert 0.85 * BEST[name] < reached < 0.95 * BEST[name]
