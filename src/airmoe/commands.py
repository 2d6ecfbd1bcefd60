"""What `airmoe` can do: a function per command, whose signature is the command line.

Commands import what they need inside, so that --help is quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from airmoe.errors import ConfigError, say

app = typer.Typer(
    help="Granular mixtures-of-experts: prepare text, train, evaluate, generate, measure.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
WIDTH = 130  # columns of wide tables where there is no terminal


def wide_console() -> Console:
    """For tables; a log file takes them whole."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


# What a shell completes; typer takes those that begin with what is typed.


def _presets() -> list[str]:
    from airmoe.training import PRESETS

    return list(PRESETS)


def _methods() -> list[str]:
    from airmoe.model import METHODS

    return list(METHODS)


def _keys() -> list[str]:
    from airmoe.training.config import SECTIONS

    return [f"{section}.{name}=" for section, names in SECTIONS.items() for name in names]


PRESET_HELP = "tiny, small, medium, small-c5, ..."
Preset = Annotated[str, typer.Argument(help=PRESET_HELP, autocompletion=_presets)]
OptionalPreset = Annotated[str | None, typer.Argument(help=PRESET_HELP, autocompletion=_presets)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="key.path=value, e.g. training.steps=500", autocompletion=_keys),
]
Method = Annotated[
    str | None,
    typer.Option(
        help="air (default), exact, peer, hierarchical, expert_choice, coarse, dense",
        autocompletion=_methods,
    ),
]


@app.command()
def prepare(
    corpus: Annotated[
        str,
        typer.Argument(
            help="python-docs, wikitext103, c5, openwebtext2, or a file or folder of .txt, "
            ".jsonl, .parquet (text also .gz, .xz, .zst)"
        ),
    ],
    out: Annotated[str, typer.Option(help="folder to make")],
    tokenizer: Annotated[
        str, typer.Option(help="llama-3, bytes, bpe:SIZE, or the path of a tokenizer")
    ] = "llama-3",
    validation: Annotated[
        str | None, typer.Option(help="text to validate on; default: a share of the documents")
    ] = None,
    validation_fraction: Annotated[float, typer.Option(help="share to validate on")] = 0.005,
    text_field: Annotated[str, typer.Option(help="field of .jsonl and .parquet")] = "text",
    max_tokens: Annotated[int | None, typer.Option(help="most tokens of training text")] = None,
) -> None:
    """Turn text into token shards. Run it again after a stop to continue."""
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
    )
    console = Console()
    with PrepareDisplay(console, corpus) as display:
        prepared = prepare_data(config, display.show)
    identity = prepared.manifest.tokenizer
    say(console, f"{prepared.folder}: {identity.kind}, {identity.vocab_size:,} token ids")
    for name, split in prepared.manifest.splits.items():
        say(console, f"  {name}: {split.documents:,} documents, {split.tokens:,} tokens")


@app.command()
def train(
    preset: OptionalPreset = None,
    overrides: Overrides = None,
    method: Method = None,
    run: Annotated[
        Path | None,
        typer.Option(
            "--run",
            "--folder",  # torchrun takes --run for an unfinished --run-path of its own
            help="folder of the run; default runs/PRESET-METHOD (under torchrun: --folder)",
        ),
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="continue the run in this folder")] = None,
) -> None:
    """Train a language model. Under torchrun on several devices: torchrun ... -m airmoe train."""
    from airmoe import training
    from airmoe.distributed import rank
    from airmoe.training import method_run

    console = Console()
    if resume is not None:
        if (given := preset or run or method) is not None:
            rule = "cannot be given with --resume, because a resumed run keeps its settings"
            raise ConfigError("train", str(given), rule, "Give --resume alone, or start a new run.")
        finished = training.resume(resume, console)
    else:
        if preset is None:
            raise ConfigError(
                "preset", None, "must be given", "For example: airmoe train tiny (or --resume RUN)."
            )
        method = method or "air"
        config = method_run(preset, method, overrides or [])
        folder = run or Path("runs") / f"{preset}-{method}"
        finished = training.train(config, folder, console)
    if rank() != 0:
        return
    path = finished.folder.path
    if finished.stopped_by is not None:
        say(console, f"Stopped after step {finished.step}. Go on: airmoe train --resume {path}")
        raise typer.Exit(128 + finished.stopped_by)
    say(console, f"Finished: {path / 'result.json'}")


