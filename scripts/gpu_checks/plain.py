"""The hand-written loop that the benchmark compares with: a Llama decoder in plain torch, with nothing of titanlite.

Parameters have the names of titanlite's model, so that the weights of one load into the other.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, rms_norm, scaled_dot_product_attention, silu


class Attention(nn.Module):
    def __init__(self, dim: int, n_heads: int, n_kv_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // n_heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        result: Tensor = self.wo(out.transpose(1, 2).flatten(2))
        return result


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.w2(silu(self.w1(x)) * self.w3(x))
        return result


class Norm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Block(nn.Module):
    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, hidden_dim: int, eps: float) -> None:
        super().__init__()
        self.attention_norm = Norm(dim, eps)
        self.attention = Attention(dim, n_heads, n_kv_heads)
        self.ffn_norm = Norm(dim, eps)
        self.feed_forward = FeedForward(dim, hidden_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        result: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return result


class PlainDecoder(nn.Module):
    """Returns the mean loss of tokens and labels, int64 (batch, seq_len); labels of -100 do not count.

    compute: dtype of the residual stream; products are computed in it by autocast.
    """

    def __init__(
        self,
        dim: int,
        n_layers: int,
        n_heads: int,
        n_kv_heads: int,
        ffn_dim: int,
        vocab_size: int,
        norm_eps: float,
        compute: torch.dtype,
    ) -> None:
        super().__init__()
        self.compute = compute
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        blocks = {str(index): Block(dim, n_heads, n_kv_heads, ffn_dim, norm_eps) for index in range(n_layers)}
        self.layers = nn.ModuleDict(blocks)
        self.norm = Norm(dim, norm_eps)
        self.output = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens).to(self.compute)
        for layer in self.layers.values():
            x = layer(x, cos, sin)
        return self.loss(x, labels)

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.output(self.norm(x)).flatten(0, 1)
        return cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels.flatten())


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rotary_tables(seq_len: int, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, sin), each (seq_len, head_dim / 2), without a scaling of wavelengths."""
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float64), frequencies)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def plain_step(
    model: PlainDecoder,
    optimizer: torch.optim.Optimizer,
    tokens: Tensor,
    labels: Tensor,
    tables: tuple[Tensor, Tensor],
    mark: Callable[[], None],
) -> Tensor:
    """Forward, backward, clip, update; returns the loss. mark: called before and after each of the three parts."""
    mark()
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=model.compute == torch.bfloat16):
        loss: Tensor = model(tokens, labels, *tables)
    mark()
    loss.backward()
    mark()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    mark()
    return loss.detach()


def compile_plain(model: PlainDecoder, backend: str) -> None:
    """Compile each block, and the head with the loss."""
    for layer in model.layers.values():
        layer.compile(backend=backend, fullgraph=True)
    model.loss = torch.compile(model.loss, backend=backend, fullgraph=True)  # type: ignore[method-assign]
