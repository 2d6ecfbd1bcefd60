"""A run folder -> the study of its AIR routers: opens, checks, measures layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from airmoe.config import check_count
from airmoe.data import Prepared, open_prepared
from airmoe.data.blocks import BlockDataset
from airmoe.errors import ConfigError
from airmoe.experiments.portable import portable
from airmoe.experiments.recall_study.reading import is_study
from airmoe.experiments.recall_study.record import (
    LayerRows,
    RecallStudy,
    Row,
    step_tokens,
)
from airmoe.experiments.recall_study.states import evenly, router_states
from airmoe.experiments.recall_study.study import LEAST_TOKENS, LayerStudy
from airmoe.files import read_json
from airmoe.routers import AirRouter, Router
from airmoe.training.load import Trained, check_same_tokenizer, load_trained
from airmoe.training.run_folder import data_sha256, git_state, machine, versions
from airmoe.training.text import data_folder
from airmoe.training.watch import layer_of

FIT_TOKENS = 262_144
TOKENS = 16_384
SEED = 0  # of the fitted codebooks


@dataclass(frozen=True)
class Text:
    """Blocks of both splits, and how many tokens of them are read."""

    prepared: Prepared
    train: BlockDataset
    validation: BlockDataset
    fit_tokens: int
    tokens: int


def measure_run(
    run: Path,
    data: Path | None = None,
    *,
    fit_tokens: int = FIT_TOKENS,
    tokens: int = TOKENS,
    console: Console | None = None,
) -> RecallStudy:
    """Measure every AIR router of a run's best checkpoint; the console gets a progress bar."""
    check_count("recall.fit_tokens", fit_tokens)
    check_count("recall.tokens", tokens)
    trained = load_trained(run)
    routers = _air_routers(trained)
    text = _open_text(trained, data, fit_tokens, tokens)
    for router in routers.values():
        _check_router(router, text)
    shown = console is not None and console.is_terminal
    with Progress(console=console, disable=not shown) as progress:
        layers = [
            LayerRows(
                layer=layer,
                num_experts=router.config.num_experts,
                top_k=router.config.top_k,
                shortlist_size=router.config.shortlist_size,
                rows=_measure(trained, router, layer, text, progress),
            )
            for layer, router in routers.items()
        ]
    return RecallStudy(
        run=run.resolve().name,
        checkpoint=trained.checkpoint.name,
        config=portable(trained.run.config.to_json()),
        data=None if data is None else data.resolve().name,
        data_sha256=data_sha256(text.prepared),
        versions=versions(),
        git=git_state(),
        machine=machine(),
        seed=SEED,
        fit_tokens=text.fit_tokens,
        tokens=text.tokens,
        layers=layers,
    )


def check_out(path: Path) -> None:
    """Raise before the long work where the answer could not be written, or would replace others."""
    try:
        _try_writing(path)
        is_new = not path.exists()
    except OSError as error:
        raise ConfigError(
            "out",
            str(path),
            f"must be a file that can be written ({error.strerror})",
            "Choose another place with --out.",
        ) from error
    if is_new:
        return
    try:
        mine = is_study(read_json(path))
    except (OSError, ValueError):
        mine = False
    if not mine:
        raise ConfigError(
            "out",
            str(path),
            "must be a new file, or one that `airmoe recall` wrote",
            "Choose another name with --out.",
        )


def _try_writing(path: Path) -> None:
    """In the nearest folder that is there: those below it are made when there is an answer."""
    nearest = next(folder for folder in path.absolute().parents if folder.exists())
    with TemporaryFile(dir=nearest):
        pass


def _measure(
    trained: Trained, router: AirRouter, layer: str, text: Text, progress: Progress
) -> list[Row]:
    """One layer; its states are read anew, because those of all layers may not fit."""
    reading = progress.add_task(f"layer {layer}: text", total=text.fit_tokens + text.tokens)

    def states(blocks: BlockDataset, count: int) -> Tensor:
        return router_states(
            trained, router, blocks, count, lambda read: progress.advance(reading, read)
        )

    study = LayerStudy(
        router,
        states(text.train, text.fit_tokens),
        states(text.validation, text.tokens),
        tokens_per_step=step_tokens(trained.run.config),
        seed=SEED,
    )
    stages = study.stages()
    measuring = progress.add_task(f"layer {layer}: coarse stages", total=len(stages))
    rows: list[Row] = []
    for stage in stages:
        rows += study.rows(stage)
        progress.advance(measuring)
    return rows


def _air_routers(trained: Trained) -> dict[str, AirRouter]:
    """By the number of their layer."""
    named = trained.model.named_modules()
    routers = {layer_of(name): one for name, one in named if isinstance(one, Router)}
    found = {layer: one for layer, one in routers.items() if isinstance(one, AirRouter)}
    if not found:
        kinds = {type(one).__name__ for one in routers.values()} or {"no router at all"}
        raise ConfigError(
            "run",
            str(trained.run.path),
            f"must have AIR routers, not {', '.join(sorted(kinds))}: only they have a coarse stage "
            "of codewords and shortlists",
            "Give a run of the method air.",
        )
    return found


def _open_text(trained: Trained, data: Path | None, fit_tokens: int, tokens: int) -> Text:
    options = trained.run.config.data
    prepared = open_prepared(data or data_folder(options))
    check_same_tokenizer(trained.tokenizer, prepared)
    for field, count in (("fit_tokens", fit_tokens), ("tokens", tokens)):
        if count < options.block_size:
            raise ConfigError(
                f"recall.{field}",
                count,
                f"must be >= {options.block_size}, one block of the run's text",
                f"Raise --{field.replace('_', '-')}.",
            )
    train, validation = (
        prepared.blocks(split, options.block_size) for split in ("train", "validation")
    )
    return Text(
        prepared,
        train,
        validation,
        len(evenly(train, fit_tokens)) * options.block_size,
        len(evenly(validation, tokens)) * options.block_size,
    )


def _check_router(router: AirRouter, text: Text) -> None:
    if router.config.gate == "expert_choice":
        raise ConfigError(
            "run",
            'an AIR router with gate = "expert_choice"',
            "must let tokens choose their experts: which experts a token's list holds says nothing "
            "where experts take tokens",
            'Give a run with gate = "token_choice".',
        )
    if not router.codebook.initialized:
        raise ConfigError(
            "run",
            "a codebook that has seen no token",
            "must be trained: its codewords are still random directions",
            "Train the run first.",
        )
    least = LEAST_TOKENS * router.config.num_codewords
    if text.fit_tokens < least:
        raise ConfigError(
            "recall.fit_tokens",
            text.fit_tokens,
            f"must be >= {least}, {LEAST_TOKENS} for each of the run's "
            f"{router.config.num_codewords} codewords",
            "Raise --fit-tokens, or give a longer text with --data.",
        )
