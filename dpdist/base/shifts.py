"""The moves of an image that a model's answers may be averaged over (`dpdist.models.shifts`)."""

from __future__ import annotations

MOST_SHIFTS = 8  # pixels by which an image is moved


def shifts_within(reach: int) -> list[tuple[int, int]]:
    """(0, 0), then every distance up to `reach`, down, up, right and left."""
    ways = ((1, 0), (-1, 0), (0, 1), (0, -1))
    return [(0, 0)] + [(d * y, d * x) for d in range(1, reach + 1) for y, x in ways]


def averaged(name: str, reach: int) -> str:
    """What a model of that name is, with its average."""
    return f"{name}, averaged over {len(shifts_within(reach))} shifts" if reach else name
