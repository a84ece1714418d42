"""GPTQ: rounding one column after another, what one column loses being made good by those that follow.

Frantar, Ashkboos, Hoefler, Alistarh: GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers
(arXiv:2210.17323), with the scale of each group chosen when its turn comes: of ranges shrunk step by step the one with the
least squared error, each column weighted by its mean square input. What is minimised is ||(W - Ŵ) X||² over inputs X that
the matrix has met, given by their second moment H = X Xᵀ / tokens. Rows of W do not touch each other, so they may come in
any portions.
"""

from __future__ import annotations

import numpy as np

from .formats import Encoded, Format, encoded, group_bounds, round_to_codes, scale_range, steps

DAMPING = 0.01  # of the mean diagonal, added to the diagonal: H has no inverse where an input never varied
SHRINK = (1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.8, 0.75, 0.7)
LAZY = 128  # columns whose corrections are collected before they reach the columns further right


class Rounding:
    """How the columns of one matrix, or of all that read the same input, are rounded. moment: H, (cols, cols).

    Raises ValueError for a moment that is not square or not finite.
    """

    def __init__(self, moment: np.ndarray):
        if moment.ndim != 2 or moment.shape[0] != moment.shape[1] or not np.isfinite(moment).all():
            raise ValueError(f"a second moment must be a finite square matrix, got shape {moment.shape}")
        h = moment.astype(np.float64)
        power = float(np.trace(h)) / len(h) or 1.0
        h[np.diag_indices_from(h)] += DAMPING * power
        self.weight = np.diag(h).copy()  # how much an error in a column costs
        # Upper factor of the inverse: row i is how an error in column i is best spread over the columns after it.
        self._spread = np.linalg.cholesky(np.linalg.inv(h)).T

    def encode(self, values: np.ndarray, kind: Format, factor: float = 1.0, bounds=None) -> Encoded:
        """Rows float32 (rows, cols) → codes and scales of `kind`; `factor`, `bounds` as in `formats.encode`."""
        w = values.astype(np.float64) / factor
        rows, cols = w.shape
        codes = np.zeros((rows, cols), kind.dtype)
        scale, zero = np.zeros((rows, kind.groups(cols)), np.float32), np.zeros((rows, kind.groups(cols)))
        single = _one_scale(kind)
        width = kind.group or LAZY
        if not kind.group:
            scale[:], zero[:] = self._whole_row(w, kind, factor, bounds)
        for first in range(0, cols, width):
            last = min(cols, first + width)
            at = slice(first // kind.group, first // kind.group + 1) if kind.group else slice(0, 1)
            if kind.group:
                scale[:, at], zero[:, at] = best_range(w[:, first:last], self.weight[first:last], single)
            errors = np.empty((rows, last - first))
            for i in range(first, last):
                column = w[:, i : i + 1]
                code = round_to_codes(column, scale[:, at], zero[:, at], single)
                codes[:, i : i + 1] = code
                error = (column - steps(code, zero[:, at], kind) * scale[:, at]) / self._spread[i, i]
                w[:, i + 1 : last] -= error * self._spread[i, i + 1 : last]
                errors[:, i - first] = error[:, 0]
            w[:, last:] -= errors @ self._spread[first:last, last:]
        return encoded(codes, scale, zero, kind)

    def _whole_row(self, w: np.ndarray, kind: Format, factor: float, bounds) -> tuple[np.ndarray, np.ndarray]:
        if kind.shared:
            return scale_range(*group_bounds(w, kind, factor, bounds), kind)
        return best_range(w, self.weight, _one_scale(kind))


def best_range(w: np.ndarray, weight: np.ndarray, kind: Format) -> tuple[np.ndarray, np.ndarray]:
    """Scale and zero (rows, 1) of one group w (rows, cols): of its range and smaller ones the one whose rounding errors,
    squared and weighted (cols,), are least."""
    low, high = w.min(axis=1, keepdims=True), w.max(axis=1, keepdims=True)
    found = None
    for part in SHRINK:
        scale, zero = scale_range(low * part, high * part, kind)
        back = steps(round_to_codes(w, scale, zero, kind), zero, kind) * scale
        cost = (((back - w) ** 2) @ weight)[:, None]
        if found is None:
            found = cost, scale, zero
        else:
            better = cost < found[0]
            found = tuple(np.where(better, new, old) for new, old in zip((cost, scale, zero), found, strict=True))
    return found[1], found[2]


def _one_scale(kind: Format) -> Format:
    """The same format with one scale for whatever columns it is given."""
    return Format(kind.name, kind.kind, kind.dtype, kind.k_group, kind.scale_dtype, 0, False, kind.symmetric)
