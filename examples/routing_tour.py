"""One batch of real words routed coarse to fine over 16,384 experts, in numbers."""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from prose import Prose, read_prose
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from torch import Tensor

from airmoe import AirRouter, CellRouting, GranularExperts, MoELayer, TopKRouter, track_optimizer
from airmoe.metrics import dead_experts, mass_recall_bound, routing_quality, usage_entropy

SEED = 0


@dataclass(frozen=True)
class Sizes:
    """The shape of the demonstration; letters as in the paper."""

    dim: int = 128  # D
    num_experts: int = 16_384  # E
    top_k: int = 128  # K
    num_codewords: int = 256  # G
    shortlist_size: int = 512  # M
    passages: int = 16  # per micro-batch
    passage_length: int = 256
    micro_batches: int = 120
    timed_rounds: int = 2

    @property
    def tokens(self) -> int:
        return self.passages * self.passage_length


QUICK = Sizes(
    dim=32,
    num_experts=1024,
    top_k=16,
    num_codewords=32,
    shortlist_size=64,
    micro_batches=12,
    timed_rounds=1,
)


@dataclass
class Demo:
    """What the sections share."""

    sizes: Sizes
    console: Console
    prose: Prose
    layer: MoELayer
    router: AirRouter
    optimizer: torch.optim.Optimizer  # tracked as long as it lives
    word_ids: Tensor  # [passages, length] of the one batch that is routed, never learned from
    hidden: Tensor  # [T, D] its token states
    facts: list[tuple[str, str, str]] = field(default_factory=list)  # (what, AIR, exact)

    def words_of(self, tokens: Tensor) -> list[str]:
        return [self.prose.words[i] for i in self.word_ids.flatten()[tokens].tolist()]

    def title(self, text: str) -> None:
        self.console.print()
        self.console.rule(f"[bold]{text}", align="left")

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False)

    def show(self, headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: slice) -> None:
        """A table whose columns in `numbers` are aligned to the right."""
        table = Table(*headings)
        for column in table.columns[numbers]:
            column.justify = "right"
        for row in rows:
            table.add_row(*row)
        self.console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    sizes = QUICK if parser.parse_args().quick else Sizes()
    torch.manual_seed(SEED)
    started = time.perf_counter()
    console = Console()
    console.print(
        f"AIR sends each token to {sizes.top_k} of {sizes.num_experts:,} experts without scoring "
        "them all: find the nearest of a few codewords, score that codeword's shortlist of "
        f"{sizes.shortlist_size} experts exactly, keep the {sizes.top_k} best.\n",
        highlight=False,
    )
    demo = prepare(sizes, console)
    learn_codebook(demo)
    demo.router.eval()  # no jitter: the numbers of sections 3 to 5 are those of evaluation
    with torch.no_grad():
        routing = demo.router(demo.hidden)
        cells = tight_cells(demo, routing)
        show_cells(demo, routing, cells)
        show_token(demo, routing, cells[0])
        show_quality(demo, routing)
    show_cost(demo)
    show_summary(demo, time.perf_counter() - started)


def prepare(sizes: Sizes, console: Console) -> Demo:
    """Text to token states, and a layer with untrained parameters."""
    console.rule("[bold]1  Real words become token states", align="left")
    with console.status("counting words"):
        prose = read_prose(sizes.dim, sizes.passage_length)
    config = AirRouter.Config(
        dim=sizes.dim,
        num_experts=sizes.num_experts,
        top_k=sizes.top_k,
        num_codewords=sizes.num_codewords,
        shortlist_size=sizes.shortlist_size,
    )
    router = config.build()
    layer = MoELayer(router, GranularExperts(sizes.num_experts, sizes.dim))
    # The hook of an optimizer tells the router that shortlists stay valid between two steps.
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    track_optimizer(layer, optimizer)
    word_ids = prose.passages[-sizes.passages :]
    hidden = prose.states(word_ids).flatten(0, 1)
    demo = Demo(sizes, console, prose, layer, router, optimizer, word_ids, hidden)
    demo.say(
        f"The documentation inside this Python has {prose.passages.numel():,} words, "
        f"{len(prose.words):,} different ones. Each becomes {sizes.dim} numbers that tell which "
        "words stand near it, plus a trace of the words before it. No model is trained: these "
        "states stand in for a model's hidden states."
    )
    return demo


