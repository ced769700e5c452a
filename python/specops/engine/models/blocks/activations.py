# SPDX-License-Identifier: Apache-2.0
"""The activations that layers share, and the views that they have of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specops.engine.models.blocks.block import NewRows, Shape

# Row counts whose views of the buffers are kept. Decode and verification steps use few; chunks are
# larger and rarer, so when the table is full it starts anew rather than growing with every size.
_MAX_KEPT_VIEWS = 64


class LayerViews(NamedTuple):
    """The views of a layer's blocks."""

    attention: Any
    mlp: Any


@dataclass(frozen=True)
class Rows:
    """The activations of some rows; what is [rows, hidden_size] goes from layer to layer."""

    residual: Tensor
    normed: Tensor
    branch: Tensor
    layers: list[LayerViews]


class Activations:
    """One set of buffers for steps of any size, so that a step allocates nothing.

    Layers run one after the other, so they share the buffers: each is as large as the layer that
    needs most of it.

    Args:
        shapes: of the attention and the MLP of each layer.
        hidden_size: width of the states between layers.
        dtype: of the states.
        device: where they are.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[Shape, Shape]],
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._shapes = shapes
        self._hidden_size, self._dtype, self._device = hidden_size, dtype, device
        self._num_rows = 0
        self._buffers: dict[str, Tensor] = {}
        self._views: dict[int, Rows] = {}

    @property
    def tensors(self) -> list[Tensor]:
        """The buffers."""
        return list(self._buffers.values())

    def reserve(self, num_rows: int) -> None:
        """Allocates the buffers of up to so many rows, which then stay where they are."""
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

    def first(self, num_rows: int) -> Rows:
        """Returns the first rows."""
        found = self._views.get(num_rows)
        if found is None:
            self.reserve(num_rows)
            if len(self._views) >= _MAX_KEPT_VIEWS:
                self._views.clear()

            def view(name: str, width: int, dtype: torch.dtype | None = None) -> Tensor:
                return self._buffers[name][: num_rows * width].view(num_rows, width)

            found = self._views[num_rows] = self._rows(view)
        return found

    def _rows(self, new: NewRows) -> Rows:
        made: dict[Shape, Any] = {}

        def views(shape: Shape) -> Any:
            if shape not in made:
                made[shape] = shape.views(new)
            return made[shape]

        return Rows(
            new("residual", self._hidden_size),
            new("normed", self._hidden_size),
            new("branch", self._hidden_size),
            [LayerViews(views(attention), views(mlp)) for attention, mlp in self._shapes],
        )
