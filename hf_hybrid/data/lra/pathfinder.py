"""Pathfinder of the Long Range Arena: two dashed paths among short ones; do the two discs lie on the same one?

The published images come from the program of Linsley et al. (2018) with the Long Range Arena's settings. This one
draws anew by the same description; single pixels differ from those images, and dashes are as bright as discs, where
that program's contrasts differ. Places are ``(y, x)`` in pixels.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hf_hybrid.data.drawing import Array, check, check_sizes

__all__ = ["PATHFINDER", "Pathfinder", "draw_pathfinder"]

_SCALE = 4
"""Samples of a pixel, in each direction, that its brightness is the mean of."""
_DIRECTIONS = 32
_MIDDLE = 1.5
"""Pixels around the middle of small images where the first path begins."""
_TRIALS = 5  # of a distractor
_LEAST = 1e-3  # weight of all free directions together, below which a path cannot go on


@dataclass(frozen=True)
class Pathfinder:
    """The settings of the images; the defaults are those of the Long Range Arena's 32 x 32 images, its hard split.

    Attributes:
        size: Pixels of a side.
        dashes: Dashes of each of the two paths.
        dash_length: Length of a dash.
        thickness: Its thickness.
        margin: Free space before and after a dash, and around it.
        seed_distance: Distance of the beginnings of the two paths.
        continuity: How straight paths are: a turn by an angle a has a weight of cos² (continuity a), up to a right
            angle.
        radius: Radius of the discs at the ends.
        distractors: Short paths beside the two.
        distractor_dashes: Their dashes.
        padding: Pixels at the border that stay free.
        candidates: Images that are drawn for each one, of which those are taken whose discs lie alike for both labels;
            1 takes all. In small images the places of the discs would tell most labels.
    """

    size: int = 32
    dashes: int = 14
    dash_length: float = 2.0
    thickness: float = 0.5
    margin: float = 1.0
    seed_distance: float = 7.0
    continuity: float = 1.0
    radius: float = 1.5
    distractors: int = 5
    distractor_dashes: int = 4
    padding: int = 1
    candidates: int = 1

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: One breaks its rule.
        """
        check_sizes(8, size=self.size)
        check_sizes(2, dashes=self.dashes)
        check_sizes(1, distractor_dashes=self.distractor_dashes, candidates=self.candidates)
        check_sizes(0, distractors=self.distractors, padding=self.padding)
        for field in ("dash_length", "thickness", "margin", "seed_distance", "continuity", "radius"):
            check(getattr(self, field) > 0, field, "positive", getattr(self, field))
        room = self.size - 2 * self.padding
        check(self.seed_distance < room / 2, "seed_distance", f"below half of the {room} pixels", self.seed_distance)
        # a path covers some two margins to each side of it, and must leave most of the image to turn in
        space = 2 * self.dashes * (self.dash_length + 2 * self.margin) * 2 * self.margin
        check(space <= room**2 / 3, "dashes", f"few enough for {self.size} x {self.size} pixels", self.dashes)


PATHFINDER = {
    "lra": Pathfinder(),
    "small": Pathfinder(
        size=16, dashes=4, seed_distance=5.0, distractors=2, distractor_dashes=2, radius=1.0, candidates=3
    ),
}
"""Settings by name: the Long Range Arena's 32 x 32 images, and images of 16 x 16 pixels for a CPU."""


def draw_pathfinder(
    count: int, generator: np.random.Generator, settings: Pathfinder = PATHFINDER["lra"]
) -> tuple[Array, Array]:
    """Draw images (Tay et al. 2021; Linsley et al. 2018).

    One path begins near the middle, at least twice the seed distance from the border, and the other at that distance
    from it. They grow in turn, dash by dash, each turned a little from the one before, over free space only; an image
    in which one cannot go on is drawn anew. Short paths of the same dashes fill other free space. Two discs mark the
    beginning of one of the two paths and the end of one. The label is 1 if that is the same path, in half of the
    images. With `candidates` above 1 the images come in pairs of both labels whose discs lie alike, but for turns and
    reflections; count many at once, since pairs are found among these.

    Args:
        count: Images.
        generator: Draws them.
        settings: Their settings.

    Returns:
        The images, `(N, size, size)`, uint8, and the labels, `(N,)`.

    Raises:
        ValueError: `count` is not positive.
    """
    check_sizes(1, count=count)
    images, labels = np.empty((count, settings.size, settings.size), np.uint8), np.empty(count, np.int64)
    for row, (paths, taken, first, last) in enumerate(_scenes(count, generator, settings)):
        labels[row] = first == last
        dashes = [dash for path in paths for dash in path]
        for path in range(2, 2 + settings.distractors):
            dashes += _short_path(generator, settings, taken, path)
        images[row] = _painted(settings, dashes, [paths[first][0][0], paths[last][-1][1]])
    return images, labels


_Paths = tuple[list[Array], list[Array]]


