"""What a user asks of the planner: devices, sizes or axes of a mesh, options."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.machine.hardware import cluster_of
from autopar.passes.errors import AutoparError
from autopar.passes.mesh import MeshError
from autopar.passes.plan import PlanError
from autopar.planner.request import plan_request, read_shape


@pytest.mark.parametrize(
    ("text", "shape"),
    [("4,2", (4, 2)), ("x=4, y=2", (4, 2)), ("pp=2,tp=2", ()), ("", ()), ("8", (8,))],
)
def test_sizes_are_read(text: str, shape: tuple[int, ...]) -> None:
    assert read_shape(text) == shape


@pytest.mark.parametrize("text", ["4,x", "x=4,2", "x=0", "0,4", "x=4,x=2", "4,-2"])
def test_wrong_sizes_are_refused(text: str) -> None:
    with pytest.raises(MeshError, match="fix"):
        read_shape(text)


def test_devices_are_given_apart_from_the_mesh_or_in_its_place() -> None:
    for devices in (8, "8xA100-80GB", cluster_of("8xA100-80GB")):
        alone, named = (
            plan_request(devices, {}),
            plan_request(None, {}, devices=devices),
        )
        assert alone == named and named and named.cluster.devices == 8
        part = plan_request("tp=2", {}, devices=devices)
        assert part and str(part.mesh) == "tp=2" and part.cluster == named.cluster
        sizes = plan_request((4, 2), {}, devices=devices)
        assert sizes and sizes.shape == (4, 2) and sizes.mesh is None
    with pytest.raises(MeshError, match="a mesh of 0 devices"):
        plan_request(None, {}, devices=0)
    with pytest.raises(MeshError, match="a mesh is text or a DeviceMesh"):
        plan_request(None, {}, auto=True)


def test_what_is_left_to_the_planner() -> None:
    assert plan_request("pp=2,tp=2", {"zero": 1}) is None
    assert plan_request("x=4,y=2", {}) is None  # and is an unknown axis then
    assert plan_request("", {}) is None
    whole = plan_request("tp=2,dp=2", {"zero": 1}, auto=True)
    assert whole and str(whole.mesh) == "tp=2,dp=2" and whole.cluster.devices == 4
    assert whole.space["zero"] == (1,)
    for mesh in ((4, 2), [4, 2]):
        sizes = plan_request(mesh, {})
        assert sizes and sizes.shape == (4, 2) and sizes.cluster.devices == 8
    limited = plan_request(2, {"memory": "1GB", "schedule": "auto"})
    assert limited and limited.limited.device.memory == 1e9
    assert "schedule" not in limited.space


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"hints": {"*.weight": "ffn/tp"}}, "no prices for hints="),
        ({"offload": True}, "no prices for offload="),
        ({"microbatches": 0}, "microbatches=0"),
        ({"zero": 4}, "zero=4"),
        ({"schedule": "best"}, "no schedule is named 'best'"),
        ({"precision": "fp8"}, "precision='fp8'"),
        ({"pp": 2}, "there is no option 'pp'"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], says: str) -> None:
    with pytest.raises(AutoparError, match=says):
        plan_request(2, options)


def test_an_axis_that_shares_nothing_out_without_zero() -> None:
    assert plan_request("fsdp=2", {"zero": 3}, auto=True) is not None
    with pytest.raises(PlanError, match="zero=0 shares nothing out"):
        plan_request("fsdp=2", {"zero": 0}, auto=True)
