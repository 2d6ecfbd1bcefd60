"""`make demo`: train a tiny AIR language model and three baselines at equal budget, and compare."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from airmoe import AirRouter, ConfigError
from airmoe.files import keep_streams, read_json
from airmoe.training import generate_text, open_run, override, preset, resume, train
from airmoe.training.devices import Machine, settle
from airmoe.training.trained import load_trained

# Method -> name and colour (Okabe and Ito's palette) in table and figure.
METHODS = {
    "air": ("AIR", "#0072B2"),
    "exact": ("exact top-K", "#D55E00"),
    "peer": ("PEER", "#009E73"),
    "coarse": ("coarse", "#CC79A7"),
}
PROMPT = "The function returns"
COLUMNS = ("parameters", "perplexity", "tokens/s", "overlap", "unused")
EXPLANATION = """\
perplexity  on held-out text; lower is better
tokens/s    of training, on this machine
overlap     share of the exact top-K experts that the router found
unused      experts that no token of the held-out text used

Every method should learn (guessing has a perplexity of about 2,000) and use
its experts. One short run with one seed does not rank the methods;
docs/results.md has longer ones."""


@dataclass(frozen=True)
class Finished:
    """One finished run."""

    method: str
    folder: Path
    result: dict[str, Any]  # result.json

    @property
    def name(self) -> str:
        return METHODS[self.method][0]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        return [line for line in self.result["log"] if line["kind"] == "eval"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="output folder")
    parser.add_argument("--quick", action="store_true", help="few steps, to see that it runs")
    arguments = parser.parse_args()
    out: Path = arguments.out
    console = Console(highlight=False)
    introduce(console)
    few = ["training.steps=6", "training.eval_every=3", "training.eval_blocks=8"]
    changes = few if arguments.quick else []
    runs = [train_one(method, out / method, changes, console) for method in METHODS]
    show_table(runs, console)
    draw_curves(runs, out / "curves.png")
    sample = write_sample(runs[0], out / "sample.txt")
    console.print("\nText by the AIR model, which has learned the style but little sense yet:\n")
    console.print(sample, markup=False)
    console.print(
        f"\nFiles: {out / 'curves.png'}, {out / 'sample.txt'}\n"
        f"More text: airmoe generate {out / 'air'} 'your words'\n"
        f"Look inside the model: python examples/routing_tour.py {out / 'air'}\n"
        "Train longer: airmoe train tiny training.steps=3000",
        markup=False,
        soft_wrap=True,
    )


def introduce(console: Console) -> None:
    config = preset("tiny")
    model = config.model_config(vocab_size=2, eos_id=1)
    router = model.router_config()
    assert isinstance(router, AirRouter.Config)
    console.print(
        "Four small language models learn from the documentation inside this Python: same text, "
        "order, steps and seed. In each, one of the feed-forward layers is a mixture of experts. "
        f"It has {model.num_experts:,} single neurons and uses {model.num_experts_per_tok} of them "
        "for each token.\n\n"
        f"  AIR          scores {router.shortlist_size} experts per token, from the shortlist of "
        "its codeword\n"
        f"  exact top-K  scores all {model.num_experts:,}\n"
        "  PEER         finds experts by pairs of sub-keys\n"
        "  coarse       has the same neurons in a few large experts\n"
    )


def train_one(method: str, folder: Path, changes: list[str], console: Console) -> Finished:
    """Train it, resume it, or take it as it is if it has finished."""
    config = override(preset("tiny", method), ["training.track=none", *changes])
    config, _ = settle(config, Machine.this(processes=1))  # run.json has no `auto` precision
    if (folder / "run.json").exists() and open_run(folder).config == config:
        finished = resume(folder, console)
    else:
        finished = train(config, folder, console)
    if finished.stopped_by is not None:
        raise SystemExit("Stopped. Run the same command again to continue.")
    return Finished(method, folder, read_json(folder / "result.json"))


def show_table(runs: list[Finished], console: Console) -> None:
    table = Table(title="After the same training", title_justify="left")
    table.add_column("method", no_wrap=True)
    for heading in COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        table.add_row(*row_of(run))
    console.print()
    console.print(table)
    console.print(EXPLANATION)


def row_of(run: Finished) -> list[str]:
    last = run.result["last"]

    def shown(name: str, form: str) -> str:
        return form.format(last[name]) if name in last else "-"

    return [
        run.name,
        f"{run.result['parameters']['total'] / 1e6:.2f} M",
        shown("perplexity", "{:.1f}"),
        f"{run.result['tokens_per_second']:,.0f}",
        shown("overlap", "{:.3f}"),
        shown("dead_experts", "{:.0%}"),
    ]


def draw_curves(runs: list[Finished], path: Path) -> None:
    """Validation perplexity against tokens, and against the time they took."""
    import matplotlib

    matplotlib.use("Agg")  # a file, no window
    import matplotlib.pyplot as plt

    figure, (by_tokens, by_time) = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for run in runs:
        colour = METHODS[run.method][1]
        perplexity = [line["perplexity"] for line in run.evaluations]
        by_tokens.plot(
            [line["tokens"] / 1e3 for line in run.evaluations],
            perplexity,
            marker="o",
            color=colour,
            label=run.name,
        )
        by_time.plot(
            [line["seconds"] for line in run.evaluations], perplexity, marker="o", color=colour
        )
    by_tokens.set(xlabel="thousand tokens", ylabel="validation perplexity", yscale="log")
    by_time.set(xlabel="seconds on this machine")
    for labels in (by_tokens.yaxis.set_major_formatter, by_tokens.yaxis.set_minor_formatter):
        labels("{x:.0f}")  # 200, not 2 x 10^2
    for axes in (by_tokens, by_time):
        axes.grid(alpha=0.3)
    by_tokens.legend()
    figure.suptitle("Tiny models on the prose inside Python")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def write_sample(run: Finished, path: Path) -> str:
    trained = load_trained(run.folder)
    text = generate_text(trained.model, trained.tokenizer, PROMPT, max_new_tokens=80)
    path.write_text(text + "\n", encoding="utf-8")
    return text


if __name__ == "__main__":
    keep_streams()
    try:
        main()
    except ConfigError as error:
        raise SystemExit(f"demo: {error}") from None
