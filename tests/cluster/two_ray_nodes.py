"""A Ray cluster of two nodes on this machine, as a process of its own: prints its address, and ends with its standard input."""

import os
import sys

os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
cluster.add_node(num_cpus=2)
print(f"address {cluster.address}", flush=True)
sys.stdin.read()
cluster.shutdown()
