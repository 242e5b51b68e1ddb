"""The files to start from: they are read back, for every method, and say what was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

import polyfed
from polyfed.deploy.member import read_member
from polyfed.deploy.templates import federation_text, site_text
from polyfed.deploy.terms import read_terms
from polyfed.errors import InputError
from tests.deploy.files import public_key


def text(folder: Path, method: str = "fedproto", shape: tuple[int, ...] = (3, 32, 32)) -> str:
    return federation_text(folder, "hearts-1", method, ["amber", "no"], ["cat", "yes"], shape)


def filled(content: str) -> str:
    for number in range(2):
        content = content.replace("PUBLIC-KEY", public_key(number), 1)
    return content


@pytest.mark.parametrize("method", polyfed.METHODS)
def test_once_keys_are_filled_in_the_terms_of_every_method_can_be_used(tmp_path: Path, method: str) -> None:
    path = tmp_path / "federation.yaml"
    path.write_text(filled(text(tmp_path, method)))
    found = read_terms(path)
    assert (found.name, found.config.method["name"], list(found.members)) == ("hearts-1", method, ["amber", "no"])
    assert found.common.names == ("cat", "yes")
    assert found.config.rounds == 20 and found.server.grace == 10.0


@pytest.mark.parametrize("method", ["fedproto", "fml"])
def test_every_line_that_is_a_comment_with_a_name_can_be_switched_on(tmp_path: Path, method: str) -> None:
    """With all defaults written out, the terms are the same."""
    plain, full = tmp_path / "plain.yaml", tmp_path / "full.yaml"
    content = filled(text(tmp_path, method))
    plain.write_text(content)
    lines = [line.replace("#", "", 1) if line.lstrip().startswith("#") and "# " not in line else line
             for line in content.splitlines()]  # fmt: skip
    assert sum(line.lstrip().startswith("#") for line in lines) < sum(
        line.lstrip().startswith("#") for line in content.splitlines()
    )
    full.write_text("\n".join(lines))
    assert read_terms(plain).difference(read_terms(full)) is None
    assert read_terms(plain).server == read_terms(full).server


def test_a_task_that_is_no_image_has_no_mean(tmp_path: Path) -> None:
    path = tmp_path / "federation.yaml"
    path.write_text(filled(text(tmp_path, shape=(12,))))
    common = read_terms(path).common
    assert (common.input_shape, common.mean, common.std) == ((12,), (), ())


def test_public_keys_that_are_there_are_filled_in(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "amber.pub").write_text(f"{public_key(3)} someone\n")
    content = text(tmp_path)
    assert f"  amber: {public_key(3)}\n" in content and "  'no': PUBLIC-KEY\n" in content
    (tmp_path / "keys" / "amber.pub").write_text("nonsense")
    with pytest.raises(InputError, match="public key of 'amber' in '.*amber.pub' is 'nonsense', but must be"):
        text(tmp_path)


def test_names_are_checked(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'amber' is twice among the members"):
        federation_text(tmp_path, "x", "fedproto", ["amber", "amber"], ["a", "b"], [3])
    with pytest.raises(InputError, match="the name of a member is 'a b', but must be"):
        federation_text(tmp_path, "x", "fedproto", ["a b", "amber"], ["a", "b"], [3])
    with pytest.raises(InputError, match="name is '', but|name is missing"):
        federation_text(tmp_path, "", "fedproto", ["a", "b"], ["a", "b"], [3])


def test_a_sites_file_is_read_back(tmp_path: Path) -> None:
    (tmp_path / "federation.yaml").write_text(filled(text(tmp_path)))
    path = tmp_path / "site.yaml"
    values = {"name": "no", "federation": "federation.yaml", "server": "h:1", "data": "npz:x: y.npz", "network": "cnn3"}
    path.write_text(site_text(values))
    found = read_member(path)
    assert (found.number, found.settings.data, found.architecture.name) == (1, "npz:x: y.npz", "cnn3")
    assert found.settings.share == "scores" and found.settings.split == "8:1:1"
