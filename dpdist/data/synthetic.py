"""Draw synthetic images, which are public by construction: pen strokes and color scenes.

They are a prior for private training, as networks are pre-trained on images of random processes
(Baradad et al., "Learning to See by Looking at Noise", NeurIPS 2021; with privacy "DP-RandP", Tang
et al., NeurIPS 2023, arXiv:2306.06076). No photograph, digit, letter or file is read.

Strokes: the classes are invented signs, each of one to three random strokes, straight, elliptic or
free. A record is its sign written again: every stroke moved and bent a little, the sign slanted,
stretched and centered, with a random pen width.

Scenes: the classes are invented objects, each of one to three blobs with random colors and
gratings. A record is its object seen again: moved, rotated, bent, in a different light, partly
hidden, on a background of dead leaves, clouds of noise and a horizon.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# --- pen strokes ------------------------------------------------------------------------------


STROKE_CLASSES, STROKE_SIDE = 200, 28
_STROKES, _POINTS = 3, 40  # most strokes of a sign; points of a stroke
_BOX = 20.0  # pixels of the longer side of a sign
_STROKE_CHUNK = 2000  # records drawn at once


def draw_strokes(
    records: int, seed: int, classes: int = STROKE_CLASSES
) -> tuple[np.ndarray, np.ndarray]:
    """Return images (records, 1, 28, 28) uint8, white on black, and labels (records,) int64.

    The signs are the same for every seed, which decides how they are written. Label i is i modulo
    `classes`.
    """
    signs, weights = _random_signs(np.random.Generator(np.random.Philox(key=0)), classes)
    rng = np.random.Generator(np.random.Philox(key=1 + seed))
    labels = np.arange(records, dtype=np.int64) % classes
    images = np.empty((records, 1, STROKE_SIDE, STROKE_SIDE), dtype=np.uint8)
    for start in range(0, records, _STROKE_CHUNK):
        which = labels[start : start + _STROKE_CHUNK]
        points = _to_pixel_coordinates(_distort_signs(signs[which], rng), weights[which] > 0, rng)
        images[start : start + _STROKE_CHUNK, 0] = _render_strokes(points, weights[which] > 0, rng)
    return images, labels


def _random_signs(rng: np.random.Generator, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return strokes (classes, 3, points, 2) near the unit square, and a mask (classes, 3)."""
    time = np.linspace(0, 1, _POINTS)[:, None]
    strokes = np.empty((classes, _STROKES, _POINTS, 2))
    for stroke in strokes.reshape(-1, _POINTS, 2):
        kind = rng.choice(3, p=(0.25, 0.35, 0.4))
        ends = rng.uniform(-1, 1, (4, 2))
        if kind == 0:
            stroke[:] = ends[0] + (ends[1] - ends[0]) * time
        elif kind == 1:  # part of an ellipse, or all of it
            angles = rng.uniform(0, 2 * np.pi) + rng.uniform(0.5, 2) * np.pi * time
            turned = np.concatenate([np.cos(angles), np.sin(angles)], 1)
            stroke[:] = 0.4 * ends[0] + rng.uniform(0.3, 0.9, 2) * turned
        else:  # a cubic Bezier curve
            basis = [(1 - time) ** 3, 3 * time * (1 - time) ** 2, 3 * time**2 * (1 - time), time**3]
            stroke[:] = sum(b * end for b, end in zip(basis, 1.4 * ends, strict=True))
    count = rng.choice(_STROKES, size=classes, p=(0.4, 0.4, 0.2)) + 1
    return strokes, (np.arange(_STROKES) < count[:, None]).astype(float)


