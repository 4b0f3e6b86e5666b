"""The decoder in plain torch: everything but what a family's attention and rotary scaling are."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from titanlite.models.attention import AttentionMask, attention_mask
from titanlite.models.decoder.config import DecoderConfig
from titanlite.models.family import LanguageModel
from titanlite.models.init import Init
from titanlite.models.layers import Attention, FeedForward, RopeScaling, RotaryEmbedding, RotaryTables


class Block(nn.Module):
    """Pre-norm transformer block: x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: DecoderConfig, attention: Attention) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.attention = attention
        self.ffn_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config.dim, config.ffn_dim)

    def forward(self, x: Tensor, rope: RotaryTables, mask: AttentionMask | None) -> Tensor:
        """x: (batch, seq_len, dim); mask: see Attention. Returns the same shape."""
        x = x + self.attention(self.attention_norm(x), rope, mask)
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Decoder(LanguageModel):
    """Weights are not initialised, and buffers are garbage until `init_buffers`.

    attention: makes that of a block. scaling: of the rotary wavelengths; None: none.
    `layers` is keyed "0" … "n_layers - 1", so that names stay the same where only some of the layers are kept.
    """

    def __init__(
        self, config: DecoderConfig, attention: Callable[[], Attention], scaling: RopeScaling | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings: nn.Embedding | None = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(index): Block(config, attention()) for index in range(config.n_layers)})
        self.norm: nn.RMSNorm | None = nn.RMSNorm(config.dim, config.norm_eps)
        self.output: nn.Linear | None = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.rope = RotaryEmbedding(config.head_dim, config.max_seq_len, config.rope_theta, scaling)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Let the output share the embedding's parameter, where the configuration ties them.

        To be called again after anything that replaces parameters one module at a time: to_empty, parallelize_module.
        """
        if self.config.tie_embeddings:
            assert self.tok_embeddings is not None, "tied, and on different stages"
            assert self.output is not None, "tied, and on different stages"
            self.output.weight = self.tok_embeddings.weight

    def init_buffers(self, device: torch.device) -> None:
        """Compute the rotary tables on `device`, in promote_types(the parameters' dtype, float32)."""
        dtype = next(self.parameters()).dtype
        self.rope.init_buffers(device, torch.promote_types(dtype, torch.float32))

    def forward(self, tokens: Tensor, positions: Tensor | None = None, document_ids: Tensor | None = None) -> Tensor:
        """Logits (batch, seq_len, vocab_size) of the token that follows each of `tokens`, int64 (batch, seq_len).

        positions: int64 (batch, seq_len) in [0, max_seq_len), for the rotary embeddings; None: 0, 1, 2, … in each row.
        document_ids: int64 (batch, seq_len); a position sees only positions of the same id, and none after itself;
        None: each row is one document.
        """
        rope = self.rope(positions)
        x = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        mask = attention_mask(document_ids, x.dtype, self.config.head_dim)
        for layer in self.layers.values():
            x = layer(x, rope, mask)
        x = x if self.norm is None else self.norm(x)
        return x if self.output is None else self.output(x)


def init(config: DecoderConfig, name: str) -> Init:
    """Distribution of the parameter `name`: norms 1, matrices normal with std 0.02.

    Matrices that write into the residual stream (wo, w2) are smaller by sqrt(2 * n_layers), the square root of how many
    write into it, so that its variance does not grow with depth (Radford et al., "GPT-2", 2019, section 2.3).
    """
    module = name.removesuffix(".weight").rpartition(".")[2]
    if module == "norm" or module.endswith("_norm"):
        return Init("ones")
    if module in ("wo", "w2"):
        return Init("normal", 0.02 / math.sqrt(2 * config.n_layers))
    assert module in ("tok_embeddings", "output", "wq", "wk", "wv", "w1", "w3"), f"no initial distribution for {name}"
    return Init("normal", 0.02)
