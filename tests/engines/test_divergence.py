"""Training that diverges is noticed wherever it happens, also where no loss comes after it."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from polyfed.engines import SequentialEngine, ThreadsEngine, VectorizedEngine
from polyfed.errors import DivergedError
from polyfed.methods.base import Batch, ClientNetwork, Phase
from polyfed.methods.parts.tools import cross_entropy
from tests import support

ENGINES = [SequentialEngine, ThreadsEngine, VectorizedEngine]
ONE_STEP: dict[str, Any] = {"rounds": 1, "batch_size": 100}


def steep_loss(net: ClientNetwork, batch: Batch) -> Tensor:
    return 1e8 * cross_entropy(net(batch.x), batch.y)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("breaks", ["first", "second"])
def test_the_very_last_step_is_checked_too(tmp_path: Path, engine: Any, breaks: str) -> None:
    """One batch in each phase: the loss before the only step is finite, the weights after it are not.

    If the first phase breaks the extractor, the loss of the second is not finite either; all engines name a phase that
    is broken, the one that trains clients one after another the first.
    """
    federation = support.federation(tmp_path, "standalone", engine=engine, **ONE_STEP)
    method = federation.engine.population.method
    parts = {"first": "model.extractor", "second": "model.head"}
    phases = [
        Phase(name, trains=(part,), loss=steep_loss, epochs=1, lr=1e38)
        if name == breaks
        else Phase(name, trains=(part,), loss=method.loss, epochs=1)
        for name, part in parts.items()
    ]
    method.phases = lambda: phases  # type: ignore[method-assign]
    phase = "(first|second)" if engine is VectorizedEngine and breaks == "first" else breaks
    words = f"of client \\d (are|is) no longer finite in round 1, phase '{phase}': lower the learning rate"
    with pytest.raises(DivergedError, match=words) as caught:
        federation.run()
    assert breaks == "first" or "the weights of client" in str(caught.value)
    federation.engine.close()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", ["fedproto", "fedgh", "dc-pfl"])
def test_statistics_that_overflow_are_the_clients_divergence(tmp_path: Path, engine: Any, method: str) -> None:
    """Weights of about 1e25 are finite, but what two layers make of them is not."""
    federation = support.federation(tmp_path, method, engine=engine, lr=1e26, **ONE_STEP)
    with pytest.raises(
        DivergedError, match=r"the class statistics of client \d are no longer finite in round 1: lower"
    ):
        federation.run()
    federation.engine.close()
