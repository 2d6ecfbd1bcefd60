"""The loop: Hugging Face's Trainer with our checkpoints, data order, evaluation, routing log."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from torch import Tensor
from torch.optim import Optimizer
from transformers import Trainer, TrainingArguments

from airmoe.distributed import full_tensor, is_distributed, rank, world_size
from airmoe.errors import RunError
from airmoe.files import write_json
from airmoe.model import AirMoeForCausalLM
from airmoe.routers import Router, track_optimizer
from airmoe.training import checkpoints
from airmoe.training.capture import CapturedSteps
from airmoe.training.config import RunConfig
from airmoe.training.evaluation import Evaluation, evaluate
from airmoe.training.living_lists import LISTS, living_lists, restore_lists
from airmoe.training.optimizer_state import OPTIMIZER, load_optimizer_state, optimizer_state
from airmoe.training.order import EpochOrder
from airmoe.training.random_state import random_state, set_random_state
from airmoe.training.sharding import shard
from airmoe.training.watch import RoutingWatch, looking
from airmoe.transformers_internals import check_trainer

# Of the schedule's state, what is plain numbers; the rest are functions made anew.
SCHEDULE_KEYS = ("last_epoch", "_step_count", "_last_lr", "base_lrs")
PLAIN_STEPS = 4  # before a capture: compilers, codebooks and the optimizer have started
AUXILIARY = ("load_balance_loss", "shortlist_balance_loss", "router_z_loss")

check_trainer(Trainer)


class AirMoeTrainer(Trainer):
    """Trains an `AirMoeForCausalLM` on blocks; a killed run goes on bit for bit."""

    def __init__(
        self,
        model: AirMoeForCausalLM,
        run_config: RunConfig,
        arguments: TrainingArguments,
        train_blocks: Any,
        eval_blocks: Any,
        save_tokenizer: Callable[[Path], None],
        run_sha256: str,
    ) -> None:
        self.options = run_config.training
        self.order = EpochOrder(len(train_blocks), self.options.batch_size, self.options.seed)
        self._save_tokenizer, self._run_sha256 = save_tokenizer, run_sha256
        self._sharded = False
        self.seconds_before = 0.0  # spent by earlier parts of a resumed run
        self.training_seconds = 0.0  # of it on steps, without evaluations; counted by the log
        self._started = time.monotonic()
        self._restored: dict[str, Any] | None = None
        self._auxiliary: dict[str, Tensor] = {}
        self._captured: CapturedSteps | None = None
        self._capturing = False
        self._plain_steps = 0  # micro-batches run as always by this process
        self._usage: dict[int, dict[str, Tensor]] = {}  # of the newest evaluation, by its step
        super().__init__(
            model=model,
            args=arguments,
            train_dataset=train_blocks,
            eval_dataset=eval_blocks,
        )
        self.watch = RoutingWatch(model, self.options.quality_tokens)
        # The first step whose loss or gradient was not finite, else -1; on the device, because
        # asking every step would make the GPU wait.
        self._bad_step = torch.full((), -1, dtype=torch.int64, device=arguments.device)

    # -- data, optimizer, sharding ----------------------------------------------------------

    def _get_train_sampler(self, train_dataset: Any = None) -> EpochOrder:
        return self.order

    def _run_epoch(self, **arguments: Any) -> None:  # pyright: ignore
        # Accelerate does not reach the sampler of a resumed, distributed loader.
        self.order.set_epoch(arguments["epoch"])
        super()._run_epoch(**arguments)

    def create_optimizer(self, model: Any = None) -> Any:
        """Shard first where asked to (parameters are replaced), then tell routers of every step."""
        if self.options.sharding == "fsdp2" and world_size() > 1 and not self._sharded:
            shard(self.airmoe_model)
            self._sharded = True
            # Accelerate takes a model marked so as it is; otherwise it would wrap it in DDP.
            cast(Any, self.model)._is_accelerate_prepared = True
        optimizer = cast(Optimizer, super().create_optimizer())
        if any(isinstance(module, Router) for module in self.airmoe_model.modules()):
            track_optimizer(self.airmoe_model, optimizer)
        return optimizer

    @property
    def airmoe_model(self) -> AirMoeForCausalLM:
        """The model itself, outside of what Accelerate wraps around it."""
        return cast(AirMoeForCausalLM, self.model)

    @property
    def torch_optimizer(self) -> Optimizer:
        return cast(Optimizer, getattr(self.optimizer, "optimizer", self.optimizer))

    def floating_point_ops(self, inputs: Any) -> int:
        return 0  # the Trainer's estimate counts all experts as active

    # -- one step ---------------------------------------------------------------------------

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Forward and backward of a micro-batch, where asked for as a graph."""
        if self.watch.is_on:
            with looking():
                return super().training_step(model, inputs, num_items_in_batch)
        if not self.options.cuda_graph or self._plain_steps < PLAIN_STEPS:
            self._plain_steps += 1
            return super().training_step(model, inputs, num_items_in_batch)
        items = torch.as_tensor(num_items_in_batch, device=self.args.device)
        batch = {**self._prepare_inputs(inputs), "items": items}
        if self._captured is None:
            self._captured = CapturedSteps(self.airmoe_model, self._step_to_capture, batch)
        if not self._captured.fits(batch):
            return super().training_step(model, inputs, num_items_in_batch)
        loss = self._captured.run(batch)
        self._note_bad(loss)
        return loss

    def _step_to_capture(self, batch: dict[str, Tensor]) -> Tensor:
        inputs = {name: tensor for name, tensor in batch.items() if name != "items"}
        self._capturing = True
        try:
            return super().training_step(self.airmoe_model, inputs, batch["items"])
        finally:
            self._capturing = False

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **rest: Any
    ) -> Any:
        with self.accelerator.autocast():  # a sharded model is not wrapped by Accelerate
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **rest)
        for name in AUXILIARY:
            if (value := getattr(outputs, name, None)) is not None:
                self._auxiliary[name] = value.detach()
        if not self._capturing:  # a graph would remember this step's number
            self._note_bad(loss.detach())
        return (loss, outputs) if return_outputs else loss

    def _clip_grad_norm(self, model: Any) -> Tensor:
        norm = full_tensor(cast(Tensor, super()._clip_grad_norm(model)))
        if self.options.precision != "fp16":  # whose scaler skips such steps by itself
            self._note_bad(norm)
        return norm

    def _note_bad(self, value: Tensor) -> None:
        step = self.state.global_step + 1
        newly_bad = (self._bad_step < 0) & ~torch.isfinite(value)
        self._bad_step = torch.where(newly_bad, step, self._bad_step)

    def check_finite(self) -> None:
        """Stop a run whose loss is no number, before anything of it is evaluated or saved."""
        step = int(self._bad_step)
        if step < 0:
            return
        folder = Path(str(self.args.output_dir))
        kept = checkpoints.checkpoints(folder)
        raise RunError(
            f"step {step}: the loss or its gradient is not a finite number. "
            + (
                f"The last good checkpoint is {kept[-1]}. "
                if kept
                else "No checkpoint was written. "
            )
            + "Lower training.learning_rate, or use training.precision=bf16 or fp32."
        )

    # -- evaluation -------------------------------------------------------------------------

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:  # pyright: ignore
        """Our own pass (exact to the token), reported the Trainer's way."""
        result = self.evaluation()
        self._usage = {self.state.global_step: result.usage}
        metrics = {f"eval_{name}": value for name, value in result.numbers().items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def evaluation(self) -> Evaluation:
        self.check_finite()
        return evaluate(
            self.airmoe_model,
            self.eval_dataset,
            batch_size=self.args.per_device_eval_batch_size,
            quality_tokens=self.options.quality_tokens,
            autocast=self.accelerator.autocast(),
        )

    # -- logging ----------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add routing numbers to a training log line; HF's own summary lines are ours to write."""
        if "train_runtime" in logs:
            return
        if "loss" in logs:
            self.check_finite()
            # `start_time` would add speeds over the whole run; the progress callback knows better.
            logs |= {name: float(full_tensor(value)) for name, value in self._auxiliary.items()}
            logs |= self.watch.numbers()
            self.watch.stop()
        super().log(logs)

    # -- checkpoints ------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.check_finite()
        folder, step = Path(str(self.args.output_dir)), self.state.global_step
        weights = {
            name: full_tensor(tensor).detach().cpu()
            for name, tensor in self.airmoe_model.state_dict().items()
        }
        moments = optimizer_state(self.airmoe_model, self.torch_optimizer)
        per_rank = gather_object([self._own_state()])

        def fill(partial: Path) -> None:
            self.airmoe_model.save_pretrained(
                partial, state_dict=weights, max_shard_size="1TB", is_main_process=True
            )
            self._save_tokenizer(partial)
            checkpoints.save_tensors(moments, partial / OPTIMIZER)
            if lists := living_lists(self.airmoe_model):
                checkpoints.save_tensors(lists, partial / LISTS)
            for place, tensors in enumerate(per_rank):
                checkpoints.save_tensors(tensors, partial / f"random-{place}.safetensors")
            if usage := self._usage.get(step):
                checkpoints.save_tensors(usage, partial / checkpoints.USAGE)
            write_json(partial / "training.json", self._shared_state())
            shutil.copyfile(folder / checkpoints.LOG, partial / checkpoints.LOG)
            self.state.save_to_json(str(partial / "trainer_state.json"))

        failure = None
        if rank() == 0:
            try:
                checkpoints.write_checkpoint(folder, step, self._run_sha256, fill)
                checkpoints.remove_old(folder, self.options.keep_checkpoints, self._best())
            except RunError as error:
                failure = error
        _fail_together(failure)

    def _best(self) -> Path | None:
        step = self.state.best_global_step
        return Path(str(self.args.output_dir)) / f"checkpoint-{step}" if step else None

    def _own_state(self) -> dict[str, Tensor]:
        """What differs between processes."""
        return {**random_state(), "running_loss": self._tr_loss.detach().cpu().reshape(1)}

    def _shared_state(self) -> dict[str, Any]:
        schedule = self.lr_scheduler.state_dict()  # pyright: ignore
        scaler = getattr(self.accelerator, "scaler", None)
        return {
            "schedule": {key: schedule[key] for key in SCHEDULE_KEYS},
            "scaler": None if scaler is None else scaler.state_dict(),
            "last_logged": self._globalstep_last_logged,
            "total_loss": self._total_loss_scalar,
            "seconds": self.seconds(),
            "training_seconds": self.training_seconds,
            "processes": world_size(),
        }

    def seconds(self) -> float:
        """Time spent on this run so far, earlier parts included."""
        return self.seconds_before + time.monotonic() - self._started

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        checkpoints.load_model(Path(resume_from_checkpoint), self.airmoe_model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        load_optimizer_state(
            self.airmoe_model,
            self.torch_optimizer,
            checkpoints.load_tensors(folder / OPTIMIZER),
            may_be_new=self.accelerator.scaler is not None,
        )
        self._restored = checkpoints.load_json(folder / "training.json")
        assert self._restored is not None
        schedule = cast(Any, self.lr_scheduler)
        schedule.load_state_dict({**schedule.state_dict(), **self._restored["schedule"]})
        groups = self.torch_optimizer.param_groups
        for group, rate in zip(groups, schedule.get_last_lr(), strict=True):
            group["lr"] = rate

    def _load_scaler(self, checkpoint: str | None) -> None:
        saved = self._restored and self._restored["scaler"]
        if saved and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(saved)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        own = self._own_file(Path(checkpoint))
        if own.exists():  # another number of processes: new ones start from the seed
            set_random_state(checkpoints.load_tensors(own))

    def restore_lists(self, checkpoint: Path) -> None:
        """Last of all: whatever else is loaded marks them as out of date."""
        if (checkpoint / LISTS).exists():
            restore_lists(self.airmoe_model, checkpoints.load_tensors(checkpoint / LISTS))

    def restore_running_log(self, checkpoint: Path) -> None:
        """The averages a log line is made of, as they stood; the Trainer itself forgets them."""
        assert self._restored is not None
        self._tr_loss = self._running_loss(checkpoint).to(self.args.device)
        self._globalstep_last_logged = self._restored["last_logged"]
        self._total_loss_scalar = self._restored["total_loss"]
        self.seconds_before = self._restored["seconds"]
        self.training_seconds = self._restored.get("training_seconds", 0.0)  # older ones
        self._started = time.monotonic()

    def _running_loss(self, checkpoint: Path) -> Tensor:
        """This process's own; of another number of processes the mean, which a log line shows."""
        saved = self._restored["processes"] if self._restored else 1
        places = [rank()] if saved == world_size() else range(saved)
        files = [checkpoint / f"random-{place}.safetensors" for place in places]
        return torch.cat([checkpoints.load_tensors(file)["running_loss"] for file in files]).mean()

    def _own_file(self, checkpoint: Path) -> Path:
        return checkpoint / f"random-{rank()}.safetensors"


def _fail_together(failure: RunError | None) -> None:
    """Raise on every rank what happened on the first, so that none waits for the others."""
    message = [None if failure is None else str(failure)]
    if is_distributed():
        dist.broadcast_object_list(message)
    if message[0] is not None:
        raise RunError(message[0])
