"""The engine benchmark: its processes answer, and its ratios are what its rows say."""

from __future__ import annotations

import numpy as np
import peers
import pytest

import engine
from colibri_lab.front import container_of


@pytest.fixture(scope="module")
def peer():
    with peers.Peer("colibri", container_of("colibri-tiny", progress=False), threads=1, prompt=32, tokens=8) as found:
        yield found


def test_an_engine_in_its_own_process_answers_with_samples(peer):
    assert peer.about["settings"]["threads"] == 1 and peer.about["token_bytes"] > 1e6
    samples = peer.ask("decode", tokens=8)
    assert len(samples) == 8 // peers.GROUP
    assert all(seconds > 0 and 0 <= held <= 1 for seconds, held in samples + peer.ask("prefill"))


def test_logits_come_back_as_a_file(peer, tmp_path):
    top = peer.ask("logits", count=5, path=str(tmp_path / "logits.npy"))
    found = np.load(tmp_path / "logits.npy")
    assert found.shape == (5, 4096) and found.argmax(1).tolist() == top


def test_streaming_tells_wall_compute_and_waiting_apart(peer):
    found = peer.ask("stream", tokens=4)
    assert found["wall_s"] == pytest.approx(found["compute_s"] + found["wait_s"])
    assert found["lanes"] == 2 and found["hit_rate"] == 1.0


def test_limits_are_measured_in_a_process_too():
    with peers.Peer("limits", "-", threads=1) as found:
        measured = found.ask("measure")
    assert {"read", "fma"} <= set(measured) and all(len(samples) == 1 for samples in measured.values())


def test_a_process_that_dies_says_so():
    with pytest.raises(RuntimeError, match="colibri nowhere ended with exit code 1"):
        peers.Peer("colibri", "nowhere", threads=1, prompt=8, tokens=8)


def row(phase, format, threads, speed, clean=9, **more) -> dict:
    return {
        "phase": phase, "format": format, "threads": threads, "tokens_per_s": speed, "low": speed, "high": speed,
        "samples": 9, "clean": clean, "dropped": 9 - clean, "bytes_per_token": 10**6, "bound": 2 * speed, "share": 0.5,
        "bound_clean": 9, **more,
    }  # fmt: skip


@pytest.fixture
def run():
    found = engine.Run(engine.parse(["--formats", "int8,int4", "--threads", "1,2"]), progress=False)
    for threads, theirs in ((1, 20.0), (2, 40.0)):
        found.rows += [row("decode", "int8", threads, 40.0 * threads), row("decode", "q8_0", threads, theirs)]
        found.rows += [row("decode", "int4", threads, 60.0 * threads), row("decode", "q4_0", threads, 30.0)]
    found.rows += [
        row("prefill", f, 2, s) for f, s in (("int8", 800.0), ("int4", 600.0), ("q8_0", 90.0), ("torch fp32", 200.0))
    ]
    return found


def test_ratios_take_the_less_favourable_thread_count_and_the_best_peer(run):
    result = run.result()
    assert result["ratios"] == {"decode_int8": 2.0, "decode_int4": 2.0, "prefill_int8": 4.0, "prefill_int4": 3.0}
    assert result["bound_share"] == {"decode_int8": 0.5, "decode_int4": 0.5}
    text = engine.text(result)
    assert "| decode_int8 | 2.00 | 50 % |" in text and "| prefill_int4 | 3.00 |  |" in text


def test_without_clean_samples_there_is_no_ratio(run):
    run.rows[1]["clean"] = 2  # q8_0 on one thread
    run.rows[-1]["clean"] = 0  # torch
    ratios = run.result()["ratios"]
    assert ratios["decode_int8"] is None and ratios["decode_int4"] == 2.0
    assert ratios["prefill_int8"] == pytest.approx(800 / 90)
    assert "| decode_int8 | not measured |" in engine.text(run.result())


def test_a_bound_that_was_not_measured_cleanly_gives_no_share(run):
    run.rows[0]["bound_clean"] = 1
    assert run.result()["bound_share"]["decode_int8"] is None


def test_unknown_parts_are_refused(capsys):
    with pytest.raises(SystemExit):
        engine.parse(["--parts", "decod"])
    assert "parts decode, prefill, stream" in capsys.readouterr().err
