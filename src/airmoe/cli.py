"""The command `airmoe`. Commands import what they need themselves, so that --help is quick."""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from airmoe.errors import ConfigError, RunError

if TYPE_CHECKING:
    from airmoe.training import Finished

# A path that cannot be made or read is the user's to change.
PATH_ERRORS = (
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENAMETOOLONG,
)

BENCH_WIDTH = 130  # columns of wide tables where there is no terminal

app = typer.Typer(
    help="Granular mixtures-of-experts: prepare text, train, evaluate, generate, measure.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def main() -> None:
    """Run a command; mistakes of the user end with code 2, failed runs with 1, one line each."""
    _let_waiting_threads_sleep()
    try:
        app()
    except ConfigError as error:
        _stop(str(error), 2)
    except RunError as error:
        _stop(str(error), 1)
    except OSError as error:
        if error.errno in PATH_ERRORS and error.filename is not None:
            _stop(f"{error.filename}: {error.strerror}. Choose a path that can be used.", 2)
        if error.errno != errno.ENOSPC:
            raise
        _stop("the disk is full. Make room and run the same command again: it goes on.", 1)
    except KeyboardInterrupt:
        _stop("interrupted", 128 + signal.SIGINT)
    finally:
        _leave_process_group()


def _let_waiting_threads_sleep() -> None:
    """Torch's threads spin while they wait; on a shared CPU they hold up those they wait for.

    Read when torch is loaded, which no command has done yet.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "20000"


def _leave_process_group() -> None:
    """Under torchrun; a process that just ends can make the others abort."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


def _stop(message: str, code: int) -> None:
    _say(Console(stderr=True), f"airmoe: {message}")
    sys.exit(code)


def _say(console: Console, text: str) -> None:
    """One line as it is: paths may be long, and hold what rich takes for markup."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


@app.command()
def prepare(
    corpus: Annotated[
        str,
        typer.Argument(
            help="python-docs, wikitext103, c5, openwebtext2, or a file or folder of .txt, "
            ".jsonl, .parquet (also .gz, .xz, .zst)"
        ),
    ],
    out: Annotated[str, typer.Option(help="folder to make")],
    tokenizer: Annotated[
        str, typer.Option(help="llama-3, bytes, bpe:SIZE, or the path of a tokenizer")
    ] = "llama-3",
    validation: Annotated[
        str | None, typer.Option(help="text to validate on; else a share of the documents")
    ] = None,
    validation_fraction: Annotated[float, typer.Option(help="that share")] = 0.005,
    text_field: Annotated[str, typer.Option(help="of .jsonl and .parquet")] = "text",
    max_tokens: Annotated[int | None, typer.Option(help="stop training text there")] = None,
    workers: Annotated[int | None, typer.Option(help="processes; default: all cores")] = None,
) -> None:
    """Turn text into token shards. Killed, it goes on where it stopped."""
    from airmoe.data import PrepareConfig
    from airmoe.data import prepare as prepare_data
    from airmoe.training.display import PrepareDisplay

    config = PrepareConfig(
        corpus=corpus,
        tokenizer=tokenizer,
        out=out,
        validation=validation,
        validation_fraction=validation_fraction,
        text_field=text_field,
        max_tokens=max_tokens,
        workers=workers,
    )
    console = Console()
    with PrepareDisplay(console, corpus) as display:
        prepared = prepare_data(config, display.show)
    identity = prepared.manifest.tokenizer
    _say(console, f"{prepared.folder}: {identity.kind}, {identity.vocab_size:,} token ids")
    for name, split in prepared.manifest.splits.items():
        _say(console, f"  {name}: {split.documents:,} documents, {split.tokens:,} tokens")


@app.command()
def train(
    preset: Annotated[str | None, typer.Argument(help="tiny, small, medium, small-c5, ...")] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key.path=value, e.g. training.steps=500")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(help="air (default), exact, peer, hierarchical, expert_choice, coarse, dense"),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            "--run",
            "--folder",  # torchrun takes --run for an unfinished --run-path of its own
            help="folder of the run; default runs/PRESET-METHOD (under torchrun: --folder)",
        ),
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="go on with the run in this folder")] = None,
) -> None:
    """Train a language model. Under torchrun on several devices: torchrun ... -m airmoe train."""
    from airmoe import training
    from airmoe.experiments import preset as named_run

    console = Console()
    if resume is not None:
        if (given := preset or run or method) is not None:
            raise ConfigError(
                "train",
                str(given),
                "cannot be given with --resume, because a resumed run keeps its settings",
                "Give --resume alone, or start a new run.",
            )
        finished = training.resume(resume, console)
    else:
        if preset is None:
            raise ConfigError(
                "preset", None, "must be given", "For example: airmoe train tiny (or --resume RUN)."
            )
        method = method or "air"
        config = training.override(named_run(preset, method), overrides or [])
        folder = run or Path("runs") / f"{preset}-{method}"
        finished = training.train(config, folder, console)
    _report_finished(finished, console)


def _report_finished(finished: Finished, console: Console) -> None:
    from airmoe.distributed import rank

    path = finished.folder.path
    if rank() != 0:
        return
    if finished.stopped_by is not None:
        _say(console, f"Stopped after step {finished.step}. Go on: airmoe train --resume {path}")
        raise typer.Exit(128 + finished.stopped_by)
    _say(console, f"Finished: {path / 'result.json'}")


@app.command(name="eval")
def evaluate(
    run: Annotated[Path, typer.Argument(help="folder of a run")],
    data: Annotated[
        Path | None, typer.Option(help="prepared text; default: that of the run")
    ] = None,
    split: Annotated[str, typer.Option(help="train, validation or test")] = "validation",
    checkpoint: Annotated[str, typer.Option(help="best or last")] = "best",
    quality_tokens: Annotated[
        int, typer.Option(help="tokens of the first batch to compare with exact routing")
    ] = 2048,
) -> None:
    """Loss, perplexity and routing health of a trained model, as JSON on the last line."""
    import json

    from rich.progress import Progress

    from airmoe import training
    from airmoe.data import open_prepared
    from airmoe.training.evaluation import autocast_of, num_batches
    from airmoe.training.load import check_same_tokenizer, load_trained
    from airmoe.training.text import data_folder

    trained = load_trained(run, checkpoint)  # pyright: ignore[reportArgumentType]
    options = trained.run.config
    prepared = open_prepared(data or data_folder(options.data))
    check_same_tokenizer(trained.tokenizer, prepared)
    blocks = prepared.blocks(split, options.data.block_size)
    batch_size = options.training.micro_batch_size
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(split, total=num_batches(blocks, batch_size))
        result = training.evaluate(
            trained.model,
            blocks,
            batch_size=batch_size,
            quality_tokens=quality_tokens,
            autocast=autocast_of(options.training.precision, trained.model.device),
            on_batch=lambda: progress.advance(task),
        )
    answer = {"checkpoint": str(trained.checkpoint), "split": split, "tokens": result.tokens}
    print(json.dumps(answer | result.numbers()))


@app.command()
def generate(
    run: Annotated[Path, typer.Argument(help="folder of a run")],
    prompt: Annotated[str, typer.Argument(help="text to continue; empty: a new document")] = "",
    max_new_tokens: Annotated[int, typer.Option(help="length of the answer")] = 100,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token")] = 0.8,
    nucleus: Annotated[float, typer.Option(help="share of probability to draw from")] = 0.95,
    seed: Annotated[int, typer.Option(help="another seed, another text")] = 0,
    checkpoint: Annotated[str, typer.Option(help="best or last")] = "best",
) -> None:
    """Continue a text with a trained model."""
    from airmoe.training import generate_text
    from airmoe.training.load import load_trained

    trained = load_trained(run, checkpoint)  # pyright: ignore[reportArgumentType]
    print(
        generate_text(
            trained.model,
            trained.tokenizer,
            prompt,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            nucleus=nucleus,
            seed=seed,
        )
    )


@app.command()
def suite(
    name: Annotated[str, typer.Argument(help="main, ablations, granularity, codebook, recall")],
    preset: Annotated[str, typer.Argument(help="tiny, small, medium, small-c5, ...")],
    out: Annotated[Path, typer.Option(help="folder of the suite, new or begun")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key.path=value, for every run")
    ] = None,
    seeds: Annotated[int, typer.Option(help="runs of each variant: training.seed, + 1, ...")] = 1,
    tokens: Annotated[int | None, typer.Option(help="length of every run")] = None,
    epochs: Annotated[
        int | None, typer.Option(help="the same, in passes; default: the preset's own length")
    ] = None,
) -> None:
    """Train what is to be compared, at equal budgets. Stopped, it goes on where it was."""
    from airmoe.experiments.suites import Budget, make_plan, run_suite

    budget = Budget(tokens=tokens, epochs=epochs)
    plan = make_plan(name, preset, overrides or [], num_seeds=seeds, budget=budget)
    if code := run_suite(plan, out, Console()):
        raise typer.Exit(code)


@app.command()
def recall(
    run: Annotated[Path, typer.Argument(help="folder of a run with AIR")],
    data: Annotated[
        Path | None, typer.Option(help="prepared text; default: that of the run")
    ] = None,
    fit_tokens: Annotated[
        int, typer.Option(help="of the training split, to fit codebooks to; fewer if it has fewer")
    ] = 262_144,
    tokens: Annotated[
        int, typer.Option(help="of the validation split, to measure on; fewer if it has fewer")
    ] = 16_384,
    out: Annotated[
        Path | None, typer.Option(help="JSON file to write; default: recall.json in the run")
    ] = None,
) -> None:
    """Which share of exact routing's experts other codebooks and shortlists would find."""
    from airmoe.experiments.recall_study.command import check_out, measure_run
    from airmoe.experiments.recall_study.record import FILE
    from airmoe.experiments.report.coarse_stages import show_study
    from airmoe.files import write_json
    from airmoe.training.run_folder import open_run

    open_run(run)  # what is no run is said before what is wrong with a file in it
    file = out or run / FILE
    check_out(file)
    study = measure_run(
        run, data, fit_tokens=fit_tokens, tokens=tokens, console=Console(stderr=True)
    )
    console = _wide_console()
    show_study(study, console)  # first: writing may still fail
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, study.to_json())
    _say(console, f"Written: {file}")


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="suite folders, run folders, folders of them or of records"),
    ],
    out: Annotated[
        Path | None, typer.Option(help="folder to write; default: report/ in the first of RUNS")
    ] = None,
    records: Annotated[
        Path | None,
        typer.Option(help="folder that gets a JSON file per run and study, small enough to commit"),
    ] = None,
) -> None:
    """Tables and figures of finished runs: Markdown, LaTeX, one HTML page, and their data."""
    from airmoe.experiments.report import write_report

    console = Console()
    written = write_report(runs, out, records)
    for line in written.problems:
        _say(console, line)
    _say(console, f"{written.runs} runs reported:")
    for file in [*written.files, *written.records]:
        _say(console, f"  {file}")


