"""A run's log: read, and put back to the moment of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from airmoe.errors import ConfigError
from airmoe.files import parse_json, write_bytes
from airmoe.training.checkpoints import LOG

Line = dict[str, Any]


def read_log(path: Path) -> list[Line]:
    """The lines of a run's log."""
    texts = path.read_bytes().split(b"\n") if path.is_file() else []
    return [line for text in texts if (line := parsed(text)) is not None]


def parsed(text: bytes) -> Line | None:
    """A line of a log; None for what is none."""
    try:
        line = parse_json(text)
    except ValueError:
        return None
    if not isinstance(line, dict) or line.get("kind") not in ("train", "eval"):
        return None
    counts, numbers = ("step", "tokens"), ["loss", "seconds"]
    if line["kind"] == "eval":
        numbers.append("perplexity")
    is_line = (
        all(type(line.get(name)) is int for name in counts)
        and all(type(line.get(name)) in (int, float) for name in numbers)
        and all(
            value is None or type(value) in (int, float)
            for name, value in line.items()
            if name != "kind"
        )
    )
    return line if is_line else None


def check_never_saved(log: Path, first_checkpoint: int) -> None:
    """Raise if a run without checkpoints had one: its log goes on after the first was due.

    Before that only a signal makes one. Should that be gone, the same few steps are done again.
    """
    reached = max((line["step"] for line in read_log(log)), default=0)
    if reached > first_checkpoint:
        raise ConfigError(
            "run",
            str(log.parent),
            f"must hold the checkpoints it had: its log reaches step {reached}, and it wrote a "
            f"checkpoint after step {first_checkpoint}",
            "Put its newest checkpoint-N folder back, or start a new run in another folder.",
        )


def put_back(log: Path, checkpoint: Path | None) -> str | None:
    """Replace a log by the copy in its checkpoint, or empty it where there is none.

    So that no damage to the log since then gets into the result. A sentence, if there was any.
    """
    found = log.read_bytes() if log.is_file() else b""
    copy = b"" if checkpoint is None else (checkpoint / LOG).read_bytes()
    if found != copy:
        write_bytes(log, copy)
    if checkpoint is None or found.startswith(copy):
        return None
    return f"{log}: was changed or damaged, and is again as {checkpoint.name} has it."
