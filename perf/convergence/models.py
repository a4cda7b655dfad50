"""The network for images that the convergence study trains from scratch."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class ResNet8(nn.Module):
    """A convolution, three residual blocks of 16, 32 and 64 channels, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.blocks = nn.Sequential(Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2))
        self.head = nn.Linear(64, 10)

    def features(self, images: Tensor) -> Tensor:
        """fp32 [n, 64], of images [n, 1, 28, 28] of 0 to 255: what the last layer reads."""
        return self.blocks(self.stem((images - 73.0) / 90.0)).mean((2, 3))  # their mean and deviation

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))


class Block(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        same = before == after and stride == 1
        self.short = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x))
