"""The networks that transformers has no class for."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache


class DecodeStep(nn.Module):
    """A causal language model that is fed one token per sequence and every layer's past."""

    def __init__(self, language_model: nn.Module) -> None:
        super().__init__()
        self.language_model = language_model

    def forward(self, input_ids: Tensor, past: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        cache: Any = DynamicCache(past)
        logits = self.language_model(input_ids=input_ids, past_key_values=cache).logits
        outputs = {"logits": logits}
        for index, layer in enumerate(cache.layers):
            outputs |= {f"present_key_{index}": layer.keys, f"present_value_{index}": layer.values}
        return outputs


class ResidualBlock(nn.Module):
    """Two normalised convolutions beside a shortcut, with the time embedding added between."""

    def __init__(self, channels: int, out_channels: int, time_width: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(8, channels)
        self.conv1 = nn.Conv2d(channels, out_channels, 3, padding=1)
        self.time = nn.Linear(time_width, out_channels)
        self.norm2 = nn.GroupNorm(8, out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.shortcut = nn.Conv2d(channels, out_channels, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.conv1(nn.functional.silu(self.norm1(x)))
        hidden = hidden + self.time(time)[:, :, None, None]
        out: Tensor = self.shortcut(x) + self.conv2(nn.functional.silu(self.norm2(hidden)))
        return out


def enlarge(channels: int, out_channels: int, *, learned: bool) -> nn.Module:
    """Double height and width, by a transposed convolution or by repeating pixels."""
    if learned:
        return nn.ConvTranspose2d(channels, out_channels, 2, stride=2)
    smooth = nn.Conv2d(channels, out_channels, 3, padding=1)
    return nn.Sequential(nn.Upsample(scale_factor=2), smooth)


class UNet(nn.Module):
    """A U-Net over images (batch, channels, height, width) and one time (batch,) per image."""

    def __init__(self, channels: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        time_width = 2 * widths[0]
        self.frequencies = nn.Buffer(torch.logspace(0, -2, widths[0] // 2))
        self.time = nn.Sequential(
            nn.Linear(widths[0], time_width), nn.SiLU(), nn.Linear(time_width, time_width)
        )
        self.stem = nn.Conv2d(channels, widths[0], 3, padding=1)
        self.down, self.shrink = nn.ModuleList(), nn.ModuleList()
        self.up, self.grow = nn.ModuleList(), nn.ModuleList()
        for narrow, wide in pairwise(widths):
            self.down.append(ResidualBlock(narrow, narrow, time_width))
            self.shrink.append(nn.Conv2d(narrow, wide, 3, stride=2, padding=1))
            self.grow.insert(0, enlarge(wide, narrow, learned=wide == widths[-1]))
            self.up.insert(0, ResidualBlock(2 * narrow, narrow, time_width))
        self.middle = ResidualBlock(widths[-1], widths[-1], time_width)
        self.head = nn.Conv2d(widths[0], channels, 1)

    def forward(self, sample: Tensor, timestep: Tensor) -> dict[str, Tensor]:
        angles = timestep[:, None] * self.frequencies
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        x, skips = self.stem(sample), []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            skips.append(block(x, time))
            x = shrink(skips[-1])
        x = self.middle(x, time)
        for block, grow in zip(self.up, self.grow, strict=True):
            x = block(torch.cat([grow(x), skips.pop()], dim=1), time)
        return {"denoised": self.head(x)}


class Recommender(nn.Module):
    """DLRM: dense features (batch, features), and for every table rows to sum (batch, lookups)."""

    def __init__(self, features: int, rows: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(count, width) for count in rows)
        self.bottom = nn.Sequential(
            nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, width), nn.ReLU()
        )
        vectors = len(rows) + 1
        self.pairs = nn.Buffer(torch.tril_indices(vectors, vectors, -1))
        self.top = nn.Sequential(
            nn.Linear(width + self.pairs.shape[1], 128), nn.ReLU(), nn.Linear(128, 1)
        )

    def forward(self, dense: Tensor, indices: list[Tensor]) -> dict[str, Tensor]:
        dense = self.bottom(dense)
        sums = [table(ids).sum(1) for table, ids in zip(self.tables, indices, strict=True)]
        vectors = torch.stack([dense, *sums], dim=1)
        dots = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        clicks = self.top(torch.cat([dense, dots], dim=1)).squeeze(1)
        return {"probability": torch.sigmoid(clicks)}


class Experts(nn.Module):
    """GShard's layer of experts: tokens (groups, tokens, width), each worked on by two of them.

    Lepikhin et al., "GShard" (2020), algorithm 1 without random dispatch: within its group an
    expert has room for `capacity` tokens, and what comes later is left out.
    """

    def __init__(self, experts: int, width: int, hidden: int, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.gate = nn.Linear(width, experts, bias=False)
        self.wi = nn.Parameter(torch.empty(experts, width, hidden))
        self.wo = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        combine = self.combine(nn.functional.softmax(self.gate(x), dim=-1))
        dispatch = (combine > 0).to(x.dtype)
        inside = torch.einsum("gsec,gsm->egcm", dispatch, x)
        hidden = nn.functional.gelu(torch.einsum("egcm,emh->egch", inside, self.wi))
        made = torch.einsum("egch,ehm->egcm", hidden, self.wo)
        return torch.einsum("gsec,egcm->gsm", combine, made)

    def combine(self, gates: Tensor) -> Tensor:
        """Turn gates (groups, tokens, experts) into the weight that each token gives what it gets
        from each place of each expert."""
        experts = gates.shape[-1]
        first = nn.functional.one_hot(gates.argmax(-1), experts)
        second = nn.functional.one_hot((gates * (1 - first)).argmax(-1), experts)
        places1 = first.cumsum(1) - first
        places2 = second.cumsum(1) - second + first.sum(1, keepdim=True)
        first, second = first * (places1 < self.capacity), second * (places2 < self.capacity)
        weight1, weight2 = (gates * first).sum(-1), (gates * second).sum(-1)
        total = (weight1 + weight2).clamp(min=1e-9)
        return self.placed(weight1 / total, first, places1) + self.placed(
            weight2 / total, second, places2
        )

    def placed(self, weight: Tensor, chosen: Tensor, places: Tensor) -> Tensor:
        """Put each token's weight where its expert has its place."""
        place = nn.functional.one_hot((places * chosen).sum(-1), self.capacity)
        return weight[..., None, None] * chosen[..., None] * place[:, :, None, :]


class MixtureOfExperts(nn.Module):
    """A classifier of sequences (batch, seq): tokens mixed by a matrix, then a layer of experts."""

    def __init__(self, rows: int, seq: int, classes: int, width: int, **experts: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(rows, width)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.mix = nn.Linear(seq, seq, bias=False)
        self.experts = Experts(width=width, **experts)
        self.head = nn.Linear(width, classes)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        x = x + self.mix(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.experts(self.norm2(x))
        return {"logits": self.head(self.norm3(x).mean(1))}


class Recurrent(nn.Module):
    """A classifier of sequences (batch, seq): an LSTM both ways, one forwards, and a GRU."""

    def __init__(self, rows: int, classes: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(rows, width)
        self.both = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.forwards = nn.LSTM(2 * width, width, batch_first=True)
        self.last = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        x, _ = self.both(x)
        x, _ = self.forwards(x)
        _, state = self.last(x)
        return {"logits": self.head(state[0])}
