"""`autopar report`: the page shows what inspect, explain and simulate print, and works
in a browser without a network."""

from __future__ import annotations

import contextlib
import io
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from browser import chromium, visit
from plans import BATCH, CONFIG, model_file, small_program

from autopar.cli import main
from autopar.compiler import compile_offline
from autopar.machine.hardware import cluster_of
from autopar.options import make_plan
from autopar.passes.errors import AutoparError
from autopar.passes.price.cluster import PLAIN
from autopar.plans.plan_record import SLOWER, read_record
from autopar.reports.html.gather import Wanted, plan_data
from autopar.reports.html.model_view import model_data
from autopar.reports.html.page import page, write_page
from autopar.reports.html.run_log import LogError, read_log
from autopar.reports.simulation import simulate_estimate, simulate_program
from examples.gpt import build

needs_browser = pytest.mark.skipif(chromium() is None, reason="no chromium here")
CLUSTER = cluster_of("4xA100-80GB")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Planned, compiled, and run in."""
    root = tmp_path_factory.mktemp("report")
    spec, target = model_file(root), root / "plan"
    planned = ["--devices", "4xA100-80GB", "--global-batch", "4", "--mesh", "pp=2,tp=2"]
    planned += ["--no-op-shardings"]
    told(["plan", spec, *planned, "--microbatches", "2", "-o", str(target)])
    told(["compile", spec, "--plan", str(target), "-o", str(target), "--unproved"])
    rows: list[dict[str, float]] = [
        {"step": n, "loss": 4 / n, "grad_norm": 1.0, "tokens_per_second": 100.0 * n}
        for n in range(1, 5)
    ]
    rows.append({"step": 4, "eval_loss": 1.25, "eval_perplexity": 3.5})
    (target / "run.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return target


@pytest.fixture(scope="module")
def html(folder: Path) -> Path:
    target = folder.parent / "plan.html"
    data = plan_data(folder, Wanted())
    best = data["choice"]["candidates"][0]
    other = {"plan": "one more", "seconds": 1.2 * best["seconds"], "peak": best["peak"]}
    data["choice"]["others"] = [other]  # the few that there are were run on paper
    write_page([data], target)
    return target


def told(arguments: list[str]) -> str:
    """What a command prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(arguments) == 0
    return out.getvalue()


# --- the data ------------------------------------------------------------------------


@pytest.mark.slow
def test_numbers_are_those_of_other_commands(folder: Path) -> None:
    data = json.loads(told(["report", str(folder), "--json"]))[0]
    path = str(folder)
    assert data["inspect"] == json.loads(told(["inspect", path, "--json"]))
    explained = json.loads(told(["explain", path, "--json"]))
    assert {**data["choice"]["explain"], "formulas": {}} == explained
    assert data["step"]["run"] == json.loads(told(["simulate", path, "--json"]))


MASK = 16  # bytes of another rank's share


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize(
    ("mesh", "zero"), [("pp=2,tp=2", 0), ("dp=2,tp=2", 3), ("pp=2,dp=2", 1)]
)
def test_ops_add_up_to_what_the_program_sends_and_keeps(mesh: str, zero: int) -> None:
    program = small_program(mesh, zero=zero)
    view = model_data(program)
    for index, stage in enumerate(view["stages"]):
        module = view["modules"][stage["view"]]
        expected: Counter[tuple[str, str]] = Counter()
        for c in program.communication:
            if c.stage == index and c.kind != "send":
                expected[c.part, c.kind] += c.bytes
        found: Counter[tuple[str, str]] = Counter()
        for part, rows in module["rows"].items():
            for row in rows:
                for cell in row["cells"]:
                    if cell.get("kind"):
                        name = "step" if part == "once a step" else part
                        found[name, cell["kind"]] += row["count"] * cell["given"]
        assert found == expected
        kept = sum(r["bytes"] for r in module["residuals"])
        # A rank's share of the mask of labels may keep the whole alive, or be a copy.
        assert 0 <= program.stages[index].footprint.residuals - kept <= MASK


def test_a_cell_has_dims_shapes_and_its_line(folder: Path) -> None:
    data = plan_data(folder, Wanted())
    stage = data["view"]["stages"][0]
    rows = data["view"]["modules"][stage["view"]]["rows"]["forward"]
    (layer,) = [row for row in rows if row["layer"]]
    linear = next(c for c in layer["cells"] if "linear" in c["ops"])
    assert linear["reads"][1] == "(3 heads/tp head_dim) embed"
    assert linear["axes"] == ["tp"]
    _, local, whole, dtype, size = linear["out"][0]
    assert (local, whole) == ([3, 2, 1, 16, 16], [3, 4, 2, 16, 16])
    assert (dtype, size) == ("float32", 4 * 3 * 2 * 16 * 16)
    file, line = linear["source"]
    text = data["sources"][file]["text"].splitlines()[line - 1]
    assert "qkv" in text