@app.command()
def bench(
    cases: Annotated[
        list[str] | None,
        typer.Argument(
            help="paper (the default), paper-16k, paper-768, paper-g256, paper-zipf, paper-captured"
        ),
    ] = None,
    step: Annotated[
        bool, typer.Option("--step", help="whole training steps of the small preset")
    ] = False,
    decode: Annotated[bool, typer.Option("--decode", help="batches of 1, 8 and 64 tokens")] = False,
    scaling: Annotated[
        bool, typer.Option("--scaling", help="from 4,096 to 1,048,576 experts")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="toy sizes, also on a CPU, to see that it runs")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option(help="air-triton, exact, listing, ...; may be repeated")
    ] = None,
    repeats: Annotated[int, typer.Option(help="samples; fewer where they take too long")] = 20,
    out: Annotated[Path, typer.Option(help="folder of the JSON files")] = Path(
        "benchmarks/results"
    ),
    activations: Annotated[
        Path | None, typer.Option(help="hidden states for paper-captured, .safetensors")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="with --step: train on what `prepare` wrote, then time")
    ] = None,
    capture: Annotated[
        Path | None, typer.Option(help="with --step: write --activations of the model here")
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(help="draw here; without anything to measure: stored results")
    ] = None,
) -> None:
    """Time AIR beside its alternatives on one GPU; no time for a wrong answer."""
    from airmoe.experiments.bench.run import Bench, Options

    options = Options(
        cases=tuple(cases or ()),
        step=step,
        decode=decode,
        scaling=scaling,
        quick=quick,
        only=tuple(only or ()),
        repeats=repeats,
        out=out,
        activations=activations,
        data=data,
        capture=capture,
        figure=figure,
    )
    if not Bench(options, _wide_console()).run():
        raise typer.Exit(1)


