# SPDX-License-Identifier: Apache-2.0
"""Loading and unloading of LoRA adapters at run time, with the bodies of vLLM's routes."""

from pathlib import Path
from typing import ClassVar

from specops.api.errors import QueueFull, UnknownAdapter
from specops.api.messages import LoadAdapter, UnloadAdapter
from specops.api.methods.checks import adapter_name
from specops.server.api_error import ApiError, bad_value
from specops.server.dispatch import Dispatch
from specops.server.generation import busy, failure_of
from specops.server.jobs import JobFailed, new_number
from specops.server.protocol import Body
from specops.server.unsupported import ANY, Table, Unsupported


class LoadAdapterRequest(Body):
    """Body of POST /v1/load_lora_adapter."""

    neutral: ClassVar[Table] = {
        "is_3d_lora_weight": Unsupported("experts cannot be adapted", (False,)),
        "load_inplace": Unsupported("unload the adapter first", (False,)),
    }

    lora_name: str
    lora_path: str


class UnloadAdapterRequest(Body):
    """Body of POST /v1/unload_lora_adapter."""

    neutral: ClassVar[Table] = {"lora_int_id": Unsupported("adapters have names only", ANY)}

    lora_name: str


class AdapterChanges:
    """Loader of adapters below one folder.

    Args:
        folder: folder of all adapters that may be loaded.
        dispatch: connection to the engine.
        model_names: names of the model, which no adapter may have.
    """

    def __init__(self, folder: str | Path, dispatch: Dispatch, model_names: list[str]) -> None:
        self._folder = Path(folder).resolve()
        self._dispatch = dispatch
        self._model_names = model_names

    async def load(self, body: LoadAdapterRequest) -> str:
        """Load an adapter; return a sentence for the client.

        Raises:
            ApiError: the path is not below the folder, the engine refuses the adapter, or it cannot
                be reached.
        """
        name, path = body.lora_name, self._path(body.lora_path)
        if name in self._model_names:
            raise ApiError(
                400,
                f"lora_name must differ from the model's names, got {name!r}",
                param="lora_name",
            )
        try:
            adapter_name(name)
            await self._change(LoadAdapter(new_number(), name, str(path)))
        except ValueError as error:  # its message has the resolved path
            message = str(error).replace(str(path), body.lora_path)
            raise bad_value(ValueError(message), LoadAdapterRequest, "lora_path") from None
        return f"Success: LoRA adapter '{name}' added successfully."

    async def unload(self, body: UnloadAdapterRequest) -> str:
        """Unload an adapter; return a sentence for the client.

        Raises:
            ApiError: 404 if it is not loaded; or the engine cannot be reached.
        """
        try:
            await self._change(UnloadAdapter(new_number(), body.lora_name))
        except UnknownAdapter as error:
            raise ApiError(404, str(error), param="lora_name", code="model_not_found") from None
        except ValueError as error:
            raise bad_value(error, UnloadAdapterRequest, "lora_name") from None
        return f"Success: LoRA adapter '{body.lora_name}' removed successfully."

    async def _change(self, change: LoadAdapter | UnloadAdapter) -> None:
        try:
            await self._dispatch.change_adapters(change)
        except QueueFull as error:
            raise busy(error) from None
        except JobFailed as error:
            raise failure_of(error) from None

    def _path(self, path: str) -> Path:
        """Return the real path of an adapter.

        Raises:
            ApiError: it is not below the folder, also if a symbolic link leads out of it.
        """
        try:
            found = (self._folder / path).resolve()
            is_below = self._folder in found.parents
        except (OSError, RuntimeError, ValueError):  # a loop of links, or a character 0
            is_below = False
        if not is_below:
            raise ApiError(
                400,
                f"lora_path must be a directory below that of --runtime-lora-dir, got {path!r}",
                param="lora_path",
                code="invalid_value",
            )
        return found
