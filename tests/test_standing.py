"""Where a run stands: what a checkpoint notes of it comes back, whole on a resume and in part on a rollback."""

import json

from podtune.config.training import Train
from podtune.train.evaluation import Best
from podtune.train.recovery import BadSteps
from podtune.train.standing import NOTED, Standing


def a_standing() -> Standing:
    return Standing(BadSteps(Train()), Best())


def seen() -> Standing:
    standing = a_standing()
    standing.bad.passed_over, standing.bad.rollbacks = {7, 3}, 2
    standing.best.see(1.5, 4)
    standing.best.see(1.7, 8)
    standing.loss, standing.eval_loss, standing.first_eval_loss = float("nan"), 1.7, 2.5
    standing.evaluated_at, standing.skipped, standing.seconds = 8, 1, 90.5
    return standing


def as_saved(standing: Standing) -> dict:
    assert tuple(standing.notes()) == NOTED
    return json.loads(json.dumps({"step": 9, **standing.notes()}, allow_nan=False))


def test_a_resumed_run_stands_where_the_saved_one_did():
    resumed = a_standing()
    resumed.resume(as_saved(seen()))
    assert resumed.notes() == seen().notes()
    assert resumed.saved_at == 9
    assert (resumed.loss, resumed.best.evaluations_since) == (None, 1)


def test_going_back_keeps_what_was_learnt_of_bad_steps_and_forgets_what_was_evaluated():
    standing = seen()
    saved = as_saved(a_standing())
    standing.go_back(saved)
    assert (standing.bad.passed_over, standing.bad.rollbacks, standing.skipped) == ({3, 7}, 2, 1)
    assert standing.seconds == 90.5  # the time is spent, whatever came of it
    assert (standing.best.loss, standing.eval_loss, standing.evaluated_at) == (None, None, None)
