"""The hook of an embedding: rows saved whole, token rows, and LoRA on the table.

    E'[id] = E[id] + scale * A[:, id] B^T          A [rank, tokens], B [width, rank]

An embedding that scales what it looks up (`embed_scale`) scales the adapter's part as well.
"""

from __future__ import annotations

import torch

from .contents import Replacement
from .hooks import SiteHook
from .ops.reference import pair_views
from .routing import Route


class EmbeddingHook(SiteHook):
    """Changes what an embedding looks up, row by row."""

    feature_dims = 0

    def apply(self, out: torch.Tensor, x: torch.Tensor, route: Route, *, fresh: bool) -> torch.Tensor:
        """`out` [..., width] for the token ids `x` [...]; out of place, and differentiable in `out`."""
        self.check(x, out, route)
        flat, ids = out.reshape(-1, self.out_features), x.reshape(-1)
        parts = []
        for row, first, end in route.spans(len(flat), self.path):
            base, tokens = flat[first:end], ids[first:end]
            for slot, weight in route.rows[row]:
                replacement = route.contents[slot].replacements.get(self.index)
                if replacement is not None:
                    whole = weight == 1.0 and len(route.rows[row]) == 1
                    found = self._looked_up(flat[first:end], tokens, replacement)
                    base = found if whole else (base.float() + weight * (found.float() - flat[first:end].float())).to(out.dtype)
                base = self._adapted(base, tokens, slot, weight)
            parts.append(base)
        return torch.cat(parts).view(out.shape)

    def _looked_up(self, base: torch.Tensor, ids: torch.Tensor, replacement: Replacement) -> torch.Tensor:
        if replacement.weight is not None:
            base = replacement.weight[ids].to(base.dtype) * self._scale(base.dtype)
        if replacement.ids is not None and replacement.rows is not None:
            at = torch.searchsorted(replacement.ids, ids).clamp(max=len(replacement.ids) - 1)
            rows = replacement.rows[at].to(base.dtype) * self._scale(base.dtype)
            base = torch.where((replacement.ids[at] == ids).unsqueeze(1), rows, base)
        return base

    def _adapted(self, base: torch.Tensor, ids: torch.Tensor, slot: int, weight: float) -> torch.Tensor:
        pair = pair_views(self.lora.weights, slot, self.index)
        if pair is None:
            return base
        a, b, scale = pair
        with torch.autocast(base.device.type, enabled=False):
            delta = (a[:, ids].T.float() @ b.float().T) * (weight * scale)
        return (base.float() + delta * self._scale(torch.float32)).to(base.dtype)

    def _scale(self, dtype: torch.dtype) -> torch.Tensor:
        scale = getattr(self.module(), "embed_scale", 1.0)
        return torch.as_tensor(scale, dtype=dtype)
