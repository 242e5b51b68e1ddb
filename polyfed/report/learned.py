"""What can be drawn only from models: prototypes, features, enhanced images."""

from __future__ import annotations

import base64
import io
from copy import deepcopy

import pandas as pd
import torch
from torch import Tensor

from polyfed import api
from polyfed.errors import InputError, PolyfedError
from polyfed.report.data import Run
from polyfed.reproduce.measures import features, margins

SAMPLES = 8
"""Test samples of a client whose enhanced images are shown."""


def prototypes(run: Run) -> pd.DataFrame | None:
    """Distances of all pairs of global prototypes, and each class's margin; None if the server has no prototypes.

    A run without models raises an `InputError`.
    """
    state = run.folder.server_state()
    if "state.prototypes.vectors" not in state:
        return None
    known = state["state.prototypes.known"].nonzero().flatten()
    vectors = state["state.prototypes.vectors"][known]
    apart = torch.cdist(vectors, vectors, compute_mode="donot_use_mm_for_euclid_dist")
    nearest = margins(vectors)
    return pd.DataFrame(
        {"method": run.name, "class": one, "other": other, "distance": apart[row, column].item(),
         "margin": nearest[row].item()}
        for row, one in enumerate(known.tolist())
        for column, other in enumerate(known.tolist())
    )  # fmt: skip


def load(run: Run, *, trust: bool) -> api.Result:
    """The run with its data and networks; an `InputError` says why they can't be loaded."""
    try:
        result = api.resume(run.path, progress=False, trust=trust)
        _ = result.population, result.server, result.network(0)
    except InputError:
        raise
    except (PolyfedError, OSError, RuntimeError, KeyError) as error:
        raise InputError(str(error)) from error
    return result


def feature_points(result: api.Result) -> pd.DataFrame:
    """Features of some test samples of all clients in two dimensions."""
    return pd.DataFrame(features(result))


def proxy_pictures(result: api.Result, client: int = 0) -> pd.DataFrame | None:
    """Test images of a client beside what its own and the global proxy make of them; None for any method but pFedES."""
    network, population = result.network(client), result.population
    state = {name: tensor for name, tensor in result.server.state.items() if name.startswith("proxy.")}
    if not hasattr(network, "proxy") or not state or len(population.dataset.input_shape) != 3:
        return None
    shared = deepcopy(network.proxy)
    shared.load_state_dict({name.removeprefix("proxy."): tensor for name, tensor in state.items()}, strict=False)
    with torch.no_grad():
        x, _ = population.dataset.batch(population.data[client].test[:SAMPLES])
        x = x.cpu()
        kinds = {"original": x, "own proxy": network.proxy(x), "global proxy": shared(x)}
    return pd.DataFrame(
        {"kind": kind, "sample": number, "url": _png(image)}
        for kind, images in kinds.items()
        for number, image in enumerate(images)
    )


def _png(image: Tensor) -> str:
    """A picture as a data address, from its darkest value to its brightest."""
    from PIL import Image

    low, high = image.min(), image.max()
    scaled = ((image - low) / (high - low).clamp(min=1e-12) * 255).to(torch.uint8)
    pixels = scaled.permute(1, 2, 0).numpy() if len(image) == 3 else scaled[0].numpy()
    drawn = io.BytesIO()
    Image.fromarray(pixels).resize((96, 96), Image.Resampling.NEAREST).save(drawn, format="png")
    return "data:image/png;base64," + base64.b64encode(drawn.getvalue()).decode()
