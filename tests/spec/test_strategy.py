"""Strategies: the axes, what they come to for each replica, and which of them exclude one another."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.plan.division import replica_sizes
from weft.spec.admission import problem_of_spec
from weft.spec.job_spec import JobSpec, SpecError
from weft.spec.presets import PRESETS
from weft.spec.replica import Replica
from weft.spec.strategy import Prefetch, Strategy

JOB = {"entry": "digits.py:workload", "steps": 1, "batch_size": 8}
FULL = """
preset = "ddp"
schedule = "gpipe"
stages = 2
stages_per_worker = 1
split = [3]
microbatches = 4
recompute = true
loaders = 2
resident = true
window = 9
threads = 2
replicas = 3
sync = "coarse"
waits = "layer"
staleness = [0, 1, 2]
staleness_warmup = 10
update = "cpu"
share = "adaptive"
shares = [1, 0.5, 0]
bucket_mib = 0.5
prefetch = { load = 3, transfer = 4 }
precision = "bf16"
clip_norm = 1
recovery = "off"
verify = "digest"
compile = true
spares = false
replan = false
skip_nonfinite = true
"""
DEFAULTS = {
    "preset": None,
    "schedule": "1f1b",
    "stages": 1,
    "stages_per_worker": None,
    "split": None,
    "microbatches": 1,
    "threads": None,
    "recompute": False,
    "loaders": 1,
    "resident": False,
    "window": None,
    "replicas": None,
    "sync": "fine",
    "waits": None,
    "staleness": 0,
    "staleness_warmup": 0,
    "update": "local",
    "share": "fixed",
    "shares": None,
    "bucket_mib": 25.0,
    "prefetch": {"load": None, "transfer": 2},
    "precision": "fp32",
    "clip_norm": None,
    "recovery": "snapshot",
    "verify": "off",
    "compile": False,
    "spares": None,
    "replan": None,
    "skip_nonfinite": False,
}


def parsed(**axes: Any) -> Strategy:
    return JobSpec.parse({"job": JOB, "strategy": axes}).strategy


def refusal(**axes: Any) -> str:
    with pytest.raises(SpecError) as caught:
        parsed(**axes)
    return str(caught.value).removeprefix("job spec: ")


# --- the axes


def test_every_axis_of_a_table_reaches_the_strategy() -> None:
    table = tomllib.loads(FULL)
    assert table.keys() == Strategy.model_fields.keys()
    assert parsed(**table).model_dump() == table


def test_an_axis_that_is_left_out_has_a_default() -> None:
    assert Strategy().model_dump() == DEFAULTS
    assert (parsed(prefetch={"load": 5}).prefetch, parsed(replicas=[{}]).replicas) == (Prefetch(load=5), [Replica()])


def test_whether_units_are_compiled_may_be_left_open_beside_any_plan() -> None:
    """Also beside what compiled units cannot be, which are eager then."""
    for axes in ({}, {"preset": "auto"}, {"preset": "1f1b"}, {"stages": 2, "schedule": "zero-bubble"}):
        strategy = parsed(compile="auto", **axes)
        assert (strategy.compile, strategy.is_open) == ("auto", True)
        assert Strategy.model_validate(strategy.model_dump()) == strategy
        spec = JobSpec.parse({"job": JOB, "strategy": axes | {"compile": "auto"}})
        assert problem_of_spec(spec) is None
    assert not parsed(compile=True).is_open
    assert parsed(preset="auto").is_open
    for value in ("yes", 1, "true"):
        assert 'does not fit; write true or false, or "auto"' in refusal(compile=value)


@pytest.mark.parametrize("model", [Replica, Prefetch])
def test_every_field_of_a_nested_table_says_what_it_is(model: type[Replica] | type[Prefetch]) -> None:
    assert [name for name, field in model.model_fields.items() if not field.description] == []


# --- what they come to for each replica


def test_one_replica_on_the_cpu_is_the_default() -> None:
    strategy = parsed(stages=2, split=[3], microbatches=4)
    assert strategy.replica_list == (Replica(device="cpu", stages=2, split=[3], microbatches=4),)
    assert (strategy.microbatch_counts, strategy.staleness_list, strategy.share_list) == ([4], [0], [1.0])


def test_a_number_of_replicas_are_cut_alike() -> None:
    strategy = parsed(replicas=3, stages=2, split=[3], microbatches=4, staleness=2)
    assert strategy.replica_list == (Replica(stages=2, split=[3], microbatches=4),) * 3
    assert (strategy.microbatch_counts, strategy.staleness_list) == ([4, 4, 4], [2, 2, 2])
    assert replica_sizes(9, strategy.share_list) == [3, 3, 3]


def test_listed_replicas_are_as_given_with_the_strategys_microbatches_where_they_name_none() -> None:
    listed = [{"device": "gpu", "stages": 2, "split": [5], "microbatches": 8}, {}]
    strategy = parsed(replicas=listed, microbatches=3, staleness=[0, 1], shares=[3, 1])
    assert strategy.replica_list == (
        Replica(device="gpu", stages=2, split=[5], microbatches=8),
        Replica(device="cpu", stages=1, split=None, microbatches=3),
    )
    assert (strategy.microbatch_counts, strategy.staleness_list) == ([8, 3], [0, 1])
    assert replica_sizes(8, strategy.share_list) == [6, 2]


def test_the_lists_are_not_the_strategys_own() -> None:
    strategy = parsed(replicas=2, staleness=[0, 1], shares=[3, 1])
    strategy.staleness_list.clear()
    strategy.share_list.clear()
    assert (strategy.staleness_list, strategy.share_list) == ([0, 1], [3.0, 1.0])


# --- what excludes what


@pytest.mark.parametrize(
    "split", [[], [1, 2], [0], [-1], [10**30], list(range(1, 10_000))], ids=lambda split: f"{split!s:.20}"
)
def test_a_split_that_does_not_fit_the_stages_is_refused(split: list[int]) -> None:
    remedy = "does not begin 2 stages; give stages - 1 growing numbers of units above 0"
    for message in (refusal(stages=2, split=split), refusal(replicas=[{"stages": 2, "split": split}])):
        assert message.endswith(remedy)
        assert len(message) < 300
    assert refusal(stages=2, split=split).startswith("strategy: split = ")
    assert refusal(replicas=[{}, {"stages": 2, "split": split}]).startswith("strategy.replicas.1: split = ")


def test_a_split_of_one_stage_is_refused() -> None:
    assert refusal(split=[1]).endswith(
        "split = [1] cuts the model, and stages = 1 does not; give more stages, or no split"
    )


def test_a_split_may_name_its_units() -> None:
    strategy = parsed(stages=3, split=["transformer.h.4", "lm_head"])
    assert strategy.replica_list[0].split == ["transformer.h.4", "lm_head"]
    assert Strategy.model_validate(strategy.model_dump()) == strategy
    window = parsed(replicas=[{"device": "gpu", "working_window": 1, "split": ["a", "b"]}], update="cpu")
    assert window.replica_list[0].split == ["a", "b"], "layers of a streamed model are named alike"


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (["a"], "split = ['a'] does not begin 3 stages; give stages - 1 names of units in the order in which they run"),
        (["a", "a"], "split = ['a', 'a'] has a name twice; give the first unit of each stage but the first"),
        ([1, "a"], "split: [1, 'a'] is not all names; write either numbers of units or names of modules, for example "),
        (["a", 0.5], "split: ['a', 0.5] is not all names; write either numbers of units or names of modules"),
        ("a", "split: 'a' is no list; write one, for example [1, 2]"),
    ],
)
def test_a_split_that_names_its_units_wrongly_is_refused(split: object, message: str) -> None:
    for place, refused in {
        "strategy": refusal(stages=3, split=split),
        "strategy.replicas.1": refusal(replicas=[{}, {"stages": 3, "split": split}]),
    }.items():
        assert refused.startswith(place)
        assert message in refused


@pytest.mark.parametrize("split", [[1, 1], [2, 1]])
def test_a_split_that_does_not_grow_is_refused(split: list[int]) -> None:
    assert "does not begin 3 stages; give stages - 1 growing numbers" in refusal(stages=3, split=split)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (
            {"stages": 1, "replicas": [{"device": "gpu"}]},
            "strategy: stages cannot stand beside a list of replicas; write it in the list, for example "
            'replicas = [{ device = "gpu", stages = 1 }]',
        ),
        (
            {"split": [4], "replicas": [{}] * 3},
            "strategy: split cannot stand beside a list of replicas; write it in the list, for example replicas = "
            '[{ device = "cpu", stages = 2, split = [4] }, { device = "cpu", stages = 2, split = [4] }, ...]',
        ),
        ({"replicas": 0}, "strategy.replicas: 0 is too small; write 1 or more"),
        ({"replicas": []}, "strategy.replicas: [] is too short; write at least 1"),
        ({"replicas": [3]}, "strategy.replicas.0: 3 is no table; write keys and values"),
        ({"replicas": [{}, {"devise": 1}]}, "strategy.replicas.1.devise: unknown key; did you mean device?"),
        ({"prefetch": {"lod": 1}}, "strategy.prefetch.lod: unknown key; did you mean load?"),
        ({"staleness": [0, 17], "replicas": 2}, "strategy.staleness.1: 17 is too large; write 16 or less"),
        (
            {"staleness": [1, 2], "replicas": 3},
            "strategy: staleness = [1, 2] has 2 numbers; give 3, one for each replica",
        ),
        ({"shares": []}, "strategy.shares: [] is too short; write at least 1"),
        (
            {"shares": [0, 0.0], "replicas": 2},
            "strategy: shares = [0.0, 0.0] gives nobody work; give at least one number above 0",
        ),
        (
            {"replicas": [{"gpus": 1}]},
            "strategy.replicas.0: gpus cannot stand beside device = 'cpu'; leave it out, or write device = 'gpu'",
        ),
        (
            {"replicas": [{"device": "gpu", "stages": 2, "gpus": 3}]},
            "strategy.replicas.0: gpus = 3 is more than stages = 2; a GPU needs a stage",
        ),
        (
            {"replicas": [{"device": "gpu", "working_window": 0}]},
            "strategy.replicas.0.working_window: 0 is too small; write 1 or more",
        ),
        (
            {"replicas": [{"device": "gpu", "working_window": "all"}]},
            "strategy.replicas.0.working_window: 'all' does not fit; write a number of layers, or \"auto\"",
        ),
        (
            {"replicas": [{"device": "gpu", "working_window": 2, "stages": 2}]},
            "strategy.replicas.0: stages = 2 cannot stand beside working_window",
        ),
        (
            {"replicas": [{"device": "gpu", "working_window": 2}]},
            "strategy: update = 'local' cannot stand beside a replica with a working_window; use update = 'cpu'",
        ),
        (
            {"replicas": [{"device": "gpu"}, {}], "verify": "digest"},
            "strategy: verify = 'digest' compares what CPU workers update, and with update = 'local' a GPU updates "
            "parameters itself; use update = 'cpu' or verify = 'off'",
        ),
        (
            {"spares": True, "recovery": "off"},
            "strategy: spares = true is for a job that goes on after a lost worker, and with recovery = 'off'",
        ),
        (
            {"preset": "stronghold", "staleness": 1},
            "strategy: staleness = 1 cannot stand beside a replica with a working_window; use staleness = 0",
        ),
        (
            {
                "replicas": [{"device": "gpu", "working_window": 2}, {}],
                "update": "cpu",
                "share": "stealing",
            },
            "strategy: share = 'stealing' cannot stand beside a replica with a working_window; use share = 'fixed'",
        ),
        (
            {"shares": [1], "share": "stealing"},
            "strategy: shares cannot stand beside share = 'stealing'; leave shares out",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_axis_and_a_remedy(axes: dict[str, Any], message: str) -> None:
    assert refusal(**axes).startswith(message)
    assert len(refusal(**axes)) < 300


# --- presets


def test_an_axis_that_is_given_counts_before_the_presets() -> None:
    assert parsed(preset="parameter-server", staleness=0, microbatches=2) == Strategy(
        preset="parameter-server", replicas=2, sync="fine", staleness=0, update="cpu", microbatches=2
    )


def test_an_axis_given_as_none_is_the_presets() -> None:
    assert Strategy(preset="ddp", replicas=None) == Strategy(preset="ddp")


def test_a_number_of_replicas_in_a_preset_goes_with_stages_and_split() -> None:
    assert (
        parsed(preset="ddp", stages=3, split=[2, 4]).replica_list
        == (Replica(stages=3, split=[2, 4], microbatches=1),) * 2
    )


def test_listed_replicas_replace_the_stages_of_a_preset() -> None:
    strategy = parsed(preset="gpipe", replicas=[{"device": "gpu", "stages": 3}])
    assert strategy.replica_list == (Replica(device="gpu", stages=3, microbatches=4),)


def test_a_number_of_replicas_replaces_a_presets_list() -> None:
    strategy = parsed(preset="hybrid-fine", replicas=2, stages=2)
    assert strategy.replica_list == (Replica(stages=2, microbatches=4),) * 2
    assert strategy.share == "adaptive"


@pytest.mark.parametrize(
    ("preset", "axes", "told", "example"),
    [
        (
            "hybrid-fine",
            {"stages": 3},
            "stages cannot stand beside the list of replicas (preset = 'hybrid-fine' has one); write it in the list",
            '[{ device = "gpu", stages = 3 }, { device = "cpu", microbatches = 1 }]',
        ),
        (
            "hybrid-coarse",
            {"split": ["a.b", 'c"d']},
            "split cannot stand beside the list of replicas",
            r'[{ device = "gpu", stages = 3, split = ["a.b", "c\"d"] }, { device = "cpu", microbatches = 1 }]',
        ),
        ("zero-offload", {"split": [4]}, "split cannot", '[{ device = "gpu", stages = 2, split = [4] }]'),
        ("zero-offload", {"stages": 2}, "stages cannot", '[{ device = "gpu", stages = 2 }]'),
        (
            "hyscale",
            {"stages": 2, "split": [4]},
            "stages and split cannot",
            '[{ device = "gpu", stages = 2, split = [4] }, { device = "cpu", stages = 2, split = [4] }]',
        ),
        (
            "stronghold",
            {"split": [4, 5]},
            "split cannot stand beside the list of replicas (preset = 'stronghold' has one); write it in the list",
            '[{ device = "gpu", working_window = "auto", split = [4, 5] }]',
        ),
        (
            "stronghold",
            {"stages": 4},
            "stages cannot stand beside the list of replicas (preset = 'stronghold' has one), where working_window "
            "streams the layers of a GPU; leave stages out, and write in the list working_window,",
            '[{ device = "gpu", working_window = 2 }]',
        ),
        (
            "stronghold",
            {"stages": 2, "split": [4]},
            "stages cannot stand beside the list of replicas",
            '[{ device = "gpu", working_window = "auto", split = [4] }]',
        ),
    ],
)
def test_a_cut_beside_a_presets_list_is_refused_with_that_list_which_is_taken(
    preset: str, axes: dict[str, Any], told: str, example: str
) -> None:
    """The example once had another axis than was given, and none of the preset's own, so that what it names trained
    something else, or nothing."""
    refused = refusal(preset=preset, **axes)
    assert refused.startswith(f"strategy: {told}")
    assert refused.endswith(f"for example replicas = {example}")
    taken = parsed(preset=preset, **tomllib.loads(f"replicas = {example}"))
    assert [each.device for each in taken.replica_list] == [each.device for each in parsed(preset=preset).replica_list]


def test_an_example_leaves_out_what_does_not_agree_with_it() -> None:
    own = {"device": "gpu", "stages": 4, "gpus": 4, "split": [1, 2, 3], "microbatches": 8}
    example = '[{ device = "gpu", stages = 2, microbatches = 8 }]'
    assert refusal(stages=2, replicas=[own]).endswith(f"for example replicas = {example}")
    assert parsed(**tomllib.loads(f"replicas = {example}")).replica_list[0].num_stages == 2
    long = refusal(split=list(range(1, 200)), replicas=[own])
    assert long.endswith("stages = 200, microbatches = 8, split = [1, 2, 3, 4, 5, 6, 7, 8, ...] }]")


@pytest.mark.parametrize(
    ("num_gpus", "stages", "gpus"), [(0, 2, 1), (1, 2, 1), (2, 2, None), (3, 3, None), (1000, 256, None)]
)
def test_all_stages_are_as_many_as_there_are_gpus_and_two_where_there_is_one(
    num_gpus: int, stages: int, gpus: int | None
) -> None:
    strategy = parsed(preset="hybrid-fine")
    pipeline, host = strategy.on(num_gpus).replica_list
    assert (pipeline.stages, pipeline.gpus, host.stages) == (stages, gpus, 1)
    assert strategy.replica_list[0].num_stages == 2, "the least, where nobody knows"
    assert parsed(**strategy.on(num_gpus).model_dump(exclude_none=True)) == strategy.on(num_gpus)


def test_all_stages_take_the_gpus_that_others_leave() -> None:
    replicas = [{"device": "gpu", "stages": 3, "gpus": 2}, *[{"device": "gpu", "stages": "all"}] * 2]
    assert [replica.stages for replica in parsed(replicas=replicas).on(8).replica_list] == [3, 3, 3]


@pytest.mark.parametrize(
    ("axes", "told"),
    [
        ({"device": "cpu"}, "stages = 'all' is as many as there are GPUs; write device = 'gpu' beside it, or a number"),
        ({"device": "gpu", "split": [1]}, "split cannot stand beside stages = 'all', whose number the machine's GPUs"),
        ({"device": "gpu", "gpus": 1}, "gpus cannot stand beside stages = 'all', whose number the machine's GPUs"),
    ],
)
def test_what_contradicts_all_stages_is_refused(axes: dict[str, Any], told: str) -> None:
    assert refusal(replicas=[axes | {"stages": "all"}]).startswith(f"strategy.replicas.0: {told}")


def test_stages_are_a_number_or_all() -> None:
    assert "write a number of stages, or" in refusal(replicas=[{"device": "gpu", "stages": "some"}])


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("hybrid-fin", "did you mean hybrid-fine?"),
        ("dpd", "did you mean ddp?"),
        ("?", "known here: auto, model-parallel, "),
    ],
)
def test_a_preset_that_is_not_there_is_refused_with_the_one_that_was_meant(name: str, remedy: str) -> None:
    assert refusal(preset=name).startswith(f"strategy.preset: {name!r} is no preset; {remedy}")


rows = st.fixed_dictionaries(
    {},
    optional={
        "preset": st.sampled_from(list(PRESETS)),
        "stages": st.integers(1, 3),
        "microbatches": st.integers(1, 4),
        "replicas": st.integers(1, 3) | st.lists(st.sampled_from([{}, {"device": "gpu", "stages": 2}]), min_size=1),
        "staleness": st.integers(0, 2) | st.lists(st.integers(0, 2), min_size=1, max_size=2),
        "shares": st.lists(st.floats(0, 1), min_size=1, max_size=2),
        "share": st.sampled_from(["fixed", "adaptive", "stealing"]),
        "clip_norm": st.none() | st.floats(0.5, 2),
    },
)


@given(axes=rows)
def test_a_strategy_that_was_taken_is_the_same_when_it_is_dumped_and_parsed_again(axes: dict[str, Any]) -> None:
    try:
        spec = JobSpec.parse({"job": JOB, "strategy": axes})
    except SpecError:
        return
    again = JobSpec.parse(spec.to_wire())
    assert again == spec
    assert again.to_wire() == spec.to_wire()
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
    lengths = {len(values) for values in (again.strategy.replica_list, again.strategy.microbatch_counts)}
    assert lengths == {len(again.strategy.staleness_list)} == {len(again.strategy.share_list)}
