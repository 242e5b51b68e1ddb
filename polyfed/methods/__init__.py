"""The methods, one file each; `base.py` says what a method is. To add one, write its file and list it here."""

from __future__ import annotations

from polyfed.methods.base import Method
from polyfed.methods.dc_pfl import DCPFL
from polyfed.methods.fd import FD
from polyfed.methods.fedapen import FedAPEN
from polyfed.methods.fedavg import FedAvg
from polyfed.methods.fedclassavg import FedClassAvg
from polyfed.methods.fedgen import FedGen
from polyfed.methods.fedgh import FedGH
from polyfed.methods.fedkd import FedKD
from polyfed.methods.fedl2g import FedL2G
from polyfed.methods.fedmrl import FedMRL
from polyfed.methods.fedorgp import FedORGP
from polyfed.methods.fedproto import FedProto
from polyfed.methods.fedre import FedRE
from polyfed.methods.fedssa import FedSSA
from polyfed.methods.fedtgp import FedTGP
from polyfed.methods.fml import FML
from polyfed.methods.lg_fedavg import LGFedAvg
from polyfed.methods.pfedafm import PFedAFM
from polyfed.methods.pfedes import PFedES
from polyfed.methods.protonorm import ProtoNorm
from polyfed.methods.standalone import Standalone
from polyfed.registry import Registry

METHODS: Registry[Method] = Registry(
    "method",
    "polyfed.Method",
    {
        method.name: method
        for method in (
            Standalone,
            FedAvg,
            LGFedAvg,
            FedProto,
            FedTGP,
            FedORGP,
            ProtoNorm,
            DCPFL,
            FML,
            FedAPEN,
            FedKD,
            FedMRL,
            FedGH,
            FedRE,
            FedGen,
            FedClassAvg,
            FD,
            FedL2G,
            FedSSA,
            PFedES,
            PFedAFM,
        )
    },
)
"""The methods by name; choices and errors come from here."""

find_method = METHODS.find
