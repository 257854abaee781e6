"""A small GPT: causal, byte-level, embedding and output head tied. 1.25 million parameters at the default size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class GPTConfig:
    """The size of the network; ``dropout`` is above zero on purpose, so that the random generators matter."""

    vocabulary: int = 256
    context: int = 64
    width: int = 160
    heads: int = 5
    layers: int = 4
    dropout: float = 0.1


class Block(nn.Module):
    """One transformer layer: attention, then a two-layer network, each behind a normalisation and beside a skip."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.norm1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norm1(x))
        hidden = functional.gelu(self.up(self.norm2(x)))
        return x + functional.dropout(self.down(hidden), self.dropout, self.training)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        rate = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class GPT(nn.Module):
    """Predicts the next byte at every place of a window."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.places = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(_initialise)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy in nats per byte; both arguments are (batch, context) of int64."""
        x = self.tokens(inputs) + self.places(torch.arange(inputs.shape[1], device=inputs.device))
        x = functional.dropout(x, self.config.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
