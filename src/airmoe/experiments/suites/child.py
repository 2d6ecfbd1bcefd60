"""One run of a suite in a process of its own, or in torchrun's, so a crash stops no other run.

python -m airmoe.experiments.suites.child OUT FOLDER [MODULE ...], modules with routers to import.
The suite holds the standard input open; when that ends, so does the run. So none goes on training
after its suite was killed.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from pathlib import Path
from threading import Thread

from airmoe.distributed import leave_group
from airmoe.errors import ConfigError, RunError, visible
from airmoe.experiments.suites.folder import SuiteFolder
from airmoe.routers import import_modules
from airmoe.training import resume, train


def end_with_parent() -> None:
    """Kill this process as soon as its standard input ends, or now if it has ended already."""
    if select.select([0], [], [], 0)[0]:
        sys.exit("airmoe: the suite that started this run is gone")
    Thread(target=_wait_for_end, daemon=True).start()


def _wait_for_end() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    end_with_parent()
    suite, folder = SuiteFolder(Path(sys.argv[1])), sys.argv[2]
    path, begun = suite.run(folder), suite.is_begun(folder)
    try:
        import_modules(sys.argv[3:])
        finished = resume(path) if begun else train(suite.config(folder), path)
    except (ConfigError, RunError) as error:
        print(visible(f"airmoe: {error}"), file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    finally:
        leave_group()
    if finished.stopped_by is not None:
        name = signal.Signals(finished.stopped_by).name
        print(f"Stopped by {name} after step {finished.step}", flush=True)
        sys.exit(128 + finished.stopped_by)


if __name__ == "__main__":
    main()
