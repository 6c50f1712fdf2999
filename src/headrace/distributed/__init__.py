"""Several processes that run one model together: tensor parallelism.

- base.py: what a rank is to the layers (`Shard`), and what it says to the others (`Group`). Read it first.
- heads.py: which attention heads a rank computes.
- shared_memory.py: the group of ranks on one host, over shared memory.
- network.py: the group of ranks on several hosts, over TCP; network_leader.py and network_follower.py are its sides, network_keys.py says who
  may join.
"""
