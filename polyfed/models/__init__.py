"""Networks: the papers' own, torchvision's and the user's, each split into an extractor and a head."""

from polyfed.models.dropout import SeededDropout, seed_dropout, set_generator
from polyfed.models.features import FeaturePool
from polyfed.models.groups import GROUP_TITLES, GROUPS, default_auxiliary, default_features
from polyfed.models.heads import HEADS
from polyfed.models.networks import NETWORKS
from polyfed.models.proxy import ProxyExtractor
from polyfed.models.split import SplitNetwork, split_network
from polyfed.models.zoo import Architecture, Models, assign, parameter_count, resolve, smallest

__all__ = [
    "GROUPS",
    "GROUP_TITLES",
    "HEADS",
    "NETWORKS",
    "Architecture",
    "FeaturePool",
    "Models",
    "ProxyExtractor",
    "SeededDropout",
    "SplitNetwork",
    "assign",
    "default_auxiliary",
    "default_features",
    "parameter_count",
    "resolve",
    "seed_dropout",
    "set_generator",
    "smallest",
    "split_network",
]
