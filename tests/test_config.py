"""Experiments: YAML in and out, shortcuts and presets, and one sentence for whatever is wrong."""

from pathlib import Path
from typing import Any

import pytest

from polyfed.config import experiment, merged, read_experiment
from polyfed.errors import InputError
from polyfed.methods.base import Training
from polyfed.normal_form import PRESET_TITLES, PRESETS
from polyfed.ranges import describe_range
from polyfed.yaml_text import parse_yaml


def from_yaml(folder: Path, text: str, **changes: Any) -> Any:
    (folder / "experiment.yaml").write_text(text)
    return read_experiment(folder / "experiment.yaml", **changes)


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "standalone"},
        {
            "method": {"name": "fedproto", "weight": 0.5, "distance": "mse"}, "data_folder": "/data", "split": "80:20",
            "participation": 0.3, "lr": 1e-7, "training": {"clip": 5.0, "augment": True}, "seed": 2**40,
            "memory_budget": 0.5, "auxiliary": "cnn5", "checkpoint_every": 3, "data": "npz:a: b.npz",
        },
    ],
)  # fmt: skip
def test_a_run_s_yaml_is_the_same_experiment(tmp_path: Path, settings: dict[str, Any]) -> None:
    config = experiment(**settings)
    assert from_yaml(tmp_path, config.to_yaml()) == config
    assert "torch:" in config.to_yaml()  # versions are recorded, and ignored when it is read again


def test_hyphens_and_shortcuts_are_accepted_everywhere(tmp_path: Path) -> None:
    text = "method: lg-fedavg\neval-every: 2\nbatch-size: 8\ntraining: {weight-decay: 0.1, lr: 1e-3}\n"
    config = from_yaml(tmp_path, text)
    assert (config.eval_every, config.training.batch_size) == (2, 8)
    assert (config.training.weight_decay, config.training.lr) == (0.1, 0.001)


def test_a_ratio_needs_no_quotes_in_yaml(tmp_path: Path) -> None:
    """YAML 1.1 would read 8:1:1 as 8·3600 + 60 + 1."""
    assert from_yaml(tmp_path, "method: standalone\nsplit: 8:1:1\n").split == "8:1:1"
    assert parse_yaml("[80:20, 1:1:0.5, 12, 1.5, -3]") == ["80:20", "1:1:0.5", 12, 1.5, -3]
    assert parse_yaml("[010, -010, 0, 0x10]") == [10, -10, 0, 16]  # nor 010 as eight


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("method: fedproto\nrounds: 3\nclients: 5\nrounds: 4\n", "'rounds' twice, in lines 2 and 4: keep one"),
        ("method: fedproto\nbatch-size: 3\nbatch_size: 4\n", "'batch_size' twice, in lines 2 and 3"),
        ("method: fedproto\ntraining:\n  lr: 1\n  lr: 2\n", "'lr' twice, in lines 3 and 4"),
        ("method: fedproto\nlr: 0.1\ntraining: {lr: 0.2}\n", "lr is 0.1 at the top level and 0.2 under training"),
    ],
)
def test_a_setting_that_is_given_twice_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        from_yaml(tmp_path, text)
    same = "method: fedproto\nlr: 0.2\ntraining: {lr: 0.2}\n"
    assert from_yaml(tmp_path, same, lr=0.3).training.lr == 0.3  # what a caller changes is no contradiction


def test_none_means_no_value_where_there_may_be_none(tmp_path: Path) -> None:
    text = "method: {name: fedproto, weight: none}\nworkers: None\ntraining: {clip: none}\n"
    config = from_yaml(tmp_path, text)
    assert (config.options["weight"], config.workers, config.training.clip) == (None, None, None)
    with pytest.raises(InputError, match="rounds is 'none'"):
        experiment(method="fedproto", rounds="none")


def test_batch_64_is_the_released_code_with_another_batch_size() -> None:
    assert PRESETS["batch-64"] == {**PRESETS["released-code"], "batch_size": 64}
    assert PRESET_TITLES.keys() == PRESETS.keys()


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_set_the_training_and_what_is_given_wins(preset: str) -> None:
    assert experiment(method="standalone", preset=preset).training == Training(**PRESETS[preset])
    config = experiment(method="standalone", preset=preset, lr=0.5, training={"momentum": 0.3})
    assert (config.training.lr, config.training.momentum) == (0.5, 0.3)
    assert config.training.weight_decay == PRESETS[preset]["weight_decay"]


