"""What can be attacked how: the norms and the attacks, by name."""

from __future__ import annotations

from typing import Literal

Norm = Literal["linf", "l2"]
NORMS: tuple[Norm, ...] = ("linf", "l2")
AttackName = Literal["fgsm", "i-fgsm", "mim", "pgd"]
ATTACKS: tuple[AttackName, ...] = ("fgsm", "i-fgsm", "mim", "pgd")
