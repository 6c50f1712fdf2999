"""The log of operations that every replica must have carried out, in order.

Owns the state that such operations leave for good: the weights and their version, whether generation is paused, and which memory is
released. Each operation is entered under the next id. The log keeps only the resulting state (`Standing`), and computes the operations that
bring a replica from one such state to another. An operation is entered when it is decided, before the replicas carry it out, so that a
replica that is restarted meanwhile gets it from here. Does not send anything (`weight_control` does), and does not own the adapters in
memory (`adapters`) or the log level (the tokenizer manager). Event loop only.
"""

from dataclasses import dataclass, field, replace

from headrace.errors import ExecutionError
from headrace.log import get_logger
from headrace.messages.weights import (
    ContinueGeneration,
    MemoryTag,
    PauseGeneration,
    PauseMode,
    ReleaseMemory,
    ResumeMemory,
    SetWeightVersion,
    UpdateFromDisk,
    UpdateFromDistributed,
    UpdateFromTensors,
    WeightOperation,
)

logger = get_logger(__name__)

FIRST_VERSION = "default"


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights that were loaded while serving. number: of the operation. fingerprint: of the files they were read from.

    update: None when they were pushed (as tensors, or over a process group), so that no other replica can get them later.
    """

    number: int
    update: UpdateFromDisk | None
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Standing:
    """The state after all operations. weights: None = those of the start."""

    weights: Weights | None = None
    version: str = FIRST_VERSION
    pause: PauseMode | None = None
    released: frozenset[MemoryTag] = frozenset()

    def orders_after(self, told: "Standing") -> list[WeightOperation]:
        """The operations that bring a replica from the state `told` to this one. Raises ExecutionError if that is impossible."""
        orders: list[WeightOperation] = []
        released = told.released
        if self.weights != told.weights:
            if self.weights is None or self.weights.update is None:
                raise ExecutionError(
                    "the current weights were pushed, so only the replicas that received them have them"
                )
            if released:
                # Released weights cannot be replaced.
                orders.append(ResumeMemory(tuple(sorted(released))))
                released = frozenset()
            orders.append(replace_version(self.weights.update, None))
        if self.version != told.version:
            orders.append(SetWeightVersion(self.version))
        if self.pause != told.pause:
            orders.append(ContinueGeneration() if self.pause is None else PauseGeneration(self.pause))
        if given := self.released - released:
            orders.append(ReleaseMemory(tuple(sorted(given))))
        if taken := released - self.released:
            orders.append(ResumeMemory(tuple(sorted(taken))))
        return orders


def replace_version(update: UpdateFromDisk, version: str | None) -> UpdateFromDisk:
    """The same update with another version name, without aborting requests."""
    return UpdateFromDisk(update.model_path, update.load_format, False, version)


@dataclass(slots=True)
class OperationLog:
    """See the module docstring. head: id of the last operation; 0 = none yet."""

    head: int = 0
    standing: Standing = field(default_factory=Standing)

    @property
    def can_be_told(self) -> bool:
        """False while a restarted replica cannot get the current weights."""
        return self.standing.weights is None or self.standing.weights.update is not None

    def enter(self, operation: WeightOperation, fingerprint: str = "") -> int:
        """Enter an operation, which is in force from now on. Returns its id."""
        self.head += 1
        self.standing = self._after(operation, fingerprint)
        logger.debug("operation %d: %s", self.head, type(operation).__name__)
        return self.head

    def take_back(self, before: Standing) -> None:
        """Restore the weights and version of `before`: no live replica has newer ones."""
        self.head += 1
        self.standing = replace(self.standing, weights=before.weights, version=before.version)

    def _after(self, operation: WeightOperation, fingerprint: str) -> Standing:
        standing = self.standing
        match operation:
            case UpdateFromDisk():
                version = operation.weight_version or standing.version
                return replace(standing, weights=Weights(self.head, operation, fingerprint), version=version)
            case UpdateFromTensors() | UpdateFromDistributed():
                version = operation.weight_version or standing.version
                return replace(standing, weights=Weights(self.head, None), version=version)
            case SetWeightVersion():
                return replace(standing, version=operation.new_version)
            case PauseGeneration():
                return replace(standing, pause=operation.mode)
            case ContinueGeneration():
                return replace(standing, pause=None)
            case ReleaseMemory():
                return replace(standing, released=standing.released | set(operation.tags))
            case ResumeMemory():
                return replace(standing, released=standing.released - set(operation.tags))
            case _:
                return standing
