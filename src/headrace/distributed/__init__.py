"""Several processes that run one model together: tensor and pipeline parallelism.

- base.py: what a rank is to the layers (`Shard`), which attention heads it computes, and what it says to the others (`Group`). Read it first.
- stages.py: which layers a rank has (`Stage`), and what stages send to each other.
- rank.py: both, and the group of all (`Rank`).
- links.py: links between stages on one host, over sockets.
- shared_memory.py: the group of ranks on one host, over shared memory.
- device_group.py: what layers exchange where each rank has a GPU.
- network.py: the group of ranks on several hosts, over TCP, and links between their stages; network_leader.py and network_follower.py are its
  sides, network_keys.py says who may join.
"""
