"""What each method minimises, and when ACL-Grad lets the contrastive gradient through."""

import math
from collections.abc import Sequence
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from models.network import ExitOutput
from tests.training.toy import tiny_architecture_network
from training.losses import acl_cl, acl_embed, distillation, scl
from training.methods import (
    METHODS,
    Contrast,
    Distillation,
    MethodName,
    Stage,
    StepExits,
    acl_grad,
    angle_between,
    exit_weights,
    objective,
    prepare_stage,
    scored_exits,
    step_exits,
    weighted_sum,
)


def vectors(*numbers: Sequence[float] | None) -> list[Tensor | None]:
    return [None if n is None else torch.tensor(n, dtype=torch.float32) for n in numbers]


def same(ours: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> bool:
    return len(ours) == len(expected) and all(
        (a is None and b is None) or (a is not None and b is not None and torch.allclose(a, b))
        for a, b in zip(ours, expected, strict=True)
    )


@pytest.mark.parametrize(
    ("second", "degrees"),
    [
        ([3.0, 4.0], 0.0),
        ([30.0, 40.0], 0.0),
        ([-4.0, 3.0], 90.0),
        ([-3.0, -4.0], 180.0),
        ([-1.0, 7.0], 45.0),
        ([-7.0, -1.0], 135.0),
    ],
)
def test_the_angle_is_exact(second: list[float], degrees: float) -> None:
    assert angle_between(vectors([3.0, 4.0]), vectors(second)) == pytest.approx(degrees, abs=1e-4)
    # Spread over two parameters, of which each gradient alone would give another angle.
    spread = angle_between(vectors([3.0], [4.0]), vectors(second[:1], second[1:]))
    assert spread == pytest.approx(degrees, abs=1e-4)


def test_parameters_of_any_shape_count_as_one_long_vector() -> None:
    a, b = torch.randn(3, 4), torch.randn(3, 4)
    flat = angle_between([a.flatten()], [b.flatten()])
    assert angle_between([a[:1], a[1:].T], [b[:1], b[1:].T]) == pytest.approx(flat, abs=1e-4)


def test_a_parameter_that_one_loss_does_not_reach_counts_as_zero_there() -> None:
    with_none = angle_between(vectors([3.0, 4.0], None, [1.0]), vectors([1.0, 0.0], [2.0], None))
    with_zero = angle_between(vectors([3.0, 4.0], [0.0], [1.0]), vectors([1.0, 0.0], [2.0], [0.0]))
    assert with_none == pytest.approx(with_zero, abs=1e-6)
    assert with_none == pytest.approx(math.degrees(math.acos(3 / math.sqrt(26 * 5))), abs=1e-4)


@pytest.mark.parametrize("bad", [[0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0]])
def test_there_is_no_angle_to_a_gradient_that_is_zero_or_not_finite(bad: list[float]) -> None:
    assert math.isnan(angle_between(vectors([3.0, 4.0]), vectors(bad)))
    assert math.isnan(angle_between(vectors(bad), vectors([3.0, 4.0])))
    assert math.isnan(angle_between(vectors([3.0, 4.0]), [None]))


def test_agreeing_gradients_are_added_with_the_weight() -> None:
    gradients, angle = acl_grad(vectors([1.0, 0.0]), vectors([1.0, 1.0]), Contrast(weight=0.2, max_angle=90))
    assert same(gradients, vectors([1.2, 0.2]))
    assert angle == pytest.approx(45.0, abs=1e-4)


def test_conflicting_gradients_leave_the_cross_entropy_alone() -> None:
    gradients, angle = acl_grad(vectors([1.0, 0.0]), vectors([-1.0, 1.0]), Contrast(weight=0.2, max_angle=90))
    assert same(gradients, vectors([1.0, 0.0]))
    assert angle == pytest.approx(135.0, abs=1e-4)


def test_orthogonal_gradients_do_not_exceed_the_limit() -> None:
    gradients, angle = acl_grad(vectors([1.0, 0.0]), vectors([0.0, 1.0]), Contrast(weight=0.5, max_angle=90))
    assert angle == 90.0
    assert same(gradients, vectors([1.0, 0.5]))


@pytest.mark.parametrize("bad", [[0.0, 0.0], [math.nan, 0.0]])
def test_a_gradient_without_a_direction_is_left_out(bad: list[float]) -> None:
    gradients, angle = acl_grad(vectors([1.0, 0.0]), vectors(bad), Contrast())
    assert same(gradients, vectors([1.0, 0.0]))
    assert math.isnan(angle)


@pytest.mark.parametrize(
    ("limit", "acl", "lets_through"),
    [
        (0.0, [2.0, 0.0], True),
        (0.0, [2.0, 0.1], False),
        (180.0, [-2.0, 0.0], True),
        (44.9, [1.0, 1.0], False),
        (45.1, [1.0, 1.0], True),
        (134.9, [-1.0, 1.0], False),
        (135.1, [-1.0, 1.0], True),
    ],
)
def test_the_limit_decides(limit: float, acl: list[float], lets_through: bool) -> None:
    gradients, _ = acl_grad(vectors([1.0, 0.0]), vectors(acl), Contrast(weight=1.0, max_angle=limit))
    together = vectors([1.0 + acl[0], acl[1]])
    assert same(gradients, together if lets_through else vectors([1.0, 0.0]))


def test_parameters_that_one_loss_does_not_reach_keep_the_other_gradient() -> None:
    ce, acl = vectors([1.0], None, [3.0], None), vectors([1.0], [2.0], None, None)
    gradients, _ = acl_grad(ce, acl, Contrast(weight=0.5))
    assert same(gradients, vectors([1.5], [1.0], [3.0], None))
    conflicting, _ = acl_grad(ce, vectors([-9.0], [2.0], None, None), Contrast(weight=0.5))
    assert same(conflicting, ce)


def test_the_given_gradients_are_not_changed() -> None:
    ce, acl = vectors([1.0, 2.0]), vectors([2.0, 1.0])
    acl_grad(ce, acl, Contrast())
    assert same(ce, vectors([1.0, 2.0]))
    assert same(acl, vectors([2.0, 1.0]))


@given(st.integers(0, 10_000), st.floats(0, 180), st.floats(0, 5))
def test_the_step_is_either_ce_alone_or_the_weighed_sum(seed: int, limit: float, weight: float) -> None:
    g = torch.Generator().manual_seed(seed)
    ce, acl = torch.randn(5, generator=g), torch.randn(5, generator=g)
    gradients, angle = acl_grad([ce], [acl], Contrast(weight=weight, max_angle=limit))
    assert same(gradients, [ce + weight * acl if angle <= limit else ce])


def test_a_weighted_sum_takes_what_either_loss_reaches() -> None:
    first, second = vectors([1.0, 2.0], None, [3.0], None), vectors([4.0, 4.0], [2.0], None, None)
    assert same(weighted_sum(first, second, 0.5, 0.25), vectors([1.5, 2.0], [0.5], [1.5], None))
    assert same(first, vectors([1.0, 2.0], None, [3.0], None))


# Objectives.


def outputs_of(labels: Tensor, exits: Sequence[int], width: int = 32) -> dict[int, ExitOutput]:
    g = torch.Generator().manual_seed(3)
    return {
        n: ExitOutput(torch.randn(len(labels), 3, generator=g), torch.randn(len(labels), width, generator=g))
        for n in exits
    }


LABELS = torch.tensor([0, 1, 2, 1, 0])


def literal_cross_entropy(logits: Tensor, labels: Tensor) -> float:
    losses = []
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        losses.append(math.log(sum(math.exp(x) for x in row)) - row[label])
    return sum(losses) / len(losses)


@pytest.mark.parametrize(
    ("method", "stages", "contrast"),
    [
        ("ce", ("last",), None),
        ("ce+scl", ("last",), "scl"),
        ("acl", ("last",), "acl-embed"),
        ("jt", ("all",), None),
        ("2st", ("last", "others"), None),
        ("alt", ("alternating",), None),
        ("jt+scl", ("all",), "scl"),
        ("acl-embed", ("all",), "acl-embed"),
        ("acl-cl", ("all",), "acl-cl"),
        ("exits-only", ("others",), None),
    ],
)
def test_what_each_method_is(method: MethodName, stages: tuple[str, ...], contrast: str | None) -> None:
    assert (METHODS[method].stages, METHODS[method].contrast) == (stages, contrast)


@pytest.mark.parametrize(
    ("stage", "step", "teaching", "computed", "learning"),
    [
        ("last", 0, False, (3,), (3,)),
        ("last", 1, True, (3,), (3,)),
        ("all", 0, False, (1, 2, 3), (1, 2, 3)),
        # BERxiT: even steps the last exit, odd ones all.
        ("alternating", 0, False, (3,), (3,)),
        ("alternating", 1, False, (1, 2, 3), (1, 2, 3)),
        ("alternating", 2, False, (3,), (3,)),
        ("others", 0, False, (1, 2), (1, 2)),
        ("others", 1, True, (1, 2, 3), (1, 2)),
    ],
)
def test_which_exits_take_part_in_a_step(
    stage: Stage, step: int, teaching: bool, computed: tuple[int, ...], learning: tuple[int, ...]
) -> None:
    assert step_exits(stage, [1, 2, 3], step, teaching=teaching) == StepExits(computed, learning)


def test_a_stage_is_judged_by_what_is_trained_by_then() -> None:
    assert scored_exits("last", [1, 2, 3]) == (3,)
    for stage in ("all", "alternating", "others"):
        assert scored_exits(cast(Stage, stage), [1, 2, 3]) == (1, 2, 3)


def test_the_second_stage_trains_nothing_that_the_last_exit_reads() -> None:
    network = tiny_architecture_network()
    prepare_stage("others", network)
    training = {n for n, p in network.named_parameters() if p.requires_grad}
    assert training == {n for n, _ in network.named_parameters() if n.startswith(("exits.1.", "exits.2."))}
    # And what is frozen answers without dropout.
    assert not any(m.training for m in (*network.layers.modules(), *network.embeddings.modules()))
    assert not network.exits["3"].dropout.training and network.exits["1"].dropout.training
    prepare_stage("all", network)
    assert all(p.requires_grad for p in network.parameters()) and all(m.training for m in network.modules())


def test_frozen_embeddings_are_all_that_does_not_train() -> None:
    network = tiny_architecture_network()
    prepare_stage("all", network, freeze_embeddings=True)
    frozen = {n for n, p in network.named_parameters() if not p.requires_grad}
    assert frozen == {n for n, _ in network.named_parameters() if n.startswith("embeddings.")} != set()


def test_ce_is_the_cross_entropy_of_the_exit_it_is_given() -> None:
    outputs = outputs_of(LABELS, [3])
    goal = objective("ce", tiny_architecture_network(), outputs, LABELS, Contrast())
    assert float(goal.cross_entropy) == pytest.approx(literal_cross_entropy(outputs[3].logits, LABELS), rel=1e-5)
    assert goal.contrastive is None


def test_joint_training_sums_the_cross_entropies_of_all_exits() -> None:
    outputs = outputs_of(LABELS, [1, 2, 3])
    goal = objective("jt", tiny_architecture_network(), outputs, LABELS, Contrast())
    expected = sum(literal_cross_entropy(o.logits, LABELS) for o in outputs.values())
    assert float(goal.cross_entropy) == pytest.approx(expected, rel=1e-5)
    assert goal.contrastive is None


def test_weights_by_depth_rise_evenly_and_keep_the_size_of_the_loss() -> None:
    assert exit_weights("uniform", 4) == [1.0, 1.0, 1.0, 1.0]
    assert exit_weights("depth", 4) == pytest.approx([0.4, 0.8, 1.2, 1.6])
    assert exit_weights("depth", 1) == [1.0]


def test_weights_by_depth_are_pabees_average_times_the_number_of_exits() -> None:
    outputs = outputs_of(LABELS, [1, 2, 3])
    goal = objective("jt", tiny_architecture_network(), outputs, LABELS, Contrast(), weights="depth")
    weighted = sum(m * literal_cross_entropy(o.logits, LABELS) for m, o in outputs.items())
    assert float(goal.cross_entropy) == pytest.approx(3 * weighted / (1 + 2 + 3), rel=1e-5)


@pytest.mark.parametrize("method", ["jt", "acl-cl"])
def test_distillation_adds_the_divergence_of_every_other_exit_from_the_deepest(method: MethodName) -> None:
    network, outputs = tiny_architecture_network(), outputs_of(LABELS, [1, 2, 3])
    plain = objective(method, network, outputs, LABELS, Contrast())
    goal = objective(method, network, outputs, LABELS, Contrast(), Distillation(weight=0.7, temperature=3.0))
    apart = sum(float(distillation(outputs[m].logits, outputs[3].logits, 3.0)) for m in (1, 2))
    assert goal.distilled is not None
    assert float(goal.distilled) == pytest.approx(apart, rel=1e-6)
    assert float(goal.cross_entropy) == float(plain.cross_entropy)
    assert float(goal.supervised) == pytest.approx(float(plain.cross_entropy) + 0.7 * apart, rel=1e-6)
    assert (goal.contrastive is None) == (method == "jt")
    assert plain.distilled is None and float(plain.supervised) == float(plain.cross_entropy)


@pytest.mark.parametrize("method", ["ce+scl", "jt+scl"])
def test_scl_shares_the_loss_with_the_cross_entropy_whatever_the_angle(method: MethodName) -> None:
    outputs = outputs_of(LABELS, [3] if method == "ce+scl" else [1, 2, 3])
    goal = objective(method, tiny_architecture_network(), outputs, LABELS, Contrast(weight=0.3, temperature=0.4))
    expected = sum(float(scl(o.features, LABELS, 0.4)) for o in outputs.values())
    assert goal.contrastive is not None
    assert float(goal.contrastive) == pytest.approx(expected, rel=1e-6)
    assert goal.share == pytest.approx(0.7)
    assert not goal.gated


@pytest.mark.parametrize(("method", "numbers"), [("acl", [3]), ("acl-embed", [1, 2, 3])])
def test_acl_embed_stands_at_every_exit_that_is_trained(method: MethodName, numbers: list[int]) -> None:
    network, outputs = tiny_architecture_network(), outputs_of(LABELS, numbers)
    goal = objective(method, network, outputs, LABELS, Contrast(temperature=0.4))
    expected = sum(
        float(acl_embed(o.features, LABELS, network.label_embeddings(m), 0.4).detach()) for m, o in outputs.items()
    )
    assert goal.contrastive is not None
    assert float(goal.contrastive.detach()) == pytest.approx(expected, rel=1e-6)
    assert goal.gated and goal.share == 1.0


def test_a_teacher_that_does_not_learn_counts_in_no_cross_entropy() -> None:
    outputs = outputs_of(LABELS, [1, 2, 3])
    goal = objective(
        "2st", tiny_architecture_network(), outputs, LABELS, Contrast(), Distillation(1.0), "depth", learning=[1, 2]
    )
    first, second = (literal_cross_entropy(outputs[m].logits, LABELS) for m in (1, 2))
    assert float(goal.cross_entropy) == pytest.approx(2 / 3 * first + 4 / 3 * second, rel=1e-5)
    assert goal.distilled is not None and float(goal.distilled) > 0


def test_the_deepest_exit_does_not_learn_from_those_it_teaches() -> None:
    outputs = outputs_of(LABELS, [1, 2, 3])
    for output in outputs.values():
        output.logits.requires_grad_()
    goal = objective("jt", tiny_architecture_network(), outputs, LABELS, Contrast(), Distillation(weight=1.0))
    goal.supervised.backward()
    own = outputs[3].logits.detach().requires_grad_()
    functional.cross_entropy(own, LABELS).backward()
    assert own.grad is not None and outputs[3].logits.grad is not None
    assert torch.allclose(outputs[3].logits.grad, own.grad)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weight": -0.1}, "distillation weight must be a number of at least 0, not -0.1"),
        ({"weight": math.inf}, "distillation weight"),
        ({"temperature": 0.0}, "distillation temperature must be above 0, not 0.0"),
        ({"temperature": math.nan}, "distillation temperature"),
    ],
)
def test_distillation_settings_out_of_range_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Distillation(**settings)


