"""Settings for all tests."""

import os

import torch

# Without a GPU, the kernels written for one are interpreted.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Tiny networks gain nothing from several compute threads and lose a lot on a busy machine.
torch.set_num_threads(1)
