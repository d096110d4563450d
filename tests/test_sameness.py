"""What differs between the settings of two runs, named in full."""

from podtune.config.sameness import changes, may_change


def test_changes_are_named_by_their_whole_key_within_mappings_and_lists_of_them():
    before = {"a": 1, "b": {"c": 2, "d": [{"e": 3}, {"e": 4}]}, "f": [1, 2], "gone": None}
    now = {"a": 1, "b": {"c": 5, "d": [{"e": 3}, {"e": 6}]}, "f": [1], "new": 7}
    assert [str(change) for change in changes(before, now)] == [
        "b.c: 2 -> 5", "b.d.1.e: 4 -> 6", "f: [1, 2] -> [1]", "new: none -> 7",
    ]  # fmt: skip


def test_lists_of_other_lengths_differ_as_a_whole():
    (change,) = changes({"d": [{"e": 3}]}, {"d": [{"e": 3}, {"e": 4}]})
    assert (change.key, change.now) == ("d", [{"e": 3}, {"e": 4}])


def test_what_is_around_a_run_may_change_and_what_is_trained_may_not():
    assert all(map(may_change, ("output.path", "mesh.data", "train.remat", "eval.prompts")))
    assert not any(map(may_change, ("train.steps", "train.remat_of_something", "seed", "method.lora.rank")))
