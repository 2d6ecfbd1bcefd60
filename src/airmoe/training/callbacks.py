"""What happens beside the steps: log lines, restoring a resumed log, stopping on a signal."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from airmoe.training.trainer import AirMoeTrainer

Line = dict[str, Any]
# Of a process that compiles or captures: the first is watched, then compilers and graphs start.
STARTING_STEPS = 8
# `timeout` and batch systems signal a process and its group, so that it hears one wish twice.
ECHO_SECONDS = 0.5


class Recorder(TrainerCallback):
    """Turns the Trainer's logs into lines of the run's log and hands them on.

    A line is {"kind": "train" | "eval", "step", "epoch", "tokens", numbers ...}; the fields of
    TIME_FIELDS are the only ones in which a repeated run may differ.
    """

    TIME_FIELDS = ("seconds", "training_seconds", "tokens_per_second")

    def __init__(
        self,
        trainer: AirMoeTrainer,
        path: Path,
        tokens_per_step: int,
        flops_per_token: dict[str, float],
        sinks: list[Callable[[Line], None]],
    ) -> None:
        self._trainer, self._path, self._sinks = trainer, path, sinks
        options = trainer.options
        self._starting = STARTING_STEPS if options.compile or options.cuda_graph else 0
        self._tokens_per_step, self._flops_per_token = tokens_per_step, flops_per_token
        self._mark = time.monotonic()
        self._seconds = 0.0  # of training since the last train line: evaluations are left out
        self._steps = 0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._mark = time.monotonic()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        watched = control.should_log or control.should_evaluate or control.should_save
        if torch.cuda.is_available() and (watched or self._starting == 1):
            torch.cuda.synchronize()  # else the device's work would count as somebody else's time
        now = time.monotonic()
        if self._starting:  # no method's time, and different from one process to the next
            self._starting -= 1
        else:
            self._seconds += now - self._mark
            self._trainer.training_seconds += now - self._mark
            self._steps += 1
        self._mark = now

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self._mark = time.monotonic()

    def on_save(self, *_: Any, **__: Any) -> None:
        self._mark = time.monotonic()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        if not logs or not state.is_world_process_zero:
            return
        line = self._line(state, logs)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        for sink in self._sinks:
            sink(line)
        self._mark = time.monotonic()

    def _line(self, state: TrainerState, logs: dict[str, float]) -> Line:
        step = state.global_step
        line: Line = {
            "kind": "eval" if "eval_loss" in logs else "train",
            "step": step,
            "epoch": logs.get("epoch"),
            "tokens": step * self._tokens_per_step,
        }
        line |= {
            name.removeprefix("eval_"): value for name, value in logs.items() if name != "epoch"
        }
        line |= {name: line["tokens"] * cost for name, cost in self._flops_per_token.items()}
        line["seconds"] = round(self._trainer.seconds(), 3)
        line["training_seconds"] = round(self._trainer.training_seconds, 3)
        if line["kind"] == "train" and self._seconds > 0:
            line["tokens_per_second"] = round(
                self._steps * self._tokens_per_step / self._seconds, 1
            )
            self._seconds, self._steps = 0.0, 0
        return line


class WatchSteps(TrainerCallback):
    """Switches the routing watch on for exactly the steps that will be logged."""

    def __init__(self, trainer: AirMoeTrainer) -> None:
        self._trainer = trainer

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        step = state.global_step + 1
        # Logged are the first step, the last, and every log_every in between.
        if step in (1, state.max_steps) or step % state.logging_steps == 0:
            self._trainer.watch.start()


class Restore(TrainerCallback):
    """Puts a resumed run's running averages and lists back to the moment of its checkpoint."""

    def __init__(self, trainer: AirMoeTrainer, checkpoint: Path) -> None:
        self._trainer, self._checkpoint = trainer, checkpoint

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._trainer.restore_running_log(self._checkpoint)
        self._trainer.restore_lists(self._checkpoint)


class StopOnSignal(TrainerCallback):
    """Ctrl-C or a polite kill: finish the step, write a checkpoint, stop. A later one kills.

    One process only: several would have to agree on the step, and the checkpoint before is exact.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._received_at = 0.0
        self._before: dict[int, Any] = {}

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._receive)

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self.received is None:
            self.received, self._received_at = number, time.monotonic()
        elif time.monotonic() - self._received_at > ECHO_SECONDS:
            self.restore()
            signal.raise_signal(number)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        if self.received is not None:
            control.should_training_stop = control.should_save = True
        return control

    def restore(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


class LastStep(TrainerCallback):
    """The last step is always logged, evaluated and saved; extra saves at `save_every`."""

    def __init__(self, save_every: int | None) -> None:
        self._save_every = save_every

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        if state.global_step >= state.max_steps:
            control.should_log = control.should_evaluate = control.should_save = True
        if self._save_every is not None and state.global_step % self._save_every == 0:
            control.should_save = True
        return control
