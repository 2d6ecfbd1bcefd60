"""What `airmoe` can do: a function per command, whose signature is the command line.

Commands import what they need inside, so that --help is quick. Here: parameters of several commands
and how a shell completes them.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

WIDTH = 130  # columns of wide tables where there is no terminal


def wide_console() -> Console:
    """For tables; a log file takes them whole."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def _presets(incomplete: str) -> list[str]:
    from airmoe.training import PRESETS

    return [name for name in PRESETS if name.startswith(incomplete)]


def _methods(incomplete: str) -> list[str]:
    from airmoe.model import METHODS

    return [name for name in METHODS if name.startswith(incomplete)]


def _keys(incomplete: str) -> list[str]:
    from airmoe.training.config import SECTIONS

    keys = [f"{section}.{name}=" for section, names in SECTIONS.items() for name in names]
    return [key for key in keys if key.startswith(incomplete)]


PRESET_HELP = "tiny, small, medium, small-c5, ..."
Preset = Annotated[str, typer.Argument(help=PRESET_HELP, autocompletion=_presets)]
OptionalPreset = Annotated[str | None, typer.Argument(help=PRESET_HELP, autocompletion=_presets)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="key.path=value, e.g. training.steps=500", autocompletion=_keys),
]
Method = Annotated[
    str | None,
    typer.Option(
        help="air (default), exact, peer, hierarchical, expert_choice, coarse, dense",
        autocompletion=_methods,
    ),
]
