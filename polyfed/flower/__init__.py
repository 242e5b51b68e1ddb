"""Flower as a transport: its SuperLink at the server, its fleet protocol between server and sites.

No other package imports Flower. A site answers questions with its own installed code. It fetches no app from the
server, and there is no interface through which anybody could submit one: of Flower's three interfaces only the
fleet's is served.
"""

from __future__ import annotations

import logging
import os
from importlib.metadata import PackageNotFoundError, version

from polyfed.errors import InputError

FLWR = "1.41.0"
"""The version that this package is written for: it uses parts that Flower may change in any release."""


def check_installed() -> None:
    """Raise unless the right version of Flower is there; keep it quiet, and off the internet."""
    try:
        found = version("flwr")
    except PackageNotFoundError as error:
        raise InputError("a federation needs Flower: install it with `pip install 'polyfed[flower]'`.") from error
    if found != FLWR:
        raise InputError(
            f"polyfed works with Flower {FLWR}, but {found} is installed: run `pip install 'polyfed[flower]'`."
        )
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"
    import flwr.supercore.logger  # noqa: F401  (it sets its own level first)

    for name in ("flwr", "httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
