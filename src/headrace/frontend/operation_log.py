"""What every replica must have been told, in order.

Owns the one truth about orders that change a replica's state for good: which weights and what they are called, whether generation is
paused, what memory was given back. Each order that holds is entered under the next id; the log keeps what still matters (the sum of the
orders, `Standing`), and says what a replica has to be told to come from one such sum to another. An order is entered when it is decided,
before replicas carry it out, so that one which begins a new life meanwhile has it from here. Does not send anything (`weight_control`).
Adapters in memory are `adapters`' own, the level of the log is the tokenizer manager's. Event loop only.
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
    """Weights that came while serving. number: of the order. fingerprint: of the files they were read from.

    update: None when they were pushed (as tensors, or over a process group): whoever has them not cannot get them.
    """

    number: int
    update: UpdateFromDisk | None
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Standing:
    """The sum of the orders. weights: None = those of the start."""

    weights: Weights | None = None
    version: str = FIRST_VERSION
    pause: PauseMode | None = None
    released: frozenset[MemoryTag] = frozenset()

    def orders_after(self, told: "Standing") -> list[WeightOperation]:
        """What brings a replica that has been told `told` to here. Raises ExecutionError when nothing can."""
        orders: list[WeightOperation] = []
        released = told.released
        if self.weights != told.weights:
            if self.weights is None or self.weights.update is None:
                raise ExecutionError(
                    "the weights that serve were pushed, and only the replicas that got them have them"
                )
            if released:
                # Weights that are given back cannot be replaced.
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
    """The same weights under another name, and without a word to the requests that run."""
    return UpdateFromDisk(update.model_path, update.load_format, False, version)


@dataclass(slots=True)
class OperationLog:
    """See the module's text. head: the id of the last order; 0 = none yet."""

    head: int = 0
    standing: Standing = field(default_factory=Standing)

    @property
    def can_be_told(self) -> bool:
        """False while a new life cannot get the weights that serve."""
        return self.standing.weights is None or self.standing.weights.update is not None

    def enter(self, operation: WeightOperation, fingerprint: str = "") -> int:
        """An order holds from now on; its id."""
        self.head += 1
        self.standing = self._after(operation, fingerprint)
        logger.debug("operation %d: %s", self.head, type(operation).__name__)
        return self.head

    def take_back(self, before: Standing) -> None:
        """The weights and their name are those of `before` again: nobody that lives has others."""
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
