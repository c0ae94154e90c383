"""Several nodes: which one each rank is on, and where the processes of a run meet."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_ranks

from autopar.cli import main
from autopar.passes.mesh import Mesh, MeshError
from autopar.runtime.agreement.roll_call import RanksDisagree
from autopar.runtime.launch import join
from autopar.runtime.launch.join import check_own_gpu, compare_gpus
from autopar.runtime.launch.meet import meet, open_store
from autopar.runtime.launch.nodes import (
    EnvironmentVariableError,
    straddling,
    this_node,
    torchrun_for,
)

SOON = timedelta(seconds=0.2)
WAIT = timedelta(seconds=60)


def on_node(monkeypatch: pytest.MonkeyPatch, number: int, of: int, ranks: int) -> None:
    told = {"GROUP_RANK": number, "GROUP_WORLD_SIZE": of, "LOCAL_WORLD_SIZE": ranks}
    for name, value in told.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("socket.gethostname", lambda: "b")


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


# --- what torchrun tells -----------------------------------------------------------


def test_a_rank_knows_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (this_node().nodes, this_node().on) == (1, "")
    on_node(monkeypatch, 1, 2, 4)
    assert this_node().on == " on node 1 (host b)" and this_node().ranks == 4
    on_node(monkeypatch, 2, 2, 4)
    with pytest.raises(EnvironmentVariableError, match="GROUP_RANK='2'"):
        this_node()


def ranks_here() -> tuple[int, str | None]:
    here = this_node().ranks
    return here, straddling(Mesh.parse("tp=2"), here)


def test_ranks_that_no_launcher_started_are_on_one_node() -> None:
    """As those of torch.multiprocessing.spawn, whose environment tells nothing."""
    assert run_ranks(ranks_here, 2) == [(2, None)] * 2


@pytest.mark.parametrize(
    ("nodes", "each", "ranks", "command"),
    [
        (1, 4, 8, "--nproc-per-node 8"),
        (2, 2, 8, "--nnodes 4 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint"),
        (2, 3, 8, "--nnodes 4 --nproc-per-node 2 --rdzv"),
        (2, 4, 4, "--nproc-per-node 4"),
        (2, 8, 7, "--nproc-per-node 7"),
    ],
)
def test_the_command_starts_so_many_ranks(
    monkeypatch: pytest.MonkeyPatch, nodes: int, each: int, ranks: int, command: str
) -> None:
    on_node(monkeypatch, 0, nodes, each)
    assert torchrun_for(ranks).startswith(f"torchrun {command}")
    with pytest.raises(MeshError, match=f"but 1 processes run\n  fix .* {command}"):
        join.join(f"mesh 'dp={ranks}'", ranks, WAIT)


@pytest.mark.parametrize(
    ("mesh", "node", "says"),
    [
        ("dp=2,tp=4", 4, None),
        ("tp=4", 4, None),
        ("tp=4,dp=2", 4, "over 2 nodes of 4 ranks .*\n  fix  write 'dp=2,tp=4'"),
        ("tp=2,qp=4,dp=1", 4, "^tp and qp of .* a size that divides 4"),
        ("dp=2,tp=2", 3, "over 2 nodes of 3 .*\n  fix  give tp a size that divides 3"),
        ("dp=8", 2, None),
    ],
)
def test_tensor_parallel_ranks_of_several_nodes_are_told(
    mesh: str, node: int, says: str | None
) -> None:
    found = straddling(Mesh.parse(mesh), node)
    assert (found is None) == (says is None)
    assert says is None or re.search(says, str(found), re.S)


# --- where they meet ---------------------------------------------------------------


def meeting(store: dist.Store, ranks: range, world: int, wait: timedelta) -> list[Any]:
    """What each rank gets: a store, or an error."""
    with ThreadPoolExecutor() as pool:
        waiting = [
            pool.submit(meet, store.clone(), r, world, "autopar run", wait)
            for r in ranks
        ]
        return [each.exception() or each.result() for each in waiting]


def test_ranks_that_start_again_meet_in_a_store_of_their_own(store) -> None:
    before = meeting(store, range(3), 3, WAIT)
    before[1].set("key", "old")
    assert before[2].get("key") == b"old"
    late = meeting(store, range(1), 3, SOON)  # the others are there from before only
    assert "rank 0 called autopar run, but ranks 1 and 2 did not" in str(late[0])
    again = meeting(store, range(2), 2, WAIT)  # and fewer
    assert not any(own.check(["key"]) for own in again)
    again[0].set("key", "new")
    assert again[1].get("key") == b"new" and before[2].get("key") == b"old"


def test_without_rank_0_the_others_say_so(store) -> None:
    (error,) = meeting(store, range(1, 2), 2, SOON)
    assert isinstance(error, RanksDisagree)
    assert "rank 1 called autopar run, but rank 0 did not" in str(error)


def test_a_store_that_goes_away_is_told() -> None:
    class Gone(dist.HashStore):
        def check(self, keys: list[str]) -> bool:
            raise dist.DistNetworkError("Connection reset by peer")

    with pytest.raises(RanksDisagree, match=r"rank 1 waited in f .* is gone\n  fix"):
        meet(Gone(), 1, 2, "f", WAIT)


def test_a_store_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)

    def refused(*_: Any, **__: Any) -> None:
        raise dist.DistNetworkError("refused\nframe #0")

    monkeypatch.setattr(dist, "TCPStore", refused)
    with pytest.raises(
        RanksDisagree, match=r"^rank 1 finds nobody at h:1: .* refused\n"
    ):
        open_store(WAIT)


# --- several nodes by one command --------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], list[str], Any]]:
    """What torchrun would be told: its flags, our command, the environment."""
    found: list[tuple[list[str], list[str], Any]] = []

    def launch_by(flags: list[str], command: list[str], environment: Any) -> int:
        found.append((flags, command, environment))
        return 0

    monkeypatch.setattr("autopar.commands.run_nodes.launch_by", launch_by)
    return found


def test_nodes_that_stay_are_not_started_again(launched) -> None:
    meet = ["--rendezvous", "a:29400"]
    command = ["run", "plan", "--nodes", "2", *meet, "--timeout", "60"]
    assert main(command) == 0
    (flags, passed, environment) = launched[0]
    assert passed == command and environment == {}
    text = " ".join(flags)
    assert "--nnodes 2:2 --nproc-per-node 1 --max-restarts 0" in text
    assert "--rdzv-endpoint a:29400 --rdzv-conf join_timeout=60" in text


def test_nodes_that_come_and_go_start_again(launched) -> None:
    command = ["run", "m.py:f", "--nodes", "1:4", "--ranks-per-node", "8"]
    saving = ["--save", "runs", "--resume"]
    assert main([*command, "--rendezvous", "[::1]:29400", *saving]) == 0
    (flags, _, environment) = launched[0]
    assert "--nnodes 1:4 --nproc-per-node 8 --max-restarts 100" in " ".join(flags)
    assert environment == {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--nodes 2", "--nodes 2, and no --rendezvous to say where they meet\n  fix "),
        ("--nodes 2 --rendezvous a", "--rendezvous 'a' to say .* HOST:29400"),
        ("--nodes 2 --rendezvous a:0", "--rendezvous 'a:0' to say"),
        ("--nodes 4:2 --rendezvous a:1", "--nodes '4:2'\n  fix .* range, as 1:4"),
        ("--nodes x --rendezvous a:1", "--nodes 'x'\n"),
        (
            "--ranks-per-node 2",
            "--ranks-per-node is of several .*\n  fix  add --n",
        ),
        (
            "--nodes 1:2 --rendezvous a:1",
            "none are written\n  fix  add --save DIR",
        ),
        (
            "--nodes 1:2 --rendezvous a:1 --save x --resume",
            "'plan' is a plan for one number of ranks\n  fix  give the MODEL",
        ),
    ],
)
def test_nodes_that_cannot_be(
    launched, capsys: pytest.CaptureFixture[str], flags: str, says: str
) -> None:
    assert main(["run", "plan", *flags.split()]) == 2 and not launched
    assert re.search(says, capsys.readouterr().err, re.S)


def test_the_batch_of_ranks_that_come_and_go_is_given(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "100")
    model = "hf:gpt2?n_layer=1,n_embd=32,n_head=2"
    assert main(["run", model, "--plans", str(tmp_path), "--seq", "16"]) == 2
    said = capsys.readouterr().err
    assert "number of devices may change\n  fix  add --global-batch 8, which" in said


# --- GPUs --------------------------------------------------------------------------


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.Store]:
    """As after `init_process_group("nccl")`, as rank 1 of 2; gives its store."""
    store = dist.HashStore()

    class Group:
        WORLD = type("World", (), {"get_group_store": lambda _: store})()

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "group", Group)
    one = type("GPU", (), {"uuid": "GPU-7"})()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: one)
    yield store


def test_two_ranks_on_one_gpu_are_refused(nccl: dist.Store) -> None:
    """As where nobody called `torch.cuda.set_device` before NCCL began."""
    nccl.set("autopar/gpu/0", "cuda:0 GPU-7")
    fix = r"fix  call torch.cuda.set_device\(int\(os.environ\['LOCAL_RANK'\]\)\)"
    with pytest.raises(MeshError, match=f"ranks 0 and 1 all .* cuda:0.*\n  {fix}"):
        check_own_gpu(torch.device("cuda:0"), WAIT)


def test_ranks_with_gpus_of_their_own_go_on(nccl: dist.Store) -> None:
    nccl.set("autopar/gpu/0", "cuda:0 GPU-6")  # each sees one, as number 0
    check_own_gpu(torch.device("cuda:0"), WAIT)
    check_own_gpu(torch.device("cpu"), SOON)
    with pytest.raises(MeshError):
        compare_gpus(nccl, 1, 2, "cuda:0 GPU-6", WAIT)
