"""One training run from settings to result: new or resumed, on one process or many.

`train` and `resume` find or make the run's folder and text, then share `_run`: build the model,
train it (loop.py), measure the test split, write result.json.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, PartialState
from accelerate.utils import set_seed
from rich.console import Console
from transformers.utils import logging as transformers_logging

from airmoe.data import Prepared
from airmoe.distributed import on_first_rank, rank, world_size
from airmoe.errors import ConfigError, say
from airmoe.files import write_bytes, write_json
from airmoe.flops import count_flops
from airmoe.model import AirMoeConfig, AirMoeForCausalLM, draw_weights, parameter_counts
from airmoe.training.checkpoints import (
    LOG,
    best_checkpoint,
    check_checkpoint,
    checkpoints,
    clean_up,
    full_disk_explained,
    load_model,
    step_of,
)
from airmoe.training.config import RunConfig, workload_of
from airmoe.training.devices import (
    Machine,
    autocast_of,
    check_device,
    compile_layers,
    settle,
    settle_speed,
)
from airmoe.training.display import Display, PrepareDisplay, RunTracker
from airmoe.training.evaluation import evaluate
from airmoe.training.loop import TrainingLoop
from airmoe.training.run_folder import (
    RunFolder,
    check_same_data,
    claimed,
    create_run,
    open_run,
    peak_memory,
    read_result,
    write_result,
)
from airmoe.training.run_log import LogWriter, read_log
from airmoe.training.text import blocks_of, data_folder, prepared_data

PUT_BACK = "Resume where the run was started (its paths are relative to there), or put it back."
CHECKPOINT_BACK = "Put its newest checkpoint-N folder back, or start a new run in another folder."


@dataclass(frozen=True)
class Finished:
    """How a call of `train` or `resume` ended."""

    folder: RunFolder
    stopped_by: int | None  # the signal that stopped it early, None when it is complete
    step: int


def train(config: RunConfig, folder: Path | str, console: Console | None = None) -> Finished:
    """Start a new run in a new folder; it prints to `console`, by default standard output."""
    folder, console = Path(folder), _start_processes(config, console)
    config, chosen = settle(config, Machine.this(world_size()))
    for line in chosen:
        say(console, line)
    with ExitStack() as stack:
        # Claim the folder first, because preparing text may take hours.
        on_first_rank(lambda: stack.enter_context(claimed(folder, config)))
        prepared = _prepared_on_every_process(config, console)
        run = on_first_rank(lambda: create_run(folder, config, prepared))
        with full_disk_explained(folder):
            return _run(run, prepared, console, checkpoint=None)


def resume(folder: Path | str, console: Console | None = None) -> Finished:
    """Go on from the newest whole checkpoint, or from the start if there is none yet."""
    folder = Path(folder)
    run = open_run(folder)
    console = _start_processes(run.config, console, resumes=True)
    if run.result.exists():
        last_step = read_result(run.result)["last"]["step"]
        say(console, f"{folder} is finished: there is nothing left to do.")
        return Finished(run, None, last_step)
    given = run.config.data.folder
    if given is not None and not Path(given).is_dir():  # data.corpus may be another text
        rule = "must be there, with the text of the run"
        raise ConfigError("data.folder", given, rule, PUT_BACK)
    prepared = _prepared_on_every_process(run.config, console)
    check_same_data(run, prepared)
    with full_disk_explained(folder), ExitStack() as stack:
        on_first_rank(lambda: stack.enter_context(run.lock()))
        checkpoint = on_first_rank(lambda: _newest_checkpoint(run, prepared, console))
        return _run(run, prepared, console, checkpoint)


def _newest_checkpoint(run: RunFolder, prepared: Prepared, console: Console) -> Path | None:
    """The checkpoint to go on from, checked; what the run did after it is removed."""
    found = checkpoints(run.path)
    if found:
        check_checkpoint(found[-1], run.sha256(), to_resume=True)
    else:
        train_blocks, _ = blocks_of(run.config, prepared)
        first = run.config.training.first_checkpoint_step(len(train_blocks))
        reached = max((line["step"] for line in read_log(run.log)), default=0)
        if reached > first:
            rule = (
                f"must hold the checkpoints it had: its log reaches step {reached}, and its first "
                f"checkpoint was due after step {first}"
            )
            raise ConfigError("run", str(run.path), rule, CHECKPOINT_BACK)
        say(console, f"{run.path} has no checkpoint yet: it starts again.")
    clean_up(run.path, run.config.training.keep_checkpoints)
    write_bytes(run.log, (found[-1] / LOG).read_bytes() if found else b"")
    return found[-1] if found else None


def _start_processes(
    config: RunConfig, console: Console | None, *, resumes: bool = False
) -> Console:
    """Join torchrun's process group, if any; the console, on which only one process prints."""
    state = PartialState(cpu=not torch.cuda.is_available())
    check_device(config, state.num_processes, resumes=resumes)
    return console or Console() if state.is_main_process else Console(quiet=True)


def _prepared_on_every_process(config: RunConfig, console: Console) -> Prepared:
    display = PrepareDisplay(console, config.data.corpus)
    folder = data_folder(config.data)
    if not folder.exists():  # say so: the folder's name may be mistyped
        work = f"preparing {config.data.corpus} there, tokenizer {config.data.tokenizer}"
        say(console, f"{folder} does not exist yet: {work}")
    with PartialState().main_process_first(), display:
        return prepared_data(config.data, display.show)


