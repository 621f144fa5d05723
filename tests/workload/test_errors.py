from __future__ import annotations

import pickle

from weft.workload.faults import NonFiniteLoss


def test_a_non_finite_loss_says_where_it_was_and_what_to_do() -> None:
    error = NonFiniteLoss(17, float("nan"), 2)
    assert str(error) == "loss is nan at step 17 (microbatch 2); lower the learning rate, or check the data"
    assert "microbatch" not in str(NonFiniteLoss(17, float("inf")))


def test_a_non_finite_loss_reaches_another_process_whole() -> None:
    error = NonFiniteLoss(17, float("inf"), 2)
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.step, copy.value, copy.microbatch) == (17, float("inf"), 2)
    assert str(copy) == str(error)
