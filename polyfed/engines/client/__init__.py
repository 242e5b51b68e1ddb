"""One client in plain PyTorch: the reference for every engine."""
