"""The common interface of checkpoints: a config, and named torch tensors, with the checks of weights that are read.

torch is imported when the first tensor is requested, so reading a config stays cheap. Runs in the process that loads the model.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from headrace.checkpoint.gguf import BlockType, Bytes
from headrace.checkpoint.model_config import ModelConfig
from headrace.checkpoint.quantized_matrix import BlockMatrix, QuantizedMatrix
from headrace.checkpoint.weight_formats import Scheme, StoredType
from headrace.errors import ModelError

if TYPE_CHECKING:
    import torch

CheckpointKind = Literal["huggingface", "gguf", "dummy"]


class Checkpoint(ABC):
    """One model on disk. `tensor_names`, `shape` and `total_bytes` use only the headers. notes: what its tensors say that its config does not, for
    the start-up log. file_format: of the files that it is in, or would be."""

    kind: CheckpointKind
    file_format: Literal["gguf", "safetensors"] = "safetensors"

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self.path = path
        self.config = config
        self.notes: tuple[str, ...] = ()

    @property
    def stored_precision(self) -> str:
        """What a GGUF file calls the precision of its weights, such as Q4_K_M; "" elsewhere."""
        return ""

    def stored_types(self, quantization: Scheme) -> tuple[StoredType, ...]:
        """The types of a GGUF file, and how they run if linear layers do as `quantization` says; () elsewhere."""
        return ()

    def block_type(self, name: str) -> BlockType | None:
        """The type of a matrix that `blocks` gives; None elsewhere."""
        return None

    @property
    @abstractmethod
    def total_bytes(self) -> int:
        """Bytes of all tensors as `iter_tensors` gives them."""

    @abstractmethod
    def files(self) -> list[Path]:
        """The files that hold the tensors."""

    @abstractmethod
    def tensor_names(self) -> list[str]:
        """Hugging Face names in the order of `iter_tensors`."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor. Raises ModelError for a name that is not here."""

    @abstractmethod
    def tensor(self, name: str) -> "torch.Tensor":
        """One tensor. Raises ModelError for a name that is not here.

        Safetensors: a view of the mapped file, copied only where written. GGUF: float types as stored, quantised ones as
        float32.
        """

    def iter_tensors(self, check_finite: bool = False) -> Iterator[tuple[str, "torch.Tensor"]]:
        """Every tensor exactly once, in file order, read on demand.

        check_finite: refuse a tensor that contains NaN or infinity (one pass over its values).
        Raises ModelError that names the file and the tensor.
        """
        for name in self.tensor_names():
            yield name, self.checked_tensor(name, check_finite)

    def checked_tensor(self, name: str, check_finite: bool = False) -> "torch.Tensor":
        """check_finite: as in `iter_tensors`. Refuses a matrix that contains only zeros, as a hole in a file would."""
        tensor = self.tensor(name)
        if check_finite:
            self._check_finite(name, tensor)
        self._check_zero(name, tensor)
        return tensor

    def quantized(self, name: str) -> QuantizedMatrix | None:
        """A matrix as it is stored, if kernels can compute with this format; None for any other tensor. Raises ModelError if its scales are not
        finite, or if it contains only zeros."""
        return None

    def blocks(self, name: str) -> BlockMatrix | None:
        """A matrix in blocks of a GGUF type that kernels can compute with; None for any other tensor. Raises as `quantized`."""
        return None

    @abstractmethod
    def release(self) -> None:
        """Release the memory used for reading: pages of the mapped files, which are read again on demand. Changes to tensors of a mapped
        file are lost."""

    def mapped_memory(self) -> list[Bytes]:
        """The mapped files. Their memory changes with the files, so served weights must not refer to it."""
        return []

    def file_of(self, name: str) -> str:
        """Name of the file that holds a tensor, for messages."""
        return self.path.name

    def _check_finite(self, name: str, tensor: "torch.Tensor") -> None:
        import torch

        if not tensor.is_floating_point() or not tensor.numel():
            return
        values = tensor.float() if tensor.element_size() == 1 else tensor
        # NaN and infinity show in the sum, which is quick to compute. So does an overflow of finite values; then the extremes decide.
        if bool(torch.isfinite(values.sum(dtype=torch.float32))):
            return
        if not all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(values)):
            raise ModelError(f"{self.file_of(name)}: tensor {name} contains NaN or infinity")

    def _check_zero(self, name: str, tensor: "torch.Tensor") -> None:
        if tensor.ndim < 2 or not tensor.numel():
            return
        values = tensor.float() if tensor.element_size() == 1 and tensor.is_floating_point() else tensor
        if not bool(values[0].any()) and not bool(values.any()):
            raise ModelError(f"{self.file_of(name)}: tensor {name} {list(tensor.shape)} is zero-filled")

    def _check_matrix(self, name: str, matrix: QuantizedMatrix) -> QuantizedMatrix:
        self._check_finite(name, matrix.scales)
        if matrix.minimums is not None:
            self._check_finite(name, matrix.minimums)
        if not bool(matrix.scales.any()) and (matrix.minimums is None or not bool(matrix.minimums.any())):
            raise ModelError(f"{self.file_of(name)}: tensor {name} {list(matrix.shape)} is zero-filled")
        return matrix
