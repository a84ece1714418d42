"""What-if views: a question with controls, answered again at every move."""

from __future__ import annotations

import threading

import numpy as np
import pandas as pd
import pytest
from looking import hammer, values_of

from colibri_lab.errors import SettingError
from colibri_lab.ui import what_if
from colibri_lab.ui.frames import Frame, Series
from colibri_lab.ui.what_if import Finding, WhatIf


def powers(base: int, most: int = 4, kind: str = "up") -> Finding:
    """Powers of `base` up to `most`."""
    if most == 13:
        raise SettingError("most cannot be 13; take another number")
    values = np.array([[float(base) ** n for n in range(most + 1)]], np.float32)
    values = values if kind == "up" else values[:, ::-1]
    frame = Frame(
        "lines",
        f"Powers of {base}",
        "n",
        "value",
        values,
        (Series("power", "hit"),),
        (0, most),
        (0, float(values.max())),
    )
    return Finding((frame, frame), f"{base} to the {most} is {base**most}.", pd.DataFrame({"value": values[0]}))


@pytest.fixture
def view():
    view = what_if(powers, 2, most=range(1, 21), kind=["up", "down"])
    yield view
    view.close()


def test_starts_at_the_defaults_and_shows_the_answer(view):
    assert view.state == "done" and view.controls["most"].value == 4 and view.controls["kind"].value == "up"
    assert "2 to the 4 is 16." in view._verdict.value and len(view._panels) == 2
    assert values_of(view._panels[0]).tolist() == [[1, 2, 4, 8, 16]]
    assert view.data.value.tolist() == [1, 2, 4, 8, 16]


def test_a_moved_control_is_answered(view):
    view.controls["most"].value = 3
    assert view.wait(60)
    assert values_of(view._panels[1]).tolist() == [[1, 2, 4, 8]] and "is 8." in view._verdict.value
    assert view.set(kind="down", most=2).table.value.tolist() == [4, 2, 1]
    assert view.controls["most"].value == 2


def test_an_error_is_told_and_the_last_picture_stays(view):
    before = view._panels[0].data
    view.controls["most"].value = 13
    assert view.wait(60)
    assert view.state == "error" and "most cannot be 13; take another number" in view._message.value
    assert view._panels[0].data == before and isinstance(view.error, SettingError)
    with pytest.raises(SettingError, match="cannot be 13"):
        view.set(most=13)
    view.controls["most"].value = 5
    assert view.wait(60) and view.state == "done" and view.error is None and "cannot be 13" not in view._message.value


def test_what_does_not_exist_is_refused(view):
    with pytest.raises(SettingError, match="powers takes no 'moost'; did you mean 'most'"):
        what_if(powers, 2, moost=range(3))
    with pytest.raises(SettingError, match="no control 'base'"):
        view.set(base=3)
    with pytest.raises(SettingError, match="most must be 1 to 20, got 21"):
        view.set(most=21)
    with pytest.raises(SettingError, match="kind cannot be 'dwon'; did you mean 'down'"):
        view.set(kind="dwon")
    with pytest.raises(SettingError, match="live cannot be 'gif'"):
        what_if(powers, 2, most=range(3), live="gif")


def test_ranges_keep_their_ends_and_steps():
    view = what_if(powers, 3, most=range(2, 9, 3))
    slider = view.controls["most"]
    assert (slider.min, slider.max, slider.step, slider.value) == (2, 8, 3, 5)
    view.close()


def test_a_finding_is_a_picture_by_itself(view, tmp_path):
    assert view.finding._repr_png_().startswith(b"\x89PNG")
    picture = view.png(tmp_path / "finding.png")
    assert picture.get_supxlabel() == "2 to the 4 is 16." and len(picture.axes) == 2
    assert (tmp_path / "finding.png").exists()


def test_two_threads_hammering_one_view(view):
    def actions(pick):
        return (
            lambda: setattr(view.controls["most"], "value", pick.randint(1, 12)),
            lambda: setattr(view.controls["kind"], "value", pick.choice(["up", "down"])),
        )

    hammer(actions, 300)
    assert view.wait(60) and view.state == "done"
    most, kind = view.controls["most"].value, view.controls["kind"].value
    assert view.data.equals(powers(2, most, kind).table)
    assert "colibri-what-if" not in [t.name for t in threading.enumerate()]


def test_png_mode_and_names_for_the_keyboard(view):
    drawn = what_if(powers, 2, most=range(1, 5), live="png")
    assert all(bytes(panel.value).startswith(b"\x89PNG") for panel in drawn._panels)
    assert all(c.description and c.tooltip for c in view.controls.values()) and isinstance(view, WhatIf)
    drawn.close()
