"""How commands print."""

from __future__ import annotations

import os
import sys
from typing import Any, cast

from rich.console import Console

from airmoe.files import KeptStream

WIDTH = 130  # columns of wide tables where there is no terminal


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


def wide_console() -> Console:
    console = Console()
    # A log takes whole tables.
    return console if console.is_terminal else Console(width=WIDTH)
