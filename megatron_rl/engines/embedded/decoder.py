"""The decoder of the embedded engine in plain torch, with a KV cache and fused projections.

B rows   P prompt width   L cache columns   k experts of one token   H query heads   KV key/value heads
d head size   h hidden size   V vocabulary

With latent attention (MLA), the cache holds one vector per token instead of keys and values: a latent of r elements,
and the e rotated elements of the key, which all heads share. A key has n further elements per head, which are not
rotated, and a value has v elements per head. A prompt's keys and values are computed from the cached vectors. A
decoding step does not recompute the keys and values of all columns: it folds the up-projection into the query and into
the attention output, so that all heads attend to the same vectors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rl.devices import sdpa
from megatron_rl.engines.embedded.engine_weights import FeedForward, Latents, Layer, Weights
from megatron_rl.engines.embedded.feed_forward import add_experts, gated
from megatron_rl.types import FREE
from megatron_rl.weights.hf_model import Architecture


class Decoder:
    """A transformer that computes the forward pass with the given `weights`. The caller provides the KV cache."""

    def __init__(self, arch: Architecture, weights: Weights) -> None:
        self.arch, self.weights = arch, weights
        self.device, self.dtype = weights.norm.device, weights.norm.dtype
        self._kinds = [arch.features.kind_of(layer) for layer in range(arch.num_layers)]
        self._turns = self._rotary(512)
        # the scale is rounded to the model's dtype, as in the trainer
        scale = torch.tensor(arch.features.embedding_scale, dtype=self.dtype)
        self._embedding_scale = float(scale)
        self._scale = arch.features.softmax_scale or arch.head_dim**-0.5
        # number of elements of a head to which no rotary embedding is applied
        self._plain = arch.head_dim - arch.rotated
        # Cache entry of a token: (2 for keys and values or 1 for latents, number of heads, elements per head).
        self._cached = (1, 1, arch.kv_rank + arch.rope_dim) if arch.kv_rank else (2, arch.kv_heads, arch.head_dim)
        self._eps = {eps: torch.tensor(eps) for eps in (arch.features.norm_eps, arch.features.latent_eps)}
        self._routing = arch.features.routing

    def new_layer_cache(self, rows: int, width: int) -> Tensor:
        """Allocates the cache of one layer: [2, B, KV, L, d] with keys, then values; or [1, B, 1, L, r + e] for latent
        attention (r latent and e rotated elements). The cache is filled with zeros, because masked values are still
        multiplied and must be finite.
        """
        kinds, heads, size = self._cached
        return torch.zeros((kinds, rows, heads, width, size), dtype=self.dtype, device=self.device)

    def prefill(self, tokens: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Processes right-padded prompts [B, P].

        Returns three values: the hidden states [B, P, h] before the last norm; a cache per layer, in the format of
        `new_layer_cache`; and the chosen experts per layer [B P, k] (filled with the placeholder FREE for a dense
        layer; an empty list for a dense model).
        """
        rows, width = tokens.shape
        # [B P, 1, d / 2] per kind of attention.
        turns = [one[:width].repeat(rows, 1)[:, None] for one in self.turns_up_to(width)]
        masks = [self._prompt_mask(width, kind.window) for kind in self.arch.features.kinds]
        x, cache, chosen = self._embed(tokens.flatten()), [], []
        for layer, kind in zip(self.weights.layers, self._kinds, strict=True):
            q, kv = self._project(x, layer, turns[kind])
            kv = kv.unflatten(0, (rows, width)).permute(2, 0, 3, 1, 4)  # [2, B, KV, P, d]
            keys, values = kv if isinstance(layer.qkv, Tensor) else self._expand(kv[0, :, 0], layer.qkv)
            q = q.unflatten(0, (rows, width)).transpose(1, 2)  # [B, H, P, d]
            y = sdpa.attend(q, keys, values, mask=masks[kind], scale=self._scale, sinks=layer.sinks)
            chosen += self._finish(x, y.transpose(1, 2).reshape(len(x), -1), layer)
            cache.append(kv)
        return x.unflatten(0, (rows, width)), cache, chosen

    def decode(
        self, tokens: Tensor, positions: Tensor, cache: Sequence[Tensor], window: int
    ) -> tuple[Tensor, list[Tensor]]:
        """Processes one token per row. `tokens` and `positions`: [B].

        Returns the hidden states [B, h] before the last norm, and the chosen experts per layer [B, k] (filled with the
        placeholder FREE for a dense layer; an empty list for a dense model).

        Reads the first B rows and `window` columns of the cache, and writes the keys and values of the tokens to the
        cache in place.
        """
        turns = [one[positions][:, None] for one in self.turns_up_to(window)]  # [B, 1, d / 2] per kind of attention
        index = torch.arange(len(tokens), device=self.device)
        biases = [self._bias(positions, window, kind.window) for kind in self.arch.features.kinds]
        x, chosen = self._embed(tokens), []
        for layer, kind, held in zip(self.weights.layers, self._kinds, cache, strict=True):
            q, kv = self._project(x, layer, turns[kind])
            held[:, index, :, positions] = kv
            chosen += self._finish(x, self._attend_cached(q, held[:, : len(tokens)], biases[kind], layer), layer)
        return x, chosen

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes the logits of the next token [..., V] from hidden states [..., h] before the last norm."""
        return F.linear(self._norm(hidden, self.weights.norm), self.weights.head)

    def _embed(self, tokens: Tensor) -> Tensor:
        """Returns the embeddings [N, h] of tokens [N]. Some model families scale them."""
        x = F.embedding(tokens, self.weights.embedding)
        return x if self._embedding_scale == 1.0 else x.mul_(self._embedding_scale)

    def _prompt_mask(self, width: int, reach: int | None) -> Tensor | None:
        """Returns the mask [P, P] of sliding-window attention in a prompt: True where a position attends to itself or
        to one of the `reach` - 1 positions before it. Returns None if every position attends to all earlier positions.
        """
        if reach is None or reach >= width:
            return None
        places = torch.arange(width, device=self.device)
        back = places[:, None] - places
        return (back >= 0) & (back < reach)

    def _bias(self, positions: Tensor, window: int, reach: int | None) -> Tensor:
        """Returns an additive attention mask: 0 for the KV cache columns that a row's token attends to, and -inf for
        all other columns. The shape is [B KV, 1, window] in float32 (with KV = 1 for latent attention), and [B, window]
        in other dtypes.
        """
        columns = torch.arange(window, device=self.device)
        hidden = columns > positions[:, None]
        if reach is not None:
            hidden |= columns <= positions[:, None] - reach
        bias = torch.where(hidden, -torch.inf, 0.0).to(self.dtype)  # [B, window]
        if self.dtype != torch.float32:
            return bias
        return bias[:, None].expand(-1, self._cached[1], -1).reshape(-1, 1, window)

    def _project(self, x: Tensor, layer: Layer, turns: Tensor) -> tuple[Tensor, Tensor]:
        """Computes queries, keys and values from `x` [N, h]. Returns the rotated queries [N, H, d], and the new entries
        of the KV cache: rotated keys and values [N, 2, KV, d], or [N, 1, 1, r + e] for latent attention.
        """
        if isinstance(layer.qkv, Latents):
            return self._project_latents(x, layer.norm, layer.qkv, turns)
        arch, turned = self.arch, self.arch.heads + self.arch.kv_heads
        fused = F.linear(self._norm(x, layer.norm), layer.qkv, layer.qkv_bias).unflatten(
            -1, (-1, arch.head_dim)
        )  # [N, H + 2 KV, d]
        both = fused[:, :turned]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = both.split([arch.heads, arch.kv_heads], dim=1)
            both = torch.cat([self._norm_heads(q, layer.q_norm), self._norm_heads(k, layer.k_norm)], dim=1)
        fused[:, :turned] = _turned(both, turns)
        return fused[:, : arch.heads], fused[:, arch.heads :].unflatten(1, (2, arch.kv_heads))

    def _project_latents(self, x: Tensor, norm: Tensor | None, own: Latents, turns: Tensor) -> tuple[Tensor, Tensor]:
        """For latent attention, computes queries and a latent from [N, h]. Returns rotated queries [N, H, d], and the
        normalized latent with the key's rotated elements [N, 1, 1, r + e].
        """
        low, eps = self._norm(x, norm), self.arch.features.latent_eps
        latent, shared = F.linear(low, own.down).split([self.arch.kv_rank, self.arch.rope_dim], dim=-1)
        if own.query_down is not None and own.query_norm is not None:
            low = self._norm(F.linear(low, own.query_down), own.query_norm, eps)
        q = F.linear(low, own.query).unflatten(-1, (self.arch.heads, -1))
        both = _turned(torch.cat([q[..., self._plain :], shared[:, None]], dim=1), turns)  # [N, H + 1, e]
        q[..., self._plain :] = both[:, :-1]
        held = torch.cat([self._norm(latent, own.norm, eps), both[:, -1].to(latent.dtype)], dim=-1)
        return q, held[:, None, None]

    def _expand(self, held: Tensor, own: Latents) -> tuple[Tensor, Tensor]:
        """Computes keys [B, H, P, d] and values [B, H, P, v] from the cached latents [B, P, r + e]."""
        latent, shared = held.split([self.arch.kv_rank, self.arch.rope_dim], dim=-1)
        both = F.linear(latent, own.up).unflatten(-1, (self.arch.heads, -1)).transpose(1, 2)  # [B, H, P, n + v]
        keys, values = both.split([self._plain, self.arch.value_dim], dim=-1)
        return torch.cat([keys, shared[:, None].expand(-1, self.arch.heads, -1, -1)], dim=-1), values

    def _attend_cached(self, q: Tensor, cache: Tensor, bias: Tensor, layer: Layer) -> Tensor:
        """Computes attention of one query per row and head over the KV cache. Queries [B, H, d] -> [B, H v]."""
        if isinstance(layer.qkv, Tensor):
            return self._attend(q, cache[0], cache[1], bias, layer.sinks)
        up = layer.qkv.up.unflatten(0, (self.arch.heads, -1))  # [H, n + v, r]
        query = torch.einsum("bhn,hnr->bhr", q[..., : self._plain], up[:, : self._plain])
        query = torch.cat([query, q[..., self._plain :]], dim=-1)
        latents = cache[0, ..., : self.arch.kv_rank]
        y = self._attend(query, cache[0], latents, bias).unflatten(-1, (self.arch.heads, -1))
        return torch.einsum("bhr,hvr->bhv", y, up[:, self._plain :]).flatten(1)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Computes attention of one query per row and head over the first L positions of the KV cache. Queries [B, H,
        d], keys [B, KV, L, d] and values [B, KV, L, v] -> [B, H v]. `sinks`: [H], one further score per head, which the
        softmax includes.

        In float32, two matmuls with a softmax between them are fastest on CPU. In lower precision these matmuls would
        round every score, and the log-probs would differ too much from the trainer's log-probs. The fused kernel that
        is used instead keeps scores in float32.
        """
        rows, kv_heads, window = len(q), keys.shape[1], bias.shape[-1]
        if self.dtype == torch.float32:
            keys, values = (held.flatten(0, 1)[:, :window] for held in (keys, values))  # [B KV, window, d or v]
            q = q.reshape(rows * kv_heads, -1, q.shape[-1])  # [B KV, H / KV, d]
            scores = torch.baddbmm(bias, q, keys.transpose(1, 2), alpha=self._scale)
            if sinks is not None:
                scores = torch.cat([scores, sinks.view(kv_heads, -1, 1).repeat(rows, 1, 1)], dim=-1)
            return torch.bmm(scores.softmax(dim=-1)[..., :window], values).view(rows, -1)
        keys, values = keys[:, :, :window], values[:, :, :window]
        # The H / KV queries that share a key head have the same mask, so pass them as positions of one sequence.
        q, mask = q.unflatten(1, (kv_heads, -1)), bias[:, None, None]
        y = sdpa.attend(q, keys, values, mask=mask, scale=self._scale, sinks=sinks)
        return y.reshape(rows, -1)

    def _finish(self, x: Tensor, attended: Tensor, layer: Layer) -> list[Tensor]:
        """Adds the attention output, computed from `attended` [N, H v], and then the feed-forward output to x [N, h] in
        place. Returns a list with the chosen experts [N, k] (the placeholder FREE in a dense layer), or an empty list
        for a dense model.
        """
        if layer.out_bias is not None:
            x.add_(layer.out_bias)
        if layer.out_after is None:
            x.addmm_(attended, layer.out.T)
        else:
            x.add_(self._norm(F.linear(attended, layer.out), layer.out_after))
        y = self._norm(x, layer.mlp_norm)
        if isinstance(layer.mlp, FeedForward):
            inner = gated(F.linear(y, layer.mlp.gate_up), self.arch.features.activation)
            if layer.mlp_after is None:
                x.addmm_(inner, layer.mlp.down.T)
            else:
                x.add_(self._norm(F.linear(inner, layer.mlp.down), layer.mlp_after))
            shape = (len(x), self.arch.features.experts_per_token)
            return [] if self._routing is None else [torch.full(shape, FREE, device=x.device)]
        assert self._routing is not None, "a model whose layers have experts has routers"
        return [add_experts(x, y, layer.mlp, self._routing)]

    def _norm_heads(self, x: Tensor, weight: Tensor) -> Tensor:
        """Normalizes every head separately if `weight` is [d], or all heads together if `weight` is [H d]. [N, H, d] ->
        [N, H, d]
        """
        return self._norm(x.flatten(1).unflatten(1, (-1, len(weight))), weight).view(x.shape)

    def _norm(self, x: Tensor, weight: Tensor | None, eps: float | None = None) -> Tensor:
        """Normalizes the last dimension. Returns x itself if `weight` is None.

        `eps`: epsilon of the norm; None uses the epsilon of the model's layers.
        """
        if weight is None:
            return x
        eps = self.arch.features.norm_eps if eps is None else eps
        if self.arch.features.norm_from_one:
            return F.rms_norm(x.float(), weight.shape, 1.0 + weight.float(), eps).type_as(x)
        if x.is_cuda:
            return F.rms_norm(x, weight.shape, weight, eps)
        # On CPU, torch runs rms_norm as nine small operations. The code below needs only five operations.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self._eps[eps], length, length, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).to(x.dtype).mul_(weight)

    def _rotary(self, length: int) -> list[Tensor]:
        """Computes e^(i angle) for every position and each kind of attention: complex64 [length, d / 2], where d is the
        size of the rotated part.
        """
        half, out = self.arch.rotated // 2, []
        for kind in range(len(self.arch.features.kinds)):
            cos, sin = self.arch.rotary(torch.arange(length), kind)
            out.append(torch.complex(cos[:, :half].contiguous(), sin[:, :half].contiguous()).to(self.device))
        return out

    def turns_up_to(self, length: int) -> list[Tensor]:
        """Returns tables of e^(i angle) for at least `length` positions, one for each kind of attention."""
        if length > len(self._turns[0]):
            self._turns = self._rotary(2 * length)
        return self._turns


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    """Applies rotary embeddings to pairs of adjacent elements. `x`: [N, heads, d]. `turns`: complex rotations [N, 1, d
    / 2]. Returns [N, heads, d] float32.
    """
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2)
