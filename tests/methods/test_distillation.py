"""Distillation, with numbers worked out by hand."""

import pytest
import torch

from polyfed.methods.parts.distillation import kl_divergence


def test_divergence_of_two_coins() -> None:
    """Teacher (3/4, 1/4), student (1/2, 1/2): 3/4·ln(3/2) + 1/4·ln(1/2) = 0.130812; the other way 0.143841."""
    biased, fair = torch.tensor([[3.0, 1.0]]).log(), torch.zeros(1, 2)
    assert kl_divergence(biased, fair).tolist() == pytest.approx([0.130812], abs=1e-6)
    assert kl_divergence(fair, biased).tolist() == pytest.approx([0.143841], abs=1e-6)


def test_only_the_student_learns() -> None:
    """The gradient by the student's logits is its probabilities minus the teacher's: (1/2 − 3/4, 1/2 − 1/4)."""
    teacher = torch.tensor([[3.0, 1.0]]).log().requires_grad_()
    student = torch.zeros(1, 2, requires_grad=True)
    kl_divergence(teacher, student).sum().backward()
    assert teacher.grad is None
    assert student.grad is not None
    assert student.grad[0].tolist() == pytest.approx([-0.25, 0.25], abs=1e-6)


def test_certain_networks_give_finite_values() -> None:
    """Probabilities that underflow to 0 and 1, and the same network on both sides."""
    sure, other = torch.tensor([[1000.0, 0.0]]), torch.tensor([[0.0, 1000.0]])
    assert kl_divergence(sure, other).tolist() == [1000.0]
    assert kl_divergence(sure, sure).tolist() == [0.0]
