"""AIR in plain torch, step by step, beside the library: every step is asserted to be equal."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from airmoe import AirRouter, CellRouting, GranularExperts, MoELayer


def assign(hidden: Tensor, codewords: Tensor) -> Tensor:
    """Coarse, a: the codeword with the largest cosine. [T, D], [G, D] -> [T]"""
    cosine = F.normalize(hidden, dim=-1) @ F.normalize(codewords, dim=-1).T  # [T, G]
    return cosine.argmax(-1)


def make_shortlists(codewords: Tensor, centroids: Tensor, size: int) -> Tensor:
    """Coarse, b: the best experts of each codeword, ids ascending. [G, D], [E, D] -> [G, M]"""
    scores = codewords @ F.normalize(centroids, dim=-1).T  # [G, E]
    return scores.topk(size).indices.sort().values


def score(hidden: Tensor, centroids: Tensor, candidates: Tensor) -> Tensor:
    """Fine, a: exact logits of each token's candidates. [T, D], [E, D], [T, M] -> [T, M]"""
    rows = F.normalize(centroids, dim=-1)[candidates]  # [T, M, D]: the gather that cells avoid
    return torch.einsum("td,tmd->tm", hidden, rows)


def select(candidates: Tensor, logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Fine, b: the K best and the softmax over them. -> expert ids [T, K], weights [T, K]"""
    best = logits.topk(top_k)
    return candidates.gather(1, best.indices), best.values.softmax(-1)


def run_experts(hidden: Tensor, ids: Tensor, weights: Tensor, experts: GranularExperts) -> Tensor:
    """Each token's K experts, one SwiGLU neuron each, weighed and summed. -> [T, D]"""
    assert experts.gate is not None
    gate = torch.einsum("td,tkd->tk", hidden, experts.gate[ids])
    up = torch.einsum("td,tkd->tk", hidden, experts.up[ids])
    return torch.einsum("tk,tkd->td", F.silu(gate) * up * weights, experts.down[ids])


def draw_tokens(centres: Tensor, count: int) -> Tensor:
    """Tokens scattered around a few directions. -> [T, D]"""
    return centres[torch.randint(len(centres), (count,))] + torch.randn(count, centres.shape[1])


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    num_tokens, dim, num_experts, top_k = 512, 32, 1024, 16
    config = AirRouter.Config(
        dim=dim, num_experts=num_experts, top_k=top_k, num_codewords=32, shortlist_size=128
    )
    router = config.build()
    experts = GranularExperts(num_experts, dim)
    layer = MoELayer(router, experts, post_norm="none")
    centres = torch.randn(32, dim)
    for _ in range(20):  # the codebook learns from tokens around 32 directions
        router.codebook.update(draw_tokens(centres, num_tokens))
    layer.eval()  # without jitter

    hidden = draw_tokens(centres, num_tokens)
    routing = router(hidden)
    assert isinstance(routing, CellRouting)
    listed = routing.to_token_routing()
    codewords, centroids = router.codebook.codewords, router.centroids

    codeword_ids = assign(hidden, codewords)
    assert torch.equal(codeword_ids, router.codebook.assign(hidden))
    print(f"1 assign     token 0 to codeword {codeword_ids[0]} of {len(codewords)}")

    shortlists = make_shortlists(codewords, centroids, config.shortlist_size)
    assert torch.equal(shortlists, router.shortlists())
    print(f"2 shortlist  its codeword lists {shortlists.shape[1]} of {num_experts} experts")

    candidates = shortlists[codeword_ids]  # [T, M]
    logits = score(hidden, centroids, candidates)
    torch.testing.assert_close(logits.logsumexp(-1), routing.log_z)
    print(f"3 score      logits from {logits[0].min():.2f} to {logits[0].max():.2f}")

    expert_ids, weights = select(candidates, logits, top_k)
    assert torch.equal(expert_ids, listed.expert_ids)
    torch.testing.assert_close(weights, listed.weights)
    print(f"4 select     the {top_k} best: experts {expert_ids[0, :3].tolist()} ...")
    print(f"             weights {[round(w, 3) for w in weights[0, :3].tolist()]} ...")

    output = run_experts(hidden, expert_ids, weights, experts)
    torch.testing.assert_close(output, layer(hidden.unsqueeze(0)).squeeze(0))
    print(f"5 experts    output of norm {output[0].norm():.3f}")

    cells = int((routing.cell_counts > 0).sum())
    print(f"AirRouter and MoELayer gave the same, working in {cells} cells instead of gathering.")


if __name__ == "__main__":
    main()
