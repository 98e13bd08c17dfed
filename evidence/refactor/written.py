"""Four models in plain PyTorch, as a user writes them: their source is edited like that of a library."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# --- U-Net --------------------------------------------------------------------------------------------------------


class DoubleConv(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm1 = nn.GroupNorm(2, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norm2 = nn.GroupNorm(2, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(x)))


class Up(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(inputs, outputs, 1)
        self.conv = DoubleConv(2 * outputs, outputs)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        x = self.reduce(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        x = torch.cat([skip, x], dim=1)
        return self.conv(x)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([DoubleConv(3, 8), DoubleConv(8, 16)])
        self.middle = DoubleConv(16, 32)
        self.up = nn.ModuleList([Up(32, 16), Up(16, 8)])
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, images: Tensor) -> Tensor:
        skips = []
        x = images
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = self.pool(x)
        x = self.middle(x)
        for block, skip in zip(self.up, reversed(skips), strict=True):
            x = block(x, skip)
        return self.head(x)


# --- variational autoencoder --------------------------------------------------------------------------------------


class Encoder(nn.Module):
    def __init__(self, inputs: int, hidden: int, latent: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.mean = nn.Linear(hidden, latent)
        self.log_var = nn.Linear(hidden, latent)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        return self.mean(hidden), self.log_var(hidden)


class Decoder(nn.Module):
    def __init__(self, latent: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.inner = nn.Linear(latent, hidden)
        self.act = nn.Tanh()
        self.out = nn.Linear(hidden, outputs)

    def forward(self, z: Tensor) -> Tensor:
        hidden = self.act(self.inner(z))
        return torch.sigmoid(self.out(hidden))


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder(24, 16, 4)
        self.decoder = Decoder(4, 16, 24)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_var = self.encoder(x)
        std = torch.exp(0.5 * log_var)
        z = mean + std * torch.randn_like(std)
        return self.decoder(z), mean, log_var


# --- recurrent tagger ---------------------------------------------------------------------------------------------


class Features(nn.Module):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.shapes = nn.Embedding(4, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.shapes(ids % 4)
        return self.norm(x)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = Features(50, 12)
        self.rnn = nn.GRU(12, 10, batch_first=True, bidirectional=True)
        self.attend = nn.Linear(20, 1)
        self.head = nn.Linear(20, 7)

    def summary(self, states: Tensor, mask: Tensor) -> Tensor:
        scores = self.attend(states).squeeze(-1)
        scores = scores.masked_fill(mask == 0, -1e9)
        weights = scores.softmax(dim=-1)
        return (weights.unsqueeze(-1) * states).sum(dim=1)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.features(ids)
        states, _ = self.rnn(x)
        whole = self.summary(states, mask)
        return self.head(states + whole.unsqueeze(1))


# --- low-rank adapters --------------------------------------------------------------------------------------------


class LoRALinear(nn.Module):
    def __init__(self, inputs: int, outputs: int, rank: int = 2, alpha: int = 8) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.b = nn.Parameter(torch.zeros(outputs, rank))
        self.scaling = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(x, self.a)
        return self.base(x) + self.scaling * F.linear(low, self.b)


class AdaptedBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = LoRALinear(width, 2 * width)
        self.down = LoRALinear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.gelu(self.up(self.norm(x)))
        return x + self.down(inner)


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(AdaptedBlock(16) for _ in range(2))
        self.head = nn.Linear(16, 50)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
