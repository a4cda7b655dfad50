"""Tasks that go on from a pretrained BERT: its masked objective on other text, and fine-tuning on labelled text.

The checkpoint is MiniLM's (22.6 M parameters, 6 layers), which was tuned for sentence embeddings: it is not a raw BERT.
Its first layers are used, and the rows of its vocabulary that the text needs. Needs transformers and tokenizers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perf.convergence import data
from perf.convergence.tasks import Items, Prepared, Task

PAD, UNKNOWN, START, END, MASK = 0, 1, 2, 3, 4  # after `reduce`
SPECIAL = [0, 100, 101, 102, 103]  # the same in the checkpoint
WORDS = "embeddings.word_embeddings.weight"


@dataclass(frozen=True)
class BertTask(Task):
    layers: int = 3
    length: int = 64

    def bert(self, prepared: Prepared) -> nn.Module:
        from transformers import BertConfig, BertModel

        config = BertConfig(**json.loads(prepared.config))
        config.vocab_size, config.num_hidden_layers = len(prepared.weights[WORDS]), self.layers
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
        bert = BertModel(config, add_pooling_layer=False)
        missing = bert.load_state_dict(prepared.weights, strict=False).missing_keys
        assert not missing, missing
        return bert

    def prepared(self, folder: Path, rows: np.ndarray, train: Items, valid: Items, about: str) -> Prepared:
        from safetensors.torch import load_file

        weights = load_file(folder / "model.safetensors")
        weights[WORDS] = weights[WORDS][torch.from_numpy(rows)]
        own = {name: w for name, w in weights.items() if "pooler" not in name and "position_ids" not in name}
        own = {n: w for n, w in own.items() if not n.startswith("encoder") or int(n.split(".")[2]) < self.layers}
        return Prepared(train, valid, about, own, (folder / "config.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Masked(BertTask):
    """15 % of the tokens are predicted: 80 % of them masked, 10 % another token, 10 % as they are."""

    vocabulary: int = 4095
    held_out: int = 512

    def prepare(self, given: Path | None) -> Prepared:
        folder = data.checkpoint(given)
        text = data.prose(given)
        tokens, rows = reduce(np.concatenate(encode(folder, text.splitlines())), self.vocabulary)
        inner = self.length - 2
        windows = torch.from_numpy(tokens[: len(tokens) // inner * inner].reshape(-1, inner))
        windows = F.pad(F.pad(windows, (1, 0), value=START), (0, 1), value=END).short()
        train, valid = data.spans(len(windows), every=20, length=64)
        valid = valid[:: -(-len(valid) // self.held_out)]
        about = (
            f"the essays and novels in MiniLM's tokens, {windows.numel() / 1e6:.1f} million, of which the "
            f"{self.vocabulary:,} most frequent are kept; validation on {len(valid):,} windows of {self.length}"
        )
        fixed = self.draw((windows[valid],), torch.Generator().manual_seed(0))
        return self.prepared(folder, rows, (windows[train],), fixed, about)

    def draw(self, items: Items, generator: torch.Generator) -> Items:
        """Windows as they are read, the places to predict, and what is there."""
        windows = items[0].long()
        inner = windows.shape[1] - 2
        places = torch.rand(len(windows), inner, generator=generator).argsort(1)[:, : round(0.15 * inner)] + 1
        truth = windows.gather(1, places)
        dice = torch.rand(places.shape, generator=generator)
        others = torch.randint(MASK + 1, self.vocabulary, places.shape, generator=generator)
        shown = torch.where(dice < 0.8, MASK, torch.where(dice < 0.9, others, truth))
        return windows.scatter(1, places, shown), places, truth

    def model(self, prepared: Prepared) -> nn.Module:
        return MaskedModel(self.bert(prepared))

    def loss(self, model: nn.Module, items: Items) -> tuple[Tensor, Tensor]:
        windows, places, truth = items
        logits = model(windows, places)
        return F.cross_entropy(logits.flatten(0, 1), truth.flatten()), torch.zeros(())


class MaskedModel(nn.Module):
    """BERT's head: dense, GELU, norm, and the embedding again."""

    def __init__(self, bert: Any) -> None:
        super().__init__()
        self.bert, width = bert, bert.config.hidden_size
        self.dense, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.bias = nn.Parameter(torch.zeros(bert.config.vocab_size))

    def forward(self, windows: Tensor, places: Tensor) -> Tensor:
        hidden = self.bert(windows).last_hidden_state
        picked = hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1]))
        embedding = self.bert.embeddings.word_embeddings.weight
        return F.linear(self.norm(F.gelu(self.dense(picked))), embedding, self.bias)


@dataclass(frozen=True)
class Sentiment(BertTask):
    """Is a movie snippet's mean score positive?"""

    def prepare(self, given: Path | None) -> Prepared:
        folder, rows = data.checkpoint(given), data.snippets(given)
        encoded = [ids[: self.length - 2] for ids in encode(folder, [text for text, _ in rows])]
        flat, kept = reduce(np.concatenate(encoded), None)
        x = torch.full((len(rows), self.length), PAD, dtype=torch.int16)
        for row, ids in zip(x, np.split(flat, np.cumsum([len(ids) for ids in encoded])[:-1]), strict=True):
            row[0], row[len(ids) + 1] = START, END
            row[1 : len(ids) + 1] = torch.from_numpy(ids)
        y = torch.tensor([score > 0 for _, score in rows])
        train, valid = data.spans(len(rows), every=6, length=1)
        about = (
            f"{len(train):,} movie snippets for training and {len(valid):,} for validation, of which "
            f"{y[valid].float().mean():.0%} are positive"
        )
        return self.prepared(folder, kept, (x[train], y[train]), (x[valid], y[valid]), about)

    def model(self, prepared: Prepared) -> nn.Module:
        return Classifier(self.bert(prepared))

    def loss(self, model: nn.Module, items: Items) -> tuple[Tensor, Tensor]:
        logits, labels = model(items[0].long()), items[1].long()
        return F.cross_entropy(logits, labels), (logits.argmax(1) == labels).float().mean()


class Classifier(nn.Module):
    """The mean over tokens, as this checkpoint was tuned for, and a linear layer."""

    def __init__(self, bert: Any) -> None:
        super().__init__()
        self.bert, self.head = bert, nn.Linear(bert.config.hidden_size, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = tokens != PAD
        hidden = self.bert(tokens, attention_mask=mask.long()).last_hidden_state
        return self.head((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


def encode(folder: Path, texts: list[str]) -> list[np.ndarray]:
    """The checkpoint's tokens, without those that begin and end a text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return [np.asarray(e.ids, np.int64) for e in tokenizer.encode_batch(texts, add_special_tokens=False)]


def reduce(tokens: np.ndarray, most: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Tokens numbered anew: special ones, then the most frequent; others are unknown. And the rows they came from."""
    found, counts = np.unique(tokens, return_counts=True)
    frequent = found[np.argsort(-counts, kind="stable")]
    frequent = frequent[~np.isin(frequent, SPECIAL)]
    rows = np.concatenate([SPECIAL, frequent])[:most]
    number = np.full(max(tokens.max(), max(SPECIAL)) + 1, UNKNOWN)
    number[rows] = np.arange(len(rows))
    return number[tokens], rows
