"""GPT-2's model and its first values (Radford et al. 2019): every linear layer N(0, 0.02^2), those that end a residual
branch smaller by sqrt(2 layers), biases 0, the embedding tied to the last layer.

It differs in the GELU, which is the exact one, and in dropout, of which there is none.
"""

from __future__ import annotations

import math

from torch import nn

from onebit.cli.demo.model import Transformer
from perf.learn.plan import Shape

STD = 0.02


def gpt2(shape: Shape) -> Transformer:
    """A new model, random by torch's seed."""
    model = Transformer(shape.vocabulary, shape.width, shape.layers, shape.heads, shape.length, bias=True, std=STD)
    last = STD / math.sqrt(2 * shape.layers)
    for layer in model.layers:
        for linear, std in (
            (layer.queries_keys_values, STD),
            (layer.mix, last),
            (layer.up, STD),
            (layer.down, last),
        ):
            nn.init.normal_(linear.weight, std=std)
            nn.init.zeros_(linear.bias)
    return model
