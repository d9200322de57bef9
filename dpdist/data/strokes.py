"""Pen strokes that a computer invents: public images that no data set has a part in.

A prior for private training on images of writing, as networks are pre-trained on images of random
processes ("DP-RandP", Tang et al., NeurIPS 2023, arXiv:2306.06076). The classes are signs nobody
writes: each is one to three random strokes, straight, elliptic or free. A record is its sign
written once more: every stroke moved and bent a little, the whole slanted, stretched and put into
the middle, with a pen of its own width. Nothing here looks at a digit, a letter or a file: all
follows from a seed.
"""

from __future__ import annotations

import numpy as np

CLASSES, RECORDS, SIDE = 200, 60_000, 28
SHAPE = (1, SIDE, SIDE)
_STROKES, _POINTS = 3, 40  # of a sign at most; of a stroke
_BOX = 20.0  # pixels that the longer side of a sign takes up
_CHUNK = 2000  # records drawn at a time


def invented(records: int, seed: int, classes: int = CLASSES) -> tuple[np.ndarray, np.ndarray]:
    """Images (records, 1, SIDE, SIDE) uint8, white on black, and labels (records,) int64.

    The signs are the same for every seed: `seed` says how they are written. Labels take turns.
    """
    signs, weights = _signs(np.random.Generator(np.random.Philox(key=0)), classes)
    draw = np.random.Generator(np.random.Philox(key=1 + seed))
    labels = np.arange(records, dtype=np.int64) % classes
    images = np.empty((records, *SHAPE), dtype=np.uint8)
    for start in range(0, records, _CHUNK):
        which = labels[start : start + _CHUNK]
        points = _framed(_rewritten(signs[which], draw), weights[which] > 0, draw)
        images[start : start + _CHUNK, 0] = _inked(points, weights[which] > 0, draw)
    return images, labels


def _signs(draw: np.random.Generator, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """The classes: strokes (classes, 3, points, 2) in about the unit square, and which exist
    (classes, 3)."""
    time = np.linspace(0, 1, _POINTS)[:, None]
    strokes = np.empty((classes, _STROKES, _POINTS, 2))
    for stroke in strokes.reshape(-1, _POINTS, 2):
        kind = draw.choice(3, p=(0.25, 0.35, 0.4))
        ends = draw.uniform(-1, 1, (4, 2))
        if kind == 0:
            stroke[:] = ends[0] + (ends[1] - ends[0]) * time
        elif kind == 1:  # part of an ellipse, or all of it
            angles = draw.uniform(0, 2 * np.pi) + draw.uniform(0.5, 2) * np.pi * time
            turned = np.concatenate([np.cos(angles), np.sin(angles)], 1)
            stroke[:] = 0.4 * ends[0] + draw.uniform(0.3, 0.9, 2) * turned
        else:  # a cubic Bezier curve
            basis = [(1 - time) ** 3, 3 * time * (1 - time) ** 2, 3 * time**2 * (1 - time), time**3]
            stroke[:] = sum(b * end for b, end in zip(basis, 1.4 * ends, strict=True))
    count = draw.choice(_STROKES, size=classes, p=(0.4, 0.4, 0.2)) + 1
    return strokes, (np.arange(_STROKES) < count[:, None]).astype(float)


def _rewritten(strokes: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Signs (B, 3, points, 2) with every stroke moved, scaled, turned and bent at random."""
    size = len(strokes)
    time = np.linspace(-1, 1, _POINTS)
    bends = np.stack([np.ones_like(time), time, time**2 - 1 / 3, np.sin(np.pi * time)])
    amounts = draw.normal(size=(size, _STROKES, 4, 2)) * np.array([0.09, 0.07, 0.07, 0.05])[:, None]
    strokes = strokes + np.einsum("bski,kp->bspi", amounts, bends)
    turn, slant = draw.normal(0, 0.12, size), draw.normal(0, 0.2, size)
    stretch = np.exp(draw.normal(0, 0.15, (size, 2)))
    cos, sin = np.cos(turn), np.sin(turn)
    affine = np.stack([np.stack([cos, slant - sin], 1), np.stack([sin, cos], 1)], 1)
    return np.einsum("bspi,bij->bspj", strokes, affine * stretch[:, :, None])


def _framed(points: np.ndarray, there: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """The same in pixels (x, y): the longer side about _BOX, in the middle."""
    shown = there[:, :, None, None]
    low = np.where(shown, points, np.inf).min((1, 2))
    high = np.where(shown, points, -np.inf).max((1, 2))
    longer = (high - low).max(1)[:, None] / (_BOX * draw.uniform(0.8, 1.05, (len(points), 1)))
    middle = (high + low) / 2 + longer * draw.normal(0, 0.8, (len(points), 2))
    return (points - middle[:, None, None]) / longer[:, None, None] + (SIDE - 1) / 2


def _inked(points: np.ndarray, there: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Grey values (B, SIDE, SIDE) uint8 of pens of Gaussian profile, saturated."""
    size = len(points)
    pen = draw.uniform(0.6, 1.3, size)[:, None, None]
    steps = np.linalg.norm(np.diff(points, axis=2), axis=3)
    length = np.concatenate([steps[:, :, :1], (steps[:, :, 1:] + steps[:, :, :-1]) / 2,
                             steps[:, :, -1:]], 2)  # fmt: skip
    weight = (length * there[:, :, None]).reshape(size, -1, 1) / (pen * np.sqrt(2 * np.pi))
    pixels = np.arange(SIDE)
    x, y = np.moveaxis(points.reshape(size, -1, 2), 2, 0)
    across = np.exp(-((x[:, :, None] - pixels) ** 2) / (2 * pen**2))
    down = np.exp(-((y[:, :, None] - pixels) ** 2) / (2 * pen**2))
    ink = np.matmul((weight * down).transpose(0, 2, 1), across)
    return np.round(255 * np.minimum(1.0, 1.8 * ink)).astype(np.uint8)
