"""What autopar is compared with trains as a single process does."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from xml.etree import ElementTree

import pytest
from processes import run_ranks

from examples.benchmarks.peer_runs import ROWS, batch, build
from examples.benchmarks.peer_tables import best_table, drawing, run_table
from examples.benchmarks.peers import REFERENCE, Run, launch, selected
from examples.gpt import Config

CONFIG = Config(layers=4, width=32, heads=2, context=16, vocab=64)
STEPS = 2


def losses(names: Sequence[str], folder: Path) -> dict[str, list[float | None]]:
    warnings.simplefilter("ignore")  # torch's own, about its own parts
    found = {}
    for name in names:
        step = build(name, CONFIG, folder / name)
        found[name] = [step(*batch(CONFIG, i)) for i in range(STEPS)]
    return found


@pytest.mark.slow
def test_runs_on_two_ranks_train_as_a_single_process(tmp_path):
    """Ours is started twice, as other tests are about what it computes: the second time
    it takes the plan that the first has left."""
    names = [n for n in selected("*-2/torch-*") if not n.endswith("compile")]
    assert len(names) == 6 + 2
    names += ["pp-2/ours-eager"] * 2
    (expected,) = losses([REFERENCE], tmp_path).values()
    assert expected[0] != expected[1]
    ranks = run_ranks(losses, 2, names, tmp_path)
    for name in names:
        (found, *_) = (rank[name] for rank in ranks if rank[name][0] is not None)
        assert found == pytest.approx(expected, abs=1e-5), name
    assert (tmp_path / "pp-2/ours-eager/plan/manifest.json").is_file()


@pytest.mark.slow
def test_a_run_with_other_losses_is_an_error(tmp_path):
    run = Run(REFERENCE, "tiny", tmp_path / "kept", [0.0])
    with (
        pytest.raises(RuntimeError, match="eager computes something else: its losses"),
        run.started(),
    ):
        pass


def measured(*walls: float, peak: int = 1 << 20) -> dict:
    seconds = [*walls]
    cold_warm = {"cold": 9.0, "warm": 3.0, "peak": peak, "off": 1e-6}
    return {"wall": seconds, "cpu": seconds, **cold_warm}


RUNS = {
    "ddp-2/torch-eager": measured(1.0, 3.0, 1.1),
    "ddp-2/torch-compile": measured(0.9, 3.0, 1.0),
    "ddp-2/ours-eager": measured(1.2, 4.0, 1.1, peak=2 << 20),
    "tp-4/ours-eager": measured(1.0, 1.0, 1.0),
}


def test_ratios_are_medians_of_rounds():
    (line,) = best_table(RUNS, "mid").splitlines()[2:]
    cells = " ".join(line.replace("|", " ").split())
    assert cells == "ddp-2 compile eager 0.75 1.00 below 0.75 2.00 1.00"
    assert len(run_table(RUNS).splitlines()) == 2 + len(RUNS)
    picture = ElementTree.fromstring(drawing(RUNS, "mid"))
    assert "0.75x  eager / compile" in [*picture.itertext()]


def test_every_row_has_both_sides_and_a_goal():
    for row, of in ROWS.items():
        assert of.goal.keys() == {"mid", "small"}, row
        assert {name.split("-")[0] for name in of.runs} == {"torch", "ours"}, row
    with pytest.raises(SystemExit, match=r"--only ddp8/\*: none of single/torch-eager"):
        selected("ddp8/*")


def test_what_keeps_nothing_is_started_once(tmp_path):
    starts = []

    class Fake:
        folder = tmp_path

        def started(self):
            starts.append(self)
            return nullcontext(float(len(starts)))

    with ExitStack() as stack:
        assert launch(Fake(), stack) == (1.0, 1.0)
        (tmp_path / "code").write_text("")
        assert launch(Fake(), stack) == (2.0, 3.0)
