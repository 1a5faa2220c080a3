"""Trains the example's language model on sequences that are split across processes.

    torchrun --nproc-per-node 2 examples/train_distributed.py              two processes; NCCL on GPUs, else gloo
    torchrun --nproc-per-node 4 examples/train_distributed.py --context 4096
    torchrun --nproc-per-node 2 examples/train_distributed.py --resume     continues, with any number of processes

Every process holds the whole model and an equal part of every sequence. Three things differ from one process: attention
(flash_dmattn.distributed), the few values that a convolution looks back for, and gradients of the weights, which are
averaged. The loss of every step is that of one process with the same sequences, to rounding.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
from flash_dmattn.distributed import dynamic_mask_attention, previous_tokens, shard
from language_model.model import LanguageModel, ModelConfig
from language_model.text import Text, load_text
from language_model.training import BITS, Run, TrainingConfig, autocast
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import cross_entropy


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=200, help="optimiser steps")
    add("--context", type=int, default=1024, help="bytes per sequence, a multiple of the processes")
    add("--batch-size", type=int, default=2, help="sequences per step")
    add("--window", type=int, default=128, help="keys that a query sees at most")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=128, help="size of the residual stream, a multiple of 8")
    add("--text", help="a file, or a directory of .py files; default: Python's standard library")
    add("--learning-rate", type=float, default=4e-3)
    add("--dtype", choices=("float32", "bfloat16"), help="bfloat16, the default on GPUs, uses autocast; else float32")
    add("--seed", type=int, default=0)
    add("--output", type=Path, default=Path("runs/distributed"), help="directory of the checkpoint and losses.json")
    add("--resume", action="store_true", help="continue the checkpoint in --output")
    add("--pause-at", type=int, default=None, help="stop at this step of --steps, to be resumed later")
    add("--checkpoint-every", type=int, default=50, help="steps between two checkpoints")
    arguments = parser.parse_args()
    if arguments.dtype is None:
        arguments.dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    return arguments


@contextmanager
def process_group() -> Iterator[DeviceMesh]:
    """All processes, as the dimension along which sequences are split."""
    has_gpus, device = torch.cuda.is_available(), None
    if has_gpus:
        device = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpus else "gloo", device_id=device)
    try:
        yield init_device_mesh("cuda" if has_gpus else "cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    finally:
        dist.destroy_process_group()


def split_sequences(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Lets the model take this process's part of every sequence."""
    for block in model.blocks:
        attention = block.attention
        attention.attend = functools.partial(dynamic_mask_attention, group=mesh)
        bias = attention.key_bias
        bias.values_before = functools.partial(previous_tokens, count=bias.history, group=mesh)


def train_step(run: Run, text: Text, mesh: DeviceMesh) -> None:
    config = run.training
    for group in run.optimizer.param_groups:
        group["lr"] = config.learning_rate_at(run.step)
    # Every process draws the same sequences and takes its part of them.
    batch = text.train_batch(run.step, config.batch_size, config.context, config.seed)
    inputs, targets = (shard(tensor, group=mesh).to(run.device) for tensor in batch)
    with autocast(run):
        logits = run.model(inputs, first_position=mesh.get_local_rank() * inputs.shape[1])
    loss = cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    run.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    # Parts are equally long, so the whole sequence's loss is the mean of theirs, and so are its gradients.
    for parameter in run.model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= mesh.size()
    dist.all_reduce(loss.detach_())
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), config.clip)
    run.optimizer.step()
    run.losses.append(loss.item() / mesh.size() * BITS)
    run.step += 1


def state_of(run: Run) -> dict[str, object]:
    model, optimizer = get_state_dict(run.model, run.optimizer)
    return {"model": model, "optimizer": optimizer, "step": run.step}


def resume(run: Run, checkpoint: Path, losses: Path) -> None:
    saved = state_of(run)
    checkpoints.load(saved, checkpoint_id=checkpoint)
    set_state_dict(run.model, run.optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    run.step = saved["step"]
    run.losses = json.loads(losses.read_text())[: run.step]


def main() -> None:
    arguments = parse_arguments()
    model = ModelConfig(layers=arguments.layers, width=arguments.width, window=arguments.window)
    names = asdict(TrainingConfig())
    training = TrainingConfig(**{name: value for name, value in vars(arguments).items() if name in names})
    checkpoint, losses = arguments.output / "checkpoint", arguments.output / "losses.json"
    arguments.output.mkdir(parents=True, exist_ok=True)
    with process_group() as mesh:
        run = Run.start(model, training, mesh.device_type)  # of one seed: all processes begin with the same weights
        split_sequences(run.model, mesh)
        if arguments.resume:
            resume(run, checkpoint, losses)
        text = load_text(training.text, training.max_bytes, training.context)
        until = min(arguments.pause_at or training.steps, training.steps)
        while run.step < until:
            train_step(run, text, mesh)
            is_first = mesh.get_local_rank() == 0
            if is_first and (run.step % 10 == 0 or run.step == until):
                print(f"step {run.step}: loss {run.losses[-1]:.3f} bits per byte", flush=True)
            if run.step % arguments.checkpoint_every == 0 or run.step == until:
                checkpoints.save(state_of(run), checkpoint_id=checkpoint)
                if is_first:
                    losses.write_text(json.dumps(run.losses) + "\n")


if __name__ == "__main__":
    main()
