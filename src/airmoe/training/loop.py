"""The training loop, from top to bottom.

Prepare once; then for every step: micro-batches (forward, backward, gradients add up), clip,
optimizer, schedule; and where due: log, evaluate, save. Everything that a step depends on is in the
checkpoint or a function of the step's number, so a resumed run has the bits of one never stopped.
"""

from __future__ import annotations

import math
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from transformers import get_linear_schedule_with_warmup

from airmoe.distributed import all_reduce_sum, full_tensor, on_first_rank, rank, world_size
from airmoe.errors import RunError
from airmoe.files import write_json
from airmoe.model import AirMoeForCausalLM
from airmoe.routers import Router, track_optimizer
from airmoe.training import checkpoints
from airmoe.training.capture import CapturedSteps
from airmoe.training.config import TrainingOptions
from airmoe.training.devices import autocast_of, placed
from airmoe.training.evaluation import evaluate
from airmoe.training.run_folder import RunFolder
from airmoe.training.run_log import STARTING_STEPS, Clock, LogWriter
from airmoe.training.state import (
    OPTIMIZER,
    load_optimizer_state,
    optimizer_state,
    random_state,
    set_random_state,
)
from airmoe.training.text import MicroBatches
from airmoe.training.watch import RoutingWatch, looking

# Of the schedule's state, what is plain numbers; the rest are functions made anew.
SCHEDULE_KEYS = ("last_epoch", "_step_count", "_last_lr", "base_lrs")
PLAIN_STEPS = 4  # before a capture: compilers, codebooks and the optimizer have started
ROUTER_LOSSES = ("load_balance_loss", "shortlist_balance_loss", "router_z_loss")
# `timeout` and batch systems signal a process and its group, so that it hears one wish twice.
ECHO_SECONDS = 0.5


@dataclass(frozen=True)
class Due:
    """What follows a step."""

    log: bool
    evaluate: bool
    save: bool


