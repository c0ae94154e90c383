"""How a process joins and leaves, and its device on machines with GPUs."""

from __future__ import annotations

import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import output_of, run_ranks, torchrun_command
from torch import nn

import autopar
from autopar.passes.mesh import Mesh, MeshError
from autopar.runtime.agreement import arrivals
from autopar.runtime.agreement.roll_call import RanksDisagree
from autopar.runtime.comm.comm import CommError
from autopar.runtime.comm.process_groups import ProcessComm
from autopar.runtime.launch.join import choose_backend, default_device, read_device

ROOT = Path(__file__).parents[2]


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The GPUs that were made the current one, of two."""
    found: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: found[-1])
    return found


def started(monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))


def test_each_process_takes_its_gpu(monkeypatch, chosen) -> None:
    started(monkeypatch, 1, 2)
    assert choose_backend() == "nccl"
    assert chosen == [1]
    assert default_device() == torch.device("cuda", 1)


def test_too_few_gpus_are_refused_on_all_processes(monkeypatch, chosen) -> None:
    started(monkeypatch, 0, 4)
    with pytest.raises(MeshError, match=r"4 processes run .* 2 GPUs\n  fix .*VISIBLE"):
        choose_backend()
    assert not chosen


@pytest.mark.parametrize(
    ("config", "kind"),
    [("cuda:nccl", "cuda"), ("cpu:gloo,cuda:nccl", "cuda"), ("cpu:gloo", "cpu")],
)
def test_processes_that_talk_by_gloo_use_no_gpu(
    monkeypatch, chosen, config: str, kind: str
) -> None:
    chosen.append(0)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: config)
    assert default_device().type == kind


def test_a_machine_without_gpus_computes_on_the_cpu(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_backend() == "gloo"
    assert default_device() == torch.device("cpu")


@pytest.mark.parametrize("device", ["nope", "cuda:99", 2.5, 7, "", "vulkan"])
def test_a_device_that_is_not_there_is_refused(device: Any) -> None:
    with pytest.raises(MeshError, match=r"^device=.* this process has cpu.*\n  fix  "):
        autopar.compile(nn.Linear(2, 2), "dp=1", device=device)


def test_a_device_that_is_there_is_taken() -> None:
    for device in ("cpu", "meta", torch.device("cpu")):
        assert read_device(device) == torch.device(device)


def destroy() -> None:
    comm = ProcessComm(Mesh.parse("dp=2,tp=2"), groups=[("dp", "tp"), ("tp",)])
    comm.all_reduce(torch.ones(1), ("tp",))
    groups = [weakref.ref(group) for group in comm._groups.values()]
    assert len(groups) == 2 and all(ref() is not None for ref in groups)
    dist.destroy_process_group()
    assert [ref() for ref in groups] == [None, None]
    with pytest.raises(CommError, match="destroy_process_group only at the end"):
        comm.all_reduce(torch.ones(1), ("tp",))


def test_no_group_outlives_its_destruction() -> None:
    """Threads of a group that did would abort a process which ends."""
    run_ranks(destroy, 4)


LEAVING = """
import atexit, sys
from datetime import timedelta
import torch.distributed as dist

def tell():  # runs after what is registered later
    sys.stdout.write(f"alive: {dist.is_initialized()}\\n")

atexit.register(tell)
from autopar.runtime.launch.join import join

join("mesh 'dp=2'", 2, timedelta(seconds=60))
sys.stdout.write(f"alive: {dist.is_initialized()}\\n")
"""


@pytest.mark.slow
def test_a_script_that_just_ends_leaves_its_groups_first(tmp_path: Path) -> None:
    """Threads of gloo's that outlive Python's end would abort the process."""
    (tmp_path / "script.py").write_text(LEAVING)
    said = output_of([*torchrun_command(2), "script.py"], tmp_path)
    assert sorted(said.splitlines()) == ["alive: False"] * 2 + ["alive: True"] * 2


def test_who_waits_for_others_to_compile_says_for_whom(monkeypatch, caplog) -> None:
    monkeypatch.setattr(arrivals, "LATE", 0.02)
    store, soon = dist.HashStore(), timedelta(seconds=0.1)
    store.set("autopar/f/0/0", "here")
    with pytest.raises(RanksDisagree, match="ranks 0 and 2 called f, but rank 1 did"):
        arrivals.await_all(store, 2, 3, "f", soon)
    assert "rank 2 has waited in f for 0 s: rank 1 did not call it yet" in caplog.text
    store.set("autopar/f/0/1", "")
    arrivals.await_all(store, 2, 3, "f", soon)
