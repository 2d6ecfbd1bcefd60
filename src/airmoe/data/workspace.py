"""The folder `<out>.partial`: one prepare at a time, and everything needed to go on."""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from airmoe.config import read_fields
from airmoe.data.prepared import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    TOKENIZER_FOLDER,
    Manifest,
    Recipe,
    partial_folder,
    split_info,
)
from airmoe.data.shards import WriterState
from airmoe.data.tokenizers import Tokenizer, TokenizerIdentity, load_tokenizer
from airmoe.errors import ConfigError
from airmoe.files import LOCK, json_sha256, locked, read_json, sync_folder, sync_tree, write_json

PROGRESS_FILE = "progress.json"


@dataclass(frozen=True)
class Progress:
    """How far a prepare has come. Everything after it is done again."""

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
    """The files in `<out>.partial`; change them only while it is locked."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self.folder = partial_folder(out)

    def locked(self) -> AbstractContextManager[None]:
        """Make the folder, and keep other processes out of it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return locked(self.folder, "prepare.out", "is being prepared")

    def start(self, begin: Progress) -> Progress:
        """Where an earlier prepare with the same settings stopped, else `begin`."""
        if not (self.folder / PROGRESS_FILE).exists():
            self._refuse_foreign_files()
            self.save(begin)
            return begin
        progress = self.read_progress()
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
        write_json(self.folder / PROGRESS_FILE, values | {"sha256": json_sha256(values)})

    def read_progress(self) -> Progress:
        file = self.folder / PROGRESS_FILE
        try:
            values = read_json(file)
            if values.pop("sha256", None) not in (None, json_sha256(values)):  # None: older ones
                raise ValueError("it has changed since it was written")
            return _progress(values)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            rule = f"is not readable progress ({type(error).__name__}: {error})"
            raise ConfigError("prepare.out", str(file), rule, "Use another out.") from error

    def _refuse_foreign_files(self) -> None:
        """Progress is the first file written: without it, whatever lies here is not ours."""
        ours = {LOCK, f"{PROGRESS_FILE}.draft"}
        if foreign := sorted({file.name for file in self.folder.iterdir()} - ours):
            rule = f"holds files that prepare did not make there, such as {foreign[0]}"
            remedy = "Move them away or use another out."
            raise ConfigError("prepare.out", str(self.folder), rule, remedy)

    def save_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Write the tokenizer under its name only when it is whole."""
        draft = self.folder / f"{TOKENIZER_FOLDER}.draft"
        shutil.rmtree(draft, ignore_errors=True)
        tokenizer.save(draft)
        sync_tree(draft)
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
        sync_folder(self.folder)
        self.folder.rename(self._out)  # still locked, or another process could come in between
        (self._out / LOCK).unlink(missing_ok=True)
        sync_folder(self._out.parent)

    def discard(self) -> None:
        """Remove all that was done."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _progress(values: dict[str, Any]) -> Progress:
    """Undo `asdict`."""
    tokenizer = values["tokenizer"]
    return Progress(
        recipe=read_fields(Recipe, values["recipe"]),
        shard_tokens=values["shard_tokens"],
        tokenizer=read_fields(TokenizerIdentity, tokenizer) if tokenizer else None,
        source=values["source"],
        documents_read=values["documents_read"],
        writers={
            split: WriterState(**state | {"finished": split_info(state["finished"])})
            for split, state in values["writers"].items()
        },
        format_version=values["format_version"],
    )
