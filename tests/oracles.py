"""The paper's algorithms as plain loops: what the conformance tests compare the library with.

Transcribed from the paper (Eq. 1-2, Alg. 1, Prop. 1; Alg. 2-3 are in
`tests/conformance/training_oracles.py`) and from `docs/decisions.md` where the paper
is silent. Nothing here imports airmoe. Every function computes in the dtype of its inputs: in
float64 it is the truth, in float32 it is the plain formula whose error sets the tolerance.

A routing is `choices[token][head] -> Choice`; `None` stands for a token that is left out.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Kind = Literal["spherical", "euclidean"]


@dataclass
class Choice:
    """The experts one token (or one head of it) picked among its candidates."""

    candidate_ids: list[int]
    logits: Tensor  # [candidates]
    expert_ids: list[int]
    weights: Tensor  # [chosen]

    @property
    def log_z(self) -> Tensor:
        return torch.logsumexp(self.logits, dim=0)


Choices = Sequence[Any]  # [token][head] -> Choice, or None for a token left out


# ---------------------------------------------------------------- selection (Eq. 1-2)


def top_ids(scores: Tensor, size: int) -> list[int]:
    """Positions of the `size` largest scores, best first; ties go to the lowest position."""
    values = scores.tolist()
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:size]


def choose(candidate_ids: list[int], logits: Tensor, top_k: int, chosen: list[int] | None = None):
    """Eq. 1-2: the K largest logits and the softmax over them (K = 1: softmax over all).

    `candidate_ids` ascend, so that ties go to the lowest expert id. `chosen` fixes the selection.
    """
    position = {expert: i for i, expert in enumerate(candidate_ids)}
    if chosen is None:
        order = top_ids(logits, top_k)
    else:
        order = [position[expert] for expert in chosen]
    if top_k == 1:
        weights = torch.softmax(logits, dim=0)[order]
    else:
        weights = torch.softmax(logits[order], dim=0)
    return Choice(candidate_ids, logits, [candidate_ids[i] for i in order], weights)


def project(centroids: Tensor, normalize: bool = True) -> Tensor:
    """Alg. 1, line 1: every centroid onto the unit sphere."""
    if not normalize:
        return centroids
    return torch.stack([w / w.norm() for w in centroids])


def exact_topk(hidden: Tensor, centroids: Tensor, top_k: int, normalize: bool = True):
    """Eq. 1-2 over all experts."""
    centroids = project(centroids, normalize)
    everyone = list(range(len(centroids)))
    return [[choose(everyone, centroids @ h, top_k)] for h in hidden]


# ---------------------------------------------------------------- AIR (Alg. 1)


def nearest_codeword(h: Tensor, codewords: Tensor, kind: Kind = "spherical") -> int:
    """The nearest codeword: by cosine, or by L2 in the ablation."""
    if kind == "spherical":
        closeness = torch.stack([(h @ c) / (h.norm() * c.norm()) for c in codewords])
    else:
        closeness = torch.stack([-(h - c).norm() for c in codewords])
    return top_ids(closeness.detach(), 1)[0]


def build_shortlists(codewords: Tensor, centroids: Tensor, size: int, normalize: bool = True):
    """Alg. 1, lines 4-7: the M best experts of every codeword, ids ascending."""
    centroids = project(centroids.detach(), normalize)
    return [sorted(top_ids(centroids @ c, size)) for c in codewords]


def air_route(
    hidden: Tensor,
    codewords: Tensor,
    shortlists: list[list[int]],
    centroids: Tensor,
    top_k: int,
    normalize: bool = True,
    kind: Kind = "spherical",
):
    """Alg. 1, lines 2-3 and 8-10."""
    centroids = project(centroids, normalize)
    choices = []
    for h in hidden:
        candidates = shortlists[nearest_codeword(h, codewords, kind)]
        choices.append([choose(candidates, centroids[candidates] @ h, top_k)])
    return choices


# ---------------------------------------------------------------- the other routers


def hierarchical_route(
    hidden: Tensor,
    cluster_centroids: Tensor,
    centroids: Tensor,
    top_k: int,
    num_selected: int,
    normalize: bool = True,
):
    """Best clusters first, then top-K of cluster + expert score among their experts."""
    clusters, experts = project(cluster_centroids, normalize), project(centroids, normalize)
    size = len(experts) // len(clusters)
    choices = []
    for h in hidden:
        cluster_scores = clusters @ h
        selected = sorted(top_ids(cluster_scores.detach(), num_selected))
        candidates = [e for g in selected for e in range(g * size, (g + 1) * size)]
        logits = torch.stack([cluster_scores[e // size] + experts[e] @ h for e in candidates])
        choices.append([choose(candidates, logits, top_k)])
    return choices


def peer_logits(hidden: Tensor, query_weight: Tensor, keys: Tensor) -> Tensor:
    """All product-key logits [T, heads, E]: expert i * sqrt(E) + j has <q1, k1_i> + <q2, k2_j>."""
    num_heads, _, side, half = keys.shape
    tokens = []
    for h in hidden:
        heads = []
        for p in range(num_heads):
            query = query_weight[p * 2 * half : (p + 1) * 2 * half] @ h
            first, second = keys[p, 0] @ query[:half], keys[p, 1] @ query[half:]
            heads.append(
                torch.stack([first[i] + second[j] for i in range(side) for j in range(side)])
            )
        tokens.append(torch.stack(heads))
    return torch.stack(tokens)


def peer_route(hidden: Tensor, query_weight: Tensor, keys: Tensor, top_k: int):
    """PEER by brute force: per head, the k best of all E experts."""
    logits = peer_logits(hidden, query_weight, keys)
    per_head = top_k // keys.shape[0]
    everyone = list(range(logits.shape[-1]))
    return [[choose(everyone, head, per_head) for head in token] for token in logits]


def capacity(num_tokens: int, num_experts: int, top_k: int, capacity_factor: float = 1.0) -> int:
    return math.ceil(num_tokens * top_k / num_experts * capacity_factor)


def expert_choice(choices: Choices, num_experts: int, size: int) -> Choices:
    """Each expert takes the `size` tokens of highest probability that have it as a candidate.

    Takes the candidates of any token-choice routing: all experts for the exact router, the
    shortlist under AIR (an expert outside it scores minus infinity).
    """
    probs: dict[tuple[int, int], Tensor] = {}
    for token, heads in enumerate(choices):
        if heads is not None:
            softmax = torch.softmax(heads[0].logits, dim=0)
            for i, expert in enumerate(heads[0].candidate_ids):
                probs[token, expert] = softmax[i]
    taken: dict[int, list[int]] = {token: [] for token in range(len(choices))}
    for expert in range(num_experts):
        askers = [token for token in range(len(choices)) if (token, expert) in probs]
        askers.sort(key=lambda token: (-probs[token, expert].item(), token))
        for token in askers[:size]:
            taken[token].append(expert)
    return fix_selection(choices, taken)


def fix_selection(choices: Choices, taken: dict[int, list[int]]) -> Choices:
    """Expert-choice gates at a given selection: p where taken."""
    result = []
    for token, heads in enumerate(choices):
        if heads is None:
            result.append(None)
            continue
        choice = heads[0]
        softmax = torch.softmax(choice.logits, dim=0)
        order = [choice.candidate_ids.index(expert) for expert in taken[token]]
        result.append([Choice(choice.candidate_ids, choice.logits, taken[token], softmax[order])])
    return result


# ---------------------------------------------------------------- what losses and metrics read


def dense_weights(choices: Choices, num_experts: int, like: Tensor) -> Tensor:
    """The routing weights as [T, E]; an expert repeated across heads is summed."""
    rows = []
    for heads in choices:
        row = like.new_zeros(num_experts)
        for choice in heads or []:
            row = row.index_add(0, torch.tensor(choice.expert_ids).long(), choice.weights)
        rows.append(row)
    return torch.stack(rows)


def expert_probs(choices: Choices, num_experts: int, like: Tensor) -> Tensor:
    """Mean softmax over the candidates, over tokens (and heads), scattered to [E]."""
    rows = []
    for heads in choices:
        for choice in heads or []:
            row, ids = like.new_zeros(num_experts), torch.tensor(choice.candidate_ids)
            rows.append(row.index_add(0, ids, torch.softmax(choice.logits, dim=0)))
    return torch.stack(rows).mean(dim=0)


def expert_counts(choices: Choices, num_experts: int) -> list[int]:
    counts = Counter(e for heads in choices for choice in heads or [] for e in choice.expert_ids)
    return [counts[expert] for expert in range(num_experts)]


def log_z(choices: Choices, like: Tensor) -> Tensor:
    """Logsumexp over the candidates, averaged over heads; 0 for tokens left out. [T]"""
    rows = []
    for heads in choices:
        values = [choice.log_z for choice in heads or []]
        rows.append(torch.stack(values).mean() if values else like.new_zeros(()))
    return torch.stack(rows)


def balance_loss(choices: Choices, num_experts: int, like: Tensor) -> Tensor:
    """E sum_e f_e P_e with f_e = choices of e per token, so K at perfect balance."""
    counts = like.new_tensor(expert_counts(choices, num_experts))
    tokens = sum(heads is not None for heads in choices)
    return num_experts * (counts / tokens * expert_probs(choices, num_experts, like)).sum()


def mass_recall(choices: Choices, all_logits: Tensor) -> Tensor:
    """Sec. 3.3: the share of the full softmax that lies in the candidates. [T]"""
    recall = []
    for heads, logits in zip(choices, all_logits, strict=True):
        assert heads is not None
        recall.append(torch.softmax(logits, dim=0)[heads[0].candidate_ids].sum())
    return torch.stack(recall)


# ---------------------------------------------------------------- experts (Eq. 1)

TWO_MATRIX = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}
GATED = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": functools.partial(F.gelu, approximate="tanh"),
}


@dataclass
class Experts:
    """Weights of all experts, [E, D] for single neurons or [E, S, D]."""

    activation: str
    gate: Tensor | None
    up: Tensor
    down: Tensor

    def output(self, h: Tensor, expert: int) -> Tensor:
        """FFN_e(h): the sum over the expert's neurons."""
        up, down = self.up[expert].reshape(-1, len(h)), self.down[expert].reshape(-1, len(h))
        total = torch.zeros_like(h)
        for s in range(len(up)):
            if self.activation in GATED:
                assert self.gate is not None
                gate = self.gate[expert].reshape(-1, len(h))
                value = GATED[self.activation](gate[s] @ h) * (up[s] @ h)
            else:
                value = TWO_MATRIX[self.activation](up[s] @ h)
            total = total + value * down[s]
        return total


def moe_output(hidden: Tensor, choices: Choices, experts: Experts) -> Tensor:
    """Eq. 1: the weighted sum of the chosen experts; 0 for tokens left out. [T, D]"""
    outputs = []
    for h, heads in zip(hidden, choices, strict=True):
        total = torch.zeros_like(h)
        for choice in heads or []:
            for expert, weight in zip(choice.expert_ids, choice.weights, strict=True):
                total = total + weight * experts.output(h, expert)
        outputs.append(total)
    return torch.stack(outputs)
