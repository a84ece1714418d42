from __future__ import annotations

import threading

import pytest

from colibri_lab.errors import ColibriError
from colibri_lab.ui.newest import Newest


def test_only_the_newest_of_what_waited_is_served():
    served, begun, go = [], threading.Event(), threading.Event()

    def serve(job, stale):
        begun.set()
        go.wait(60)
        served.append((job, stale()))

    worker = Newest(serve, "test-newest")
    worker.submit(0)
    assert begun.wait(60)
    for job in (1, 2, 3):
        worker.submit(job)
    go.set()
    assert worker.wait(60)
    assert served == [(0, True), (3, False)]
    assert "test-newest" not in [t.name for t in threading.enumerate()]


def test_an_error_in_the_background_ends_that_job_only():
    served = []

    def serve(job, stale):
        if job == "bad":
            raise ValueError("cannot")
        served.append(job)

    worker = Newest(serve, "test-newest")
    worker.submit("bad")
    assert worker.wait(60)
    worker.submit("good")
    assert worker.wait(60) and served == ["good"]
    with pytest.raises(ValueError, match="cannot"):
        worker.run("bad")


def test_run_answers_in_this_thread_after_dropping_what_waited():
    seen = []
    worker = Newest(lambda job, stale: seen.append((job, threading.current_thread())) or job, "test-newest")
    assert worker.run(7) == 7
    assert seen == [(7, threading.current_thread())]


def test_stop_makes_the_running_job_stale_and_waits_for_it():
    begun, ended = threading.Event(), []

    def serve(job, stale):
        begun.set()
        while not stale():
            pass
        ended.append(job)

    worker = Newest(serve, "test-newest")
    worker.submit(1)
    assert begun.wait(60)
    assert worker.stop(10) and ended == [1]


def test_waiting_from_inside_does_not_wait_for_itself():
    answers = []
    worker = Newest(lambda job, stale: answers.append(worker.wait(60)), "test-newest")
    worker.submit(1)
    assert worker.wait(60) and answers == [False]


def test_running_from_inside_is_refused_instead_of_waiting_for_itself():
    worker = Newest(lambda job, stale: worker.run(2), "test-newest")
    with pytest.raises(ColibriError, match="from inside its own run"):
        worker.run(1)
    assert worker.wait(60)


def test_what_runs_is_interrupted_when_something_newer_comes_and_only_then():
    begun, interrupted = threading.Event(), []

    def serve(job, stale):
        begun.set()
        while job == "old" and not stale():
            pass

    worker = Newest(serve, "test-newest", interrupt=lambda: interrupted.append(worker.more))
    worker.submit("old")
    assert begun.wait(60)
    worker.submit("new")
    assert worker.wait(60) and interrupted == [True]  # the new one was there already
    worker.stop()
    assert interrupted == [True]


def test_after_a_timeout_wait_says_so():
    go = threading.Event()
    worker = Newest(lambda job, stale: go.wait(60), "test-newest")
    worker.submit(1)
    assert worker.wait(0.01) is False
    go.set()
    assert worker.wait(60)
