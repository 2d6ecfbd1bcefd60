"""The training loop, from top to bottom.

Each step: forward and backward per micro-batch (gradients add up), clip, optimizer, schedule; then,
when due, log, evaluate, save. Everything a step depends on is in the checkpoint or computed from
the step's number, so a resumed run has the same bits as one that never stopped.
"""

from __future__ import annotations

import math
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from airmoe.data import Prepared
from airmoe.distributed import all_reduce_sum, full_tensor, on_first_rank, rank, world_size
from airmoe.errors import RunError
from airmoe.files import write_json
from airmoe.model import AirMoeForCausalLM
from airmoe.model.objective import ROUTER_LOSSES
from airmoe.routers import Router, track_optimizer
from airmoe.training import checkpoints
from airmoe.training.capture import CapturedMicroBatches, uncompiled
from airmoe.training.config import TrainingOptions
from airmoe.training.devices import autocast_of, checkpoint_activations, placed
from airmoe.training.evaluation import RoutingWatch, evaluate
from airmoe.training.run_folder import RunFolder
from airmoe.training.run_log import STARTING_STEPS, Clock, LogWriter
from airmoe.training.text import MicroBatches, blocks_of

ECHO_SECONDS = 0.5  # `timeout` and batch systems signal both the process and its group


class TrainingLoop:
    """Trains an `AirMoeForCausalLM` from `step` to `last_step`."""

    def __init__(
        self,
        run: RunFolder,
        prepared: Prepared,
        model: AirMoeForCausalLM,
        accelerator: Accelerator,
        speed: TrainingOptions,
    ) -> None:
        """`speed`: the run's options with compiler and CUDA graphs settled for this process."""
        self.run, self.model, self.accelerator = run, model, accelerator
        self.options = options = run.config.training
        train_blocks, self._eval_blocks = blocks_of(run.config, prepared)
        self.batches = MicroBatches(train_blocks, options, accelerator.device)
        self._tokenizer = prepared.tokenizer()
        self.step, self.last_step = 0, options.total_steps(self.batches.steps_per_epoch)
        self.best_step: int | None = None
        self.best_loss = math.inf
        slow_start = speed.compile or speed.cuda_graph
        self.clock = Clock(starting_steps=STARTING_STEPS if slow_start else 0)
        if options.gradient_checkpointing:
            checkpoint_activations(model)
        self.wrapped = placed(model, accelerator, run.config)
        self.optimizer = make_optimizer(model, options)  # sharding has replaced the parameters
        self.scaler = torch.amp.GradScaler("cuda", enabled=options.precision == "fp16")
        if any(isinstance(module, Router) for module in model.modules()):
            track_optimizer(model, self.optimizer)
        self.watch = RoutingWatch(model, options.quality_tokens)
        self._graphs = (
            CapturedMicroBatches(model, self._forward_backward) if speed.cuda_graph else None
        )
        self._router_losses: dict[str, Tensor] = {}  # of the last watched micro-batch
        self._last_logged = 0
        # On the device: reading them at every step would make the host wait for the GPU.
        self._running_loss = torch.zeros((), device=accelerator.device)  # since the last log line
        self._bad_step = torch.full((), -1, device=accelerator.device)  # first not finite, or -1

    def train(self, log: LogWriter, advance: Callable[[int], None]) -> int | None:
        """Take the remaining steps. Returns the signal that stopped them early, if any."""
        self.model.train()
        with StopOnSignal(enabled=world_size() == 1) as stop:
            while self.step < self.last_step:
                logs, evaluates, saves = self._due_after(self.step + 1)
                with self.clock.step(then_wait=logs or saves):
                    grad_norm = self._take_step(watched=logs)
                self.step += 1
                advance(self.step)
                if logs:
                    self._log(log, grad_norm)
                usage = self._evaluate(log) if evaluates else {}
                stopping = stop.received is not None  # read once: a signal may come after `save`
                if saves or stopping:
                    self.save(usage)
                if stopping:
                    break
        return stop.received if self.step < self.last_step else None

    def _due_after(self, step: int) -> tuple[bool, bool, bool]:
        """Whether to log, to evaluate and to save after that step; the last one does all three."""
        options, last = self.options, step == self.last_step
        every = options.steps_between_evaluations(self.batches.steps_per_epoch)
        logs = last or step == 1 or step % options.log_every == 0
        evaluates = last or step % every == 0
        saves = evaluates or (options.save_every is not None and step % options.save_every == 0)
        return logs, evaluates, saves

    # -- one step -----------------------------------------------------------------------------

    def _take_step(self, *, watched: bool) -> Tensor:
        """One optimizer step; returns the gradient norm before clipping."""
        if watched:
            self.watch.start()  # until `_log` reads its numbers
        *others, last = self.batches.of_step(self.step)
        for batch in others:
            with self.accelerator.no_sync(self.wrapped):  # exchanged with the last one only
                self._micro_batch(batch)
        self._micro_batch(last)
        self.scaler.unscale_(self.optimizer)  # the scaler does nothing unless precision is fp16
        norm = full_tensor(clip_grad_norm_(self.model.parameters(), self.options.max_grad_norm))
        if not self.scaler.is_enabled():  # the scaler skips steps with such gradients itself
            self._note_bad(norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.options, self.step, self.last_step)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return norm

    def _micro_batch(self, batch: dict[str, Tensor]) -> None:
        """Forward and backward; watched ones run neither compiled nor as a CUDA graph."""
        if self.watch.is_on:
            with uncompiled():
                loss = self._forward_backward(batch)
        elif self._graphs is not None:
            loss = self._graphs.run(batch)
        else:
            loss = self._forward_backward(batch)
        self._note_bad(loss)
        self._running_loss += loss

    def _forward_backward(self, batch: dict[str, Tensor]) -> Tensor:
        with autocast_of(self.options.precision, self.accelerator.device):
            output = self.wrapped(**batch)
            # The model divides by the targets of the whole step; DDP and FSDP2 average gradients.
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
        """Stop before anything is logged or saved that came after a NaN or infinite loss."""
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

    def _log(self, log: LogWriter, grad_norm: Tensor) -> None:
        self._check_finite()
        total = float(all_reduce_sum(self._running_loss) / world_size())
        self._running_loss.zero_()
        numbers = {
            "loss": total / (self.step - self._last_logged),
            "grad_norm": float(grad_norm),
            "learning_rate": learning_rate(self.options, self.step - 1, self.last_step),
            **{name: float(full_tensor(value)) for name, value in self._router_losses.items()},
            **self.watch.numbers(),
        }
        self._last_logged = self.step
        log.write("train", self.step, numbers)

    def _evaluate(self, log: LogWriter) -> dict[str, Tensor]:
        """Measure the loss on the validation text; returns which experts it used."""
        self._check_finite()
        result = evaluate(
            self.model,
            self._eval_blocks,
            batch_size=self.options.sequences,
            quality_tokens=self.options.quality_tokens,
            autocast=autocast_of(self.options.precision, self.accelerator.device),
        )
        if result.loss < self.best_loss:
            self.best_step, self.best_loss = self.step, result.loss
        log.write("eval", self.step, result.numbers())
        return result.usage

    # -- checkpoints --------------------------------------------------------------------------

    def save(self, usage: dict[str, Tensor]) -> None:
        """Write a checkpoint; every process must call it, because shards are gathered."""
        self._check_finite()
        state = self.model.state_dict()
        weights = {name: full_tensor(tensor).detach().cpu() for name, tensor in state.items()}
        moments = checkpoints.optimizer_state(self.model, self.optimizer)
        running = {"running_loss": self._running_loss.cpu().reshape(1)}
        of_processes = gather_object([{**checkpoints.random_state(), **running}])

        def fill(folder: Path) -> None:
            self.model.save_pretrained(folder, state_dict=weights, max_shard_size="1TB")
            self._tokenizer.save(folder)
            checkpoints.save_tensors(moments, folder / checkpoints.OPTIMIZER)
            for place, tensors in enumerate(of_processes):
                checkpoints.save_tensors(tensors, folder / f"random-{place}.safetensors")
            if usage:
                checkpoints.save_tensors(usage, folder / checkpoints.USAGE)
            counters = checkpoints.Counters(
                step=self.step,
                best_step=self.best_step,
                best_loss=None if self.best_step is None else self.best_loss,
                last_logged=self._last_logged,
                seconds=self.clock.seconds,
                training_seconds=self.clock.training_seconds,
                processes=world_size(),
                scaler=self.scaler.state_dict(),
            )
            write_json(folder / checkpoints.STATE, asdict(counters))
            shutil.copyfile(self.run.log, folder / checkpoints.LOG)

        def write() -> None:
            checkpoints.write_checkpoint(self.run.path, self.step, self.run.sha256(), fill)
            checkpoints.remove_old(self.run.path, self.options.keep_checkpoints)

        on_first_rank(write)  # a failure there is raised on all ranks

    def restore(self, checkpoint: Path) -> None:
        """Go on from a checkpoint, whatever number of processes wrote it."""
        saved = checkpoints.read_counters(checkpoint)
        checkpoints.load_model(checkpoint, self.model)
        moments, may_be_new = checkpoint / checkpoints.OPTIMIZER, self.scaler.is_enabled()
        checkpoints.load_optimizer_state(self.model, self.optimizer, moments, may_be_new=may_be_new)
        if saved.scaler:
            self.scaler.load_state_dict(saved.scaler)
        self.step, self._last_logged = saved.step, saved.last_logged
        if saved.best_step is not None and saved.best_loss is not None:
            self.best_step, self.best_loss = saved.best_step, saved.best_loss
        self.clock.go_on(saved.seconds, saved.training_seconds)
        # A rank that was not there before keeps the random state its seed gave it, and where the
        # number of ranks changed, each goes on from the mean of their running losses.
        files = [checkpoint / f"random-{place}.safetensors" for place in range(saved.processes)]
        like = {**checkpoints.random_state(), "running_loss": torch.zeros(1)}
        states = [checkpoints.load_tensors(file, like, free=("cuda",)) for file in files]
        if rank() < len(states):
            checkpoints.set_random_state(states[rank()])
        kept = states if len(states) != world_size() else [states[rank()]]
        running_loss = torch.cat([state["running_loss"] for state in kept]).mean()
        self._running_loss = running_loss.to(self.accelerator.device)


