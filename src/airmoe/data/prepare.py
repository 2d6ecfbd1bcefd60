"""Corpus + tokenizer -> a prepared folder: in parallel, all or nothing, and it can go on.

Everything happens in `<out>.partial`, which gets its name at the very end. Progress is saved after
each finished shard, so that a prepare that was killed goes on from there, and ends with the bytes
that an undisturbed one would have written.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from airmoe.config import check_count, check_number, config
from airmoe.data.corpora import Corpus, open_corpus
from airmoe.data.parallel import Encoder, EncoderPool, in_validation
from airmoe.data.prepared import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    Manifest,
    Prepared,
    Recipe,
    open_prepared,
    read_manifest,
)
from airmoe.data.shards import SHARD_TOKENS, SplitWriter, WriterState
from airmoe.data.tokenizer_choice import bpe_vocab_size, is_trained, make_tokenizer
from airmoe.data.tokenizers import Tokenizer
from airmoe.data.workspace import Progress, Workspace
from airmoe.errors import ConfigError
from airmoe.files import LOCK

_BATCH_CHARACTERS = 1 << 18


@config
class PrepareConfig:
    """What to prepare, and where to."""

    label: ClassVar[str] = "prepare"

    corpus: str
    """python-docs, wikitext103, c5, openwebtext2, or the path of a file or folder."""
    tokenizer: str
    """llama-3, bytes, bpe:<size>, or the path of a tokenizer: folder, tokenizer.json or .model."""
    out: str
    """The folder to make."""
    validation: str | None = None
    """Path of validation text, for a corpus with no official split."""
    validation_fraction: float = 0.005
    """Without official or given validation text: documents whose hash falls below this."""
    text_field: str = "text"
    """Where .jsonl and .parquet files keep the text."""
    max_tokens: int | None = None
    """End the train split after the document that reaches it."""
    workers: int | None = None
    """Processes; None takes all cores."""

    def check(self) -> None:
        for name in ("corpus", "tokenizer", "out", "validation", "text_field"):
            value = getattr(self, name)
            missing = name == "validation" and value is None
            if not missing and not (isinstance(value, str) and value):
                raise ConfigError(f"prepare.{name}", value, "must be a text", "Give a string.")
        check_number("prepare.validation_fraction", self.validation_fraction, below=1, strict=True)
        for name in ("max_tokens", "workers"):
            if getattr(self, name) is not None:
                check_count(f"prepare.{name}", getattr(self, name))
        if is_trained(self.tokenizer):
            bpe_vocab_size(self.tokenizer)


@dataclass(frozen=True)
class PrepareProgress:
    """What has been read so far of one split of the corpus."""

    split: str
    documents: int
    tokens: int
    fraction: float | None
    """Of the split's input, or of `max_tokens` if that is nearer; None if unknown."""
    skipped: int = 0
    """Rows of the split whose text is null."""


Report = Callable[[PrepareProgress], None]


def prepare(
    config: PrepareConfig, report: Report | None = None, *, _shard_tokens: int = SHARD_TOKENS
) -> Prepared:
    """Make the folder, go on making it, or return it if it is already there."""
    corpus = _with_validation(open_corpus(config.corpus, config.text_field), config)
    recipe = _recipe(config, corpus)
    fixed = None if is_trained(config.tokenizer) else make_tokenizer(config.tokenizer)
    out = Path(config.out)
    if not os.path.lexists(out):  # a link that leads nowhere is in the way, too
        workspace = Workspace(out)
        with workspace.locked():
            if out.exists():  # another process published it while we came here
                workspace.discard()
            else:
                if not workspace.is_complete():
                    begin = Progress(recipe, _shard_tokens, fixed and fixed.identity)
                    progress = workspace.start(begin)
                    tokenizer = _tokenizer(config, corpus, workspace, fixed)
                    progress = replace(progress, tokenizer=tokenizer.identity)
                    workspace.save(progress)
                    job = _Job(config, corpus, tokenizer, workspace, progress, report)
                    workspace.complete(job.run())
                workspace.publish()
    former = replace(recipe, corpus_sha256=corpus.former_sha256)
    return _existing(out, (recipe, former), fixed)


