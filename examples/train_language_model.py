"""Trains a small language model with dynamic-mask attention, then lets it write.

    python examples/train_language_model.py                  about two minutes on two cores
    python examples/train_language_model.py --steps 3000 --text my_file.txt --output runs/mine
    python examples/train_language_model.py --resume         continues where the last run stopped

The model reads bytes of the Python standard library's sources. In each of its layers a query sees only `--window` keys
of its past, those whose learned score is highest; `language_model/model.py` shows how few lines that takes.
The output directory receives checkpoint.pt, loss.png, visible_keys.png, sample.txt and summary.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import flash_dmattn
import torch
from language_model import pictures
from language_model.comparison import tokens_per_second
from language_model.model import ModelConfig
from language_model.settings import check_nothing_else_is_given
from language_model.text import Text, load_text
from language_model.training import Run, TrainingConfig, autocast, train, validation_loss

MODEL, TRAINING = ModelConfig(), TrainingConfig()  # the defaults


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=_positive, default=TRAINING.steps, help="optimiser steps")
    add("--context", type=_positive, default=TRAINING.context, help="bytes per sequence")
    add("--batch-size", type=_positive, default=TRAINING.batch_size, help="sequences per step")
    add("--window", type=_positive, default=MODEL.window, help="keys that a query sees at most")
    add("--layers", type=_positive, default=MODEL.layers)
    add("--width", type=_positive, default=MODEL.width, help="size of the residual stream, a multiple of 8")
    add("--text", default=TRAINING.text, help="a file, or a directory of .py files; default: Python's standard library")
    add("--max-bytes", type=_positive, default=TRAINING.max_bytes, help="text beyond this is left out")
    has_gpu = flash_dmattn.CUDA_AVAILABLE and torch.cuda.is_available()
    add("--device", default="cuda" if has_gpu else "cpu")
    kinds = ["float32", "bfloat16"]
    add("--dtype", choices=kinds, help=f"bfloat16, the default on GPUs, uses autocast; else {TRAINING.dtype}")
    add("--learning-rate", type=float, default=TRAINING.learning_rate)
    add("--seed", type=int, default=TRAINING.seed)
    add("--output", type=Path, default=Path("runs/language_model"), help="directory for everything that is written")
    add("--resume", action="store_true", help="continue the checkpoint in --output, with its settings")
    add("--pause-at", type=_positive, default=None, help="stop at this step of --steps, to be resumed later")
    add("--checkpoint-every", type=_positive, default=50, help="steps between two checkpoints")
    add("--sample", type=_positive, default=400, help="bytes to write at the end")
    add("--temperature", type=float, default=0.6, help="of the sampling; lower is more predictable")
    arguments = parser.parse_args()
    if arguments.dtype is None:
        arguments.dtype = TRAINING.dtype if torch.device(arguments.device).type == "cpu" else "bfloat16"
    return arguments


def main() -> None:
    arguments = parse_arguments()
    checkpoint = arguments.output / "checkpoint.pt"
    arguments.output.mkdir(parents=True, exist_ok=True)
    try:
        run = start_or_resume(arguments, checkpoint)
        text = load_text(run.training.text, run.training.max_bytes, run.training.context)
    except ValueError as error:
        sys.exit(f"error: {error}")
    unigram = text.unigram_bits()
    describe(run, text, unigram)

    until = min(arguments.pause_at or run.training.steps, run.training.steps)
    try:
        train(run, text, until, checkpoint, arguments.checkpoint_every)
    except KeyboardInterrupt:
        if run.saved_step is None:
            sys.exit(
                f"\nInterrupted before the first checkpoint (every {arguments.checkpoint_every} steps): none to resume."
            )
        sys.exit(f"\nInterrupted. --resume continues from step {run.saved_step}, {checkpoint}.")
    if run.step < run.training.steps:
        print(f"Paused at step {run.step} of {run.training.steps}. --resume continues.")
        return
    finish(run, text, unigram, arguments)


def start_or_resume(arguments: argparse.Namespace, checkpoint: Path) -> Run:
    model = ModelConfig(**_chosen(arguments, MODEL))
    training = TrainingConfig(**_chosen(arguments, TRAINING))
    if not arguments.resume:
        return Run.start(model, training, arguments.device)
    if not checkpoint.exists():
        sys.exit(f"--resume: there is no {checkpoint}")
    run = Run.resume(checkpoint, arguments.device)
    for given, defaults, saved in ((model, MODEL, run.model.config), (training, TRAINING, run.training)):
        check_nothing_else_is_given(asdict(given), asdict(defaults), asdict(saved), checkpoint)
    return run


def _chosen(arguments: argparse.Namespace, defaults: ModelConfig | TrainingConfig) -> dict[str, Any]:
    """The command line's values of the fields of `defaults` that have a flag."""
    return {name: value for name, value in vars(arguments).items() if name in asdict(defaults)}


