"""Checks that the ranks of a layout together hold every element of a model once."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_rl.models.partitions import Rect
from megatron_rl.models.sizes import Sizes
from megatron_rl.weights.parameter_mapping import hf_shapes


def check_coverage(sizes: Sizes, rects: Iterable[Rect]) -> None:
    """Raises ValueError unless the rectangles of all ranks together hold every element of every tensor once.

    Equal rectangles are replicas and count as one. Others may not overlap.
    """
    by_tensor: dict[str, set[tuple[int, int, int, int]]] = {}
    for rect in rects:
        by_tensor.setdefault(rect.tensor, set()).add((rect.row, rect.column, rect.rows, rect.columns))
    shapes = hf_shapes(sizes)
    unknown, missing = sorted(by_tensor.keys() - shapes.keys()), sorted(shapes.keys() - by_tensor.keys())
    if unknown or missing:
        raise ValueError(f"the model has no tensors {unknown[:5]}; nobody holds the tensors {missing[:5]}")
    for tensor, boxes in by_tensor.items():
        rows, columns = shapes[tensor]
        if any(r < 0 or c < 0 or r + n > rows or c + m > columns for r, c, n, m in boxes):
            raise ValueError(f"{tensor} [{rows}, {columns}]: a rectangle lies outside of it")
        held = sum(n * m for _, _, n, m in boxes)
        if held != rows * columns or _any_overlap(boxes):
            raise ValueError(
                f"{tensor} [{rows}, {columns}]: its ranks hold {held} of {rows * columns} elements, or overlap"
            )


def _any_overlap(boxes: Iterable[tuple[int, int, int, int]]) -> bool:
    """Says whether two of the (row, column, rows, columns) boxes overlap."""
    ordered = sorted(boxes)
    for i, (row, column, rows, columns) in enumerate(ordered):
        for other_row, other_column, _, other_columns in ordered[i + 1 :]:
            if other_row >= row + rows:
                break
            if other_column < column + columns and column < other_column + other_columns:
                return True
    return False
