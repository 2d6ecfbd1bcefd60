"""Prepare text, train a model, evaluate it, generate text with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from airmoe.commands import Method, OptionalPreset, Overrides
from airmoe.errors import ConfigError, say


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
        str | None, typer.Option(help="text to validate on; else a share of the documents")
    ] = None,
    validation_fraction: Annotated[float, typer.Option(help="that share")] = 0.005,
    text_field: Annotated[str, typer.Option(help="of .jsonl and .parquet")] = "text",
    max_tokens: Annotated[int | None, typer.Option(help="stop training text there")] = None,
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
