"""Weights travel from the learner's ranks to the replicas, verified before the version moves.

offer.py       what is handed over: `Offer`, the two ends' protocols, the errors
transport.py   the driver's end: `open_transport`, `Transport.publish`
inproc.py, shm.py, cuda_ipc.py, dist.py, disk.py        the ways
ledger.py      who may touch the shared buffer; delta.py: what changed between two versions
"""

from nanorl.weights.offer import (
    BaseVersionMissing,
    Offer,
    ReadersBusy,
    WeightReceiver,
    WeightSender,
    WeightsRefused,
)
from nanorl.weights.transport import PublishReport, Transport, open_transport, weight_bytes

__all__ = [
    "BaseVersionMissing",
    "Offer",
    "PublishReport",
    "ReadersBusy",
    "Transport",
    "WeightReceiver",
    "WeightSender",
    "WeightsRefused",
    "open_transport",
    "weight_bytes",
]