@app.command("eval")
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
    from airmoe.training.devices import autocast_of
    from airmoe.training.evaluation import num_batches
    from airmoe.training.text import data_folder
    from airmoe.training.trained import check_same_tokenizer, load_trained

    trained = load_trained(run, checkpoint)  # pyright: ignore[reportArgumentType]
    options = trained.run.config
    prepared = open_prepared(data or data_folder(options.data))
    check_same_tokenizer(trained.tokenizer, prepared)
    blocks = prepared.blocks(split, options.data.block_size)
    batch_size = options.training.sequences
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
    from airmoe.training.trained import load_trained

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
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="main, ablations, granularity, codebook")],
    preset: Preset,
    out: Annotated[Path, typer.Option(help="folder of the suite, new or begun")],
    overrides: Overrides = None,
    seeds: Annotated[int, typer.Option(help="runs of each variant: training.seed, + 1, ...")] = 1,
    tokens: Annotated[int | None, typer.Option(help="length of every run")] = None,
    epochs: Annotated[
        int | None, typer.Option(help="the same in passes; default: the preset's own length")
    ] = None,
    also: Annotated[
        list[str] | None, typer.Option(help="one more method, as in `train`; may be repeated")
    ] = None,
    processes: Annotated[int, typer.Option(help="per run, started by torchrun")] = 1,
) -> None:
    """Train runs to compare, at equal budgets. Run it again after a stop to continue."""
    from airmoe.experiments.suites import make_plan, run_suite

    plan = make_plan(
        name,
        preset,
        overrides or [],
        num_seeds=seeds,
        tokens=tokens,
        epochs=epochs,
        also=also or [],
    )
    if code := run_suite(plan, out, Console(), context.obj or (), processes):
        raise typer.Exit(code)


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
        typer.Option(help="folder that gets a JSON file per run, small enough to commit"),
    ] = None,
) -> None:
    """Tables and figures of finished runs: Markdown, LaTeX, one HTML page, and their data."""
    from airmoe.experiments.report import write_report

    console = Console()
    written = write_report(runs, out, records)
    for line in written.problems:
        say(console, line)
    say(console, f"{written.runs} runs reported:")
    for file in written.files:
        say(console, f"  {file}")


@app.command()
def bench(
    cases: Annotated[
        list[str] | None,
        typer.Argument(
            help="paper (the default), paper-16k, paper-768, paper-g256, paper-zipf; "
            "cpu, cpu-swiglu, cpu-growth"
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
        list[str] | None, typer.Option(help="air, exact, listing, ...; may be repeated")
    ] = None,
    repeats: Annotated[int, typer.Option(help="samples; fewer if they take too long", min=1)] = 20,
    out: Annotated[Path, typer.Option(help="folder of the JSON files")] = Path(
        "benchmarks/results"
    ),
    data: Annotated[
        Path | None, typer.Option(help="with --step: train on what `prepare` wrote, then time")
    ] = None,
) -> None:
    """Time AIR and its alternatives on a GPU or a CPU, after checking their results."""
    from airmoe.experiments.bench.run import Bench

    run = Bench(
        wide_console(), cases or (), step, decode, scaling, quick, only or (), repeats, out, data
    )
    if not run.run():
        raise typer.Exit(1)


@app.command()
def flops(
    preset: Preset,
    overrides: Overrides = None,
    method: Method = None,
    every: Annotated[bool, typer.Option("--all", help="all methods side by side")] = False,
    tokens: Annotated[
        int | None,
        typer.Option(help="length of the run; default: the preset's, if in steps", min=1),
    ] = None,
    devices: Annotated[
        int | None, typer.Option(help="that share a step; default: the paper's 4, or fewer", min=1)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="every term, counted both ways")] = False,
) -> None:
    """FLOPs of training by part, in the paper's convention and as our kernels compute."""
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
        count.show(wide_console())


# What needs which package, and the extra that brings it.
OPTIONAL = {
    "triton": ("the fast kernels of a CUDA device", "kernels"),
    "datasets": ("wikitext103, c5, openwebtext2 and .parquet", "data"),
    "llama_models": ("the Llama-3 tokenizer by name", "data"),
    "matplotlib": ("figures", "plot"),
    "tensorboard": ("TensorBoard logs", "track"),
}


@app.command()
def doctor() -> None:
    """Show versions, devices and kernels in use, and how to install what is missing."""
    import sys
    from importlib.util import find_spec

    import torch
    from rich.table import Table

    from airmoe.kernels.backend import backend_for
    from airmoe.training.devices import FAULT, REMEDY, product_kills
    from airmoe.training.run_folder import versions

    console, table = Console(), Table(show_header=False)
    for name, version in versions().items():
        table.add_row(name, version)
    table.add_section()
    devices = [(f"CPU, {torch.get_num_threads()} threads", torch.device("cpu"))]
    for place in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(place)
        name = f"{about.name}, {about.total_memory / 2**30:.0f} GiB"
        devices.append((name, torch.device("cuda", place)))
    for name, device in devices:
        kernels = backend_for(device, torch.float32)
        table.add_row(name, f"kernels: {kernels.replace('reference', 'reference (PyTorch)')}")
    console.print(table)
    missing = [name for name in OPTIONAL if find_spec(name) is None]
    for name in missing:
        purpose, extra = OPTIONAL[name]
        command = f"{sys.executable} -m pip install 'airmoe[{extra}]'"
        say(console, f"missing: {name}, for {purpose}. Add it: {command}")
    if not missing:
        say(console, "Nothing is missing.")
    if product_kills():
        say(console, f"bf16 on the CPU kills the process, because {FAULT}. {REMEDY}.")