def _run(run: RunFolder, prepared: Prepared, console: Console, checkpoint: Path | None) -> Finished:
    config, options = run.config, run.config.training
    transformers_logging.disable_progress_bar()  # one bar, and it is ours
    blocks_of(config, prepared)  # refuses a text that is too short before anything is built
    set_seed(options.seed)
    model = build_model(config, prepared)
    speed, chosen = settle_speed(options, Machine.this(world_size()))
    for line in chosen:
        say(console, line)
    if speed.compile:
        compile_layers(model, may_fail=options.compile == "auto")
    loop = TrainingLoop(run, prepared, model, _accelerator(run), speed)
    if checkpoint is not None:
        loop.restore(checkpoint)
    counts = parameter_counts(model.config)
    size = f"{counts.total / 1e6:.2f} M parameters, {counts.active / 1e6:.2f} M active per token"
    tokens = options.batch_size * config.data.block_size
    say(console, f"{run.path.name}: {size}; {loop.last_step:,} steps of {tokens:,} tokens")
    already_trained = loop.step == loop.last_step  # killed after its last checkpoint
    stopped_by = _trained(loop, console)
    if stopped_by is None:
        peak = None if already_trained else peak_memory()
        measure_test(run, prepared, model, console)
        on_first_rank(lambda: write_result(run, model.config, peak))
    return Finished(run, stopped_by, loop.step)


def _accelerator(run: RunFolder) -> Accelerator:
    """Accelerate without its mixed precision, which a process can choose only once."""
    track = run.config.training.track
    # Codebooks are equal on all processes by construction: there is nothing to broadcast.
    in_ddp = DistributedDataParallelKwargs(broadcast_buffers=False)
    try:
        return Accelerator(
            mixed_precision="no",
            cpu=not torch.cuda.is_available(),
            log_with=None if track == "none" else track,
            project_dir=run.path,
            kwargs_handlers=[in_ddp],
        )
    except ValueError as error:
        raise ConfigError(
            "training.precision",
            run.config.training.precision,
            "cannot be set in a process in which a Trainer or Accelerator has set another one",
            "Train in a process of its own.",
        ) from error


def _trained(loop: TrainingLoop, console: Console) -> int | None:
    """Train with log, display and tracker; returns the signal that stopped it early, if any."""
    run, options = loop.run, loop.run.config.training
    with ExitStack() as stack:
        display = Display(console, run.path.name, loop.step, loop.last_step)
        stack.callback(display.close)
        sinks = [display.show]
        if options.track != "none" and rank() == 0:
            tracker = RunTracker(loop.accelerator, run.path, run.config, loop.step, console)
            stack.callback(tracker.close)
            sinks.append(tracker.write)
        log = LogWriter(
            run.log,
            loop.clock,
            tokens_per_step=options.batch_size * run.config.data.block_size,
            steps_per_epoch=loop.batches.steps_per_epoch,
            flops_per_token=flops_per_token(run.config, loop.model.config, world_size()),
            sinks=sinks,
        )
        return loop.train(log, display.advance)


def measure_test(
    run: RunFolder, prepared: Prepared, model: AirMoeForCausalLM, console: Console
) -> None:
    """Write test.json, if the text has a test split: the loss of the best checkpoint on it.

    Leaves that checkpoint's weights in `model`; every process must call it.
    """
    options, block_size = run.config.training, run.config.data.block_size
    split = prepared.manifest.splits.get("test")
    if split is None or split.tokens < block_size or run.test.exists():
        return
    best = best_checkpoint(run.path)
    on_first_rank(lambda: check_checkpoint(best, run.sha256(), to_resume=False))
    load_model(best, model)
    result = evaluate(
        model,
        prepared.blocks("test", block_size),
        batch_size=options.sequences,
        quality_tokens=options.quality_tokens,
        autocast=autocast_of(options.precision, next(model.parameters()).device),
    )
    found = {"step": step_of(best), "tokens": result.tokens, **result.numbers()}
    on_first_rank(lambda: write_json(run.test, found))
    say(console, f"test  loss {result.loss:.3f}  ppl {result.perplexity:.2f}")


def flops_per_token(run: RunConfig, model: AirMoeConfig, devices: int) -> dict[str, float]:
    """By field of a log line; empty for a router that the ledger cannot count."""
    try:
        ledger = count_flops(model, workload_of(run, devices))
    except ConfigError as error:
        if error.field != "flops.router":
            raise
        return {}
    algorithmic, executed = ledger.cost("algorithmic"), ledger.cost("executed")
    return {"flops": algorithmic.total, "executed_flops": executed.total}


def build_model(config: RunConfig, prepared: Prepared) -> AirMoeForCausalLM:
    """A freshly initialised model for the vocabulary of the data."""
    identity = prepared.manifest.tokenizer
    settings = config.model_config(identity.vocab_size, identity.eos_id)
    # Refused if not even weights, gradients and moments fit, all float32.
    parameters = parameter_counts(settings).total
    if torch.cuda.is_available():
        parts = PartialState().num_processes if config.training.sharding == "fsdp2" else 1
        there = torch.cuda.get_device_properties(PartialState().device).total_memory * parts
    else:
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if (needed := 16 * parameters) > there:
        raise ConfigError(
            "model",
            f"{parameters:,} parameters",
            f"must fit into {there // 2**30:,} GiB of memory, but training them takes "
            f"{needed // 2**30:,} GiB (weights, gradients and two moments) and activations",
            "Choose a smaller model: mostly model.num_experts, model.hidden_size.",
        )
    model = AirMoeForCausalLM(settings)
    draw_weights(model, config.training.seed)
    return model
