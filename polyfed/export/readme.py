"""The README.md of an exported model: what it is, how good it was, how to use it, and what its owner has to fill in."""

from __future__ import annotations

from polyfed.export.card import Inputs, ModelCard
from polyfed.methods import METHODS
from polyfed.server.scores import percent
from polyfed.shapes import kind_of

RULES = {
    "classifier": "the classifier of the client's own network",
    "prototypes": "the class whose prototype is nearest to the sample's features",
    "ensemble": "a learned mixture of the client's own network and a shared one",
    "fused": "the client's own head on features of its own and a shared extractor",
}
"""The methods' own rules of prediction, in words."""


def readme(card: ModelCard) -> str:
    """The text for people."""
    title = METHODS[card.method["name"]].title if card.method["name"] in METHODS else card.method["name"]
    names = ", ".join(card.inputs.class_names) or f"0 to {card.inputs.classes - 1}"
    return f"""# Model of client {card.client}, trained with {title} on {card.inputs.data}

| | |
|---|---|
| data | {card.inputs.data} |
| method | {card.method["name"]}, {card.rounds} rounds |
| network | {card.network} |
| prediction | {RULES.get(card.rule, f"the rule '{card.rule}' of {title}")} |
| input | {_input(card.inputs)} |
| classes | {names} |
| accuracy in the run | {_accuracy(card.accuracy, card.test_samples)} |
| accuracy as exported | {_accuracy(card.accuracy_exported, card.test_samples)} |
| checked on | {card.checked_on} |
| licence | {card.licence or "(to fill in)"} |
| must not be used for | {card.must_not_be_used_for or "(to fill in)"} |

The model is personal: it was trained for the data of one client, and its accuracy was measured on that client's own
test samples.

## Use

{_use(card)}

`card.json` holds the same for programs.
"""


def _input(inputs: Inputs) -> str:
    shape = "×".join(str(side) for side in inputs.shape)
    if inputs.vocabulary is not None:
        filler = "" if inputs.padding is None else f"; {inputs.padding} fills short samples"
        return f"int64 token ids of shape {shape}, from 0 to {inputs.vocabulary - 1}{filler}"
    if inputs.table is not None:
        return f"rows with the columns {', '.join(inputs.table.columns)}"
    if not inputs.pixels:
        return f"float32 samples of shape {shape}, prepared as in training"
    mean, std = (", ".join(f"{value:.6g}" for value in values) for values in (inputs.mean, inputs.std))
    scaling = f"(pixel / 255 − mean) / std, mean {mean}, std {std}"
    return f"uint8 images of {shape} (channels, height, width), normalised as {scaling}"


def _accuracy(share: float | None, samples: int | None) -> str:
    return "not known" if share is None else f"{percent(share)} of {samples} test samples"


def _use(card: ModelCard) -> str:
    if card.file.endswith(".safetensors"):
        what, file = ("images", "IMAGE.png") if card.inputs.pixels else ("samples", "SAMPLES.npz")
        if card.inputs.table is not None:
            what, file = "frame", "ROWS.csv"
        code = f"""import polyfed

model = polyfed.load_client("FOLDER")
print(model.predict({what}).names)"""
        return f"```python\n{code}\n```\n\nor `polyfed predict FOLDER {file}`."
    kind = "uint8" if card.inputs.pixels else str(kind_of(card.inputs.input_shape)).removeprefix("torch.")
    shape = ", ".join(["batch", *(str(side) for side in card.inputs.shape)])
    what = f"`{card.file}` turns {kind} samples [{shape}] into probabilities [batch, {card.inputs.classes}]."
    if card.inputs.table is not None:
        what += (
            " A row becomes such a sample as `inputs.table` in `card.json` says: first the numbers as (value − mean) / "
            "std, with `fill` for a missing value, then for each category a 1 at its level and 0 at the others (all 0 "
            "for a level among the `unseen`). `polyfed predict FOLDER ROWS.csv --trust` does both."
        )
    if card.file.endswith(".pt2"):
        code = f"""import torch

program = torch.export.load("{card.file}").module()
probabilities = program(samples)"""
        warning = "Opening such a file can run code, so open it only if you trust where it came from."
    else:
        code = f"""import onnxruntime

session = onnxruntime.InferenceSession("{card.file}")
(probabilities,) = session.run(None, {{"samples": samples}})"""
        warning = "It needs no PyTorch and no polyfed."
    return f"{what} {warning}\n\n```python\n{code}\n```"
