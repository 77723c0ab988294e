"""Starts two raylets, runs verl's command on them, and tells on how many nodes its workers were."""

import subprocess
import sys
import threading
import time

import ray
from ray.cluster_utils import Cluster

cluster = Cluster(
    initialize_head=True,
    head_node_args={"num_cpus": 12, "num_gpus": 1, "object_store_memory": 100_000_000},
)
cluster.add_node(num_cpus=12, num_gpus=1, object_store_memory=100_000_000)
ray.init(address=cluster.address, namespace="watch", logging_level="ERROR")
nodes = set()


def watch():
    while True:
        for actor in ray._private.state.actors().values():
            if "WorkerDict" in actor["ActorClassName"] and actor["Address"]["NodeID"]:
                nodes.add(actor["Address"]["NodeID"])
        time.sleep(1)


threading.Thread(target=watch, daemon=True).start()
address = f"+ray_kwargs.ray_init.address='{cluster.address}'"
command = [sys.executable, "-m", "verl.trainer.main_ppo", *sys.argv[1:], address]
code = subprocess.run(command, check=False).returncode
print(f"\nWORKERS ON {len(nodes)} NODES", flush=True)
ray.shutdown()
cluster.shutdown()
sys.exit(code)
