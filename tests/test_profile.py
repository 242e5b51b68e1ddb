"""What clients must have in common: an error names the clients, their networks and the remedy."""

from __future__ import annotations

import pytest

from polyfed.errors import InputError
from polyfed.methods import METHODS
from polyfed.profile import Profile, check_common


def test_an_error_names_all_networks_and_a_number_of_features_that_one_of_them_has() -> None:
    sizes = {"odd": 128, "residual": 128, "transformer": 32}
    profiles = {n: Profile(network=name, features=size) for n, (name, size) in enumerate(sizes.items())}
    method = METHODS["lg-fedavg"].__new__(METHODS["lg-fedavg"])
    with pytest.raises(InputError) as error:
        check_common(method, profiles)
    assert str(error.value) == (
        "lg-fedavg needs the same number of features in every client, but clients 0 and 1 (odd, residual) have 128 "
        "features and client 2 (transformer) has 32 features; bring them to one number (--features 32)."
    )
