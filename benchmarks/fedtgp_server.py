"""What FedTGP's training on the server costs in a round.

Ten participants send ten of 100 classes each (500 features); 100 server epochs in batches of 10, so 1000 steps that
each train all 100 prototypes. Prints milliseconds per round (best of several) beside the participants' training.

    python benchmarks/fedtgp_server.py [--repeats 3] [--device cpu]
"""

from __future__ import annotations

import argparse
import time

import torch
from dc_pfl_covariance import CLASSES, CLASSES_EACH, CLIENTS, clients_of, training_time

from polyfed.message import Message
from polyfed.methods.base import Reply, Server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    clients = clients_of("fedtgp", options.device)
    server = Server(0, clients.device)
    clients.method.start(server)
    generator = torch.Generator().manual_seed(0)
    replies = []
    for client in range(CLIENTS):
        prototypes = torch.rand(CLASSES_EACH, 500, generator=generator)
        labels = torch.arange(CLASSES_EACH) + CLASSES_EACH * client
        replies.append(Reply(client, Message({"prototypes": prototypes}, {"labels": labels})))
    times = []
    for server.round in range(1, options.repeats + 2):
        begin = time.perf_counter()
        clients.method.aggregate(server, replies)
        times.append(1000 * (time.perf_counter() - begin))
    training = training_time(options.device, options.repeats)
    print(
        f"{CLIENTS} participants, {CLASSES_EACH} of {CLASSES} classes each; {options.device}, torch {torch.__version__}"
    )
    print(f"server {min(times[1:]):.0f} ms (in the first round {times[0]:.0f} ms)")
    print(f"training of the participants, one epoch: {training:.0f} ms")


if __name__ == "__main__":
    main()
