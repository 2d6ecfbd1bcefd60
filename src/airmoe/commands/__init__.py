"""What `airmoe` can do, a function per command: its signature is the command line.

They import what they need themselves, so that --help is quick. Below: parameters that several
commands have, with the words a shell completes them with.
"""

from __future__ import annotations

from typing import Annotated

import typer


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
