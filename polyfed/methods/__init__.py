"""The methods, one file each; `base.py` says what a method is. To add one, write its file and list it here."""

from __future__ import annotations

from importlib.metadata import entry_points

from polyfed.addresses import load_trusted
from polyfed.errors import InputError, unknown_name
from polyfed.methods.base import Method
from polyfed.methods.dc_pfl import DCPFL
from polyfed.methods.fd import FD
from polyfed.methods.fedapen import FedAPEN
from polyfed.methods.fedavg import FedAvg
from polyfed.methods.fedclassavg import FedClassAvg
from polyfed.methods.fedgen import FedGen
from polyfed.methods.fedgh import FedGH
from polyfed.methods.fedkd import FedKD
from polyfed.methods.fedmrl import FedMRL
from polyfed.methods.fedproto import FedProto
from polyfed.methods.fedssa import FedSSA
from polyfed.methods.fedtgp import FedTGP
from polyfed.methods.fml import FML
from polyfed.methods.lg_fedavg import LGFedAvg
from polyfed.methods.pfedes import PFedES
from polyfed.methods.standalone import Standalone

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        Standalone,
        FedAvg,
        LGFedAvg,
        FedProto,
        FedTGP,
        DCPFL,
        FML,
        FedAPEN,
        FedKD,
        FedMRL,
        FedGH,
        FedGen,
        FedClassAvg,
        FD,
        FedSSA,
        PFedES,
    )
}


OWN = frozenset(METHODS)
"""The names of polyfed's own methods."""


def register(method: type[Method]) -> str:
    """Register the user's own method under its name, which is returned; a new class replaces an older one."""
    name = getattr(method, "name", None)
    if not isinstance(name, str) or not name:
        raise InputError(f"the method {method.__name__} has no name: give its class one, such as name = 'my-method'.")
    if name in OWN and METHODS[name] is not method:
        raise InputError(
            f"the method {method.__name__} is called '{name}', like one of polyfed's own: give its class another name."
        )
    METHODS[name] = method
    return name


def find_method(name: str) -> type[Method]:
    """The method of that name; an unknown one raises an error that suggests the nearest.

    A name is one of polyfed's own, one that another package offers (an entry point in the group `polyfed.methods`), or
    an address, `package.module:Class`.
    """
    if name in METHODS:
        return METHODS[name]
    if ":" in name:
        METHODS[name] = _checked(load_trusted(name, "method"), name)
        return METHODS[name]
    offered = {point.name: point for point in entry_points(group="polyfed.methods")}
    if name in offered:
        METHODS[name] = _checked(offered[name].load(), name)
        return METHODS[name]
    raise unknown_name("method", name, [*METHODS, *offered])


def _checked(found: object, name: str) -> type[Method]:
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise InputError(f"'{name}' is not a method: it must be a subclass of polyfed.Method.")
    return found
