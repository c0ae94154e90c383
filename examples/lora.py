"""LoRA by `peft`, on many devices: adapters are trained, the base stays as it is.

torchrun --nproc-per-node 4 -m examples.lora --mesh dp=2,tp=2
"""

import argparse

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import autopar


def make() -> tuple[PeftModel, dict[str, Tensor]]:
    """A small Llama with adapters of rank 4, and a batch; use from_pretrained here."""
    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    adapters = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(LlamaForCausalLM(sizes), adapters)
    ids = torch.randint(256, (8, 32))
    return model, {"input_ids": ids, "labels": ids.clone()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", default="dp=2")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    model, batch = make()
    step = autopar.compile(model, args.mesh, example_inputs=batch)
    trained = [p for p in step.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for i in range(args.steps):
        optimizer.zero_grad()
        loss = step(**batch)
        optimizer.step()
        if step.comm.rank == 0:
            print(f"step {i}: loss {loss.item():.6f}", flush=True)
    state = step.state_dict(rank0_only=True)
    if step.comm.rank == 0:
        model.load_state_dict(state)
        model.save_pretrained("adapters")  # those alone, as peft writes them


if __name__ == "__main__":
    main()
