"""A run's log: read, checked and put back to the moment of a checkpoint."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from airmoe.errors import ConfigError
from airmoe.files import parse_json, write_bytes
from airmoe.training.checkpoints import load_json, step_of

Line = dict[str, Any]
DAMAGED = "log.damaged"


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


def log_state(log: Path) -> dict[str, Any]:
    """By what a checkpoint recognizes the log up to its step."""
    return _state(_texts(log))


def _state(texts: list[bytes]) -> dict[str, Any]:
    return {"lines": len(texts), "sha256": hashlib.sha256(b"\n".join(texts)).hexdigest()}


def check_log(log: Path, checkpoint: Path) -> None:
    """Raise if lines from before the checkpoint are lost or changed: the result repeats them."""
    noted = load_json(checkpoint / "training.json")["log"]
    kept = _lines_until(log, step_of(checkpoint))
    if _state(kept) == noted:
        return
    # Damaged lines, of now or of an earlier resume, may be missing, but no others.
    damaged = len(_damaged_lines(log)) + len(_texts(log.with_name(DAMAGED)))
    if not damaged or len(kept) + damaged < noted["lines"]:
        raise ConfigError(
            "log",
            str(log),
            f"must hold the {noted['lines']} lines it had at {checkpoint.name}, unchanged",
            "Put the file back, or start a new run.",
        )


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
    """Cut a log back to its checkpoint, or to nothing; what was taken out besides, in a sentence.

    Damaged lines are kept in a file of their own. One that a kill cut off is not mentioned: it has
    no end, and is written again.
    """
    if not log.is_file():
        return None
    damaged = _damaged_lines(log)
    if damaged:
        with log.with_name(DAMAGED).open("ab") as file:
            file.writelines(text + b"\n" for text in damaged.values())
    step = 0 if checkpoint is None else step_of(checkpoint)
    content = b"".join(text + b"\n" for text in _lines_until(log, step))
    if content != log.read_bytes():
        write_bytes(log, content)
    if not damaged:
        return None
    numbers = ", ".join(map(str, damaged))
    return f"{log}: moved damaged lines to {DAMAGED} (line {numbers}), kept the rest."


def _lines_until(log: Path, step: int) -> list[bytes]:
    return [
        text for text in _texts(log) if (line := parsed(text)) is not None and line["step"] <= step
    ]


def _texts(log: Path) -> list[bytes]:
    """Without what follows the last end of a line."""
    return log.read_bytes().split(b"\n")[:-1] if log.is_file() else []


def _damaged_lines(log: Path) -> dict[int, bytes]:
    """By number, counted from 1."""
    return {number: text for number, text in enumerate(_texts(log), 1) if parsed(text) is None}
