"""Settings for all tests."""

import torch

# Tiny networks gain nothing from several compute threads and lose a lot on a busy machine.
torch.set_num_threads(1)
