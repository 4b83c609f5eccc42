"""Nearest neighbours by inner product, for one partition and context.

Three forms by size: a matrix searched by brute force; from 1,024 vectors on FAISS with numbers of 16 bits, searched
whole; from 16,384 on the same in cells, of which the nearest are searched (IVF), which may miss a neighbour. A vector
that leaves FAISS becomes a tombstone. An index whose form no longer fits says so (`stale`) and serves on; a fresh one
is made by `build`, on any thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

FAISS_FROM = 1024
IVF_FROM = 16_384
PROBES = 16
BYTES_PER_ID = 160  # a Python integer in a list and in a dictionary
_STALE_AT_DEAD_SHARE = 0.2
_OUTGROWN = 4  # times the vectors that the cells were made for
_TRAINED_ON_PER_CELL = 40
_TRAINING_ROUNDS = 8

Vector = NDArray[np.float32]


class VectorIndex:
    """Unit vectors under integer ids. Rows are positions in the matrix or in FAISS, never shown outside."""

    def __init__(self, dimension: int, *, faiss_from: int = FAISS_FROM, ivf_from: int = IVF_FROM) -> None:
        self.dimension = dimension
        self._faiss_from = faiss_from
        self._ivf_from = ivf_from
        self._matrix: Vector = np.empty((4, dimension), dtype=np.float32)
        self._faiss: Any = None
        self._cells_made_for = 0  # 0: searched whole
        # Invariant: row r holds id _ids[r] if _row_of[_ids[r]] == r, else it is dead (FAISS only).
        self._ids: list[int] = []
        self._row_of: dict[int, int] = {}

    @classmethod
    def build(
        cls,
        ids: Sequence[int],
        vectors: Vector,
        *,
        faiss_from: int = FAISS_FROM,
        ivf_from: int = IVF_FROM,
        cells: bool = True,
    ) -> VectorIndex:
        """An index of vectors, [count, dimension], in the form that fits their number.

        Args:
            cells: make them where they fit, which takes a second or two for 100,000 vectors; else it is stale then.

        Raises:
            ValueError: an id comes twice.
        """
        index = cls(vectors.shape[1], faiss_from=faiss_from, ivf_from=ivf_from)
        index._ids = list(ids)
        index._row_of = {id: row for row, id in enumerate(index._ids)}
        if len(index._row_of) != len(index._ids):
            raise ValueError("an id comes twice")
        if len(ids) >= faiss_from:
            index._to_faiss(vectors, cells=cells)
        else:
            index._matrix = np.array(vectors, dtype=np.float32)
        return index

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, id: int) -> bool:
        return id in self._row_of

    @property
    def size_bytes(self) -> int:
        """Memory of the vectors and their ids, tombstones included."""
        ids = BYTES_PER_ID * len(self._ids)
        if self._faiss is None:
            return ids + len(self._matrix) * self.dimension * 4
        cells = self._faiss.nlist * self.dimension * 4 if self._cells_made_for else 0
        return ids + cells + int(self._faiss.ntotal) * (self.dimension * 2 + 8)

    @property
    def form(self) -> str:
        """`matrix`, `flat` or `cells`."""
        if self._faiss is None:
            return "matrix"
        return "cells" if self._cells_made_for else "flat"

    @property
    def stale(self) -> bool:
        """Whether an index built afresh would be faster or smaller by much."""
        alive, dead = len(self._row_of), len(self._ids) - len(self._row_of)
        if self._faiss is None:
            return False  # it has no dead rows, and grows into FAISS by itself
        if dead > _STALE_AT_DEAD_SHARE * len(self._ids):
            return True
        if self._cells_made_for:
            return alive > _OUTGROWN * self._cells_made_for
        return alive >= self._ivf_from

    def add(self, id: int, vector: Vector) -> None:
        """Add a vector, [dimension]; an id that is there already gets the new vector.

        Raises:
            ValueError: the vector has another shape, or holds NaN or infinity.
        """
        if vector.shape != (self.dimension,) or not np.isfinite(vector).all():
            raise ValueError(f"a vector of {self.dimension} finite numbers is needed, got shape {vector.shape}")
        if id in self._row_of:
            self.remove(id)
        row = len(self._ids)
        if self._faiss is not None:
            self._faiss.add(vector.reshape(1, -1).astype(np.float32, copy=False))
        else:
            if row == len(self._matrix):
                grown = np.empty((max(4, 2 * row), self.dimension), dtype=np.float32)
                grown[:row] = self._matrix
                self._matrix = grown
            self._matrix[row] = vector
        self._ids.append(id)
        self._row_of[id] = row
        if self._faiss is None and len(self._ids) >= self._faiss_from:
            # Searched whole for now, whatever the size: cells take time to make.
            self._to_faiss(self._matrix[: len(self._ids)], cells=False)

    def remove(self, id: int) -> bool:
        """Remove a vector; False when there is no such id."""
        row = self._row_of.pop(id, None)
        if row is None:
            return False
        if self._faiss is None:
            last = self._ids.pop()
            if last != id:
                self._matrix[row] = self._matrix[len(self._ids)]
                self._ids[row] = last
                self._row_of[last] = row
        return True

    def search(self, vector: Vector, k: int) -> list[tuple[int, float]]:
        """Up to `k` ids with their inner products, best first; equal products in the order they were added."""
        k = min(k, len(self._row_of))
        if k <= 0:
            return []
        rows, scores = self._search_faiss(vector, k) if self._faiss is not None else self._search_matrix(vector, k)
        best = sorted(zip(rows, scores, strict=True), key=lambda pair: (-pair[1], pair[0]))
        return [(self._ids[row], score) for row, score in best[:k]]

    def _search_matrix(self, vector: Vector, k: int) -> tuple[list[int], list[float]]:
        scores = self._matrix[: len(self._ids)] @ vector
        rows = np.argpartition(scores, -k)[-k:]
        return rows.tolist(), scores[rows].tolist()

    def _search_faiss(self, vector: Vector, k: int) -> tuple[list[int], list[float]]:
        """FAISS knows nothing of tombstones: ask for more rows until `k` of them are alive."""
        wanted = k
        query = vector.reshape(1, -1).astype(np.float32, copy=False)
        while True:
            wanted = min(wanted, len(self._ids))
            scores, rows = self._faiss.search(query, wanted)
            # FAISS pads with row -1 when it finds fewer than it was asked for.
            alive = [
                (row, score)
                for row, score in zip(rows[0].tolist(), scores[0].tolist(), strict=True)
                if row >= 0 and self._row_of.get(self._ids[row]) == row
            ]
            if len(alive) >= k or wanted == len(self._ids) or rows[0, -1] < 0:
                return [row for row, _ in alive], [score for _, score in alive]
            wanted *= 4

    def _to_faiss(self, vectors: Vector, *, cells: bool) -> None:
        import faiss

        count = len(vectors)
        kind = faiss.ScalarQuantizer.QT_fp16
        if cells and count >= self._ivf_from:
            faiss.omp_set_num_threads(1)  # of this thread: the other cores have look-ups to serve
            lists = max(1, round(2 * math.sqrt(count)))
            centres = faiss.IndexFlatIP(self.dimension)
            self._faiss = faiss.IndexIVFScalarQuantizer(
                centres, self.dimension, lists, kind, faiss.METRIC_INNER_PRODUCT, False
            )
            self._faiss.cp.niter = _TRAINING_ROUNDS
            self._faiss.nprobe = min(PROBES, lists)
            sample = np.random.default_rng(0).permutation(count)[: lists * _TRAINED_ON_PER_CELL]
            self._faiss.train(np.ascontiguousarray(vectors[sample]))
            self._cells_made_for = count
        else:
            self._faiss = faiss.IndexScalarQuantizer(self.dimension, kind, faiss.METRIC_INNER_PRODUCT)
        self._faiss.add(np.ascontiguousarray(vectors, dtype=np.float32))
        self._matrix = np.empty((0, self.dimension), dtype=np.float32)
