"""One site's own network: polyfed needs nothing but the class."""

from torch import Tensor, nn


class Strokes(nn.Module):
    """Looks for strokes with large filters."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.strokes = nn.Conv2d(1, 12, kernel_size=9, stride=3)
        self.hidden = nn.Linear(12 * 7 * 7, 48)
        self.head = nn.Linear(48, classes)

    def forward(self, x: Tensor) -> Tensor:
        found = self.strokes(x).relu().flatten(1)
        return self.head(self.hidden(found).relu())