class TrainingLoop:
    """Trains an `AirMoeForCausalLM` from `step` to `last_step`."""

    def __init__(
        self,
        run: RunFolder,
        model: AirMoeForCausalLM,
        accelerator: Accelerator,
        train_blocks: Any,
        eval_blocks: Any,
        save_tokenizer: Callable[[Path], None],
    ) -> None:
        self.run, self.model, self.accelerator = run, model, accelerator
        self.options = options = run.config.training
        self.batches = MicroBatches(train_blocks, options, accelerator.device)
        self._eval_blocks, self._save_tokenizer = eval_blocks, save_tokenizer
        self.step, self.last_step = 0, options.total_steps(self.batches.steps_per_epoch)
        self.best_step: int | None = None
        self.best_loss = math.inf
        self.clock = Clock(
            starting_steps=STARTING_STEPS if options.compile or options.cuda_graph else 0
        )
        if options.gradient_checkpointing:
            checkpoint_activations(model)
        self.wrapped = placed(model, accelerator, run.config)
        self.optimizer = make_optimizer(model, options)  # sharding has replaced the parameters
        self.schedule = get_linear_schedule_with_warmup(
            self.optimizer, math.ceil(self.last_step * options.warmup), self.last_step
        )
        self.scaler = torch.amp.GradScaler("cuda", enabled=options.precision == "fp16")
        if any(isinstance(module, Router) for module in model.modules()):
            track_optimizer(model, self.optimizer)
        self.watch = RoutingWatch(model, options.quality_tokens)
        self._captured: CapturedSteps | None = None
        self._plain_steps = 0  # micro-batches that this process ran without a graph
        self._router_losses: dict[str, Tensor] = {}  # of the last watched micro-batch
        self._usage: tuple[int, dict[str, Tensor]] = (0, {})  # of experts, at its evaluation's step
        self._last_logged = 0
        # On the device, because asking every step would make the host wait for the GPU.
        self._running_loss = torch.zeros((), device=accelerator.device)  # since the last log line
        self._bad_step = torch.full((), -1, device=accelerator.device)  # first not finite, or -1

    def train(self, log: LogWriter, advance: Callable[[int], None]) -> int | None:
        """Take the steps that are left. Returns the signal that stopped them early, if any."""
        self.model.train()
        with StopOnSignal(enabled=world_size() == 1) as stop:
            while self.step < self.last_step:
                due = self._due(self.step + 1)
                with self.clock.step(then_wait=due.log or due.save):
                    grad_norm, learning_rate = self._take_step(watched=due.log)
                self.step += 1
                advance(self.step)
                if due.log:
                    self._log(log, grad_norm, learning_rate)
                if due.evaluate:
                    self._evaluate(log)
                stopping = stop.received is not None  # asked once, or it could stop without saving
                if due.save or stopping:
                    self.save()
                if stopping:
                    break
        return stop.received if self.step < self.last_step else None

    def _due(self, step: int) -> Due:
        """Logged are the first step, the last, and every log_every in between."""
        options, last = self.options, step == self.last_step
        every = options.steps_between_evaluations(self.batches.steps_per_epoch)
        evaluate = last or step % every == 0
        return Due(
            log=last or step == 1 or step % options.log_every == 0,
            evaluate=evaluate,
            save=evaluate or (options.save_every is not None and step % options.save_every == 0),
        )

    # -- one step -----------------------------------------------------------------------------

    def _take_step(self, *, watched: bool) -> tuple[Tensor, float]:
        """One optimizer step; its gradient norm before clipping, and its learning rate."""
        if watched:
            self.watch.start()
        *others, last = self.batches.of_step(self.step)
        for batch in others:
            with self.accelerator.no_sync(self.wrapped):
                self._micro_batch(batch)
        self._micro_batch(last)
        self.scaler.unscale_(self.optimizer)
        norm = full_tensor(clip_grad_norm_(self.model.parameters(), self.options.max_grad_norm))
        if not self.scaler.is_enabled():  # it skips such steps by itself
            self._note_bad(norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        learning_rate = float(self.schedule.get_last_lr()[0])
        self.schedule.step()
        self.optimizer.zero_grad()
        return norm, learning_rate

    def _micro_batch(self, batch: dict[str, Tensor]) -> None:
        """Forward and backward, where asked for as a CUDA graph; watched ones always without."""
        if self.watch.is_on:
            with looking():
                loss = self._forward_backward(batch)
        elif not self.options.cuda_graph or self._plain_steps < PLAIN_STEPS:
            self._plain_steps += 1
            loss = self._forward_backward(batch)
        else:
            if self._captured is None:
                self._captured = CapturedSteps(self.model, self._forward_backward, batch)
            run = self._captured.run if self._captured.fits(batch) else self._forward_backward
            loss = run(batch)
        self._note_bad(loss)
        self._running_loss += loss

    def _forward_backward(self, batch: dict[str, Tensor]) -> Tensor:
        with autocast_of(self.options.precision, self.accelerator.device):
            output = self.wrapped(**batch)
            # The model divides by the targets of the whole step, and gradients are averaged.
            loss = output["loss"] * world_size()
        self.scaler.scale(loss).backward()
        if self.watch.is_on:
            named = {name: output.get(name) for name in ROUTER_LOSSES}
            self._router_losses = {name: one for name, one in named.items() if one is not None}
        return loss.detach()

    def _note_bad(self, value: Tensor) -> None:
        newly_bad = (self._bad_step < 0) & ~torch.isfinite(value)
        self._bad_step = torch.where(newly_bad, self.step + 1, self._bad_step)

    def _check_finite(self) -> None:
        """Stop a run whose loss is no number, before anything of it is logged or saved."""
        step = int(self._bad_step)
        if step < 0:
            return
        kept = checkpoints.checkpoints(self.run.path)
        last = f"The last good checkpoint is {kept[-1]}." if kept else "No checkpoint was written."
        raise RunError(
            f"step {step}: the loss or its gradient is not a finite number. {last} "
            "Lower training.learning_rate, or use training.precision=bf16 or fp32."
        )

    # -- after a step -------------------------------------------------------------------------

    def _log(self, log: LogWriter, grad_norm: Tensor, learning_rate: float) -> None:
        self._check_finite()
        total = float(all_reduce_sum(self._running_loss) / world_size())
        self._running_loss.zero_()
        numbers = {
            "loss": total / (self.step - self._last_logged),
            "grad_norm": float(grad_norm),
            "learning_rate": learning_rate,
            **{name: float(full_tensor(value)) for name, value in self._router_losses.items()},
            **self.watch.numbers(),
        }
        self._last_logged = self.step
        if rank() == 0:
            log.write("train", self.step, numbers)

    def _evaluate(self, log: LogWriter) -> None:
        self._check_finite()
        result = evaluate(
            self.model,
            self._eval_blocks,
            batch_size=self.options.micro_batch_size,
            quality_tokens=self.options.quality_tokens,
            autocast=autocast_of(self.options.precision, self.accelerator.device),
        )
        self._usage = self.step, result.usage
        if result.loss < self.best_loss:
            self.best_step, self.best_loss = self.step, result.loss
        if rank() == 0:
            log.write("eval", self.step, result.numbers())

    # -- checkpoints --------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint; every process must call it, because shards are gathered."""
        self._check_finite()
        weights = {
            name: full_tensor(tensor).detach().cpu()
            for name, tensor in self.model.state_dict().items()
        }
        moments = optimizer_state(self.model, self.optimizer)
        running = {"running_loss": self._running_loss.cpu().reshape(1)}
        of_processes = gather_object([{**random_state(), **running}])

        def fill(partial: Path) -> None:
            self.model.save_pretrained(partial, state_dict=weights, max_shard_size="1TB")
            self._save_tokenizer(partial)
            checkpoints.save_tensors(moments, partial / OPTIMIZER)
            for place, tensors in enumerate(of_processes):
                checkpoints.save_tensors(tensors, partial / f"random-{place}.safetensors")
            evaluated, usage = self._usage
            if usage and evaluated == self.step:
                checkpoints.save_tensors(usage, partial / checkpoints.USAGE)
            write_json(partial / checkpoints.STATE, self._counters())
            shutil.copyfile(self.run.log, partial / checkpoints.LOG)

        def write() -> None:
            folder, keep = self.run.path, self.options.keep_checkpoints
            checkpoints.write_checkpoint(folder, self.step, self.run.sha256(), fill)
            best = None if self.best_step is None else folder / f"checkpoint-{self.best_step}"
            checkpoints.remove_old(folder, keep, best)

        on_first_rank(write)  # or it fails on all

    def _counters(self) -> dict[str, Any]:
        schedule = self.schedule.state_dict()
        return {
            "step": self.step,
            "best_step": self.best_step,
            "best_loss": None if self.best_step is None else self.best_loss,
            "last_logged": self._last_logged,
            "seconds": self.clock.seconds,
            "training_seconds": self.clock.training_seconds,
            "processes": world_size(),
            "schedule": {key: schedule[key] for key in SCHEDULE_KEYS},
            "scaler": self.scaler.state_dict(),
        }

    def restore(self, checkpoint: Path) -> None:
        """Go on from a checkpoint, by whatever number of processes it was written."""
        saved = checkpoints.load_json(checkpoint / checkpoints.STATE)
        checkpoints.load_model(checkpoint, self.model)
        entries = checkpoints.load_tensors(checkpoint / OPTIMIZER)
        may_be_new = self.scaler.is_enabled()
        load_optimizer_state(self.model, self.optimizer, entries, may_be_new=may_be_new)
        self.schedule.load_state_dict({**self.schedule.state_dict(), **saved["schedule"]})
        for group, rate in zip(
            self.optimizer.param_groups, self.schedule.get_last_lr(), strict=True
        ):
            group["lr"] = rate
        if saved["scaler"]:
            self.scaler.load_state_dict(saved["scaler"])
        self.step, self._last_logged = saved["step"], saved["last_logged"]
        if saved["best_step"] is not None:
            self.best_step, self.best_loss = saved["best_step"], saved["best_loss"]
        self._restore_processes(checkpoint, saved["processes"])
        self.clock.go_on(saved["seconds"], saved["training_seconds"])

    def _restore_processes(self, checkpoint: Path, processes: int) -> None:
        """This process's own; of another number the mean loss, and new ones draw from the seed."""
        files = [checkpoint / f"random-{place}.safetensors" for place in range(processes)]
        if rank() < processes:
            set_random_state(checkpoints.load_tensors(files[rank()]))
        same = files[rank() : rank() + 1] if processes == world_size() else files
        losses = [checkpoints.load_tensors(file)["running_loss"] for file in same]
        self._running_loss = torch.cat(losses).mean().to(self.accelerator.device)


def make_optimizer(model: nn.Module, options: TrainingOptions) -> torch.optim.AdamW:
    """AdamW that lets norms and biases, all that is no matrix, keep their size."""
    parameters = [one for one in model.parameters() if one.requires_grad]
    groups = [
        {
            "params": [one for one in parameters if one.ndim > 1],
            "weight_decay": options.weight_decay,
        },
        {"params": [one for one in parameters if one.ndim <= 1], "weight_decay": 0.0},
    ]
    betas = (options.beta1, options.beta2)
    return torch.optim.AdamW(
        groups, lr=options.learning_rate, betas=betas, eps=options.epsilon, fused=True
    )


def checkpoint_activations(model: AirMoeForCausalLM) -> None:
    """Recompute layers in backward, by the name that transformers has for it since 5.23, or had."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})


class StopOnSignal:
    """Ctrl-C or a polite kill: finish the step, write a checkpoint, stop. A later one kills.

    One process only: several would have to agree on the step, and the checkpoint before is exact.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.received: int | None = None
        self._enabled, self._received_at = enabled, 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopOnSignal:
        if self._enabled:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self.received is None:
            self.received, self._received_at = number, time.monotonic()
        elif time.monotonic() - self._received_at > ECHO_SECONDS:
            self.__exit__()
            signal.raise_signal(number)
