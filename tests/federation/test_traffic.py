"""A recording of all that the sites of a run sent, next to what they had announced; and who listens meanwhile."""

from __future__ import annotations

import base64
import getpass
import json
import platform
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'polyfed[flower]'")

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, verify_signature

from polyfed.deploy import keys
from polyfed.deploy.announce import Announcement
from tests.federation import support
from tests.federation.recorder import Recorder

HEADERS = {
    "accept", "accept-encoding", "connection", "content-length", "content-type", "flwr-public-key", "flwr-signature",
    "flwr-timestamp", "host", "user-agent",
}  # fmt: skip
CALLS = {
    "activate-node", "confirm-message-received", "deactivate-node", "pull-messages", "pull-object", "push-messages",
    "push-object", "send-node-heartbeat",
}  # fmt: skip


def checked(home: Path, name: str) -> dict[str, Any]:
    """What `polyfed site check` says."""
    command = [sys.executable, "-m", "polyfed", "site", "check", f"{name}.yaml", "--json"]
    found = subprocess.run(command, cwd=home, capture_output=True, text=True, check=True)
    values: dict[str, Any] = json.loads(found.stdout)
    return values


def listening(process: int) -> list[tuple[str, int]]:
    """The sockets on which a process waits for connections, of TCP and UDP, from the kernel's tables."""
    own = set()
    for link in Path(f"/proc/{process}/fd").iterdir():
        try:
            own.add(str(link.readlink()))
        except FileNotFoundError:
            continue
    found = []
    for table, state in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == state and f"socket:[{fields[9]}]" in own:
                found.append((table, int(fields[1].rpartition(":")[2], 16)))
    return found


@pytest.mark.federation
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="sockets are listed by Linux only")
def test_a_run_sends_only_what_was_announced_and_only_its_server_listens(tmp_path: Path) -> None:
    """FedProto; birch shares nothing. Class names are part of the terms, but no site sends them."""
    names = [f"illness-{number}" for number in range(10)]
    with support.federation(tmp_path / "home", "fedproto", task={"classes": names}) as real:
        ports = {name: Recorder(real.home / "keys", real.port) for name in support.NAMES}
        for name, recorder in ports.items():
            share = "nothing" if name == "birch" else "scores"
            real.write_site(name, server=f"127.0.0.1:{recorder.port}", share=share)
        told = {name: Announcement.from_dict(checked(real.home, name)["announcement"]) for name in support.NAMES}
        amber, birch, cedar = real.sites.values()
        real.server.start()
        birch.start().wait_to_say("asked to join")
        birch.hold()  # so that the run does not end before everybody has been looked at
        for site in (amber, cedar):
            site.start()
        for site in (amber, cedar):
            site.wait_to_say("asked to train round 1")
        assert listening(real.server.process.pid) == [("tcp", real.port)]  # type: ignore[union-attr]
        for site in real.sites.values():
            assert listening(site.process.pid) == []  # type: ignore[union-attr]
        birch.release()
        real.finish()
        for name, recorder in ports.items():
            recorder.close()
            answers = recorder.answers()
            kinds = [kind for kind, _ in answers]
            assert kinds[0] == "join" and kinds[-1] == "finish" and kinds.count("train") == 3
            for kind, answer in answers:
                if kind == "finish":
                    assert not answer.facts and answer.message is None
                else:
                    assert told[name].unannounced(kind, answer) is None
            shared = {fact for kind, answer in answers if kind != "join" for fact in answer.facts}
            assert shared == ({"round"} if name == "birch" else {"round", "loss", "evaluation"})
            metadata = {fact for _, answer in answers if answer.message for fact in answer.message.metadata}
            assert metadata == {"labels"}  # no counts: FedProto's mean needs none
            for request in recorder.requests():
                assert set(request.headers) <= HEADERS and request.call in CALLS
                assert (request.headers["user-agent"], request.headers["accept-encoding"]) == ("polyfed", "identity")
            assert_absent(recorder, real.home, name, names)


def assert_absent(recorder: Recorder, home: Path, name: str, classes: list[str]) -> None:
    """Nothing that describes the site, its machine, its software or its samples is in the bytes that it sent."""
    private = keys.read_private_key(home / "keys" / f"{name}.key")
    sent = recorder.bytes
    readable = without_signatures(recorder, private.public_key())
    number = private.private_numbers().private_value.to_bytes(48, "big")
    der = private.private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    lines = [line for line in (home / "keys" / f"{name}.key").read_bytes().splitlines() if b"-----" not in line]
    words = [
        str(home), home.name, str(Path.home()), f"{name}.npz", f"state-{name}", "own.py", getpass.getuser(),
        socket.gethostname(), platform.release(), platform.python_version(), *classes,
        support.NETWORKS[name].rpartition(":")[2], "Normed", "Small", "cnn5", "torch", "httpx", "python",
        *(f"{package}/{version(package)}" for package in ("httpx", "flwr")), version("torch"), version("polyfed"),
    ]  # fmt: skip
    secrets = [number, der, base64.b64encode(number), base64.b64encode(der), *lines]
    for secret in secrets:
        assert secret not in sent, secret[:40]
    for word in words:
        assert len(word) <= 3 or word.encode() not in readable, word


def without_signatures(recorder: Recorder, key: EllipticCurvePublicKey) -> bytes:
    """What was sent but the key and the signatures, which are right: random letters spell short words now and then."""
    left = recorder.bytes
    for headers in (request.headers for request in recorder.requests()):
        public, signature = headers["flwr-public-key"], headers["flwr-signature"]
        assert base64.b64decode(public) == public_key_to_bytes(key)
        assert verify_signature(key, headers["flwr-timestamp"].encode(), base64.b64decode(signature))
        left = left.replace(public.encode(), b"").replace(signature.encode(), b"")
    return left
