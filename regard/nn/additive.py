"""Additive attention (Bahdanau, Cho and Bengio 2014): the scores come from a small network, not from products."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.checks import check_int
from regard.nn.attention import dense_weights
from regard.nn.projections import Linear
from regard.op import attention


class AdditiveAttention(nn.Module):
    """Attention whose scores are a layer of tanh over query and key, as in the first translation models with attention.

        e_ij = vᵀ·tanh(W_Q·s_i + W_K·h_j)        score of query i (a decoder state) and key j (an encoder state)
        α_ij = softmax over j of e_ij
        c_i = Σ_j α_ij·h_j                       the context vector

    >>> layer = AdditiveAttention(d_query=6, d_context=8, d_hidden=5)
    >>> context, weights = layer(torch.zeros(2, 3, 6), torch.zeros(2, 7, 8))
    >>> context.shape, weights.shape
    (torch.Size([2, 3, 8]), torch.Size([2, 3, 7]))

    The scores are not divided by √d, as they are no products: tanh and v bound them. Each pair of a query and a key
    passes through the network, which takes B·N·M·d_hidden numbers: for sentences, not for documents.

    Args:
        d_query: width of the queries.
        d_context: width of the context, which gives keys and values.
        d_hidden: width of the layer of tanh.
        bias: whether W_Q has a bias; one on W_K would add to the same sum.

    Raises:
        TypeError: a size that is not an integer.
        ValueError: a size below 1.
    """

    def __init__(self, d_query: int, d_context: int, d_hidden: int, *, bias: bool = True) -> None:
        super().__init__()
        for name, size in (("d_query", d_query), ("d_context", d_context), ("d_hidden", d_hidden)):
            check_int(name, size)
        self.d_query, self.d_context = d_query, d_context
        self.w_q, self.w_k = Linear(d_query, d_hidden, bias), Linear(d_context, d_hidden, bias=False)
        self.v = Linear(d_hidden, 1, bias=False)

    def forward(self, query: Tensor, context: Tensor, *, mask: object = None) -> tuple[Tensor, Tensor]:
        """Context vectors (B, N, d_context), and the weights (B, N, M) that `regard.figures.heatmap` draws.

        Args:
            query: (B, N, d_query).
            context: (B, M, d_context).
            mask: a regard.masks value, or booleans that broadcast to (B, N, M); True = may look. A query that sees
                nothing gets 0.

        Raises:
            ValueError: sizes that do not fit.
            TypeError: a mask of another kind.
        """
        if query.ndim != 3 or query.shape[-1] != self.d_query:
            raise ValueError(f"query must be (B, N, {self.d_query}), got {tuple(query.shape)}")
        if context.ndim != 3 or context.shape[-1] != self.d_context or len(context) != len(query):
            raise ValueError(f"context must be ({len(query)}, M, {self.d_context}), got {tuple(context.shape)}")
        # (B, N, 1, d_hidden) + (B, 1, M, d_hidden) → scores (B, N, M)
        scores = self.v(torch.tanh(self.w_q(query).unsqueeze(2) + self.w_k(context).unsqueeze(1))).squeeze(-1)
        # As the bias of queries and keys that are 0, these are all of the operation's scores.
        q, k = (x.new_zeros(*x.shape[:2], 1) for x in (query, context))
        weights = dense_weights(q, k, context, mask=mask, bias=scores)
        return attention(q, k, context, mask=mask, bias=scores), weights[:, 0]