def _scenes(
    count: int, generator: np.random.Generator, settings: Pathfinder
) -> Iterator[tuple[_Paths, "_Taken", int, int]]:
    """Yield two paths, the space that they take, and which one begins and which one ends at a disc."""
    if settings.candidates == 1:
        for _ in range(count):
            label, first = generator.integers(2, size=2)
            yield (*_two_paths(generator, settings), first, first if label else 1 - first)
        return
    drawn = [_two_paths(generator, settings) for _ in range(settings.candidates * count)]
    middle = (settings.size - 1) / 2
    begins, ends = (
        np.array([[path[at[0]][at[1]] for path in paths] for paths, _ in drawn]) - middle for at in ((0, 0), (-1, 1))
    )
    chosen = _alike(begins, ends, count)
    for number in generator.permutation(len(chosen))[:count]:
        scene, first, last = chosen[number]
        yield (*drawn[scene], first, last)


def _alike(begins: Array, ends: Array, count: int) -> list[tuple[int, int, int]]:
    """Choose as many scenes of each label, none twice, whose discs lie alike: pairs of scenes, the most alike first.

    Args:
        begins: Places of the beginnings of both paths, `(N, 2, 2)`, from the middle of the image.
        ends: Places of their ends.
        count: Scenes, and one more if it is odd.

    Returns:
        Scenes, the path that begins at a disc, and the path that ends at one.
    """
    scene, first = (index.ravel() for index in np.indices(begins.shape[:2]))
    same = _placed(begins[scene, first], ends[scene, first])
    other = _placed(begins[scene, first], ends[scene, 1 - first])
    apart = np.square(same[:, None] - other).sum(axis=-1)
    is_free = np.ones(len(begins), dtype=bool)
    chosen: list[tuple[int, int, int]] = []
    for one, two in zip(*np.unravel_index(np.argsort(apart, axis=None), apart.shape), strict=True):
        if scene[one] == scene[two] or not (is_free[scene[one]] and is_free[scene[two]]):
            continue
        is_free[[scene[one], scene[two]]] = False
        chosen += [(scene[one], first[one], first[one]), (scene[two], first[two], 1 - first[two])]
        if len(chosen) >= count:
            break
    return chosen


def _placed(one: Array, two: Array) -> Array:
    """Return the places `(N, 4)` of two discs, the nearer to the middle first, with the square's symmetries undone."""
    is_far = (np.hypot(*one.T) > np.hypot(*two.T))[:, None]
    near, far = np.where(is_far, two, one), np.where(is_far, one, two)
    signs = np.where(near < 0, -1, 1)
    near, far = near * signs, far * signs
    is_steep = (near[:, 0] > near[:, 1])[:, None]
    return np.concatenate([np.where(is_steep, x[:, ::-1], x) for x in (near, far)], axis=1)


class _Taken:
    """Which space is taken: three points along each dash, with the number of its path and of its place in it."""

    def __init__(self, settings: Pathfinder) -> None:
        self._points: Array = np.empty((0, 3, 2))
        self._paths: Array = np.empty(0, np.int64)
        self._numbers: Array = np.empty(0, np.int64)
        self._near = 2 * settings.margin
        self._low, self._high = settings.padding, settings.size - 1 - settings.padding

    def are_free(self, dashes: Array, path: int, number: int) -> Array:
        """Return whether dashes `(K, 2, 2)` lie inside and far from all but the dash before them in their path."""
        inside = np.asarray(((dashes >= self._low) & (dashes <= self._high)).all(axis=(1, 2)))
        others = self._points[(self._paths != path) | (self._numbers < number - 1)].reshape(-1, 2)
        squares = np.square(_along(dashes)[:, :, None] - others).sum(axis=-1)
        return inside & np.asarray((squares >= self._near**2).all(axis=(1, 2)))

    def free_place(self, generator: np.random.Generator) -> Array | None:
        """Draw a place among the free pixels, and within its pixel; None if none is free."""
        pixels = np.indices((self._high - self._low,) * 2).reshape(2, -1).T + self._low
        places = pixels + generator.random(pixels.shape)
        squares = np.square(places[:, None] - self._points.reshape(-1, 2)).sum(axis=-1)
        free = places[(squares >= self._near**2).all(axis=1)]
        return np.asarray(generator.choice(free)) if len(free) else None

    def take(self, dash: Array, path: int, number: int) -> None:
        """Mark the space of a dash `(2, 2)` as taken."""
        self._points = np.concatenate([self._points, _along(dash[None])])
        self._paths, self._numbers = np.append(self._paths, path), np.append(self._numbers, number)

    def forget(self, path: int) -> None:
        """Free a path's space."""
        kept = self._paths != path
        self._points, self._paths, self._numbers = self._points[kept], self._paths[kept], self._numbers[kept]


def _along(dashes: Array) -> Array:
    """Return beginning, middle and end of dashes, `(K, 3, 2)`."""
    return np.stack([dashes[:, 0], dashes.mean(axis=1), dashes[:, 1]], axis=1)