def _wide_console() -> Console:
    console = Console()
    # A log takes whole tables.
    return console if console.is_terminal else Console(width=BENCH_WIDTH)


@app.command()
def flops(
    preset: Annotated[str, typer.Argument(help="tiny, small, medium, small-c5, ...")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key.path=value, e.g. model.load_balance_weight=0")
    ] = None,
    method: Annotated[str | None, typer.Option(help="air (default), exact, ... as train's")] = None,
    every: Annotated[bool, typer.Option("--all", help="all methods side by side")] = False,
    tokens: Annotated[
        int | None,
        typer.Option(help="length of the run; default: the preset's, if in steps", min=1),
    ] = None,
    devices: Annotated[
        int | None, typer.Option(help="that share a step; default: the paper's 4, or fewer", min=1)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="every term with its formula")] = False,
) -> None:
    """FLOPs of training, part by part: in the paper's convention, and as our kernels compute."""
    import json

    from airmoe.experiments.flop_count import count_preset
    from airmoe.model import METHODS

    if every and method is not None:
        raise ConfigError("method", method, "cannot be given with --all", "Give one of them.")
    methods = METHODS if every else (method or "air",)
    count = count_preset(preset, methods, overrides or [], tokens=tokens, devices=devices)
    if as_json:
        print(json.dumps(count.to_json()))
    else:
        count.show(_wide_console())


@app.command()
def doctor() -> None:
    """Versions, devices, kernels in use, and what is missing with the command that adds it."""
    from airmoe.experiments.doctor import examine

    examine().show(Console())