def learn_codebook(demo: Demo) -> None:
    """Alg. 2: k-means on the sphere that follows the tokens, without gradients."""
    sizes, router = demo.sizes, demo.router
    demo.title(f"2  The codebook learns: {sizes.num_codewords} codewords follow the tokens")
    batches = demo.prose.passages[: -2 * sizes.passages].split(sizes.passages)
    reported = {1, 5, 20, 60, sizes.micro_batches}
    rows, replaced, cosine = [], 0, 0.0
    columns = (TextColumn("learning"), BarColumn(), TextColumn("cosine {task.fields[cosine]:.3f}"))
    live = demo.console.is_terminal
    with Progress(*columns, console=demo.console, transient=True, disable=not live) as progress:
        task = progress.add_task("", total=sizes.micro_batches, cosine=cosine)
        for number in range(1, sizes.micro_batches + 1):
            states = demo.prose.states(batches[number % len(batches)])
            router.observe(states.flatten(0, 1))
            replaced += int((router.codebook.counts == 1).sum())  # what a replaced one starts with
            cosine, used = quantisation(router, demo.hidden)
            progress.update(task, advance=1, cosine=cosine)
            if number in reported:
                rows.append((f"{number}", f"{cosine:.3f}", f"{used}", f"{replaced}"))
    headings = ("micro-batches", "cosine token to codeword", "codewords in use", "replaced")
    demo.show(headings, rows, slice(None))
    demo.say(
        f"No gradients: each micro-batch of {sizes.tokens:,} tokens pulls its codewords along. One "
        "that hardly any token chooses is replaced by a token. The cosine is measured on a batch "
        "the codebook never learns from: the one that is routed now."
    )
    demo.facts.append(("cosine of a token to its codeword", f"{cosine:.2f}", ""))


def quantisation(router: AirRouter, hidden: Tensor) -> tuple[float, int]:
    """(mean cosine of tokens to their codewords, codewords that any token chose)."""
    codeword_ids = router.codebook.assign(hidden)  # [T]
    nearest = router.codebook.codewords[codeword_ids]
    cosine = F.cosine_similarity(hidden, nearest, dim=-1).mean()
    return float(cosine), codeword_ids.unique().numel()


def tight_cells(demo: Demo, routing: CellRouting) -> list[int]:
    """Cells that several words share, none of them with more than half of it; tightest first."""
    found = []
    for cell in range(demo.sizes.num_codewords):
        tokens = tokens_of(routing, cell)
        counted = Counter(demo.words_of(tokens))
        if len(counted) >= 6 and 2 * max(counted.values()) <= counted.total():
            found.append((float(cosine_to(demo, tokens, cell).mean()), cell))
    fallback = int(routing.cell_counts.argmax())  # a text with no such cell
    return [cell for _, cell in sorted(found, reverse=True)] or [fallback]


def tokens_of(routing: CellRouting, cell: int) -> Tensor:
    start, stop = routing.offsets[cell : cell + 2].tolist()
    return routing.token_ids[start:stop]


def cosine_to(demo: Demo, tokens: Tensor, cell: int) -> Tensor:
    return F.cosine_similarity(demo.hidden[tokens], demo.router.codebook.codewords[cell], dim=-1)


def show_cells(demo: Demo, routing: CellRouting, cells: list[int]) -> None:
    """The coarse stage: which tokens share a codeword, hence a shortlist."""
    sizes = demo.sizes
    demo.title(f"3  Coarse: {sizes.tokens:,} tokens fall into cells, one shortlist per cell")
    rows = []
    for cell in cells[:8]:
        tokens = tokens_of(routing, cell)
        words = [word for word, _ in Counter(demo.words_of(tokens)).most_common(6)]
        cosine = cosine_to(demo, tokens, cell).mean()
        rows.append((f"{cell}", f"{len(tokens)}", f"{cosine:.2f}", ", ".join(words)))
    demo.show(("cell", "tokens", "cosine", "words that landed in it most often"), rows, slice(3))
    largest, empty = routing.cell_counts.max(), (routing.cell_counts == 0).sum()
    demo.say(
        "Shown are the tightest of those cells that several words share evenly. The largest cell "
        f"holds {largest} tokens, {empty} are empty. All tokens of a cell have the same "
        f"{sizes.shortlist_size} candidate experts, so one dense product scores them."
    )