def describe(run: Run, text: Text, unigram: float) -> None:
    model, training = run.model.config, run.training
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    print(f"text     {text.name}: {text.train.numel():,} bytes to learn, {text.validation.numel():,} held out")
    print(f"         its unigram entropy is {unigram:.3f} bits per byte: the loss of a model that ignores context")
    print(
        f"model    {parameters:,} parameters, {model.layers} layers, {model.heads} query heads and {model.key_heads} "
        f"key heads of {model.head_dim}; a query sees {model.window} of up to {training.context} keys"
    )
    print(
        f"training {training.steps} steps of {training.batch_size} x {training.context} bytes in {training.dtype} "
        f"on {run.device}, {torch.get_num_threads()} threads"
    )


def finish(run: Run, text: Text, unigram: float, arguments: argparse.Namespace) -> None:
    """Measures, writes a sample, draws."""
    validation = validation_loss(run, text)
    print(
        f"\nLoss on held-out text: {validation:.3f} bits per byte; unigram entropy: {unigram:.3f} "
        f"({run.tokens_per_second:,.0f} tokens/s)"
    )
    speeds = tokens_per_second(run, text)
    print("Forward and backward of a training step")
    print(f"  with dynamic_mask_attention: {speeds['dynamic_mask_attention']:,.0f} tokens/s")
    print(f"  with a top-k mask for PyTorch's own attention: {speeds['sdpa_topk_mask']:,.0f} tokens/s")
    prompt, continuation = write_sample(run, text, arguments.sample, arguments.temperature)
    print(f"\n--- from the held-out text\n{prompt}\n--- the model continues\n{continuation}\n---")

    output = arguments.output
    (output / "sample.txt").write_text(prompt + continuation)
    pictures.plot_loss(run.losses, unigram, validation, output / "loss.png")
    late_text = text.validation[: run.training.context].long().to(run.device)
    pictures.plot_visible_keys(run.model, late_text, output / "visible_keys.png")
    summary = {
        "unigram_bits_per_byte": unigram,
        "validation_bits_per_byte": validation,
        "train_bits_per_byte": run.losses,
        "tokens_per_second": run.tokens_per_second,
        "training_seconds": run.seconds,
        "step_tokens_per_second": speeds,
    }
    (output / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print("Written:", *(output / name for name in sorted(p.name for p in output.iterdir())))


def write_sample(run: Run, text: Text, length: int, temperature: float) -> tuple[str, str]:
    """The first lines of the held-out text, and how the model goes on."""
    prompt = text.validation[: run.training.context // 2]
    with autocast(run):
        written = run.model.generate(prompt.long().to(run.device), length, temperature, run.training.seed)
    prompt_bytes, written_bytes = bytes(prompt.tolist()), bytes(written.tolist())
    return prompt_bytes.decode(errors="replace"), written_bytes.decode(errors="replace")


def _positive(argument: str) -> int:
    number = int(argument)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


if __name__ == "__main__":
    main()
