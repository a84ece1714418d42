"""Drafts: edits of a kernel that touch neither its files nor the version in use."""

from __future__ import annotations

import pytest

from colibri_lab import kernels
from colibri_lab.errors import CompileError, SettingError
from colibri_lab.kernels import Draft


def test_an_edit_gives_a_new_version_and_leaves_files_and_old_version_alone(cpp):
    old, before = kernels.load("tiny"), (cpp.folder / "tiny_core.hpp").read_text()
    draft = Draft("tiny")
    draft.edit("return 1;", "return 7;")
    new = draft.load()
    assert (old.answer(), new.answer()) == (1, 7)
    assert kernels.load("tiny") is old and kernels.reload("tiny") is old
    assert (cpp.folder / "tiny_core.hpp").read_text() == before
    assert draft.load() is new


def test_lines_are_found_whatever_their_indentation_and_keep_the_one_they_had(cpp):
    draft = Draft("tiny")
    draft.edit(
        """
            int total = 0;
        int step() { return total += kStride; }""",
        """
        int total = 10;
        int step() {
            return total += 2 * kStride;
        }""",
    )
    counter = draft.load().Counter()
    assert counter.step() == 12
    core = draft.texts["tiny_core.hpp"].splitlines()
    assert core[4:8] == ["    int total = 10;", "    int step() {", "        return total += 2 * kStride;", "    }"]
    assert draft.diff().startswith("--- tiny_core.hpp\n+++ tiny_core.hpp\n")


def test_headers_can_be_edited_and_an_edit_can_be_forgotten(cpp):
    draft = Draft("tiny")
    draft.edit("kStride = 1", "kStride = 5")
    assert draft.load().Counter().step() == 5
    draft.reset()
    assert draft.diff() == "" and draft.load() is kernels.load("tiny")


def test_what_does_not_compile_is_named_with_its_line_and_changes_nothing(cpp):
    old, draft = kernels.load("tiny"), Draft("tiny")
    draft.edit("return 1;", "retrn 1;")
    with pytest.raises(CompileError) as caught:
        draft.load()
    first, line, mark = str(caught.value).splitlines()
    assert first.startswith("tiny_core.hpp:3:23: ") and "retrn" in first
    assert line == "inline int answer() { retrn 1; }" and mark.index("^") == line.index("retrn")
    assert kernels.load("tiny") is old and old.answer() == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("no such text", r"tiny: the text 'no such text' is in none of include/stride.hpp, tiny.cpp, tiny_core.hpp"),
        ("int", r"in \d+ places \(.*tiny_core.hpp:3.*\): give more of it"),
        ("  \n ", "tiny: the text to replace is empty"),
    ],
)
def test_a_text_must_be_there_exactly_once(cpp, text, says):
    draft = Draft("tiny")
    with pytest.raises(SettingError, match=says):
        draft.edit(text, "x")
    assert draft.diff() == ""


def test_whole_files_can_be_written_but_only_those_there_are(cpp):
    draft = Draft("tiny")
    draft.write("include/stride.hpp", "#pragma once\ninline constexpr int kStride = 3;\n")
    assert draft.load().Counter().step() == 3
    with pytest.raises(SettingError, match="tiny has no file 'strid.hpp'"):
        draft.write("strid.hpp", "")


def test_source_shows_the_core_or_another_file(cpp):
    assert kernels.source("tiny") == (cpp.folder / "tiny_core.hpp").read_text()
    assert "kStride" in kernels.source("tiny", "include/stride.hpp")
    with pytest.raises(SettingError, match="tiny has no file 'core.hpp'"):
        kernels.source("tiny", "core.hpp")
    with pytest.raises(SettingError, match="no kernel 'tine'"):
        kernels.source("tine")
