"""The text kept for the end: a finished run's best checkpoint on the test split."""

from __future__ import annotations

from rich.console import Console

from airmoe.data import Prepared
from airmoe.distributed import on_first_rank, rank
from airmoe.files import write_json
from airmoe.model import AirMoeForCausalLM
from airmoe.training.checkpoints import best_checkpoint, check_checkpoint, load_model, step_of
from airmoe.training.evaluation import autocast_of, evaluate
from airmoe.training.run_folder import RunFolder


def is_untested(run: RunFolder, prepared: Prepared) -> bool:
    """Whether its text has a test split that was not measured yet; too short a one never is."""
    split = prepared.manifest.splits.get("test")
    long_enough = split is not None and split.tokens >= run.config.data.block_size
    return long_enough and not run.test.exists()


def measure_test(
    run: RunFolder, prepared: Prepared, model: AirMoeForCausalLM, console: Console
) -> None:
    """Put the best weights into `model` and write what they give; every process must call it."""
    options = run.config.training
    blocks = prepared.blocks("test", run.config.data.block_size)
    if rank() == 0:
        console.print(f"Measuring the test split, {len(blocks):,} blocks", highlight=False)
    best = best_checkpoint(run.path)
    on_first_rank(lambda: check_checkpoint(best, run.sha256(), to_resume=False))
    load_model(best, model)
    device = next(model.parameters()).device
    result = evaluate(
        model,
        blocks,
        batch_size=options.micro_batch_size,
        quality_tokens=options.quality_tokens,
        autocast=autocast_of(options.precision, device),
    )
    if rank() == 0:
        write_json(run.test, {"step": step_of(best), "tokens": result.tokens, **result.numbers()})
        console.print(f"test  loss {result.loss:.3f}  ppl {result.perplexity:.2f}", highlight=False)
