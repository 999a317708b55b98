"""Who may touch a shared buffer of weights: one page of numbers at its beginning.

    word 0       the version that the buffer holds, plus 1; 0 while it is being written
    word 1 + i   the version that reader i may be reading, plus 1; 0 once it has answered

The transport, in the driver, enters a reader before it tells it to load, and strikes it out when it
has answered or is known to be dead. Senders refuse to write before every reader is struck out, so a
replica never reads two versions mixed; a receiver refuses a version that is not the buffer's.

Each word has one writer at a time, and messages between the processes order what they see.
"""

from __future__ import annotations

from nanorl.distributed.weights.offer import ReadersBusy, WeightsRefused

LEDGER_BYTES = 4096
MOST_READERS = LEDGER_BYTES // 8 - 1


class ReaderLedger:
    """The page at the beginning of `memory`."""

    def __init__(self, memory: memoryview) -> None:
        self._words = memory[:LEDGER_BYTES].cast("q")

    def readers(self) -> list[int]:
        """The readers that have not answered."""
        return [slot for slot in range(MOST_READERS) if self._words[1 + slot]]

    def enter(self, slot: int, version: int) -> None:
        self._words[1 + slot] = version + 1

    def strike_out(self, slot: int) -> None:
        self._words[1 + slot] = 0

    def begin_writing(self) -> None:
        """From now on the buffer holds no version. ReadersBusy while somebody may be reading."""
        if busy := self.readers():
            raise ReadersBusy(
                f"readers {busy} have not answered since the last version: wait for them, or end "
                "their processes and `Transport.remove` them; nothing was written"
            )
        self._words[0] = 0

    def finish_writing(self, version: int) -> None:
        self._words[0] = version + 1

    def require(self, version: int) -> None:
        """WeightsRefused unless the buffer holds this version, and whole."""
        if self._words[0] != version + 1:
            there = self._words[0] - 1
            found = f"version {there}" if there >= 0 else "a version that was not finished"
            raise WeightsRefused(
                f"version {version} was offered, but the shared buffer holds {found}; nothing was "
                "loaded"
            )
