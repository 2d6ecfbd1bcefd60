"""The command `airmoe`: how it begins, and how it ends."""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated

import typer
from rich.console import Console

from airmoe import __version__
from airmoe.commands import app
from airmoe.config import can_be_written
from airmoe.errors import ConfigError, RunError, say
from airmoe.files import disk_is_full, keep_streams


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"airmoe {__version__}")
        raise typer.Exit


@app.callback()
def before(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="show the version"),
    ] = False,
    modules: Annotated[
        list[str] | None,
        typer.Option(
            "--import", metavar="MODULE", help="a module with your own routers; may be repeated"
        ),
    ] = None,
) -> None:
    context.obj = tuple(modules or ())
    if context.obj:
        from airmoe.routers import import_modules

        import_modules(context.obj)


def main() -> None:
    """Run a command; mistakes of the user end with code 2, failed runs with 1, one line each."""
    _let_waiting_threads_sleep()
    keep_streams()
    try:
        for number, argument in enumerate(sys.argv[1:], 1):
            if not can_be_written(argument):  # no JSON can hold it, no library open such a path
                rule = "must be UTF-8, also where it is a path"
                raise ConfigError(f"argument {number}", argument, rule, "Rename it.")
        app(prog_name="airmoe")
    except ConfigError as error:
        _stop(str(error), 2)
    except RunError as error:
        _stop(str(error), 1)
    except OSError as error:
        if disk_is_full(error):
            _stop("the disk is full. Make room and run the same command again: it goes on.", 1)
        if error.filename is None:
            raise
        _stop(f"{error.filename}: {error.strerror}. Choose a path that can be used.", 2)
    except KeyboardInterrupt:
        _stop("interrupted", 128 + signal.SIGINT)
    finally:
        distributed = sys.modules.get("airmoe.distributed")  # not loaded: there is no group
        if distributed is not None:
            distributed.leave_group()


def _let_waiting_threads_sleep() -> None:
    """Torch's threads spin while they wait; on a shared CPU they hold up those they wait for.

    Set before torch is loaded, which reads it. On a busy machine a layer of many small operations
    can be fifty times slower without it.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "20000"


def _stop(message: str, code: int) -> None:
    say(Console(stderr=True), f"airmoe: {message}")
    sys.exit(code)
