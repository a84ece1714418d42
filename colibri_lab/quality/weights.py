"""How far quantised matrices are from those they were made of, matrix by matrix and column block by column block."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
from tqdm import tqdm

from ..checkpoint import layout
from ..checkpoint.container import Container

BLOCK = 64  # columns of a block
LOST = 0.9  # share of a block's weights that became exactly zero from which on it counts as lost

MATRIX_COLUMNS = [
    "layer",
    "expert",
    "matrix",
    "format",
    "bytes",
    "weight_error",
    "output_error",
    "zero_share",
    "lost_blocks",
]
BLOCK_COLUMNS = ["layer", "expert", "matrix", "first_column", "zero_share", "lost"]


def relative_error(wanted: np.ndarray, found: np.ndarray, moment: np.ndarray | None = None) -> float | None:
    """||(W - Ŵ) X|| / ||W X|| for inputs X of second moment `moment` (cols, cols), of equal strength and independent where it
    is None: then ||W - Ŵ|| / ||W||. None for a matrix that answers nothing."""
    error, signal = (
        float(np.vdot(w if moment is None else w @ moment, w)) for w in (found - wanted, wanted.astype(np.float32))
    )
    return float(np.sqrt(max(error, 0.0) / signal)) if signal > 0 else None


def zero_shares(wanted: np.ndarray, found: np.ndarray, block: int = BLOCK) -> np.ndarray:
    """Share of the weights of each `block` columns that were not zero and are now, exactly; (blocks,). 0 where all were."""
    starts = np.arange(0, wanted.shape[1], block)
    was = np.add.reduceat((wanted != 0).sum(axis=0), starts)
    lost = np.add.reduceat(((wanted != 0) & (found == 0)).sum(axis=0), starts)
    return lost / np.maximum(was, 1)


def compare_matrices(
    box: Container, reference: Container, moment: Callable[[str, str], np.ndarray | None], layers, progress: bool = True
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """All matrices of `layers` (a set of numbers; with None in it also embeddings and head) in two containers of one model.

    moment(file, tensor): of what it reads, where known; files and tensors are named as in a container of single experts.
    Returns the tables of matrices and of column blocks. `expert` is null for matrices that are always in memory.
    """
    matrices, blocks = [], []
    files = [file for file in layout.container_files(box.config, 1).items() if layout.layer_of(file[0]) in layers]
    for file, specs in tqdm(files, desc="matrices", unit="file", disable=not progress):
        mine, other = _tensors(box, file, specs), _tensors(reference, file, specs)
        for name, spec in specs.items():
            if spec.part == "float":
                continue
            ours = mine[name]
            found, wanted = ours.array(), other[name].array()
            expert, _, matrix = name.rpartition(".")
            where = (layout.layer_of(file), int(expert) if expert else None, matrix)
            shares = zero_shares(wanted, found)
            inputs = moment(file, name)
            matrices.append(
                (*where, ours.format, ours.nbytes, relative_error(wanted, found),
                 None if inputs is None else relative_error(wanted, found, inputs),
                 float(shares @ _widths(wanted.shape[1])), int((shares >= LOST).sum()))
            )  # fmt: skip
            blocks += [(*where, BLOCK * i, float(share), bool(share >= LOST)) for i, share in enumerate(shares)]
    return _frame(matrices, MATRIX_COLUMNS), _frame(blocks, BLOCK_COLUMNS)


def _frame(rows: list[tuple], columns: list[str]) -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=columns)
    return frame.astype({"layer": "Int64", "expert": "Int64"})


def _widths(cols: int) -> np.ndarray:
    """Share of the columns that each block has."""
    return np.diff([*range(0, cols, BLOCK), cols]) / cols


def _tensors(box: Container, file: str, specs: dict) -> dict:
    """The tensors of a file as a container of single experts has it."""
    expert = next(iter(specs)).rpartition(".")[0]
    if not expert:
        return box.read(file).tensors
    return box.block(layout.layer_of(file), int(expert) // box.block_size).tensors
