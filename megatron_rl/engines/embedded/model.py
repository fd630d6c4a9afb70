"""The decoder of the embedded engine in plain torch, with a key/value cache and fused projections.

B rows   P prompt width   L cache columns   k experts of one token   H query heads   KV key/value heads
d head size   h hidden size   V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rl.engines.embedded.feed_forward import add_dense, add_experts
from megatron_rl.engines.embedded.weights import FeedForward, Layer, Weights
from megatron_rl.weights.hf import Architecture


class Decoder:
    """A model that runs forward over `weights`; the key/value cache is the caller's."""

    def __init__(self, arch: Architecture, weights: Weights) -> None:
        self.arch, self.weights = arch, weights
        self.device, self.dtype = weights.norm.device, weights.norm.dtype
        self._turns = self._rotary(512)
        self._eps = torch.tensor(arch.features.norm_eps)
        self._routing = arch.features.routing

    def new_cache(self, rows: int, width: int) -> list[Tensor]:
        """Makes one [2, B, KV, L, d] per layer, keys then values. Zeros: what is masked out is still multiplied, so
        it must be finite."""
        shape = (2, rows, self.arch.kv_heads, width, self.arch.head_dim)
        return [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in self.weights.layers]

    def prefill(self, tokens: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Reads right-padded prompts. [B, P] -> hidden states [B, P, h] before the last norm, per layer a cache [2, B,
        KV, P, d], and per layer the experts that were chosen [B P, k]; none in a dense model."""
        rows, width = tokens.shape
        turns = self._turns_up_to(width)[:width].repeat(rows, 1)[:, None]  # [B P, 1, d / 2]
        x, cache, chosen = F.embedding(tokens.flatten(), self.weights.embedding), [], []
        for layer in self.weights.layers:
            q, kv = self._project(x, layer, turns)
            keys, values = kv = kv.unflatten(0, (rows, width)).permute(2, 0, 3, 1, 4)  # [2, B, KV, P, d]
            q = q.unflatten(0, (rows, width)).transpose(1, 2)  # [B, H, P, d]
            y = F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)
            chosen += self._finish(x, y.transpose(1, 2).reshape(len(x), -1), layer)
            cache.append(kv)
        return x.unflatten(0, (rows, width)), cache, chosen

    def decode(
        self, tokens: Tensor, positions: Tensor, cache: Sequence[Tensor], window: int
    ) -> tuple[Tensor, list[Tensor]]:
        """Reads one token per row. Tokens and positions [B] -> hidden states [B, h] before the last norm, and per layer
        the experts that were chosen [B, k]; none in a dense model.

        The first B rows and `window` columns of the cache are looked at; the token's keys and values are written to it
        in place.
        """
        turns = self._turns_up_to(window)[positions][:, None]  # [B, 1, d / 2]
        index = torch.arange(len(tokens), device=self.device)
        later = torch.arange(window, device=self.device) > positions[:, None]
        bias = torch.where(later, -torch.inf, 0.0).to(self.dtype)  # [B, window]
        if self.dtype == torch.float32:  # once, in the shape that `_attend` needs
            bias = bias[:, None].expand(-1, self.arch.kv_heads, -1).reshape(-1, 1, window)
        x, chosen = F.embedding(tokens, self.weights.embedding), []
        for layer, held in zip(self.weights.layers, cache, strict=True):
            q, kv = self._project(x, layer, turns)
            held[:, index, :, positions] = kv
            chosen += self._finish(x, self._attend(q, held[:, : len(tokens)], bias), layer)
        return x, chosen

    def logits(self, hidden: Tensor) -> Tensor:
        """Turns hidden states before the last norm into scores of the next token. [..., h] -> [..., V]"""
        return F.linear(self._norm(hidden, self.weights.norm), self.weights.head)

    def _project(self, x: Tensor, layer: Layer, turns: Tensor) -> tuple[Tensor, Tensor]:
        """Makes queries, keys and values. [N, h] -> rotated queries [N, H, d]; rotated keys, and values, [N, 2, KV,
        d]."""
        arch, turned = self.arch, self.arch.heads + self.arch.kv_heads
        fused = F.linear(self._norm(x, layer.norm), layer.qkv, layer.qkv_bias).unflatten(
            -1, (-1, arch.head_dim)
        )  # [N, H + 2 KV, d]
        both = fused[:, :turned]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = both.split([arch.heads, arch.kv_heads], dim=1)
            both = torch.cat([self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)], dim=1)
        pairs = torch.view_as_complex(both.float().unflatten(-1, (-1, 2)))  # [N, H + KV, d / 2]
        fused[:, :turned] = torch.view_as_real(pairs * turns).flatten(-2)
        return fused[:, : arch.heads], fused[:, arch.heads :].unflatten(1, (2, arch.kv_heads))

    def _attend(self, q: Tensor, cache: Tensor, bias: Tensor) -> Tensor:
        """Attends from one query per row and head to the window. Queries [B, H, d], cache [2, B, KV, L, d] -> [B, H
        d].

        In float32 two products with a softmax between them are the fastest on CPU. In fewer bits they would round
        every score, so that the log-probs would miss the trainer's by more than they must: the fused kernel keeps
        scores in float32.
        """
        rows, kv_heads, window = len(q), self.arch.kv_heads, bias.shape[-1]
        if self.dtype == torch.float32:
            keys, values = cache.flatten(1, 2)[:, :, :window]  # [B KV, window, d] each
            q = q.reshape(rows * kv_heads, -1, self.arch.head_dim)  # [B KV, H / KV, d]
            scores = torch.baddbmm(bias, q, keys.transpose(1, 2), alpha=self.arch.head_dim**-0.5)
            return torch.bmm(scores.softmax(dim=-1), values).view(rows, -1)
        keys, values = cache[:, :, :, :window]  # [B, KV, window, d] each
        # The H / KV queries that share a key head stand as so many places of one sequence: their mask is the same.
        y = F.scaled_dot_product_attention(q.unflatten(1, (kv_heads, -1)), keys, values, attn_mask=bias[:, None, None])
        return y.reshape(rows, -1)

    def _finish(self, x: Tensor, attended: Tensor, layer: Layer) -> list[Tensor]:
        """Adds the attention's output [N, H d], then the feed-forward's, to x [N, h]. Returns the experts that were
        chosen, one [N, k]; none in a dense layer."""
        x.addmm_(attended, layer.out.T)
        y = self._norm(x, layer.mlp_norm)
        if isinstance(layer.mlp, FeedForward):
            add_dense(x, y, layer.mlp)
            return []
        assert self._routing is not None, "a model whose layers have experts has routers"
        return [add_experts(x, y, layer.mlp, self._routing)]

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.is_cuda:
            return F.rms_norm(x, weight.shape, weight, self.arch.features.norm_eps)
        # On CPU torch runs rms_norm as nine small operations; these are five.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self._eps, length, length, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).to(x.dtype).mul_(weight)

    def _rotary(self, length: int) -> Tensor:
        """Computes e^(i angle) of every position: complex64 [length, d / 2]."""
        cos, sin = self.arch.rotary(torch.arange(length))
        half = self.arch.head_dim // 2
        return torch.complex(cos[:, :half].contiguous(), sin[:, :half].contiguous()).to(self.device)

    def _turns_up_to(self, length: int) -> Tensor:
        if length > len(self._turns):
            self._turns = self._rotary(2 * length)
        return self._turns
