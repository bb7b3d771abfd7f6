"""Without GPUs a replica is on one node. Here it is on as many as SPREAD_NODES says, as replicas are that want more GPUs than a node has."""

import os

if "SPREAD_NODES" in os.environ:
    from hpcrl.config.sections.tree import ConfigTree

    ConfigTree.engine_nodes = property(lambda _: int(os.environ["SPREAD_NODES"]))