def test_acl_cl_guides_every_exit_by_the_last_which_has_acl_embed() -> None:
    network, outputs = tiny_architecture_network(), outputs_of(LABELS, [1, 2, 3])
    goal = objective("acl-cl", network, outputs, LABELS, Contrast(temperature=0.4))
    assert float(goal.cross_entropy) == pytest.approx(
        sum(float(functional.cross_entropy(o.logits, LABELS)) for o in outputs.values()), rel=1e-6
    )
    teacher = outputs[3].features
    expected = float(acl_embed(teacher, LABELS, network.label_embeddings(3), 0.4).detach())
    for m in (1, 2):
        rows, guide = network.label_embeddings(m), network.label_embeddings(3)
        expected += float(acl_cl(outputs[m].features, LABELS, rows, teacher, guide, 0.4).detach())
    assert goal.contrastive is not None
    assert float(goal.contrastive.detach()) == pytest.approx(expected, rel=1e-6)


def test_students_do_not_move_their_teacher() -> None:
    network, outputs = tiny_architecture_network(), outputs_of(LABELS, [1, 2, 3])
    for output in outputs.values():
        output.features.requires_grad_()
    goal = objective("acl-cl", network, outputs, LABELS, Contrast())
    assert goal.contrastive is not None
    goal.contrastive.backward()
    own = outputs[3].features.detach().requires_grad_()
    acl_embed(own, LABELS, network.label_embeddings(3), Contrast().temperature).backward()
    assert outputs[3].features.grad is not None
    assert own.grad is not None
    assert torch.allclose(outputs[3].features.grad, own.grad)
    assert all(outputs[m].features.grad is not None for m in (1, 2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weight": -0.1}, "contrast weight must be a number of at least 0, not -0.1"),
        ({"weight": math.nan}, "contrast weight"),
        ({"weight": math.inf}, "contrast weight"),
        ({"temperature": 0.0}, "contrast temperature must be above 0, not 0.0"),
        ({"temperature": math.nan}, "contrast temperature"),
        ({"max_angle": 181.0}, "max_angle must lie between 0 and 180 degrees, not 181.0"),
        ({"max_angle": -1.0}, "max_angle"),
        ({"max_angle": math.nan}, "max_angle"),
    ],
)
def test_contrast_settings_out_of_range_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Contrast(**settings)
