"""Following a run in TensorBoard, MLflow or Weights & Biases: a small file for each, fed.py gives them the numbers."""

from __future__ import annotations

from polyfed.errors import InputError, unknown_name

TRACKERS = ("tensorboard", "mlflow", "wandb")
"""What the setting `tracker` may name."""
NONE = "none"


def tracker_names(setting: str) -> list[str]:
    """The trackers that a setting names.

    >>> tracker_names("none"), tracker_names("tensorboard,wandb")
    ([], ['tensorboard', 'wandb'])
    """
    return [] if setting == NONE else setting.split(",")


def checked_trackers(value: object) -> str:
    """The setting `tracker` in its one form: none, or names with commas, each once.

    >>> checked_trackers(["wandb", "mlflow", "wandb"]), checked_trackers(None), checked_trackers("mlflow, wandb")
    ('wandb,mlflow', 'none', 'mlflow,wandb')
    """
    listed = value if isinstance(value, list | tuple) else [NONE if value is None else value]
    texts = [text for text in listed if isinstance(text, str)]
    if len(texts) < len(listed):
        choices = ", ".join([NONE, *TRACKERS])
        raise InputError(f"tracker is {value!r}, but must be one of {choices}, or several, separated by commas.")
    names = list(dict.fromkeys(name.strip().lower() for text in texts for name in text.split(",")))
    if names in ([], [NONE]):
        return NONE
    if NONE in names:
        raise InputError(f"tracker is '{','.join(names)}': give names or none, not both.")
    for name in names:
        if name not in TRACKERS:
            raise unknown_name("tracker", name, [NONE, *TRACKERS])
    return ",".join(names)