@pytest.mark.parametrize(
    ("file", "changes", "expected"),
    [
        ("lr: 0.1", {"training": {"lr": 0.2}}, {"lr": 0.2}),
        ("training: {lr: 0.1, momentum: 0.5}", {"lr": 0.2}, {"lr": 0.2, "momentum": 0.5}),
        ("training: {lr: 0.1, batch_size: 7}", {"preset": "released-code", "lr": 0.2}, {"lr": 0.2, "batch_size": 512}),
        ("preset: released-code", {"training": {"clip": None}}, {"clip": None, "momentum": 0.9}),
    ],
)
def test_changes_win_over_the_file(
    tmp_path: Path, file: str, changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    training = from_yaml(tmp_path, f"method: standalone\n{file}\n", **changes).training.model_dump()
    assert {name: training[name] for name in expected} == expected


def test_options_change_one_by_one_but_not_those_of_another_method() -> None:
    file = {"method": {"name": "fedproto", "weight": 0.5}}
    assert merged(file, {"method": {"distance": "mse"}})["method"] == {
        "name": "fedproto", "weight": 0.5, "distance": "mse",
    }  # fmt: skip
    assert merged(file, {"method": "fedavg"})["method"] == {"name": "fedavg"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method": "fedprot"}, "unknown method 'fedprot': did you mean 'fedproto'"),
        ({"rouns": 3}, "unknown setting 'rouns': did you mean 'rounds'"),
        ({"epoch": 3}, "did you mean 'epochs'"),
        ({"momentum": 0.9}, "did you mean 'training.momentum'"),
        ({"training": {"momentun": 0.9}}, "unknown setting 'training.momentun': did you mean 'momentum'"),
        ({"method": {"name": "fedproto", "wieght": 1}}, "'method.wieght' of fedproto: did you mean 'weight'"),
        ({"preset": "papers"}, "unknown preset 'papers': did you mean 'paper'"),
        ({"participation": 0}, "participation is 0, but must be a number greater than 0 and at most 1"),
        ({"rounds": 0}, "rounds is 0, but must be a whole number at least 1"),
        ({"rounds": 1.5}, "rounds is 1.5, but must be a whole number"),
        ({"lr": float("inf")}, "training.lr is inf, but must be a finite number greater than 0"),
        ({"training": {"momentum": 1}}, "training.momentum is 1, but must be a number at least 0 and less than 1"),
        ({"partition": "even"}, "partition is 'even', but must be one of shares, pathological, dirichlet, iid"),
        ({"method": {"name": "fedproto", "weight": -1}}, "method.weight of fedproto is -1, but must be a number"),
        ({"rounds": True}, "rounds is True, but must be a whole number at least 1"),
        ({"participation": True}, "participation is True, but must be a number greater than 0"),
        ({"workers": False}, "workers is False, but must be a whole number at least 1, or none"),
        ({"lr": True}, "training.lr is True, but must be a number greater than 0"),
        ({"training": {"clip": True}}, "training.clip is True, but must be a number greater than 0, or none"),
        ({"ray": {"gpus": True}}, "ray.gpus is True, but must be a whole number at least 0 and at most 1, or none"),
        ({"method": {"name": "fedproto", "weight": True}}, "method.weight of fedproto is True, but must be a number"),
        ({"workers": 0}, "workers is 0, but must be a whole number at least 1, or none"),
        ({"training": 3}, "training is 3, but must be names with values"),
        ({"method": {"weight": 1}}, "names no method"),
        ({"method": 3}, "method is a value of type int, but must be a name, a subclass of polyfed.Method or"),
        ({"method": ["fedproto", "fedavg"]}, "method is a list, but a run has one method: use one run per method"),
        ({"min_replies": 3, "clients": 4, "participation": 0.5}, "min_replies is 3, but must be at most 2"),
    ],
)
def test_what_is_wrong_is_one_sentence(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        experiment(**{"method": "standalone", **settings})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"method: [", "is not valid YAML"),
        (b"just words", "is not an experiment"),
        (b"", "is not an experiment"),
        (b"\xff\xfe", "can't read the experiment"),
        (b"rounds: 3", "names no method"),
    ],
)
def test_files_that_are_no_experiment(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_bytes(content)
    with pytest.raises(InputError, match=words) as caught:
        read_experiment(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="No such file"):
        read_experiment(tmp_path / "missing.yaml")


@pytest.mark.parametrize(
    ("participation", "clients", "expected"), [(0.29, 100, 29), (0.001, 10, 1), (1.0, 7, 7), (0.5, 5, 2), (0.1, 30, 3)]
)
def test_participants_are_rounded_down_but_at_least_one(participation: float, clients: int, expected: int) -> None:
    """0.29 · 100 is 28.999… in floats."""
    assert experiment(method="standalone", participation=participation, clients=clients).participants == expected


def test_every_setting_is_described() -> None:
    config = experiment(method="standalone")
    for model in (type(config), Training):
        assert all(info.description for info in model.model_fields.values())
    assert describe_range(Training, "clip") == "a number greater than 0, or none"
    assert describe_range(Training, "augment") == "true or false"
