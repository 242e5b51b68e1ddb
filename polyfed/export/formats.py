"""The formats of an exported model: named tensors that polyfed reads, and programs that run without polyfed."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from polyfed.data import Dataset
from polyfed.errors import InputError, first_line, unknown_name
from polyfed.message import state_bytes
from polyfed.methods.base import Method
from polyfed.methods.parts.network import ClientNetwork

Format = Literal["safetensors", "torch", "onnx"]
FILES: dict[str, str] = {"safetensors": "model.safetensors", "torch": "model.pt2", "onnx": "model.onnx"}
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
Program: TypeAlias = Callable[[Tensor], Tensor]
"""From raw samples to probabilities [samples, classes]."""


class Predictor(nn.Module):
    """Preprocessing, network and the method's own rule as one network, from raw samples to probabilities."""

    scale: Tensor
    shift: Tensor

    def __init__(self, method: Method, network: ClientNetwork, dataset: Dataset) -> None:
        super().__init__()
        self.network = network
        self._rules = method.predict
        self.pixels = dataset.images.dtype == torch.uint8
        self._kind = dataset.images.dtype
        scale, shift = dataset.scaling(torch.device("cpu")) if self.pixels else (torch.ones(()), torch.zeros(()))
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift)
        self.requires_grad_(False)

    def forward(self, samples: Tensor) -> Tensor:
        x = samples.to(torch.float32) * self.scale + self.shift if self.pixels else samples
        scores = next(iter(self._rules(self.network, x).values()))
        return scores.softmax(1)

    def example(self, shape: tuple[int, ...]) -> Tensor:
        """Blank samples: an exported program must not carry anyone's data."""
        return torch.zeros(2, *shape, dtype=self._kind)


def check_format(name: str) -> None:
    """Raise for an unknown format, or one whose packages are missing."""
    if name not in FILES:
        raise unknown_name("format", name, get_args(Format))
    if name == "onnx":
        check_onnx()


def check_onnx() -> None:
    """Raise if the packages for ONNX are missing."""
    missing = [package for package in ONNX_PACKAGES if find_spec(package) is None]
    if missing:
        raise InputError(
            f"ONNX needs {' and '.join(missing)}, not installed here: install the extra with "
            "`pip install 'polyfed[onnx]'`, or use another format."
        )


def to_bytes(kind: str, predictor: Predictor, state: dict[str, Tensor], shape: tuple[int, ...], whose: str) -> bytes:
    """The model in that format; `state` is what the network holds, by name."""
    if kind == "safetensors":
        return state_bytes(state)
    try:
        with _quiet(), torch.no_grad():
            return (_torch_bytes if kind == "torch" else _onnx_bytes)(predictor, shape)
    except Exception as error:  # of the exporter, about what it can't translate
        if "specialized it to be a constant" in str(error):
            raise InputError(
                f"the model of {whose} can't be written in the format {kind}, because its network makes a constant of "
                "the number of samples: write x.shape[0] instead of len(x) or a number there, or use --format "
                "safetensors."
            ) from error
        raise InputError(
            f"the model of {whose} can't be written in the format {kind} ({first_line(error)}): use --format "
            "safetensors, or change the network."
        ) from error


def open_program(kind: str, content: bytes) -> Program:
    """A program as a function. One in PyTorch's format may unpickle what it holds, so the caller must trust it."""
    if kind == "torch":
        program = torch.export.load(io.BytesIO(content)).module()
        return lambda samples: program(samples)
    import onnxruntime  # an extra

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    (samples_in,) = session.get_inputs()
    return lambda samples: torch.from_numpy(session.run(None, {samples_in.name: samples.contiguous().numpy()})[0])


def _exported(predictor: Predictor, shape: tuple[int, ...]) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1)
    return torch.export.export(predictor, (predictor.example(shape),), dynamic_shapes={"samples": {0: batch}})


def _torch_bytes(predictor: Predictor, shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    torch.export.save(_exported(predictor, shape), file)
    return file.getvalue()


def _onnx_bytes(predictor: Predictor, shape: tuple[int, ...]) -> bytes:
    # ONNX has no distances between all pairs, so those to prototypes are spelled out.
    table = torch.export.default_decompositions()
    table[torch.ops.aten._cdist_forward.default] = _distances
    program = _exported(predictor, shape).run_decompositions(table)
    names: dict[str, Any] = {"input_names": ["samples"], "output_names": ["probabilities"]}
    found = torch.onnx.export(program, (), dynamo=True, verbose=False, **names)
    assert found is not None
    content: bytes = found.model_proto.SerializeToString()
    return content


def _distances(a: Tensor, b: Tensor, p: float, mode: int | None) -> Tensor:
    if p != 2:
        raise NotImplementedError(f"distances with the norm {p}")
    return (a[:, None] - b[None]).square().sum(-1).sqrt()


@contextmanager
def _quiet() -> Iterator[None]:
    """Exporters warn about their own inner workings, which a user can't act on."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
