"""`make demo`: a tiny AIR language model and its twins, trained at equal budget and compared."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from airmoe import AirRouter, ConfigError
from airmoe.experiments import preset
from airmoe.files import read_json
from airmoe.training import generate_text, open_run, override, resume, train
from airmoe.training.load import load_trained

# Method -> how it is called in table and figure, and its colour (Okabe and Ito's palette).
TWINS = {
    "air": ("AIR", "#0072B2"),
    "exact": ("exact top-K", "#D55E00"),
    "peer": ("PEER", "#009E73"),
    "coarse": ("coarse", "#CC79A7"),
}
PROMPT = "The function returns"
SHOWS = (
    "The table can show that each method learns, and how many of its experts live; it cannot rank "
    "them: that takes more seeds, and more tokens than a model has weights."
)


@dataclass(frozen=True)
class Twin:
    """One finished run."""

    method: str
    folder: Path
    result: dict[str, Any]  # result.json

    @property
    def name(self) -> str:
        return TWINS[self.method][0]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        return [line for line in self.result["log"] if line["kind"] == "eval"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder to write to")
    parser.add_argument("--quick", action="store_true", help="few steps, to see that it runs")
    arguments = parser.parse_args()
    console = Console()
    introduce(console)
    few = ["training.steps=6", "training.eval_every=3", "training.eval_blocks=8"]
    changes = few if arguments.quick else []
    twins = [train_twin(method, arguments.out / method, changes, console) for method in TWINS]
    show_table(twins, console)
    figure = draw_curves(twins, arguments.out / "curves.png")
    sample = write_sample(twins[0], arguments.out / "sample.txt")
    console.print(f"\nThe AIR model goes on from [bold]{PROMPT}[/bold]:\n")
    console.print(sample, markup=False, highlight=False)
    console.print(f"\nCurves: {figure}    text: {arguments.out / 'sample.txt'}", highlight=False)
    console.print(
        f"More text: airmoe generate {arguments.out / 'air'} 'your words'    "
        "longer training: airmoe train tiny training.steps=3000",
        highlight=False,
        markup=False,
    )


def introduce(console: Console) -> None:
    config = preset("tiny")
    model = config.model_config(vocab_size=2, eos_id=1)
    router = model.router_config()
    assert isinstance(router, AirRouter.Config)
    console.print(
        "Four language models learn the prose inside this Python. One feed-forward layer of "
        f"{model.num_hidden_layers} is a mixture of experts: {model.num_experts:,} single neurons, "
        f"{model.num_experts_per_tok} of them for each token. AIR scores {router.shortlist_size} "
        "candidates per token, exact top-K scores all, PEER finds pairs of sub-keys; the coarse "
        "twin has the same neurons in few large experts. Same text, order, steps and seed.\n",
        highlight=False,
    )


def train_twin(method: str, folder: Path, changes: list[str], console: Console) -> Twin:
    """Train it, go on with it, or take it as it is if it is finished."""
    config = override(preset("tiny", method), ["training.tensorboard=false", *changes])
    if (folder / "run.json").exists() and open_run(folder).config == config:
        finished = resume(folder, console)
    else:
        finished = train(config, folder, console)
    if finished.stopped_by is not None:
        raise SystemExit("Stopped. The same command goes on from here.")
    return Twin(method, folder, read_json(folder / "result.json"))


def show_table(twins: list[Twin], console: Console) -> None:
    table = Table(title="After equal training", title_justify="left")
    table.add_column("method", no_wrap=True)
    for heading in ("weights", "perplexity", "tokens/s", "overlap", "dead", "entropy"):
        table.add_column(heading, justify="right", no_wrap=True)
    for twin in twins:
        table.add_row(*row_of(twin))
    console.print()
    console.print(table)
    console.print(
        "weights: parameters in all. perplexity: on held-out text, lower is better. overlap: share "
        "of the exact top-K that was found; it says little where many experts are dead. dead: "
        "experts no held-out token used. entropy of their use: nats, of those equal use would have."
        f"\n{SHOWS}",
        highlight=False,
    )


def row_of(twin: Twin) -> list[str]:
    """What the table says of one run."""
    last, counts = twin.result["last"], twin.result["parameters"]
    num_experts = open_run(twin.folder).config.model["num_experts"]

    def shown(name: str, form: str) -> str:
        return form.format(last[name]) if name in last else "-"

    return [
        twin.name,
        f"{counts['total'] / 1e6:.2f} M",
        shown("perplexity", "{:.1f}"),
        f"{twin.result['tokens_per_second']:,.0f}",
        shown("overlap", "{:.3f}"),
        shown("dead_experts", "{:.0%}"),
        shown("entropy", "{:.1f}") + f" of {math.log(num_experts):.1f}",
    ]


def draw_curves(twins: list[Twin], path: Path) -> Path:
    """Validation perplexity against tokens, and against the time they took."""
    import matplotlib

    matplotlib.use("Agg")  # a file, no window
    import matplotlib.pyplot as plt

    figure, (by_tokens, by_time) = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for twin in twins:
        colour = TWINS[twin.method][1]
        perplexity = [line["perplexity"] for line in twin.evaluations]
        by_tokens.plot(
            [line["tokens"] / 1e3 for line in twin.evaluations],
            perplexity,
            marker="o",
            color=colour,
            label=twin.name,
        )
        by_time.plot(
            [line["seconds"] for line in twin.evaluations], perplexity, marker="o", color=colour
        )
    by_tokens.set(xlabel="thousand tokens", ylabel="validation perplexity", yscale="log")
    by_time.set(xlabel="seconds on this machine")
    for labels in (by_tokens.yaxis.set_major_formatter, by_tokens.yaxis.set_minor_formatter):
        labels("{x:.0f}")  # 200 instead of 2 x 10^2
    for axes in (by_tokens, by_time):
        axes.grid(alpha=0.3)
    by_tokens.legend()
    figure.suptitle("Tiny models on the prose inside Python")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def write_sample(twin: Twin, path: Path) -> str:
    """Text by the trained model; at this size it has the sound of the documentation, no sense."""
    trained = load_trained(twin.folder)
    text = generate_text(trained.model, trained.tokenizer, PROMPT, max_new_tokens=80)
    path.write_text(text + "\n", encoding="utf-8")
    return text


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        raise SystemExit(f"demo: {error}") from None
