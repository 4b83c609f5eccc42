"""Nearest neighbours by inner product, for one partition and context.

Small indexes are a matrix searched by brute force; from 1,024 vectors on FAISS takes over, where removed vectors are
tombstones until a fifth of the index is dead and it is rebuilt. Both give the same neighbours.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

FAISS_FROM = 1024
_REBUILD_AT_DEAD_SHARE = 0.2

Vector = NDArray[np.float32]


class VectorIndex:
    """Unit vectors under integer ids. Rows are positions in the matrix or in FAISS, never shown outside."""

    def __init__(self, dimension: int, *, faiss_from: int = FAISS_FROM) -> None:
        self.dimension = dimension
        self._faiss_from = faiss_from
        self._matrix: Vector = np.empty((4, dimension), dtype=np.float32)
        self._faiss: Any = None
        # Invariant: row r holds id _ids[r] if _row_of[_ids[r]] == r, else it is dead (FAISS only).
        self._ids: list[int] = []
        self._row_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._row_of)

    @property
    def size_bytes(self) -> int:
        """Memory of the vectors, tombstones included."""
        rows = self._faiss.ntotal if self._faiss is not None else len(self._matrix)
        return int(rows) * self.dimension * 4

    @property
    def uses_faiss(self) -> bool:
        return self._faiss is not None

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
                self._matrix = np.concatenate([self._matrix, np.empty_like(self._matrix)])
            self._matrix[row] = vector
        self._ids.append(id)
        self._row_of[id] = row
        if self._faiss is None and len(self._ids) >= self._faiss_from:
            self._rebuild()

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
        elif len(self._ids) - len(self._row_of) > _REBUILD_AT_DEAD_SHARE * len(self._ids):
            self._rebuild()
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
        while True:
            wanted = min(wanted, len(self._ids))
            scores, rows = self._faiss.search(vector.reshape(1, -1), wanted)
            # FAISS pads with row -1 when it finds fewer than it was asked for.
            alive = [
                (row, score)
                for row, score in zip(rows[0].tolist(), scores[0].tolist(), strict=True)
                if row >= 0 and self._row_of.get(self._ids[row]) == row
            ]
            if len(alive) >= k or wanted == len(self._ids):
                return [row for row, _ in alive], [score for _, score in alive]
            wanted *= 4

    def _rebuild(self) -> None:
        """Bring the living vectors into a fresh FAISS index, or back into the matrix when few are left."""
        alive = sorted(self._row_of.items(), key=lambda pair: pair[1])
        rows = [row for _, row in alive]
        if self._faiss is None:
            vectors = self._matrix[rows]
        else:
            vectors = self._faiss.reconstruct_n(0, self._faiss.ntotal)[rows]
        self._ids = [id for id, _ in alive]
        self._row_of = {id: row for row, id in enumerate(self._ids)}
        if len(alive) < self._faiss_from:
            self._faiss = None
            self._matrix = np.empty((max(4, len(alive)), self.dimension), dtype=np.float32)
            self._matrix[: len(alive)] = vectors
            return
        import faiss

        self._faiss = faiss.IndexFlatIP(self.dimension)
        self._faiss.add(np.ascontiguousarray(vectors))
        self._matrix = np.empty((0, self.dimension), dtype=np.float32)
