"""A site runs only its own code: a hostile server with Flower's real tools ships an app, and nothing of it runs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'polyfed[flower]'")

from cryptography.hazmat.primitives import serialization

from polyfed.deploy import keys
from tests.federation import support

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "hostile"
version = "1.0.0"
description = "leaves a file wherever it runs"
license = "Apache-2.0"
dependencies = ["flwr"]
[tool.flwr.app]
publisher = "somebody"
[tool.flwr.app.components]
serverapp = "hostile:server"
clientapp = "hostile:client"
[tool.flwr.app.config]
nodes = 2
"""
APP = """
import json, os, time
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

HOME = Path({home!r})
server = ServerApp()
client = ClientApp()

@server.main()
def main(grid, context):
    while len(list(grid.get_node_ids())) < 2:
        time.sleep(0.2)
    said = {{}}
    for kind in ("train", "evaluate", "query", "query.join"):
        questions = [
            Message(RecordDict({{"c": ConfigRecord({{"kind": kind}})}}), node, kind) for node in grid.get_node_ids()
        ]
        for reply in grid.send_and_receive(questions, timeout=60):
            said.setdefault(str(reply.metadata.src_node_id), {{}})[kind] = (
                reply.error.reason if reply.has_error() else "ran"
            )
    (HOME / "said.new").write_text(json.dumps(said))
    os.replace(HOME / "said.new", HOME / "said.json")

def mark(message, context):
    folder = os.environ["SITE"]
    (HOME / f"marker-{{folder}}").write_text("hostile code was here")
    return Message(RecordDict(), reply_to=message)

client.train()(mark)
client.evaluate()(mark)
client.query()(mark)
client.query("join")(mark)
"""


class Programs:
    """Flower's own programs, each ended at the end."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.bin = Path(sys.executable).parent
        self._running: list[subprocess.Popen[bytes]] = []

    def environment(self, name: str) -> dict[str, str]:
        return {
            **os.environ, "FLWR_HOME": str(self.home / f"flwr-{name}"), "FLWR_TELEMETRY_ENABLED": "0", "SITE": name,
            "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
        }  # fmt: skip

    def start(self, name: str, program: str, *arguments: str) -> None:
        with (self.home / f"{name}.out").open("ab") as output:
            self._running.append(
                subprocess.Popen(
                    [str(self.bin / program), *arguments],
                    cwd=self.home,
                    env=self.environment(name),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )  # fmt: skip
            )

    def run(self, name: str, program: str, *arguments: str) -> str:
        found = subprocess.run(
            [str(self.bin / program), *arguments], cwd=self.home, env=self.environment(name), capture_output=True,
            text=True, timeout=120,
        )  # fmt: skip
        assert found.returncode == 0, found.stdout + found.stderr
        return found.stdout

    def close(self) -> None:
        for process in self._running:
            if process.poll() is None:
                os.killpg(process.pid, 9)
            process.wait()


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    home = tmp_path / "home"
    home.mkdir()
    found = Programs(home)
    yield found
    found.close()


@pytest.mark.federation
def test_a_hostile_app_runs_on_flowers_node_and_leaves_no_trace_on_a_site(programs: Programs) -> None:
    """Amber is a site; birch, with Flower's own program, is the control: there the same app leaves its file."""
    home = programs.home
    with support.federation(home, "fedproto") as real:
        app = home / "app"
        app.mkdir()
        (app / "pyproject.toml").write_text(PROJECT)
        (app / "hostile.py").write_text(APP.format(home=str(home)))
        settings = home / "flwr-coordinator" / "config.toml"
        settings.parent.mkdir()
        address = f"127.0.0.1:{real.port}"
        authority = real.home / "keys" / "ca.crt"
        settings.write_text(
            f'[superlink]\ndefault = "tls"\n[superlink.tls]\naddress = "{address}"\nroot-certificates = "{authority}"\n'
        )
        files = [f"keys/{name}" for name in ("ca.crt", "server.crt", "server.key")]
        programs.start(
            "coordinator", "flower-superlink", "--ssl-ca-certfile", files[0], "--ssl-certfile", files[1],
            "--ssl-keyfile", files[2], "--enable-supernode-auth", "--database", "link.db", "--host", "127.0.0.1",
            "--port", str(real.port), "--disable-runtime-dependency-installation",
        )  # fmt: skip
        wait_until_listening(real.port)
        for name in ("amber", "birch"):
            (home / f"{name}.pub").write_text(real.terms["members"][name] + "\n")
            programs.run("coordinator", "flwr", "supernode", "register", f"{name}.pub", "tls")
        site = real.sites["amber"]
        site.environment["SITE"] = "amber"
        site.start()
        openssh(home / "keys" / "birch.key", home / "birch.openssh")
        programs.start(
            "birch", "flower-supernode", "--superlink", address, "--root-certificates", files[0],
            "--auth-supernode-private-key", "birch.openssh", "--host", "127.0.0.1", "--port",
            str(support.free_port()),
        )  # fmt: skip
        site.wait_to_say("connected to", 60)
        before = everything(home / "state-amber")
        programs.run("coordinator", "flwr", "run", "app", "tls")
        wait_for_file(home / "said.json", 200, home)
        said = json.loads((home / "said.json").read_text())
        answers = sorted(said.values(), key=lambda each: each["train"] == "ran")
        assert [set(each.values()) for each in answers[1:]] == [{"ran"}]
        assert (home / "marker-birch").exists()  # the app does what it says
        assert not list(home.glob("marker-amber"))
        assert len(answers[0]) == 4 and set(answers[0].values()) <= {
            "it is not one of polyfed's messages.",
            "the question can't be read.",
            "this site only answers polyfed's questions.",
        }
        after = everything(home / "state-amber")
        assert {path: after[path] for path in before if path.name != "site.log"} == {
            path: content for path, content in before.items() if path.name != "site.log"
        }
        assert after.keys() == before.keys()
        assert site.process is not None and site.process.poll() is None
        assert "refused a question" in (home / "state-amber" / "site.log").read_text()


def everything(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def openssh(source: Path, target: Path) -> None:
    """The key in the form that Flower's own node reads."""
    form = serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    target.touch(0o600)
    target.write_bytes(keys.read_private_key(source).private_bytes(serialization.Encoding.PEM, *form))


def wait_until_listening(port: int) -> None:
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError("Flower's server does not listen")


def wait_for_file(path: Path, seconds: float, home: Path) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        said = "\n".join(f"{each.name}:\n{each.read_text()[-3000:]}" for each in home.glob("*.out"))
        assert time.monotonic() < end, said
        time.sleep(0.2)
