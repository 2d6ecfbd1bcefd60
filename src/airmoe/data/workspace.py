"""The folder `<out>.partial`: one prepare at a time, and everything needed to go on."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from airmoe.config import read_fields
from airmoe.data.manifest import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    TOKENIZER_FOLDER,
    Manifest,
    Recipe,
    split_info,
)
from airmoe.data.prepared import partial_folder
from airmoe.data.shards import WriterState
from airmoe.data.tokenizers import Tokenizer, TokenizerIdentity, load_tokenizer
from airmoe.errors import ConfigError
from airmoe.files import read_json, sync_folder, write_json

PROGRESS_FILE = "progress.json"
LOCK_FILE = "lock"


@dataclass(frozen=True)
class Progress:
    """How far a prepare has come. Everything behind it is done again."""

    recipe: Recipe
    shard_tokens: int
    tokenizer: TokenizerIdentity | None = None
    """None while one is still to be trained."""
    source: str = "train"
    """The split of the corpus being read."""
    documents_read: int = 0
    """Documents of it that are on disk."""
    writers: dict[str, WriterState] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def continues(self, begin: Progress) -> bool:
        """Whether this is the same work as `begin`, only further."""
        wanted, mine = begin.tokenizer, self.tokenizer
        same_tokenizer = wanted is None or (mine is not None and mine.is_kept_by(wanted))
        asked = (begin.recipe, begin.shard_tokens, begin.format_version)
        return same_tokenizer and asked == (self.recipe, self.shard_tokens, self.format_version)


class Workspace:
    """A locked `<out>.partial`."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self.folder = partial_folder(out)
        self._lock: int | None = None

    def __enter__(self) -> Workspace:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise self._busy() from error
        if self._out.exists():  # another process published it while we came here
            os.close(self._lock)
            self.discard()
            raise self._busy()
        return self

    def _busy(self) -> ConfigError:
        return ConfigError(
            "prepare.out",
            str(self._out),
            "is being prepared by another process at this moment",
            "Wait for it and run again, or use another out.",
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._lock is not None
        os.close(self._lock)  # also unlocks

    def start(self, begin: Progress) -> Progress:
        """Where an earlier prepare with the same settings stopped, else `begin`."""
        if not (self.folder / PROGRESS_FILE).exists():
            self._refuse_foreign_files()
            self.save(begin)
            return begin
        progress = self._read()
        if progress.continues(begin):
            return progress
        if progress.writers:
            raise ConfigError(
                "prepare.out",
                str(self._out),
                "was begun with other settings, other text or another tokenizer "
                f"(see {self.folder.name})",
                f"Delete {self.folder} or use another out.",
            )
        # Nothing worth keeping was done, for instance because the settings were wrong.
        shutil.rmtree(self.folder / TOKENIZER_FOLDER, ignore_errors=True)
        self.save(begin)
        return begin

    def save(self, progress: Progress) -> None:
        values = asdict(progress)
        write_json(self.folder / PROGRESS_FILE, values | {"sha256": _sha256_of(values)})

    def save_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Write the tokenizer under its name only when it is whole."""
        draft = self.folder / f"{TOKENIZER_FOLDER}.draft"
        shutil.rmtree(draft, ignore_errors=True)
        tokenizer.save(draft)
        for file in draft.iterdir():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        sync_folder(draft)
        draft.rename(self.folder / TOKENIZER_FOLDER)
        sync_folder(self.folder)

    def saved_tokenizer(self) -> Tokenizer | None:
        """The tokenizer, if an earlier prepare got that far."""
        folder = self.folder / TOKENIZER_FOLDER
        return load_tokenizer(folder) if folder.exists() else None

    def is_complete(self) -> bool:
        """Whether only the name is missing."""
        return (self.folder / MANIFEST_FILE).exists()

    def complete(self, manifest: Manifest) -> None:
        """Write the manifest, which says that everything else is there."""
        manifest.write(self.folder)

    def publish(self) -> None:
        """Give the folder its name, the last thing that happens."""
        (self.folder / PROGRESS_FILE).unlink(missing_ok=True)
        (self.folder / LOCK_FILE).unlink()
        sync_folder(self.folder)
        self.folder.rename(self._out)
        sync_folder(self._out.parent)

    def discard(self) -> None:
        """Remove all that was done."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self) -> Progress:
        file = self.folder / PROGRESS_FILE
        try:
            values = read_json(file)
            if values.pop("sha256", None) not in (None, _sha256_of(values)):  # None: older ones
                raise ValueError("it has changed since it was written")
            return _progress(values)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                "prepare.out",
                str(file),
                f"is not readable progress ({type(error).__name__}: {error})",
                "Use another out.",
            ) from error

    def _refuse_foreign_files(self) -> None:
        """Progress is the first file written: without it, whatever lies here is not ours."""
        ours = {LOCK_FILE, f"{PROGRESS_FILE}.draft"}
        if foreign := sorted({file.name for file in self.folder.iterdir()} - ours):
            raise ConfigError(
                "prepare.out",
                str(self.folder),
                f"holds files that prepare did not make there, such as {foreign[0]}",
                "Move them away or use another out.",
            )


def _sha256_of(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _progress(values: dict[str, Any]) -> Progress:
    """Undo `asdict`."""
    tokenizer = values["tokenizer"]
    writers = {
        split: WriterState(
            split_info(state["finished"]), state["open_documents"], state["open_tokens"]
        )
        for split, state in values["writers"].items()
    }
    return Progress(
        recipe=read_fields(Recipe, values["recipe"]),
        shard_tokens=values["shard_tokens"],
        tokenizer=read_fields(TokenizerIdentity, tokenizer) if tokenizer else None,
        source=values["source"],
        documents_read=values["documents_read"],
        writers=writers,
        format_version=values["format_version"],
    )