def _steps(angles: Array) -> Array:
    """Return the step (y, x) of length 1 at each angle, `(K, 2)`."""
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1)


def _first_dash(generator: np.random.Generator, settings: Pathfinder, start: Array) -> tuple[Array, float]:
    angle = float(generator.uniform(-math.pi, math.pi))
    return np.stack([start, start + settings.dash_length * _steps(np.array(angle))]), angle


def _two_paths(generator: np.random.Generator, settings: Pathfinder) -> tuple[_Paths, _Taken]:
    """Draw both paths, anew as often as one of them finds no way on, and return them and the space that they take."""
    paths = None
    while paths is None:
        taken = _Taken(settings)
        paths = _tried_paths(generator, settings, taken)
    return paths, taken


def _tried_paths(generator: np.random.Generator, settings: Pathfinder, taken: _Taken) -> _Paths | None:
    border = min(2 * settings.seed_distance, (settings.size - 1) / 2 - _MIDDLE)
    start = generator.uniform(border, settings.size - 1 - border, size=2)
    other = start + settings.seed_distance * _steps(np.array(generator.uniform(-math.pi, math.pi)))
    paths: _Paths = ([], [])
    angles = [0.0, 0.0]
    for number in range(settings.dashes):
        for path, begins in enumerate((start, other)):
            if number == 0:
                dash, angle = _first_dash(generator, settings, begins)
                found = (dash, angle) if taken.are_free(dash[None], path, 0)[0] else None
            else:
                found = _next_dash(generator, settings, taken, paths[path][-1], angles[path], path, number)
            if found is None:
                return None
            angles[path] = found[1]
            paths[path].append(found[0])
            taken.take(found[0], path, number)
    return paths


def _next_dash(
    generator: np.random.Generator,
    settings: Pathfinder,
    taken: _Taken,
    before: Array,
    angle: float,
    path: int,
    number: int,
) -> tuple[Array, float] | None:
    """Draw the next dash of a path among those whose space is free; None if there is none."""
    pivot = before[1] + settings.margin * _steps(np.array(angle))
    turns = (np.arange(_DIRECTIONS) + generator.random()) / _DIRECTIONS * math.pi - math.pi / 2
    weights = np.cos(np.minimum(np.abs(turns) * settings.continuity, math.pi / 2)) ** 2
    steps = _steps(angle + turns)
    near, far = pivot + settings.margin * steps, pivot + (settings.margin + settings.dash_length) * steps
    dashes = np.stack([near, far], axis=1)
    weights = np.where(taken.are_free(dashes, path, number), weights, 0.0)
    if weights.sum() < _LEAST:
        return None
    chosen = int(generator.choice(_DIRECTIONS, p=weights / weights.sum()))
    return dashes[chosen], float(angle + turns[chosen])


def _short_path(generator: np.random.Generator, settings: Pathfinder, taken: _Taken, path: int) -> list[Array]:
    """Draw a short path that begins in free space; nothing if a few trials find none."""
    for _ in range(_TRIALS):
        start = taken.free_place(generator)
        if start is None:
            return []
        turns = generator.uniform(-math.pi, math.pi, size=_DIRECTIONS)
        firsts = np.stack(
            [np.broadcast_to(start, (_DIRECTIONS, 2)), start + settings.dash_length * _steps(turns)], axis=1
        )
        free = np.flatnonzero(taken.are_free(firsts, path, 0))
        found = (firsts[free[0]], float(turns[free[0]])) if len(free) else None
        dashes: list[Array] = []
        while found is not None:
            dashes.append(found[0])
            taken.take(found[0], path, len(dashes) - 1)
            if len(dashes) == settings.distractor_dashes:
                return dashes
            found = _next_dash(generator, settings, taken, *found, path, len(dashes))
        taken.forget(path)
    return []


def _painted(settings: Pathfinder, dashes: list[Array], discs: list[Array]) -> Array:
    """Paint dashes and discs in white on black, each pixel the mean of its samples."""
    samples = settings.size * _SCALE
    places = (np.arange(samples) + 0.5) / _SCALE - 0.5
    is_white = np.zeros((samples, samples), dtype=bool)
    shapes = [(dash, settings.thickness / 2) for dash in dashes]
    shapes += [(np.stack([center, center]), settings.radius) for center in discs]
    for (start, end), radius in shapes:
        low, high = np.minimum(start, end) - radius, np.maximum(start, end) + radius
        rows, columns = (slice(*np.searchsorted(places, (low[axis], high[axis]))) for axis in (0, 1))
        apart = np.stack(np.meshgrid(places[rows], places[columns], indexing="ij"), axis=-1) - start
        way = end - start
        along = np.clip(apart @ way / max(way @ way, 1e-12), 0, 1)
        is_white[rows, columns] |= np.square(apart - along[..., None] * way).sum(axis=-1) <= radius**2
    means = is_white.reshape(settings.size, _SCALE, settings.size, _SCALE).mean(axis=(1, 3))
    return np.asarray(np.round(255 * means), np.uint8)
