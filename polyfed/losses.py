"""Losses that clients and the server share, one value per sample."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy, one value per sample."""
    if has_torch_function((logits, labels)):  # as PyTorch's own functions, so that an engine can compute it otherwise
        values: Tensor = handle_torch_function(cross_entropy, (logits, labels), logits, labels)
        return values
    # Not PyTorch's own, which looks for labels to ignore: that means many small kernels when clients train as one.
    exact = torch.promote_types(logits.dtype, torch.float32)
    return -nn.functional.log_softmax(logits, 1, dtype=exact).gather(1, labels[:, None])[:, 0]
