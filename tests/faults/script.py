"""The script of the cases that are started by a real launcher: what to run lies in the fault folder."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

from tests.faults import ranks

if __name__ == "__main__":
    ranks.fit(**pickle.loads(Path(os.environ["FAULT_FOLDER"], ranks.WORK).read_bytes()))
