"""Encoders of Hugging Face's transformers from local files: a frozen body, and small adapters that are trained."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.errors import InputError, first_line
from polyfed.shapes import TokenShape

# What the queries and values of attention are called in the usual encoders.
ADAPTED = ("query", "value", "q_proj", "v_proj", "q_lin", "v_lin", "q", "v")


class Adapter(nn.Module):
    """LoRA: a frozen linear layer plus a trained product of two thin ones, which is zero at the start.

    >>> layer = nn.Linear(4, 3)
    >>> torch.equal(Adapter(layer, 2)(torch.ones(1, 4)), layer(torch.ones(1, 4)))
    True
    """

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.up(self.down(x))
        return result


def adapt(body: nn.Module, rank: int) -> int:
    """Freeze a network and put an adapter around its linear layers for attention; returns how many there are.

    Where none has one of the usual names, every linear layer gets an adapter.
    """
    body.requires_grad_(False)
    linear = {path: layer for path, layer in body.named_modules() if isinstance(layer, nn.Linear)}
    chosen = {path: layer for path, layer in linear.items() if path.rpartition(".")[2] in ADAPTED} or linear
    for path, layer in chosen.items():
        body.set_submodule(path, Adapter(layer, rank))
    return len(chosen)


class Encoder(nn.Module):
    """An encoder with a frozen body and adapters, the mean over what it says about tokens or patches, and a head."""

    def __init__(self, body: nn.Module, width: int, classes: int, padding: int | None, *, images: bool) -> None:
        super().__init__()
        self.body = body
        self.padding = padding
        self.images = images
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self._of_images(x) if self.images else self._of_tokens(x))
        return logits

    def _of_images(self, x: Tensor) -> Tensor:
        states: Tensor = self.body(pixel_values=x).last_hidden_state
        return states.flatten(2).mean(2) if states.dim() == 4 else states.mean(1)

    def _of_tokens(self, ids: Tensor) -> Tensor:
        real = torch.ones_like(ids) if self.padding is None else (ids != self.padding).long()
        # A sample of nothing but padding would have nothing to attend to.
        real = torch.where(real.any(1, keepdim=True), real, 1)
        states: Tensor = self.body(input_ids=ids, attention_mask=real).last_hidden_state
        counted = real.unsqueeze(-1)
        return (states * counted).sum(1) / counted.sum(1)


def encoder(source: str, input_shape: tuple[int, ...], classes: int, rank: int, name: str) -> Encoder:
    """The encoder in a folder, or in the local cache under that name; weights must be safetensors."""
    config, body = _loaded(source, name)
    images = getattr(body, "main_input_name", "input_ids") == "pixel_values"
    width = getattr(config, "hidden_size", None) or getattr(config, "d_model", None)
    if getattr(config, "is_encoder_decoder", False) or not isinstance(width, int):
        raise InputError(f"{name} is not an encoder with one width: give one such as BERT, DistilBERT or ViT.")
    if images and len(input_shape) != 3:
        raise InputError(f"{name} needs images of shape (channels, height, width), not {tuple(input_shape)}.")
    if not images:
        _check_tokens(config, input_shape, name)
    adapt(body, rank)
    padding = input_shape.padding if isinstance(input_shape, TokenShape) else None
    made = Encoder(body, width, classes, padding, images=images)
    # In evaluation mode, so that its dropout rests; that of the whole network would mean nothing.
    body.eval()
    return made


def _check_tokens(config: Any, input_shape: tuple[int, ...], name: str) -> None:
    if not isinstance(input_shape, TokenShape):
        raise InputError(f"{name} needs token ids, but samples are numbers of shape {tuple(input_shape)}.")
    known, longest = getattr(config, "vocab_size", None), getattr(config, "max_position_embeddings", None)
    if known is not None and input_shape.vocabulary > known:
        raise InputError(
            f"{name} knows {known} token ids, but the data have {input_shape.vocabulary}: use its own tokenizer."
        )
    if longest is not None and input_shape[0] > longest:
        raise InputError(f"{name} reads at most {longest} tokens, but samples have {input_shape[0]}: shorten them.")
    filler = getattr(config, "pad_token_id", None)
    if None not in (filler, input_shape.padding) and filler != input_shape.padding:
        raise InputError(
            f"{name} fills short samples with the id {filler}, but the data with {input_shape.padding}: use its own "
            "tokenizer."
        )


def _loaded(source: str, name: str) -> tuple[Any, nn.Module]:
    """A configuration and its encoder with its weights, from local files and without anyone's code."""
    transformers: Any = import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    path = Path(source).expanduser()
    place = str(path) if path.is_dir() else source
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        with torch.device("cpu"):  # weights from a file are no use without their values
            config = transformers.AutoConfig.from_pretrained(place, **options)
            body: nn.Module = transformers.AutoModel.from_pretrained(
                place, config=config, use_safetensors=True, attn_implementation="eager", dtype=torch.float32, **options
            )
    except (OSError, ValueError, ImportError, RuntimeError, KeyError) as error:
        raise InputError(
            f"{name} can't be read from local files ({first_line(error)}): give a folder that save_pretrained wrote, "
            "with config.json and model.safetensors, or a name in the local cache."
        ) from error
    return config, body
