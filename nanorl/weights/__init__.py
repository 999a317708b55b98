"""Weights travel from the learner's ranks to the replicas, verified before the version moves.

offer.py       what is handed over: `Offer`, the two ends' protocols, the errors
transport.py   the driver's end: `open_transport`, `Transport.publish`
shm.py, cuda_ipc.py, dist.py, disk.py        the ways
ledger.py      who may touch the shared buffer; delta.py: what changed between two versions

Within one process nothing travels: nanorl/colocation.py copies from engine to engine.
"""
