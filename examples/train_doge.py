"""Trains a small Doge of Hugging Face Transformers on local text, with flash_dmattn's attention.

    python examples/train_doge.py                                some minutes on a GPU, an hour on two cores
    python examples/train_doge.py --steps 20 --context 256       a short try
    python examples/train_doge.py --resume                       continues where the last run stopped
    accelerate launch examples/train_doge.py                     on several GPUs or machines (DDP, FSDP)

The model is Transformers' own, built from its configuration; one line, `doge.enable(model)`, lets it run on
flash_dmattn. It reads bytes of the Python standard library's sources. The output directory receives the checkpoint that
--resume reads, losses.json, and the model as `DogeForCausalLM.from_pretrained` reads it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from flash_dmattn.integrations import doge
from language_model.settings import check_nothing_else_is_given
from language_model.text import Text, load_text
from torch import Tensor
from tqdm import tqdm
from transformers import DogeConfig, DogeForCausalLM

BITS = 1 / math.log(2)  # bits per nat


# The settings that a run keeps when it is resumed.
KEPT = ("steps", "context", "batch_size", "window", "layers", "width", "learning_rate", "seed")
KEPT += ("text", "max_bytes", "precision")


@dataclass
class Progress:
    """What a checkpoint holds beside model, optimiser, random states and settings."""

    step: int = 0
    losses: list[float] = field(default_factory=list)  # bits per byte, one per step

    def state_dict(self) -> dict[str, object]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.step, self.losses = state["step"], state["losses"]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=1000, help="optimiser steps")
    add("--context", type=int, default=2048, help="bytes per sequence")
    add("--batch-size", type=int, default=8, help="sequences per step and process")
    add("--window", type=int, default=256, help="keys that a query sees at most")
    add("--layers", type=int, default=6)
    add("--width", type=int, default=256, help="size of the residual stream, a multiple of 16")
    add("--learning-rate", type=float, default=2e-3)
    add("--text", default=None, help="a file, or a directory of .py files; default: Python's standard library")
    add("--max-bytes", type=int, default=8_000_000, help="text beyond this is left out")
    add("--precision", choices=["no", "bf16"], default="bf16", help="bf16: autocast")
    add("--no-checkpointing", action="store_true", help="keep activations instead of computing them again")
    add("--cpu", action="store_true", help="even if there is a GPU")
    add("--seed", type=int, default=0)
    add("--output", type=Path, default=Path("runs/doge"), help="directory for everything that is written")
    add("--resume", action="store_true", help="continue the checkpoint in --output, with its settings")
    add("--pause-at", type=int, default=None, help="stop at this step of --steps, to be resumed later")
    add("--checkpoint-every", type=int, default=100, help="steps between two checkpoints")
    arguments = parser.parse_args()
    if arguments.resume:
        restore_settings(arguments, {name: parser.get_default(name) for name in KEPT})
    return arguments


def restore_settings(arguments: argparse.Namespace, defaults: dict[str, object]) -> None:
    """Puts the settings that the checkpoint began with in the place of those that were not given."""
    path = settings_path(arguments)
    if not path.exists():
        sys.exit(f"--resume: there is no {path}")
    saved = json.loads(path.read_text())
    given = {name: getattr(arguments, name) for name in KEPT}
    check_nothing_else_is_given(given, defaults, saved, path.parent)
    vars(arguments).update(saved)


def settings_path(arguments: argparse.Namespace) -> Path:
    return arguments.output / "checkpoint" / "settings.json"


def make_model(arguments: argparse.Namespace) -> DogeForCausalLM:
    config = DogeConfig(
        vocab_size=256,  # bytes
        hidden_size=arguments.width,
        intermediate_size=2 * arguments.width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2 * arguments.context,
        keep_window_size=arguments.window,
    )
    model = DogeForCausalLM(config)
    doge.enable(model)
    if not arguments.no_checkpointing:
        model.gradient_checkpointing_enable()
    return model


def learning_rate_at(step: int, arguments: argparse.Namespace) -> float:
    """Linear warm-up over the first tenth, then a cosine down to a tenth of the peak."""
    warm_up = max(1, arguments.steps // 10)
    if step < warm_up:
        return arguments.learning_rate * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, arguments.steps - warm_up)
    return arguments.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def batch(accelerator: Accelerator, text: Text, step: int, arguments: argparse.Namespace) -> Tensor:
    """Bytes (batch size, context) of this process. Depends on step and seed only, so that resumed runs see the same."""
    at = step * accelerator.num_processes + accelerator.process_index
    inputs, _ = text.train_batch(at, arguments.batch_size, arguments.context, arguments.seed)
    return inputs.to(accelerator.device)


def train(accelerator: Accelerator, text: Text, progress: Progress, arguments: argparse.Namespace) -> DogeForCausalLM:
    model = make_model(arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    accelerator.print(
        f"{parameters:,} parameters; {accelerator.num_processes} x {arguments.batch_size} x {arguments.context} bytes "
        f"a step on {accelerator.device}; a query sees {arguments.window} keys"
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(progress)
    if arguments.resume:
        accelerator.load_state(str(settings_path(arguments).parent))

    model.train()
    until = min(arguments.pause_at or arguments.steps, arguments.steps)
    with tqdm(total=arguments.steps, initial=progress.step, disable=not accelerator.is_main_process) as bar:
        while progress.step < until:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate_at(progress.step, arguments)
            inputs = batch(accelerator, text, progress.step, arguments)
            loss = model(input_ids=inputs, labels=inputs, use_cache=False).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            progress.losses.append(accelerator.reduce(loss.detach(), "mean").item() * BITS)
            progress.step += 1
            bar.set_postfix_str(f"{progress.losses[-1]:.3f} bits/byte", refresh=False)
            bar.update()
            if progress.step % arguments.checkpoint_every == 0 or progress.step == until:
                save_checkpoint(accelerator, arguments)
    return model


def save_checkpoint(accelerator: Accelerator, arguments: argparse.Namespace) -> None:
    settings = settings_path(arguments)
    accelerator.save_state(str(settings.parent))
    if accelerator.is_main_process:
        settings.write_text(json.dumps({name: getattr(arguments, name) for name in KEPT}, indent=1) + "\n")


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: torch.nn.Module, text: Text, arguments: argparse.Namespace) -> float:
    """Bits per byte on text that was held out."""
    model.eval()
    inputs, _ = text.validation_batch(4, arguments.context)
    inputs = inputs.to(accelerator.device)
    return model(input_ids=inputs, labels=inputs, use_cache=False).loss.item() * BITS


def main() -> None:
    arguments = parse_arguments()
    try:
        text = load_text(arguments.text, arguments.max_bytes, arguments.context)
    except ValueError as error:
        sys.exit(f"error: {error}")
    set_seed(arguments.seed)
    accelerator = Accelerator(mixed_precision=arguments.precision, cpu=arguments.cpu)
    progress = Progress()
    model = train(accelerator, text, progress, arguments)
    if progress.step < arguments.steps:
        accelerator.print(f"Paused at step {progress.step} of {arguments.steps}. --resume continues.")
        return
    validation = evaluate(accelerator, model, text, arguments)
    accelerator.print(f"On held-out text: {validation:.3f} bits per byte; unigram entropy {text.unigram_bits():.3f}")

    whole = accelerator.unwrap_model(model)
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        whole.save_pretrained(arguments.output / "model", state_dict=state)
        found = {"train_bits_per_byte": progress.losses, "validation_bits_per_byte": validation}
        (arguments.output / "losses.json").write_text(json.dumps(found, indent=1) + "\n")
        print(f"Written: {arguments.output / 'model'}, {arguments.output / 'losses.json'}")
    if accelerator.num_processes == 1:
        prompt = text.validation[:200].long().to(accelerator.device)[None]
        written = whole.generate(
            prompt, max_new_tokens=200, do_sample=True, temperature=0.6, attention_mask=prompt >= 0
        )
        print("--- the model continues held-out text\n" + bytes(written[0].tolist()).decode(errors="replace") + "\n---")
    accelerator.end_training()


if __name__ == "__main__":
    main()
