"""The papers' CNNs."""

import torch
from torch import nn

from polyfed.models.cnn import convolutional


def test_relu_after_pooling_gives_the_numbers_of_relu_before() -> None:
    torch.manual_seed(0)
    network = convolutional((3, 32, 32), (4, 6), (20, 10), "cnn")
    usual = nn.Sequential(
        network.conv1, nn.ReLU(), nn.MaxPool2d(2), network.conv2, nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), network.fc1, nn.ReLU(), network.fc2, nn.ReLU(),
    )  # fmt: skip
    x = torch.randn(8, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    results = []
    for net in (network, usual):
        features = net(x)
        results.append([features, *torch.autograd.grad(features.square().sum(), list(network.parameters()))])
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))
