"""How commands print."""

from __future__ import annotations

from rich.console import Console

from airmoe.errors import visible

WIDTH = 130  # columns of wide tables where there is no terminal


def say(console: Console, text: str) -> None:
    """One line as it is: paths may be long, and hold escape codes or what rich takes for markup."""
    console.print(visible(text), highlight=False, markup=False, soft_wrap=True)


def wide_console() -> Console:
    console = Console()
    # A log takes whole tables.
    return console if console.is_terminal else Console(width=WIDTH)