def _distort_signs(strokes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return signs (B, 3, points, 2) with every stroke randomly moved, scaled, turned and bent."""
    size = len(strokes)
    time = np.linspace(-1, 1, _POINTS)
    bends = np.stack([np.ones_like(time), time, time**2 - 1 / 3, np.sin(np.pi * time)])
    amounts = rng.normal(size=(size, _STROKES, 4, 2)) * np.array([0.09, 0.07, 0.07, 0.05])[:, None]
    strokes = strokes + np.einsum("bski,kp->bspi", amounts, bends)
    turn, slant = rng.normal(0, 0.12, size), rng.normal(0, 0.2, size)
    stretch = np.exp(rng.normal(0, 0.15, (size, 2)))
    cos, sin = np.cos(turn), np.sin(turn)
    affine = np.stack([np.stack([cos, slant - sin], 1), np.stack([sin, cos], 1)], 1)
    return np.einsum("bspi,bij->bspj", strokes, affine * stretch[:, :, None])


def _to_pixel_coordinates(
    points: np.ndarray, there: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Return the points in pixels (x, y): centered, the longer side about _BOX."""
    shown = there[:, :, None, None]
    low = np.where(shown, points, np.inf).min((1, 2))
    high = np.where(shown, points, -np.inf).max((1, 2))
    longer = (high - low).max(1)[:, None] / (_BOX * rng.uniform(0.8, 1.05, (len(points), 1)))
    middle = (high + low) / 2 + longer * rng.normal(0, 0.8, (len(points), 2))
    return (points - middle[:, None, None]) / longer[:, None, None] + (STROKE_SIDE - 1) / 2


def _render_strokes(points: np.ndarray, there: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return gray values (B, 28, 28) uint8 of pens of Gaussian profile, saturated."""
    size = len(points)
    pen = rng.uniform(0.6, 1.3, size)[:, None, None]
    steps = np.linalg.norm(np.diff(points, axis=2), axis=3)
    inner = (steps[:, :, 1:] + steps[:, :, :-1]) / 2
    length = np.concatenate([steps[:, :, :1], inner, steps[:, :, -1:]], 2)
    weight = (length * there[:, :, None]).reshape(size, -1, 1) / (pen * np.sqrt(2 * np.pi))
    pixels = np.arange(STROKE_SIDE)
    x, y = np.moveaxis(points.reshape(size, -1, 2), 2, 0)
    across = np.exp(-((x[:, :, None] - pixels) ** 2) / (2 * pen**2))
    down = np.exp(-((y[:, :, None] - pixels) ** 2) / (2 * pen**2))
    ink = np.matmul((weight * down).transpose(0, 2, 1), across)
    return np.round(255 * np.minimum(1.0, 1.8 * ink)).astype(np.uint8)


# --- color scenes ----------------------------------------------------------------------------


SCENE_CLASSES, SCENE_SIDE = 100, 32
_PARTS, _WAVES = 3, 4  # most parts of an object; waves of an outline
_BACKGROUND_OCCLUDERS = 8
_EDGE_SHARPNESS = 3.0  # slope of the logistic function of the distance in pixels
_SCENE_CHUNK = 500  # records drawn at once
_TWO_PI = 2 * np.pi

Rng = np.random.Generator
Grid = tuple[np.ndarray, np.ndarray]  # x and y of every pixel, from the middle


@dataclass(frozen=True)
class _Blobs:
    """Regions r(t) < size (1 + sum_k amounts_k cos((k + 2) t + phases_k)) around their middles.

    They are stretched and turned. All arrays have the same leading shape.
    """

    middle: np.ndarray  # (..., 2)
    size: np.ndarray
    stretch: np.ndarray
    turn: np.ndarray
    amounts: np.ndarray  # (..., waves)
    phases: np.ndarray  # (..., waves)

    def rasterise(self, grid: Grid) -> tuple[np.ndarray, Grid]:
        """Return the coverage (B, 32, 32) of pixels by blobs (B,), and the grid in their frame."""
        x, y = grid[0] - _per_image(self.middle[:, 0]), grid[1] - _per_image(self.middle[:, 1])
        u, v = _rotate((x, y), self.turn)
        u, v = u / _per_image(self.stretch), v * _per_image(self.stretch)
        distance = np.sqrt(u * u + v * v) + 1e-6
        once = (u + 1j * v) / distance
        power, outline = once, np.ones_like(distance)
        for amount, phase in zip(self.amounts.T, self.phases.T, strict=True):
            power = power * once
            outline = outline + _per_image(amount) * (power * _per_image(np.exp(1j * phase))).real
        depth = _per_image(self.size) * np.maximum(outline, 0.15) - distance
        return 1 / (1 + np.exp(-np.clip(_EDGE_SHARPNESS * depth, -20, 20))), (u, v)


@dataclass(frozen=True)
class _ObjectClasses:
    """The classes: appearance of their parts (classes, _PARTS), a mask of these, and background."""

    is_present: np.ndarray
    blobs: _Blobs
    color: np.ndarray  # (classes, parts, 3)
    contrast: np.ndarray  # of a grating; 0 without one
    frequency: np.ndarray
    angle: np.ndarray
    has_sharp_bars: np.ndarray
    background_color: np.ndarray  # (classes, 3)
    horizon: np.ndarray  # rows below the middle; beyond the image if there is no horizon


def draw_scenes(
    records: int, seed: int, classes: int = SCENE_CLASSES
) -> tuple[np.ndarray, np.ndarray]:
    """Return images (records, 3, 32, 32) uint8 and labels (records,) int64.

    The objects are the same for every seed, which decides how they are seen. Label i is i modulo
    `classes`.
    """
    things = _random_object_classes(np.random.Generator(np.random.Philox(key=0)), classes)
    rng = np.random.Generator(np.random.Philox(key=1 + seed))
    labels = np.arange(records, dtype=np.int64) % classes
    images = np.empty((records, 3, SCENE_SIDE, SCENE_SIDE), dtype=np.uint8)
    for start in range(0, records, _SCENE_CHUNK):
        images[start : start + _SCENE_CHUNK] = _render_scenes(
            things, labels[start : start + _SCENE_CHUNK], rng
        )
    return images, labels


def _random_object_classes(rng: Rng, classes: int) -> _ObjectClasses:
    shape = (classes, _PARTS)
    count = rng.choice(_PARTS, size=classes, p=(0.3, 0.4, 0.3)) + 1
    spread = np.array([1.4, 7.0, 7.0])  # the first part is in the middle, and larger
    sizes = np.where(np.arange(_PARTS) == 0, rng.uniform(7, 11, shape), rng.uniform(3, 7, shape))
    blobs = _Blobs(
        middle=rng.uniform(-1, 1, (*shape, 2)) * spread[:, None],
        size=sizes,
        stretch=np.exp(rng.normal(0, 0.35, shape)),
        turn=rng.uniform(0, _TWO_PI, shape),
        amounts=rng.normal(0, 0.22, (*shape, _WAVES)) / np.sqrt(np.arange(1, _WAVES + 1)),
        phases=rng.uniform(0, _TWO_PI, (*shape, _WAVES)),
    )
    return _ObjectClasses(
        is_present=np.arange(_PARTS) < count[:, None],
        blobs=blobs,
        color=rng.uniform(0.05, 0.95, (*shape, 3)),
        contrast=rng.uniform(0, 0.3, shape) * (rng.random(shape) < 0.6),
        frequency=np.exp(rng.uniform(np.log(0.25), np.log(1.6), shape)),
        angle=rng.uniform(0, np.pi, shape),
        has_sharp_bars=rng.random(shape) < 0.4,
        background_color=rng.uniform(0.1, 0.9, (classes, 3)),
        horizon=np.where(rng.random(classes) < 0.5, rng.uniform(-6, 10, classes), 3 * SCENE_SIDE),
    )


def _render_scenes(object_classes: _ObjectClasses, which: np.ndarray, rng: Rng) -> np.ndarray:
    """Return one image of each of these objects: (B, 3, 32, 32) uint8."""
    steps = np.arange(SCENE_SIDE, dtype=np.float32) - (SCENE_SIDE - 1) / 2
    y, x = np.meshgrid(steps, steps, indexing="ij")
    image = _draw_background(object_classes, which, (x, y), rng)
    for _ in range(_BACKGROUND_OCCLUDERS):
        image = _draw_occluder(image, (x, y), (2, 9), 0.5, rng)
    image = _draw_object(image, object_classes, which, (x, y), rng)
    image = _draw_occluder(image, (x, y), (2, 6), 0.25, rng)
    return _adjust_exposure(image, rng)


def _draw_background(
    object_classes: _ObjectClasses, which: np.ndarray, grid: Grid, rng: Rng
) -> np.ndarray:
    """Return a color gradient, a different color below the horizon, and clouds."""
    size = len(which)
    color = 0.6 * rng.uniform(0, 1, (size, 3)) + 0.4 * object_classes.background_color[which]
    along = _rotate(grid, rng.uniform(0, _TWO_PI, size))[0] / (SCENE_SIDE / 2)
    image = color[:, :, None, None] + along[:, None] * rng.normal(0, 0.15, (size, 3, 1, 1))
    below = grid[1] > _per_image(object_classes.horizon[which] + rng.normal(0, 3, size))
    image = np.where(below[:, None], rng.uniform(0, 1, (size, 3, 1, 1)), image)
    strength = np.abs(rng.normal(0, 0.12, (size, 1, 1, 1)))
    tint = 1 + 0.4 * rng.normal(size=(size, 3, 1, 1))
    return image + _power_law_noise(rng.uniform(0.8, 2.2, size), rng)[:, None] * strength * tint


def _draw_occluder(
    image: np.ndarray, grid: Grid, sizes: tuple[float, float], chance: float, rng: Rng
) -> np.ndarray:
    """Return the images, some of them with a blob of one color on top."""
    size = len(image)
    blobs = _Blobs(
        middle=rng.uniform(-SCENE_SIDE / 2, SCENE_SIDE / 2, (size, 2)),
        size=np.exp(rng.uniform(np.log(sizes[0]), np.log(sizes[1]), size)),
        stretch=np.exp(rng.normal(0, 0.4, size)),
        turn=rng.uniform(0, _TWO_PI, size),
        amounts=rng.normal(0, 0.15, (size, 3)),
        phases=rng.uniform(0, _TWO_PI, (size, 3)),
    )
    mask = blobs.rasterise(grid)[0] * _per_image(rng.random(size) < chance)
    return _blend(image, rng.uniform(0, 1, (size, 3, 1, 1)), mask)


def _draw_object(
    image: np.ndarray, object_classes: _ObjectClasses, which: np.ndarray, grid: Grid, rng: Rng
) -> np.ndarray:
    """Return the images with the object, whose parts share pose, light and tint."""
    size = len(which)
    scale, wide = np.exp(rng.normal(0, 0.22, size)), np.exp(rng.normal(0, 0.12, size))
    mirrored = np.where(rng.random(size) < 0.5, -1.0, 1.0)
    moved = rng.normal(0, 2.5, (2, size))
    x, y = _rotate(
        (grid[0] - _per_image(moved[0]), grid[1] - _per_image(moved[1])), rng.normal(0, 0.25, size)
    )
    pose = x * _per_image(mirrored / (scale * wide)), y * _per_image(wide / scale)
    light = (
        _rotate(pose, rng.uniform(0, _TWO_PI, size))[0] / 10 * _per_image(rng.normal(0, 0.15, size))
    )
    grain = 0.06 * _power_law_noise(rng.uniform(0.5, 2, size), rng)
    tint = rng.normal(0, 0.12, (size, 3))
    for part in reversed(range(_PARTS)):
        mask, (u, v) = _perturb_part(object_classes.blobs, which, part, rng).rasterise(pose)
        along = _rotate((u, v), object_classes.angle[which, part])[0]
        frequency = object_classes.frequency[which, part] * np.exp(rng.normal(0, 0.1, size))
        wave = np.sin(_per_image(frequency) * along + _per_image(rng.uniform(0, _TWO_PI, size)))
        wave = np.where(
            _per_image(object_classes.has_sharp_bars[which, part]), np.tanh(4 * wave), wave
        )
        other = rng.random(size) < 0.25  # in a random color
        color = np.where(
            other[:, None], rng.uniform(0, 1, (size, 3)), object_classes.color[which, part]
        )
        color = color + tint + rng.normal(0, 0.12, (size, 3))
        surface = _per_image(object_classes.contrast[which, part]) * wave + light + grain
        shown = color[:, :, None, None] + surface[:, None]
        image = _blend(image, shown, mask * _per_image(object_classes.is_present[which, part]))
    return image


def _perturb_part(blobs: _Blobs, which: np.ndarray, part: int, rng: Rng) -> _Blobs:
    """Return one part of each object, slightly deformed."""
    size = len(which)
    return _Blobs(
        middle=blobs.middle[which, part] + rng.normal(0, 0.6, (size, 2)),
        size=blobs.size[which, part] * np.exp(rng.normal(0, 0.08, size)),
        stretch=blobs.stretch[which, part] * np.exp(rng.normal(0, 0.06, size)),
        turn=blobs.turn[which, part] + rng.normal(0, 0.12, size),
        amounts=blobs.amounts[which, part] + rng.normal(0, 0.04, (size, _WAVES)),
        phases=blobs.phases[which, part] + rng.normal(0, 0.1, (size, _WAVES)),
    )


def _adjust_exposure(image: np.ndarray, rng: Rng) -> np.ndarray:
    """Return values (B, 3, 32, 32) uint8 at random saturation, contrast and brightness."""
    size = (len(image), 1, 1, 1)
    gray = image.mean(1, keepdims=True)
    image = gray + (image - gray) * np.clip(rng.normal(0.65, 0.3, size), 0, 1.3)
    image = (image - 0.5) * np.exp(rng.normal(-0.1, 0.2, size)) + 0.5
    return np.round(255 * np.clip(image + rng.normal(0, 0.08, size), 0, 1)).astype(np.uint8)


def _power_law_noise(exponent: np.ndarray, rng: Rng) -> np.ndarray:
    """Return noise (B, 32, 32) of deviation 1, whose amplitude is a power of the frequency."""
    rows, columns = np.fft.fftfreq(SCENE_SIDE)[:, None], np.fft.rfftfreq(SCENE_SIDE)
    squared = rows**2 + columns**2
    squared[0, 0] = np.inf  # no constant
    waves = rng.normal(size=(2, len(exponent), *squared.shape))
    noise = np.fft.irfft2(
        (waves[0] + 1j * waves[1]) * squared ** (-_per_image(exponent) / 2),
        (SCENE_SIDE, SCENE_SIDE),
    )
    return noise / noise.std((1, 2), keepdims=True)


def _blend(image: np.ndarray, color: np.ndarray, mask: np.ndarray) -> np.ndarray:
    return image + (color - image) * mask[:, None]


def _rotate(grid: Grid, angle: np.ndarray) -> Grid:
    cos, sin = _per_image(np.cos(angle)), _per_image(np.sin(angle))
    return cos * grid[0] + sin * grid[1], cos * grid[1] - sin * grid[0]


def _per_image(values: np.ndarray) -> np.ndarray:
    """Return one value per image (B,) with the shape (B, 1, 1)."""
    return values[:, None, None]
