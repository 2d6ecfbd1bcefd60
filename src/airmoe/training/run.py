"""One training run from settings to result: new or resumed, on one process or many."""

from __future__ import annotations

import os
import resource
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, PartialState
from accelerate.utils import set_seed
from rich.console import Console
from transformers.utils import logging as transformers_logging

from airmoe.data import Prepared
from airmoe.distributed import on_first_rank, rank
from airmoe.errors import ConfigError, say
from airmoe.files import read_json, write_bytes, write_json
from airmoe.metrics.flops import count_flops
from airmoe.model import AirMoeConfig, AirMoeForCausalLM, draw_weights, parameter_counts
from airmoe.training.checkpoints import (
    USAGE,
    check_checkpoint,
    checkpoints,
    clean_up,
    full_disk_explained,
    load_json,
    step_of,
)
from airmoe.training.config import RunConfig, workload_of
from airmoe.training.devices import check_device, check_sharding
from airmoe.training.display import Display, PrepareDisplay, kept
from airmoe.training.evaluation import is_untested, measure_test
from airmoe.training.loop import TrainingLoop
from airmoe.training.run_folder import (
    RunFolder,
    check_same_data,
    claimed,
    create_run,
    machine,
    open_run,
    read_result,
    read_test,
    versions,
)
from airmoe.training.run_log import LogWriter, check_never_saved, put_back, read_log
from airmoe.training.text import blocks_of, data_folder, prepared_data
from airmoe.training.trackers import RunTracker, is_installed, not_installed


@dataclass(frozen=True)
class Finished:
    """How a call of `train` or `resume` ended."""

    folder: RunFolder
    stopped_by: int | None  # the signal that stopped it early, None when it is complete
    step: int


def train(config: RunConfig, folder: Path | str, console: Console | None = None) -> Finished:
    """Start a new run in a new folder; it prints to `console`, by default standard output."""
    folder, console = Path(folder), kept(console)
    _start_processes(config)
    check_sharding(config, PartialState().num_processes)
    with ExitStack() as stack:
        # Before the hours that preparing may take.
        on_first_rank(lambda: stack.enter_context(claimed(folder, config)))
        prepared = _data_on_every_process(config, console)
        blocks_of(config, prepared)  # what is wrong with them is said before there is a run
        _model_config(config, prepared)
        run = on_first_rank(lambda: create_run(folder, config, prepared))
        with full_disk_explained(folder):
            return _go(run, prepared, console, checkpoint=None)


def resume(folder: Path | str, console: Console | None = None) -> Finished:
    """Go on from the newest whole checkpoint, or from the start if there is none yet."""
    folder, console = Path(folder), kept(console)
    run = open_run(folder)
    _start_processes(run.config)
    if run.result.exists() and not checkpoints(folder):
        gone = f"{folder} is finished and its checkpoints are gone: there is nothing left to do."
        _say(console, gone)
        return Finished(run, None, read_result(run.result)["last"]["step"])
    _check_folder_there(run.config)
    prepared = _data_on_every_process(run.config, console)
    check_same_data(run, prepared)
    with full_disk_explained(folder), ExitStack() as stack:
        on_first_rank(lambda: stack.enter_context(run.lock()))
        checkpoint = on_first_rank(lambda: _newest_checkpoint(run, prepared, console))
        return _go(run, prepared, console, checkpoint)


