"""Networks: the papers' own, torchvision's and the user's, each split into an extractor and a head."""

from polyfed.models.architectures import Architecture, Models, assign, parameter_count, resolve, smallest
from polyfed.models.catalogue import GROUP_TITLES, GROUPS, NETWORKS, default_auxiliary, default_features, default_group
from polyfed.models.layers import HEADS, FeaturePool, SeededDropout, seed_dropout, set_generator
from polyfed.models.networks import ProxyExtractor
from polyfed.models.split import SplitNetwork, split_network

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
    "default_group",
    "parameter_count",
    "resolve",
    "seed_dropout",
    "set_generator",
    "smallest",
    "split_network",
]
