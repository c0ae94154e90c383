"""Examples do what they say, and are what the guides show."""

from __future__ import annotations

import difflib
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from processes import ROOT, output_of, run_ranks, torchrun_command

import autopar
from autopar.options import make_plan

EXAMPLES = ROOT / "examples"
CURVE = re.compile(r"step (\d+): loss (\S+)")


BENCHMARKS = EXAMPLES / "benchmarks"


def started() -> list[str]:
    """The benchmarks that some page, or their own, starts as a script."""
    pages = [*BENCHMARKS.glob("*.*"), *(EXAMPLES / "guides").glob("*.md")]
    texts = [
        page.read_text(encoding="utf-8") for page in pages if page.suffix != ".svg"
    ]
    named = re.findall(r"examples/benchmarks/(\w+)\.py", "\n".join(texts))
    return sorted({*named})


def start(script: Path, folder: Path) -> None:
    """Ask a script for its help, or import one that takes no arguments, where nothing
    of the checkout is to be found but by itself."""
    os.chdir(folder)
    ours = ROOT, Path(__file__).parent
    elsewhere = [p for p in sys.path if p and Path(p).resolve() not in ours]
    sys.path[:] = [str(script.parent), *elsewhere]
    sys.argv = [str(script), "--help"]
    if "argparse" not in script.read_text():
        runpy.run_path(str(script))
        return
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(script), run_name="__main__")


@pytest.mark.slow
@pytest.mark.parametrize("name", started())
def test_a_benchmark_starts_as_its_page_says(name: str, tmp_path: Path) -> None:
    run_ranks(start, 1, BENCHMARKS / f"{name}.py", tmp_path)


@pytest.mark.nightly
def test_what_no_longer_waits_is_measured_beside_paper(tmp_path: Path) -> None:
    """It puts parts of the compiler back as they were, which are to be there."""
    script = str(BENCHMARKS / "waits.py")
    command = [*torchrun_command(2), script, "--rounds", "1"]
    printed = output_of(command, tmp_path)
    rows = re.findall(r"^(.*?) {2,}[\d.]+ +[\d.]+ +[\d.]+ +([\d.]+|-)$", printed, re.M)
    assert len(rows) == 4
    assert sum(paper != "-" for _, paper in rows) == 2


def curve(said: str) -> dict[int, float]:
    """By step, as it was printed."""
    return {int(step): float(loss) for step, loss in CURVE.findall(said)}


def changes() -> list[str]:
    """Lines of a diff of the two scripts, but for what they say of themselves."""
    before, after = (
        (EXAMPLES / f"nanogpt_{name}.py").read_text().split('"""\n', 1)[1].splitlines()
        for name in ("before", "after")
    )
    lines = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
    return [line for line in lines if line[0] in "+-"]


def test_a_training_loop_changes_in_as_few_lines_as_the_guide_shows() -> None:
    guide = (EXAMPLES / "guides" / "coming-from.md").read_text()
    shown = next(
        d for d in re.findall(r"```diff\n(.*?)```", guide, re.S) if "model.prepare" in d
    )
    kept = [line for line in shown.splitlines() if line[:1] in ("+", "-")]
    assert kept == changes()
    added = sum(line[0] == "+" for line in kept)
    assert f"{added} lines are new, {len(kept) - added} go" in guide


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_lora_leaves_the_base_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs peft, which autopar[test] has")
    from examples.lora import make

    model, batch = make()
    program = autopar.compile_offline(model, batch, make_plan("tp=2"), prove=True)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    assert program.proof is not None
    # Each adapter's gradient, of two steps, is one of what the proof compares.
    assert program.proof.compared > len(trained)
    step = autopar.compile(model, "tp=1", example_inputs=batch, prove=False)
    with pytest.raises(autopar.AutoparError, match="adapters of peft, whose names"):
        step.save_pretrained(tmp_path / "never")
    assert not (tmp_path / "never").exists()


@pytest.mark.nightly
def test_nanogpts_curve_is_the_same_on_four_ranks(tmp_path: Path) -> None:
    before = output_of([sys.executable, "-m", "examples.nanogpt_before"], tmp_path)
    after = [*torchrun_command(4), "-m", "examples.nanogpt_after"]
    expected, found = curve(before), curve(output_of(after, tmp_path))
    assert len(found) == 10 and found == pytest.approx(expected, abs=2e-4)
    assert torch.load(tmp_path / "ckpt.pt")["norm.weight"].shape == (64,)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_lora_on_ranks_is_peft_on_one(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs peft, which autopar[test] has")
    from examples.lora import make

    asked = ["-m", "examples.lora", "--mesh", "dp=2,tp=2", "--steps", "5"]
    found = curve(output_of([*torchrun_command(4), *asked], tmp_path))
    model, batch = make()
    base = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for i in range(5):
        optimizer.zero_grad()
        loss = model(**batch).loss
        assert found[i] == pytest.approx(loss.item(), rel=1e-5)
        loss.backward()
        optimizer.step()
    from safetensors.torch import load_file

    written = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert len(written) == len(trained)
    for name, value in written.items():
        whole = name.replace(".weight", ".default.weight")
        torch.testing.assert_close(value, model.get_parameter(whole).detach())
    for name, value in base.items():
        assert torch.equal(value, model.get_parameter(name))


@pytest.mark.nightly
def test_a_llama_is_fine_tuned_from_a_folder(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from examples.finetune_llama import get_batch, read_text

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
    sizes |= {"num_attention_heads": 4, "vocab_size": 256}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2))
    folder, tuned = tmp_path / "llama", tmp_path / "tuned"
    model.save_pretrained(folder)
    asked = [str(folder), str(Path(__file__)), str(tuned)]
    asked += ["--mesh", "dp=2,tp=2", "--steps", "5"]
    command = [*torchrun_command(4), "-m", "examples.finetune_llama", *asked]
    found = curve(output_of(command, ROOT))
    text, _ = read_text(Path(__file__), folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for i in range(5):
        optimizer.zero_grad()
        loss = model(**get_batch(text, 8, 64, i)).loss
        assert found[i] == pytest.approx(loss.item(), rel=1e-5)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    written = LlamaForCausalLM.from_pretrained(tuned).state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(written[name], value, atol=1e-4, rtol=0)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "mesh"), [("switch_gpt.py:tiny", "ep=2"), ("gpt.py:long", "cp=2")]
)
def test_experts_and_long_sequences_train(
    model: str, mesh: str, tmp_path: Path
) -> None:
    asked = ["run", f"{EXAMPLES / model}", "--mesh", mesh, "--data", "stdlib"]
    asked += ["--steps", "12", "--plans", str(tmp_path), "--log-every", "1"]
    log = tmp_path / "log.jsonl"
    output_of([sys.executable, "-m", "autopar", *asked, "--log-file", str(log)], ROOT)
    losses = [float(x) for x in re.findall(r'"loss": (\S+?)[,}]', log.read_text())]
    assert len(losses) == 12 and losses[-1] < losses[0]
