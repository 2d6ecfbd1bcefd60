"""How commands print."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, cast

from rich.console import Console

from airmoe.errors import visible

WIDTH = 130  # columns of wide tables where there is no terminal


class KeptStream:
    """Standard output or error without which a command goes on: nobody may be reading any more.

    `airmoe train tiny | head -1` must train to the end.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._unless_lost(lambda: self._stream.write(text)) or len(text)

    def flush(self) -> None:
        self._unless_lost(self._stream.flush)

    def _unless_lost(self, job: Callable[[], Any]) -> Any:
        try:
            return job()
        except OSError:  # no reader, no terminal, a full disk behind a redirection
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def keep_streams() -> None:
    """Let no output that is lost, or was closed from the start, end this process."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # else the next file that is opened would get what is printed
            os.open(os.devnull, os.O_RDWR)
    sys.stdout, sys.stderr = (
        cast(Any, KeptStream(stream or open(os.devnull, "w")))  # noqa: SIM115
        for stream in (sys.stdout, sys.stderr)
    )


def say(console: Console, text: str) -> None:
    """One line as it is: paths may be long, and hold escape codes or what rich takes for markup."""
    console.print(visible(text), highlight=False, markup=False, soft_wrap=True)


def wide_console() -> Console:
    console = Console()
    # A log takes whole tables.
    return console if console.is_terminal else Console(width=WIDTH)
