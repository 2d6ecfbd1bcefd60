"""A run's recipe in the words of the Hugging Face Trainer."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import TrainingArguments

from airmoe.errors import ConfigError
from airmoe.training.bfloat16 import check_bfloat16
from airmoe.training.config import RunConfig
from airmoe.transformers_internals import checkpointing_arguments


def make_arguments(
    run: RunConfig, folder: Path, *, num_processes: int, steps_per_epoch: int
) -> TrainingArguments:
    """Settings for the Trainer; making them starts the process group under torchrun."""
    options = run.training
    on_gpu = torch.cuda.is_available()
    check_device(run, num_processes)
    evaluate_every = _steps_between_evaluations(run, steps_per_epoch)
    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=options.micro_batch_size,
        per_device_eval_batch_size=options.micro_batch_size,
        gradient_accumulation_steps=options.accumulation_steps(num_processes),
        max_steps=total_steps(run, steps_per_epoch),
        learning_rate=options.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=options.warmup,
        weight_decay=options.weight_decay,
        adam_beta1=options.beta1,
        adam_beta2=options.beta2,
        adam_epsilon=options.epsilon,
        max_grad_norm=options.max_grad_norm,
        optim="adamw_torch_fused",
        bf16=options.precision == "bf16",
        fp16=options.precision == "fp16",
        seed=options.seed,
        eval_strategy="steps",
        eval_steps=evaluate_every,
        save_strategy="steps",
        save_steps=evaluate_every,
        metric_for_best_model="loss",
        greater_is_better=False,
        logging_strategy="steps",
        logging_steps=options.log_every,
        logging_first_step=True,
        logging_nan_inf_filter=False,  # it hides what must stop the run, and waits for the GPU
        **checkpointing_arguments(options.gradient_checkpointing),
        ddp_broadcast_buffers=False,  # codebooks are equal by construction, and must not be halved
        ddp_find_unused_parameters=False,
        dataloader_drop_last=True,
        dataloader_pin_memory=on_gpu,
        # A copy that blocks makes the host wait for the step before, and then the GPU for the host.
        accelerator_config={"non_blocking": on_gpu},
        remove_unused_columns=False,
        use_cpu=not on_gpu,
        disable_tqdm=True,
        report_to=[],
    )


def total_steps(run: RunConfig, steps_per_epoch: int) -> int:
    options = run.training
    if options.steps is not None:
        return options.steps
    assert options.epochs is not None
    return options.epochs * steps_per_epoch


def first_checkpoint_step(run: RunConfig, steps_per_epoch: int) -> int:
    """No later step is reached without a checkpoint; a signal may have made one earlier."""
    due = [_steps_between_evaluations(run, steps_per_epoch), total_steps(run, steps_per_epoch)]
    return min([*due, *([run.training.save_every] if run.training.save_every else [])])


def _steps_between_evaluations(run: RunConfig, steps_per_epoch: int) -> int:
    every = run.training.eval_every
    return steps_per_epoch if every == "epoch" else every


def check_device(run: RunConfig, num_processes: int) -> None:
    """What the machine cannot do is said before the work starts."""
    options = run.training
    if options.precision == "fp16" and not torch.cuda.is_available():
        raise ConfigError(
            "training.precision",
            "fp16",
            "needs a GPU, because its loss scaling does",
            "Use training.precision=bf16 or fp32 here.",
        )
    if options.precision == "bf16":
        check_bfloat16("training.precision", "cuda" if torch.cuda.is_available() else "cpu")
    if options.cuda_graph:
        _check_cuda_graph(run, num_processes)


def check_sharding(run: RunConfig, num_processes: int) -> None:
    """A new run that asks for shards needs processes to hold them; a begun one goes on anyway."""
    if run.training.sharding == "fsdp2" and num_processes == 1:
        raise ConfigError(
            "training.sharding",
            "fsdp2",
            "needs more than one process",
            "Start with: torchrun --nproc-per-node N -m airmoe train ..., or leave it at none.",
        )


def _check_cuda_graph(run: RunConfig, num_processes: int) -> None:
    options = run.training
    against = {
        "there is no CUDA device": not torch.cuda.is_available(),
        f"there are {num_processes} processes": num_processes > 1,
        "precision is fp16, whose steps may be skipped": options.precision == "fp16",
        "gradient_checkpointing runs forwards again": options.gradient_checkpointing,
    }
    for reason, holds in against.items():
        if holds:
            raise ConfigError(
                "training.cuda_graph",
                True,
                f"cannot be, because {reason}",
                "Set training.cuda_graph=false, or change that.",
            )
