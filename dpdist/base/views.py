"""The views of an image that a model's answers may be averaged over (`dpdist.models.views`)."""

from __future__ import annotations

MOST_SHIFTS = 8  # pixels by which an image is moved


def shifts_within(reach: int) -> list[tuple[int, int]]:
    """(0, 0), then every distance up to `reach`, down, up, right and left."""
    ways = ((1, 0), (-1, 0), (0, 1), (0, -1))
    return [(0, 0)] + [(d * y, d * x) for d in range(1, reach + 1) for y, x in ways]


def averaged(name: str, reach: int, mirrored: bool) -> str:
    """What a model of that name is, with its average."""
    over = [f"{len(shifts_within(reach))} shifts"] if reach else []
    over += ["the image and its mirror image"] if mirrored else []
    return f"{name}, averaged over {', each of '.join(over)}" if over else name