def _with_validation(corpus: Corpus, config: PrepareConfig) -> Corpus:
    """Add the validation text of the config: all of it, or its own validation split."""
    if config.validation is None:
        return corpus
    if "validation" in corpus.splits:
        rule = f"cannot be used, because the corpus {corpus.name} has its own validation split"
        raise ConfigError("prepare.validation", config.validation, rule, "Leave it out.")
    given = open_corpus(config.validation, config.text_field)
    text = given.splits.get("validation", given.splits["train"])
    return Corpus(
        corpus.name,
        f"{corpus.sha256}+{given.sha256}",
        f"{corpus.former_sha256}+{given.former_sha256}",
        {**corpus.splits, "validation": text},
    )


def _hashed_fraction(corpus: Corpus, config: PrepareConfig) -> float:
    """The fraction of the hash rule; 0 where validation text is given."""
    return 0.0 if "validation" in corpus.splits else config.validation_fraction


def _recipe(config: PrepareConfig, corpus: Corpus) -> Recipe:
    if config.validation is not None:
        rule = f"validation is {Path(config.validation).name}"
    elif "validation" in corpus.splits:
        rule = "official splits"
    else:
        fraction = config.validation_fraction
        rule = f"validation if the first 8 bytes of sha256(text) / 2^64 < {fraction}"
    path = Path(config.tokenizer)
    return Recipe(
        corpus=corpus.name,
        corpus_sha256=corpus.sha256,
        tokenizer=path.resolve().name if path.exists() else config.tokenizer,
        split_rule=rule,
        text_field=config.text_field,
        max_tokens=config.max_tokens,
    )


def _existing(out: Path, recipes: tuple[Recipe, ...], fixed: Tokenizer | None) -> Prepared:
    """The finished folder, if it is what was asked for."""
    if not (out / MANIFEST_FILE).exists():
        rule = "is there already and was not made by prepare"
        raise ConfigError("prepare.out", str(out), rule, "Use another out.")
    manifest = read_manifest(out)
    same_tokenizer = fixed is None or manifest.tokenizer.is_kept_by(fixed.identity)
    if manifest.recipe not in recipes or not same_tokenizer:
        rule = "was prepared with other settings, other text or another tokenizer"
        remedy = "Delete it or use another out. For train that is data.folder."
        raise ConfigError("prepare.out", str(out), rule, remedy)
    with suppress(OSError):  # of a process that was killed when it had given the folder its name
        (out / LOCK).unlink()
    return open_prepared(out, verify=False)


def _tokenizer(
    config: PrepareConfig, corpus: Corpus, workspace: Workspace, fixed: Tokenizer | None
) -> Tokenizer:
    """The tokenizer that an earlier prepare saved, else the fixed one, else a trained one."""
    if (saved := workspace.saved_tokenizer()) is not None:
        return saved
    fraction = _hashed_fraction(corpus, config)
    documents = corpus.splits["train"].documents()
    texts = (document.text for document in documents if document is not None)
    training_texts = (text for text in texts if not in_validation(text, fraction))
    tokenizer = fixed or make_tokenizer(config.tokenizer, training_texts)
    workspace.save_tokenizer(tokenizer)
    return tokenizer


