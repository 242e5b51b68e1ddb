"""The rows that a run records: accuracies over clients, one row for each client, the shapes of messages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from polyfed.evaluation import PARTS, Part, Score
from polyfed.message import Message
from polyfed.methods.base import Reply
from polyfed.metrics import FURTHER
from polyfed.profile import Profile
from polyfed.server.scores import Best, Progress, further_means, summarise


def evaluation_rows(
    number: int, latest: Mapping[int, Score], participants: Mapping[int, Score], elapsed: float
) -> dict[tuple[Part, str], dict[str, Any]]:
    """By part and rule, the accuracy over all clients and over a round's participants."""
    rows: dict[tuple[Part, str], dict[str, Any]] = {}
    for part in PARTS:
        for rule in next(iter(latest.values())).rules:
            overall = summarise(latest, part, rule)
            # Where all take part, theirs is the mean over all.
            own = overall if participants.keys() == latest.keys() else summarise(participants, part, rule)
            rows[part, rule] = {
                "round": number,
                "part": part,
                "rule": rule,
                **overall,
                "accuracy_participants": own["accuracy_mean"],
                "simulated_seconds": elapsed,
                **further_means(latest, part, rule),
            }
    return rows


def client_rows(profiles: Mapping[int, Profile], progress: Progress) -> list[dict[str, Any]]:
    """One row for each client, with its accuracies, and with its name where clients have joined under names."""
    rows, named = [], any(profile.name for profile in profiles.values())
    for client, profile in profiles.items():
        best, score = progress.clients.get(client, Best()), progress.latest.get(client)
        rows.append(
            {
                "client": client,
                "architecture": profile.network,
                "parameters": profile.parameters,
                "train_samples": profile.train_samples,
                "validation_samples": profile.validation_samples,
                "test_samples": profile.test_samples,
                "classes": None if profile.classes is None else len(profile.classes),
                "accuracy_final": best.final,
                "accuracy_at_best_validation": best.at_best_validation,
                "accuracy_best": best.best,
                **{f"{metric}_final": score.measure(metric) if score else math.nan for metric in FURTHER},
                "largest_class": score.largest_class if score else math.nan,
                **({"name": profile.name} if named else {}),
            }
        )
    return rows


def message_shapes(number: int, downloads: Mapping[int, Message], sound: Sequence[Reply]) -> dict[str, Any]:
    """What one client's messages look like, in the first two rounds: many methods send nothing down in the first."""
    if number > 2 or not sound:
        return {}
    sent = sound[0]
    return {"messages": {"client": sent.client, "down": downloads[sent.client].shapes, "up": sent.message.shapes}}
