# SPDX-License-Identifier: Apache-2.0
"""Activation buffers shared by all layers, and each layer's views of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specops.engine.models.blocks.block import NewRows, Shape

# Maximum number of row counts with cached views. Decode and verification steps use few different
# row counts. Prompt chunks use many more, so the cache is cleared when it is full.
_MAX_KEPT_VIEWS = 64


class LayerViews(NamedTuple):
    """Activation views of a layer's blocks."""

    attention: Any
    mlp: Any
    per_layer: Any = None  # for layers with an embedding of their own


@dataclass(frozen=True)
class StepViews:
    """Activations of a step. The [rows, hidden_size] tensors pass from layer to layer."""

    residual: Tensor
    normed: Tensor
    branch: Tensor
    layers: list[LayerViews]


class Activations:
    """Set of activation buffers for steps of any size, so that a step allocates nothing.

    All layers share the buffers, since they run one after the other. Each buffer is sized for the
    layer that needs the largest one.

    Args:
        shapes: shapes of each layer's blocks, in the order of `LayerViews`.
        hidden_size: width of the hidden states.
        dtype: dtype of the hidden states.
        device: device of the buffers.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[Shape]],
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._shapes = shapes
        self._hidden_size, self._dtype, self._device = hidden_size, dtype, device
        self._num_rows = 0
        self._buffers: dict[str, Tensor] = {}
        self._views: dict[int, StepViews] = {}

    @property
    def tensors(self) -> list[Tensor]:
        """All allocated buffers."""
        return list(self._buffers.values())

    def reserve(self, num_rows: int) -> None:
        """Allocate buffers for up to `num_rows` rows; up to that size, they do not move."""
        if self._num_rows >= num_rows:
            return
        widths: dict[str, int] = {}
        dtypes: dict[str, torch.dtype] = {}

        def measure(name: str, width: int, dtype: torch.dtype | None = None) -> Tensor:
            widths[name] = max(widths.get(name, 0), width)
            dtypes[name] = dtype or self._dtype
            return torch.empty(0, width, dtype=dtypes[name])

        self._rows(measure)
        self._num_rows = num_rows
        self._views.clear()
        self._buffers = {
            name: torch.empty(num_rows * width, dtype=dtypes[name], device=self._device)
            for name, width in widths.items()
        }

    def first(self, num_rows: int) -> StepViews:
        """Return views of the first `num_rows` rows, allocating buffers if they are too small."""
        found = self._views.get(num_rows)
        if found is None:
            self.reserve(num_rows)
            if len(self._views) >= _MAX_KEPT_VIEWS:
                self._views.clear()

            def view(name: str, width: int, dtype: torch.dtype | None = None) -> Tensor:
                return self._buffers[name][: num_rows * width].view(num_rows, width)

            found = self._views[num_rows] = self._rows(view)
        return found

    def _rows(self, new: NewRows) -> StepViews:
        made: dict[Shape, Any] = {}

        def views(shape: Shape) -> Any:
            if shape not in made:
                made[shape] = shape.views(new)
            return made[shape]

        return StepViews(
            new("residual", self._hidden_size),
            new("normed", self._hidden_size),
            new("branch", self._hidden_size),
            [LayerViews(*map(views, of_layer)) for of_layer in self._shapes],
        )