@dataclass
class _Job:
    """Reads the splits of the corpus one after another into the writers of a workspace."""

    config: PrepareConfig
    corpus: Corpus
    tokenizer: Tokenizer
    workspace: Workspace
    progress: Progress
    report: Report | None
    input_fraction: float | None = None
    skipped: int = 0

    def __post_init__(self) -> None:
        self.validation_fraction = _hashed_fraction(self.corpus, self.config)
        names = [*self.corpus.splits, *(["validation"] if self.validation_fraction else [])]
        states, size = self.progress.writers, self.progress.shard_tokens
        self.writers = {
            name: SplitWriter(self.workspace.folder, name, states.get(name, WriterState()), size)
            for name in names
        }

    def run(self) -> Manifest:
        """Do what is left to do."""
        workers = self.config.workers or _num_cores()
        encoder = Encoder(self.tokenizer, self.validation_fraction)
        with ExitStack() as stack:
            for writer in self.writers.values():
                stack.callback(writer.close)
            pool = stack.enter_context(EncoderPool(encoder, workers))
            sources = list(self.corpus.splits)
            for source in sources[sources.index(self.progress.source) :]:
                if source != self.progress.source:
                    self._save(source, documents_read=0)
                self._read(source, pool)
            return self._manifest()

    def _read(self, source: str, pool: EncoderPool) -> None:
        """Everything of one split of the corpus that is not on disk yet."""
        if self._is_full(source):
            return
        count = self.progress.documents_read
        batches = _batches(itertools.islice(self._texts(source), count, None))
        with closing(pool.encode(batches)) as encoded_batches:
            for batch in encoded_batches:
                for document in batch:
                    split = "validation" if document.is_validation else source
                    finished_shard = self.writers[split].add(document.tokens)
                    count += 1
                    if finished_shard:
                        self._save(source, count)
                    if self._is_full(source):
                        self._tell(source, count)
                        return
                self._tell(source, count)
        self._tell(source, count)

    def _texts(self, source: str) -> Iterator[str]:
        """The texts, while noting how much of the input they are and how many rows have none."""
        self.skipped = 0
        for document in self.corpus.splits[source].documents():
            if document is None:
                self.skipped += 1
            else:
                self.input_fraction = document.fraction
                yield document.text

    def _is_full(self, source: str) -> bool:
        limit = self.config.max_tokens
        return source == "train" and limit is not None and self.writers["train"].tokens >= limit

    def _tell(self, source: str, documents: int) -> None:
        if self.report is None:
            return
        tokens = self.writers[source].tokens
        fraction = self.input_fraction
        if source == "train" and self.config.max_tokens is not None:
            fraction = max(fraction or 0.0, min(1.0, tokens / self.config.max_tokens))
        if source == "train" and self.validation_fraction:
            tokens += self.writers["validation"].tokens
        self.report(PrepareProgress(source, documents, tokens, fraction, self.skipped))

    def _save(self, source: str, documents_read: int) -> None:
        states = {name: writer.saved_state() for name, writer in self.writers.items()}
        self.progress = replace(
            self.progress, source=source, documents_read=documents_read, writers=states
        )
        self.workspace.save(self.progress)

    def _manifest(self) -> Manifest:
        splits = {}
        for name, writer in self.writers.items():
            writer.finish_shard()
            splits[name] = writer.saved_state().finished
        for name, split in splits.items():
            if not split.tokens:
                self.workspace.discard()  # other settings are needed, and would refuse this folder
                raise self._empty_split(name)
        return Manifest(FORMAT_VERSION, self.progress.recipe, self.tokenizer.identity, splits)

    def _empty_split(self, name: str) -> ConfigError:
        if name == "validation" and self.validation_fraction:
            field, value = "validation_fraction", self.validation_fraction
            rule = "left the validation split empty"
            remedy = "Raise validation_fraction, or give validation text with validation=."
        elif name == "validation" and self.config.validation is not None:
            field, value, rule = "validation", self.config.validation, "has no text"
            remedy = (
                "Add documents that are more than white space, or leave it out: then a share of "
                "the training text is held back."
            )
        else:
            field, value = "corpus", self.config.corpus
            rule = f"has no text for its {name} split"
            remedy = "Add documents that are more than white space, or lower validation_fraction."
        return ConfigError(f"prepare.{field}", value, rule, remedy)


def _num_cores() -> int:
    """The cores this process may use, which in a container are fewer than the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Lists of texts, each enough work to be worth sending to another process."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
