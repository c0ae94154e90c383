"""Fine-tune a Llama from a local folder of safetensors, and write it as one.

    torchrun --nproc-per-node 4 -m examples.finetune_llama FOLDER TEXT TUNED

FOLDER is what `save_pretrained` writes and `hf download` gets: any causal model.
No rank ever has all of its weights: each reads its own parts.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import autopar


def get_batch(text: Tensor, batch: int, seq: int, step: int) -> dict[str, Tensor]:
    """Rows of the text that the step draws; the model shifts labels itself."""
    draw = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - seq, (batch,), generator=draw)
    rows = text[starts[:, None] + torch.arange(seq)]
    return {"input_ids": rows, "labels": rows.clone()}


def read_text(path: Path, folder: Path) -> tuple[Tensor, object]:
    """Token ids, int64, and the tokenizer; bytes where the folder has none."""
    from transformers import AutoTokenizer

    if not (folder / "tokenizer_config.json").exists():
        return torch.tensor(list(path.read_bytes())), None
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return torch.tensor(tokenizer(path.read_text())["input_ids"]), tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("tuned", type=Path)
    parser.add_argument("--mesh", default="dp=2")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=64)
    args = parser.parse_args()
    text, tokenizer = read_text(args.text, args.folder)
    batches = [get_batch(text, args.batch, args.seq, i) for i in range(args.steps)]
    with autopar.on_meta():
        config = AutoConfig.from_pretrained(args.folder)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    step = autopar.compile(
        model, args.mesh, zero=2, pretrained=args.folder, example_inputs=batches[0]
    )
    optimizer = torch.optim.AdamW(step.parameters(), lr=1e-3)
    for i, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = step(**batch)
        step.clip_grad_norm_(1.0)
        optimizer.step()
        if step.comm.rank == 0:
            print(f"step {i}: loss {loss.item():.6f}", flush=True)
    step.save_pretrained(args.tuned, tokenizer)


if __name__ == "__main__":
    main()
