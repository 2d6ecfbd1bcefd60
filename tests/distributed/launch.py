"""Runs a scenario on two gloo processes and brings the results back."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

WORLD = 2
TIMEOUT = timedelta(seconds=40)

# A scenario gets (rank, join); it calls join() when it wants the process group to exist.
Scenario = Callable[[int, Callable[[], None]], Any]


def run_all(scenarios: dict[str, Scenario], folder: Path) -> dict[str, list[Any]]:
    """Every scenario in its own process group, one start of the processes for all of them.

    Gives name -> the ranks' results.
    """
    context = spawn(_worker, (scenarios, str(folder)), nprocs=WORLD, join=False)
    assert context is not None
    for _ in range(200):
        if context.join(timeout=1.0):
            break
    else:
        for process in filter(None, context.processes):
            process.kill()
        raise TimeoutError("the processes hang")
    ranks = [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(WORLD)]
    failures = [found for results in ranks for found in results.values() if isinstance(found, str)]
    assert not failures, "\n".join(failures)
    return {name: [results[name] for results in ranks] for name in scenarios}


def _worker(rank: int, scenarios: dict[str, Scenario], folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    results: dict[str, Any] = {}
    for name, scenario in scenarios.items():

        def join(name: str = name) -> None:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/{name}",
                rank=rank,
                world_size=WORLD,
                timeout=TIMEOUT,
            )

        try:
            results[name] = scenario(rank, join)
            if dist.is_initialized():
                dist.barrier()  # nobody leaves the group while another still talks to it
        except Exception:
            results[name] = traceback.format_exc()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    torch.save(results, f"{folder}/rank{rank}.pt")
