"""The training loop: optimiser, schedule, checkpoints."""

from __future__ import annotations

import contextlib
import math
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from .model import LanguageModel, ModelConfig
from .text import Text

BITS = 1 / math.log(2)  # bits per nat


@dataclass(frozen=True)
class TrainingConfig:
    steps: int = 1200
    context: int = 512  # bytes per sequence
    batch_size: int = 4
    learning_rate: float = 4e-3
    weight_decay: float = 0.1
    clip: float = 1.0  # largest norm of the gradient
    seed: int = 0
    dtype: str = "float32"  # "bfloat16": autocast; weights and optimiser stay fp32
    text: str | None = None  # see load_text
    max_bytes: int = 8_000_000

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up over the first tenth, then a cosine down to a tenth of the peak."""
        warm_up = max(1, self.steps // 10)
        if step < warm_up:
            return self.learning_rate * (step + 1) / warm_up
        progress = (step - warm_up) / max(1, self.steps - warm_up)
        return self.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


@dataclass
class Run:
    """Everything that a checkpoint holds."""

    model: LanguageModel
    optimizer: torch.optim.Optimizer
    training: TrainingConfig
    step: int = 0  # steps done
    losses: list[float] = field(default_factory=list)  # bits per byte, one per step
    seconds: float = 0.0  # spent training
    saved_step: int | None = None  # of the last checkpoint; None: there is none of this run yet

    @classmethod
    def start(cls, model: ModelConfig, training: TrainingConfig, device: str) -> Run:
        torch.manual_seed(training.seed)
        network = LanguageModel(model).to(device)
        return cls(network, make_optimizer(network, training), training)

    @classmethod
    def resume(cls, path: Path, device: str) -> Run:
        """Continues a checkpoint with the settings that it was started with."""
        saved = torch.load(path, map_location=device, weights_only=True)
        run = cls.start(ModelConfig(**saved["model_config"]), TrainingConfig(**saved["training_config"]), device)
        run.model.load_state_dict(saved["model"])
        run.optimizer.load_state_dict(saved["optimizer"])
        run.step, run.losses, run.seconds = saved["step"], saved["losses"], saved["seconds"]
        run.saved_step = run.step
        return run

    def save(self, path: Path) -> None:
        saved = {
            "model_config": asdict(self.model.config),
            "training_config": asdict(self.training),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "losses": self.losses,
            "seconds": self.seconds,
        }
        # Written aside and renamed, so that an interruption never leaves half a checkpoint.
        partial = path.with_suffix(".partial")
        torch.save(saved, partial)
        os.replace(partial, path)
        self.saved_step = self.step

    @property
    def device(self) -> torch.device:
        return self.model.embedding.weight.device

    @property
    def tokens_per_second(self) -> float:
        return self.step * self.training.batch_size * self.training.context / max(self.seconds, 1e-9)


def make_optimizer(model: LanguageModel, training: TrainingConfig) -> torch.optim.AdamW:
    # Weight decay is for matrices: it would pull norms to 0, and A with them, which decides how far the model departs
    # from a sliding window.
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=training.learning_rate, betas=(0.9, 0.95))


def train(run: Run, text: Text, until: int, checkpoint: Path, checkpoint_every: int) -> None:
    """Trains up to step `until`, writing a checkpoint every so many steps and at the end."""
    config, model = run.training, run.model
    model.train()
    with tqdm(total=config.steps, initial=run.step, unit="step", dynamic_ncols=True) as bar:
        while run.step < until:
            began = time.perf_counter()
            for group in run.optimizer.param_groups:
                group["lr"] = config.learning_rate_at(run.step)
            inputs, targets = text.train_batch(run.step, config.batch_size, config.context, config.seed)
            loss = loss_of(run, inputs, targets)
            run.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
            run.optimizer.step()

            run.losses.append(loss.item() * BITS)
            run.seconds += time.perf_counter() - began
            run.step += 1
            progress = f"loss {run.losses[-1]:.3f} bits/byte, {run.tokens_per_second:,.0f} tokens/s"
            bar.set_postfix_str(progress, refresh=False)
            bar.update()
            if run.step % checkpoint_every == 0 or run.step == until:
                run.save(checkpoint)


def loss_of(run: Run, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte."""
    with autocast(run):
        logits = run.model(inputs.to(run.device))
    return F.cross_entropy(logits.float().flatten(0, 1), targets.to(run.device).flatten())


@torch.no_grad()
def validation_loss(run: Run, text: Text, batches: int = 4) -> float:
    """Bits per byte on text that was held out."""
    run.model.eval()
    inputs, targets = text.validation_batch(batches * run.training.batch_size, run.training.context)
    losses = [
        loss_of(run, part, goal) for part, goal in zip(inputs.chunk(batches), targets.chunk(batches), strict=True)
    ]
    return torch.stack(losses).mean().item() * BITS


def autocast(run: Run) -> contextlib.AbstractContextManager:
    if run.training.dtype == "float32":
        return contextlib.nullcontext()
    return torch.autocast(run.device.type, dtype=getattr(torch, run.training.dtype))
