"""What a process is among those that run one model: `Rank`."""

from dataclasses import dataclass, replace

from headrace.distributed.base import ALL_LAYERS, WHOLE, Group, Shard, Stage
from headrace.distributed.device_group import DeviceGroup


@dataclass(frozen=True, slots=True)
class Rank:
    """A process has a part (shard) of each layer of a stage.

    group: of all ranks of all stages, for plans and what comes between them; None if there is no other. Ranks are numbered stage by stage.
    devices: what their layers exchange, if each has a device; then it is the shard's group, too.
    """

    shard: Shard = WHOLE
    stage: Stage = ALL_LAYERS
    group: Group | None = None
    devices: DeviceGroup | None = None

    def on(self, devices: DeviceGroup) -> "Rank":
        """The same, whose layers talk to those of the others from device to device."""
        return replace(self, shard=replace(self.shard, group=devices), devices=devices)

    @property
    def number(self) -> int:
        """Among all ranks."""
        return 0 if self.group is None else self.group.rank

    @property
    def leads(self) -> bool:
        """Whether this is the rank that plans and samples."""
        return self.shard.leads and self.stage.is_first


ALONE = Rank()
"""One process that has all."""