def _newest_checkpoint(run: RunFolder, prepared: Prepared, console: Console) -> Path | None:
    """Where a run goes on, once it is sure that it can; what lies behind that is taken away."""
    found = checkpoints(run.path)
    newest = found[-1] if found else None
    if newest is not None:
        check_checkpoint(newest, run.sha256(), to_resume=True)
    else:
        options = run.config.training
        train_blocks, _ = blocks_of(run.config, prepared)
        first = options.first_checkpoint_step(len(train_blocks) // options.batch_size)
        check_never_saved(run.log, first)
        _say(console, f"{run.path} has no checkpoint yet: it starts again.")
    clean_up(run.path, run.config.training.keep_checkpoints)
    if changed := put_back(run.log, newest):
        _say(console, changed)
    return newest


def _check_folder_there(config: RunConfig) -> None:
    """A folder that was named is not made anew: its text need not have come from data.corpus."""
    folder = config.data.folder
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(
            "data.folder",
            folder,
            "must be there, with the text of the run",
            "Resume where the run was started (its paths are relative to there), or put it back.",
        )


def _start_processes(config: RunConfig) -> None:
    """Join torchrun's process group (if any) first: preparing data must not happen twice."""
    state = PartialState(cpu=not torch.cuda.is_available())
    check_device(config, state.num_processes)
    config.training.accumulation_steps(state.num_processes)


def _data_on_every_process(config: RunConfig, console: Console) -> Prepared:
    display = PrepareDisplay(console, config.data.corpus)
    folder = data_folder(config.data)
    if not folder.exists():  # say so: the folder's name may be mistyped
        _say(
            console,
            f"{folder} does not exist yet: preparing {config.data.corpus} there, tokenizer "
            f"{config.data.tokenizer}",
        )
    with PartialState().main_process_first(), display:
        return prepared_data(config.data, display.show)


def _go(run: RunFolder, prepared: Prepared, console: Console, checkpoint: Path | None) -> Finished:
    config, options = run.config, run.config.training
    train_blocks, eval_blocks = blocks_of(config, prepared)
    last_step = options.total_steps(len(train_blocks) // options.batch_size)
    if checkpoint is not None and step_of(checkpoint) >= last_step:
        if is_untested(run, prepared):  # killed after its last checkpoint
            model = build_model(config, prepared)
            model.to(PartialState().device)  # pyright: ignore[reportArgumentType]
            measure_test(run, prepared, model, console)
        _finish(run, peak_memory=None)
        return Finished(run, None, last_step)
    transformers_logging.disable_progress_bar()  # one bar, and it is ours
    set_seed(options.seed)
    model = build_model(config, prepared)
    _introduce(run, model, last_step, console)
    accelerator = _accelerator(run, console)
    save_tokenizer = prepared.tokenizer().save
    loop = TrainingLoop(run, model, accelerator, train_blocks, eval_blocks, save_tokenizer)
    if checkpoint is not None:
        loop.restore(checkpoint)
    stopped_by = _trained(loop, console)
    if stopped_by is not None:
        return Finished(run, stopped_by, loop.step)
    peak = peak_memory()
    if is_untested(run, prepared):
        measure_test(run, prepared, model, console)
    _finish(run, peak)
    return Finished(run, None, loop.step)


def _accelerator(run: RunFolder, console: Console) -> Accelerator:
    """Precision is not its business, because it can be chosen only once in a process."""
    track = run.config.training.track
    if track != "none" and not is_installed(track):
        _say(console, not_installed(track))
        track = "none"
    # Codebooks are equal on all processes by construction, and must not be halved.
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
    """Train, with everything that watches; the signal that stopped it early, if any."""
    run, options, accelerator = loop.run, loop.run.config.training, loop.accelerator
    with ExitStack() as stack:
        sinks, advance = [], lambda _: None
        if rank() == 0:
            display = Display(console, _title(run), loop.step, loop.last_step)
            stack.callback(display.close)
            sinks, advance = [display.show], display.advance
            if accelerator.log_with:
                tracker = RunTracker(accelerator, run.path, run.config, loop.step, console)
                stack.callback(tracker.close)
                sinks.append(tracker.write)
        log = LogWriter(
            run.log,
            loop.clock,
            tokens_per_step=options.batch_size * run.config.data.block_size,
            steps_per_epoch=loop.batches.steps_per_epoch,
            flops_per_token=flops_per_token(
                run.config, loop.model.config, accelerator.num_processes
            ),
            sinks=sinks,
        )
        return loop.train(log, advance)


def flops_per_token(run: RunConfig, model: AirMoeConfig, devices: int) -> dict[str, float]:
    """By field of a log line; empty for a router that the ledger cannot count."""
    try:
        ledger = count_flops(model, workload_of(run, devices))
    except ConfigError as error:
        if error.field != "flops.router":
            raise
        return {}
    return {
        "flops": ledger.cost("algorithmic").total,
        "executed_flops": ledger.cost("executed").total,
    }


def _finish(run: RunFolder, peak_memory: float | None) -> None:
    if rank() == 0:
        write_result(run, peak_memory)
    PartialState().wait_for_everyone()


def _model_config(config: RunConfig, prepared: Prepared) -> AirMoeConfig:
    identity = prepared.manifest.tokenizer
    model = config.model_config(identity.vocab_size, identity.eos_id)
    _check_memory(parameter_counts(model).total, config)
    return model


def _check_memory(parameters: int, config: RunConfig) -> None:
    """Raise if not even weights, gradients and moments fit, all float32."""
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


def build_model(config: RunConfig, prepared: Prepared) -> AirMoeForCausalLM:
    """A freshly initialised model for the vocabulary of the data."""
    model = AirMoeForCausalLM(_model_config(config, prepared))
    draw_weights(model, config.training.seed)
    if config.training.compile:
        for layer in model.model.layers:  # layer by layer: compiles once, keeps parameter names
            layer.compile()
    return model


def _introduce(run: RunFolder, model: AirMoeForCausalLM, last_step: int, console: Console) -> None:
    """How large the model and the work are, before they start."""
    counts = parameter_counts(model.config)
    tokens = run.config.training.batch_size * run.config.data.block_size
    _say(
        console,
        f"{_title(run)}: {counts.total / 1e6:.2f} M parameters, {counts.active / 1e6:.2f} M active "
        f"per token; {last_step:,} steps of {tokens:,} tokens",
    )


def _say(console: Console, text: str) -> None:
    """One line, of one process."""
    if rank() == 0:
        say(console, text)


def _title(run: RunFolder) -> str:
    return run.path.name


def write_result(run: RunFolder, peak_memory: float | None) -> None:
    """Sum a finished run up in one small file, from its log alone.

    `peak_memory` None: no step was trained here, and where and by what they were is known before.
    """
    lines = read_log(run.log)
    evaluations = [line for line in lines if line["kind"] == "eval"]
    newest = checkpoints(run.path)[-1]
    if not evaluations or evaluations[-1]["step"] != step_of(newest):
        raise ConfigError(
            "log",
            str(run.log),
            f"must have the evaluation of step {step_of(newest)}, the last one",
            f"Remove {newest} and resume the run: its last steps are done again.",
        )
    speeds = [line["tokens_per_second"] for line in lines if line.get("tokens_per_second")]
    started = read_json(run.path / "run.json")
    if peak_memory is None:
        before = read_result(run.result) if run.result.exists() else started
        conditions = {name: before.get(name) for name in ("peak_memory_gib", "versions", "machine")}
    else:
        conditions = {
            "peak_memory_gib": peak_memory,
            "versions": versions(),
            "machine": machine(),
        }
    best = min(evaluations, key=lambda line: line["loss"])
    usage = run.path / f"checkpoint-{best['step']}" / USAGE
    if usage.exists():
        write_bytes(run.path / USAGE, usage.read_bytes())
    model = load_json(newest / "config.json")
    counts = parameter_counts(run.config.model_config(model["vocab_size"], model["eos_token_id"]))
    write_json(
        run.result,
        {
            "config": run.config.to_json(),
            "parameters": {"total": counts.total, "active": counts.active},
            "best": best,
            "last": evaluations[-1],
            "test": read_test(run.test) if run.test.exists() else None,
            "tokens": evaluations[-1]["tokens"],
            "seconds": evaluations[-1]["seconds"],
            "tokens_per_second": median(speeds) if speeds else None,
            **conditions,
            "git": started["git"],
            "log": lines,
        },
    )


def peak_memory() -> float:
    """GiB: of the GPU's allocator where there is one, else of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used * (1 if os.uname().sysname == "Darwin" else 1024) / 2**30
