"""Fine-tunes a Doge with LoRA adapters of peft, with flash_dmattn's attention.

    python examples/train_doge.py --output runs/doge                 a model to start from; or any other Doge
    python examples/finetune_lora.py --model runs/doge/model --text my_file.txt

The weights stay as they are, in bfloat16 on a GPU; the adapters, in float32, are all that is trained. dt_proj, which
scores the keys, has adapters too, so that the model can learn to keep other keys. The output directory receives the
adapters (`peft.PeftModel.from_pretrained` reads them) and losses.json.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import torch
from flash_dmattn.integrations import doge
from language_model.text import Text, load_text
from peft import LoraConfig, PeftModel, get_peft_model
from tqdm import tqdm
from transformers import DogeForCausalLM

BITS = 1 / math.log(2)  # bits per nat
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "dt_proj"]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, default=Path("runs/doge/model"), help="directory of a byte-level Doge, see train_doge.py")
    add("--text", default=None, help="a file, or a directory of .py files; default: Python's standard library")
    add("--steps", type=int, default=200, help="optimiser steps")
    add("--context", type=int, default=2048, help="bytes per sequence")
    add("--batch-size", type=int, default=4, help="sequences per step")
    add("--rank", type=int, default=8, help="of the adapters")
    add("--learning-rate", type=float, default=1e-3)
    add("--max-bytes", type=int, default=2_000_000, help="text beyond this is left out")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--seed", type=int, default=0)
    add("--output", type=Path, default=Path("runs/doge_lora"))
    return parser.parse_args()


def load_model(arguments: argparse.Namespace) -> PeftModel:
    dtype = torch.float32 if torch.device(arguments.device).type == "cpu" else torch.bfloat16
    model = DogeForCausalLM.from_pretrained(arguments.model, dtype=dtype, local_files_only=True)
    model = get_peft_model(model.to(arguments.device), LoraConfig(r=arguments.rank, target_modules=TARGETS))
    doge.enable(model)
    return model


@torch.no_grad()
def evaluate(model: PeftModel, text: Text, arguments: argparse.Namespace) -> float:
    """Bits per byte on text that was held out."""
    model.eval()
    inputs = text.validation_batch(4, arguments.context)[0].to(arguments.device)
    return model(input_ids=inputs, labels=inputs, use_cache=False).loss.item() * BITS


def train(model: PeftModel, text: Text, arguments: argparse.Namespace) -> list[float]:
    """Bits per byte, one per step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=arguments.learning_rate), []
    model.train()
    with tqdm(range(arguments.steps)) as bar:
        for step in bar:
            inputs, _ = text.train_batch(step, arguments.batch_size, arguments.context, arguments.seed)
            inputs = inputs.to(arguments.device)
            with torch.autocast(torch.device(arguments.device).type, torch.bfloat16):
                loss = model(input_ids=inputs, labels=inputs, use_cache=False).loss
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses.append(loss.item() * BITS)
            bar.set_postfix_str(f"{losses[-1]:.3f} bits/byte", refresh=False)
    return losses


def main() -> None:
    arguments = parse_arguments()
    if not (arguments.model / "config.json").exists():
        sys.exit(f"error: there is no model in {arguments.model}; python examples/train_doge.py makes one")
    try:
        text = load_text(arguments.text, arguments.max_bytes, arguments.context)
    except ValueError as error:
        sys.exit(f"error: {error}")
    torch.manual_seed(arguments.seed)
    model = load_model(arguments)
    model.print_trainable_parameters()
    before = evaluate(model, text, arguments)
    losses = train(model, text, arguments)
    after = evaluate(model, text, arguments)
    print(f"On held-out text: {before:.3f} bits per byte before, {after:.3f} after {arguments.steps} steps")
    model.save_pretrained(arguments.output)
    found = {"train_bits_per_byte": losses, "validation_before": before, "validation_after": after}
    (arguments.output / "losses.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"Written: {arguments.output}")


if __name__ == "__main__":
    main()
