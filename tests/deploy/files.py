"""Files of a small federation, for tests: terms, members' data, and a network of a member's own."""

from __future__ import annotations

import base64
import ssl
from pathlib import Path
from typing import Any

import torch
import yaml

from polyfed.data import Dataset, save_npz
from tests import support

NAMES = ("amber", "birch", "cedar")
HOSTS = ("fl.example.org", "10.0.0.5", "::1")
"""The server's own names, in its certificate."""
OWN_NETWORK = """
from torch import nn

class Mine(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        size = input_shape[0] * input_shape[1] * input_shape[2]
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(size, 9), nn.BatchNorm1d(9), nn.Dropout(0.2), nn.ReLU())
        self.out = nn.Linear(9, classes)

    def forward(self, x):
        return self.out(self.body(x))
"""


def public_key(number: int) -> str:
    """A line with the form of a public key, another one for every number."""
    fields = [b"ecdsa-sha2-nistp384", b"nistp384", b"\x04" + bytes([number]) * 96]
    content = b"".join(len(field).to_bytes(4, "big") + field for field in fields)
    return f"ecdsa-sha2-nistp384 {base64.b64encode(content).decode()}"


def terms(**changes: Any) -> dict[str, Any]:
    """The content of federation.yaml; changes of `task` and `server` are made one by one."""
    task = {
        "classes": ["a", "b", "c", "d"], "input_shape": [1, 6, 6], "mean": [0.5], "std": [0.25], "features": 6,
        "auxiliary": "tests.support:Narrow",
    }  # fmt: skip
    content: dict[str, Any] = {
        "name": "trial-1",
        "method": "fedproto",
        "rounds": 2,
        "training": {"batch_size": 8, "lr": 0.1},
        "task": task,
        "members": {name: public_key(number) for number, name in enumerate(NAMES)},
    }
    for name, value in changes.items():
        content[name] = (
            {**content.get(name, {}), **value} if name in ("task", "server") and value is not None else value
        )
    return {name: value for name, value in content.items() if value is not None}


def write_terms(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "federation.yaml"
    path.write_text(yaml.safe_dump(terms(**changes), sort_keys=False))
    return path


def classes_only(dataset: Dataset, classes: list[int], start: int = 0) -> Dataset:
    """The samples of some classes, every third one from `start`."""
    chosen = [i for i, label in enumerate(dataset.labels.tolist()) if label in classes][start::3]
    return dataset.only(torch.tensor(chosen))


def write_member(folder: Path, name: str, *, classes: tuple[int, ...] = (0, 1), start: int = 0, **changes: Any) -> Path:
    """site.yaml of a member with some classes of the tiny dataset as npz, next to it."""
    folder.mkdir(parents=True, exist_ok=True)
    save_npz(classes_only(support.tiny_dataset(), list(classes), start), folder / "own.npz")
    content = {
        "name": name,
        "federation": "../federation.yaml",
        "server": "127.0.0.1:9443",
        "data": "npz:own.npz",
        "split": "6:2:2",
        "network": "tests.support:Wide",
        "device": "cpu",
        **changes,
    }
    path = folder / "site.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))
    return path


def handshake(authority: Path, folder: Path, host: str) -> None:
    """A TLS handshake in memory; raises what the client or the server says against it."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(folder / "server.crt", folder / "server.key")
    visiting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    visiting.verify_flags |= ssl.VERIFY_X509_STRICT  # the default of newer versions of Python
    visiting.load_verify_locations(authority)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = visiting.wrap_bio(down, up, server_hostname=host)
    server = serving.wrap_bio(up, down, server_side=True)
    waiting = [client, server]
    for side in [client, server] * 4:
        if side in waiting:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            waiting.remove(side)
    assert not waiting


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a folder, by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}
