"""The settings table and the model description."""

from __future__ import annotations

import pytest

from colibri_lab.checkpoint.families import read_config
from colibri_lab.config import SETTINGS, ModelConfig, resolve, settings_table
from colibri_lab.errors import ModelError, SettingError


def test_defaults_pass_their_own_checks_and_every_setting_explains_itself():
    for scope in ("open", "generate"):
        assert set(resolve({}, scope)) == {s.name for s in SETTINGS.values() if s.scope == scope}
    assert all(len(s.help) > 15 for s in SETTINGS.values())
    assert all(f"`{name}`" in settings_table() for name in SETTINGS)


@pytest.mark.parametrize(
    "given, scope, message",
    [
        ({"polcy": "lru"}, "open", "unknown setting 'polcy': did you mean 'policy'"),
        ({"temperature": -1}, "generate", "temperature must be at least 0.0, got -1"),
        ({"top_p": 1.5}, "generate", "top_p must be at most 1.0, got 1.5"),
        ({"threads": True}, "open", "threads must be int, got True"),
        ({"seed": "1"}, "generate", "seed must be int, got '1'"),
        ({"scope": "Layer"}, "open", "scope cannot be 'Layer'; did you mean 'layer'"),
        ({"seed": 1}, "open", r"unknown setting 'seed': it belongs to generate"),
    ],
)
def test_bad_settings_are_named_with_the_rule_and_the_value(given, scope, message):
    with pytest.raises(SettingError, match=message):
        resolve(given, scope)


def test_whole_numbers_are_good_floats():
    assert resolve({"temperature": 1}, "generate")["temperature"] == 1.0


@pytest.fixture(scope="module")
def model(project):
    return read_config(project / "tests" / "oracle" / "glm4_moe")


@pytest.fixture(scope="module")
def project():
    from pathlib import Path

    return Path(__file__).parents[1]


def test_model_description_survives_json(model):
    import json

    assert ModelConfig.from_json(json.loads(json.dumps(model.to_json()))) == model


def test_each_missing_field_is_named(model):
    for name in model.to_json():
        data = model.to_json()
        del data[name]
        with pytest.raises(ModelError, match=f"config.json: field '{name}' is missing"):
            ModelConfig.from_json(data)


@pytest.mark.parametrize(
    "name, value", [("num_layers", "3"), ("top_k", None), ("family", 4), ("ffn", "moe"), ("tied_embeddings", 1)]
)
def test_each_mistyped_field_is_named(model, name, value):
    with pytest.raises(ModelError, match=f"field '{name}': expected .*, found"):
        ModelConfig.from_json({**model.to_json(), name: value})


def test_unknown_fields_are_named_with_the_nearest(model):
    with pytest.raises(ModelError, match="unknown field 'num_layer'; did you mean 'num_layers'"):
        ModelConfig.from_json({**model.to_json(), "num_layer": 3})
