"""Several processes that run one model together: tensor and pipeline parallelism.

- base.py: what a rank is to the layers (`Shard`), which attention heads it computes, which layers it has (`Stage`), and what it says to the
  others (`Group`, links). Read it first.
- rank.py: both parts, and the group of all (`Rank`).
- one_host.py: the group of ranks on one host, over shared memory, and links between their stages, over sockets.
- two_halves.py: halves of a step that take turns while the ranks sum.
- device_group.py: what layers exchange where each rank has a GPU.
- network.py: the group of ranks on several hosts, over TCP, who may join it, and links between their stages; network_leader.py and
  network_follower.py are its sides.
"""
