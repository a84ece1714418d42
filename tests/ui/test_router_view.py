"""The router explorer and the pictures about routing: what they show is what the routers chose."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pandas as pd
import pytest
from looking import hammer, values_of
from matplotlib.image import imread

import colibri_lab as cl
from colibri_lab import routers, routing
from colibri_lab.errors import ColibriError, SettingError
from colibri_lab.trace import locality
from colibri_lab.ui import router_explorer, router_plots
from colibri_lab.ui import router_frames as frames
from colibri_lab.ui.router_view import OWN_TEXT

TEXT = "def f(x):\n    return x + 1\n"


@pytest.fixture(scope="module")
def lab():
    return cl.open("colibri-tiny", expert_cache_slots=32, threads=2)


@pytest.fixture(scope="module")
def reading(lab):
    return routing.read(lab, TEXT)


@pytest.fixture
def view(lab):
    view = router_explorer(lab, TEXT)
    yield view
    view.close()
    assert not [t for t in threading.enumerate() if t.name == "colibri-router"]


@contextlib.contextmanager
def busy(lab):
    """A generation that is under way."""
    with contextlib.closing(lab.stream("x", max_tokens=5)) as stream:
        yield next(stream)


def test_panels_show_what_the_router_saw_and_chose(view, lab):
    assert view.state == "ready"
    view.token.value, view.layer.value = 5, 4
    rows = lab.routes(lab.tokenizer.encode(TEXT)).query("layer == 4 and token == 5")
    logits, scores, weights, picks = map(values_of, view._panels)
    np.testing.assert_array_equal(logits[0], view.reading.logits_of(4)[5])
    np.testing.assert_allclose(scores[0], 1 / (1 + np.exp(-logits[0])), rtol=1e-5)
    np.testing.assert_allclose(scores[2] - scores[0], view.reading.layer(4).bias, atol=1e-6)
    for panel in (logits, scores, weights):
        assert sorted(np.flatnonzero(panel[1] == 0)) == sorted(rows.expert)
    np.testing.assert_allclose(weights[0][rows.expert], rows.weight, rtol=1e-6)
    assert sorted(np.flatnonzero(picks[0][3] >= 2)) == sorted(rows.expert)
    assert picks[0].shape == (6, 32) and (np.sum(picks[0] >= 2, axis=1) == 4).all()
    assert view._panels[3].spec["rows"][3] == "▸4"
    before = lab.routes(lab.tokenizer.encode(TEXT)).query("layer == 4 and token == 4").expert
    assert set(np.flatnonzero(picks[0][3] == 2)) == set(before) & set(rows.expert)
    assert set(np.flatnonzero(picks[0][3] == 1)) == set(before) - set(rows.expert)
    assert view._panels[3].spec["note"] == f"{(picks[0] == 2).sum()} of 24 also for the token before"
    said = view._verdict.value
    assert (
        "Layer 4 sends token 5" in said and frames.named(rows.expert.tolist()) in said and "As trained (k = 4)" in said
    )


def test_k_and_temperature_answer_at_once_and_the_loss_follows(view, lab):
    view.k.value = 2
    assert len(view.look.ids) == 2 and values_of(view._panels[2])[1].tolist().count(0) == 2
    assert view.wait(60) and view.state == "ready"
    with lab.routing(routers.TopK(k=2)):
        wanted = routing.reading.token_nats(lab.logits(view.reading.token_ids), view.reading.token_ids).mean()
    assert f"With k = 2 this text costs {wanted:.3f} nats per token" in view._verdict.value
    assert "0.5 x the expert work" in view._verdict.value
    view.temperature.value = 2.0
    assert view.measure() == pytest.approx(view.data["losses"].nats.iloc[-1])
    assert "k = 2, temperature 2" in view._verdict.value
    logits = values_of(view._panels[0])
    np.testing.assert_allclose(logits[0] * 2, logits[2], rtol=1e-6)  # the ticks are the logits as trained
    view.buttons["As trained"].click()
    assert (view.k.value, view.temperature.value) == (4, 1.0) and "As trained" in view._verdict.value
    assert len(view.data["losses"]) == 3 and view.state == "ready"


def test_axes_hold_still_while_sliders_move(view):
    def limits():
        return [panel.spec["ylim"] for panel in view._panels[:1]], view._panels[2].spec["ylim"]

    before = limits()
    for token in range(view.token.max + 1):
        view.token.value = token
        assert limits()[0] == before[0]
    view.k.value = 6
    assert limits() == before


def test_a_new_text_is_read_and_the_sliders_follow(view):
    view.token.value = 8
    view.text.value = "In those days"
    assert view.wait(60) and view.reading.text == "In those days"
    assert view.token.max == len(view.reading.token_ids) - 1 == view.token.value
    assert view.prompts.value == OWN_TEXT
    name = view.prompts.options[7]
    view.prompts.value = name
    assert view.wait(60) and view.reading.text == view._prompts[name] == view.text.value
    assert view.read(TEXT).text == TEXT and view.prompts.value == OWN_TEXT


def test_tokens_are_coloured_and_numbered_by_their_first_expert(view):
    view.layer.value = 6
    leaders = view.look.choices[6][0][:, 0].tolist()
    shown = view._tokens.value
    assert [int(part.split("<")[0]) for part in shown.split("<sub>")[1:]] == leaders
    assert shown.count("outline:2px") == 1 and "⏎" in shown
    view.read("<b>&amp; x")
    assert "&lt;" in view._tokens.value and "<b" not in view._tokens.value


@pytest.mark.parametrize(
    "piece, shown", [("", "·"), (" a", " a"), ("\n", "⏎"), ("\n" + 8 * " ", "⏎␣␣…"), ("b\n", "b⏎"), ("\t", "→")]
)
def test_blank_tokens_are_made_visible(piece, shown):
    assert frames.visible(piece) == shown


def test_long_texts_show_a_window_around_the_token(lab):
    view = router_explorer(lab, "one two three four five " * 80)
    assert view._tokens.value.count("<sub>") == 160
    view.token.value = view.token.max
    assert f"token {view.token.max}: " in view._tokens.value and "… " in view._tokens.value
    view.close()


def test_data_are_the_tables_behind_the_view(view, lab):
    view.token.value, view.k.value = 3, 5
    assert view.wait(60)
    data = view.data
    with lab.routing(routers.TopK(k=5)):
        own = lab.routes(view.reading.token_ids).query("layer == 1")  # later layers see other inputs in a real run
    mine = data["choices"].query("layer == 1").reset_index(drop=True)
    assert mine[["token", "rank", "expert"]].equals(own[["token", "rank", "expert"]].reset_index(drop=True))
    assert "".join(mine[mine["rank"] == 0].piece) == TEXT
    experts = data["experts"].dropna().sort_values("rank")
    assert experts.expert.tolist() == view.look.ids and (experts.weight > 0).all()
    overlap = locality.overlap(routing.trace_of({"text": [view.reading]}), (1,))
    view.as_trained()
    np.testing.assert_allclose(view.data["overlap"].overlap, overlap.overlap)
    assert (view.data["overlap"].chance == 0.125).all()


def test_code_is_python_that_routes_the_same(view):
    view.k.value, view.temperature.value = 3, 2.0
    view.wait(60)
    space = {}
    exec(
        view.code()
        .replace("generate(", "routes(lab.tokenizer.encode(")
        .replace(TEXT.replace("\n", "\\n") + "')", TEXT.replace("\n", "\\n") + "'))"),
        space,
    )
    assert space["run"].groupby(["layer", "token"]).size().eq(3).all()
    view.buttons["Copy settings"].click()
    assert "TopK(k=3, temperature=2.0)" in view._code.value and view._code.layout.display is None


def test_png_is_the_view(view, tmp_path):
    view.token.value = 4
    path = tmp_path / "view.png"
    picture = view.png(path)
    assert imread(path).shape == (690, 980, 4)
    titles = [ax.get_title(loc="left") for ax in picture.axes]
    assert titles[1:4] == ["1. Logits", "2. Scores: sigmoid, best 4", "3. Weights, sum 2"]
    assert "Layer 1 sends token 4" in picture._supxlabel.get_text().replace("\n", " ")


def test_without_a_text_it_says_what_to_do(lab):
    view = router_explorer(lab, "")
    assert view.state == "empty" and all(
        p.spec["empty"] == "no text yet: write one, or choose an example" for p in view._panels
    )
    assert all(len(table) == 0 for table in view.data.values())
    with pytest.raises(ColibriError, match="nothing to draw yet; give it a text"):
        view.png()
    view.text.value = TEXT
    assert view.wait(60) and view.state == "ready"
    view.close()


def test_an_error_is_shown_the_picture_stays_and_the_view_recovers(lab):
    view = router_explorer(lab, TEXT)
    before = values_of(view._panels[0]).copy()
    with busy(lab):
        view.k.value = 7
        assert view.wait(60) and view.state == "error"
        assert "is generating" in view._message.value and "the last picture stays" in view._message.value
        view.k.value = 4
        assert np.array_equal(values_of(view._panels[0]), before, equal_nan=True)
    view.k.value = 6
    assert view.wait(60) and view.state == "ready" and view.error is None
    view.text.value = ""
    assert view.wait(60) and view.state == "error" and "text is empty" in view._message.value
    with pytest.raises(SettingError, match="text is empty"):
        view.read("")
    view.close()


def test_opened_while_the_model_is_busy(lab):
    with busy(lab):
        view = router_explorer(lab, TEXT)
        assert view.state == "error" and view._panels[0].spec["empty"] == "nothing could be read"
    view.read(TEXT)
    assert view.state == "ready"
    view.close()


def test_the_view_leaves_the_models_routing_alone(view, lab):
    wanted = lab.generate("x", max_tokens=4, seed=1).tokens
    view.k.value = 1
    view.wait(60)
    run = lab.generate("x", max_tokens=4, seed=1)
    assert run.tokens == wanted and run.settings["routing"] == "model"


def test_a_burst_of_slider_moves_measures_the_last_only(view):
    for step in range(1, 20):
        view.temperature.value = 2 ** (step / 8)
    assert view.wait(60) and view.state == "ready"
    measured = view.data["losses"]
    assert round(view.temperature.value, 6) in measured.temperature.tolist() and len(measured) < 15


def test_two_threads_hammering_one_view(view):
    def actions(pick):
        return (
            lambda: setattr(view.token, "value", pick.randint(0, view.token.max)),
            lambda: setattr(view.layer, "value", pick.randint(1, 6)),
            lambda: setattr(view.k, "value", pick.randint(1, 16)),
            lambda: setattr(view.temperature, "value", 2 ** pick.uniform(-3, 3)),
            lambda: setattr(view.text, "value", pick.choice([TEXT, "In those days", "lantern, n."])),
            view.as_trained,
            lambda: view.data,
            view.png,
        )

    hammer(actions, 25)
    assert view.wait(60)
    assert view.state == "ready" and view.reading.text == view.text.value
    ids = view.reading.choose(view.layer.value, routers.TopK(view.k.value, view.temperature.value))[0]
    assert view.look.ids == ids[view.look.token].tolist()
    assert f"k = {view.k.value}" in view._verdict.value


def test_png_fallback_shows_the_same_panels(lab):
    view = router_explorer(lab, TEXT, live="png")
    first = bytes(view._panels[0].value)
    view.token.value = 3
    assert first.startswith(b"\x89PNG") and bytes(view._panels[0].value) != first
    view.close()


def test_a_one_token_text_has_no_loss_and_says_so(lab):
    view = router_explorer(lab, "x")
    assert view.state == "ready" and "at least two tokens" in view._verdict.value
    view.k.value = 2
    assert view.wait(60) and view.state == "ready" and view.data["losses"].empty
    view.close()


def test_softmax_models_have_no_bias_ticks(tmp_path, project):
    container = tmp_path / "olmoe"
    cl.convert(project / "tests/oracle/olmoe", container, progress=False, quantize="fp32", tensors="all")
    lab = cl.open(container, allow_fp32=True, threads=1)
    view = router_explorer(lab, "hello there")
    scores = values_of(view._panels[1])
    assert view._panels[1].spec["title"].startswith("2. Scores: softmax") and np.isnan(scores[2]).all()
    assert scores[0].sum() == pytest.approx(1, rel=1e-5)
    view.close()


# Pictures


@pytest.fixture(scope="module")
def readings(lab):
    return {domain: routing.read_domains(lab, {domain: group})[domain] for domain, group in routing.texts().items()}


def said(picture) -> str:
    return picture._supxlabel.get_text().replace("\n", " ")


def test_pictures_say_the_numbers_of_their_tables(lab, readings):
    table = routing.specialisation(readings).set_index("layer")
    text = said(router_plots.specialisation(readings))
    assert f"Layer 6: {table.owned[6]} of 32 experts" in text and f"{table.nmi[6]:.2f}, by chance" in text
    assert "grows with depth" in text and "grows" not in said(router_plots.specialisation(readings, (6, 1)))
    near = locality.overlap(routing.trace_of(readings), (1,))
    assert f"overlap is {near.overlap.mean():.0%} on average; chance is 12.5%" in said(router_plots.overlap(near))
    load = routing.balance(readings).query("layer == 5").set_index("of").effective
    text = said(router_plots.balance(readings, 5, "german"))
    assert f"like {load['all domains']:.1f} equally used ones; inside german like {load['german']:.1f}" in text
    text = said(router_plots.flips(routing.flips(readings["verse"][0], scales=(1e-6, 1e-2, 1e-1))))
    assert "1e-06: 0 %" in text


def test_the_divergence_matrix_solves_for_each_texts_own_halves(readings):
    table = locality.domains(routing.trace_of(readings))
    picture = router_plots.divergence(table)
    grid = picture.axes[0].collections[0].get_array().reshape(6, 6)
    names = list(readings)
    for row in table.itertuples():
        a, b = names.index(row.a), names.index(row.b)
        assert grid[a, b] == grid[b, a] == pytest.approx(row.between)
        assert (grid[a, a] + grid[b, b]) / 2 == pytest.approx(row.within)


def test_masking_and_sweep_pictures(lab):
    table = pd.DataFrame([[0.3, 0.01], [-0.02, 0.5]], ["code", "verse"], ["code", "verse"])
    text = said(router_plots.masking(table))
    assert "0.30 to 0.50 nats per token (verse most)" in text and "at most 0.01" in text
    rows = {
        "mean": [3.0, 3.1, 3.4],
        "change": [0.0, 0.1, 0.4],
        "experts_per_token": [4, 4, 32.0],
        "ms_per_token": [1.0, 1.0, 2.0],
    }
    sweep = pd.DataFrame(rows, index=["model", "noise", "soft"])
    assert (
        said(router_plots.sweep(sweep)) == "soft costs most, +0.40 nats per token; noise least of the changes, +0.100."
    )
    by_k = sweep.set_index(pd.Index([4, 6, 8]))
    assert (
        said(router_plots.curve(by_k, "k", 4))
        == "Least loss at k 4: 3.000 nats per token. As trained (4) 3.000; at 8 3.400: more is not better."
    )
    better = by_k.assign(mean=[3.4, 3.1, 3.0])
    assert "more is not better" not in said(router_plots.curve(better, "k", 4))


def test_every_picture_is_drawn_within_its_canvas(lab, readings):
    table = routing.rules([2.0, 1.0, 0.5, -1.0], 2, [0, 0, 0, 2.0], 2, 1)
    worth = {
        "which": ["least used", "random"] * 2,
        "masked": [6, 6, 12, 12],
        "picks_percent": [1.0, 3, 2, 6],
        "nats": [0.1, 0.2, 0.3, 0.4],
    }
    worth = pd.DataFrame(worth | {"nats_per_percent": [0.1, 0.07, 0.15, 0.07]})
    pictures = [
        router_plots.rules(table),
        router_plots.without_experts(worth),
        router_plots.tokens(readings["chinese"][0], 6),
        router_plots.explorer(readings["german"][0], 3, 7, k=8, temperature=2.0),
    ]
    for picture in pictures:
        picture.draw_without_rendering()
        box = picture._supxlabel.get_window_extent() if picture._supxlabel else None
        assert box is not None and box.x1 <= picture.bbox.width and box.y0 >= 0
