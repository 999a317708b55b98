"""Weights travel from the learner's ranks to the replicas, verified before the version moves.

offer.py       what is handed over: `Offer`, the two ends' protocols, the errors
transport.py   the driver's end: `open_transport`, `Transport.publish`
shm.py, cuda_ipc.py, dist.py, disk.py        the ways
in_process.py  two engines of one process that share no weights: copied from one to the other
version_ledger.py      who may touch the shared buffer; delta.py: what changed between two versions

On a CPU both engines of a synchronous run read one set of weights, and nothing travels at all:
nanorl/learner.py.
"""