def test_the_critical_path_has_no_holes(folder: Path) -> None:
    step = plan_data(folder, Wanted())["step"]
    rows = step["critical"][::-1]
    assert rows[0][1] == 0
    for (_, start, length, *_), (_, following, *_) in pairwise(rows):
        assert abs(start + length - following) <= 2  # nanoseconds
    assert abs(sum(row[2] for row in rows) - step["run"]["seconds"] * 1e9) < 1e3


def test_memory_is_of_the_terms_that_the_plan_has(folder: Path) -> None:
    data = plan_data(folder, Wanted(compiled=True, cluster=CLUSTER))
    for rank, terms in enumerate(data["memory"]["terms"]):
        resting = sum(n for term, n in terms.items() if term != "activations")
        levels = data["step"]["levels"]
        peak = max(levels[i] for i in data["step"]["memory"][rank][1::2])
        assert peak == data["inspect"]["memory"][rank]["activations"] + resting


def test_a_log_keeps_the_later_of_two_lines(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    log.write_text('{"step": 1, "loss": 3}\n{"step": 1, "loss": 2}\n{"step": 2, "lo')
    assert read_log(log) == [{"step": 1, "loss": 2}]
    log.write_text('{"loss": 3}\n{"step": 1, "loss": 2}\n')
    with pytest.raises(LogError, match=r"line 1 of .* is not a step of a run"):
        read_log(log)
    with pytest.raises(AutoparError, match="holds no plan and no log"):
        plan_data(tmp_path / "none", Wanted())


@pytest.mark.slow
def test_a_simulated_step_needs_the_memory_of_its_estimate(tmp_path: Path) -> None:
    planned = ["--devices", "8xA100-80GB", "--global-batch", "8", "--no-op-shardings"]
    given = ["--zero", "3", "--precision", "bf16", "-o", str(tmp_path / "plan")]
    told(["plan", model_file(tmp_path), *planned, *given])
    for e in read_record(tmp_path / "plan").best:
        needed = [sum(terms.values()) for terms in e.memory]
        assert list(simulate_estimate(e).peak) == pytest.approx(needed)


@pytest.mark.slow
def test_a_ring_passes_to_the_next_rank() -> None:
    plan = make_plan("cp=2", context_parallel="ring")
    program = compile_offline(*build(CONFIG, BATCH), plan, cluster=PLAIN, prove=False)
    link = CLUSTER.link(program.mesh, ("cp",))
    works = [e.work for e in simulate_program(program, CLUSTER).events]
    passed = [work for work in works if work.label.startswith("send")]
    assert passed
    for work in passed:
        assert work.calls and work.bytes
        each = link.seconds("send", work.bytes / work.calls)
        assert work.seconds == pytest.approx(work.calls * each)


def test_no_text_ends_the_script_of_the_data() -> None:
    text = page([{"name": "</script><b>", "logs": []}])
    assert "</script><b>" not in text
    assert text.count('<script type="application/json" id="data">') == 1
    assert "http-equiv" not in text and 'src="' not in text  # all of it is inside


# --- in a browser --------------------------------------------------------------------

DRIVE = (Path(__file__).parents[1] / "report_driver.js").read_text()


@needs_browser
def test_every_view_works(html: Path, folder: Path) -> None:
    found: dict[str, Any] = visit(html, DRIVE)
    names = [name.removeprefix("tab-") for name, *_ in found["tabs"]]
    assert names == ["model", "ranks", "schedule", "memory", "why", "run"]
    assert all(height > 200 for _, height, _ in found["tabs"])
    assert "(3 heads/tp head_dim) embed" in found["hover"]
    assert "permute(2, 0, 3, 1, 4)" in found["hover"]  # the line of the model
    assert found["focused"] == 1 and "all_gather over tp" in found["focus"]
    assert found["folded"][0] == 0 and found["folded"][1] > 5
    assert found["zoom"] == [2, True]
    assert found["collective"][0] > 2 and "tp" in found["collective"][1]
    assert found["rank"].startswith("Rank 1") and found["code"] == 2
    assert len(found["marked"]) == 2
    assert found["priced"] == 1
    _check_numbers(found["numbers"], folder)


@pytest.mark.slow
def test_the_page_has_all_candidates_that_are_not_far_slower(tmp_path: Path) -> None:
    folder, spec = tmp_path / "plan", model_file(tmp_path)
    given = ["--devices", "4xA100-80GB", "--global-batch", "16", "--no-op-shardings"]
    told(["plan", spec, *given, "-o", str(folder)])
    record, choice = read_record(folder), plan_data(folder, Wanted())["choice"]
    best, others = choice["candidates"], choice["others"]
    assert not {row["plan"] for row in best} & {row["plan"] for row in others}
    assert {row["plan"] for row in others} <= {name for name, *_ in record.priced}
    limit = SLOWER * best[0]["seconds"]
    assert all(0 < row["seconds"] <= limit and row["peak"] > 0 for row in others)
    assert len(best) + len(others) >= len(record.priced) > len(best)
    assert len(record.priced) <= record.tried


def _check_numbers(shown: dict[str, Any], folder: Path) -> None:
    """What the page shows is what `inspect --json` and the others have."""
    inspect = json.loads(told(["inspect", str(folder), "--json"]))
    for stage in inspect["stages"]:
        for what in ("parameters", "parameter_bytes", "activation_bytes", "seconds"):
            assert shown[f"stage.{stage['stage']}.{what}"][0] == stage[what]
    step = json.loads(told(["simulate", str(folder), "--json"]))
    assert shown["run.seconds"][0] == step["seconds"]
    assert [shown[f"peak.{r}"][0] for r in range(2)] == step["peak"]
    best = json.loads(told(["explain", str(folder), "--json"]))
    assert shown["part.step"][0] == best["seconds"]
    over_tp = sum(
        c["bytes"] for c in inspect["communication"]
        if c["stage"] == 0 and c["axes"] == ["tp"]
    )  # fmt: skip
    assert shown["traffic.tp"][0] == over_tp
    assert shown["run.loss"][0] == 1.0


WIDE = """
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
const found = {};
for (const tab of [...document.querySelectorAll("[role=tab]")].map((t) => t.id)) {
  document.getElementById(tab).click();
  await wait(50);
  const page = document.documentElement;
  const elements = document.querySelectorAll("*").length;
  found[tab] = [page.scrollWidth - page.clientWidth, elements];
}
return found;
"""


@needs_browser
@pytest.mark.nightly
@pytest.mark.parametrize("width", [1000, 1600, 2500])
def test_no_view_is_wider_than_the_window(html: Path, width: int) -> None:
    for tab, (over, _) in visit(html, WIDE, (width, 900)).items():
        assert over <= 0, tab


@needs_browser
@pytest.mark.nightly
def test_elements_do_not_grow_with_ranks(tmp_path: Path) -> None:
    counts = []
    for devices in (16, 512):
        target = tmp_path / f"plan{devices}"
        planned = ["--devices", f"{devices}xA100-80GB", "--global-batch", "512"]
        given = ["--mesh", f"dp={devices}", "--seq", "128", "-o", str(target)]
        told(["plan", "hf:gpt2", *planned, *given])
        page_file = tmp_path / f"{devices}.html"
        write_page([plan_data(target, Wanted())], page_file)
        assert page_file.stat().st_size < 5e6
        counts.append(visit(page_file, WIDE)["tab-ranks"][1])
    assert counts[1] < 1.2 * counts[0] + 100


@needs_browser
@pytest.mark.nightly
def test_two_plans_are_compared(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "both.html"
    told(["report", str(folder), str(folder), "-o", str(target)])
    alone = tmp_path / "alone"  # where a run has logged, and nothing else is
    alone.mkdir()
    (alone / "run.jsonl").write_text((folder / "run.jsonl").read_text())
    other = tmp_path / "other.html"
    told(["report", str(folder), str(alone), "-o", str(other)])
    tabs = visit(
        other,
        "const pick = document.querySelector('select[aria-label=Plan]');"
        "pick.value = 1; pick.dispatchEvent(new Event('change'));"
        "return [...document.querySelectorAll('[role=tab]')].map((t) => t.textContent)",
    )
    assert tabs == ["Run", "Compare"]
    found = visit(
        target,
        "document.getElementById('tab-compare').click();"
        "return [...document.querySelectorAll('#view-compare tbody tr')]"
        ".map((r) => [...r.cells].map((c) => c.textContent));",
    )
    assert found[0][0] == "a step" and found[0][1] == found[0][2]
    assert found[0][3] == "+0.0%"
