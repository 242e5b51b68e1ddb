"""Data: where images come from (`sources`), who gets which (`partitions`), how a batch is made and augmented.

A `Dataset` holds all images once; a client is three lists of indices into it:

    dataset = load_dataset("cifar10")
    clients = partition(dataset, "shares", clients=10, classes_per_client=2, seed=0)
    images, labels = dataset.batch(clients[0].train[:64])
"""

from polyfed.data.arrays import from_arrays, layout_hint
from polyfed.data.augment import Augmentation
from polyfed.data.dataset import ClientData, Dataset
from polyfed.data.files import save_npz
from polyfed.data.given import as_data
from polyfed.data.given_test import check_tested, chosen_test_set, describe_test_set
from polyfed.data.mapped import in_pieces
from polyfed.data.natural import describe_clients, with_clients, with_given, without_lists
from polyfed.data.own import guess_address, parse_address
from polyfed.data.partitions import PARTITIONS, SPLITS, partition, too_many_clients
from polyfed.data.source import Source
from polyfed.data.sources import SOURCES, default_folder, load_dataset
from polyfed.data.tables import Constants, from_frame, save_constants
from polyfed.data.torch_datasets import as_sample, from_torch_dataset

__all__ = [
    "Augmentation",
    "ClientData",
    "Constants",
    "Dataset",
    "PARTITIONS",
    "SOURCES",
    "SPLITS",
    "Source",
    "as_data",
    "as_sample",
    "check_tested",
    "chosen_test_set",
    "default_folder",
    "describe_clients",
    "describe_test_set",
    "from_arrays",
    "from_frame",
    "from_torch_dataset",
    "guess_address",
    "in_pieces",
    "layout_hint",
    "load_dataset",
    "parse_address",
    "partition",
    "save_constants",
    "save_npz",
    "too_many_clients",
    "with_clients",
    "with_given",
    "without_lists",
]
