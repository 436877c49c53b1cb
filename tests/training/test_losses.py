"""The contrastive losses against a slow, literal reading of their formulas, in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from training.losses import acl_cl, acl_embed, distillation, scl

Element = tuple[list[float], int]


def normalised(vector: Tensor) -> list[float]:
    numbers = vector.tolist()
    length = math.sqrt(sum(x * x for x in numbers))
    return [x / length for x in numbers]


def elements(features: Tensor, labels: Tensor, label_embeddings: Tensor) -> list[Element]:
    """E^m = {(z_i, y_i)} ∪ {(l_k, k)}."""
    texts = [(normalised(f), int(y)) for f, y in zip(features, labels, strict=True)]
    return texts + [(normalised(w), k) for k, w in enumerate(label_embeddings)]


def dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def literal_contrast(anchors: list[Element], others: list[Element], temperature: float) -> float:
    """Anchors against anchors ∪ others, as docs/training.md writes it; an anchor is no candidate for itself."""
    candidates = anchors + others
    losses = []
    for at, (a, class_of_a) in enumerate(anchors):
        rest = [c for place, c in enumerate(candidates) if place != at]
        positives = [p for p, class_of_p in rest if class_of_p == class_of_a]
        if not positives:
            continue
        denominator = sum(math.exp(dot(a, b) / temperature) for b, _ in rest)
        total = 0.0
        for p in positives:
            total += math.log(math.exp(dot(a, p) / temperature) / denominator)
        losses.append(-total / len(positives))
    return sum(losses) / len(losses) if losses else 0.0


def literal_embed(features: Tensor, labels: Tensor, rows: Tensor, temperature: float) -> float:
    return literal_contrast(elements(features, labels, rows), [], temperature)


def literal_cl(
    features: Tensor, labels: Tensor, rows: Tensor, teacher: Tensor, teacher_rows: Tensor, temperature: float
) -> float:
    return literal_contrast(elements(features, labels, rows), elements(teacher, labels, teacher_rows), temperature)


def draw(seed: int, texts: int, classes: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)

    def vectors(n: int) -> Tensor:
        return torch.randn(n, width, generator=g, dtype=torch.float64)

    labels = torch.randint(classes, (texts,), generator=g)
    return vectors(texts), labels, vectors(classes), vectors(texts), vectors(classes)


batches = st.tuples(st.integers(0, 2**31), st.integers(1, 7), st.integers(2, 5), st.integers(2, 6))
temperatures = st.floats(0.05, 2.0)


@given(batches, temperatures)
@hypothesis_settings(max_examples=40)
def test_acl_embed_is_its_formula(sizes: tuple[int, int, int, int], temperature: float) -> None:
    features, labels, rows, _, _ = draw(*sizes)
    loss = acl_embed(features, labels, rows, temperature)
    assert loss.dtype == torch.float64
    assert float(loss) == pytest.approx(literal_embed(features, labels, rows, temperature), rel=1e-10)


@given(batches, temperatures)
@hypothesis_settings(max_examples=40)
def test_acl_cl_is_its_formula(sizes: tuple[int, int, int, int], temperature: float) -> None:
    student_and_teacher = draw(*sizes)
    loss = acl_cl(*student_and_teacher, temperature)
    assert loss.dtype == torch.float64
    assert float(loss) == pytest.approx(literal_cl(*student_and_teacher, temperature), rel=1e-10)


def literal_scl(features: Tensor, labels: Tensor, temperature: float) -> float:
    return literal_contrast([(normalised(f), int(y)) for f, y in zip(features, labels, strict=True)], [], temperature)


@given(batches, temperatures)
@hypothesis_settings(max_examples=40)
def test_scl_is_its_formula(sizes: tuple[int, int, int, int], temperature: float) -> None:
    features, labels, *_ = draw(*sizes)
    loss = scl(features, labels, temperature)
    assert loss.dtype == torch.float64
    assert float(loss) == pytest.approx(literal_scl(features, labels, temperature), rel=1e-10)


def test_the_gradient_of_scl_is_finite_differences_of_the_literal_formula() -> None:
    features, labels, *_ = draw(7, 6, 2, 3)
    features.requires_grad_()
    (gradient,) = torch.autograd.grad(scl(features, labels, 0.3), [features])
    step = 1e-5
    for i in range(gradient.shape[0]):
        for j in range(gradient.shape[1]):
            values = []
            for sign in (1, -1):
                moved = features.detach().clone()
                moved[i, j] += sign * step
                values.append(literal_scl(moved, labels, 0.3))
            assert float(gradient[i, j]) == pytest.approx((values[0] - values[1]) / (2 * step), abs=1e-8)


@pytest.mark.parametrize("labels", [[0], [0, 1, 2]])
def test_scl_of_texts_that_share_no_class_is_zero_and_so_is_its_gradient(labels: list[int]) -> None:
    features = torch.randn(len(labels), 4, dtype=torch.float64, requires_grad=True)
    loss = scl(features, torch.tensor(labels), 0.3)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert features.grad is not None
    assert not features.grad.any()


@given(batches)
@hypothesis_settings(max_examples=15)
def test_the_order_of_the_batch_does_not_matter(sizes: tuple[int, int, int, int]) -> None:
    features, labels, rows, teacher, teacher_rows = draw(*sizes)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(sizes[0]))
    shuffled, their_labels, their_teacher = features[order], labels[order], teacher[order]
    assert torch.allclose(acl_embed(features, labels, rows, 0.3), acl_embed(shuffled, their_labels, rows, 0.3))
    assert torch.allclose(
        acl_cl(features, labels, rows, teacher, teacher_rows, 0.3),
        acl_cl(shuffled, their_labels, rows, their_teacher, teacher_rows, 0.3),
    )


@given(batches, st.floats(0.01, 100))
@hypothesis_settings(max_examples=15)
def test_only_directions_count(sizes: tuple[int, int, int, int], factor: float) -> None:
    features, labels, rows, teacher, teacher_rows = draw(*sizes)
    assert torch.allclose(acl_embed(features * factor, labels, rows, 0.3), acl_embed(features, labels, rows, 0.3))
    assert torch.allclose(
        acl_cl(features, labels, rows * factor, teacher, teacher_rows * factor, 0.3),
        acl_cl(features, labels, rows, teacher, teacher_rows, 0.3),
    )


def test_an_anchor_without_positives_is_left_out_of_the_mean() -> None:
    # Class 2 has no text: its label embedding has no positive in ACL-Embed, but repels the others.
    features, _, rows, _, _ = draw(1, 4, 3, 5)
    labels = torch.tensor([0, 0, 1, 1])
    loss = acl_embed(features, labels, rows, 0.5)
    assert float(loss) == pytest.approx(literal_embed(features, labels, rows, 0.5), rel=1e-12)
    everyone = elements(features, labels, rows)
    assert sum(sum(c == k for _, c in everyone) == 1 for k in range(3)) == 1
    assert float(loss) != pytest.approx(float(acl_embed(features, labels, rows[:2], 0.5)), rel=1e-3)


def test_a_class_without_texts_still_meets_its_teacher_in_acl_cl() -> None:
    features, _, rows, teacher, teacher_rows = draw(2, 4, 3, 5)
    labels = torch.tensor([0, 0, 1, 1])
    rows.requires_grad_()
    acl_cl(features, labels, rows, teacher, teacher_rows, 0.5).backward()
    assert rows.grad is not None
    assert rows.grad[2].abs().sum() > 0


def test_one_text_alone_has_only_its_label_for_company() -> None:
    features, _, rows, teacher, teacher_rows = draw(3, 1, 2, 4)
    labels = torch.tensor([1])
    assert float(acl_embed(features, labels, rows, 0.3)) == pytest.approx(literal_embed(features, labels, rows, 0.3))
    assert float(acl_cl(features, labels, rows, teacher, teacher_rows, 0.3)) == pytest.approx(
        literal_cl(features, labels, rows, teacher, teacher_rows, 0.3)
    )


def test_where_no_anchor_has_a_positive_the_loss_and_its_gradient_are_zero() -> None:
    rows = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    loss = acl_embed(torch.empty(0, 4, dtype=torch.float64), torch.empty(0, dtype=torch.long), rows, 0.3)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert rows.grad is not None
    assert not rows.grad.any()


def test_aligned_texts_lose_less_than_scattered_ones() -> None:
    rows = torch.eye(3, dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    aligned = rows[labels]
    assert acl_embed(aligned, labels, rows, 0.3) < acl_embed(aligned.roll(1, 0), labels, rows, 0.3)


@pytest.mark.parametrize("seed", range(3))
def test_gradients_are_right_by_gradcheck(seed: int) -> None:
    features, labels, rows, teacher, teacher_rows = draw(seed, 5, 3, 4)
    features.requires_grad_()
    rows.requires_grad_()
    assert torch.autograd.gradcheck(lambda f, r: acl_embed(f, labels, r, 0.3), (features, rows))
    assert torch.autograd.gradcheck(lambda f, r: acl_cl(f, labels, r, teacher, teacher_rows, 0.3), (features, rows))


def test_gradients_are_finite_differences_of_the_literal_formula() -> None:
    features, labels, rows, teacher, teacher_rows = draw(7, 4, 3, 3)
    features.requires_grad_()
    rows.requires_grad_()
    by_autograd = torch.autograd.grad(acl_cl(features, labels, rows, teacher, teacher_rows, 0.3), [features, rows])
    step = 1e-5
    for place, gradient in enumerate(by_autograd):
        for i in range(gradient.shape[0]):
            for j in range(gradient.shape[1]):
                values = []
                for sign in (1, -1):
                    moved = [features.detach().clone(), rows.detach().clone()]
                    moved[place][i, j] += sign * step
                    values.append(literal_cl(moved[0], labels, moved[1], teacher, teacher_rows, 0.3))
                assert float(gradient[i, j]) == pytest.approx((values[0] - values[1]) / (2 * step), abs=1e-8)


def test_the_teacher_gets_no_gradient_and_the_label_embeddings_do() -> None:
    student_and_teacher = draw(4, 5, 3, 4)
    features, labels, rows, teacher, teacher_rows = student_and_teacher
    for tensor in (features, rows, teacher, teacher_rows):
        tensor.requires_grad_()
    acl_cl(features, labels, rows, teacher, teacher_rows, 0.3).backward()
    assert teacher.grad is None
    assert teacher_rows.grad is None
    for tensor in (features, rows):
        assert tensor.grad is not None
        assert (tensor.grad.abs().sum(1) > 0).all()


def test_a_small_temperature_overflows_nothing() -> None:
    features, labels, rows, _, _ = (t.float() if t.is_floating_point() else t for t in draw(5, 6, 3, 4))
    features.requires_grad_()
    loss = acl_embed(features, labels, rows, 1e-3)
    loss.backward()
    assert torch.isfinite(loss)
    assert features.grad is not None
    assert torch.isfinite(features.grad).all()


def test_mixed_precision_compares_in_float32() -> None:
    features, labels, rows, teacher, teacher_rows = (
        t.float() if t.is_floating_point() else t for t in draw(6, 8, 3, 16)
    )
    with torch.autocast("cpu", torch.bfloat16):
        inside = acl_cl(features, labels, rows, teacher, teacher_rows, 0.05)
    assert torch.equal(inside, acl_cl(features, labels, rows, teacher, teacher_rows, 0.05))
    # Features that a bfloat16 layer gave are taken up into float32 beside float32 label embeddings.
    assert acl_embed(features.bfloat16(), labels, rows, 0.3).dtype == torch.float32


# Distillation.


def literal_distillation(student: Tensor, teacher: Tensor, temperature: float) -> float:
    def softmax(row: list[float]) -> list[float]:
        powers = [math.exp(x / temperature) for x in row]
        return [p / sum(powers) for p in powers]

    total = 0.0
    for s, t in zip(student.tolist(), teacher.tolist(), strict=True):
        total += sum(p * math.log(p / q) for p, q in zip(softmax(t), softmax(s), strict=True))
    return temperature**2 * total / len(student)


@given(batches, st.floats(0.5, 8.0))
@hypothesis_settings(max_examples=40)
def test_distillation_is_its_formula(sizes: tuple[int, int, int, int], temperature: float) -> None:
    student, _, _, teacher, _ = draw(*sizes)
    loss = distillation(student, teacher, temperature)
    assert loss.dtype == torch.float64
    assert float(loss) == pytest.approx(literal_distillation(student, teacher, temperature), rel=1e-9, abs=1e-12)


def test_the_gradient_of_distillation_is_finite_differences_of_the_literal_formula() -> None:
    student, _, _, teacher, _ = draw(8, 3, 3, 4)
    student.requires_grad_()
    (gradient,) = torch.autograd.grad(distillation(student, teacher, 2.0), [student])
    step = 1e-5
    for i in range(gradient.shape[0]):
        for j in range(gradient.shape[1]):
            values = []
            for sign in (1, -1):
                moved = student.detach().clone()
                moved[i, j] += sign * step
                values.append(literal_distillation(moved, teacher, 2.0))
            assert float(gradient[i, j]) == pytest.approx((values[0] - values[1]) / (2 * step), abs=1e-8)


def test_distillation_moves_the_student_alone_and_rests_where_both_agree() -> None:
    student, _, _, teacher, _ = draw(9, 3, 3, 4)
    student.requires_grad_()
    teacher.requires_grad_()
    distillation(student, teacher, 2.0).backward()
    assert teacher.grad is None
    assert student.grad is not None and student.grad.abs().sum() > 0
    assert float(distillation(teacher, teacher, 2.0).detach()) == pytest.approx(0.0, abs=1e-12)