def show_token(demo: Demo, routing: CellRouting, cell: int) -> None:
    """The fine stage for one token: the middling one of a cell."""
    sizes, router = demo.sizes, demo.router
    tokens = tokens_of(routing, cell)
    by_cosine = cosine_to(demo, tokens, cell).argsort()
    token = int(tokens[by_cosine[len(tokens) // 2]])
    similarity = F.cosine_similarity(demo.hidden[token], router.codebook.codewords, dim=-1)
    nearest, next_one = similarity.topk(2).values.tolist()
    listed = routing.to_token_routing()
    logits = router.full_logits(demo.hidden[token].unsqueeze(0)).squeeze(0)  # [E]
    exact = logits.topk(sizes.top_k).indices
    kept = int(torch.isin(exact, listed.expert_ids[token]).sum())
    word = demo.words_of(torch.tensor([token]))[0]
    before = " ".join(demo.words_of(torch.arange(max(0, token - 5), token)))
    demo.title(f"4  Fine: one token, “{word}” after “{before}”")
    demo.say(
        f"codeword   {cell}, cosine {nearest:.2f} (the next one {next_one:.2f})\n"
        f"shortlist  {sizes.shortlist_size} of {sizes.num_experts:,} experts, scored exactly\n"
        f"chosen     the {sizes.top_k} best of the list; {kept} of them belong to the "
        f"{sizes.top_k} best of all"
    )
    rows = []
    for rank in (0, 1, 2, sizes.top_k // 2 - 1, sizes.top_k - 1):
        expert, weight = int(listed.expert_ids[token, rank]), listed.weights[token, rank]
        place = int((logits > logits[expert]).sum()) + 1
        words = customers(demo, listed.expert_ids, listed.weights, expert)
        numbers = (f"{rank + 1}", f"{place}", f"{expert}", f"{logits[expert]:.2f}", f"{weight:.4f}")
        rows.append((*numbers, words))
    headings = ("rank", "exact rank", "expert", "logit", "weight", "words that weigh it most")
    demo.show(headings, rows, slice(5))


def customers(demo: Demo, expert_ids: Tensor, weights: Tensor, expert: int) -> str:
    """The words whose tokens give this expert the largest weights."""
    given = (weights * (expert_ids == expert)).sum(-1)  # [T]
    best = given.argsort(descending=True)[: int((given > 0).sum())]
    return ", ".join(list(dict.fromkeys(demo.words_of(best)))[:4])


def show_quality(demo: Demo, routing: CellRouting) -> None:
    """AIR beside the exact answer on the whole batch."""
    sizes, router, hidden = demo.sizes, demo.router, demo.hidden
    demo.title(f"5  How good is it? Beside the exact top {sizes.top_k} of all experts")
    unit = F.normalize(hidden, dim=-1)
    exact = router.full_logits(hidden).topk(sizes.shortlist_size).indices  # [T, M]
    exact_counts = exact[:, : sizes.top_k].flatten().bincount(minlength=sizes.num_experts)
    quality, unit_quality = routing_quality(router, hidden), routing_quality(router, unit)
    counts, blind = routing.expert_counts, sizes.shortlist_size / sizes.num_experts
    found = quality.overlap.mean()
    bound, unit_bound = mass_recall_bound(router, hidden), mass_recall_bound(router, unit)
    mass, unit_mass = best_mass(router, hidden, exact), best_mass(router, unit, exact)
    rows = [
        row(f"share of the exact top {sizes.top_k} found", found, 1.0),
        row(f"  with {sizes.shortlist_size} candidates drawn blindly", blind),
        row(f"routing mass on {sizes.shortlist_size} candidates", quality.mass_recall.mean(), mass),
        row("  guaranteed by Prop. 1", bound.mean(), form=".0e"),
        row("the same for states of norm 1", unit_quality.mass_recall.mean(), unit_mass),
        row("  guaranteed by Prop. 1", unit_bound.mean()),
        row("usage entropy in nats", usage_entropy(counts), usage_entropy(exact_counts), ".2f"),
        row("  of even usage", math.log(sizes.num_experts), form=".2f"),
        row("experts that got no token", dead_experts(counts), dead_experts(exact_counts), ".1%"),
    ]
    demo.show(("mean over the batch", "AIR", "exact"), rows, slice(1, None))
    demo.say(
        "The centroids are random unit vectors, as at the first step of training. So routing is "
        "nearly flat (even the best candidates of all hold little mass), and load balancing has "
        f"not acted yet. Prop. 1 says nothing at the usual norm of sqrt({sizes.dim}), and little "
        "at norm 1: what is reached is far above it."
    )
    demo.facts += [row(f"exact top {sizes.top_k} found", found, 1.0, ".0%"), rows[-1]]


def row(
    name: str, air: Tensor | float, exact: Tensor | float | None = None, form: str = ".3f"
) -> tuple[str, str, str]:
    return name, format(float(air), form), "" if exact is None else format(float(exact), form)


def best_mass(router: AirRouter, hidden: Tensor, experts: Tensor) -> float:
    """Mean share of the softmax over all experts that lies on `experts` [T, n]."""
    logits = router.full_logits(hidden)  # [T, E]
    return float((logits.gather(1, experts).logsumexp(-1) - logits.logsumexp(-1)).exp().mean())


def show_cost(demo: Demo) -> None:
    """FLOPs of the routers, and the clock for whole layers."""
    sizes, layer = demo.sizes, demo.layer
    demo.title("6  What does it cost?")
    scores = sizes.num_codewords + sizes.shortlist_size
    flops, exact_flops = 2 * sizes.dim * scores, 2 * sizes.dim * sizes.num_experts
    list_flops = sizes.num_codewords * exact_flops
    config = TopKRouter.Config(dim=sizes.dim, num_experts=sizes.num_experts, top_k=sizes.top_k)
    exact = MoELayer(config.build(), layer.experts)  # the same experts behind exact routing
    exact.router.centroids = demo.router.centroids
    x = demo.prose.states(demo.word_ids)
    times: dict[MoELayer, list[float]] = {layer.train(): [], exact.train(): []}
    with demo.console.status("timing both layers in turns"):
        for _ in range(1 + sizes.timed_rounds):  # the first round warms up
            for module, seconds in times.items():
                seconds.append(step_seconds(module, x))
    air_time, exact_time = (min(seconds[1:]) for seconds in times.values())
    rows = [
        ("scores per token", f"{scores:,}", f"{sizes.num_experts:,}"),
        ("FLOPs to route a token", f"{flops / 1e6:.2f} M", f"{exact_flops / 1e6:.2f} M"),
        ("  shortlists, once per optimizer step", f"{list_flops / 1e6:,.0f} M", ""),
        ("layer, forward + backward", f"{air_time:.2f} s", f"{exact_time:.2f} s"),
        ("  shortlists, once per optimizer step", f"{refresh_seconds(demo.router):.2f} s", ""),
    ]
    heading = f"{sizes.tokens:,} tokens, CPU threads: {torch.get_num_threads()}"
    demo.show((heading, "AIR", "exact"), rows, slice(1, None))
    demo.say(
        f"{exact_flops / flops:.0f} times fewer FLOPs per token, and a layer that is "
        f"[bold]{exact_time / air_time:.1f} times faster[/bold] (measured just now, in turns). "
        f"The shortlists cost what exact routing of {sizes.num_codewords} tokens costs, however "
        "many tokens share them. "
        f"Cells compute all {sizes.shortlist_size} experts of a list and mask all but "
        f"{sizes.top_k} per token: more arithmetic than fetching {sizes.top_k} rows for each "
        "token, but in dense products."
    )
    demo.facts += [rows[0], rows[3]]


def step_seconds(layer: MoELayer, x: Tensor) -> float:
    layer.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    started = time.perf_counter()
    layer(x).square().mean().backward()
    return time.perf_counter() - started


def refresh_seconds(router: AirRouter) -> float:
    started = time.perf_counter()
    router.rebuild_shortlists()
    return time.perf_counter() - started


def show_summary(demo: Demo, seconds: float) -> None:
    demo.title("In short")
    demo.show((f"{demo.sizes.num_experts:,} experts", "AIR", "exact"), demo.facts, slice(1, None))
    demo.say(
        f"Done in {seconds:.0f} s. Next: [bold]examples/route_by_hand.py[/bold] does the same in "
        "plain torch, [bold]docs/method.md[/bold] explains it, [bold]docs/add_a_router.md[/bold] "
        "adds a router of your own."
    )


if __name__ == "__main__":
    main()