def make_optimizer(model: nn.Module, options: TrainingOptions) -> torch.optim.AdamW:
    """AdamW; only matrices decay, not norms and biases."""
    parameters = [one for one in model.parameters() if one.requires_grad]
    matrices = [one for one in parameters if one.ndim > 1]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": [one for one in parameters if one.ndim <= 1], "weight_decay": 0.0},
    ]
    betas = (options.beta1, options.beta2)
    return torch.optim.AdamW(
        groups, lr=options.learning_rate, betas=betas, eps=options.epsilon, fused=True
    )


def learning_rate(options: TrainingOptions, step: int, last_step: int) -> float:
    """The rate of a step, counted from 0: warms up linearly from 0, then falls linearly to 0."""
    warmup = math.ceil(last_step * options.warmup)
    share = step / warmup if step < warmup else (last_step - step) / max(1, last_step - warmup)
    return options.learning_rate * share


class StopOnSignal:
    """Ctrl-C or SIGTERM: finish the step, write a checkpoint, stop. A later signal kills at once.

    On one process only: several would have to agree on the step.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.received: int | None = None
        self._enabled, self._received_at = enabled, 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if self._enabled:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self.received is None:
            self.received, self._received_at = number, time.monotonic()
        elif time.monotonic() - self._received_at > ECHO_SECONDS:
            self.__exit__()
            signal.raise_signal(number)
