"""Signs that no font has become escapes, never empty boxes."""

from __future__ import annotations

import warnings

import pytest

from colibri_lab.ui import signs
from colibri_lab.ui.plots import Picture


@pytest.fixture
def only_mono(monkeypatch):
    monkeypatch.setattr(signs, "CJK", ())
    for cached in (signs.families, signs._has):
        cached.cache_clear()
    yield
    for cached in (signs.families, signs._has):
        cached.cache_clear()


def test_escapes_stand_for_signs_without_a_font(only_mono):
    assert signs.drawable("Größe → 10 €") == "Größe → 10 €"
    assert signs.drawable("中a") == r"\u4e2da"
    assert signs.drawable("a\nb") == "a\nb"
    assert signs.families() == [signs.MONO]


def test_what_is_drawn_has_a_sign_in_some_font():
    picture = Picture((4, 1))
    picture.text(0.1, 0.5, signs.drawable("三国 тест ない \U0001f426"), family=signs.families())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns of every glyph that is missing
        assert picture.png()[:4] == b"\x89PNG"


def test_an_installed_font_is_used(only_mono, monkeypatch):
    monkeypatch.setattr(signs, "CJK", ("No Such Font", "DejaVu Sans"))
    signs.families.cache_clear()
    assert signs.families() == [signs.MONO, "DejaVu Sans"]


def test_chinese_takes_two_columns():
    assert signs.columns("ab") == 2 and signs.columns("中b") == 3
