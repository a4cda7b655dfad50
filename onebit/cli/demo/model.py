"""A small causal transformer, and Python's own documentation to train it on: a token a character."""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

LENGTH = 64


class Text:
    """The text of Python's `help()`, cut into windows: the last tenth is held out."""

    def __init__(self) -> None:
        letters = "\n\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
        known, tokens = torch.frombuffer(bytearray(letters), dtype=torch.uint8).unique(return_inverse=True)
        self.letters = len(known)
        held = len(tokens) // 10
        self.train, self.held = tokens[:-held], tokens[-held:]

    def batch(self, size: int, source: torch.Generator) -> Tensor:
        """`size` windows from anywhere in the text to train on."""
        starts = torch.randint(len(self.train) - LENGTH, (size, 1), generator=source)
        return self.train[starts + torch.arange(LENGTH + 1)]

    def held_out(self, size: int) -> Tensor:
        """`size` windows spread evenly over the text that nobody trains on."""
        starts = torch.linspace(0, len(self.held) - LENGTH - 1, size).long()
        return self.held[starts.unsqueeze(1) + torch.arange(LENGTH + 1)]


class Transformer(nn.Module):
    """Logits of each next token; the embedding is tied."""

    def __init__(
        self,
        vocabulary: int,
        width: int = 128,
        layers: int = 2,
        heads: int = 4,
        length: int = LENGTH,
        bias: bool = False,
        std: float = 0.02,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        self.layers = nn.Sequential(*(Layer(width, heads, bias) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, bias=bias)
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=std)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layers(self.tokens(tokens) + self.places.weight)
        return self.norm(x) @ self.tokens.weight.T


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = (nn.LayerNorm(width, bias=bias) for _ in range(2))
        self.queries_keys_values = nn.Linear(width, 3 * width, bias)
        self.mix = nn.Linear(width, width, bias)
        self.up, self.down = nn.Linear(width, 4 * width, bias), nn.Linear(4 * width, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.queries_keys_values(self.norm_attention(x)).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2)
        queries, keys, values = heads.chunk(3, dim=1)
        attended = scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm_mlp(x))))


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross-entropy of each window's next characters, in nats."""
    return cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
